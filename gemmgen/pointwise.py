"""The plain kernels that need neither CUTLASS nor nvcc: the functors over an accumulator in memory, and the
last step of a reduction.

The first is the unfused epilogue (the split path) and the elementwise pass of a backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmgen import templates
from gemmgen.dtypes import DType
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import Op
from gemmgen.render import Slot, render_functors
from gemmgen.signature import Input, Kind, Output, Reduce

ROWS_PER_CTA = 64
COLUMN_LANES = 32
THREADS = 256
MAX_VECTOR = 8
FINISH_SLICES = 8
FINISH_THREADS = 32 * FINISH_SLICES
MAX_GRID_Z = 65_535  # both kernels loop over further batches

# (identity, what combines two floats); max and min propagate NaN
COMBINE: dict[Reduce, tuple[str, str]] = {
    Reduce.SUM: ("0.f", "gg::plus"),
    Reduce.MAX: ("__uint_as_float(0xff800000u)", "gg::maximum"),
    Reduce.MIN: ("__uint_as_float(0x7f800000u)", "gg::minimum"),
}


@dataclass(frozen=True)
class _Place:
    """One input or output as the template sees it."""

    index: int
    element: str
    identity: str = ""
    combine: str = ""


def render_pointwise(
    graph: Graph, slots: Sequence[Slot], inputs: Sequence[Input], outputs: Sequence[Output], vector: int
) -> str:
    """The text of `gemmgen_pointwise`, which applies `graph` to every element.

    Args:
        vector: columns per thread (8, 4, 2 or 1); every TILE and the accumulator must be aligned to it.
    """
    dtypes = [output.dtype for output in outputs]
    tiles = sum(place.kind is Kind.TILE for place in inputs)
    return templates.render(
        "pointwise.cu.jinja",
        name=graph.name,
        functors=render_functors(graph, slots, dtypes, linkage="__device__ __forceinline__"),
        vector=vector,
        rows=ROWS_PER_CTA,
        unroll=4 if tiles < 3 else 2,
        loads_accum=any(node.op is Op.ACCUM for node in graph.nodes()),
        accum_element=graph.accum.name,
        outputs=outputs,
        call_arguments=_call_arguments(graph, inputs),
        scalar_inputs=_inputs(inputs, Kind.SCALAR),
        row_inputs=_inputs(inputs, Kind.ROW),
        col_inputs=_inputs(inputs, Kind.COL),
        tile_inputs=_inputs(inputs, Kind.TILE),
        tile_outputs=_outputs(outputs, Kind.TILE),
        row_outputs=_outputs(outputs, Kind.ROW),
        col_outputs=_outputs(outputs, Kind.COL),
    )


def render_finish(reduce: Reduce, dtype: DType) -> str:
    """The text of `gemmgen_finish`, which combines f32 partials into a result stored as `dtype`."""
    identity, combine = COMBINE[reduce]
    return templates.render(
        "finish.cu.jinja", identity=identity, combine=f"{combine}(x, y)", element=dtype.name, slices=FINISH_SLICES
    )


def partial_count(kind: Kind, rows: int, columns: int, vector: int) -> int:
    """How many partials `gemmgen_pointwise` writes along the reduced axis of an output of `kind`."""
    tiles_m, tiles_n = grid(rows, columns, vector)
    return tiles_m if kind is Kind.ROW else tiles_n


def grid(rows: int, columns: int, vector: int) -> tuple[int, int]:
    """CTAs of `gemmgen_pointwise` along M and along N."""
    return -(-rows // ROWS_PER_CTA), -(-columns // (COLUMN_LANES * vector))


def finish_grid(batches: int, kept: int) -> tuple[tuple[int, int, int], bool]:
    """The grid of `gemmgen_finish` for results `[batches, kept]`, and whether a CTA serves a single one of them."""
    is_narrow = kept < COLUMN_LANES
    blocks = kept if is_narrow else -(-kept // COLUMN_LANES)
    return (blocks, 1, min(batches, MAX_GRID_Z)), is_narrow


def _inputs(inputs: Sequence[Input], kind: Kind) -> list[_Place]:
    return [_Place(i, place.dtype.name) for i, place in enumerate(inputs) if place.kind is kind]


def _outputs(outputs: Sequence[Output], kind: Kind) -> list[_Place]:
    places = []
    for i, output in enumerate(outputs):
        if output.kind is kind:
            identity, combine = COMBINE[output.reduce] if output.reduce else ("", "")
            places.append(_Place(i, output.dtype.name, identity, combine))
    return places


# how the argument of an input reads inside the template's innermost loop
_ARGUMENT: dict[Kind, str] = {
    Kind.SCALAR: "scalar{i}",
    Kind.ROW: "row{i}[v]",
    Kind.COL: "col{i}[u]",
    Kind.TILE: "gg::{element}::decode(tile{i}[u].elements[v])",
    Kind.ROW_INDEX: "static_cast<int>(row)",
    Kind.COL_INDEX: "column + v",
}


def _call_arguments(graph: Graph, inputs: Sequence[Input]) -> str:
    accum = "accum[u].elements[v]" if any(node.op is Op.ACCUM for node in graph.nodes()) else "0"
    rest = [_ARGUMENT[place.kind].format(i=i, element=place.dtype.name) for i, place in enumerate(inputs)]
    return ", ".join([accum, *rest])
