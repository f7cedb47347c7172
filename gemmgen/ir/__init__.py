"""The intermediate representation: nodes, builders, graphs, verification and text."""

from gemmgen.ir.graph import Graph, Location, Parameter, Result
from gemmgen.ir.node import COMPARISONS, LEAVES, REDUCTIONS, Axes, Node, Op, topological
from gemmgen.ir.text import to_text
from gemmgen.ir.verify import verified

__all__ = [
    "COMPARISONS", "LEAVES", "REDUCTIONS", "Axes", "Graph", "Location", "Node", "Op", "Parameter", "Result",
    "to_text", "topological", "verified",
]
