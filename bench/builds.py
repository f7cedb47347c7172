"""Compiles gemmgen's kernels of many problems before any is timed: in parallel, and outside every figure."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console

from bench.cases import Case
from bench.problem import Problem
from bench.shapes import Shape


@dataclass(frozen=True)
class Build:
    """Seconds of one kernel: `compilers_s` when it was built, `again_s` to find it in the cache."""

    compilers_s: float | None = None
    again_s: float | None = None
    failure: str | None = None


def build_all(
    problems: Sequence[Problem], arch: str, console: Console, workers: int | None = None
) -> dict[Problem, Build]:
    """Build the kernel of every problem; a failure is recorded, and met again when the problem is run."""
    started = time.perf_counter()

    def build(problem: Problem) -> Build:
        return _attempted(lambda: _api_build(problem.case, problem.shape, arch))

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        first = dict(zip(problems, pool.map(build, problems), strict=True))
    console.print(f"built {len(problems)} gemmgen kernels in {time.perf_counter() - started:.1f} s")
    return {problem: _repeated(done, lambda problem=problem: build(problem)) for problem, done in first.items()}


def _api_build(case: Case, shape: Shape, arch: str) -> float:
    from bench import gemmgen_api  # imports gemmgen, which a run of other rungs alone does not need

    return gemmgen_api.build(case, shape, arch)


def _attempted(build: Callable[[], float]) -> Build:
    try:
        return Build(compilers_s=build())
    except Exception as error:  # reported with the problem; the others go on
        return Build(failure=f"{type(error).__name__}: {error}")


def _repeated(first: Build, build: Callable[[], Build]) -> Build:
    if first.failure:
        return first
    started = time.perf_counter()
    build()
    return Build(first.compilers_s, time.perf_counter() - started)
