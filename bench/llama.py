"""The suite `llama`: the layers of Llama-3-8B and 70B at many M, every rung side by side; losses are kept like wins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench import report, without_gpu
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
REFUSED = {"max_autotune": "left out for its compile time"}
NOT_IN_TRITON = {"bias_silu_residual": {"triton": "the plain Triton kernel has no such case"}}


def problems(settings: Settings) -> Iterator[Problem]:
    """Every problem of the suite that the settings ask for, the most telling first."""
    for M in MS_IN_ORDER:
        if not settings.ms or M in settings.ms:
            for N, K in (*LLAMA_NK[:4], *NK_70B):
                yield from (Problem(case, Shape(M, N, K)) for case in LLAMA_CASES)


def run(settings: Settings, console: Console) -> int:
    """Measure, print and write; 1 when gemmgen gave a wrong answer or none."""
    if not torch.cuda.is_available():
        return without_gpu.run(replace(settings, cases=LLAMA_CASES), console)
    device, started = current_gpu(), time.perf_counter()
    results = ResultFile(settings.out, "llama", settings.environment)
    todo = list(problems(settings))[: 2 if settings.quick else None]
    for group in _groups(todo):
        if time.perf_counter() - started > settings.budget_s:
            console.print(f"budget of {settings.budget_s:.0f} s is over, not measured:", *map(str, group))
            continue
        tuning = _prepared(group, settings, console)
        for problem in group:
            refused = REFUSED | NOT_IN_TRITON.get(problem.case.name, {})
            rows = run_problem(problem, settings, refused, device)
            results.add(row | (tuning.get(problem, {}) if row["rung"] == "gemmgen" else {}) for row in rows)
            console.print(table_of(f"{problem}", rows))
    return _conclude(results, console)


def _groups(todo: list[Problem]) -> list[list[Problem]]:
    """Problems of one M: their kernels are built together before any of them is timed."""
    return [[p for p in todo if p.shape.M == M] for M in dict.fromkeys(p.shape.M for p in todo)]


def _prepared(group: list[Problem], settings: Settings, console: Console) -> dict[Problem, Row]:
    """Build, or tune, what gemmgen runs; what each problem's tuning took, and what the model's choice would lose."""
    if "gemmgen" not in {rung.name for rung in settings.rungs}:
        return {}
    from gemmgen.arch import arch_of_capability

    if settings.tuned:
        return {problem: _tuned(problem, settings.tuned, console) for problem in group}
    arch = arch_of_capability(torch.cuda.get_device_capability(), torch.cuda.get_device_name())
    build_all(group, arch.name, console)
    return {}


def _tuned(problem: Problem, most: int, console: Console) -> Row:
    from bench import gemmgen_api

    op, inputs, started = gemmgen_api.gemm(problem.case), draw_inputs(problem.case, problem.shape), time.perf_counter()
    entry = gemmgen_api.tune(op, inputs, most)
    seconds = time.perf_counter() - started
    console.print(f"{problem}: {entry}")
    return {"tune_s": round(seconds, 2), "heuristic_loss": gemmgen_api.heuristic_loss(op, inputs, entry)}


def _conclude(results: ResultFile, console: Console) -> int:
    report.print_report(results.rows)
    console.print(f"written: {results.path}")
    failed: list[Row] = [row for row in results.rows if row["rung"] == "gemmgen" and row["reason"]]
    for row in failed:
        console.print(f"gemmgen failed: {row['case']} {row['M']}x{row['N']}x{row['K']}: {row['reason']}", markup=False)
    return 1 if failed else 0
