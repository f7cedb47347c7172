"""`Settings`: what the command line asks a suite to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bench.cases import Case
from bench.rungs import Rung
from bench.shapes import Shape


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        budget_s: no new problem starts after this many seconds.
        rounds, min_rounds: samples of each rung; the minimum is taken where a problem is slow.
        autotune_groups: shape groups for which `torch.compile(mode="max-autotune...")` is worth its compile time.
        autotune_budget_s: no further max-autotune compilation starts after this many seconds of them.
        tuned: kernels that gemmgen measures for each problem before it is timed; 0 leaves the choice to the model.
        out: folder of the result files.
        ms: a suite with problems of its own takes those with one of these M; all where empty.
        part: (i, n): a suite with problems of its own takes the i-th of n parts of them, counted from 1.
        quick: a suite with problems of its own takes one.
        environment: recorded with each result line.
    """

    cases: tuple[Case, ...]
    shapes: tuple[Shape, ...]
    rungs: tuple[Rung, ...]
    out: Path
    budget_s: float = float("inf")
    rounds: int = 25
    min_rounds: int = 7
    autotune_groups: tuple[str, ...] = ("headline",)
    autotune_budget_s: float = 90.0
    plot: bool = True
    tuned: int = 0
    quick: bool = False
    ms: tuple[int, ...] = ()
    part: tuple[int, int] = (1, 1)
    environment: dict[str, str] = field(default_factory=dict)
