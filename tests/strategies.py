"""Hypothesis strategies for epilogue graphs, and the shapes and values that go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from gemmgen.dtypes import DType
from gemmgen.ir import REDUCTIONS, Axes, Graph, Node, Op, Parameter, Result, build, verified

L, M, N = 2, 3, 4
KINDS = {"row": Axes.ROW, "col": Axes.COL, "tile": Axes.TILE, "scalar": Axes.SCALAR}
SHAPES = {Axes.ROW: (L, 1, N), Axes.COL: (L, M, 1), Axes.TILE: (L, M, N), Axes.SCALAR: (L, 1, 1)}
OVER = ("M", "N", "MN")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -3.0, 6.0, 1e-30, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True)
class Bounded:
    """A node and a bound on its magnitude, by which the strategies keep values where float64 can be compared."""

    node: Node
    bound: float

    def within(self, limit: float) -> Node:
        """The node, squeezed if it could exceed `limit`."""
        return self.node if self.bound <= limit else build.mul(build.const(limit), build.unary(Op.TANH, self.node))

    def above(self, floor: float) -> Node:
        """The magnitude of the node plus `floor`: a safe denominator, base or argument of a logarithm."""
        return build.add(build.unary(Op.ABS, self.within(4)), build.const(floor))


def _plain(op: Op, bound: float) -> Callable[[Bounded], Bounded]:
    return lambda x: Bounded(build.unary(op, x.within(4)), bound)


def _positive(op: Op, bound: float) -> Callable[[Bounded], Bounded]:
    return lambda x: Bounded(build.unary(op, x.above(0.25)), bound)


def _activation(make: Callable[[Node], Node]) -> Callable[[Bounded], Bounded]:
    return lambda x: Bounded(make(x.within(4)), 5)


def _through(dtype: DType) -> Callable[[Bounded], Bounded]:
    return lambda x: Bounded(build.explicit_cast(x.within(16), dtype), 16)


UNARY: dict[str, Callable[[Bounded], Bounded]] = {
    "neg": lambda x: Bounded(build.neg(x.node), x.bound),
    "abs": lambda x: Bounded(build.unary(Op.ABS, x.node), x.bound),
    "exp": lambda x: Bounded(build.unary(Op.EXP, x.within(2)), 8),
    "exp2": lambda x: Bounded(build.unary(Op.EXP2, x.within(3)), 8),
    "log": _positive(Op.LOG, 2),
    "log1p": _positive(Op.LOG1P, 2),
    "sqrt": _positive(Op.SQRT, 3),
    "rsqrt": _positive(Op.RSQRT, 2),
    "tanh": _plain(Op.TANH, 1),
    "sigmoid": _plain(Op.SIGMOID, 1),
    "erf": _plain(Op.ERF, 1),
    "sin": _plain(Op.SIN, 1),
    "cos": _plain(Op.COS, 1),
    "relu": _plain(Op.RELU, 4),
    "softplus": _plain(Op.SOFTPLUS, 5),
    "clamp": lambda x: Bounded(build.clamp(x.node, -0.5, 1), 1),
    "clamp_low": lambda x: Bounded(build.clamp(x.node, 0.25, None), max(x.bound, 0.25)),
    "silu": _activation(build.silu),
    "gelu": _activation(build.gelu),
    "gelu_tanh": _activation(build.gelu_tanh),
    "quick_gelu": _activation(build.quick_gelu),
    "leaky_relu": _activation(build.leaky_relu),
    "mish": _activation(build.mish),
    "hardswish": _activation(build.hardswish),
    "relu_squared": lambda x: Bounded(build.relu_squared(x.within(4)), 16),
    "square": lambda x: Bounded(build.power(x.within(4), build.const(2)), 16),
    "cube": lambda x: Bounded(build.power(x.within(2), build.const(3)), 8),
    "pow": lambda x: Bounded(build.power(x.above(0.25), build.const(1.5)), 9),
    "reciprocal": lambda x: Bounded(build.power(x.above(0.5), build.const(-1)), 2),
}
CASTS: dict[str, Callable[[Bounded], Bounded]] = {
    dtype.text: _through(dtype)
    for dtype in (DType.BF16, DType.F16, DType.E4M3, DType.E5M2, DType.I8, DType.I32, DType.F32)
}


def _chosen(x: Bounded, y: Bounded, op: Op) -> Bounded:
    return Bounded(build.where(build.compare(op, x.node, y.node), y.node, x.node), max(x.bound, y.bound))


BINARY: dict[str, Callable[[Bounded, Bounded], Bounded]] = {
    "add": lambda x, y: Bounded(build.add(x.node, y.node), x.bound + y.bound),
    "sub": lambda x, y: Bounded(build.sub(x.node, y.node), x.bound + y.bound),
    "mul": lambda x, y: Bounded(build.mul(x.within(8), y.within(8)), 64),
    "div": lambda x, y: Bounded(build.div(x.node, y.above(0.5)), 2 * x.bound),
    "pow": lambda x, y: Bounded(build.power(x.above(0.5), y.within(1.5)), 11),
    "minimum": lambda x, y: Bounded(build.binary(Op.MINIMUM, x.node, y.node), max(x.bound, y.bound)),
    "maximum": lambda x, y: Bounded(build.binary(Op.MAXIMUM, x.node, y.node), max(x.bound, y.bound)),
    "lt": lambda x, y: _chosen(x, y, Op.LT),
    "ge": lambda x, y: _chosen(x, y, Op.GE),
    "eq": lambda x, y: _chosen(x, y, Op.EQ),
    "row_index": lambda x, y: Bounded(
        build.where(build.compare(Op.GT, build.row_index(), build.const(0)), x.node, y.node), max(x.bound, y.bound)
    ),
    "col_index": lambda x, y: Bounded(build.mul(x.within(8), build.col_index()), 8 * N),
}


@st.composite
def epilogues(draw: st.DrawFn, max_ops: int = 10, casts: bool = True) -> Graph:
    """A verified graph over the whole vocabulary: all operand kinds, one to three results, reductions among them."""
    parameters = tuple(Parameter(name, axes) for name, axes in KINDS.items())
    pool = [Bounded(build.accum(), 4), *(Bounded(build.load(p.name, p.axes), 4) for p in parameters)]
    unary = sorted({**UNARY, **(CASTS if casts else {})}.items())
    for _ in range(draw(st.integers(1, max_ops))):
        if draw(st.booleans()):
            pool.append(draw(st.sampled_from(unary))[1](draw(st.sampled_from(pool))))
        else:
            make = draw(st.sampled_from(sorted(BINARY.items())))[1]
            second = draw(st.sampled_from([*pool, Bounded(build.const(1.5), 1.5)]))
            pool.append(make(draw(st.sampled_from(pool)), second))
    recent = pool[-4:]
    results = tuple(_result(draw, f"out{i}", recent) for i in range(draw(st.integers(1, 3))))
    return verified(Graph("random", DType.F32, parameters, results, "dict"))


def _result(draw: st.DrawFn, name: str, pool: list[Bounded]) -> Result:
    value = draw(st.sampled_from(pool[::-1]))
    if draw(st.integers(0, 2)) == 0:
        op = draw(st.sampled_from(sorted(REDUCTIONS, key=lambda op: op.value)))
        return Result(name, build.reduce(op, value.node, draw(st.sampled_from(OVER))))
    return Result(name, value.node, draw(st.sampled_from([None, None, DType.F32, DType.BF16, DType.I8])))


# Ops whose results are the same bits on every path, so that rewrites can be held to equality.
_EXACT_UNARY = (Op.NEG, Op.ABS, Op.RELU, Op.SQRT)
_EXACT_BINARY = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MINIMUM, Op.MAXIMUM)
_CONSTANTS = (0.0, -0.0, 1.0, -1.0, 2.0, -0.5, 3.0)


@st.composite
def exact_epilogues(draw: st.DrawFn, max_ops: int = 10) -> Graph:
    """A graph of exactly rounded ops and many constants, as food for `simplify`; values may be anything."""
    parameters = tuple(Parameter(name, axes) for name, axes in KINDS.items())
    pool = [build.accum(), *(build.load(p.name, p.axes) for p in parameters)]
    constants = [build.const(value) for value in _CONSTANTS]
    for _ in range(draw(st.integers(1, max_ops))):
        x, y = draw(st.sampled_from(pool[-6:])), draw(st.sampled_from(pool[-6:] + constants))
        pool.append(draw(st.sampled_from(_exact_forms(x, y))))
    over = draw(st.sampled_from(OVER))
    results = (Result("D", pool[-1]), Result("total", build.reduce(Op.SUM, pool[-1], over)), Result("other", pool[-2]))
    return verified(Graph("exact", DType.F32, parameters, results, "dict"))


def _exact_forms(x: Node, y: Node) -> list[Node]:
    return [
        *(build.unary(op, x) for op in _EXACT_UNARY),
        *(build.binary(op, x, y) for op in _EXACT_BINARY),
        *(build.binary(op, y, x) for op in _EXACT_BINARY),
        build.where(build.compare(Op.LT, x, y), y, x),
        build.where(build.compare(Op.LE, build.const(1), build.const(2)), y, x),
        build.explicit_cast(x, DType.F32),
        build.explicit_cast(build.explicit_cast(x, DType.BF16), DType.BF16),
        build.binary(Op.POW, x, build.const(0)),
        build.clamp(build.clamp(x, -1, 1), -1, 1),
    ]


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """accum and one operand of each kind, batched, with values of a few units."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(axes: Axes) -> torch.Tensor:
        return torch.randn(SHAPES[axes], generator=generator, dtype=torch.float64).clamp(-3.9, 3.9).to(dtype)

    return tensor(Axes.TILE), {name: tensor(axes) for name, axes in KINDS.items()}


@st.composite
def special_inputs(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `inputs`, of zeros, infinities, NaN and extreme magnitudes, in float32."""

    def tensor(axes: Axes) -> torch.Tensor:
        shape = SHAPES[axes]
        count = shape[0] * shape[1] * shape[2]
        return torch.tensor(draw(st.lists(st.sampled_from(SPECIAL), min_size=count, max_size=count))).view(shape)

    return tensor(Axes.TILE), {name: tensor(axes) for name, axes in KINDS.items()}
