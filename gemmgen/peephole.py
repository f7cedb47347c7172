"""Rewrites of a graph just before it becomes CUDA, for fewer instructions per element.

Their results have the same bits as before, but where a float32 becomes subnormal, or a sum overflows whose half does
not. What is derived from a graph (references, gradients) never sees them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gemmgen.ir.build import add, mul, unary
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import Axes, Node, Op
from gemmgen.simplify import F32_TINY, rebuilt

TANH_IS_ONE_FROM = 10.0  # in float32 by far, and in the approximation


def with_fewer_instructions(graph: Graph) -> Graph:
    """The same results by cheaper arithmetic, for a tile that has far more elements than rows and columns."""
    users = _Users(graph)
    forms: dict[Node, Node] = {}
    for node in graph.nodes():
        forms[node] = _without_bound(node, users, forms) or _factor_inside(node, users, forms) or rebuilt(node, forms)
    return replace(graph, results=tuple(replace(result, node=forms[result.node]) for result in graph.results))


class _Users:
    """Who needs a node: other nodes, each as often as it takes it, and results."""

    def __init__(self, graph: Graph):
        roots = [result.node for result in graph.results]
        self._counts = Counter(itertools.chain(roots, *(node.args for node in graph.nodes())))
        self._in_sums = Counter(arg for node in graph.nodes() if node.op in (Op.ADD, Op.SUB) for arg in node.args)

    def are_one(self, *nodes: Node) -> bool:
        """Whether each of `nodes` has one user."""
        return all(self._counts[node] == 1 for node in nodes)

    def is_one_sum(self, node: Node) -> bool:
        """Whether a product `node` is part of a multiply-add, and costs nothing."""
        return self.are_one(node) and self._in_sums[node] == 1


def _factor_inside(node: Node, users: _Users, forms: Mapping[Node, Node]) -> Node | None:
    """2^-k * (x + vector) as the multiply-add 2^-k * x + 2^-k * vector, whose second product is one for many elements.

    Larger factors could overflow, negative ones make another zero of a sum that is zero.
    """
    for factor, total in _orders(node, Op.MUL):
        if _is_inverse_power_of_two(factor) and users.are_one(total) and not users.is_one_sum(node):
            for x, vector in _orders(total, Op.ADD):
                # a product is part of a multiply-add with the vector already
                if x.axes is Axes.TILE and x.op is not Op.MUL and vector.axes is not Axes.TILE:
                    return add(mul(factor, forms[x]), mul(factor, forms[vector]))
    return None


def _is_inverse_power_of_two(node: Node) -> bool:
    return F32_TINY <= _number(node) < 1 and math.frexp(_number(node))[0] == 0.5


def _without_bound(node: Node, users: _Users, forms: Mapping[Node, Node]) -> Node | None:
    """tanh(x * (a + b * min(x^2, k))) as tanh(x * (a + b * x^2)): both are 1 from x^2 = k on.

    The bound keeps derivatives finite, so the tanh form of GELU has it; a graph of derivatives needs it elsewhere too.
    """
    if node.op is not Op.TANH or not users.are_one(node.args[0]):
        return None
    for x, polynomial in _orders(node.args[0], Op.MUL):
        for a, term in _orders(polynomial, Op.ADD):
            for b, bounded in _orders(term, Op.MUL):
                if users.are_one(polynomial, term, bounded) and _saturates(x, a, b, bounded):
                    return unary(Op.TANH, mul(forms[x], add(a, mul(b, forms[bounded.args[0]]))))
    return None


def _saturates(x: Node, a: Node, b: Node, bounded: Node) -> bool:
    if bounded.op is not Op.CLAMP or bounded.args[0] is not mul(x, x) or not isinstance(bounded.attr, tuple):
        return False
    low, high = bounded.attr
    if low is not None or high is None or min(_number(a), _number(b), high) <= 0:
        return False
    return math.sqrt(high) * (_number(a) + _number(b) * high) >= TANH_IS_ONE_FROM


def _number(node: Node) -> float:
    """The value of a constant; 0 of anything else."""
    return node.attr if node.op is Op.CONST and isinstance(node.attr, float) else 0.0


def _orders(node: Node, op: Op) -> Iterator[tuple[Node, Node]]:
    """The arguments of an `op`, both ways round; nothing of another node."""
    if node.op is op:
        yield (node.args[0], node.args[1])
        yield (node.args[1], node.args[0])
