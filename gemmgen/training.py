"""The derived backward behind the ops: plans, the extra results that a forward saves, and the gradients.

A call that needs gradients runs the plan's forward, which is the epilogue with its saved tiles as further results.
Its backward runs the plan's elementwise graphs, then the two GEMMs on the gradient of the accumulator, which are calls
of an op of their own: by default torch's product, and what measured fastest where the options say so. In a chain the
dgrad GEMM of a call carries the elementwise backward of the call before it as its epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from gemmgen import backward
from gemmgen.backward import ACCUM, BackwardPlan, fused_into_dgrad, plan_backward
from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import NoBackward, OperandError
from gemmgen.evaluate import TORCH_DTYPES
from gemmgen.ir import build
from gemmgen.ir.graph import Graph, Result
from gemmgen.ir.node import Axes, Op
from gemmgen.ops import (
    ElementwiseOp,
    EpilogueOp,
    apply_at_one_level,
    below_autograd,
    depending,
    register,
    register_elementwise,
    returned,
)
from gemmgen.problem import EIGHT_BIT, Extents, extents_of, result_dtype
from gemmgen.runtime import DEFAULT, Options

Flat = tuple["Tensor | float | None", ...]
Save = Literal["auto", "recompute"]
T = TypeVar("T")


def differentiable(graphs: Mapping[DType, Graph], options: Options = DEFAULT, save: Save = "auto") -> EpilogueOp:
    """The op of an epilogue with its derived backward.

    Args:
        save: "auto" keeps the fewest bytes that need no second GEMM; "recompute" keeps nothing beyond the inputs.
    """
    if save == "recompute":  # an op of its own, since autograd's choice is the op's
        graphs = {accum: replace(graph, name=f"{graph.name}_recompute") for accum, graph in graphs.items()}
    return register(graphs, options, functools.partial(_differentiated_alone, save=save))


def _differentiated_alone(op: EpilogueOp, args: Flat, out_dtype: torch.dtype | None, *, save: Save) -> object:
    return differentiated([Stage(op, save)], args, out_dtype)


@dataclass(frozen=True)
class Stage:
    """A GEMM of a chain: its A is the first result of the stage before."""

    op: EpilogueOp
    save: Save


def differentiated(stages: Sequence[Stage], args: Flat, out_dtype: torch.dtype | None) -> object:
    """The results of the last stage, with autograd's record of how to differentiate them.

    Results that have no derivative, integers above all, do not require a gradient.

    Args:
        args: A, then for each stage B and the operands as in its op's schema.
        out_dtype: of the last stage.
    """
    calls = planned(stages, args, out_dtype)
    if calls[-1].prepared is None:
        with torch._C._AutoDispatchBelowAutograd():
            return returned(_run(calls, args, out_dtype)[0])
    return returned(apply_at_one_level(_Differentiable, calls, out_dtype, *args, *_links(calls, args)))


# Plans


@dataclass(frozen=True)
class Like:
    """What the gradient of an argument has to look like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_column_major: bool

    @staticmethod
    def of(value: object) -> Like | None:
        if not isinstance(value, Tensor):
            return None
        is_column_major = value.dim() >= 2 and value.stride(-2) == 1 and value.stride(-1) != 1
        return Like(value.shape, value.dtype, value.device, is_column_major)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)  # there is one for each plan, and it is looked up by identity
class Prepared:
    """A plan, and what follows from it.

    Attributes:
        forward_op: computes the results, then the tiles that the backward needs.
        reads: the operands that the backward reads.
        options: of the GEMMs of the backward; a fixed config and grad_accum are the forward's alone.
    """

    plan: BackwardPlan
    forward_op: EpilogueOp
    reads: frozenset[str]
    reruns_mainloop: bool
    options: Options


@dataclass(frozen=True)
class Call:
    """One differentiated call of an op.

    Attributes:
        prepared: None where nothing here needs a gradient, or no result can carry one.
        extents: of the tile.
        matrix_dtype: that the gradient of accum is stored in: A's, bf16 for 8-bit A.
        likes: for A, B and the operands' arguments; None for numbers, and for an A that another call makes.
        kept: which of those the backward reads.
        buffer: fp32, in B's shape; takes the sum of the gradients of B, which autograd then does not see.
    """

    op: EpilogueOp
    prepared: Prepared | None
    extents: Extents
    matrix_dtype: DType
    likes: tuple[Like | None, ...]
    kept: tuple[bool, ...]
    buffer: Tensor | None = None

    @property
    def plan(self) -> BackwardPlan:
        """The plan of a call that has one."""
        assert self.prepared is not None
        return self.prepared.plan

    @property
    def forward_op(self) -> EpilogueOp:
        return self.prepared.forward_op if self.prepared else self.op

    @property
    def positions(self) -> dict[str, int]:
        """Where each operand stands among A, B and the operands."""
        return {name: 2 + at for name, at in self.op.operand_positions.items()}

    @property
    def wide(self) -> DType:
        """The dtype of what is still to be summed."""
        return DType.F64 if self.matrix_dtype is DType.F64 else DType.F32

    def wants(self, needs: Sequence[bool]) -> tuple[str, ...]:
        """Names of gradients, from which of A, B and the operands need one."""
        names = [name for name, at in self.positions.items() if needs[at]]
        return (ACCUM, *names) if needs[0] or needs[1] else tuple(names)


def planned(stages: Sequence[Stage], args: Flat, out_dtype: torch.dtype | None) -> tuple[Call, ...]:
    """One `Call` for each stage. Whether a tensor requires a gradient is read from `args`."""
    A = args[0]
    assert isinstance(A, Tensor)
    a, extents, needs_A = dtype_of(A.dtype), None, A.requires_grad
    calls: list[Call] = []
    for stage, own in zip(stages, _split([stage.op for stage in stages], args[1:]), strict=True):
        B = own[0]
        assert isinstance(B, Tensor)
        name = stage.op.graph.name
        extents = replace(extents, N=B.shape[-1], K=extents.N) if extents else extents_of(name, A, B)
        likes = (None if calls else Like.of(A), *map(Like.of, own))
        needs = (needs_A, *map(_requires_grad, own))
        call = _planned(stage, extents, a, likes, needs, out_dtype if stage is stages[-1] else None)
        if call.prepared is not None and stage.op.runner.options.grad_accum and B.requires_grad:
            call = replace(call, buffer=_buffer_of(B, name))
        calls.append(call)
        graph = stage.op.graph_for(_accum_of(a))
        a, needs_A = result_dtype(graph.results[0], a, None), calls[-1].prepared is not None
    return tuple(calls)


def _planned(
    stage: Stage,
    extents: Extents,
    a: DType,
    likes: tuple[Like | None, ...],
    needs: tuple[bool, ...],
    out_dtype: torch.dtype | None,
) -> Call:
    matrix_dtype = _matrix_dtype(a)
    call = Call(stage.op, None, extents, matrix_dtype, likes, (False,) * len(likes))
    wants, stored = frozenset(call.wants(needs)), dtype_of(out_dtype) if out_dtype else None
    prepared = _prepared(stage, _accum_of(a), wants, stored, matrix_dtype) if wants else None
    if prepared is None:
        return call
    read, reruns = {call.positions[name] for name in prepared.reads}, prepared.reruns_mainloop
    kept = (needs[1] or reruns, needs[0] or reruns, *(at in read for at in range(2, len(likes))))
    return replace(call, prepared=prepared, kept=kept)


def _buffer_of(B: Tensor, name: str) -> Tensor | None:
    """The `main_grad` of the weight that B is, or is the transposed view of, in B's shape; None if it has none.

    Raises:
        OperandError: the buffer does not fit the weight, or B is another view of it.
    """
    weight = B if B._base is None else B._base
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return None
    if not isinstance(buffer, Tensor) or buffer.dtype != torch.float32 or buffer.shape != weight.shape:
        raise OperandError(
            f"`{name}`: main_grad of a weight of shape {tuple(weight.shape)} is no fp32 tensor of that shape\n"
            "  Make it torch.zeros_like(weight, dtype=torch.float32)."
        )
    if B.dim() == 2 and B.shape == weight.shape and B.stride() == weight.stride():
        return buffer
    if B.dim() == 2 and B.shape == weight.shape[::-1] and B.stride() == weight.stride()[::-1]:
        return buffer.t()
    raise OperandError(
        f"`{name}`: B is a part of a weight that has a main_grad, or batched\n"
        "  grad_accum takes the whole weight, as it is or transposed. Delete main_grad, or drop grad_accum."
    )


def _accum_of(a: DType) -> DType:
    return DType.I32 if a is DType.I8 else DType.F32


def _matrix_dtype(a: DType) -> DType:
    return DType.BF16 if a in EIGHT_BIT else a


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _split(ops: Iterable[EpilogueOp], flat: Sequence[T]) -> list[tuple[T, ...]]:
    """For each op its B and its operands."""
    parts, rest = [], tuple(flat)
    for op in ops:
        count = 1 + op.argument_count
        parts.append(rest[:count])
        rest = rest[count:]
    return parts


@functools.lru_cache(maxsize=1024)
def _prepared(
    stage: Stage, accum: DType, wants: frozenset[str], out_dtype: DType | None, matrix_dtype: DType
) -> Prepared | None:
    """The plan of `stage`, or None where no result carries a gradient to what is wanted."""
    graph = stage.op.graph_for(accum)
    if out_dtype is not None:
        results = tuple(
            r if r.dtype is not None or r.is_reduction else replace(r, dtype=out_dtype) for r in graph.results
        )
        graph = replace(graph, results=results)
    if not backward.differentiable(graph, wants):
        return None
    plan = plan_backward(graph, wants, save=stage.save, tile_dtype=matrix_dtype)
    loaded = {node.attr for part in (*plan.passes, plan.backward) for node in part.nodes() if node.op is Op.LOAD}
    reads = frozenset(p.name for p in graph.parameters if p.name in loaded)
    options = _options_of_backward(stage.op)
    return Prepared(plan, _forward_op(stage.op, plan, matrix_dtype), reads, plan.reruns_mainloop, options)


def _options_of_backward(op: EpilogueOp) -> Options:
    return replace(op.runner.options, config=None, grad_accum=False)


def _forward_op(op: EpilogueOp, plan: BackwardPlan, matrix_dtype: DType) -> EpilogueOp:
    forward = plan.forward
    if forward is plan.graph:
        return op
    saved = {each.name for each in plan.saved}  # they do not follow the caller's `out_dtype`
    results = tuple(replace(r, dtype=r.dtype or matrix_dtype) if r.name in saved else r for r in forward.results)
    named = replace(forward, name=f"{op.graph.name}_train", results=results)
    return register({DType.F32: named, DType.I32: named}, op.runner.options)


# Autograd


class _Differentiable(_SingleLevelFunction):
    """Autograd's view of one call, or of a chain of them."""

    @staticmethod
    def forward(ctx: Any, calls: tuple[Call, ...], out_dtype: torch.dtype | None, *given: Tensor | float | None) -> Any:
        count = 1 + sum(len(call.likes) - 1 for call in calls)
        args, links = given[:count], given[count:]
        with below_autograd():
            results, memories = _run(calls, args, out_dtype)
        graph = calls[-1].plan.graph
        results = results[: len(graph.results)]
        ctx.calls, ctx.count = calls, count
        ctx.numbers = [tuple(None if isinstance(x, Tensor) else x for x in memory) for memory in memories]
        ctx.set_materialize_grads(False)
        tensors = [x if isinstance(x, Tensor) else None for memory in memories for x in memory]
        ctx.save_for_backward(*tensors, *links)
        carriers = calls[-1].plan.cotangents
        ctx.mark_non_differentiable(*(t for r, t in zip(graph.results, results, strict=True) if r.name not in carriers))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        calls: tuple[Call, ...] = ctx.calls
        plan = calls[-1].plan
        arrived = {
            r.name: cotangent
            for r, cotangent in zip(plan.graph.results, cotangents, strict=True)
            if cotangent is not None and r.name in plan.cotangents
        }
        rest = [None] * (len(ctx.needs_input_grad) - 2 - ctx.count)
        if not arrived:
            return (None, None, *[None] * ctx.count, *rest)
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative would go through all that the forward depended on
            inputs = [tensor for tensor in tensors if _requires_grad(tensor)]
            arrived = {name: depending(x, inputs, plan.graph.name) for name, x in arrived.items()}
        memories = _recalled(calls, tensors, ctx.numbers)
        del tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept: what `memories` forgets is free then
        gradients = _gradients(calls, memories, arrived, ctx.needs_input_grad[2 : 2 + ctx.count])
        return (None, None, *gradients, *rest)


def _links(calls: Sequence[Call], args: Flat) -> list[Tensor]:
    """Empty views' copies of inputs that the backward does not read, to tell a second derivative that they matter."""
    flags = [calls[0].kept[0], *(flag for call in calls for flag in call.kept[1:])]
    loose = [x for x, kept in zip(args, flags, strict=True) if isinstance(x, Tensor) and x.requires_grad and not kept]
    return [x[:0].clone() if x.dim() else x for x in loose]


Memory = tuple["Tensor | float | None", ...]  # A, B, the operands' arguments, then the saved tiles; None if not kept


def _run(
    calls: Sequence[Call], args: Flat, out_dtype: torch.dtype | None
) -> tuple[tuple[Tensor, ...], list[Memory]]:
    """The results of the last call's forward, and what each call's backward will read."""
    A, memories = args[0], []
    results: tuple[Tensor, ...] = ()
    for call, own in zip(calls, _split([call.op for call in calls], args[1:]), strict=True):
        results = _listed(call.forward_op.overload(A, *own, out_dtype=out_dtype if call is calls[-1] else None))
        kept = [x if is_kept or not isinstance(x, Tensor) else None
                for x, is_kept in zip((A, *own), call.kept, strict=True)]  # fmt: skip
        memories.append((*kept, *_saved(call, results)))
        A = results[0]
    return results, memories


def _listed(results: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _saved(call: Call, results: Sequence[Tensor]) -> list[Tensor]:
    if call.prepared is None:
        return []
    names = [result.name for result in call.forward_op.graph.results]
    return [results[names.index(saved.result)] for saved in call.plan.saved]


def _recalled(
    calls: Sequence[Call], tensors: Sequence[Tensor | None], numbers: Sequence[Memory]
) -> list[Memory]:
    memories, at = [], 0
    for own in numbers:
        found = tensors[at : at + len(own)]
        memories.append(tuple(n if t is None else t for t, n in zip(found, own, strict=True)))
        at += len(own)
    return memories


# Gradients

Gradients = dict[str, Tensor]  # by name, "accum" and operands, each of the shape that the tile's batch gives it


def _gradients(
    calls: Sequence[Call], memories: list[Memory], arrived: Mapping[str, Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradient of each argument that needs one: of A, then for each call of B and the operands.

    `memories` are forgotten as far as nothing later reads them, so that a tile's memory serves the next one.
    """
    needed = _needed(calls, needs)
    computed: Gradients | None = _elementwise(calls[-1], calls[-1].wants(needed[-1]), arrived, memories[-1])
    memories[-1] = memories[-1][:2]
    gradients: list[Tensor | None] = []
    for at in reversed(range(len(calls))):
        call, need = calls[at], needed[at]
        if computed is None:
            return [None] * (len(needs) - len(gradients)) + gradients
        gradients[:0] = _of_arguments(call, computed, memories[at][0], need)
        memories[at] = (None, memories[at][1])
        if at == 0:
            return [_of_A(call, computed, memories[at][1]) if need[0] else None, *gradients]
        previous = calls[at - 1]
        wants = previous.wants(needed[at - 1])
        computed = _behind(call, previous, wants, memories[at - 1], computed, memories[at][1]) if need[0] else None
        memories[at], memories[at - 1] = (), memories[at - 1][:2]
    raise AssertionError("a chain has a first call")


def _needed(calls: Sequence[Call], needs: Sequence[bool]) -> list[tuple[bool, ...]]:
    """For each call which of A, B and the operands need a gradient; A does where something before the call does."""
    needed, needs_A = [], needs[0]
    for call, own in zip(calls, _split([call.op for call in calls], needs[1:]), strict=True):
        needed.append((needs_A, *own))
        needs_A = call.prepared is not None and any(needed[-1])
    return needed


def _of_arguments(
    call: Call, computed: Gradients, A: Tensor | float | None, need: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of B and of the operands' arguments."""
    gradients: list[Tensor | None] = [None] * len(need)
    for name, at in call.positions.items():
        if need[at]:
            gradients[at] = _fitted(computed.get(name), call.likes[at])
    if need[1] and call.buffer is not None:
        _accumulate(call.buffer, computed.get(ACCUM), A)
    elif need[1]:
        gradients[1] = _wgrad(call, computed.get(ACCUM), A)
    return gradients[1:]


def _of_A(call: Call, computed: Gradients, B: Tensor | float | None) -> Tensor:
    return _fitted(_dgrad(call, computed[ACCUM], B) if ACCUM in computed else None, call.likes[0])


def _behind(
    call: Call,
    previous: Call,
    wants: tuple[str, ...],
    remembered: Memory,
    computed: Gradients,
    B: Tensor | float | None,
) -> Gradients:
    """The gradients of `previous`, from those of `call`, which its first result is A of, and whose B is given.

    They come out of that call's dgrad GEMM, as its epilogue, if possible.
    """
    if ACCUM not in computed:
        return {}
    name = previous.plan.graph.results[0].name
    part = _part(previous.prepared, wants, (name,))
    fused = _fused(part, name, _stored_dtypes(previous, part.plan.backward))
    if fused is None:
        return _elementwise(previous, wants, {name: _dgrad(call, computed[ACCUM], B)}, remembered)
    d_accum = computed[ACCUM]
    assert isinstance(B, Tensor)
    known = _known(previous, remembered)
    flat = fused.flat_operands(_chosen(known, fused.graph))
    return _named(fused.graph, fused.overload(d_accum, B.to(d_accum.dtype).mT, *flat))


@dataclass(frozen=True, eq=False)  # as Prepared
class Part:
    """A plan for the gradients that are needed, from the cotangents that arrived.

    Attributes:
        aliases: gradients that are a cotangent, unchanged: the result whose.
        rest: computes the others.
    """

    plan: BackwardPlan
    aliases: Mapping[str, str]
    rest: Graph
    reruns_mainloop: bool
    options: Options


@functools.lru_cache(maxsize=1024)
def _part(prepared: Prepared, wants: tuple[str, ...], arrived: tuple[str, ...]) -> Part:
    plan = prepared.plan.restricted(wants, arrived)
    return Part(plan, plan.aliases, plan.without_aliases(), plan.reruns_mainloop, prepared.options)


@functools.lru_cache(maxsize=1024)
def _fused(part: Part, cotangent: str, dtypes: tuple[DType, ...]) -> EpilogueOp | None:
    """The dgrad GEMM with the plan's backward as its epilogue; None where that cannot be."""
    graph = _behind_dgrad(part.plan, cotangent)
    if graph is None:
        return None
    graph = replace(_stored_as(graph, dtypes), name=f"{part.plan.graph.name}_dgrad")
    return register({DType.F32: graph, DType.I32: graph}, part.options)


def _behind_dgrad(plan: BackwardPlan, cotangent: str) -> Graph | None:
    if plan.passes or not plan.backward.results:
        return None
    try:  # with the accumulator of the GEMM that it moves to
        return fused_into_dgrad(replace(plan, backward=replace(plan.backward, accum=DType.F32)), f"d_{cotangent}")
    except NoBackward:
        return None


def _elementwise(call: Call, wants: tuple[str, ...], arrived: Mapping[str, Tensor], memory: Memory) -> Gradients:
    """Gradients by passes over the tile, from the cotangents that arrived, by result."""
    part = _part(call.prepared, wants, tuple(arrived))
    known = {**_known(call, memory), **{f"d_{name}": cotangent for name, cotangent in arrived.items()}}
    for each in _passes(part, call.wide):
        known.update(zip((r.name for r in each.graph.results), _over_tile(each, call, known), strict=True))
    gradients = {name: arrived[result] for name, result in part.aliases.items()}
    if ACCUM in gradients:
        gradients[ACCUM] = gradients[ACCUM].to(TORCH_DTYPES[call.matrix_dtype])
    last = _last_pass(part, _stored_dtypes(call, part.rest))
    if isinstance(last, ElementwiseOp):
        gradients |= _named(last.graph, _over_tile(last, call, known))
    elif last is not None:
        gradients |= _named(last.graph, last.overload(*memory[:2], *last.flat_operands(_chosen(known, last.graph))))
    return gradients


def _known(call: Call, memory: Memory) -> dict[str, Tensor | float]:
    """Operands and saved tiles by name, as far as they were kept."""
    known = {name: memory[at + (call.likes[at] is None)] for name, at in call.positions.items()}  # a number is beside
    known |= {s.name: t for s, t in zip(call.plan.saved, memory[len(call.likes) :], strict=True)}
    return {name: value for name, value in known.items() if value is not None}


def _over_tile(op: ElementwiseOp, call: Call, known: Mapping[str, Tensor | float]) -> list[Tensor]:
    return op(call.extents, _chosen(known, op.graph))


def _chosen(known: Mapping[str, Tensor | float], graph: Graph) -> dict[str, Tensor | float]:
    return {parameter.name: known[parameter.name] for parameter in graph.parameters}


def _named(graph: Graph, results: Tensor | Sequence[Tensor]) -> Gradients:
    return {r.name.removeprefix("d_"): tensor for r, tensor in zip(graph.results, _listed(results), strict=True)}


@functools.lru_cache(maxsize=1024)
def _passes(part: Part, wide: DType) -> tuple[ElementwiseOp, ...]:
    return tuple(register_elementwise(_stored_as(each, (wide,) * len(each.results))) for each in part.plan.passes)


@functools.lru_cache(maxsize=1024)
def _last_pass(part: Part, dtypes: tuple[DType, ...]) -> ElementwiseOp | EpilogueOp | None:
    """What computes the gradients that are not the cotangents themselves."""
    graph = _stored_as(part.rest, dtypes)
    if not graph.results:
        return None
    if part.reruns_mainloop:
        return register({DType.F32: graph, DType.I32: graph}, part.options)
    return register_elementwise(graph)


def _stored_as(graph: Graph, dtypes: tuple[DType, ...]) -> Graph:
    results = tuple(replace(result, dtype=dtype) for result, dtype in zip(graph.results, dtypes, strict=True))
    return replace(graph, results=results)


def _stored_dtypes(call: Call, graph: Graph) -> tuple[DType, ...]:
    """The dtype of each gradient that `graph` computes: its operand's, but wide if a batch is yet to be summed."""
    names = [result.name.removeprefix("d_") for result in graph.results]
    return tuple(call.matrix_dtype if name == ACCUM else _stored_dtype(call, name) for name in names)


def _stored_dtype(call: Call, name: str) -> DType:
    like = call.likes[call.positions[name]]
    assert like is not None
    axes = next(p.axes for p in call.op.graph.parameters if p.name == name)
    rank = {Axes.SCALAR: 0, Axes.TILE: 2}.get(axes, 1)
    is_shared = call.extents.batched and len(like.shape) <= rank
    return call.wide if is_shared else dtype_of(like.dtype)


def _fitted(gradient: Tensor | None, like: Like | None) -> Tensor:
    """`gradient` (None: zero) in the shape and dtype of `like`, summed over a batch that the argument is shared by."""
    assert like is not None
    if gradient is None:
        return like.zeros()
    rank = len(like.shape)
    if gradient.dim() > rank or (gradient.dim() == rank and gradient.shape != like.shape):
        gradient = gradient.sum(0)
    return gradient.reshape(like.shape).to(like.dtype)


@functools.lru_cache(maxsize=1024)
def _gemm_of(name: str, options: Options) -> EpilogueOp:
    """A @ B in A's dtype: dgrad and wgrad of the epilogue called `name`."""
    graphs = {
        accum: Graph(f"{name}_grad", accum, (), (Result("D", build.accum(accum)),), "single")
        for accum in (DType.F32, DType.I32)
    }
    return register(graphs, options)


def _multiplied(call: Call, left: Tensor, right: Tensor) -> Tensor:
    assert call.prepared is not None
    product: Tensor = _gemm_of(call.op.graph.name, call.prepared.options).overload(left, right)
    return product


def _dgrad(call: Call, d_accum: Tensor, B: Tensor | float | None) -> Tensor:
    """dA = d_accum @ B^T."""
    assert isinstance(B, Tensor)
    return _multiplied(call, *_dgrad_matrices(d_accum, B))


def _dgrad_matrices(d_accum: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    return d_accum, B.to(d_accum.dtype).mT


def _wgrad(call: Call, d_accum: Tensor | None, A: Tensor | float | None) -> Tensor:
    """dB = A^T @ d_accum in B's memory order, summed over the batch where B is shared by it."""
    like = call.likes[1]
    if d_accum is None:
        return _fitted(None, like)
    assert isinstance(A, Tensor) and like is not None
    A = A.to(d_accum.dtype)
    product = _multiplied(call, *_wgrad_matrices(d_accum, A, like))
    return _fitted(product.mT if like.is_column_major else product, like)


def _wgrad_matrices(d_accum: Tensor, A: Tensor, like: Like) -> tuple[Tensor, Tensor]:
    """What is multiplied for dB, or for its transpose where B is column-major."""
    if len(like.shape) == 2 and A.dim() == 3:  # one GEMM over all rows of all batches
        A, d_accum = A.flatten(0, 1), d_accum.flatten(0, 1)
    return (d_accum.mT, A) if like.is_column_major else (A.mT, d_accum)


def _accumulate(buffer: Tensor, d_accum: Tensor | None, A: Tensor | float | None) -> None:
    """Add A^T @ d_accum, summed over the batch, to `buffer` [K, N] in fp32 by one GEMM."""
    if d_accum is None:
        return
    assert isinstance(A, Tensor)
    d_accum, A = d_accum.reshape(-1, d_accum.shape[-1]), A.to(d_accum.dtype).reshape(-1, A.shape[-1])
    left, right = A.mT, d_accum
    if not buffer.is_contiguous():  # the transposed view of a weight
        buffer, left, right = buffer.t(), d_accum.mT, A
    if buffer.is_cuda and left.dtype != torch.float32:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
    else:
        buffer.addmm_(left.to(buffer.dtype), right.to(buffer.dtype))


def gemms_of_backward(op: EpilogueOp, A: Tensor, B: Tensor) -> dict[str, tuple[EpilogueOp, Tensor, Tensor]]:
    """dgrad and wgrad of a call with such matrices: an op and what it multiplies, on the meta device."""
    dtype = TORCH_DTYPES[_matrix_dtype(dtype_of(A.dtype))]
    shape = extents_of(op.graph.name, A, B).shape(Axes.TILE)
    d_accum = torch.empty(shape, dtype=dtype, device="meta")
    left, right = (torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta") for x in (A, B))
    like = Like.of(B)
    assert like is not None
    gemm = _gemm_of(op.graph.name, _options_of_backward(op))
    return {
        "dgrad": (gemm, *_dgrad_matrices(d_accum, right)),
        "wgrad": (gemm, *_wgrad_matrices(d_accum, left, like)),
    }


def explain(op: EpilogueOp, save: Save, a: DType = DType.BF16) -> str:
    """The plan of all gradients of an op as text.

    Args:
        a: A's dtype, which decides what a saved tile weighs.

    Raises:
        NoBackward: no result has a derivative.
    """
    return _whole_plan(Stage(op, save), a).explain()


def explain_chain(stages: Sequence[Stage]) -> str:
    """The plans of all gradients of a chain, from the last call back, as text; A is taken to be bf16.

    Raises:
        NoBackward: a result of the last call has no derivative.
    """
    texts, behind = [], None
    for stage in reversed(stages):
        graph = stage.op.graph
        if behind is not None and not backward.differentiable(graph, _names(graph)):
            return "\n".join([*texts, f"backward of `{graph.name}`: none, as its result has no derivative"])
        plan = _whole_plan(stage, DType.BF16)
        is_fused = behind is not None and _behind_dgrad(plan, graph.results[0].name) is not None
        texts.append(plan.explain(behind if is_fused else None))
        behind = graph.name
    return "\n".join(texts)


def _whole_plan(stage: Stage, a: DType) -> BackwardPlan:
    graph = stage.op.graph_for(_accum_of(a))
    return plan_backward(graph, _names(graph), save=stage.save, tile_dtype=_matrix_dtype(a))


def _names(graph: Graph) -> list[str]:
    return [ACCUM, *(p.name for p in graph.parameters)]
