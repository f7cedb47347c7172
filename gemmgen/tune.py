"""Measures the ways to run a call on the call itself: built in parallel, checked, the slow ones dropped early."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemmgen import choose, jit, tuned
from gemmgen.bind import Binding
from gemmgen.config import GemmConfig
from gemmgen.device import Target
from gemmgen.errors import CompileError, CompileForbidden, GemmgenError, IllegalConfig
from gemmgen.evaluate import TORCH_DTYPES
from gemmgen.plan import Operands, Plan, run
from gemmgen.timing import (
    SPIN_CYCLES,
    SPIN_CYCLES_PER_US,
    ColdL2Recorder,
    Recorder,
    Timing,
    measure,
)
from gemmgen.tuned import MOST, Entry, Measured
from gemmgen.ways import SPLIT, UNFUSED, Fused, Way

logger = logging.getLogger(__name__)

OUTLIERS = 1e-5  # share of elements that may differ more: an epilogue with a jump may land on its other side
TOLERANCE = 4e-3  # of the largest element; sums in another order, tf32 and fp8 products
STAGES = ((3, 1.3), (7, 1.1))  # rounds, and how many times slower than the best a way may be to go on
VARIED = 3  # ways whose rasters and swizzles are tried
FINALISTS = 6
MOST_ORDERS = 2  # rasters and swizzles of one kernel among the finalists
SETTLE_S = 1.0  # of load before the first stage, where it is a long one: with pauses the first place is decided by then
FINAL_S = 1.0  # after that no further round of a final starts, where it has had a few
# Large products alone, one behind the other, draw more power than among the other kernels of a model or a benchmark,
# and rank differently: a pause before each makes up for it. By bench/results/tuner-pause-h200.json none loses up to
# 4 %, 0.5 ms up to 1.9 %, and a third of a time above 5 ms, which leaves the card too cool, up to 6 %. The limit lies
# between these two: above 2 ms, times are 0 to 8 % above the suite's at 0.5 ms, and 0 to 9 % below them at a third.
PAUSE = 1 / 3  # of the best time
MOST_PAUSE_US = 750.0  # not measured itself
# Calls with few rows are timed one behind the other, as they run in a model: a kernel that starts before the one ahead
# has ended wins only there. Each has a B of its own, so that it is not in L2, and all else is little.
CHAINED_CALLS = 4
MOST_CHAINED_ROWS = 256
MOST_CHAINED_BYTES = 1 << 30  # of one B
LEAST_B_OF_CHAIN = 4  # bytes for each of what the calls share

_one_at_a_time = threading.Lock()  # two measurements would disturb each other


@dataclass(frozen=True)
class Call:
    """What is measured: a call as it is bound, with its tensors.

    Attributes:
        reference: makes the float64 results; asked only where the split way cannot run.
    """

    binding: Binding
    target: Target
    matrices: tuple[Tensor, Tensor]
    operands: Operands
    reference: Callable[[], list[Tensor]]

    @property
    def device(self) -> torch.device:
        return self.matrices[0].device

    def results(self, plan: Plan) -> list[Tensor]:
        """The results of `plan` in tensors of our own, in which nothing looks computed beforehand."""
        outs = [_poisoned(store.shape, store.dtype, self.device) for store in plan.stores]
        return run(plan, self.matrices, self.operands, self.device, outs)


def found_or_measured(call: Call) -> Entry:
    """What is kept for the call's bucket; else it is measured now and kept."""
    key = tuned.key_of(call.binding, call.target)
    with _one_at_a_time:
        return tuned.find(key) or _kept(key, call, None, MOST, rounds=15, recorder=None)


def measured(
    call: Call,
    configs: Sequence[GemmConfig] | None = None,
    most: int = MOST,
    rounds: int = 25,
    recorder: Recorder | None = None,
) -> Entry:
    """Measure the ways to run `call` and keep the times for its bucket.

    Args:
        configs: the fused kernels to try; by default those that the model does not call hopeless, but for those
            that failed before.
        most: fused kernels to try where `configs` is not given.
        rounds: samples of each way that is left at the end.
        recorder: how one call is timed; by default on the GPU with L2 cold.
    """
    with _one_at_a_time:
        return _kept(tuned.key_of(call.binding, call.target), call, configs, most, rounds, recorder)


def _kept(
    key: tuned.Key,
    call: Call,
    configs: Sequence[GemmConfig] | None,
    most: int,
    rounds: int,
    recorder: Recorder | None,
) -> Entry:
    before = tuned.find(key)
    known = before.failures if before is not None and configs is None else {}
    failed = set(map(_unordered, known))
    candidates = [way for way in candidates_of(call, configs, most) if _unordered(way) not in failed]
    plans, failures = _planned(call, candidates)
    plans, wrong = _checked(call, plans)
    times = _halved(call, plans, rounds, recorder) if plans else {}
    rows = [Measured(way, time_us) for way, time_us in times.items()]
    rows += [Measured(way, None, failure) for way, failure in {**known, **failures, **wrong}.items()]
    entry = Entry.of(call.binding.extents.M, tuple(rows))
    if rows:
        tuned.put(key, entry)
    return entry


def candidates_of(call: Call, configs: Sequence[GemmConfig] | None = None, most: int = MOST) -> list[Way]:
    """The ways worth measuring, torch's own op and split among them where they can run.

    Raises:
        IllegalConfig: one of `configs` cannot run the call; the message says why.
    """
    signature, extents, target = call.binding.signature, call.binding.extents, call.target
    if configs is None:
        ranked = choose.worth_measuring(signature, extents, target.arch, target.sm_count, most=most)
        fused = [Fused(choice.config) for choice in ranked]
    else:
        fused = [Fused(config) for config in dict.fromkeys(configs)]
    for way in fused:
        if reason := way.reject_reason(call.binding, target.arch):
            raise IllegalConfig(
                f"{way.config.label} cannot run `{call.binding.graph.name}`: {reason}\n  Leave it out of `configs`."
            )
    unfused = [way for way in UNFUSED.values() if way.reject_reason(call.binding, target.arch) is None]
    return [*fused, *unfused]


# Building and checking

Plans = dict[Way, Plan]
Failures = dict[Way, str]


def _planned(call: Call, candidates: Sequence[Way]) -> tuple[Plans, Failures]:
    """A plan for each candidate that builds and loads."""
    fused = [way for way in candidates if isinstance(way, Fused)]
    sources = [way.source(call.binding, call.target.arch) for way in fused]
    plans: Plans = {}
    failures: Failures = {}
    for way, built in zip(fused, jit.build(sources, on_error="return"), strict=True):
        if isinstance(built, CompileError):
            failures[way] = _first_line(built)
        elif isinstance(built, CompileForbidden):
            logger.info("%s is not measured: it is not in the cache", way.label)
        elif isinstance(built, GemmgenError):
            raise built  # the tools are missing: no candidate's fault
        else:
            _attempt(way, functools.partial(way.plan_of, built, call.binding, call.target), plans, failures)
    plans |= {way: way.plan(call.binding, call.target) for way in candidates if not isinstance(way, Fused)}
    return plans, failures


def _attempt(way: Way, make: Callable[[], Plan], plans: Plans, failures: Failures) -> None:
    try:
        plans[way] = make()
    except GemmgenError as error:
        failures[way] = _first_line(error)


def _checked(call: Call, plans: Plans) -> tuple[Plans, Failures]:
    """The plans that run and compute what they should; and what the others do."""
    expected = call.results(plans[SPLIT]) if SPLIT in plans else _rounded(call)
    good: Plans = {}
    failures: Failures = {}
    for way, plan in plans.items():
        try:
            wrong = disagreement(call.results(plan), expected)
        except torch.OutOfMemoryError:
            raise
        except (GemmgenError, RuntimeError) as error:  # torch's ops raise RuntimeError
            wrong = _first_line(error)
        if wrong:
            failures[way] = wrong
            logger.warning("%s is left out of tuning `%s`: %s", way.label, call.binding.graph.name, wrong)
        else:
            good[way] = plan
    return good, failures


def _rounded(call: Call) -> list[Tensor]:
    dtypes = [TORCH_DTYPES[dtype] for dtype in call.binding.dtypes]
    return [result.to(dtype) for result, dtype in zip(call.reference(), dtypes, strict=True)]


def disagreement(results: Iterable[Tensor], expected: Iterable[Tensor]) -> str:
    """How results differ by more than rounding, or the empty string."""
    for index, (result, want) in enumerate(zip(results, expected, strict=True)):
        count = _wrong_elements(result, want)
        if count > OUTLIERS * want.numel():
            return f"result {index} is wrong in {count} of {want.numel()} elements"
    return ""


def _wrong_elements(result: Tensor, expected: Tensor) -> int:
    got, want = result.to(torch.float32), expected.to(torch.float32)
    is_finite = torch.isfinite(want)
    same = (got == want) | (got.isnan() & want.isnan())
    peak = torch.where(is_finite, want, 0).abs().amax() if want.numel() else want.sum()
    limit = peak * tolerance_of(expected.dtype) + (0 if expected.dtype.is_floating_point else 1)
    near = is_finite & ((got - want).abs() <= limit)
    return int((~(same | near)).sum())


def tolerance_of(dtype: torch.dtype) -> float:
    """How far a stored result may be off, as a share of the largest."""
    return max(TOLERANCE, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point else TOLERANCE


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN in every float dtype, -1 in the others."""
    elements = math.prod(shape)
    raw = torch.full((elements * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return raw.view(dtype).reshape(shape)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# Measuring


def _halved(call: Call, plans: Plans, rounds: int, recorder: Recorder | None) -> dict[Way, float]:
    """A time for each way. One that was dropped has its ratio to the best of its stage: stages do not compare."""
    ratios: dict[Way, float] = {}
    left, best, chain = dict(plans), 0.0, _chain(call, next(iter(plans.values())))
    for stage, (few, limit) in enumerate(STAGES):
        # later stages find the card as the first one left it
        medians = _measured(
            call, left, chain, few, recorder or _paused(call, best), SETTLE_S if stage == 0 else 0.0
        )
        best = min(medians.values())
        ratios |= {way: time_us / best for way, time_us in medians.items()}
        left = {way: left[way] for way in sorted(medians, key=medians.__getitem__) if medians[way] <= limit * best}
        if stage == 0:
            left |= _variants(call, dict(list(left.items())[:VARIED]))
    final = _measured(call, _finalists(left), chain, rounds, recorder or _paused(call, best))
    slowest = max(final.values())  # nothing that was kept out of the final comes before what ran in it
    return {way: max(ratio * min(final.values()), slowest) for way, ratio in ratios.items()} | final


def _paused(call: Call, best_us: float) -> Recorder:
    pause_us = min(PAUSE * best_us, MOST_PAUSE_US)
    return ColdL2Recorder(call.device, max(SPIN_CYCLES, round(pause_us * SPIN_CYCLES_PER_US)))


def _finalists(plans: Plans) -> Plans:
    """The first of `plans`, the fastest, with few orders of each kernel: there shall be several kernels."""
    chosen: Plans = {}
    kernels: Counter[object] = Counter()
    for way, plan in plans.items():
        kernel = way.config.compiled() if isinstance(way, Fused) else way
        if len(chosen) < FINALISTS and kernels[kernel] < MOST_ORDERS:
            chosen[way] = plan
            kernels[kernel] += 1
    return chosen


def _unordered(way: Way) -> Way:
    """The same for all orders of one kernel's tiles."""
    return Fused(way.config.unordered()) if isinstance(way, Fused) else way


def _chain(call: Call, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """The matrices of the calls that are timed one behind the other, each with a B of its own; of one call else.

    Args:
        plan: any of the call.
    """
    A, B = call.matrices
    shared = [A.nbytes, *(x.nbytes for x in call.operands.values() if isinstance(x, Tensor))]
    shared += [math.prod(store.shape) * store.dtype.itemsize for store in plan.stores]
    is_small = call.binding.extents.M <= MOST_CHAINED_ROWS and B.nbytes <= MOST_CHAINED_BYTES
    # else a copy would be another problem to torch's products
    is_plain = torch.empty_like(B, device="meta").stride() == B.stride() and B.data_ptr() % 16 == 0
    if not is_small or not is_plain or B.nbytes < LEAST_B_OF_CHAIN * sum(shared):
        return [call.matrices]
    try:
        return [call.matrices, *((A, B.clone()) for _ in range(CHAINED_CALLS - 1))]
    except torch.OutOfMemoryError:
        return [call.matrices]


def _measured(
    call: Call,
    plans: Mapping[Way, Plan],
    chain: Sequence[tuple[Tensor, Tensor]],
    rounds: int,
    recorder: Recorder,
    settle_s: float = 0.0,
) -> dict[Way, float]:
    def run_all(plan: Plan) -> None:
        for matrices in chain:
            run(plan, matrices, call.operands, call.device)

    calls = {str(index): functools.partial(run_all, plan) for index, plan in enumerate(plans.values())}
    timings: dict[str, Timing] = measure(
        calls, rounds, budget_s=FINAL_S, calls=len(chain), warmup=1, settle_s=settle_s, recorder=recorder
    )
    return {way: timings[str(index)].median_us for index, way in enumerate(plans)}


def _variants(call: Call, plans: Plans) -> Plans:
    """The same kernels with other rasters and swizzles, which are values of a launch and need no build."""
    varied: Plans = {}
    for way, plan in plans.items():
        if isinstance(way, Fused) and way.config.family == "sm90" and plan.kernel is not None:
            for config in _orders(call, way.config):
                if Fused(config) not in plans:
                    varied[Fused(config)] = plan.with_order(config)
    return varied


def _orders(call: Call, config: GemmConfig) -> list[GemmConfig]:
    """Both rasters, each with the swizzle that suits it."""
    extents = call.binding.extents
    return [choose.fitted_to(extents, replace(config, raster=raster)) for raster in ("M", "N")]
