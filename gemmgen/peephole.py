"""Rewrites of a graph just before it becomes CUDA, for fewer instructions per element.

Their results have the same bits as before, but where a float32 overflows or becomes subnormal on the way. What is
derived from a graph (references, gradients) never sees them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gemmgen.ir.build import add, mul, unary
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import Axes, Node, Op, topological
from gemmgen.simplify import rebuilt

TANH_IS_ONE_FROM = 10.0  # in float32 by far, and in the approximation


def with_fewer_instructions(graph: Graph) -> Graph:
    """The same results by cheaper arithmetic, for a tile that has far more elements than rows and columns."""
    roots = [result.node for result in graph.results]
    nodes = list(topological(roots))
    uses = Counter(itertools.chain(roots, *(node.args for node in nodes)))
    forms: dict[Node, Node] = {}
    for node in nodes:
        forms[node] = _without_bound(node, uses, forms) or _factor_inside(node, uses, forms) or rebuilt(node, forms)
    return replace(graph, results=tuple(replace(result, node=forms[result.node]) for result in graph.results))


def _factor_inside(node: Node, uses: Mapping[Node, int], forms: Mapping[Node, Node]) -> Node | None:
    """A power of two times something that nobody else needs."""
    for factor, x in _orders(node, Op.MUL):
        if factor.op is Op.CONST and abs(math.frexp(_number(factor))[0]) == 0.5 and uses[x] == 1:
            return _scaled(factor, forms[x])
    return None


def _scaled(factor: Node, x: Node) -> Node:
    """`factor * x`, with the factor on what is computed once for a row or a column where there is such a part.

    What is left of a sum is then one multiply-add.
    """
    for inner, vector in (*_orders(x, Op.ADD), *_orders(x, Op.MUL)):
        if vector.axes is not Axes.TILE and inner.axes is Axes.TILE:
            if x.op is Op.MUL:
                return mul(inner, mul(factor, vector))
            return add(_scaled(factor, inner), mul(factor, vector))
    return mul(factor, x)


def _without_bound(node: Node, uses: Mapping[Node, int], forms: Mapping[Node, Node]) -> Node | None:
    """tanh(x * (a + b * min(x^2, k))) as tanh(x * (a + b * x^2)): both are 1 from x^2 = k on.

    The bound keeps derivatives finite, so the tanh form of GELU has it; a graph of derivatives needs it elsewhere too.
    """
    if node.op is not Op.TANH or uses[node.args[0]] > 1:
        return None
    for x, polynomial in _orders(node.args[0], Op.MUL):
        for a, term in _orders(polynomial, Op.ADD):
            for b, bounded in _orders(term, Op.MUL):
                if max(uses[polynomial], uses[term], uses[bounded]) == 1 and _saturates(x, a, b, bounded):
                    return unary(Op.TANH, mul(forms[x], add(a, mul(b, forms[bounded.args[0]]))))
    return None


def _saturates(x: Node, a: Node, b: Node, bounded: Node) -> bool:
    if bounded.op is not Op.CLAMP or bounded.args[0] is not mul(x, x) or not isinstance(bounded.attr, tuple):
        return False
    low, high = bounded.attr
    if low is not None or high is None or a.op is not Op.CONST or b.op is not Op.CONST:
        return False
    return min(_number(a), _number(b)) > 0 and math.sqrt(high) * (_number(a) + _number(b) * high) >= TANH_IS_ONE_FROM


def _number(node: Node) -> float:
    return node.attr if isinstance(node.attr, float) else math.nan


def _orders(node: Node, op: Op) -> Iterator[tuple[Node, Node]]:
    """The arguments of an `op`, both ways round; nothing of another node."""
    if node.op is op:
        yield (node.args[0], node.args[1])
        yield (node.args[1], node.args[0])
