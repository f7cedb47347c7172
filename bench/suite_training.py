"""The suite `training`: forward, backward and optimizer step of fused layers beside eager and compiled torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from bench import training_pass
from bench.results import ResultFile, Row
from bench.settings import Settings
from bench.training_cases import CASES, RUNGS, SIZES, Case, Inputs, Layer, Size, draw_inputs
from bench.training_check import errors_of, verdict
from gemmgen.timing import Timing, measure

PROBLEM_BUDGET_S = 20.0
PHASES = ("forward", "forward_backward", "step")
SMALL = Size(24, 32, 48)


@dataclass(frozen=True)
class Entry:
    """A rung of one problem. `reason` says why it has no figures, or is None."""

    rung: str
    layer: Layer | None = None
    error: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    timings: Mapping[str, Timing] | None = None
    reason: str | None = None


def run(settings: Settings, console: Console) -> int:
    """Measure, print and write; 1 when gemmgen gave wrong gradients or none."""
    if not torch.cuda.is_available():
        return _without_gpu(console)
    problems = [(case, size) for size in SIZES for case in CASES.values()]
    problems = problems[-1:] if settings.quick else problems
    results = ResultFile(settings.out, "training", settings.environment)
    results.add(rows := training_pass.rows(settings))
    console.print(training_pass.table_of(rows))
    started = time.perf_counter()
    for case, size in problems:
        if time.perf_counter() - started > settings.budget_s:
            console.print(f"budget of {settings.budget_s:.0f} s is over, not measured: {case.name} {size}")
            continue
        results.add(rows := run_problem(case, size, settings))
        console.print(table_of(f"{case.name} {size}", rows))
    console.print(f"written: {results.path}")
    return _conclude(results.rows, console)


def run_problem(case: Case, size: Size, settings: Settings) -> list[Row]:
    """Every rung checked and weighed alone, then all timed against each other."""
    torch._dynamo.reset()
    inputs = draw_inputs(case, size, "cuda")
    entries = [_prepared(case, name, inputs) for name in RUNGS]
    entries = _checked(entries, case, inputs)
    entries = [_weighed(entry) for entry in entries]
    entries = _timed(entries, settings)
    torch.cuda.empty_cache()
    return [row for entry in entries for row in _rows_of(case, size, entry)]


def _prepared(case: Case, name: str, inputs: Inputs) -> Entry:
    try:
        layer = RUNGS[name](case, inputs)
        layer.forward_backward()
        torch.cuda.synchronize()
        return Entry(name, layer)
    except Exception as error:  # a rung that breaks is a result of this rung, not the end of the run
        return Entry(name, reason=(str(error).strip().splitlines() or [type(error).__name__])[0][:200])


def _checked(entries: Sequence[Entry], case: Case, inputs: Inputs) -> list[Entry]:
    """With the error of each rung's result and gradients; one that errs over twice as much as eager has its reason."""
    found = errors_of({e.rung: e.layer for e in entries if e.layer and e.layer.is_whole}, case, inputs)
    return [
        replace(entry, error=max(found[entry.rung].values()), reason=verdict(found[entry.rung], found["eager"]))
        if entry.rung in found
        else entry
        for entry in entries
    ]


def _weighed(entry: Entry) -> Entry:
    """With the memory that the forward leaves behind, its result apart, and the peak of forward and backward."""
    if entry.layer is None or not entry.layer.is_whole:
        return entry
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = entry.layer.forward()
    saved = torch.cuda.memory_allocated() - before - result.numel() * result.element_size()
    del result
    entry.layer.forward_backward()
    torch.cuda.synchronize()
    return replace(entry, saved_bytes=saved, peak_bytes=torch.cuda.max_memory_allocated() - before)


def _timed(entries: Sequence[Entry], settings: Settings) -> list[Entry]:
    timings: dict[str, dict[str, Timing]] = {}
    for phase in PHASES:
        calls = {e.rung: call for e in entries if e.layer and not e.reason and (call := _call(e.layer, phase))}
        found = measure(calls, settings.rounds, min_rounds=settings.min_rounds, budget_s=PROBLEM_BUDGET_S)
        for rung, timing in found.items():
            timings.setdefault(rung, {})[phase] = timing
    return [replace(entry, timings=timings.get(entry.rung), layer=None) for entry in entries]


def _call(layer: Layer, phase: str) -> Callable[[], object] | None:
    return {"forward": layer.forward, "forward_backward": layer.forward_backward, "step": layer.step}[phase]


def _rows_of(case: Case, size: Size, entry: Entry) -> list[Row]:
    """One row for each phase; the backward's time is the difference of two medians."""
    timings = entry.timings or {}
    fixed = {"case": case.name, "tokens": size.tokens, "hidden": size.hidden, "inner": size.inner, "rung": entry.rung}
    weights = {"error": entry.error, "peak_bytes": entry.peak_bytes, "saved_bytes": entry.saved_bytes}
    rows = [{**fixed, "phase": p, **_figures(timings.get(p)), **weights, "reason": entry.reason} for p in PHASES]
    medians = [timings[phase].median_us if phase in timings else None for phase in PHASES]
    forward, both = medians[:2]
    backward = round(both - forward, 3) if both and forward else None
    blank = {**_figures(None), "median_us": backward}
    rows.insert(1, {**fixed, "phase": "backward", **blank, **weights, "reason": entry.reason})
    return rows


def _figures(timing: Timing | None) -> Row:
    if timing is None:
        return {"median_us": None, "p10_us": None, "p90_us": None, "n": 0}
    return {
        "median_us": round(timing.median_us, 3),
        "p10_us": round(timing.p10_us, 3),
        "p90_us": round(timing.p90_us, 3),
        "n": len(timing.samples),
    }


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """One problem: a rung a line, microseconds by phase, memory in MiB."""
    table = Table(title=title, title_justify="left")
    phases = ["forward", "backward", "forward_backward", "step"]
    for column in ("rung", *phases, "against eager", "saved MiB", "peak MiB", "error", "note"):
        table.add_column(column, justify="left" if column in ("rung", "note") else "right")
    by_rung: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_rung.setdefault(row["rung"], {})[row["phase"]] = row
    eager = by_rung["eager"]["forward_backward"]["median_us"]
    for rung, found in by_rung.items():
        row = found["forward_backward"]
        ratio = f"{eager / row['median_us']:.3f}x" if eager and row["median_us"] else ""
        times = [f"{t:.0f}" if (t := found[phase]["median_us"]) else "" for phase in phases]
        memory = [f"{b / 2**20:.0f}" if (b := row[key]) is not None else "" for key in ("saved_bytes", "peak_bytes")]
        table.add_row(rung, *times, ratio, *memory, f"{row['error']:.1e}" if row["error"] else "", row["reason"] or "")
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """Forward and backward together of every problem in microseconds, a rung a column; then the elementwise pass."""
    timed = [row for row in rows if row["phase"] == "forward_backward"]
    rungs = [rung for rung in dict.fromkeys(row["rung"] for row in timed) if any(_median(timed, rung))]
    lines = [_line(["case", "tokens", "hidden", "inner", *rungs]), _line(["---"] * (4 + len(rungs)))]
    for problem in dict.fromkeys(map(_problem, timed)):
        own = [row for row in timed if _problem(row) == problem]
        times = [f"{t:.0f}" if (t := next(_median(own, rung), None)) else "-" for rung in rungs]
        lines.append(_line([*map(str, problem), *times]))
    for row in rows:
        if row["phase"] == "pass" and row["rung"] == "gemmgen":
            share = f"{row['median_us']:.1f} us, {row['of_copy']:.1%} of a copy's rate"
            lines.append(f"\nThe elementwise pass alone: {share}.")
    return "\n".join(lines)


def _problem(row: Row) -> tuple[object, ...]:
    return row["case"], row["tokens"], row["hidden"], row["inner"]


def _median(rows: Sequence[Row], rung: str) -> Iterator[float]:
    return (row["median_us"] for row in rows if row["rung"] == rung and row["median_us"])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _conclude(rows: Sequence[Row], console: Console) -> int:
    failed = {(r["case"], r["tokens"], r["reason"]) for r in rows if r["rung"] == "gemmgen" and r.get("reason")}
    for case, tokens, reason in failed:
        console.print(f"gemmgen failed: {case} with {tokens} tokens: {reason}", markup=False)
    return 1 if failed else 0


def _without_gpu(console: Console) -> int:
    """Only the gradients of the CPU implementation are checked."""
    console.print("No GPU here: the gradients of the CPU implementation are checked, nothing is timed.")
    wrong = {name: reason for name, case in CASES.items() if (reason := _cpu_verdict(case))}
    for name in CASES:
        console.print(f"{name}: {wrong.get(name, 'CPU gradients agree with float64')}", markup=False)
    console.print("Needs a GPU: every time, memory, and the check of the compiled kernels' gradients.")
    return 1 if wrong else 0


def _cpu_verdict(case: Case) -> str | None:
    inputs = draw_inputs(case, SMALL, "cpu")
    layers = {name: RUNGS[name](case, inputs) for name in ("gemmgen", "eager")}
    found = errors_of(layers, case, inputs)
    return verdict(found["gemmgen"], found["eager"])

