"""The backward of a graph as a plan: what the forward saves, and which elementwise passes compute the gradients.

What is saved is a minimum cut: the fewest bytes from which, with the user's operands, every value that the gradients
need can be computed again. Candidates are the values of the user's graph, one byte for a condition, and nothing for a
result that is returned at least as precisely as A's dtype (`tanh`, `relu` and `exp` are differentiated from it, as
torch does). The backward sees saved values as they were rounded when stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmgen.autodiff import dependents, derive, reduced
from gemmgen.dtypes import DType
from gemmgen.errors import NoBackward
from gemmgen.ir import build
from gemmgen.ir.graph import Graph, Parameter, Result
from gemmgen.ir.node import REDUCTIONS, Axes, Node, Op, topological
from gemmgen.ir.text import describe
from gemmgen.ir.verify import located, verified
from gemmgen.mincut import UNCUTTABLE, cheapest_cut
from gemmgen.simplify import simplified, simplify, substituted

ACCUM = "accum"  # the name of the accumulator among `wants`


@dataclass(frozen=True)
class Saved:
    """A tile that the backward reads.

    Attributes:
        name: its parameter in `BackwardPlan.passes` and `.backward`: "saved0", "saved1", ...
        result: the result of `BackwardPlan.forward` that holds it: `name` itself, or one that the user returns anyway.
        node: the value, in the user's graph.
        dtype: as stored; None means A's dtype.
        bytes: what saving costs per element of the tile; 0 for a result that the user returns.
    """

    name: str
    result: str
    node: Node
    dtype: DType | None
    bytes: int


@dataclass(frozen=True)
class BackwardPlan:
    """How the gradients of one graph are computed.

    Attributes:
        graph: the user's graph, simplified.
        save: "auto" or "recompute".
        passes: elementwise graphs to run before `backward`, in order. Their results are reductions, and are parameters
            of the later graphs under the same name. Only gradients of max, min and amax need them; mostly empty.
        backward: an elementwise graph. Its parameters are, as far as it uses them: `d_<result>` for each of
            `cotangents`, with that result's axes; the `saved`; results of `passes`; operands of the user.
            Its results are `d_accum` (a tile) and `d_<operand>`: a tile, or a SUM reduction of shape [N], [M] or [].
            It contains ACCUM only if the mainloop has to run again (save="recompute").
        wants: "accum" and operand names whose gradients `backward` returns, in that order.
        zeros: wanted, but zero whatever the cotangents: not in `backward`.
        cotangents: the results that carry a gradient. The others are not differentiable.
        saved: the tiles to keep from the forward.
    """

    graph: Graph
    save: str
    passes: tuple[Graph, ...]
    backward: Graph
    wants: tuple[str, ...]
    zeros: tuple[str, ...]
    cotangents: tuple[str, ...]
    saved: tuple[Saved, ...]

    @property
    def forward(self) -> Graph:
        """The user's graph, with one extra result for each `Saved` that is no result yet."""
        extra = tuple(Result(each.name, _stripped(each.node), each.dtype) for each in self.saved if each.bytes)
        return verified(replace(self.graph, results=self.graph.results + extra)) if extra else self.graph

    @property
    def bytes_saved_per_element(self) -> int:
        """Bytes that the forward stores beyond what the user asked for, per element of D."""
        return sum(each.bytes for each in self.saved)

    @property
    def reruns_mainloop(self) -> bool:
        """Whether `backward` is an epilogue of the forward's own GEMM, run a second time."""
        return any(node.op is Op.ACCUM for node in self.backward.nodes())

    @property
    def aliases(self) -> dict[str, str]:
        """For names of `wants` whose gradient is, unchanged, the cotangent of a result: that result."""
        tiles = {r.name: r.node for r in self.backward.results if r.node.op is Op.LOAD and r.node.axes is Axes.TILE}
        return {name.removeprefix("d_"): str(node.attr).removeprefix("d_") for name, node in tiles.items()}

    def without_aliases(self) -> Graph:
        """`backward` without the results that `aliases` names; perhaps none is left."""
        results = tuple(r for r in self.backward.results if r.name.removeprefix("d_") not in self.aliases)
        left = replace(self.backward, results=results)
        return replace(left, parameters=left.loads())

    def restricted(self, wants: Iterable[str] | None = None, cotangents: Iterable[str] | None = None) -> BackwardPlan:
        """The plan for fewer gradients, or for the cotangents that did arrive, from what is saved already."""
        wanted = self.wants + self.zeros if wants is None else tuple(wants)
        arrived = self.cotangents if cotangents is None else tuple(cotangents)
        outputs, zeros = _outputs(self.graph, _in_order(self.graph, wanted), arrived)
        passes, backward = _graphs(self.graph, outputs, arrived, self.saved)
        return replace(
            self, passes=passes, backward=backward, wants=tuple(outputs), zeros=zeros, cotangents=arrived,
        )

    def explain(self, behind: str | None = None) -> str:
        """What is saved and why, what is computed again, and which kernels run.

        Args:
            behind: the epilogue whose dgrad GEMM carries `backward` as its own, by `fused_into_dgrad`.
        """
        title = f"backward of `{self.graph.name}`, save={self.save!r}"
        return "\n".join([title, *_explained_saves(self), *_explained_kernels(self, behind)])


def plan_backward(
    graph: Graph,
    wants: Iterable[str],
    *,
    cotangents: Iterable[str] | None = None,
    save: str = "auto",
    tile_dtype: DType = DType.BF16,
) -> BackwardPlan:
    """The cheapest way to the gradients of `graph`.

    Args:
        graph: the user's, with `Result.dtype` as it will be stored (None: A's dtype).
        wants: "accum" and names of operands.
        cotangents: results that will carry a gradient; None for all that can.
        save: "auto" stores the fewest bytes that need no second GEMM; "recompute" stores nothing beyond the inputs
            (but what the winners of a max are found in) and runs the mainloop again where the gradients need accum.
        tile_dtype: A's dtype as tiles are stored in (bf16 for 8-bit inputs): what a saved tile costs.

    Raises:
        NoBackward: a result asked for has no derivative, or none has; a name is unknown or taken.
    """
    if save not in ("auto", "recompute"):
        raise NoBackward(f"save={save!r} is unknown\n  Use 'auto' or 'recompute'.")
    graph = simplify(graph)
    wanted = _in_order(graph, wants)
    carriers = _carriers(graph, wanted, cotangents)
    _refuse_clashes(graph, {f"d_{name}" for name in carriers})
    outputs, zeros = _outputs(graph, wanted, carriers)
    saved = _chosen(graph, outputs, _cotangents(graph, carriers).values(), save, tile_dtype)
    passes, backward = _graphs(graph, outputs, carriers, saved)
    _refuse_clashes(graph, {each.name for each in saved} | {r.name for each in passes for r in each.results})
    return BackwardPlan(graph, save, passes, backward, tuple(outputs), zeros, carriers, saved)


def differentiable(graph: Graph, wants: Iterable[str]) -> tuple[str, ...]:
    """The results of `graph` that depend, other than through integers, on what `wants` names; perhaps none."""
    graph = simplify(graph)
    reachable = dependents((result.node for result in graph.results), _in_order(graph, wants).values())
    return tuple(result.name for result in graph.results if _no_gradient(result, reachable) is None)


def fused_into_dgrad(plan: BackwardPlan, cotangent: str = "d_D") -> Graph:
    """The epilogue that turns the next operation's dgrad GEMM into this one's `plan.backward`.

    The accumulator takes the place of `cotangent`, so that gradient never goes through memory.

    Raises:
        NoBackward: the cotangent is not one of a tile, or the backward runs its own mainloop.
    """
    nodes = [n for n in plan.backward.nodes() if n.op is Op.LOAD and n.attr == cotangent]
    if plan.reruns_mainloop or any(node.axes is not Axes.TILE for node in nodes):
        raise NoBackward(
            f"the backward of `{plan.graph.name}` cannot be fused behind `{cotangent}`\n"
            "  It needs the cotangent of a tile, and no second run of its own mainloop (save='auto')."
        )
    replacements = {node: build.accum() for node in nodes}
    forms = substituted((result.node for result in plan.backward.results), replacements)
    results = tuple(replace(result, node=forms[result.node]) for result in plan.backward.results)
    parameters = tuple(p for p in plan.backward.parameters if p.name != cotangent)
    return verified(replace(plan.backward, parameters=parameters, results=results))


# Which gradients, from which results


def _in_order(graph: Graph, wants: Iterable[str]) -> dict[str, Node]:
    """The wanted names, accum first and operands as declared, with the nodes that they mean."""
    wants = set(wants)
    known = {ACCUM: build.accum(graph.accum)} | {p.name: build.load(p.name, p.axes) for p in graph.parameters}
    if ACCUM in (p.name for p in graph.parameters):
        raise NoBackward(f"an operand of `{graph.name}` is called `{ACCUM}`\n  Rename it.")
    if unknown := wants - known.keys():
        raise NoBackward(f"`{graph.name}` has no operand {', '.join(sorted(unknown))}\n  It has {', '.join(known)}.")
    return {name: node for name, node in known.items() if name in wants}


def _carriers(graph: Graph, wanted: Mapping[str, Node], asked: Iterable[str] | None) -> tuple[str, ...]:
    """The results that carry a gradient, in order."""
    asked = None if asked is None else set(asked)
    reachable = dependents((result.node for result in graph.results), wanted.values())
    carriers = []
    for result in graph.results:
        reason = _no_gradient(result, reachable)
        if reason is None and (asked is None or result.name in asked):
            carriers.append(result.name)
        elif reason is not None and asked is not None and result.name in asked:
            raise _not_differentiable(graph, result, reason)
    if not carriers:
        result = graph.results[0]
        raise _not_differentiable(graph, result, _no_gradient(result, reachable) or "was not asked for one")
    return tuple(carriers)


def _no_gradient(result: Result, reachable: set[Node]) -> str | None:
    if result.dtype is not None and not result.dtype.is_float:
        return f"is stored as {result.dtype.text}"
    return None if result.node in reachable else "does not depend, or only through integers, on what gradients are for"


def _not_differentiable(graph: Graph, result: Result, reason: str) -> Exception:
    what = f"result `{result.name}` has no gradient: it {reason}"
    return located(NoBackward, graph, result.node, what, "Differentiate another result, or detach this one.")


def _outputs(
    graph: Graph, wanted: Mapping[str, Node], carriers: Sequence[str]
) -> tuple[dict[str, Node], tuple[str, ...]]:
    """The gradient of each wanted name, with its final reduction, and the names whose gradient is zero."""
    roots: dict[Node, Node] = {}
    for result, cotangent in _cotangents(graph, carriers).items():
        known = roots.get(result.node)
        roots[result.node] = cotangent if known is None else build.add(known, cotangent)
    gradients = derive(roots, wanted.values())
    outputs = {name: reduced(gradients[node], node.axes) for name, node in wanted.items() if node in gradients}
    forms = simplified(outputs.values())
    return {name: forms[node] for name, node in outputs.items()}, tuple(n for n in wanted if n not in outputs)


def _cotangents(graph: Graph, carriers: Sequence[str]) -> dict[Result, Node]:
    """For each result that carries a gradient the operand of the backward that it comes in as."""
    return {
        result: build.load(f"d_{result.name}", result.node.axes if result.is_reduction else Axes.TILE)
        for result in graph.results
        if result.name in carriers
    }


# What is saved

_BYTE = 1000  # of storing, against 1 for reading a tile that is there anyway: bytes first, then fewer tiles to read
_EXACT = frozenset({Op.ABS, Op.NEG, Op.RELU, Op.CLAMP, Op.CAST})


def _chosen(
    graph: Graph, outputs: Mapping[str, Node], cotangents: Iterable[Node], save: str, tile_dtype: DType
) -> tuple[Saved, ...]:
    """The cheapest tiles to keep."""
    automatic = save == "auto"
    own = set(graph.nodes())
    anchors = {_anchor(node.args[0]) for node in _inner_reductions(outputs.values()) if node in own}
    returned = _returned(graph, tile_dtype) if automatic else {}

    def is_source(node: Node) -> bool:
        gone = node.op is Op.ACCUM or (node.op is Op.LOAD and node.axes is Axes.TILE)
        return (gone and automatic) or (node in anchors and node.op is not Op.LOAD)

    def cost(node: Node) -> int:
        if node in returned or node.op is Op.LOAD:
            return 1
        if node.dtype is not DType.BOOL and (node not in own or node.dtype is DType.I32):
            return UNCUTTABLE
        return _BYTE * (_stored(node) or tile_dtype).bytes + 1

    cut = cheapest_cut(_needs(outputs.values(), cotangents), is_source, cost)
    kept = [node for node in cut if node.op is not Op.LOAD]
    return tuple(_saved(f"saved{i}", node, returned.get(node), tile_dtype) for i, node in enumerate(kept))


def _saved(name: str, node: Node, result: Result | None, tile_dtype: DType) -> Saved:
    if result is not None:
        return Saved(name, result.name, node, result.dtype, 0)
    return Saved(name, name, node, _stored(node), (_stored(node) or tile_dtype).bytes)


def _inner_reductions(outputs: Iterable[Node]) -> list[Node]:
    """Reductions that other values use, and which therefore an earlier pass has to finish."""
    arguments = {arg for node in topological(outputs) for arg in node.args if arg.op in REDUCTIONS}
    return [node for node in topological(arguments) if node in arguments]


def _anchor(x: Node) -> Node:
    """What `x` must be read from, so that two passes see equal bits and `x == max(x)` finds the winners."""
    while x.op in _EXACT:
        x = x.args[0]
    return x


def _needs(outputs: Iterable[Node], cotangents: Iterable[Node]) -> list[Node]:
    """The values of the forward that the backward starts from."""
    outputs, late = list(outputs), set(cotangents)
    needs: dict[Node, None] = {}
    for node in topological(outputs):
        if node in late or node.op in REDUCTIONS or any(arg in late for arg in node.args):
            late.add(node)
            needs.update((arg, None) for arg in node.args if arg not in late)
    return [*needs, *(node for node in outputs if node not in late)]


def _returned(graph: Graph, tile_dtype: DType) -> dict[Node, Result]:
    """Values that the user gets in a dtype that loses no more than A's does, or that have that dtype anyway."""
    found: dict[Node, Result] = {}
    for result in graph.results:
        if result.is_reduction:
            continue
        dtype = result.dtype or tile_dtype
        precise = dtype is tile_dtype or (dtype in (DType.F32, DType.F64) and dtype.bits >= tile_dtype.bits)
        if result.node.dtype is DType.BOOL or (result.node.dtype.is_float and precise):
            found.setdefault(result.node, result)
        if result.dtype is not None and result.dtype is not DType.F32:  # the value of a cast inside the graph, exactly
            found.setdefault(build.cast(result.node, result.dtype), result)
    return found


def _stored(node: Node) -> DType | None:
    """The dtype to store `node` in: a byte for a condition, a rounded value as it is, else A's."""
    if node.dtype is DType.BOOL:
        return DType.I8
    return node.dtype if node.op is Op.CAST and node.dtype is not DType.F32 else None


def _stripped(node: Node) -> Node:
    """`node` without the cast that storing it does."""
    return node.args[0] if node.op is Op.CAST and node.dtype is not DType.F32 else node


# The graphs


def _graphs(
    graph: Graph, outputs: Mapping[str, Node], carriers: Sequence[str], saved: Sequence[Saved]
) -> tuple[tuple[Graph, ...], Graph]:
    """The passes, and the backward."""
    loads = {each.node: build.load(each.name, Axes.TILE) for each in saved}
    inner = _inner_reductions(outputs.values())
    names = {node: f"finished{i}" for i, node in enumerate(inner)}
    finished = {node: build.load(names[node], node.axes) for node in inner}
    parameters = _parameters(graph, carriers, [*loads.values(), *finished.values()])

    def graph_of(name: str, roots: Mapping[str, Node], known: Mapping[Node, Node]) -> Graph:
        forms = substituted(roots.values(), known)
        results = tuple(Result(each, forms[node]) for each, node in roots.items())
        whole = simplify(Graph(f"{graph.name}_{name}", graph.accum, parameters, results, "dict", graph.locations))
        return verified(replace(whole, parameters=whole.loads()))

    passes = []
    for level, nodes in enumerate(_levels(inner)):
        deeper = {node: load for node, load in finished.items() if node not in nodes}
        passes.append(graph_of(f"pass{level}", {names[node]: node for node in nodes}, loads | deeper))
    gradients = {f"d_{name}": node for name, node in outputs.items()}
    return tuple(passes), graph_of("backward", gradients, loads | finished)


def _parameters(graph: Graph, carriers: Sequence[str], loads: Iterable[Node]) -> tuple[Parameter, ...]:
    """All that a backward graph may read: cotangents, what was saved or finished, operands."""
    made = [*_cotangents(graph, carriers).values(), *loads]
    return tuple(Parameter(str(load.attr), load.axes) for load in made) + graph.parameters


def _levels(inner: Sequence[Node]) -> list[list[Node]]:
    """Reductions by the number of passes that have to come before them."""
    depth: dict[Node, int] = {}
    for node in topological(inner):
        depth[node] = max((depth[arg] + (arg.op in REDUCTIONS) for arg in node.args), default=0)
    return [[n for n in inner if depth[n] == d] for d in sorted({depth[n] for n in inner})]


def _refuse_clashes(graph: Graph, names: set[str]) -> None:
    taken = names & ({p.name for p in graph.parameters} | {r.name for r in graph.results})
    if taken:
        raise NoBackward(
            f"`{graph.name}` uses names that its backward needs: {', '.join(sorted(taken))}\n"
            "  Rename them: d_<result>, saved<n> and finished<n> are taken."
        )


# The text


def _explained_saves(plan: BackwardPlan) -> list[str]:
    stored_by = ", stored by the forward kernel" if plan.bytes_saved_per_element else ""
    lines = [f"  saved: {plan.bytes_saved_per_element} bytes per element{stored_by}"]
    for each in plan.saved:
        stored = each.dtype.text if each.dtype else "A's dtype"
        why = f"{each.bytes} bytes" if each.bytes else f"is result `{each.result}`, 0 bytes"
        where = f"  {plan.graph.locations[each.node]}" if each.node in plan.graph.locations else ""
        lines.append(f"    {each.name} ({stored}, {why}): {describe(each.node, plan.graph)}{where}")
    operands = {p.name for p in plan.graph.parameters} & {p.name for p in plan.backward.loads()}
    if operands:
        lines.append(f"    kept without a copy: {', '.join(sorted(operands))}")
    return lines


def _explained_kernels(plan: BackwardPlan, behind: str | None) -> list[str]:
    lines = ["  kernels"]
    for each in plan.passes:
        lines.append(f"    pass over the tile: {', '.join(r.name for r in each.results)}")
    if outputs := ", ".join(_explained_output(result) for result in plan.without_aliases().results):
        carrier = f"no pass: in the epilogue of the dgrad GEMM of `{behind}`" if behind else "pass over the tile"
        lines.append(f"    {'GEMM again, with this epilogue' if plan.reruns_mainloop else carrier}: {outputs}")
    lines.extend(f"    none: d_{name} is d_{result}" for name, result in plan.aliases.items())
    if ACCUM in plan.wants:
        lines.append("    GEMMs on d_accum: dgrad = d_accum @ B^T, wgrad = A^T @ d_accum, as far as wanted;")
        lines.append("      by torch's product, but where another way is known or measured to be faster")
    if plan.zeros:
        lines.append(f"  zero whatever comes in: {', '.join(plan.zeros)}")
    return lines


def _explained_output(result: Result) -> str:
    if not result.is_reduction:
        return result.name
    return f"{result.name} (summed over {' and '.join(str(result.node.attr))})"
