"""The elementwise pass of a backward alone, beside a copy that moves as many bytes in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.table import Table

import gemmgen as gg
from bench.results import Row
from bench.settings import Settings
from gemmgen.backward import ACCUM, plan_backward
from gemmgen.dtypes import DType
from gemmgen.ir.graph import Graph
from gemmgen.ops import register_elementwise
from gemmgen.pipeline import graph_of
from gemmgen.problem import Extents
from gemmgen.timing import measure

M, N = 8192, 14336
TILES = 3  # read: the cotangent and the preactivation; written: the gradient of accum


def backward_graph() -> Graph:
    """bf16 gradients of accum and bias of bias + tanh-GELU."""
    graph = plan_backward(graph_of(gg.library.bias_gelu_tanh), [ACCUM, "bias"]).backward
    return replace(graph, results=tuple(replace(result, dtype=DType.BF16) for result in graph.results))


def rows(settings: Settings) -> list[Row]:
    """The pass and the copy, with their bandwidth, and the share of the copy's that the pass reaches."""
    graph, extents = backward_graph(), Extents(M, N, 0, 1, False)
    op = register_elementwise(graph)
    tiles = {p.name: torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for p in graph.parameters}
    source = torch.randn(TILES * M * N // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    calls = {"gemmgen": lambda: op(extents, tiles), "copy": lambda: target.copy_(source)}
    timings = measure(calls, settings.rounds, min_rounds=settings.min_rounds)
    moved = TILES * M * N * 2
    return [
        {
            "case": "elementwise_pass", "tokens": M, "hidden": None, "inner": N, "rung": rung, "phase": "pass",
            "median_us": round(timing.median_us, 3), "p10_us": round(timing.p10_us, 3),
            "p90_us": round(timing.p90_us, 3), "n": len(timing.samples),
            "tb_per_s": round(moved / timing.median_us / 1e6, 3),
            "of_copy": round(timings["copy"].median_us / timing.median_us, 3), "reason": None,
        }
        for rung, timing in timings.items()
    ]  # fmt: skip


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title=f"gradients of bias + tanh-GELU over [{M}, {N}] bf16", title_justify="left")
    for column in ("rung", "us", "p10", "p90", "TB/s", "of copy"):
        table.add_column(column, justify="left" if column == "rung" else "right")
    for row in rows:
        numbers = (f"{row[key]:.1f}" for key in ("median_us", "p10_us", "p90_us"))
        table.add_row(row["rung"], *numbers, f"{row['tb_per_s']:.2f}", f"{row['of_copy']:.1%}")
    return table
