"""What a skeleton has to know of an epilogue: what to load, what to store, and where A and B come from.

A skeleton is compiled once per (arch, `Signature`, `GemmConfig`). Names of operands and the arithmetic of
the graph are not in it, so that epilogues with the same operands share skeletons.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from gemmgen.dtypes import DType


class Kind(enum.Enum):
    """How a value of the epilogue varies over the `[M, N]` tile."""

    SCALAR = "scalar"  # one value per batch
    ROW = "row"  # [N]: one value per column of D
    COL = "col"  # [M]: one value per row of D
    TILE = "tile"  # [M, N]
    ROW_INDEX = "row_index"  # the row number of the element, int32; no memory behind it
    COL_INDEX = "col_index"  # the column number of the element, int32; no memory behind it


_SWAPPED_KIND = {
    Kind.ROW: Kind.COL,
    Kind.COL: Kind.ROW,
    Kind.ROW_INDEX: Kind.COL_INDEX,
    Kind.COL_INDEX: Kind.ROW_INDEX,
}


class Reduce(enum.Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Matrix:
    """A or B. `k_major`: K has stride 1. `alignment`: elements that one aligned access may take."""

    dtype: DType
    k_major: bool
    alignment: int


@dataclass(frozen=True)
class Input:
    """One argument of the functors after `accum`. ROW_INDEX and COL_INDEX have dtype I32."""

    kind: Kind
    dtype: DType


@dataclass(frozen=True)
class Output:
    """One result.

    `kind` TILE without `reduce`: stored as `dtype`. With `reduce`, the functor's value is reduced within each
    CTA tile and stored as f32 partials: ROW reduces M (partials `[L, P, N]`), COL reduces N (`[L, P, M]`).
    """

    kind: Kind
    dtype: DType
    reduce: Reduce | None = None


@dataclass(frozen=True)
class Signature:
    """Everything but arch and config that a skeleton depends on.

    Attributes:
        accum: F32, or I32 for int8 inputs; the type of the functors' first argument.
        math: the tensor-core or SIMT arithmetic of the mainloop: "tensor", "tf32" or "simt".
        tile_alignment: elements of the widest TILE access for which all TILE inputs and outputs are aligned,
            in elements of each tensor's own dtype, at most 16 bytes each.
    """

    a: Matrix
    b: Matrix
    accum: DType
    math: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    tile_alignment: int

    def swapped(self) -> Signature:
        """The same for D^T = B^T A^T: A for B, rows for columns. The TILEs stay where they are: M is contiguous now."""
        inputs = tuple(replace(value, kind=_SWAPPED_KIND.get(value.kind, value.kind)) for value in self.inputs)
        outputs = tuple(replace(value, kind=_SWAPPED_KIND.get(value.kind, value.kind)) for value in self.outputs)
        return replace(self, a=self.b, b=self.a, inputs=inputs, outputs=outputs)
