"""Every op in torch: the CPU implementation of each epilogue and the one oracle of all tests.

Values are tensors that broadcast as `[L, M, N]`: a Row is `[L or 1, 1, N]`, a Col `[L or 1, M, 1]`, a Scalar
`[L or 1, 1, 1]`. Arithmetic runs in `compute` (fp32, or float64 for float64 inputs and references).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gemmgen.dtypes import TORCH_NAMES, DType
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import COMPARISONS, REDUCTIONS, Node, Op

TORCH_DTYPES: dict[DType, torch.dtype] = {
    dtype: getattr(torch, name.removeprefix("torch.")) for name, dtype in TORCH_NAMES.items()
}

EVALUATE: dict[Op, Callable[..., Tensor]] = {
    Op.NEG: torch.neg,
    Op.ABS: torch.abs,
    Op.EXP: torch.exp,
    Op.EXP2: torch.exp2,
    Op.LOG: torch.log,
    Op.LOG1P: torch.log1p,
    Op.SQRT: torch.sqrt,
    Op.RSQRT: torch.rsqrt,
    Op.TANH: torch.tanh,
    Op.SIGMOID: torch.sigmoid,
    Op.ERF: torch.erf,
    Op.SIN: torch.sin,
    Op.COS: torch.cos,
    Op.RELU: torch.relu,
    # torch's softplus turns linear above 20, which float64 can tell from the true value
    Op.SOFTPLUS: lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.POW: torch.pow,
    Op.MINIMUM: torch.minimum,
    Op.MAXIMUM: torch.maximum,
    Op.LT: torch.lt,
    Op.LE: torch.le,
    Op.GT: torch.gt,
    Op.GE: torch.ge,
    Op.EQ: torch.eq,
    Op.NE: torch.ne,
    Op.WHERE: torch.where,
}


def round_to(x: Tensor, dtype: DType) -> Tensor:
    """`x` rounded to `dtype` by gemmgen's contract: nearest even; 8-bit types and int32 saturate, NaN kept in fp8.

    NaN becomes 0 in an integer type. The result has that torch dtype.
    """
    target = TORCH_DTYPES[dtype]
    if x.dtype == target:
        return x
    if dtype.is_integer:
        info = torch.iinfo(target)
        if x.dtype == torch.bool or not x.dtype.is_floating_point:
            return x.to(torch.int64).clamp(info.min, info.max).to(target)
        wide = torch.nan_to_num(x.double(), nan=0.0, posinf=info.max, neginf=info.min)
        return wide.round().clamp(info.min, info.max).to(target)
    if dtype in (DType.E4M3, DType.E5M2):
        limit = torch.finfo(target).max
        return x.float().clamp(-limit, limit).to(target)
    return x.to(target)


def evaluate(
    graph: Graph,
    accum: Tensor,
    operands: Mapping[str, Tensor],
    dtypes: Mapping[str, DType | None],
    compute: torch.dtype,
) -> dict[str, Tensor]:
    """The results of `graph`, in torch ops that autograd can follow.

    Args:
        accum: `[L, M, N]` in `compute`, or int32.
        operands: by name, shaped to broadcast against `[L, M, N]`, any dtype.
        dtypes: for each result the dtype to round to, or None to leave it in `compute`.
        compute: torch.float32 or torch.float64.

    Returns:
        `[L, M, N]` for each tile result; `[L, N]`, `[L, M]` or `[L]` for reductions.
    """
    values: dict[Node, Tensor] = {}
    for node in graph.nodes():
        values[node] = _value(node, values, accum, operands, compute)
    shape = accum.shape
    results = {}
    for result in graph.results:
        value = values[result.node]
        value = value if result.is_reduction else value.expand(shape)
        dtype = dtypes[result.name]
        results[result.name] = value.to(compute) if dtype is None else round_to(value, dtype)
    return results


def _value(
    node: Node, values: Mapping[Node, Tensor], accum: Tensor, operands: Mapping[str, Tensor], compute: torch.dtype
) -> Tensor:
    if node.op in EVALUATE:
        args = [values[arg] for arg in node.args]
        if node.op in COMPARISONS and any(arg.dtype.is_integer for arg in node.args):
            args = [arg.to(torch.int64) for arg in args]  # exact beyond 2^24, where fp32 is not
        return EVALUATE[node.op](*args)
    if node.op in REDUCTIONS:
        return _reduced(node, values[node.args[0]], accum.shape)
    if node.op is Op.ACCUM:
        return accum
    if node.op is Op.LOAD:
        return operands[str(node.attr)].to(compute)
    if node.op is Op.CLAMP:
        assert isinstance(node.attr, tuple)
        return torch.clamp(values[node.args[0]], *node.attr)
    if node.op is Op.CAST:
        return _cast(node, values[node.args[0]], compute)
    return _leaf(node, accum, compute)


def _leaf(node: Node, accum: Tensor, compute: torch.dtype) -> Tensor:
    if node.op is Op.CONST:
        assert isinstance(node.attr, float)
        return torch.tensor(node.attr, dtype=compute, device=accum.device)
    rows, columns = accum.shape[-2:]
    if node.op is Op.ROW_INDEX:
        return torch.arange(rows, device=accum.device).view(-1, 1)
    assert node.op is Op.COL_INDEX, node
    return torch.arange(columns, device=accum.device)


def _cast(node: Node, x: Tensor, compute: torch.dtype) -> Tensor:
    assert isinstance(node.attr, DType)
    if node.attr is DType.F32:
        return x.to(compute)
    if node.attr.is_integer:
        return round_to(x.detach(), node.attr)
    rounded = round_to(x.detach(), node.attr).to(compute)
    if not x.requires_grad:
        return rounded
    through: Tensor = _StraightThrough.apply(x, rounded)
    return through  # as torch's own casts between floating types


class _StraightThrough(torch.autograd.Function):
    """`rounded`, with the derivative of the identity towards `x`."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: object, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None


_DIMS = {"M": -2, "N": -1}


def _reduced(node: Node, x: Tensor, shape: torch.Size) -> Tensor:
    x = x.expand(shape)
    over = str(node.attr)
    dims = [_DIMS[axis] for axis in over]
    if node.op is Op.SUM:
        return x.sum(dims)
    if any(shape[dim] == 0 for dim in dims):  # torch refuses; the identity is what a fold over nothing gives
        kept = [extent for i, extent in enumerate(shape) if i - len(shape) not in dims]
        return x.new_full(kept, float("inf") if node.op is Op.MIN else float("-inf"))
    if node.op is Op.AMAX:
        return x.amax(dims)
    extreme = torch.max if node.op is Op.MAX else torch.min
    if over == "MN":  # without a dim: ties share the gradient
        return torch.stack([extreme(each) for each in x]) if len(x) else x.new_empty(0)
    return extreme(x, dims[0]).values
