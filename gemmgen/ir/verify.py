"""The rules that every graph keeps, one row per kind of op; a broken one is an error at the user's line."""

from __future__ import annotations

from collections.abc import Callable

from gemmgen.dtypes import DType
from gemmgen.errors import GemmgenError, VerifyError
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import COMPARISONS, LEAVES, REDUCTIONS, Axes, Node, Op
from gemmgen.ir.text import describe

ARITY: dict[Op, int] = {
    **dict.fromkeys(LEAVES, 0),
    **dict.fromkeys((Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.MINIMUM, Op.MAXIMUM, *COMPARISONS), 2),
    Op.WHERE: 3,
}
CASTABLE = frozenset(DType) - {DType.F64, DType.BOOL}


def located(error: type[GemmgenError], graph: Graph, node: Node | None, what: str, mend: str) -> GemmgenError:
    """An error that says what, where in the user's function, for which value, and what to do."""
    lines = [what]
    if node is not None:
        where = graph.locations.get(node)
        lines.append(f"  in epilogue `{graph.name}`" + (f", {where}" if where else ""))
        lines.append(f"  value: {describe(node, graph)}")
    else:
        lines.append(f"  in epilogue `{graph.name}`")
    return error("\n".join([*lines, f"  {mend}"]))


def verified(graph: Graph) -> Graph:
    """`graph` itself, after every rule held.

    Raises:
        VerifyError: names the rule, the user's line and the value.
    """
    for node in graph.nodes():
        for rule in _NODE_RULES:
            rule(graph, node)
    for result in graph.results:
        _result_rule(graph, result.node, result.dtype)
    return graph


def _arity_rule(graph: Graph, node: Node) -> None:
    if len(node.args) != ARITY.get(node.op, 1):
        raise located(VerifyError, graph, node, f"`{node.op.value}` has {len(node.args)} arguments", "Report this.")


def _axes_rule(graph: Graph, node: Node) -> None:
    if node.op in LEAVES or node.op in REDUCTIONS:
        return
    joined = Axes.SCALAR
    for arg in node.args:
        joined |= arg.axes
    if node.axes is not joined:
        raise located(VerifyError, graph, node, f"`{node.op.value}` does not broadcast its arguments", "Report this.")


def _reduction_rule(graph: Graph, node: Node) -> None:
    for arg in node.args:
        if arg.op in REDUCTIONS:
            raise located(
                VerifyError, graph, arg,
                f"the result of `{arg.op.value}(over={arg.attr!r})` is used inside the epilogue",
                "A reduction is finished only when the whole kernel is: return it, and use it in the next operation.",
            )


def _cast_rule(graph: Graph, node: Node) -> None:
    if node.op is Op.CAST and node.attr not in CASTABLE:
        raise located(
            VerifyError, graph, node, f"cannot cast to {node.attr!r}",
            f"Cast to one of {', '.join(sorted(d.text for d in CASTABLE))}.",
        )


_NODE_RULES: tuple[Callable[[Graph, Node], None], ...] = (_arity_rule, _axes_rule, _reduction_rule, _cast_rule)


def _result_rule(graph: Graph, node: Node, dtype: DType | None) -> None:
    if node.dtype is DType.BOOL and dtype is None:
        raise located(
            VerifyError, graph, node, "a result is boolean",
            "Give it a dtype with `.to(torch.int8)` or choose values with `gg.where`.",
        )
