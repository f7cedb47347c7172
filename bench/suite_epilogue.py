"""The suite `epilogue`: each case at each shape, every rung of the ladder side by side."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table

from bench import plot, report, without_gpu
from bench.builds import Build, build_all
from bench.device import current_gpu
from bench.problem import Problem, run_problem
from bench.results import ResultFile, Row
from bench.rungs import RUNGS
from bench.settings import Settings
from bench.shapes import group_of


def run(settings: Settings, console: Console) -> int:
    """Measure, print and write everything; 1 when gemmgen gave a wrong answer or none."""
    if not torch.cuda.is_available():
        return without_gpu.run(settings, console)
    device = current_gpu()
    problems = [Problem(case, shape) for shape in settings.shapes for case in settings.cases]
    started = time.perf_counter()
    builds = _builds(problems, settings, console)
    results = ResultFile(settings.out, "epilogue", settings.environment)
    for index, problem in enumerate(problems):
        if time.perf_counter() - started > settings.budget_s:
            console.print(f"[bold]budget of {settings.budget_s:.0f} s is over, not measured:[/]", *problems[index:])
            break
        rows = run_problem(problem, settings, refusals(problem, settings, autotune_seconds(results.rows)), device)
        results.add(_with_build(row, builds.get(problem, Build())) for row in rows)
        console.print(table_of(f"{problem}", rows))
    return _conclude(results, settings, console)


def _builds(problems: list[Problem], settings: Settings, console: Console) -> dict[Problem, Build]:
    if "gemmgen" not in {rung.name for rung in settings.rungs}:
        return {}
    from gemmgen.arch import arch_of_capability

    arch = arch_of_capability(torch.cuda.get_device_capability(), torch.cuda.get_device_name())
    return build_all(problems, arch.name, console)


def autotune_seconds(rows: list[Row]) -> float:
    """Seconds that max-autotune has spent on compiling so far."""
    return sum(row["first_call_s"] or 0.0 for row in rows if row["rung"] == "max_autotune")


def refusals(problem: Problem, settings: Settings, spent_s: float) -> dict[str, str]:
    """Rungs that are left out of `problem` on purpose, and why."""
    if group_of(problem.shape) not in settings.autotune_groups:
        return {"max_autotune": "left out for its compile time"}
    if spent_s > settings.autotune_budget_s:
        return {"max_autotune": f"its compile budget of {settings.autotune_budget_s:.0f} s is used up"}
    return {}


def _with_build(row: Row, build: Build) -> Row:
    if row["rung"] != "gemmgen":
        return row
    return {**row, "build_cold_s": build.compilers_s, "build_warm_s": build.again_s}


def table_of(title: str, rows: list[Row]) -> Table:
    """One problem for the terminal."""
    table = Table(title=title, title_justify="left")
    for column in ("rung", "GPU us", "p10", "p90", "n", "TFLOP/s", "eager us", "error", "first call s", "note"):
        table.add_column(column, justify="left" if column in ("rung", "note") else "right")
    for row in rows:
        numbers = [row["median_us"], row["p10_us"], row["p90_us"], row["n"], row["tflops"], row["eager_us"]]
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        first_call = "" if row["first_call_s"] is None else f"{row['first_call_s']:.2f}"
        label = RUNGS[row["rung"]].label
        table.add_row(label, *map(_number, numbers), error, first_call, row["reason"] or row["note"])
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _conclude(results: ResultFile, settings: Settings, console: Console) -> int:
    report.print_report(results.rows)
    console.print(f"written: {results.path}")
    if settings.plot and results.rows:
        console.print(plot.save(results.rows, results.path.with_suffix(".png")))
    failed = [row for row in results.rows if row["rung"] == "gemmgen" and row["reason"]]
    for row in failed:
        console.print(f"gemmgen failed: {row['case']} {row['M']}x{row['N']}x{row['K']}: {row['reason']}", markup=False)
    return 1 if failed else 0
