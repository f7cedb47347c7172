"""The one node type of the IR, interned so that equal values are the same object."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gemmgen.dtypes import DType

Attr = str | float | tuple[float | None, float | None] | DType | None


class Axes(enum.Flag):
    """Which of M and N a value varies along; it broadcasts over the rest."""

    SCALAR = 0
    COL = 1  # [M]: one value per row of D
    ROW = 2  # [N]: one value per column of D
    TILE = 3  # [M, N]

    @property
    def text(self) -> str:
        names = [name for flag, name in ((Axes.COL, "M"), (Axes.ROW, "N")) if flag in self]
        return f"[{','.join(names)}]"


class Op(enum.Enum):
    """Every operation of the IR. Each is one row in each table: build, verify, evaluate, vjp, simplify, render."""

    ACCUM = "accum"
    LOAD = "load"
    CONST = "const"
    ROW_INDEX = "row_index"
    COL_INDEX = "col_index"

    NEG = "neg"
    ABS = "abs"
    EXP = "exp"
    EXP2 = "exp2"
    LOG = "log"
    LOG1P = "log1p"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    ERF = "erf"
    SIN = "sin"
    COS = "cos"
    RELU = "relu"
    SOFTPLUS = "softplus"
    CLAMP = "clamp"
    CAST = "cast"

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    POW = "pow"
    MINIMUM = "minimum"
    MAXIMUM = "maximum"

    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    EQ = "eq"
    NE = "ne"
    WHERE = "where"

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    AMAX = "amax"

    def __repr__(self) -> str:
        return self.value


LEAVES = frozenset({Op.ACCUM, Op.LOAD, Op.CONST, Op.ROW_INDEX, Op.COL_INDEX})
COMPARISONS = frozenset({Op.LT, Op.LE, Op.GT, Op.GE, Op.EQ, Op.NE})
REDUCTIONS = frozenset({Op.SUM, Op.MAX, Op.MIN, Op.AMAX})


@dataclass(frozen=True, eq=False)
class Node:
    """One value per element of the output tile.

    Build nodes with `ir.build`, never directly: equal nodes must be the same object.

    Attributes:
        attr: LOAD: the operand's name. CONST: its value. CAST: the dtype. CLAMP: (low, high), None for no bound.
            Reductions: the axes that they remove, "M", "N" or "MN".
        axes: which of M and N the value varies along.
    """

    op: Op
    args: tuple[Node, ...] = ()
    attr: Attr = None
    dtype: DType = DType.F32
    axes: Axes = Axes.TILE

    def __repr__(self) -> str:
        inner = ", ".join([*(repr(arg) for arg in self.args), *([repr(self.attr)] if self.attr is not None else [])])
        return f"{self.op.value}({inner})"

    def __deepcopy__(self, memo: object) -> Node:
        return self  # a second copy would equal nothing that the builders make

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.op, self.args, self.attr, self.dtype, self.axes)


_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_interning = threading.RLock()  # a collected node may be finalised inside


def make(op: Op, *args: Node, attr: Attr = None, dtype: DType = DType.F32, axes: Axes = Axes.TILE) -> Node:
    """The interned node with these fields."""
    # repr keeps 0.0 from -0.0, and finds NaN again, which plain equality does neither of
    key = (op, args, repr(attr), dtype, axes)
    with _interning:  # two threads must not get two nodes for one value
        node = _interned.get(key)
        if node is None:
            node = _interned[key] = Node(op, args, attr, dtype, axes)
    return node


def _restored(op: Op, args: tuple[Node, ...], attr: Attr, dtype: DType, axes: Axes) -> Node:
    return make(op, *args, attr=attr, dtype=dtype, axes=axes)


def topological(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node that `roots` depend on, arguments first, each once, in a fixed order."""
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)
