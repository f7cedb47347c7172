"""Two ways to the gradients of a graph: torch's autograd through `evaluate`, and a `BackwardPlan` run by `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gemmgen.backward import BackwardPlan
from gemmgen.dtypes import DType
from gemmgen.evaluate import evaluate, round_to
from gemmgen.ir import Axes, Graph

Operands = Mapping[str, Tensor]


def cotangents_for(graph: Graph, names: tuple[str, ...], shape: torch.Size, seed: int = 0) -> dict[str, Tensor]:
    """Random cotangents of the named results, in the shapes that `evaluate` gives those."""
    generator = torch.Generator().manual_seed(seed)
    axes = {r.name: r.node.axes if r.is_reduction else Axes.TILE for r in graph.results}
    return {name: torch.randn(_shape(axes[name], shape), generator=generator, dtype=torch.float64) for name in names}


def by_autograd(graph: Graph, accum: Tensor, operands: Operands, cotangents: Operands) -> dict[str, Tensor]:
    """The oracle. Keys as in `BackwardPlan.backward`; zeros where torch finds no dependence."""
    leaves = {"accum": accum, **operands}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    dtypes = {result.name: None for result in graph.results}
    arguments = {name: value for name, value in leaves.items() if name != "accum"}
    results = evaluate(graph, leaves["accum"], arguments, dtypes, accum.dtype)
    loss = sum((results[name] * cotangent).sum() for name, cotangent in cotangents.items())
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def by_plan(
    plan: BackwardPlan, accum: Tensor, operands: Operands, cotangents: Operands, tile_dtype: DType | None = None
) -> dict[str, Tensor]:
    """What the kernels would do, in `accum`'s dtype: the forward, the passes, the backward.

    Saved tiles without a dtype of their own are rounded to `tile_dtype`, if given.
    """
    compute, shape = accum.dtype, accum.shape
    dtypes = {r.name: None if r.dtype is DType.F32 else r.dtype for r in plan.forward.results}
    forward = evaluate(plan.forward, accum, operands, dtypes, compute)
    known = dict(operands)
    for each in plan.saved:
        stored = each.dtype or tile_dtype
        value = forward[each.result]
        known[each.name] = (round_to(value, stored) if stored else value).to(compute)
    axes = {p.name: p.axes for graph in (*plan.passes, plan.backward) for p in graph.parameters}
    known |= {f"d_{name}": _broadcastable(value, axes.get(f"d_{name}"), shape) for name, value in cotangents.items()}
    gone = torch.full_like(accum, float("nan"))
    for each in plan.passes:
        done = evaluate(each, gone, known, {r.name: None for r in each.results}, compute)
        known |= {name: _broadcastable(value, axes[name], shape) for name, value in done.items() if name in axes}
    accum = accum if plan.reruns_mainloop else gone
    grads = evaluate(plan.backward, accum, known, {r.name: None for r in plan.backward.results}, compute)
    kinds = {p.name: p.axes for p in plan.graph.parameters} | {"accum": Axes.TILE}
    full = {name: torch.zeros(_shape(kinds[name], shape), dtype=compute) for name in plan.zeros}
    full |= {name.removeprefix("d_"): value for name, value in grads.items()}
    return {f"d_{name}": _broadcastable(value, kinds[name], shape) for name, value in full.items()}


def _shape(axes: Axes, shape: torch.Size) -> tuple[int, ...]:
    batch, rows, columns = shape
    return {
        Axes.TILE: (batch, rows, columns), Axes.ROW: (batch, columns), Axes.COL: (batch, rows), Axes.SCALAR: (batch,)
    }[axes]


def _broadcastable(value: Tensor, axes: Axes | None, shape: torch.Size) -> Tensor:
    batch, rows, columns = shape
    view = (batch, rows if axes is None or Axes.COL in axes else 1, columns if axes is None or Axes.ROW in axes else 1)
    return value if axes is None else value.view(view)
