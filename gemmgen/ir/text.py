"""The printed form of a graph: one line per node, the same text for the same computation."""

from __future__ import annotations

from gemmgen.dtypes import DType
from gemmgen.ir.graph import Graph, Parameter
from gemmgen.ir.node import Node, Op, topological


def to_text(graph: Graph) -> str:
    """The graph as text, such as `%3: f32[M,N] = add %1 %2`."""
    names: dict[Node, str] = {}
    lines = [f"epilogue {graph.name}({_parameters(graph)})"]
    for node in graph.nodes():
        names[node] = f"%{len(names)}"
        lines.append(f"  {line(node, names)}")
    returned = ", ".join(
        f"{result.name}: {names[result.node]}" + (f" as {result.dtype.text}" if result.dtype else "")
        for result in graph.results
    )
    return "\n".join([*lines, f"  return {graph.container} {returned}"])


def line(node: Node, names: dict[Node, str]) -> str:
    """One node, its arguments by their `names`."""
    words = [node.op.value, *(names[arg] for arg in node.args)]
    if node.attr is not None:
        words.append(_attr(node))
    return f"{names[node]}: {node.dtype.text}{node.axes.text} = {' '.join(words)}"


def describe(node: Node, graph: Graph) -> str:
    """The line of `node` as it stands in the graph's text, or would if the graph also returned it."""
    names: dict[Node, str] = {}
    for each in topological([*(result.node for result in graph.results), node]):
        names[each] = f"%{len(names)}"
    return line(node, names)


def _parameters(graph: Graph) -> str:
    def text(p: Parameter) -> str:
        return f"{p.name}: f32{p.axes.text}"

    return ", ".join([f"accum: {graph.accum.text}[M,N]", *map(text, graph.parameters)])


def _attr(node: Node) -> str:
    if isinstance(node.attr, DType):
        return node.attr.text
    if node.op is Op.LOAD:
        return f'"{node.attr}"'
    return str(node.attr)
