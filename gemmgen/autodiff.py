"""Symbolic reverse mode: one vjp row for each op, written with the builders that a user's function uses.

Cotangents stay per element of the output tile until the end, even for values that vary along fewer axes: all that
follows is linear in them, so a Row's gradient is its per-element gradient summed over M, once.
Points where a function has no derivative get the value that torch gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from gemmgen.ir import build
from gemmgen.ir.build import add, compare, const, div, mul, neg, power, sub, unary, where
from gemmgen.ir.node import COMPARISONS, LEAVES, Axes, Node, Op, topological

Cotangents = tuple[Node | None, ...]  # one for each argument; None where the op has no derivative towards it
Rule = Callable[[Node, Node], Cotangents]

VJP: dict[Op, Rule] = {}

REDUCED_OVER = {Axes.ROW: "M", Axes.COL: "N", Axes.SCALAR: "MN"}


def derive(cotangents: Mapping[Node, Node], wrt: Iterable[Node]) -> dict[Node, Node]:
    """Per-element gradients of the sum of `node * cotangent`.

    Args:
        cotangents: for each root its cotangent. For a reduction it has the axes of the reduction.
        wrt: the nodes to differentiate towards.

    Returns:
        For each of `wrt` that the roots depend on, one value per element of the tile (see `reduced`). Absent means
        zero. The rules of MAX, MIN and AMAX use reductions as arguments: those must be finished by an earlier pass.
    """
    wanted = list(wrt)
    grads = dict(cotangents)
    needed = dependents(cotangents, wanted)
    for node in reversed(list(topological(cotangents))):
        if node.args and node in grads and node in needed:
            for arg, grad in zip(node.args, VJP[node.op](node, grads[node]), strict=True):
                if grad is not None and arg in needed:
                    grads[arg] = add(grads[arg], grad) if arg in grads else grad
    return {node: grads[node] for node in wanted if node in grads and node in needed}


def dependents(roots: Iterable[Node], wrt: Iterable[Node]) -> set[Node]:
    """The nodes below `roots` whose derivative towards one of `wrt` may differ from zero, `wrt` included."""
    found = set(wrt)
    for node in topological(roots):
        if any(arg in found for arg in differentiable_args(node)):
            found.add(node)
    return found


def differentiable_args(node: Node) -> tuple[Node, ...]:
    """The arguments that a cotangent of `node` flows to."""
    if node.op in LEAVES or node.op in COMPARISONS or not node.dtype.is_float:
        return ()
    args = node.args[1:] if node.op is Op.WHERE else node.args
    return tuple(arg for arg in args if arg.dtype.is_float)


def reduced(gradient: Node, axes: Axes) -> Node:
    """A per-element gradient summed to the `axes` of what it belongs to."""
    return gradient if axes is Axes.TILE else build.reduce(Op.SUM, gradient, REDUCED_OVER[axes])


def vjp(op: Op) -> Callable[[Rule], Rule]:
    """Register the rule of `op`."""

    def register(rule: Rule) -> Rule:
        VJP[op] = rule
        return rule

    return register


def _unary(op: Op, derivative: Callable[[Node, Node], Node]) -> None:
    """A row of the form cotangent * derivative(x, op(x))."""
    VJP[op] = lambda node, cotangent: (mul(cotangent, derivative(node.args[0], node)),)


_unary(Op.ABS, lambda x, y: sub(compare(Op.GT, x, const(0)), compare(Op.LT, x, const(0))))
_unary(Op.EXP, lambda x, y: y)
_unary(Op.EXP2, lambda x, y: mul(y, const(math.log(2))))
_unary(Op.TANH, lambda x, y: sub(const(1), mul(y, y)))
_unary(Op.SIGMOID, lambda x, y: mul(sub(const(1), y), y))
_unary(Op.ERF, lambda x, y: mul(const(2 / math.sqrt(math.pi)), unary(Op.EXP, neg(mul(x, x)))))
_unary(Op.SIN, lambda x, y: unary(Op.COS, x))
_unary(Op.COS, lambda x, y: neg(unary(Op.SIN, x)))
_unary(Op.SOFTPLUS, lambda x, y: unary(Op.SIGMOID, x))
_unary(Op.RSQRT, lambda x, y: mul(const(-0.5), mul(mul(y, y), y)))


@vjp(Op.NEG)
def _neg(node: Node, cotangent: Node) -> Cotangents:
    return (neg(cotangent),)


@vjp(Op.LOG)
def _log(node: Node, cotangent: Node) -> Cotangents:
    return (div(cotangent, node.args[0]),)


@vjp(Op.LOG1P)
def _log1p(node: Node, cotangent: Node) -> Cotangents:
    return (div(cotangent, add(node.args[0], const(1))),)


@vjp(Op.SQRT)
def _sqrt(node: Node, cotangent: Node) -> Cotangents:
    return (div(cotangent, mul(const(2), node)),)


@vjp(Op.RELU)
def _relu(node: Node, cotangent: Node) -> Cotangents:
    # from the output, which is often stored anyway; NaN lets the cotangent through, as in torch
    return (where(compare(Op.LE, node, const(0)), const(0), cotangent),)


@vjp(Op.CLAMP)
def _clamp(node: Node, cotangent: Node) -> Cotangents:
    assert isinstance(node.attr, tuple)
    low, high = node.attr
    if low is not None and high is not None and low > high:
        return (None,)  # the constant `high`
    # 1 at both ends, as in torch up to 2.13 (later ones have 0 there); 0 for NaN
    return (where(compare(Op.EQ, node, node.args[0]), cotangent, const(0)),)


@vjp(Op.CAST)
def _cast(node: Node, cotangent: Node) -> Cotangents:
    return (cotangent if node.dtype.is_float and node.args[0].dtype.is_float else None,)


@vjp(Op.ADD)
def _add(node: Node, cotangent: Node) -> Cotangents:
    return cotangent, cotangent


@vjp(Op.SUB)
def _sub(node: Node, cotangent: Node) -> Cotangents:
    return cotangent, neg(cotangent)


@vjp(Op.MUL)
def _mul(node: Node, cotangent: Node) -> Cotangents:
    lhs, rhs = node.args
    return mul(cotangent, rhs), mul(cotangent, lhs)


@vjp(Op.DIV)
def _div(node: Node, cotangent: Node) -> Cotangents:
    rhs = node.args[1]
    return div(cotangent, rhs), neg(mul(cotangent, div(node, rhs)))


@vjp(Op.POW)
def _pow(node: Node, cotangent: Node) -> Cotangents:
    base, exponent = node.args
    slope = mul(exponent, power(base, _minus_one(exponent)))
    towards_base = where(compare(Op.EQ, exponent, const(0)), const(0), mul(cotangent, slope))
    growth = mul(cotangent, mul(node, unary(Op.LOG, base)))
    at_zero = where(compare(Op.GE, exponent, const(0)), const(0), growth)
    return towards_base, where(compare(Op.EQ, base, const(0)), at_zero, growth)


def _minus_one(exponent: Node) -> Node:
    return const(exponent.attr - 1) if isinstance(exponent.attr, float) else sub(exponent, const(1))


@vjp(Op.MAXIMUM)
def _maximum(node: Node, cotangent: Node) -> Cotangents:
    lhs, rhs = node.args
    return _unless_beaten(Op.LT, lhs, rhs, cotangent), _unless_beaten(Op.LT, rhs, lhs, cotangent)


@vjp(Op.MINIMUM)
def _minimum(node: Node, cotangent: Node) -> Cotangents:
    lhs, rhs = node.args
    return _unless_beaten(Op.GT, lhs, rhs, cotangent), _unless_beaten(Op.GT, rhs, lhs, cotangent)


def _unless_beaten(loses: Op, x: Node, other: Node, cotangent: Node) -> Node:
    # half at a tie; with a NaN neither comparison holds and both sides get the whole
    shared = where(compare(Op.EQ, x, other), mul(cotangent, const(0.5)), cotangent)
    return where(compare(loses, x, other), const(0), shared)


@vjp(Op.WHERE)
def _where(node: Node, cotangent: Node) -> Cotangents:
    condition = node.args[0]
    return None, where(condition, cotangent, const(0)), where(condition, const(0), cotangent)


@vjp(Op.SUM)
def _sum(node: Node, cotangent: Node) -> Cotangents:
    return (cotangent,)  # broadcast


@vjp(Op.AMAX)
def _amax(node: Node, cotangent: Node) -> Cotangents:
    return (_shared(compare(Op.EQ, node.args[0], node), node, cotangent),)


@vjp(Op.MAX)
@vjp(Op.MIN)
def _extreme(node: Node, cotangent: Node) -> Cotangents:
    x, over = node.args[0], node.attr
    hit = where(compare(Op.NE, x, x), const(1), compare(Op.EQ, x, node))  # NaN wins, and equals nothing
    if over == "MN":
        return (_shared(hit, node, cotangent),)
    index = build.row_index() if over == "M" else build.col_index()
    first = build.reduce(Op.MIN, where(hit, index, const(math.inf)), str(over))
    return (where(compare(Op.EQ, index, first), cotangent, const(0)),)


def _shared(hit: Node, node: Node, cotangent: Node) -> Node:
    """`cotangent` in equal parts to the elements that `hit`."""
    return div(mul(cotangent, hit), build.reduce(Op.SUM, hit, str(node.attr)))
