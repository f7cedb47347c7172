"""Builders: the only way to make nodes. They fix dtype and axes; user code, autodiff and simplify all use them.

Arithmetic is in fp32: an integer or boolean argument is converted on first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gemmgen.dtypes import DType
from gemmgen.ir.node import Axes, Node, Op, make

Number = int | float


def accum(dtype: DType = DType.F32) -> Node:
    return make(Op.ACCUM, dtype=dtype)


def load(name: str, axes: Axes) -> Node:
    return make(Op.LOAD, attr=name, axes=axes)


def const(value: Number) -> Node:
    return make(Op.CONST, attr=float(value), axes=Axes.SCALAR)


def row_index() -> Node:
    return make(Op.ROW_INDEX, dtype=DType.I32, axes=Axes.COL)


def col_index() -> Node:
    return make(Op.COL_INDEX, dtype=DType.I32, axes=Axes.ROW)


def cast(x: Node, dtype: DType) -> Node:
    """`x` as `dtype`; itself if it is that already."""
    return x if x.dtype is dtype else explicit_cast(x, dtype)


def explicit_cast(x: Node, dtype: DType) -> Node:
    """A cast that stays visible even where it changes nothing, since a result takes its dtype from it."""
    return make(Op.CAST, x, attr=dtype, dtype=dtype, axes=x.axes)


def _f32(x: Node) -> Node:
    return cast(x, DType.F32)


def _joined(*args: Node) -> Axes:
    axes = Axes.SCALAR
    for arg in args:
        axes |= arg.axes
    return axes


def _arithmetic(op: Op, *args: Node) -> Node:
    converted = tuple(_f32(arg) for arg in args)
    return make(op, *converted, axes=_joined(*converted))


def unary(op: Op, x: Node) -> Node:
    """`op` of one argument in fp32."""
    return _arithmetic(op, x)


def binary(op: Op, lhs: Node, rhs: Node) -> Node:
    """`op` of two arguments in fp32, broadcast against each other."""
    return _arithmetic(op, lhs, rhs)


def add(lhs: Node, rhs: Node) -> Node:
    return binary(Op.ADD, lhs, rhs)


def sub(lhs: Node, rhs: Node) -> Node:
    return binary(Op.SUB, lhs, rhs)


def mul(lhs: Node, rhs: Node) -> Node:
    return binary(Op.MUL, lhs, rhs)


def div(lhs: Node, rhs: Node) -> Node:
    return binary(Op.DIV, lhs, rhs)


def neg(x: Node) -> Node:
    return unary(Op.NEG, x)


def power(base: Node, exponent: Node) -> Node:
    """`base ** exponent`; the exponents 0.5, 1, 2, 3, -1 and -0.5 become cheaper forms, those that torch uses too."""
    if isinstance(exponent.attr, float) and exponent.attr in _POWERS:
        return _POWERS[exponent.attr](_f32(base))
    return binary(Op.POW, base, exponent)


_POWERS: dict[float, Callable[[Node], Node]] = {
    0.5: lambda x: unary(Op.SQRT, x),
    -0.5: lambda x: unary(Op.RSQRT, x),
    1.0: lambda x: x,
    2.0: lambda x: mul(x, x),
    3.0: lambda x: mul(mul(x, x), x),
    -1.0: lambda x: div(const(1), x),
}


def clamp(x: Node, low: Number | None, high: Number | None) -> Node:
    x = _f32(x)
    bounds = tuple(None if bound is None else float(bound) for bound in (low, high))
    return make(Op.CLAMP, x, attr=(bounds[0], bounds[1]), axes=x.axes)


def compare(op: Op, lhs: Node, rhs: Node) -> Node:
    """A boolean. Two integers (or an integer and a whole number) are compared as integers, else as fp32."""
    if not (_is_whole(lhs) and _is_whole(rhs)):
        lhs, rhs = _f32(lhs), _f32(rhs)
    return make(op, lhs, rhs, dtype=DType.BOOL, axes=_joined(lhs, rhs))


def _is_whole(x: Node) -> bool:
    if x.op is Op.CONST:
        return isinstance(x.attr, float) and math.isfinite(x.attr) and x.attr == int(x.attr) and abs(x.attr) < 2**31
    return x.dtype.is_integer


def where(condition: Node, x: Node, y: Node) -> Node:
    if condition.dtype is not DType.BOOL:
        condition = compare(Op.NE, condition, const(0))
    x, y = _f32(x), _f32(y)
    return make(Op.WHERE, condition, x, y, axes=_joined(condition, x, y))


_REMOVED = {"M": Axes.COL, "N": Axes.ROW, "MN": Axes.TILE}


def reduce(op: Op, x: Node, over: str) -> Node:
    """`x` reduced over the axes named by `over` ("M", "N" or "MN"). Axes that x lacks are broadcast first."""
    x = _f32(x)
    return make(op, x, attr=over, axes=Axes.TILE & ~_REMOVED[over])


# Activations composed of primitives, with the formulas of torch.nn.functional.


def silu(x: Node) -> Node:
    return mul(x, unary(Op.SIGMOID, x))


def gelu(x: Node) -> Node:
    half = mul(const(0.5), x)
    return add(half, mul(half, unary(Op.ERF, mul(half, const(math.sqrt(2))))))  # one multiply-add


def gelu_tanh(x: Node) -> Node:
    half = mul(const(0.5), x)  # everything in terms of x / 2, which a kernel has as cheaply as x
    # tanh is 1 (in float64 too) long before x^2 = 100; without the bound the derivative of a large x is 0 * inf
    quarter_square = clamp(mul(half, half), None, 25)
    slope = math.sqrt(2 / math.pi)
    inner = mul(half, add(const(2 * slope), mul(const(8 * 0.044715 * slope), quarter_square)))
    return add(half, mul(half, unary(Op.TANH, inner)))  # one multiply-add


def quick_gelu(x: Node) -> Node:
    return mul(x, unary(Op.SIGMOID, mul(const(1.702), x)))


def leaky_relu(x: Node, slope: Node | None = None) -> Node:
    return where(compare(Op.GT, x, const(0)), x, mul(x, const(0.01) if slope is None else slope))


def relu_squared(x: Node) -> Node:
    positive = unary(Op.RELU, x)
    return mul(positive, positive)


def mish(x: Node) -> Node:
    return mul(x, unary(Op.TANH, unary(Op.SOFTPLUS, x)))


def hardswish(x: Node) -> Node:
    # x itself from 3 on, and relu below: the derivative is 0 at -3 and 1 at 3, as torch's. What is not chosen is
    # bounded, as its derivative would be 0 * inf at inf.
    bounded = clamp(x, None, 3)
    gate = mul(unary(Op.RELU, add(bounded, const(3))), const(1 / 6))
    return where(compare(Op.LT, x, const(3)), mul(bounded, gate), x)
