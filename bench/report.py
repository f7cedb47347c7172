"""README's tables from a result file: `python -m bench.report bench/results/<file>.jsonl`."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.results import Row, read
from bench.rungs import RUNGS

ABSENT = "-"
SELF = "gemmgen"

Problem = tuple[str, int, int, int]
Rows = dict[str, Row]


def problem_of(row: Row) -> Problem:
    return row["case"], row["M"], row["N"], row["K"]


def by_problem(rows: Iterable[Row]) -> dict[Problem, Rows]:
    """Rows of each problem by rung, in the order in which they were measured."""
    problems: dict[Problem, Rows] = {}
    for row in rows:
        problems.setdefault(problem_of(row), {})[row["rung"]] = row
    return problems


def time_us(rungs: Rows, rung: str) -> float | None:
    return rungs.get(rung, {}).get("median_us")


def fastest_other(rungs: Rows) -> str | None:
    """The fastest rung, beside gemmgen, that computes the whole function."""
    others = [name for name, rung in RUNGS.items() if name != SELF and rung.is_whole and time_us(rungs, name)]
    return min(others, key=lambda name: rungs[name]["median_us"], default=None)


def speedup(rungs: Rows, other: str | None) -> float | None:
    """How many times faster gemmgen is than `other`; below 1 is a loss."""
    ours, theirs = time_us(rungs, SELF), time_us(rungs, other) if other else None
    return theirs / ours if ours and theirs else None


def markdown_table(rows: Sequence[Row]) -> str:
    """GPU medians of every problem in microseconds, the fastest whole rung in bold, losses said in the last column."""
    problems = by_problem(rows)
    names = [name for name in RUNGS if any(name in rungs for rungs in problems.values())]
    header = ["case", "M x N x K", *(RUNGS[name].label for name in names), "gemmgen against the fastest other"]
    lines = [_line(header), _line(["---", "---", *["---:"] * (len(names) + 1)])]
    for (case, m, n, k), rungs in problems.items():
        lines.append(_line([case, f"{m} x {n} x {k}", *_times(rungs, names), _against_fastest(rungs)]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _times(rungs: Rows, names: Sequence[str]) -> list[str]:
    whole = [t for name in names if RUNGS[name].is_whole and (t := time_us(rungs, name))]
    best = min(whole, default=None)
    return [_time(time_us(rungs, name), RUNGS[name].is_whole and time_us(rungs, name) == best) for name in names]


def _time(value: float | None, is_best: bool) -> str:
    if value is None:
        return ABSENT
    text = f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    return f"**{text}**" if is_best else text


def _against_fastest(rungs: Rows) -> str:
    other = fastest_other(rungs)
    ratio = speedup(rungs, other)
    if ratio is None or other is None:
        return ABSENT
    loss = "" if ratio >= 1 else " (loss)"
    return f"{ratio:.2f}x {RUNGS[other].label}{loss}"


def eager_table(rows: Sequence[Row]) -> str:
    """Wall time of one eager call, host included, of the problems that are small enough for it to matter."""
    return markdown_table([{**row, "median_us": row["eager_us"]} for row in rows if row.get("method") == "graph"])


def summary(rows: Sequence[Row]) -> str:
    """Geometric means of the speedups, the losses by name, compile times, and why figures are absent; markdown."""
    problems = by_problem(rows)
    return "\n".join([*_means(problems), *_losses(problems), *_compile_times(rows), *_reasons(rows)])


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _means(problems: dict[Problem, Rows]) -> list[str]:
    lines = []
    for name in RUNGS:
        ratios = [ratio for rungs in problems.values() if name != SELF and (ratio := speedup(rungs, name))]
        if ratios:
            lines.append(
                f"- gemmgen against {RUNGS[name].label}: {geometric_mean(ratios):.2f}x as fast "
                f"(geometric mean of {len(ratios)} problems, {min(ratios):.2f}x to {max(ratios):.2f}x)"
            )
    return lines


def _losses(problems: dict[Problem, Rows]) -> list[str]:
    lost = {problem: rungs for problem, rungs in problems.items() if (speedup(rungs, fastest_other(rungs)) or 1) < 1}
    measured = sum(1 for rungs in problems.values() if speedup(rungs, fastest_other(rungs)))
    lines = [f"- gemmgen is the fastest in {measured - len(lost)} of {measured} problems"]
    for (case, m, n, k), rungs in lost.items():
        lines.append(f"- loss: {case} at {m} x {n} x {k}, {_against_fastest(rungs)}")
    return lines


# What is compiled for a rung, by the field of the row that holds its seconds.
COMPILE_TIMES = (
    ("gemmgen", "build_cold_s", "compilers of one gemmgen kernel, beside other builds"),
    ("gemmgen", "build_warm_s", "gemmgen kernel found in the cache"),
    ("compiled_tail", "first_call_s", "first call with a compiled tail"),
    ("max_autotune", "first_call_s", "first call of torch.compile max-autotune"),
    ("triton", "first_call_s", "first call of Triton, autotuned, kernels shared between shapes"),
)


def _compile_times(rows: Sequence[Row]) -> list[str]:
    lines = []
    for rung, field, meaning in COMPILE_TIMES:
        seconds = [row[field] for row in rows if row["rung"] == rung and row.get(field)]
        if seconds:
            lines.append(f"- {statistics.median(seconds):.2f} s {meaning} (median; up to {max(seconds):.1f} s)")
    return lines


def _reasons(rows: Sequence[Row]) -> list[str]:
    counts = Counter((row["rung"], row["reason"]) for row in rows if row.get("reason"))
    return [f"- no figure for {RUNGS[rung].label} in {n} problem(s): {reason}" for (rung, reason), n in counts.items()]


def conditions(rows: Sequence[Row]) -> str:
    """Device and versions of a run, in one line."""
    first = rows[0]
    return ", ".join(
        [
            first["device"],
            f"driver {first['driver']}",
            f"torch {first['torch']}",
            f"CUDA {first['cuda']}",
            f"Triton {first['triton']}",
            f"CUTLASS {first['cutlass']}",
            f"gemmgen {first['gemmgen']} at {first['commit']}",
        ]
    )


def print_report(rows: Sequence[Row]) -> None:
    """Everything that a result file says, as markdown; plain `print`, so that no line is folded."""
    print(f"Median GPU time in microseconds, L2 cold. {conditions(rows)}.\n")
    print(markdown_table(rows), summary(rows), sep="\n\n")
    if any(row.get("method") == "graph" for row in rows):
        print("\nWall time of one eager call in microseconds, host included, back to back.\n")
        print(eager_table(rows))


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    rows = [row for path in arguments for row in read(Path(path)) if row["suite"] not in ("jit", "training")]
    if not rows:
        print("no rows of kernel times in these files")
        return 1
    print_report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
