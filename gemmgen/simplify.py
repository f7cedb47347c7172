"""Rewrites that change no bit of any result: one row of rules for each op.

Every rule holds for NaN, infinities and both zeros, so `0 * x`, `x - x` and `x + 0` (which turns -0 into +0) stay.
Constants fold in float64, which differs from folding in fp32 only by being rounded once; where fp32 would overflow or
become subnormal nothing is folded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gemmgen.dtypes import DType
from gemmgen.ir import build
from gemmgen.ir.build import add, const, mul, neg, sub
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import COMPARISONS, LEAVES, REDUCTIONS, Node, Op, topological

Rule = Callable[[Node], Node | None]  # the simpler node, or None for "nothing to do"

F32_MAX = float.fromhex("0x1.fffffep+127")
F32_TINY = 2.0**-126


def simplify(graph: Graph) -> Graph:
    """The same computation with fewer or cheaper ops. Surviving nodes keep their locations."""
    simpler = simplified(result.node for result in graph.results)
    locations = dict(graph.locations)
    for node, new in simpler.items():
        if node in graph.locations:
            locations.setdefault(new, graph.locations[node])
    results = tuple(replace(result, node=simpler[result.node]) for result in graph.results)
    return replace(graph, results=results, locations=locations)


def simplified(roots: Iterable[Node]) -> dict[Node, Node]:
    """For each node below `roots` its simplest form."""
    forms: dict[Node, Node] = {}
    for node in topological(roots):
        forms[node] = _simplest(rebuilt(node, forms))
    return forms


def substituted(roots: Iterable[Node], replacements: Mapping[Node, Node]) -> dict[Node, Node]:
    """For each node that stays below `roots` its form after `replacements`, which are not looked into."""
    forms = dict(replacements)
    stack = list(roots)
    while stack:
        node = stack[-1]
        missing = [arg for arg in node.args if arg not in forms] if node not in forms else []
        stack.extend(missing)
        if not missing:
            stack.pop()
            if node not in forms:
                forms[node] = rebuilt(node, forms)
    return forms


def rebuilt(node: Node, forms: Mapping[Node, Node]) -> Node:
    """`node` with the forms of its arguments, made by the builders so that dtype and axes follow the new arguments."""
    args = tuple(forms[arg] for arg in node.args)
    return node if args == node.args or node.op in LEAVES else _BUILD.get(node.op, _build_arithmetic)(node, *args)


def _build_arithmetic(node: Node, *args: Node) -> Node:
    return build.unary(node.op, *args) if len(args) == 1 else build.binary(node.op, *args)


def _build_clamp(node: Node, x: Node) -> Node:
    assert isinstance(node.attr, tuple)
    return build.clamp(x, *node.attr)


def _build_cast(node: Node, x: Node) -> Node:
    assert isinstance(node.attr, DType)
    return build.cast(x, node.attr)


_BUILD: dict[Op, Callable[..., Node]] = {
    Op.CLAMP: _build_clamp,
    Op.CAST: _build_cast,
    Op.WHERE: lambda node, *args: build.where(*args),
    **{op: lambda node, lhs, rhs: build.compare(node.op, lhs, rhs) for op in COMPARISONS},
    **{op: lambda node, x: build.reduce(node.op, x, str(node.attr)) for op in REDUCTIONS},
}


def _simplest(node: Node) -> Node:
    """`node` after every rule that applies, again and again."""
    for rule in (*RULES.get(node.op, ()), _folded):
        new = rule(node)
        if new is not None and new is not node:
            return _simplest(new)
    return node


# Constants

FOLD: dict[Op, Callable[..., float]] = {
    Op.NEG: operator.neg,
    Op.ABS: abs,
    Op.EXP: math.exp,
    Op.EXP2: lambda x: 2.0**x,
    Op.LOG: math.log,
    Op.LOG1P: math.log1p,
    Op.SQRT: math.sqrt,
    Op.RSQRT: lambda x: 1 / math.sqrt(x),
    Op.TANH: math.tanh,
    Op.ERF: math.erf,
    Op.SIN: math.sin,
    Op.COS: math.cos,
    Op.ADD: operator.add,
    Op.SUB: operator.sub,
    Op.MUL: operator.mul,
    Op.DIV: operator.truediv,
    Op.POW: math.pow,
}
COMPARE: dict[Op, Callable[[float, float], bool]] = {
    Op.LT: operator.lt,
    Op.LE: operator.le,
    Op.GT: operator.gt,
    Op.GE: operator.ge,
    Op.EQ: operator.eq,
    Op.NE: operator.ne,
}


def _values(*nodes: Node) -> tuple[float, ...] | None:
    """The numbers that `nodes` are, if all are constants."""
    values = tuple(node.attr for node in nodes if node.op is Op.CONST and isinstance(node.attr, float))
    return values if len(values) == len(nodes) else None


def _is_normal(value: float) -> bool:
    return value == 0 or F32_TINY <= abs(value) <= F32_MAX


def _folded(node: Node) -> Node | None:
    values = _values(*node.args)
    if not values or node.op not in FOLD or not all(map(_is_normal, values)):
        return None
    try:
        folded = FOLD[node.op](*values)
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    return const(folded) if _is_normal(folded) else None


def _truth(condition: Node) -> bool | None:
    """What a comparison of two constants says, else None."""
    values = _values(*condition.args)
    return COMPARE[condition.op](*values) if condition.op in COMPARISONS and values else None


# Rules. In each, `x` is the first argument.


def _is_const(node: Node, value: float) -> bool:
    return node.op is Op.CONST and repr(node.attr) == repr(value)  # repr tells -0.0 from 0.0


def _cast_of_same(node: Node) -> Node | None:
    x = node.args[0]
    return x if x.dtype is node.dtype else None


def _cast_of_truth(node: Node) -> Node | None:
    truth = _truth(node.args[0])
    return const(float(truth)) if truth is not None and node.dtype is DType.F32 else None


def _cast_there_and_back(node: Node) -> Node | None:
    """A cast to the type that a value had before it was widened to f32 (which i32 does not survive)."""
    wide = node.args[0]
    narrow = wide.args[0] if wide.op is Op.CAST and wide.dtype is DType.F32 else None
    return narrow if narrow is not None and narrow.dtype is node.dtype is not DType.I32 else None


def _add_identity(node: Node) -> Node | None:
    lhs, rhs = node.args
    return lhs if _is_const(rhs, -0.0) else rhs if _is_const(lhs, -0.0) else None


def _add_of_neg(node: Node) -> Node | None:
    lhs, rhs = node.args
    if rhs.op is Op.NEG:
        return sub(lhs, rhs.args[0])
    return sub(rhs, lhs.args[0]) if lhs.op is Op.NEG else None


def _sub_identity(node: Node) -> Node | None:
    lhs, rhs = node.args
    return lhs if _is_const(rhs, 0.0) else neg(rhs) if _is_const(lhs, -0.0) else None


def _sub_of_neg(node: Node) -> Node | None:
    lhs, rhs = node.args
    return add(lhs, rhs.args[0]) if rhs.op is Op.NEG else None


def _mul_by_one(node: Node) -> Node | None:
    for x, factor in (node.args, node.args[::-1]):
        if _is_const(factor, 1.0):
            return x
        if _is_const(factor, -1.0):
            return neg(x)
    return None


def _neg_of_both(node: Node) -> Node | None:
    lhs, rhs = node.args
    both = lhs.op is Op.NEG and rhs.op is Op.NEG
    return _build_arithmetic(node, lhs.args[0], rhs.args[0]) if both else None


def _neg_into_const(node: Node) -> Node | None:
    for x, factor in (node.args, node.args[::-1]):
        if x.op is Op.NEG and factor.op is Op.CONST and isinstance(factor.attr, float):
            return mul(x.args[0], const(-factor.attr))
    return None


def _div_by_power_of_two(node: Node) -> Node | None:
    lhs, rhs = node.args
    if rhs.op is not Op.CONST or not isinstance(rhs.attr, float) or not math.isfinite(rhs.attr):
        return None
    mantissa, _ = math.frexp(rhs.attr)
    exact = abs(mantissa) == 0.5 and F32_TINY <= abs(rhs.attr) <= 2.0**126
    return mul(lhs, const(1 / rhs.attr)) if exact else None


def _pow_of_const(node: Node) -> Node | None:
    base, exponent = node.args
    if exponent.op is Op.CONST and exponent.attr == 0:
        return const(1)  # of NaN too, as in C and torch
    return build.power(base, exponent)


def _inverse(node: Node) -> Node | None:
    x = node.args[0]
    return x.args[0] if x.op is node.op else None


def _idempotent(node: Node) -> Node | None:
    x = node.args[0]
    return x if x.op is node.op and x.attr == node.attr else None


def _abs_of_neg(node: Node) -> Node | None:
    x = node.args[0]
    return build.unary(Op.ABS, x.args[0]) if x.op is Op.NEG else None


def _same_arguments(node: Node) -> Node | None:
    return node.args[0] if node.args[0] is node.args[1] else None


def _where_known(node: Node) -> Node | None:
    condition, x, y = node.args
    truth = _truth(condition)
    if truth is None:
        return x if x is y else None
    return x if truth else y


RULES: dict[Op, tuple[Rule, ...]] = {
    Op.CAST: (_cast_of_same, _cast_of_truth, _cast_there_and_back),
    Op.ADD: (_add_identity, _add_of_neg),
    Op.SUB: (_sub_identity, _sub_of_neg),
    Op.MUL: (_mul_by_one, _neg_of_both, _neg_into_const),
    Op.DIV: (_neg_of_both, _div_by_power_of_two),
    Op.POW: (_pow_of_const,),
    Op.NEG: (_inverse,),
    Op.ABS: (_idempotent, _abs_of_neg),
    Op.RELU: (_idempotent,),
    Op.CLAMP: (_idempotent,),
    Op.MINIMUM: (_same_arguments,),
    Op.MAXIMUM: (_same_arguments,),
    Op.WHERE: (_where_known,),
}
