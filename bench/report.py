"""Everything that result files say, as markdown: `python -m bench.report bench/results/<file>.jsonl`."""

from __future__ import annotations

import math
import re
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


def newest(rows: Sequence[Row]) -> list[Row]:
    """The rows of each problem from the run that started last: times of two runs do not compare."""
    last: dict[Problem, str] = {}
    for row in rows:
        last[problem_of(row)] = max(last.get(problem_of(row), ""), row.get("started", ""))
    return [row for row in rows if row.get("started", "") == last[problem_of(row)]]


def markdown_table(rows: Sequence[Row]) -> str:
    """GPU medians of every problem in microseconds, the fastest whole rung in bold, losses said in the last column."""
    problems = by_problem(rows)
    names = [name for name in RUNGS if any(name in rungs for rungs in problems.values())]
    header = ["case", "M x N x K", *(RUNGS[name].label for name in names), "gemmgen against the fastest other"]
    lines = [
        [case, f"{m} x {n} x {k}", *_times(rungs, names), _against_fastest(rungs)]
        for (case, m, n, k), rungs in problems.items()
    ]
    return table(header, lines, texts=2)


def table(header: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A markdown table; its first `texts` columns are aligned to the left, the numbers to the right."""
    rules = ["---"] * texts + ["---:"] * (len(header) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rules, *lines))


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
    return "\n".join([*_means(problems), _wins(problems), *_losses(problems), *_compile_times(rows), *_reasons(rows)])


def short_summary(rows: Sequence[Row], with_losses: bool = True) -> str:
    """`summary` with the losses in a table by case and M, and one line for each reason why figures are absent."""
    problems = by_problem(rows)
    lines = "\n".join([*_means(problems), _wins(problems), *_compile_times(rows), *_short_reasons(rows)])
    losses = _loss_table(problems) if with_losses else ""
    return f"{lines}\n\n{losses}" if losses else lines


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


def _wins(problems: dict[Problem, Rows]) -> str:
    measured = sum(1 for rungs in problems.values() if speedup(rungs, fastest_other(rungs)))
    return f"- gemmgen is the fastest in {measured - len(_lost(problems))} of {measured} problems"


def _lost(problems: dict[Problem, Rows]) -> dict[Problem, Rows]:
    return {problem: rungs for problem, rungs in problems.items() if (speedup(rungs, fastest_other(rungs)) or 1) < 1}


def _losses(problems: dict[Problem, Rows]) -> list[str]:
    return [
        f"- loss: {case} at {m} x {n} x {k}, {_against_fastest(rungs)}"
        for (case, m, n, k), rungs in _lost(problems).items()
    ]


def _loss_table(problems: dict[Problem, Rows]) -> str:
    """How many problems of each case and M are lost, the worst of them, and to whom."""
    lost = _lost(problems)
    if not lost:
        return ""
    Ms = sorted({m for _, m, _, _ in lost})
    lines = []
    for case in dict.fromkeys(case for case, *_ in lost):
        cells = [_losses_of(case, m, problems, lost) for m in Ms]
        winners = Counter(fastest_other(rungs) or "" for problem, rungs in lost.items() if problem[0] == case)
        lines.append([case, *cells, ", ".join(f"{RUNGS[name].label} {n}" for name, n in winners.most_common())])
    header = ["losses, and the worst, at M =", *map(str, Ms), "lost to"]
    return table(header, lines)


def _losses_of(case: str, m: int, problems: dict[Problem, Rows], lost: dict[Problem, Rows]) -> str:
    speedups = [speedup(rungs, fastest_other(rungs)) or 1 for p, rungs in lost.items() if p[:2] == (case, m)]
    of = sum(1 for p, rungs in problems.items() if p[:2] == (case, m) and speedup(rungs, fastest_other(rungs)))
    return f"{len(speedups)} of {of}, {min(speedups):.2f}x" if speedups else ABSENT


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


def _short_reasons(rows: Sequence[Row]) -> list[str]:
    """One line for each reason but for its numbers; what gemmgen itself failed at is told in full."""
    rungs_of: dict[str, Counter[str]] = {}
    for row in rows:
        if row.get("reason"):
            reason = row["reason"] if row["rung"] == SELF else _without_numbers(row["reason"])
            rungs_of.setdefault(reason, Counter())[row["rung"]] += 1
    return [
        f"- no figure, {reason}: {', '.join(f'{RUNGS[rung].label} in {n}' for rung, n in rungs.items())} problem(s)"
        for reason, rungs in rungs_of.items()
    ]


def _without_numbers(reason: str) -> str:
    """`reason` without what differs from problem to problem."""
    return "wrong answer" if reason.startswith("wrong answer") else re.sub(r", (M is|they are) [\d and]+$", "", reason)


def conditions(rows: Sequence[Row]) -> str:
    """Device and versions of a run, in one line; with all commits where these are the rows of several runs."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        commits.setdefault(_conditions(row), {})[row["commit"]] = None
    return "; ".join(f"{where} at {' and '.join(these)}" for where, these in commits.items())


def _conditions(row: Row) -> str:
    cores = [f"{row['cores']} cores"] if "cores" in row else []
    return ", ".join(
        [
            row["device"],
            *cores,
            f"driver {row['driver']}",
            f"torch {row['torch']}",
            f"CUDA {row['cuda']}",
            f"Triton {row['triton']}",
            f"CUTLASS {row['cutlass']}",
            f"gemmgen {row['gemmgen']}",
        ]
    )


def full(rows: Sequence[Row]) -> str:
    """Everything that a file of kernel times says."""
    parts = [markdown_table(rows), summary(rows)]
    if any(row.get("method") == "graph" for row in rows):
        parts += ["Wall time of one eager call in microseconds, host included, back to back.", eager_table(rows)]
    return "\n\n".join(parts)


MOST_PROBLEMS = 40  # of a table in the README
IN_SHORT = "`python -m bench.report` on this file prints its table; in short:"


def short(rows: Sequence[Row]) -> str:
    """What the README shows of a file of kernel times."""
    table = IN_SHORT if len(by_problem(rows)) > MOST_PROBLEMS else markdown_table(rows)
    return f"{table}\n\n{short_summary(rows)}"


def print_report(rows: Sequence[Row]) -> None:
    """Everything that a result file says, as markdown; plain `print`, so that no line is folded."""
    print(f"Median GPU time in microseconds, L2 cold. {conditions(rows)}.\n\n{full(rows)}")


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    from bench import sections  # which imports the suites, and these import this module

    files = {path: read(path) for path in map(Path, arguments)}
    texts = sections.of(files, sections.FULL)
    print("\n\n".join(texts) or "no rows in these files")
    return 0 if texts else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
