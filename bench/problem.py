"""One problem (a case at a shape): every rung checked, then all timed against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench import check
from bench.cases import Case, Inputs, Outputs, draw_inputs, reference
from bench.device import Device
from bench.results import Row
from bench.rungs import Rung, Unavailable, forget_compilations
from bench.settings import Settings
from bench.shapes import Shape
from gemmgen.timing import SETTLE_S, Call, Recorder, Timing, measure

MIN_GRAPH_CALLS = 4
MAX_GRAPH_CALLS = 32
PROBLEM_BUDGET_S = 2.0


@dataclass(frozen=True)
class Problem:
    case: Case
    shape: Shape

    def __str__(self) -> str:
        return f"{self.case} {self.shape}"


@dataclass(frozen=True)
class Entry:
    """A rung of one problem, through checking and timing. `reason` says why it has no time, or is None."""

    rung: Rung
    function: Callable[..., object] | None = None
    first_call_s: float | None = None
    error: float | None = None
    note: str = ""
    reason: str | None = None
    gpu: Timing | None = None
    eager: Timing | None = None

    @property
    def is_timeable(self) -> bool:
        return self.function is not None and self.reason is None


def run_problem(problem: Problem, settings: Settings, refused: Mapping[str, str], device: Device) -> list[Row]:
    """One row for each rung of `settings`. `refused`: rungs not to run, with the reason."""
    forget_compilations()
    entries = check_rungs(problem, settings.rungs, refused, device)
    time_entries = _time_small if problem.shape.is_small else _time_large
    entries = time_entries(problem, entries, settings, device)
    device.release_memory()
    return [row_of(problem, entry) for entry in entries]


def check_rungs(problem: Problem, rungs: Sequence[Rung], refused: Mapping[str, str], device: Device) -> list[Entry]:
    """Call each rung that is not refused, its outputs poisoned, and compare with float64."""
    inputs = draw_inputs(problem.case, problem.shape, device.torch_name)
    expected = reference(problem.case, inputs)
    torch_errors = check.torch_errors(problem.case, inputs, expected)

    def entry_of(rung: Rung) -> Entry:
        if rung.name in refused:
            return Entry(rung, reason=refused[rung.name])
        entry, call = _called(rung, problem, inputs, device)
        return _compared(entry, call, expected, torch_errors) if entry.is_timeable and rung.is_whole else entry

    return [entry_of(rung) for rung in rungs]


def _called(rung: Rung, problem: Problem, inputs: Inputs, device: Device) -> tuple[Entry, Call]:
    """The entry after a first call, which compiles what is to be compiled."""
    try:
        prepared = rung.prepare(problem.case, problem.shape)
        call = inputs.bind(prepared.function)
        started = time.perf_counter()
        call()
        device.synchronize()
        first_call_s = time.perf_counter() - started
        return Entry(rung, prepared.function, first_call_s, note=prepared.note(inputs)), call
    except Unavailable as unavailable:
        return Entry(rung, reason=str(unavailable)), _nothing
    except Exception as error:  # a rung that breaks is a result of this rung, not the end of the run
        return Entry(rung, reason=_first_line(error)), _nothing


def _compared(entry: Entry, call: Call, expected: Outputs, torch_errors: tuple[check.Error, ...]) -> Entry:
    try:
        found = check.errors(check.run_poisoned(call), expected)
    except (RuntimeError, ValueError) as error:
        return replace(entry, reason=_first_line(error))
    worst = max(error.relative for error in found)
    return replace(entry, error=worst, reason=check.verdict(found, torch_errors))


def _time_large(problem: Problem, entries: Sequence[Entry], settings: Settings, device: Device) -> list[Entry]:
    """Events around single calls on one set of inputs, L2 flushed before each."""
    inputs = draw_inputs(problem.case, problem.shape, device.torch_name)
    calls = {e.rung.name: inputs.bind(e.function) for e in entries if e.function and e.is_timeable}
    timings = _measured(calls, 1, device.gpu_recorder(), settings)
    return [replace(entry, gpu=timings.get(entry.rung.name)) for entry in entries]


def _time_small(problem: Problem, entries: Sequence[Entry], settings: Settings, device: Device) -> list[Entry]:
    """GPU time from captured graphs that go round several sets of inputs, and wall time of eager calls."""
    input_sets = _input_sets(problem, device)
    chains = {e.rung.name: _chain(e.function, input_sets) for e in entries if e.function and e.is_timeable}
    eager = _measured(chains, len(input_sets), device.wall_recorder, settings, settle_s=0.0)
    graphs, reasons = _captured(chains, device)
    gpu = _measured(graphs, len(input_sets), device.gpu_recorder(), settings)
    return [
        replace(
            entry,
            gpu=gpu.get(entry.rung.name),
            eager=eager.get(entry.rung.name),
            reason=reasons.get(entry.rung.name, entry.reason),
        )
        for entry in entries
    ]


def _measured(
    callables: Mapping[str, Call], calls: int, recorder: Recorder, settings: Settings, settle_s: float = SETTLE_S
) -> dict[str, Timing]:
    return measure(
        callables,
        settings.rounds,
        min_rounds=settings.min_rounds,
        budget_s=PROBLEM_BUDGET_S,
        calls=calls,
        settle_s=settle_s,
        recorder=recorder,
    )


def _input_sets(problem: Problem, device: Device) -> list[Inputs]:
    """As many sets as overflow L2 twice, so that a graph that goes round them finds none there."""
    first = draw_inputs(problem.case, problem.shape, device.torch_name)
    seeds = range(1, graph_calls(first.bytes, device.l2_bytes))
    return [first, *(draw_inputs(problem.case, problem.shape, device.torch_name, seed) for seed in seeds)]


def graph_calls(set_bytes: int, l2_bytes: int) -> int:
    """Calls in one graph, each on its own inputs."""
    return min(max(-(-2 * l2_bytes // set_bytes), MIN_GRAPH_CALLS), MAX_GRAPH_CALLS)


def _chain(function: Callable[..., object], input_sets: Sequence[Inputs]) -> Call:
    calls = [inputs.bind(function) for inputs in input_sets]

    def run_all() -> None:
        for call in calls:
            call()

    return run_all


def _captured(chains: Mapping[str, Call], device: Device) -> tuple[dict[str, Call], dict[str, str]]:
    """Graphs by rung, and the reason of each rung that cannot be captured."""
    graphs, reasons = {}, {}
    for name, chain in chains.items():
        try:
            graphs[name] = device.capture(chain)
        except RuntimeError as error:
            reasons[name] = f"cannot be captured into a CUDA graph: {_first_line(error)}"
    return graphs, reasons


def row_of(problem: Problem, entry: Entry) -> Row:
    """What the result file keeps of `entry`."""
    gpu = entry.gpu
    return {
        "case": problem.case.name,
        "dtype": str(problem.case.dtype).removeprefix("torch."),
        "M": problem.shape.M,
        "N": problem.shape.N,
        "K": problem.shape.K,
        "rung": entry.rung.name,
        "method": "graph" if problem.shape.is_small else "events",
        "median_us": gpu and round(gpu.median_us, 3),
        "p10_us": gpu and round(gpu.p10_us, 3),
        "p90_us": gpu and round(gpu.p90_us, 3),
        "n": len(gpu.samples) if gpu else 0,
        "tflops": gpu and round(problem.shape.flops / gpu.median_us / 1e6, 1),
        "eager_us": entry.eager and round(entry.eager.median_us, 3),
        "error": entry.error,
        "first_call_s": entry.first_call_s and round(entry.first_call_s, 4),
        "note": entry.note,
        "reason": entry.reason,
    }


def _nothing() -> None:
    """The call of a rung that cannot be called."""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
