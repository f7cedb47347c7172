"""The suite `longtail`: the prompt lengths of real requests as M through one Llama-3-8B layer, in a shuffled order.

Thousands of different M: where a rung tunes or compiles for each of them, this shows it. Every rung serves the same
requests in turns; the total time on the GPU counts, and the longest that a call kept the host.
"""

from __future__ import annotations

import csv
import functools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import report
from bench.results import ResultFile, Row
from bench.rungs import has_triton
from bench.settings import Settings
from gemmgen.timing import quantile

TOKENS = Path(__file__).parent / "data" / "prompt_tokens.csv"
CHUNK = 40  # requests that a rung serves before the next has its turn
QUICK_REQUESTS = 80
MAX_M = 16384

Operands = Mapping[str, Tensor]
Serve = Callable[[int], object]
Kernel = tuple[str, object]  # an epilogue, and a config as far as it is compiled


@dataclass(frozen=True)
class Gemm:
    """One product of the layer, with a bias and what comes after it."""

    name: str
    N: int
    K: int
    epilogue: str
    eager: Callable[..., Tensor]
    has_residual: bool = False


def _linear_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias))


def _linear_silu_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) + residual


LAYER = (
    Gemm("qkv", 6144, 4096, "bias", F.linear),
    Gemm("o", 4096, 4096, "bias_silu_residual", _linear_silu_residual, has_residual=True),
    Gemm("up_gate", 28672, 4096, "bias_silu", _linear_silu),
    Gemm("down", 4096, 14336, "bias_silu_residual", _linear_silu_residual, has_residual=True),
)


def requests(seed: int = 0, path: Path = TOKENS) -> list[int]:
    """The prompt lengths of all requests, shuffled."""
    with path.open() as file:
        rows = [(int(row["prompt_tokens"]), int(row["requests"])) for row in csv.DictReader(file)]
    lengths = [tokens for tokens, count in rows for _ in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


@dataclass
class Served:
    """What a rung has done so far: GPU time of its chunks, and host time of each call."""

    gpu_ms: float = 0.0
    requests: int = 0
    host_us: list[float] = field(default_factory=list)


class Inputs:
    """Activations for the largest M, of which a request takes the first rows; weights, biases, residuals."""

    def __init__(self, largest: int, device: str = "cuda", layer: Sequence[Gemm] = LAYER):
        generator = torch.Generator(device).manual_seed(0)

        def uniform(*shape: int) -> Tensor:
            drawn = torch.rand(shape, device=device, generator=generator, dtype=torch.bfloat16)
            return drawn.mul_(2).sub_(1)

        self.x = {K: uniform(largest, K) for K in {gemm.K for gemm in layer}}
        self.weight = {gemm.name: uniform(gemm.N, gemm.K) for gemm in layer}
        self.bias = {gemm.name: uniform(gemm.N) for gemm in layer}
        self.residual = {gemm.name: uniform(largest, gemm.N) for gemm in layer if gemm.has_residual}

    def of(self, gemm: Gemm, M: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """x `[M, K]`, the weight `[N, K]`, and the epilogue's operands."""
        operands = {"bias": self.bias[gemm.name]}
        if gemm.has_residual:
            operands["residual"] = self.residual[gemm.name][:M]
        return self.x[gemm.K][:M], self.weight[gemm.name], operands


# Rungs: each makes the calls of one request


def _serving(functions: Mapping[str, Callable[..., object]], inputs: Inputs, served: Served) -> Serve:
    def serve(M: int) -> None:
        for gemm in LAYER:
            x, weight, operands = inputs.of(gemm, M)
            started = time.perf_counter()
            functions[gemm.name](x, weight, **operands)
            served.host_us.append((time.perf_counter() - started) * 1e6)
        served.requests += 1

    return serve


def _gemmgen() -> dict[str, Any]:
    import gemmgen as gg

    return {gemm.name: gg.Gemm(getattr(gg.library, gemm.epilogue)) for gemm in LAYER}


def _gemmgen_functions(ops: Mapping[str, Any]) -> dict[str, Callable[..., object]]:
    def through(op: Any) -> Callable[..., object]:
        return lambda x, weight, **operands: op(x, weight.t(), **operands)

    return {name: through(op) for name, op in ops.items()}


def _eager_functions() -> dict[str, Callable[..., object]]:
    return {gemm.name: gemm.eager for gemm in LAYER}


def _compiled_functions() -> dict[str, Callable[..., object]]:
    torch._dynamo.reset()
    return {gemm.name: torch.compile(gemm.eager, dynamic=True, fullgraph=True) for gemm in LAYER}


# Running


def run(settings: Settings, console: Console) -> int:
    """Serve the requests by every rung, print and write; 1 when there is no answer."""
    if not torch.cuda.is_available():
        console.print(f"longtail needs a GPU; {len(requests())} requests of {len(set(requests()))} lengths are ready.")
        return 0
    lengths = requests()[: QUICK_REQUESTS if settings.quick else None]
    inputs = Inputs(min(MAX_M, max(lengths)))
    ops = _gemmgen()
    prepared = _prepare(ops, inputs, lengths, settings, console)
    rungs = {"gemmgen": _gemmgen_functions(ops), "eager": _eager_functions()}
    if has_triton():
        rungs["compiled"] = _compiled_functions()
    served = {name: Served() for name in rungs}
    serving = {name: _serving(functions, inputs, served[name]) for name, functions in rungs.items()}
    _warm_up(serving, served, lengths)
    replay(serving, served, lengths, settings.budget_s)
    rows = rows_of(served, prepared)
    results = ResultFile(settings.out, "longtail", settings.environment)
    results.add(rows)
    console.print(table_of(rows))
    console.print(break_even(rows))
    console.print(f"written: {results.path}")
    return 0


def _prepare(
    ops: Mapping[str, Any], inputs: Inputs, lengths: Sequence[int], settings: Settings, console: Console
) -> Row:
    """Everything that gemmgen builds or measures before it serves. No M has its plan made here."""
    started, tried = time.perf_counter(), set()
    if settings.tuned:
        for M in representatives(lengths):
            for gemm in LAYER:
                x, weight, operands = inputs.of(gemm, M)
                entry = ops[gemm.name].tune(x, weight.t(), most=settings.tuned, **operands)
                tried |= _kernels_in(gemm, [row.way for row in entry.rows])
                console.print(f"{gemm.name}: {entry}", markup=False)
    tuned = time.perf_counter()
    served = _build(ops, inputs, sorted(set(lengths)))
    return {
        "kernels": len(served),
        "kernels_built": len(served | tried),
        "tuned": settings.tuned,
        "tune_s": round(tuned - started, 2),
        "prepare_s": round(time.perf_counter() - started, 2),
    }


def _kernels_in(gemm: Gemm, some: Iterable[Any]) -> set[Kernel]:
    """The compiled kernels among some ways: rasters and swizzles of one are one."""
    from gemmgen import ways

    return {(gemm.epilogue, way.config.compiled()) for way in some if isinstance(way, ways.Fused)}


def _build(ops: Mapping[str, Any], inputs: Inputs, lengths: Sequence[int]) -> set[Kernel]:
    """Build the kernels of all lengths, in parallel; which they are."""
    from gemmgen import jit

    sources = {}
    for gemm in LAYER:
        runner = ops[gemm.name]._op.runner
        for M in lengths:
            x, weight, operands = inputs.of(gemm, M)
            call = runner.tunable(x, weight.t(), operands)
            way = runner.selection(call.binding, call.target).ways[0]
            for kernel in _kernels_in(gemm, [way]) - sources.keys():
                sources[kernel] = way.source(call.binding, call.target.arch)
    jit.build(list(sources.values()), on_error="return")
    return set(sources)


def representatives(lengths: Iterable[int]) -> list[int]:
    """For each bucket of M the median of the lengths in it."""
    from gemmgen.tuned import bucket_of

    buckets: dict[int, list[int]] = {}
    for M in sorted(lengths):
        buckets.setdefault(bucket_of(M), []).append(M)
    return [members[len(members) // 2] for members in buckets.values()]


def _warm_up(serving: Mapping[str, Serve], served: Mapping[str, Served], lengths: Sequence[int]) -> None:
    for name, serve in serving.items():
        for M in lengths[:8]:
            serve(M)
        served[name].host_us.clear()
        served[name].requests = 0
    torch.cuda.synchronize()


def replay(
    serving: Mapping[str, Serve],
    served: Mapping[str, Served],
    lengths: Sequence[int],
    budget_s: float,
    timed: Callable[[Callable[[], None]], float] | None = None,
) -> None:
    """Serve chunks of requests by every rung in turn, each chunk in another order of the rungs."""
    timed = timed or _gpu_ms
    order, generator, deadline = list(serving), random.Random(1), time.perf_counter() + budget_s
    for chunk in _chunks(lengths):
        if time.perf_counter() > deadline:
            return
        generator.shuffle(order)
        for name in order:
            served[name].gpu_ms += timed(functools.partial(_serve_all, serving[name], chunk))


def _serve_all(serve: Serve, chunk: Sequence[int]) -> None:
    for M in chunk:
        serve(M)


def _chunks(lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(lengths), CHUNK):
        yield lengths[start : start + CHUNK]


def _gpu_ms(call: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


# Reporting


def rows_of(served: Mapping[str, Served], prepared: Row) -> list[Row]:
    """One row for each rung."""
    rows = []
    for name, done in served.items():
        host = sorted(done.host_us) or [0.0]
        row = {
            "rung": name,
            "requests": done.requests,
            "total_ms": round(done.gpu_ms, 1),
            "ms_per_request": round(done.gpu_ms / max(1, done.requests), 4),
            "host_p50_us": round(quantile(host, 0.5), 1),
            "host_p99_us": round(quantile(host, 0.99), 1),
            "worst_call_ms": round(host[-1] / 1e3, 2),
            "host_s": round(sum(host) / 1e6, 2),
        }
        rows.append(row | (prepared if name == "gemmgen" else {}))
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """The rows for the terminal."""
    columns = ("rung", "requests", "total_ms", "ms_per_request", "host_p50_us", "host_p99_us", "worst_call_ms",
               "kernels", "kernels_built", "tune_s", "prepare_s")  # fmt: skip
    table = Table(title="longtail: real prompt lengths through a Llama-3-8B layer", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "rung" else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as the README shows them, and what they come to."""
    ours, *_ = (row for row in rows if row["rung"] == "gemmgen")
    header = ["rung", "requests", "total s", "gemmgen's share of it", "ms a request", "host p50 us", "host p99 us",
              "longest call ms", "kernels in use", "kernels built", "tuning s", "tuning and building s"]  # fmt: skip
    lines = [
        [
            row["rung"],
            str(row["requests"]),
            f"{row['total_ms'] / 1e3:.2f}",
            f"{ours['ms_per_request'] / row['ms_per_request']:.3f}" if row["ms_per_request"] else "-",
            f"{row['ms_per_request']:.3f}",
            f"{row['host_p50_us']:.1f}",
            f"{row['host_p99_us']:.1f}",
            f"{row['worst_call_ms']:.2f}",
            *(str(row.get(key, "-")) for key in ("kernels", "kernels_built", "tune_s", "prepare_s")),
        ]
        for row in rows
    ]
    everything = len(requests())
    text = (
        f"Prompt lengths of {ours['requests']} of {everything} real requests as M through the four products of a "
        "Llama-3-8B layer, every rung in turns. Host times and the longest call are of single products, after a "
        "warm-up."
    )
    return f"{text}\n\n{report.table(header, lines)}\n\n{break_even(rows)}."


def break_even(rows: Sequence[Row]) -> str:
    """After how many requests what was prepared is paid back, against the fastest other rung."""
    by_rung = {row["rung"]: row for row in rows}
    ours = by_rung.pop("gemmgen")
    if not by_rung:
        return "No other rung was served"
    fastest = min(by_rung.values(), key=lambda row: row["ms_per_request"])
    saved_ms = fastest["ms_per_request"] - ours["ms_per_request"]
    cost = f"{ours['prepare_s']:.1f} s of building and measuring"
    if saved_ms <= 0:
        return f"{cost} never pay: {fastest['rung']} is faster by {-saved_ms:.4f} ms for each request"
    return f"{cost} pay after {1e3 * ours['prepare_s'] / saved_ms:.0f} requests, {saved_ms:.4f} ms saved for each"
