"""The derived backward behind an epilogue's op: plans, the extra results that a forward saves, and the gradients.

A call that needs gradients runs the plan's forward, which is the epilogue with its saved tiles as further results.
Its backward runs the plan's elementwise graphs, then the two GEMMs on the gradient of the accumulator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from gemmgen.backward import ACCUM, BackwardPlan, plan_backward
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType, dtype_of
from gemmgen.evaluate import TORCH_DTYPES
from gemmgen.ir.graph import Graph, Result
from gemmgen.ir.node import Axes
from gemmgen.ops import EpilogueOp, apply_at_one_level, register, register_elementwise
from gemmgen.problem import EIGHT_BIT, Extents, extents_of
from gemmgen.runtime import Operands

Flat = tuple["Tensor | float | None", ...]


def differentiable(graphs: Mapping[DType, Graph], config: GemmConfig | None = None, save: str = "auto") -> EpilogueOp:
    """The op of an epilogue with its derived backward.

    Args:
        save: "auto" keeps the fewest bytes that need no second GEMM; "recompute" keeps nothing beyond the inputs.
    """
    if save == "recompute":  # an op of its own, since autograd's choice is the op's
        graphs = {accum: replace(graph, name=f"{graph.name}_recompute") for accum, graph in graphs.items()}
    return register(graphs, config, functools.partial(_differentiated, save=save))


@dataclass(frozen=True)
class Call:
    """One differentiated call: its plan, the op of its forward, and where its tensors are."""

    op: EpilogueOp
    plan: BackwardPlan
    forward_op: EpilogueOp
    extents: Extents
    matrix_dtype: DType  # that d_accum is stored in: A's, bf16 for 8-bit A


def _differentiated(op: EpilogueOp, args: Flat, out_dtype: torch.dtype | None, *, save: str) -> object:
    call = _planned(op, args, out_dtype, save)
    results = apply_at_one_level(_Differentiable, call, out_dtype, *args)
    return results[0] if len(results) == 1 else results


def _planned(op: EpilogueOp, args: Flat, out_dtype: torch.dtype | None, save: str) -> Call:
    A, B = args[:2]
    assert isinstance(A, Tensor) and isinstance(B, Tensor)
    a = dtype_of(A.dtype)
    matrix_dtype = DType.BF16 if a in EIGHT_BIT else a
    wants = frozenset(
        ([ACCUM] if A.requires_grad or B.requires_grad else [])
        + [name for name, at in op.operand_positions.items() if _requires_grad(args[2 + at])]
    )
    graph = op.graph_for(DType.I32 if a is DType.I8 else DType.F32)
    plan = _plan(graph, wants, dtype_of(out_dtype) if out_dtype else None, matrix_dtype, save)
    forward = plan.forward
    if forward is plan.graph:
        forward_op = op
    else:
        named = replace(forward, name=f"{op.graph.name}_train", results=_stored_as(forward, plan, matrix_dtype))
        forward_op = register({DType.F32: named, DType.I32: named}, op.runner.config)
    return Call(op, plan, forward_op, extents_of(op.graph.name, A, B), matrix_dtype)


def _stored_as(forward: Graph, plan: BackwardPlan, matrix_dtype: DType) -> tuple[Result, ...]:
    """The results of `forward`, whose saved tiles do not follow the caller's `out_dtype`."""
    saved = {each.name for each in plan.saved}
    return tuple(replace(r, dtype=r.dtype or matrix_dtype) if r.name in saved else r for r in forward.results)


def _requires_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@functools.lru_cache(maxsize=1024)
def _plan(
    graph: Graph, wants: frozenset[str], out_dtype: DType | None, matrix_dtype: DType, save: str
) -> BackwardPlan:
    if out_dtype is not None:
        results = tuple(
            r if r.dtype is not None or r.is_reduction else replace(r, dtype=out_dtype) for r in graph.results
        )
        graph = replace(graph, results=results)
    return plan_backward(graph, wants, save=save, tile_dtype=matrix_dtype)


class _Differentiable(_SingleLevelFunction):
    """Autograd's view of one call."""

    @staticmethod
    def forward(ctx: Any, call: Call, out_dtype: torch.dtype | None, *args: Tensor | float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            returned = call.forward_op.overload(*args, out_dtype=out_dtype)
        results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        count = len(call.plan.graph.results)
        by_name = {r.name: t for r, t in zip(call.plan.forward.results, results, strict=True)}
        ctx.call, ctx.scalars = call, tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *(arg if isinstance(arg, Tensor) else None for arg in args),
            *(by_name[saved.result] for saved in call.plan.saved),
        )
        ctx.mark_non_differentiable(
            *(t for r, t in zip(call.plan.graph.results, results, strict=False) if r.name not in call.plan.cotangents)
        )
        return results[:count]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        call: Call = ctx.call
        tensors = ctx.saved_tensors
        args = tuple(
            tensor if tensor is not None else number
            for tensor, number in zip(tensors[: len(ctx.scalars)], ctx.scalars, strict=True)
        )
        saved = dict(zip((s.name for s in call.plan.saved), tensors[len(ctx.scalars) :], strict=True))
        arrived = {
            r.name: cotangent
            for r, cotangent in zip(call.plan.graph.results, cotangents, strict=True)
            if cotangent is not None and r.name in call.plan.cotangents
        }
        needs = ctx.needs_input_grad[2:]
        gradients = _gradients(call, args, saved, arrived, needs) if arrived else [None] * len(args)
        return (None, None, *gradients)


def _gradients(
    call: Call, args: Flat, saved: Mapping[str, Tensor], arrived: Mapping[str, Tensor], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradient of each argument of the op that needs one."""
    A, B = args[:2]
    assert isinstance(A, Tensor) and isinstance(B, Tensor)
    positions = {name: 2 + at for name, at in call.op.operand_positions.items()}
    wants = [name for name, at in positions.items() if needs[at]]
    plan = call.plan.restricted([ACCUM, *wants] if needs[0] or needs[1] else wants, arrived)
    operands = call.op.named_operands(args[2:])
    available = {**operands, **saved, **{f"d_{name}": cotangent for name, cotangent in arrived.items()}}
    computed = _elementwise(call, plan, A, B, available)
    gradients: list[Tensor | None] = [None] * len(args)
    for name in wants:
        operand = operands[name]
        assert isinstance(operand, Tensor)
        gradient = computed.get(name)
        gradients[positions[name]] = torch.zeros_like(operand) if gradient is None else _fitted(gradient, operand)
    if ACCUM in computed:
        d_accum = computed[ACCUM].to(TORCH_DTYPES[call.matrix_dtype])
        gradients[0] = _dgrad(d_accum, A, B) if needs[0] else None
        gradients[1] = _wgrad(d_accum, A, B) if needs[1] else None
    elif needs[0] or needs[1]:
        gradients[:2] = [torch.zeros_like(x) if need else None for x, need in ((A, needs[0]), (B, needs[1]))]
    return gradients


def _elementwise(
    call: Call, plan: BackwardPlan, A: Tensor, B: Tensor, available: Operands
) -> dict[str, Tensor]:
    """Gradients by name ("accum" and operands), each of the shape that the tile's batch gives it."""
    known = dict(available)
    for each in plan.passes:
        finished = replace(each, results=tuple(replace(r, dtype=_wide(call)) for r in each.results))
        results = register_elementwise(finished)(call.extents, _chosen(known, finished))
        known.update(zip((r.name for r in finished.results), results, strict=True))
    gradients = {name: known[f"d_{result}"] for name, result in plan.aliases.items()}
    graph = plan.without_aliases()
    if graph.results:
        graph = replace(graph, results=tuple(replace(r, dtype=_dtype(call, r.name, known)) for r in graph.results))
        results = _run(call, plan, graph, A, B, known)
        gradients.update(zip((r.name.removeprefix("d_") for r in graph.results), results, strict=True))
    return {name: gradient for name, gradient in gradients.items() if isinstance(gradient, Tensor)}


def _run(
    call: Call, plan: BackwardPlan, graph: Graph, A: Tensor, B: Tensor, known: Operands
) -> list[Tensor]:
    operands = _chosen(known, graph)
    if not plan.reruns_mainloop:
        return register_elementwise(graph)(call.extents, operands)
    op = register({DType.F32: graph, DType.I32: graph})
    results = op.overload(A, B, *op.flat_operands(operands))
    return [results] if isinstance(results, Tensor) else list(results)


def _chosen(known: Operands, graph: Graph) -> dict[str, Tensor | float]:
    return {parameter.name: known[parameter.name] for parameter in graph.parameters}


def _wide(call: Call) -> DType:
    return DType.F64 if call.matrix_dtype is DType.F64 else DType.F32


def _dtype(call: Call, name: str, known: Operands) -> DType:
    """The dtype to store a gradient in: its operand's, but wide where a batch is still to be summed."""
    operand = known.get(name.removeprefix("d_"))
    if not isinstance(operand, Tensor):
        return call.matrix_dtype
    rank = {Axes.SCALAR: 0, Axes.TILE: 2}.get(_axes(call.plan.graph, name.removeprefix("d_")), 1)
    is_shared = call.extents.batched and operand.dim() <= rank
    return _wide(call) if is_shared else dtype_of(operand.dtype)


def _axes(graph: Graph, name: str) -> Axes:
    return next(p.axes for p in graph.parameters if p.name == name)


def _fitted(gradient: Tensor, operand: Tensor) -> Tensor:
    """`gradient` in the operand's shape and dtype, summed over a batch that the operand is shared by."""
    if gradient.dim() > operand.dim() or (gradient.dim() == operand.dim() and gradient.shape != operand.shape):
        gradient = gradient.sum(0)
    return gradient.reshape(operand.shape).to(operand.dtype)


def _dgrad(d_accum: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """dA = d_accum @ B^T, summed over the batch where A is shared by it."""
    gradient = d_accum @ B.to(d_accum.dtype).mT
    return _fitted(gradient, A)


def _wgrad(d_accum: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """dB = A^T @ d_accum, summed over the batch where B is shared by it."""
    A = A.to(d_accum.dtype)
    if B.dim() == 2 and A.dim() == 3:  # one GEMM over all rows of all batches
        A, d_accum = A.reshape(-1, A.shape[-1]), d_accum.reshape(-1, d_accum.shape[-1])
    return _fitted(A.mT @ d_accum, B)


def explain(op: EpilogueOp, wants: Iterable[str] | None = None, matrix_dtype: DType = DType.BF16) -> str:
    """The backward plan of an op as text.

    Args:
        wants: "accum" and operand names; None for all.
    """
    graph = op.graph
    names = [ACCUM, *(p.name for p in graph.parameters)] if wants is None else wants
    save = op._differentiate.keywords["save"] if isinstance(op._differentiate, functools.partial) else "auto"
    return _plan(graph, frozenset(names), None, matrix_dtype, save).explain()
