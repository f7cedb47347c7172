"""The ways to run a call: a fused kernel of some config, torch's own op, or torch's product and a pointwise kernel.

All keep one numerics contract: accumulate in fp32 (int32 for int8), the whole epilogue in fp32, one rounding.
How torch's products accumulate in fp32 follows torch's settings for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from gemmgen import choose, jit, pipeline
from gemmgen.arch import Arch
from gemmgen.bind import Binding
from gemmgen.config import GemmConfig
from gemmgen.device import Target
from gemmgen.errors import CompileError, IllegalConfig
from gemmgen.jit.build import BuiltKernel
from gemmgen.plan import PlainTorchOp, Plan, fused_plan, library_plan, pointwise_plan
from gemmgen.problem import Extents
from gemmgen.source import KernelSource
from gemmgen.torch_ops import PRODUCTS, TorchOp, torch_op

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fused:
    """One kernel of `config`."""

    config: GemmConfig
    name: ClassVar[str] = "fused"

    @property
    def label(self) -> str:
        return f"fused {self.config.label}{_run_time_values(self.config)}"

    def reject_reason(self, binding: Binding, arch: Arch) -> str | None:
        """Why it cannot run the call, or None when it can."""
        return choose.reject_reason(binding.signature, self.config, arch)

    def estimate_us(self, binding: Binding, extents: Extents, target: Target) -> float:
        """The model's time for a call like that of `binding` with these extents, in microseconds."""
        estimate_us = choose.estimate_us(binding.signature, extents, self.config, target.sm_count)
        return choose.beside_other_ways_us(estimate_us, self.config, extents)

    def fitted_to(self, extents: Extents) -> Fused:
        """This way for another M: with a swizzle no wider than suits that."""
        fitted = choose.fitted_to(extents, self.config)
        return self if self.config.swizzle <= fitted.swizzle else Fused(fitted)

    def facts(self) -> dict[str, object]:
        """What `way_of` makes this way from again; JSON."""
        return {"way": self.name, "config": asdict(self.config)}

    def source(self, binding: Binding, arch: Arch) -> KernelSource:
        """The CUDA text. Raises IllegalConfig where `reject_reason` has a reason."""
        return pipeline.kernel_source(binding, self.config, arch)

    def is_built(self, binding: Binding, arch: Arch) -> bool:
        """Whether its kernel is in the cache."""
        return jit.find(self.source(binding, arch)) is not None

    def built(self, binding: Binding, arch: Arch) -> BuiltKernel:
        """Its kernel, from the cache or built now. Raises what `jit.build` raises."""
        (built,) = jit.build([self.source(binding, arch)])
        return built

    def plan(self, binding: Binding, target: Target) -> Plan:
        """The plan, its kernel built now if it is not in the cache. Raises what `jit.build` raises."""
        return self.plan_of(self.built(binding, target.arch), binding, target)

    def plan_of(self, built: BuiltKernel, binding: Binding, target: Target) -> Plan:
        """The plan of a kernel that is built."""
        return fused_plan(binding, self.config, built, target)


@dataclass(frozen=True)
class Split:
    """torch's product into an fp32 (or int32) accumulator in memory, then the pointwise kernel over it."""

    name: ClassVar[str] = "split"
    label: ClassVar[str] = "split: cuBLAS, then the pointwise kernel"

    def reject_reason(self, binding: Binding, arch: Arch) -> str | None:
        """Why it cannot run the call, or None when it can."""
        product = PRODUCTS.get(binding.signature.a.dtype)
        if product is None:
            return f"torch has no product of {binding.signature.a.dtype.text} that accumulates in fp32"
        return product.reject_reason(binding, arch)

    def estimate_us(self, binding: Binding, extents: Extents, target: Target) -> float:
        """The model's time for a call like that of `binding` with these extents, in microseconds."""
        return choose.estimate_split_us(binding.signature, extents, target.sm_count)

    def fitted_to(self, extents: Extents) -> Split:
        """This way for another M."""
        return self

    def facts(self) -> dict[str, object]:
        """What `way_of` makes this way from again; JSON."""
        return {"way": self.name}

    def plan(self, binding: Binding, target: Target) -> Plan:
        """The plan; its kernel needs NVRTC alone. Raises what `jit.build_module` raises."""
        product = PRODUCTS[binding.signature.a.dtype]
        return pointwise_plan(binding, target.arch, product.bound(binding), product.plain(binding))


@dataclass(frozen=True)
class Library:
    """An op of torch that means the same as the whole call, such as `torch.addmm`. Nothing is built for it."""

    name: ClassVar[str] = "library"
    label: ClassVar[str] = "library: torch's own op"

    def reject_reason(self, binding: Binding, arch: Arch) -> str | None:
        """Why it cannot run the call, or None when it can."""
        op = torch_op(binding, arch)
        return op if isinstance(op, str) else None

    def estimate_us(self, binding: Binding, extents: Extents, target: Target) -> float:
        """The model's time for a call like that of `binding` with these extents, in microseconds."""
        op = torch_op(binding, target.arch)
        passes, activates = (op.passes, op.activates) if isinstance(op, TorchOp) else (0, False)
        return choose.estimate_library_us(binding.signature, extents, target.sm_count, passes, activates)

    def fitted_to(self, extents: Extents) -> Library:
        """This way for another M."""
        return self

    def facts(self) -> dict[str, object]:
        """What `way_of` makes this way from again; JSON."""
        return {"way": self.name}

    def plan(self, binding: Binding, target: Target) -> Plan:
        """The plan. Raises IllegalConfig where `reject_reason` has a reason."""
        op = torch_op(binding, target.arch)
        if isinstance(op, str):
            raise IllegalConfig(f"no op of torch computes `{binding.graph.name}`: {op}")
        return library_plan(binding, op.call, PlainTorchOp(op.name, op.bias) if op.is_plain else None)


Way = Fused | Split | Library
AnyWay = TypeVar("AnyWay", Fused, Way)
T = TypeVar("T")


def way_of(facts: Mapping[str, Any]) -> Way:
    """The way that `facts()` described.

    Raises:
        ValueError, TypeError, KeyError: it described none.
    """
    if facts["way"] in UNFUSED:
        return UNFUSED[facts["way"]]
    if facts["way"] != Fused.name:
        raise ValueError(f"no way is called {facts['way']!r}")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts["config"].items()
    }
    return Fused(GemmConfig(**fields))


SPLIT, LIBRARY = Split(), Library()
UNFUSED: dict[str, Way] = {way.name: way for way in (LIBRARY, SPLIT)}


def _run_time_values(config: GemmConfig) -> str:
    """What `GemmConfig.label` leaves out, because no skeleton is compiled for it."""
    is_compiled_in = config.compiled().split_k == config.split_k
    parts = [f" split_k {config.split_k}"] if config.split_k > 1 and not is_compiled_in else []
    parts += [f" swizzle {config.swizzle}"] if config.swizzle > 1 else []
    parts += [f" raster {config.raster}"] if config.raster != "heuristic" else []
    return "".join(parts)


# Choosing


@dataclass(frozen=True)
class Timed:
    """A way and its time: measured, or the model's."""

    way: Way
    time_us: float


@dataclass(frozen=True)
class Selection:
    """What a call runs.

    Attributes:
        ways: to be tried in this order: a kernel that a compiler refuses, as it spills, gives way to the next.
        why: the reason in one line.
        table: the ways that were compared, fastest first.
        measured: whether the times are; else they are the model's.
        is_final: not where the call was to be measured, and that is left for a later one.
    """

    ways: tuple[Way, ...]
    why: str
    table: tuple[Timed, ...]
    measured: bool = False
    is_final: bool = True
    notes: tuple[str, ...] = ()


# how many times faster than the best fused kernel the model must call a way before it is chosen unmeasured
MARGIN: dict[Way, float] = {LIBRARY: 1.0, SPLIT: 1.25}


def select(binding: Binding, target: Target, config: GemmConfig | None = None) -> Selection:
    """The ways to run a call, by the model alone.

    Args:
        config: the only one to use, where the user gave one.

    Raises:
        IllegalConfig: no way is legal; the message lists the reasons.
    """
    if config is not None:
        Fused(config).source(binding, target.arch)  # raises where it is illegal
        return Selection((Fused(config),), "the config given to Gemm", ())
    ranked = choose.ranked(binding.signature, binding.extents, target.arch, target.sm_count)
    fused = [
        Timed(Fused(c.config), choose.beside_other_ways_us(c.time_us, c.config, binding.extents)) for c in ranked
    ]
    fused.sort(key=lambda timed: timed.time_us)
    unfused, notes = _unfused(binding, target)
    ahead = [timed for timed in unfused if timed.time_us * MARGIN[timed.way] < fused[0].time_us]
    behind = [timed for timed in unfused if timed not in ahead]
    order = tuple(timed.way for timed in (*ahead, *fused, *behind))
    table = tuple(sorted([*fused, *unfused], key=lambda timed: timed.time_us))
    if ahead:
        times = fused[0].time_us / ahead[0].time_us
        why = f"by the model {times:.2f} times as fast as any fused kernel (no measurement)"
        return Selection(order, why, table, notes=notes)
    return Selection(order, "the fastest fused kernel by the model (no measurement)", table, notes=notes)


def _unfused(binding: Binding, target: Target) -> tuple[list[Timed], tuple[str, ...]]:
    """The ways without a kernel of ours for the whole, the most promising first; and why others are not there."""
    reasons = {way: way.reject_reason(binding, target.arch) for way in UNFUSED.values()}
    timed = [
        Timed(way, way.estimate_us(binding, binding.extents, target))
        for way, reason in reasons.items()
        if reason is None
    ]
    notes = tuple(f"no {way.name} way: {reason}" for way, reason in reasons.items() if reason)
    return sorted(timed, key=lambda each: each.time_us * MARGIN[each.way]), notes


def first_built(ways: Sequence[Fused], binding: Binding, arch: Arch) -> tuple[Fused, BuiltKernel]:
    """The first of `ways` that builds, with its kernel. Raises as `first_of`."""
    return first_of(ways, binding, lambda way: (way, way.built(binding, arch)))


def first_of(ways: Sequence[AnyWay], binding: Binding, attempt: Callable[[AnyWay], T]) -> T:
    """What `attempt` makes of the first of `ways` that builds.

    Raises:
        CompileError: none builds; the error of the first.
    """
    refusals: list[CompileError] = []
    for way in ways:
        try:
            return attempt(way)
        except CompileError as error:
            refusals.append(error)
            logger.warning("%s is refused for `%s`: %s", way.label, binding.graph.name, error)
    raise refusals[0]
