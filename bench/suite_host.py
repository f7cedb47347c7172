"""The suite `host`: what a call costs the CPU, from Python to the launch, on a problem that keeps no GPU busy."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gemmgen as gg
from bench.results import ResultFile, Row
from bench.settings import Settings
from gemmgen import dispatcher, runtime, ways

M, N, K = 128, 256, 64
CALLS = 200  # between two waits for the GPU: fewer than a queue of launches holds
ROUNDS = 40
BASE = "F.linear"

MEANINGS = {
    "gemmgen": "op(x, w, bias=b), fused bias + GELU",
    "gemmgen linear": "gg.linear(x, weight, op, bias=b)",
    "gemmgen module": "gg.nn.Linear",
    "gemmgen reduction": "op(x, w, bias=b), fused bias + ReLU + column sums",
    "gemmgen split": "op(x, w, bias=b), split: cuBLAS, then the pointwise kernel",
    "gemmgen python": "op(x, w, bias=b) without the C++ dispatcher",
    "gemmgen split python": "the split way without the C++ dispatcher",
    "F.linear": "F.linear(x, weight, b)",
    "F.linear + F.gelu": "the same function, unfused",
    "torch.empty": "the result alone",
    "launch": "the kernel's launcher alone",
}


def run(settings: Settings, console: Console) -> int:
    """Measure, print and write."""
    if not torch.cuda.is_available():
        console.print("Needs a GPU: the suite `host` times launches.")
        return 0
    dispatcher.build()  # ops that are made from here on are dispatched by C++
    with torch.no_grad():
        samples = measured(calls(), 10 if settings.quick else ROUNDS)
    rows = [_row(name, taken, statistics.median(samples[BASE])) for name, taken in samples.items()]
    extents = {"M": M, "N": N, "K": K}
    results = ResultFile(settings.out, "host", {**settings.environment, "cores": os.cpu_count(), **extents})
    results.add(rows)
    console.print(table_of(rows))
    console.print(f"written: {results.path}")
    return 0


def calls() -> dict[str, Callable[[], object]]:
    """What is timed, by name; each has been called, so that its plan is made."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator, device="cuda") * 2 - 1).bfloat16()

    x, weight, bias = drawn(M, K), drawn(N, K), drawn(N)
    w, config = weight.t(), gg.GemmConfig("sm90", (64, 128, 64), (1, 1), "pingpong")
    op, sums = (gg.Gemm(e, config=config) for e in (gg.library.bias_gelu_tanh, gg.library.bias_relu_column_sums))
    split = gg.Gemm(gg.library.bias_gelu_tanh)  # each has options that no other has, and so is an op of its own
    with mock.patch.dict(os.environ, GEMMGEN_DISPATCHER="0"):  # ops that are made without the C++ dispatcher
        slow = gg.Gemm(gg.library.bias_gelu_tanh, config=config, tune="off")
        slow_split = gg.Gemm(gg.library.bias_gelu_tanh, tune="off")
    chosen = ways.Selection((ways.SPLIT,), "the suite measures it", ())
    with mock.patch.object(runtime, "selected", lambda *_: chosen):  # plans are kept
        for pinned in (split, slow_split):
            pinned(x, w, bias=bias)
            assert pinned._op.runner.plan(x, w, {"bias": bias}).way == "split"
    module = gg.nn.Linear(K, N, epilogue=op, device="cuda", dtype=torch.bfloat16)
    found: dict[str, Callable[[], object]] = {
        "gemmgen": lambda: op(x, w, bias=bias),
        "gemmgen linear": lambda: gg.linear(x, weight, op, bias=bias),
        "gemmgen module": lambda: module(x),
        "gemmgen reduction": lambda: sums(x, w, bias=bias),
        "gemmgen split": lambda: split(x, w, bias=bias),
        "gemmgen python": lambda: slow(x, w, bias=bias),
        "gemmgen split python": lambda: slow_split(x, w, bias=bias),
        "F.linear": lambda: F.linear(x, weight, bias),
        "F.linear + F.gelu": lambda: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        "torch.empty": lambda: torch.empty((M, N), dtype=torch.bfloat16, device="cuda"),
        "launch": _launch(op, x, w, bias),
    }
    for call in found.values():
        call()
        call()
    return found


def _launch(op: gg.Gemm, x: Tensor, w: Tensor, bias: Tensor) -> Callable[[], object]:
    """The launch of a call, its arguments being filled in already."""
    from gemmgen import plan

    planned = op._op.runner.plan(x, w, {"bias": bias})
    launches: list[tuple[Any, ...]] = []
    recorder = SimpleNamespace(run=lambda args, *rest: launches.append((type(args).from_buffer_copy(args), *rest)))
    results = plan.run(replace(planned, kernel=recorder, spare=[]), (x, w), {"bias": bias}, x.device)
    return lambda alive=results: planned.kernel.run(*launches[0])  # the results' memory is written again


def measured(timed: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of host time per call, one sample a round, interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, call in timed.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return samples


def _row(name: str, samples: Sequence[float], base_us: float) -> Row:
    median_us = statistics.median(samples)
    return {
        "metric": name,
        "median_us": round(median_us, 2),
        "min_us": round(min(samples), 2),
        "max_us": round(max(samples), 2),
        "n": len(samples),
        "of_linear": round(median_us / base_us, 3),
    }


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title=f"host time of a call, (M, N, K) = ({M}, {N}, {K}), bf16", title_justify="left")
    for column in ("metric", "median us", "min", "max", "of F.linear", "what"):
        table.add_column(column, justify="left" if column in ("metric", "what") else "right")
    for row in rows:
        numbers = (f"{row[key]:.2f}" for key in ("median_us", "min_us", "max_us", "of_linear"))
        table.add_row(row["metric"], *numbers, MEANINGS[row["metric"]])
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as the README shows them."""
    lines = ["| call | host us | of F.linear |", "| --- | ---: | ---: |"]
    lines += [f"| {MEANINGS[row['metric']]} | {row['median_us']:.1f} | {row['of_linear']:.2f} |" for row in rows]
    return "\n".join(lines)
