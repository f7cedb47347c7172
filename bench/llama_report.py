"""What the suite `llama` says: times relative to other rungs, the targets, and what tuning gives and costs.

Here a ratio is gemmgen's time divided by another's: above 1 is a loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import report
from bench.report import ABSENT, SELF, Problem, Rows, by_problem, fastest_other, geometric_mean, time_us
from bench.results import Row
from bench.rungs import RUNGS

UNFUSED = ("eager", "compiled_tail", "cublaslt")
MOST_NAMED = 12  # shapes that a line of the README names

Ratios = dict[Problem, float]
Problems = dict[Problem, Rows]


def short(rows: Sequence[Row]) -> str:
    """What the README shows."""
    parts = [ratio_table(rows), report.short_summary(rows, with_losses=False), *_verdicts(rows, MOST_NAMED)]
    return "\n\n".join([report.IN_SHORT, *parts])


def full(rows: Sequence[Row]) -> str:
    """Everything."""
    return "\n\n".join([report.full(rows), ratio_table(rows), *_verdicts(rows, None)])


def _verdicts(rows: Sequence[Row], most: int | None) -> list[str]:
    return [targets(rows, most), *filter(None, [heuristic_loss(rows), tuning_cost(rows)])]


def ratio(rungs: Rows, other: str | None) -> float | None:
    """gemmgen's time divided by that of `other`."""
    speedup = report.speedup(rungs, other)
    return 1 / speedup if speedup else None


def _ratios(problems: Problems, other: str) -> Ratios:
    return {problem: found for problem, rungs in problems.items() if (found := ratio(rungs, other))}


def _at(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


# One line for each case and M


def ratio_table(rows: Sequence[Row]) -> str:
    """Over the layers (N, K) of each case and M."""
    problems = by_problem(rows)
    has_quack = any(time_us(rungs, "quack") for rungs in problems.values())
    header = ["case", "M", "layers", "bare product", "fastest other", "slower in", "worst"]
    cases = list(dict.fromkeys(case for case, *_ in problems))
    groups = sorted({(cases.index(case), m) for case, m, _, _ in problems})
    lines = []
    for index, m in groups:
        own = {problem: rungs for problem, rungs in problems.items() if problem[:2] == (cases[index], m)}
        quack = [_mean(_ratios(own, "quack").values())] if has_quack else []
        lines.append([cases[index], str(m), *_line_of(own), *quack])
    most = sorted({row["tuned"] for row in rows if row.get("tuned")}, reverse=True)
    tuned = f" gemmgen was tuned before, over {' or '.join(map(str, most))} kernels a problem." if most else ""
    text = (
        "Time of gemmgen divided by that of another, above 1 where gemmgen is slower: geometric means over the layers "
        "(N, K), the number of layers where the fastest other way is faster, and the worst of them with its N x K."
    )
    return f"{text}{tuned}\n\n{report.table([*header, *(['QuACK'] if has_quack else [])], lines, texts=1)}"


def _line_of(own: Problems) -> list[str]:
    timed = sum(1 for rungs in own.values() if time_us(rungs, SELF))
    layers = str(timed) if timed == len(own) else f"{timed} of {len(own)}"
    others = {problem: found for problem, rungs in own.items() if (found := ratio(rungs, fastest_other(rungs)))}
    lost = sum(1 for found in others.values() if found > 1)
    return [layers, _mean(_ratios(own, "bare").values()), _mean(others.values()), str(lost), _worst(own, others)]


def _mean(ratios: Iterable[float]) -> str:
    found = list(ratios)
    return f"{geometric_mean(found):.2f}" if found else ABSENT


def _worst(own: Problems, ratios: Ratios) -> str:
    if not ratios:
        return ABSENT
    worst = max(ratios, key=ratios.__getitem__)
    return f"{ratios[worst]:.2f} at {_at(worst[2:])}, {RUNGS[fastest_other(own[worst]) or SELF].label}"


# Targets


@dataclass(frozen=True)
class Target:
    """`case` at M >= 1024 against `rung`: its largest geometric mean of ratios, and its largest ratio."""

    case: str
    rung: str
    mean: float
    worst: float | None = None

    def line(self, problems: Problems) -> str:
        own = {p: rungs for p, rungs in problems.items() if p[0] == self.case and p[1] >= 1024}
        name = f"{self.case} at M >= 1024 against {RUNGS[self.rung].label}"
        ratios = _ratios(own, self.rung)
        if not ratios:
            return f"- no figure: {name}"
        mean, worst = geometric_mean(list(ratios.values())), max(ratios, key=ratios.__getitem__)
        is_met = mean <= self.mean and (self.worst is None or ratios[worst] <= self.worst)
        goal = "" if self.worst is None else f" (goal {self.worst:.2f})"
        return (
            f"- {_met(is_met)}: {name}: geometric mean {mean:.3f} (goal {self.mean:.2f}), worst {ratios[worst]:.3f}"
            f"{goal} at {_at(worst[1:])}; {_count(ratios, own)}"
        )


TARGETS = (
    Target("bias_gelu_tanh", "bare", mean=1.00, worst=1.05),
    Target("bias_gelu_tanh", "quack", mean=1.00),
    Target("fp8_dequant_bias_gelu_tanh", "bare", mean=1.03),
    Target("int8_dequant_bias", "bare", mean=1.03),
)
MARGIN = 1.02  # of the fastest unfused rung
SMALL_M = 128


def targets(rows: Sequence[Row], most: int | None = None) -> str:
    """Each target, and whether it is met. At most `most` shapes are named where one is missed."""
    problems = by_problem(rows)
    unfused = {problem: found for problem, rungs in problems.items() if (found := _against_unfused(rungs))}
    small = {problem: rungs for problem, rungs in problems.items() if problem[1] <= SMALL_M}
    large = {problem: rungs for problem, rungs in problems.items() if problem[1] > SMALL_M}
    lines = [target.line(problems) for target in TARGETS]
    lines.append(_margin_line(f"M <= {SMALL_M}", small, unfused, most))
    lines.append(_margin_line(f"M > {SMALL_M}", large, unfused, most))
    lines.append(_margin_line("any M", problems, unfused, 0))
    return "Targets, as ratios of times:\n\n" + "\n".join(lines)


def _against_unfused(rungs: Rows) -> float | None:
    timed = [name for name in UNFUSED if time_us(rungs, name)]
    return ratio(rungs, min(timed, key=lambda name: rungs[name]["median_us"])) if timed else None


def _margin_line(where: str, own: Problems, ratios: Ratios, most: int | None) -> str:
    name = f"{where} against the fastest of {', '.join(RUNGS[rung].label for rung in UNFUSED)}"
    found = {problem: ratios[problem] for problem in own if problem in ratios}
    if not found:
        return f"- no figure: {name}"
    worst = max(found, key=found.__getitem__)
    missed = sorted((p for p in found if found[p] > MARGIN), key=found.__getitem__, reverse=True)
    line = (
        f"- {_met(not missed)}: {name}: worst {found[worst]:.3f} (goal {MARGIN:.2f}), {worst[0]} at {_at(worst[1:])}; "
        f"more than {MARGIN:.2f} in {len(missed)}; {_count(found, own)}"
    )
    named = [f"{p[0]} {_at(p[1:])} ({found[p]:.2f})" for p in missed[:most]]
    more = [f"and {len(missed) - len(named)} more"] if most and len(missed) > most else []
    return f"{line}. They are {', '.join([*named, *more])}" if named else line


def _met(is_met: bool) -> str:
    return "met" if is_met else "**not met**"


def _count(ratios: Ratios, own: Problems) -> str:
    without = len(own) - len(ratios)
    return f"{len(ratios)} problems" + (f", {without} without a figure" if without else "")


# Tuning

LOSS_MEAN, LOSS_WORST = 0.05, 0.15


def heuristic_loss(rows: Sequence[Row]) -> str:
    """How much slower the model's own choice is than the best measured way; empty where nothing was tuned."""
    tuned = [row for row in rows if row["rung"] == SELF and "heuristic_loss" in row]
    if not tuned:
        return ""
    cases = list(dict.fromkeys(row["case"] for row in tuned))
    lines = [_loss_line(case, [row for row in tuned if row["case"] == case]) for case in cases]
    lines.append(_loss_line("all", tuned))
    losses = [row["heuristic_loss"] for row in tuned if row["heuristic_loss"] is not None]
    is_met = bool(losses) and _mean_loss(losses) <= LOSS_MEAN and max(losses) <= LOSS_WORST
    text = (
        "What the model's choice loses against the best measured way, in the time of the tuner. The goal, "
        f"{LOSS_MEAN:.0%} in geometric mean and {LOSS_WORST:.0%} at worst, is {_met(is_met)}; "
        f"{sum(1 for loss in losses if loss > LOSS_WORST)} of {len(losses)} problems lose more than {LOSS_WORST:.0%}."
    )
    header = ["case", "problems", "without a figure", "geometric mean", "worst", "worst at M x N x K"]
    return f"{text}\n\n{report.table(header, lines)}"


def _loss_line(name: str, rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row["heuristic_loss"] is not None]
    counts = [name, str(len(rows)), str(len(rows) - len(found))]
    if not found:
        return [*counts, ABSENT, ABSENT, ABSENT]
    worst = max(found, key=lambda row: row["heuristic_loss"])
    mean = _mean_loss([row["heuristic_loss"] for row in found])
    return [*counts, f"{mean:.1%}", f"{worst['heuristic_loss']:.1%}", _at((worst["M"], worst["N"], worst["K"]))]


def _mean_loss(losses: Sequence[float]) -> float:
    return geometric_mean([1 + loss for loss in losses]) - 1


def tuning_cost(rows: Sequence[Row]) -> str:
    """What tuning takes, and after how many calls it is paid back; empty where nothing was tuned."""
    tuned = [row for row in rows if row["rung"] == SELF and row.get("tune_s") is not None]
    if not tuned:
        return ""
    seconds = [row["tune_s"] for row in tuned]
    built_s = sum(row.get("build_share_s", 0.0) for row in tuned)
    lines = [
        f"- tuning one problem: {statistics.median(seconds):.2f} s (median; up to {max(seconds):.1f} s), "
        f"{sum(seconds):.0f} s for {len(seconds)} problems; before that {built_s:.0f} s to build their kernels, or to "
        "find them in the cache",
    ]
    compared = [row for row in tuned if row.get("model_us") is not None and row.get("best_us") is not None]
    calls = [n for row in compared if (n := calls_to_pay(row)) is not None]
    never = len(compared) - len(calls)
    paid = f"after {statistics.median(calls):,.0f} calls (median of {len(calls)} problems)" if calls else "never"
    lines.append(
        f"- tuning, without building, is paid back by what it saves against the model's choice {paid}; "
        f"never in {never} problems, where the model's choice is the best"
    )
    return "\n".join(lines)


def calls_to_pay(row: Row) -> float | None:
    """Calls after which the tuning of a problem has paid, or None where it saves nothing."""
    saved_us = row["model_us"] - row["best_us"]
    return row["tune_s"] * 1e6 / saved_us if saved_us > 0 else None
