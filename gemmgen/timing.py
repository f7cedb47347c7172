"""Fair GPU timing: calls interleaved in a shuffled order each round, L2 cold, medians, host time kept out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], object]

_cuda: Any = torch.cuda  # much of it has no annotations

WARMUP_CALLS = 3
# A rested H200 clocks at 1980 MHz; large products, one behind the other, bring it to its 700 W within tenths of a
# second, and then to 1500 to 1650 MHz: bench/results/power-h200.json. In some mixes the clock stays low for the first
# seconds at the limit (about 4 s in one of settle-h200.json) and then rises by 8 %. Kernels rank differently in all
# these states, and timed by another rhythm than that in which they will run: tuner-state-h200.json.
LONG_US = 1000.0  # of a sample
LARGE_US = 100.0  # of a call
SETTLE_S = 5.0
SPIN_CYCLES = 200_000  # before each call, and more where the host takes longer: 0.1 ms
SPIN_CYCLES_PER_US = 1980  # of a rested card; at its power limit a pause is up to a third longer


@dataclass(frozen=True)
class Timing:
    """What repeated samples of one call say, in microseconds for one call."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: tuple[float, ...]

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Summarise `samples` (microseconds, at least one), which are kept in the order they were taken."""
        ordered = sorted(samples)
        return Timing(quantile(ordered, 0.5), quantile(ordered, 0.1), quantile(ordered, 0.9), tuple(samples))


def quantile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile of ascending `ordered`, linear between neighbours."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class Recorder(Protocol):
    """Times single calls. The time of a call may be read only after `synchronize`."""

    def record(self, call: Call) -> Callable[[], float]:
        """Run `call`; the result gives its time in microseconds."""

    def synchronize(self) -> None:
        """Wait until every recorded call has finished."""


class ColdL2Recorder:
    """GPU time of a call whose operands are not in L2.

    Before each call a buffer of twice the L2 is read and the GPU spins, so that the host has queued the whole
    call before the GPU reaches it: Python and launch latency stay out of the time. Where the host was slower
    than that, the sample is thrown away and the spin doubled.

    The buffer is not written: what a write leaves in L2 goes to memory when the call needs its place, in the call's
    time, and the more so the faster it reads: bench/results/flush-h200.json.
    """

    _MAX_SPIN_CYCLES = 40_000_000  # about 20 ms; a host slower than this is part of the answer

    def __init__(self, device: torch.device | None = None, spin_cycles: int = SPIN_CYCLES):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.zeros(2 * l2_bytes // torch.float32.itemsize, device=device or "cuda")
        self._sum = torch.zeros((), device=self._flush.device)
        self._spin_cycles = spin_cycles

    def record(self, call: Call) -> Callable[[], float]:
        while True:
            start, end, host_was_late = self._attempt(call)
            if not host_was_late or self._spin_cycles >= self._MAX_SPIN_CYCLES:
                return lambda: float(start.elapsed_time(end)) * 1e3
            self._spin_cycles *= 2

    def _attempt(self, call: Call) -> tuple[Any, Any, bool]:
        start, end = _timing_event(), _timing_event()
        torch.sum(self._flush, dim=0, out=self._sum)
        _spin(self._spin_cycles)
        start.record()
        call()
        host_was_late = start.query()
        end.record()
        return start, end, host_was_late

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class WallRecorder:
    """Wall time from a quiet device to a quiet device: host and device time together."""

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter):
        self._synchronize = synchronize
        self._clock = clock

    def record(self, call: Call) -> Callable[[], float]:
        self._synchronize()
        start = self._clock()
        call()
        self._synchronize()
        elapsed_us = (self._clock() - start) * 1e6
        return lambda: elapsed_us

    def synchronize(self) -> None:
        self._synchronize()


def shuffled_rounds(names: Sequence[str], rounds: int, seed: int = 0) -> Iterator[list[str]]:
    """`rounds` orders of `names`, each complete and each in its own reproducible order."""
    generator = random.Random(seed)
    for _ in range(rounds):
        order = list(names)
        generator.shuffle(order)
        yield order


def measure(
    callables: Mapping[str, Call],
    rounds: int = 25,
    *,
    min_rounds: int = 7,
    budget_s: float = float("inf"),
    calls: int = 1,
    warmup: int = WARMUP_CALLS,
    seed: int = 0,
    settle_s: float = SETTLE_S,
    recorder: Recorder | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time `callables` against each other; never compare figures of two different `measure` runs.

    Each round runs every callable once, in a new order, so that drift of clocks and temperature hits all alike.

    Args:
        callables: what to time, by name.
        rounds: samples of each callable.
        min_rounds: samples taken even when `budget_s` is over.
        budget_s: no further round starts after this many seconds.
        calls: calls that one callable makes (a captured graph may hold several); times are divided by it.
        warmup: untimed calls of each before the first round.
        seed: of the shuffling.
        settle_s: seconds that the last round of the warm-up is repeated for where it takes a callable longer than
            `LONG_US`, and than `LARGE_US` for each call: such load brings a card to its power limit.
        recorder: how one call is timed; `ColdL2Recorder` by default, which needs a GPU.
        clock: seconds, for `budget_s` and `settle_s`.

    Returns:
        One `Timing` per name.
    """
    recorder = recorder or ColdL2Recorder()
    _warm_up(callables, warmup, recorder)
    if warmup:
        _settle(callables, max(LONG_US, calls * LARGE_US), settle_s, recorder, clock)
    deadline = clock() + budget_s
    samples: dict[str, list[float]] = {name: [] for name in callables}
    for index, order in enumerate(shuffled_rounds(list(callables), rounds, seed)):
        if index >= min_rounds and clock() > deadline:
            break
        for name, time_us in _record_round(callables, order, recorder).items():
            samples[name].append(time_us / calls)
    return {name: Timing.of(taken) for name, taken in samples.items()}


def _warm_up(callables: Mapping[str, Call], warmup: int, recorder: Recorder) -> None:
    for _ in range(warmup - 1):
        for call in callables.values():
            call()
    recorder.synchronize()


def _settle(
    callables: Mapping[str, Call], long_us: float, settle_s: float, recorder: Recorder, clock: Callable[[], float]
) -> None:
    """The last round of the warm-up, again and again where it is a long one."""
    until = clock() + settle_s
    while _longest_us(callables, recorder) > long_us and clock() < until:
        pass


def _longest_us(callables: Mapping[str, Call], recorder: Recorder) -> float:
    return max(_record_round(callables, list(callables), recorder).values(), default=0.0)


def _record_round(callables: Mapping[str, Call], order: Sequence[str], recorder: Recorder) -> dict[str, float]:
    pending = {name: recorder.record(callables[name]) for name in order}
    recorder.synchronize()
    return {name: time_us() for name, time_us in pending.items()}


def graphed(call: Call, warmup: int = WARMUP_CALLS) -> Call:
    """Capture `call` into a CUDA graph; the result replays it without the host's share of the time.

    `call` is run `warmup` times first, on a side stream, so that it has compiled and allocated what it needs.

    Raises:
        RuntimeError: `call` synchronises, or does something else that cannot be captured.
    """
    stream = _cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _timing_event() -> Any:
    return _cuda.Event(enable_timing=True)


def _spin(cycles: int) -> None:
    _cuda._sleep(cycles)  # torch has no public busy-wait
