"""The backward of a graph as a plan: what the forward saves, and which elementwise passes compute the gradients."""

from __future__ import annotations

from dataclasses import dataclass

from gemmgen.dtypes import DType
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import Node


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
        forward: the user's graph, with one extra result for each `Saved` that is no result yet.
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

    forward: Graph
    passes: tuple[Graph, ...]
    backward: Graph
    wants: tuple[str, ...]
    zeros: tuple[str, ...]
    cotangents: tuple[str, ...]
    saved: tuple[Saved, ...]

    @property
    def bytes_saved_per_element(self) -> int:
        """Bytes that the forward stores beyond what the user asked for, per element of D."""
        return sum(each.bytes for each in self.saved)
