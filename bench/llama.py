"""The suite `llama`: the layers of Llama-3-8B and 70B at many M, every rung side by side; losses are kept like wins."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench import llama_report, without_gpu
from bench.builds import build_all
from bench.cases import CASES, Case, Outputs, draw_inputs
from bench.device import current_gpu
from bench.problem import Problem, run_problem
from bench.results import ResultFile, Row
from bench.settings import Settings
from bench.shapes import LLAMA_NK, Shape
from bench.suite_epilogue import table_of

NK_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
# the most telling first, for a budget that ends early
MS_IN_ORDER = (4096, 16, 1024, 128, 8192, 1, 2048, 512, 64, 256, 16384)


def _bias_silu_residual(accum: Tensor, bias: Tensor, residual: Tensor) -> Outputs:
    return (F.silu(accum + bias) + residual,)


def _eager_bias_silu_residual(A: Tensor, B: Tensor, bias: Tensor, residual: Tensor) -> Outputs:
    return (F.silu(torch.addmm(bias, A, B)) + residual,)


LLAMA_CASES: tuple[Case, ...] = (
    CASES["bias_gelu_tanh"],
    Case(
        name="bias_silu_residual",
        operands={"bias": "row", "residual": "tile"},
        function=_bias_silu_residual,
        eager=_eager_bias_silu_residual,
        cublaslt="cuBLASLt has no SiLU epilogue",
    ),
    CASES["int8_dequant_bias"],
    CASES["fp8_dequant_bias_gelu_tanh"],
)
REFUSED = dict.fromkeys(("max_autotune", "cutlass_inductor"), "left out for its compile time")


def problems(settings: Settings) -> list[Problem]:
    """Every problem of the suite that the settings ask for, the most telling first.

    The cases of a shape go to the parts in turns, so that two or four parts have no kernel to build in common.
    """
    part, parts = settings.part
    return list(_all_problems(settings))[part - 1 :: parts]


def _all_problems(settings: Settings) -> Iterator[Problem]:
    for M in MS_IN_ORDER:
        if not settings.ms or M in settings.ms:
            for N, K in (*LLAMA_NK[:4], *NK_70B):
                yield from (Problem(case, Shape(M, N, K)) for case in settings.cases)


def run(settings: Settings, console: Console) -> int:
    """Measure, print and write; 1 when gemmgen gave a wrong answer or none."""
    if not torch.cuda.is_available():
        return without_gpu.run(settings, console)
    device, deadline = current_gpu(), time.perf_counter() + settings.budget_s
    results = _result_file(settings)
    left = problems(settings)[: 2 if settings.quick else None]
    for group in _groups(left):
        build_s = 0.0 if time.perf_counter() > deadline else _built(group, settings, console)
        for problem in group:
            if time.perf_counter() > deadline:
                break
            tuning = _tuned(problem, settings, console) | {"build_share_s": build_s} if settings.tuned else {}
            rows = run_problem(problem, settings, REFUSED, device)
            results.add(row | (tuning if row["rung"] == "gemmgen" else {}) for row in rows)
            console.print(table_of(f"{problem}", rows))
            left.remove(problem)
    if left:
        console.print(f"budget of {settings.budget_s:.0f} s is over, not measured:", *map(str, left))
    return _conclude(results, console)


def _result_file(settings: Settings) -> ResultFile:
    """Of this run; parts that start in the same second have different names."""
    part, parts = settings.part
    label = f"-{part}of{parts}" if parts > 1 else ""
    return ResultFile(settings.out, "llama", {**settings.environment, "tuned": settings.tuned}, label)


def _groups(todo: list[Problem]) -> list[list[Problem]]:
    """Problems of one M: their kernels are built together before any of them is timed."""
    return [[p for p in todo if p.shape.M == M] for M in dict.fromkeys(p.shape.M for p in todo)]


def _built(group: list[Problem], settings: Settings, console: Console) -> float:
    """Build everything that gemmgen runs or tries; the seconds that it took, shared out among the problems."""
    if not _has_gemmgen(settings):
        return 0.0
    from bench import gemmgen_api
    from gemmgen import jit
    from gemmgen.device import target_of

    target, started = target_of(torch.device("cuda", torch.cuda.current_device())), time.perf_counter()
    if settings.tuned:  # in one batch: the few kernels of one problem leave cores idle
        sources = [gemmgen_api.sources_to_tune(p.case, p.shape, settings.tuned, target) for p in group]
        jit.build(list(itertools.chain.from_iterable(sources)), on_error="return")
    else:
        build_all(group, target.arch.name, console)
    seconds = time.perf_counter() - started
    console.print(f"built the kernels of {len(group)} problems in {seconds:.1f} s")
    return round(seconds / len(group), 3)


def _tuned(problem: Problem, settings: Settings, console: Console) -> Row:
    """Measure gemmgen's ways; what that took, and what the model's choice would lose."""
    if not _has_gemmgen(settings):
        return {}
    from bench import gemmgen_api

    op, inputs = gemmgen_api.gemm(problem.case), draw_inputs(problem.case, problem.shape)
    torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        entry = gemmgen_api.tune(op, inputs, settings.tuned)
    except Exception as error:  # the problem is run untuned, and counted among those without a figure
        console.print(f"{problem} is not tuned: {error}", markup=False)
        return {"tune_s": None, "heuristic_loss": None, "tune_failure": f"{type(error).__name__}: {error}"[:200]}
    seconds = time.perf_counter() - started
    console.print(f"{problem}: {entry}", markup=False)
    return {"tune_s": round(seconds, 3), **gemmgen_api.tuned_times(op, inputs, entry)}


def _has_gemmgen(settings: Settings) -> bool:
    return "gemmgen" in {rung.name for rung in settings.rungs}


def _conclude(results: ResultFile, console: Console) -> int:
    if results.rows:
        print(llama_report.full(results.rows))
    console.print(f"written: {results.path}")
    failed: list[Row] = [row for row in results.rows if row["rung"] == "gemmgen" and row["reason"]]
    for row in failed:
        console.print(f"gemmgen failed: {row['case']} {row['M']}x{row['N']}x{row['K']}: {row['reason']}", markup=False)
    return 1 if failed else 0
