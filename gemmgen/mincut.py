"""The cheapest set of nodes that cuts what is needed off from what is gone. Graphs are tiny: plain augmenting paths."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable

from gemmgen.ir.node import Node, topological

UNCUTTABLE = 10**12

_Residual = defaultdict[Hashable, defaultdict[Hashable, int]]
_SOURCE, _SINK = "source", "sink"


def cheapest_cut(needs: Iterable[Node], sources: Callable[[Node], bool], cost: Callable[[Node], int]) -> list[Node]:
    """Nodes from which, with leaves that are no source, all `needs` can be computed.

    Args:
        needs: the values that must be at hand.
        sources: whether a node cannot be computed from its arguments.
        cost: of having a node at hand; UNCUTTABLE if it cannot be.

    Returns:
        The cheapest such nodes, in topological order; of equally cheap sets the one nearest to `needs`.
    """
    needs = list(needs)
    nodes = list(topological(needs))
    residual: _Residual = defaultdict(lambda: defaultdict(int))
    for node in nodes:
        residual[node, "in"][node, "out"] = cost(node)
        for arg in node.args:
            residual[arg, "out"][node, "in"] = UNCUTTABLE
        if sources(node):
            residual[_SOURCE][node, "in"] = UNCUTTABLE
    for node in needs:
        residual[node, "out"][_SINK] = UNCUTTABLE
    while path := _augmenting_path(residual):
        _augment(residual, path)
    near = _reaching_sink(residual)
    return [node for node in nodes if (node, "out") in near and (node, "in") not in near]


def _augmenting_path(residual: _Residual) -> list[tuple[Hashable, Hashable]]:
    """The edges of a shortest path from source to sink with room left, or none."""
    came_from: dict[Hashable, Hashable] = {_SOURCE: None}
    queue: deque[Hashable] = deque([_SOURCE])
    while queue and _SINK not in came_from:
        here = queue.popleft()
        for there, room in list(residual[here].items()):
            if room > 0 and there not in came_from:
                came_from[there] = here
                queue.append(there)
    path: list[tuple[Hashable, Hashable]] = []
    end: Hashable = _SINK
    while came_from.get(end) is not None:
        path.append((came_from[end], end))
        end = came_from[end]
    return path


def _augment(residual: _Residual, path: list[tuple[Hashable, Hashable]]) -> None:
    flow = min(residual[here][there] for here, there in path)
    for here, there in path:
        residual[here][there] -= flow
        residual[there][here] += flow


def _reaching_sink(residual: _Residual) -> set[Hashable]:
    """The vertices with room left towards the sink."""
    into: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    for here, edges in residual.items():
        for there, room in edges.items():
            if room > 0:
                into[there].append(here)
    reached: set[Hashable] = {_SINK}
    stack: list[Hashable] = [_SINK]
    while stack:
        for here in into[stack.pop()]:
            if here not in reached:
                reached.add(here)
                stack.append(here)
    return reached
