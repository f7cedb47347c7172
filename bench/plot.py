"""A picture of a result file: the speed of each rung relative to cuBLAS + eager, one line a problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.report import Problem, Rows, by_problem, time_us
from bench.results import Row
from bench.rungs import RUNGS

MARKERS = dict(zip(RUNGS, "osD^vPXd|", strict=True))


def save(rows: Sequence[Row], path: Path) -> str:
    """Write `path`; the result says where it is, or why there is none (matplotlib is optional)."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    problems = {problem: rungs for problem, rungs in by_problem(rows).items() if time_us(rungs, "eager")}
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.28 * len(problems)), layout="constrained")
    _draw(axes, problems)
    axes.set_title(f"{rows[0]['device']}, gemmgen {rows[0]['commit']}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return f"written: {path}"


def _draw(axes: object, problems: dict[Problem, Rows]) -> None:
    for name, rung in RUNGS.items():
        points = relative_speeds(problems, name)
        if points:
            is_ours = name == "gemmgen"
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, marker=MARKERS[name], s=55 if is_ours else 28, zorder=3 + is_ours, label=rung.label)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(problems)), [f"{case} {m}x{n}x{k}" for case, m, n, k in problems], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as cuBLAS + eager")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="best")


def relative_speeds(problems: dict[Problem, Rows], rung: str) -> list[tuple[float, int]]:
    """(speed relative to eager, line) of each problem in which `rung` has a time."""
    return [
        (rungs["eager"]["median_us"] / value, line)
        for line, rungs in enumerate(problems.values())
        if (value := time_us(rungs, rung))
    ]
