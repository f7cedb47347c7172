"""`Graph`: a traced epilogue. Frozen; its text is its identity."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gemmgen.dtypes import DType
from gemmgen.ir.node import Axes, Node, Op, topological


@dataclass(frozen=True)
class Location:
    """Where in the user's code a node came from."""

    filename: str
    lineno: int
    line: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno}:   {self.line}"


@dataclass(frozen=True)
class Parameter:
    """An operand of the epilogue after `accum`."""

    name: str
    axes: Axes


@dataclass(frozen=True)
class Result:
    """One returned value. `dtype` None means: A's dtype for tiles (bf16 for 8-bit inputs), f32 for reductions."""

    name: str
    node: Node
    dtype: DType | None = None

    @property
    def is_reduction(self) -> bool:
        from gemmgen.ir.node import REDUCTIONS

        return self.node.op in REDUCTIONS


@dataclass(frozen=True)
class Graph:
    """What happens to the accumulator.

    Attributes:
        name: the user's function name.
        accum: F32, or I32 when A and B are int8.
        parameters: operands in the order of the function's signature, used or not.
        results: what the function returns, in order.
        container: "single", "tuple" or "dict": what a call gives back.
        locations: where each node was first made; not part of the identity.
    """

    name: str
    accum: DType
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...]
    container: str
    locations: Mapping[Node, Location] = field(default_factory=dict, compare=False, repr=False)

    def nodes(self) -> Iterator[Node]:
        """Every node, arguments first, in a fixed order."""
        return topological(result.node for result in self.results)

    def loads(self) -> tuple[Parameter, ...]:
        """The parameters that some result depends on."""
        return self._loads

    @functools.cached_property
    def _loads(self) -> tuple[Parameter, ...]:
        used = {node.attr for node in self.nodes() if node.op is Op.LOAD}
        return tuple(p for p in self.parameters if p.name in used)

    @functools.cached_property
    def digest(self) -> str:
        """12 hex digits that identify the computation (not the name)."""
        from gemmgen.ir.text import to_text

        return hashlib.blake2b(to_text(replace(self, name="")).encode(), digest_size=6).hexdigest()
