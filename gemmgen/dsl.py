"""What a user writes: operand kinds, the vocabulary of an epilogue, and the `@epilogue` decorator.

The functions take and give `Value`s, proxies that stand for one element of the output tile. They build IR
nodes while the epilogue function runs once; the function's source is never read.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from contextvars import ContextVar

from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import TraceError, UnsupportedOp
from gemmgen.ir import build
from gemmgen.ir.graph import Location
from gemmgen.ir.node import Axes, Node, Op

Number = int | float


# node -> the user's line that first made it, for the trace in progress
current_locations: ContextVar[dict[Node, Location] | None] = ContextVar("current_locations", default=None)


class Value:
    """A value of the epilogue: one element of `accum`, of an operand, or of something computed from them."""

    __slots__ = ("node",)
    __array_priority__ = 1000  # numpy scalars on the left defer to our reflected operators

    def __init__(self, node: Node):
        self.node = node
        locations = current_locations.get()
        if locations is not None and node not in locations:
            locations[node] = user_location()

    def __add__(self, other: Value | Number) -> Value:
        return _binary(Op.ADD, self, other)

    def __radd__(self, other: Value | Number) -> Value:
        return _binary(Op.ADD, other, self)

    def __sub__(self, other: Value | Number) -> Value:
        return _binary(Op.SUB, self, other)

    def __rsub__(self, other: Value | Number) -> Value:
        return _binary(Op.SUB, other, self)

    def __mul__(self, other: Value | Number) -> Value:
        return _binary(Op.MUL, self, other)

    def __rmul__(self, other: Value | Number) -> Value:
        return _binary(Op.MUL, other, self)

    def __truediv__(self, other: Value | Number) -> Value:
        return _binary(Op.DIV, self, other)

    def __rtruediv__(self, other: Value | Number) -> Value:
        return _binary(Op.DIV, other, self)

    def __pow__(self, other: Value | Number) -> Value:
        return Value(build.power(_node(self), _node(other)))

    def __rpow__(self, other: Value | Number) -> Value:
        return Value(build.power(_node(other), _node(self)))

    def __neg__(self) -> Value:
        return _unary(Op.NEG, self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return _unary(Op.ABS, self)

    def __lt__(self, other: Value | Number) -> Value:
        return _compare(Op.LT, self, other)

    def __le__(self, other: Value | Number) -> Value:
        return _compare(Op.LE, self, other)

    def __gt__(self, other: Value | Number) -> Value:
        return _compare(Op.GT, self, other)

    def __ge__(self, other: Value | Number) -> Value:
        return _compare(Op.GE, self, other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return _compare(Op.EQ, self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return _compare(Op.NE, self, other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TraceError(
            "the truth of a value is not known while an epilogue is traced\n"
            f"  at {user_location()}\n"
            "  `if`, `and`, `or` and chained comparisons need it. Use `gg.where(condition, x, y)`."
        )

    def to(self, dtype: object) -> Value:
        """This value rounded to `dtype` (a torch dtype), to nearest even; 8-bit types saturate."""
        try:
            wanted = dtype_of(dtype)
        except UnsupportedOp as error:
            raise UnsupportedOp(f"{error}\n  at {user_location()}") from None
        return Value(build.explicit_cast(self.node, wanted))

    def float(self) -> Value:
        """This value in fp32."""
        return self.to(DType.F32)

    def __repr__(self) -> str:
        return f"Value({self.node})"


class Row(Value):
    """Annotation of an operand `[N]` or `[L, N]`: one value per column of D."""

    __slots__ = ()
    axes = Axes.ROW


class Col(Value):
    """Annotation of an operand `[M]` or `[L, M]`: one value per row of D."""

    __slots__ = ()
    axes = Axes.COL


class Tile(Value):
    """Annotation of an operand `[M, N]` or `[L, M, N]`."""

    __slots__ = ()
    axes = Axes.TILE


class Scalar(Value):
    """Annotation of a Python number or a tensor of one element (or `[L]`), read at run time."""

    __slots__ = ()
    axes = Axes.SCALAR


def user_location() -> Location:
    """The innermost frame outside gemmgen, whose library counts as a user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    filename, lineno = frame.f_code.co_filename, frame.f_lineno
    return Location(filename, lineno, linecache.getline(filename, lineno).strip())


def _is_ours(module: str) -> bool:
    package = __name__.partition(".")[0]
    return module.partition(".")[0] == package and module != f"{package}.library"


def _node(x: object) -> Node:
    if isinstance(x, Value):
        return x.node
    return build.const(_number(x))


def _number(x: object) -> float:
    """A constant of the epilogue: a Python, numpy or sympy number, or a tensor of one element."""
    if getattr(x, "requires_grad", False):
        raise TraceError(
            f"a {type(x).__name__} that requires a gradient would become a constant\n"
            f"  at {user_location()}\n"
            "  Make it an operand: add a parameter annotated gg.Scalar. Or take its .item()."
        )
    try:
        if isinstance(x, (str, bytes)):
            raise TypeError
        return float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TraceError(
            f"{type(x).__name__} is neither a value of the epilogue nor a number\n"
            f"  at {user_location()}\n"
            "  Tensors come in as operands: add a parameter annotated gg.Row, gg.Col, gg.Tile or gg.Scalar."
        ) from None
    except OverflowError:
        raise TraceError(f"a number is too large for a float\n  at {user_location()}\n  Use math.inf.") from None


def _unary(op: Op, x: Value | Number) -> Value:
    return Value(build.unary(op, _node(x)))


def _binary(op: Op, lhs: Value | Number, rhs: Value | Number) -> Value:
    return Value(build.binary(op, _node(lhs), _node(rhs)))


def _compare(op: Op, lhs: object, rhs: object) -> Value:
    return Value(build.compare(op, _node(lhs), _node(rhs)))


def where(condition: Value, x: Value | Number, y: Value | Number) -> Value:
    """`x` where `condition` holds, else `y`."""
    return Value(build.where(_node(condition), _node(x), _node(y)))


def minimum(x: Value | Number, y: Value | Number) -> Value:
    """The smaller of two; NaN if either is NaN."""
    return _binary(Op.MINIMUM, x, y)


def maximum(x: Value | Number, y: Value | Number) -> Value:
    """The larger of two; NaN if either is NaN."""
    return _binary(Op.MAXIMUM, x, y)


def clamp(x: Value, min: Number | Value | None = None, max: Number | Value | None = None) -> Value:
    """`x` limited to `[min, max]`; NaN stays NaN. Bounds may be numbers, None, or values."""
    if isinstance(min, Value) or isinstance(max, Value):
        if min is not None:
            x = maximum(x, min)
        return x if max is None else minimum(x, max)
    if min is None and max is None:
        raise TraceError(f"clamp needs `min`, `max` or both\n  at {user_location()}\n  Give at least one bound.")
    low, high = (None if bound is None else _number(bound) for bound in (min, max))
    return Value(build.clamp(_node(x), low, high))


def abs(x: Value | Number) -> Value:
    """The absolute value."""
    return _unary(Op.ABS, x)


def exp(x: Value | Number) -> Value:
    """e to the power x."""
    return _unary(Op.EXP, x)


def exp2(x: Value | Number) -> Value:
    """2 to the power x."""
    return _unary(Op.EXP2, x)


def log(x: Value | Number) -> Value:
    """The natural logarithm."""
    return _unary(Op.LOG, x)


def log1p(x: Value | Number) -> Value:
    """log(1 + x), accurate near 0."""
    return _unary(Op.LOG1P, x)


def sqrt(x: Value | Number) -> Value:
    """The square root; NaN below 0."""
    return _unary(Op.SQRT, x)


def rsqrt(x: Value | Number) -> Value:
    """1 / sqrt(x)."""
    return _unary(Op.RSQRT, x)


def tanh(x: Value | Number) -> Value:
    """The hyperbolic tangent."""
    return _unary(Op.TANH, x)


def sigmoid(x: Value | Number) -> Value:
    """1 / (1 + exp(-x)); finite for every x."""
    return _unary(Op.SIGMOID, x)


def erf(x: Value | Number) -> Value:
    """The error function."""
    return _unary(Op.ERF, x)


def sin(x: Value | Number) -> Value:
    """The sine of x in radians."""
    return _unary(Op.SIN, x)


def cos(x: Value | Number) -> Value:
    """The cosine of x in radians."""
    return _unary(Op.COS, x)


def relu(x: Value | Number) -> Value:
    """max(x, 0); NaN stays NaN."""
    return _unary(Op.RELU, x)


def softplus(x: Value | Number) -> Value:
    """log(1 + exp(x)), accurate at both ends."""
    return _unary(Op.SOFTPLUS, x)


def leaky_relu(x: Value, negative_slope: Number | Value = 0.01) -> Value:
    """x above 0, else `negative_slope * x`; with an operand for the slope this is PReLU."""
    return Value(build.leaky_relu(_node(x), _node(negative_slope)))


def relu_squared(x: Value) -> Value:
    """relu(x) ** 2."""
    return Value(build.relu_squared(_node(x)))


def gelu(x: Value) -> Value:
    """The erf form: x * Phi(x), Phi the normal distribution function (torch's `gelu(approximate="none")`)."""
    return Value(build.gelu(_node(x)))


def gelu_tanh(x: Value) -> Value:
    """The tanh form of GELU (torch's `gelu(approximate="tanh")`)."""
    return Value(build.gelu_tanh(_node(x)))


def quick_gelu(x: Value) -> Value:
    """x * sigmoid(1.702 x), the form that CLIP uses."""
    return Value(build.quick_gelu(_node(x)))


def silu(x: Value) -> Value:
    """x * sigmoid(x)."""
    return Value(build.silu(_node(x)))


def mish(x: Value) -> Value:
    """x * tanh(softplus(x))."""
    return Value(build.mish(_node(x)))


def hardswish(x: Value) -> Value:
    """x * clamp(x + 3, 0, 6) / 6."""
    return Value(build.hardswish(_node(x)))


def row_index() -> Value:
    """The number of the element's row (0 to M - 1), an integer."""
    return Value(build.row_index())


def col_index() -> Value:
    """The number of the element's column (0 to N - 1), an integer."""
    return Value(build.col_index())


def _reduce(op: Op, x: Value, over: str) -> Value:
    if over not in ("M", "N", "MN"):
        raise TraceError(
            f"`over` is {over!r}\n  at {user_location()}\n"
            '  Use "M" (gives [N]), "N" (gives [M]) or "MN" (gives one value).'
        )
    return Value(build.reduce(op, _node(x), over))


def sum(x: Value, over: str) -> Value:
    """The sum over "M" (gives `[N]`), "N" (gives `[M]`) or "MN" (gives `[]`). A finished result: return it."""
    return _reduce(Op.SUM, x, over)


def max(x: Value, over: str) -> Value:
    """The largest over "M", "N" or "MN"; NaN if any is NaN.

    Its gradient is `torch.max`'s: to the first of equals over one axis, in equal parts over both.
    """
    return _reduce(Op.MAX, x, over)


def min(x: Value, over: str) -> Value:
    """The smallest over "M", "N" or "MN"; NaN if any is NaN.

    Its gradient is `torch.min`'s: to the first of equals over one axis, in equal parts over both.
    """
    return _reduce(Op.MIN, x, over)


def amax(x: Value, over: str) -> Value:
    """The largest over "M", "N" or "MN"; ties share the gradient evenly, as `torch.amax`'s."""
    return _reduce(Op.AMAX, x, over)


class Epilogue:
    """A declared epilogue function. Nothing is traced until a `Gemm` needs its graph."""

    def __init__(self, fn: Callable[..., object]):
        functools.update_wrapper(self, fn)
        self.fn = fn  # last: `fn` may be an object with an attribute of that name

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "epilogue")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function itself, so that one epilogue can use another."""
        return self.fn(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(getattr(self, "__qualname__", self.name))  # by reference, as functions are

    def __repr__(self) -> str:
        return f"<gemmgen epilogue {self.name}>"




def epilogue(fn: Callable[..., object]) -> Epilogue:
    """Declare `fn(accum, **operands)` as an epilogue.

    Args:
        fn: its first parameter stands for the fp32 `[M, N]` accumulator; each further one is annotated `gg.Row`,
            `gg.Col`, `gg.Tile` or `gg.Scalar`. It returns one value, a tuple, or a dict of values.

    Raises:
        TraceError: `fn` is not callable.
    """
    if not callable(fn):
        raise TraceError(f"@gg.epilogue takes a function, not {type(fn).__name__}")
    return Epilogue(fn)
