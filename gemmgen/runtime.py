"""Runs an epilogue's GEMM on a CUDA device: plans a call once per distinct metadata, then only fills pointers."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gemmgen import background, dispatcher, tuned, ways
from gemmgen.bind import Binding, bind, bind_epilogue
from gemmgen.config import GemmConfig
from gemmgen.device import Target, is_capturing, is_current, made_current, target_of
from gemmgen.dispatcher import DispatchedOp
from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import GemmgenError, UnsupportedOp
from gemmgen.ir.graph import Graph
from gemmgen.jit.build import BuiltKernel
from gemmgen.plan import Key, Operands, Plan, found_once, pointwise_plan, run
from gemmgen.problem import Extents, check_matrices, check_operands, extents_of, representative_of, result_dtype
from gemmgen.ways import UNFUSED, Fused, Selection, Way

if TYPE_CHECKING:
    from gemmgen import tune

logger = logging.getLogger(__name__)

MAX_PLANS = 4096  # per op; a plan without its kernel is about 5 KB
MAX_CHOICES = 1024  # per op, of about 18 KB

Compile = Literal["eager", "background"]
Tune = Literal["off", "cached", "first-call"]
Reference = Callable[[Tensor, Tensor, Operands], list[Tensor]]


@dataclass(frozen=True)
class Options:
    """How a `Gemm` chooses and builds its kernels; see there."""

    config: GemmConfig | None = None
    compile: Compile = "eager"
    tune: Tune = "cached"
    grad_accum: bool = False


DEFAULT = Options()


class Plans:
    """A bounded table of plans by the metadata of the calls; safe to use from several threads."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Key, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Plan]) -> Plan:
        """The plan of `key`; the first that is made stays, where several threads make one."""
        plan = self._plans.get(key)
        if plan is None:
            made = make()
            if not made.is_final and is_capturing():
                return made  # what forbade to measure or to build is over at the next call
            with self._lock:
                plan = self._plans.setdefault(key, made)
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
        return plan

    def replace(self, key: Key, plan: Plan) -> None:
        with self._lock:
            if key in self._plans:
                self._plans[key] = plan


@dataclass(frozen=True)
class Upgrade:
    """A fused kernel in the making, for a call that is served by `stand_in` meanwhile."""

    stand_in: Plan
    binding: Binding
    target: Target
    building: Future[tuple[Fused, BuiltKernel]]


class Runner:
    """Runs the GEMM of one graph (per accumulator type) on CUDA devices."""

    def __init__(
        self, graph_for: Callable[[DType], Graph], options: Options = DEFAULT, reference: Reference | None = None
    ):
        self._graph_for = graph_for
        self.options = options
        self._reference = reference
        self._plans = Plans()
        self._choices: dict[Key, Selection] = {}
        self._built: dict[Key, BuiltKernel] = {}
        self._pending: dict[Key, Upgrade] = {}
        self.dispatched: DispatchedOp | None = None

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        operands: Operands,
        out_dtype: torch.dtype | None = None,
        outs: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The results of the graph in order; written into `outs` where given."""
        device = A.device

        def planned_and_run() -> list[Tensor]:
            plan = self.plan(A, B, operands, out_dtype, outs)
            if self.dispatched is not None and outs is None:
                self.dispatched.offer(plan)
            return run(plan, (A, B), operands, device, outs)

        return _on(device, planned_and_run)

    def plan(
        self,
        A: Tensor,
        B: Tensor,
        operands: Operands,
        out_dtype: torch.dtype | None = None,
        outs: Sequence[Tensor] | None = None,
    ) -> Plan:
        """The plan of a call, made now (the device being current) if it has not been made yet."""
        precision = allows_tf32() if A.dtype == torch.float32 else None
        tensors = (A, B, *operands.values(), *(outs or ()))
        key = (A.get_device(), out_dtype, precision, len(outs or ()), *map(_metadata, tensors))

        def make() -> Plan:
            binding = bind_call(self._graph_for, A, B, operands, out_dtype, outs)
            return self._make(key, binding, target_of(A.device), lambda: self._tunable(binding, A, B, operands))

        plan = self._plans.get(key, make)
        return self._upgraded(key, plan) if self._pending else plan

    def tunable(
        self,
        A: Tensor,
        B: Tensor,
        operands: Operands,
        out_dtype: torch.dtype | None = None,
        outs: Sequence[Tensor] | None = None,
    ) -> tune.Call:
        """A call as it is bound, with its tensors."""
        return self._tunable(bind_call(self._graph_for, A, B, operands, out_dtype, outs), A, B, operands)

    def _tunable(self, binding: Binding, A: Tensor, B: Tensor, operands: Operands) -> tune.Call:
        from gemmgen import tune  # only what is measured needs it

        return tune.Call(binding, target_of(A.device), (A, B), operands, lambda: self._referred(A, B, operands))

    def forget_plans(self) -> None:
        """Choose anew for every call, as after a measurement."""
        self._plans, self._choices, self._built, self._pending = Plans(), {}, {}, {}
        if self.dispatched is not None:
            self.dispatched.forget()

    def _referred(self, A: Tensor, B: Tensor, operands: Operands) -> list[Tensor]:
        assert self._reference is not None, "a runner without a reference tunes only what torch can multiply"
        return self._reference(A, B, operands)

    def _make(self, key: Key, binding: Binding, target: Target, tunable: Callable[[], tune.Call]) -> Plan:
        dispatcher.build_in_background()
        if binding.extents.K == 0 or binding.is_empty:
            return pointwise_plan(binding, target.arch)
        selection = self.selection(binding, target, tunable)
        if way := self._stand_in(selection, binding, target):
            stand_in = replace(way.plan(binding, target), is_final=False)
            self._pending[key] = Upgrade(stand_in, binding, target, _building(selection, binding, target))
            return stand_in
        plan = ways.first_of(selection.ways, binding, lambda way: self._planned(way, binding, target))
        return plan if selection.is_final else replace(plan, is_final=False)

    def selection(
        self, binding: Binding, target: Target, tunable: Callable[[], tune.Call] | None = None
    ) -> Selection:
        """What a call runs: `selected`, once for each class of M.

        Args:
            tunable: makes the call to measure where this op measures first calls; without it nothing is measured.
        """
        key = _choice_key(binding, target)
        if (kept := self._choices.get(key)) is not None:
            return kept
        is_final = self._has_measured(binding, tunable)
        selection = replace(selected(binding, target, self.options), is_final=is_final)
        if is_final:
            if len(self._choices) >= MAX_CHOICES:
                self._choices.clear()
            self._choices[key] = selection
        return selection

    def _has_measured(self, binding: Binding, tunable: Callable[[], tune.Call] | None) -> bool:
        """Measure a first call, where this op does that. False where that is left for a later call to do."""
        if self.options.tune != "first-call" or self.options.config is not None:
            return True
        if tunable is None or is_capturing():
            return False
        from gemmgen import tune

        try:
            tune.found_or_measured(tunable())
        except torch.OutOfMemoryError as error:
            logger.warning("`%s` is not measured: %s", binding.graph.name, error)
            return False
        return True

    def _stand_in(self, selection: Selection, binding: Binding, target: Target) -> Way | None:
        """What serves calls while the chosen kernel is compiled; None where none has to be, or nothing can serve."""
        first = selection.ways[0]
        if self.options.compile != "background" or not isinstance(first, Fused):
            return None
        able = (way for way in UNFUSED.values() if way.reject_reason(binding, target.arch) is None)
        way = next(able, None)
        return None if way is None or self._is_built(first, binding, target) else way

    def _is_built(self, way: Fused, binding: Binding, target: Target) -> bool:
        """Whether the kernel of `way` is in the cache, where one that this op has used is known by its file."""
        built = self._built.get(_kernel_key(way, binding, target))
        return (built is not None and built.cubin.is_file()) or way.is_built(binding, target.arch)

    def _planned(self, way: Way, binding: Binding, target: Target) -> Plan:
        """The plan of `way`. A kernel is looked for in the cache, or built, once."""
        if not isinstance(way, Fused):
            return way.plan(binding, target)
        return found_once(
            self._built,
            _kernel_key(way, binding, target),
            lambda: way.built(binding, target.arch),
            lambda built: way.plan_of(built, binding, target),
        )

    def _upgraded(self, key: Key, plan: Plan) -> Plan:
        """`plan`, or the fused one that was built in the background, which replaces it from now on."""
        plans, pending = self._plans, self._pending  # `forget_plans` may come in between
        upgrade = pending.get(key)
        if upgrade is None or not upgrade.building.done() or is_capturing():
            return plan
        for other, waiting in list(pending.items()):  # C++ may serve other M of the class from now on
            is_of_device = other[0] == key[0]  # kernels are loaded for the current one
            if waiting.building is upgrade.building and is_of_device and pending.pop(other, None) is not None:
                settled = self._settled(waiting)
                plans.replace(other, settled)
                plan = settled if other == key else plan
        return plan

    def _settled(self, upgrade: Upgrade) -> Plan:
        """The plan of the fused kernel that was built, or what stood in for it, for good, where that failed."""
        if upgrade.building.exception() is None:  # else it was logged
            way, built = upgrade.building.result()
            self._built[_kernel_key(way, upgrade.binding, upgrade.target)] = built
            try:
                return way.plan_of(built, upgrade.binding, upgrade.target)
            except GemmgenError as error:
                logger.warning("%s was built in the background, but its calls stay unfused: %s", way.label, error)
        return replace(upgrade.stand_in, is_final=True)


def _choice_key(binding: Binding, target: Target) -> Key:
    """All that `selected` depends on, but for the op's options and what was measured."""
    epilogue = (binding.slots, binding.readings, binding.dtypes, binding.has_contiguous_outs)
    extents = representative_of(binding.extents)
    return (target, extents, binding.signature, binding.a, binding.b, epilogue)


def _kernel_key(way: Fused, binding: Binding, target: Target) -> Key:
    return (way.config.compiled(), binding.signature, target.arch)


def selected(binding: Binding, target: Target, options: Options) -> Selection:
    """What a call runs, by what was measured before or else by the model. Measures nothing.

    All calls of a class of M (`representative_of`) run the same.
    """
    binding = replace(binding, extents=representative_of(binding.extents))
    if options.config is None and options.tune != "off" and target.name:
        entry = tuned.find(tuned.key_of(binding, target))
        if entry is not None and (selection := entry.selection(binding, target)):
            return selection
    return ways.select(binding, target, options.config)


def _building(selection: Selection, binding: Binding, target: Target) -> Future[tuple[Fused, BuiltKernel]]:
    fused = tuple(way for way in selection.ways if isinstance(way, Fused))
    key = (binding.graph.digest, binding.signature, fused, target.arch)
    what = f"the fused kernel of `{binding.graph.name}`"
    return background.submit(key, what, lambda: ways.first_built(fused, binding, target.arch))


class PointwiseRunner:
    """Runs an elementwise graph, one without a mainloop, on CUDA devices."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._plans = Plans()

    def __call__(
        self, extents: Extents, operands: Operands, dtypes: Sequence[DType], device: torch.device
    ) -> list[Tensor]:
        """The results of the graph in order.

        Args:
            extents: of the tile; K is not read.
            dtypes: the stored dtype of each result.
        """
        key = (device.index, extents, *dtypes, *map(_metadata, operands.values()))

        def make() -> Plan:
            return self._make(extents, operands, dtypes, target_of(device))

        return _on(device, lambda: run(self._plans.get(key, make), None, operands, device))

    def _make(self, extents: Extents, operands: Operands, dtypes: Sequence[DType], target: Target) -> Plan:
        return pointwise_plan(bind_epilogue(self._graph, extents, operands, dtypes), target.arch)


def _on(device: torch.device, work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """`work` with `device` current; nothing is switched where it is so already."""
    if is_current(device.index):
        return work()
    with made_current(device):
        return work()


def bind_call(
    graph_for: Callable[[DType], Graph],
    A: Tensor,
    B: Tensor,
    operands: Operands,
    out_dtype: torch.dtype | None,
    outs: Sequence[Tensor] | None = None,
) -> Binding:
    """Check the operands of a call and decide how they are read.

    Raises:
        GemmgenError: says which operand is wrong, what was expected, and what to do.
    """
    a = dtype_of(A.dtype)
    graph = graph_for(DType.I32 if a is DType.I8 else DType.F32)
    check_matrices(graph.name, A, B)
    extents = extents_of(graph.name, A, B)
    check_operands(graph, operands, extents, A)
    if a is DType.F64 and not A.is_cpu:
        raise UnsupportedOp(f"`{graph.name}`: no GPU kernel multiplies float64\n  Use float32, or run it on the CPU.")
    wanted = dtype_of(out_dtype) if out_dtype is not None else None
    dtypes = [result_dtype(result, a, wanted) for result in graph.results]
    return bind(bind_epilogue(graph, extents, operands, dtypes, outs or ()), A, B, math_of(a))


def math_of(a: DType) -> str:
    """The mainloop's arithmetic; fp32 follows torch's setting for its own products."""
    if a is not DType.F32:
        return "tensor"
    return "tf32" if allows_tf32() else "simt"


def allows_tf32() -> bool:
    """Whether torch's own fp32 products may use tf32.

    `torch.get_float32_matmul_precision` says the same, but warns in torch 2.9, and raises where the setting was made by
    `torch.backends.cuda.matmul.fp32_precision`.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


def _metadata(value: Tensor | float) -> object:
    if isinstance(value, Tensor):
        return (value.dtype, value.get_device(), value.shape, value.stride(), value.data_ptr() & 15)
    return None
