"""How the tensors of a call are read: strides, alignments, copies that cannot be avoided, and the `Signature`.

Works on metadata alone (meta tensors too), so that `op.build` needs no GPU and no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import UnsupportedOp
from gemmgen.ir.graph import Graph, Parameter
from gemmgen.ir.node import Axes, Op
from gemmgen.problem import EIGHT_BIT, Extents, result_axes
from gemmgen.render import Slot, slots_of
from gemmgen.signature import Input, Kind, Matrix, Output, Reduce, Signature

ACCESS_BYTES = 16  # the widest access of a thread, and what TMA needs
MAX_EXTENT = 2**31 - 1
KIND_OF_AXES = {Axes.SCALAR: Kind.SCALAR, Axes.ROW: Kind.ROW, Axes.COL: Kind.COL, Axes.TILE: Kind.TILE}
REDUCE_OF_OP = {Op.SUM: Reduce.SUM, Op.MAX: Reduce.MAX, Op.AMAX: Reduce.MAX, Op.MIN: Reduce.MIN}


@dataclass(frozen=True)
class MatrixReading:
    """How A or B is read. `copied`: made contiguous along K first, because no kernel takes its strides."""

    k_major: bool
    ld: int
    batch_stride: int
    aligned_bytes: int
    copied: bool = False


@dataclass(frozen=True)
class OperandReading:
    """How an operand is read. An expanded Tile is read as the Row, Col or Scalar that it is."""

    kind: Kind
    dtype: DType
    row_stride: int
    batch_stride: int
    aligned_bytes: int
    copied: bool = False
    is_number: bool = False


@dataclass(frozen=True)
class EpilogueBinding:
    """The epilogue of one call: what it reads and writes, ready for rendering.

    Attributes:
        slots: the functors' arguments; `inputs` and `readings` (None for an index) run beside them.
        dtypes: the stored dtype of each result of the graph; a reduction's output holds f32 partials of it.
        tile_alignment: columns of one aligned access in every TILE tensor.
        has_contiguous_outs: whether each tensor to write, where one was given, is contiguous.
    """

    graph: Graph
    extents: Extents
    slots: tuple[Slot, ...]
    readings: tuple[OperandReading | None, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    dtypes: tuple[DType, ...]
    tile_alignment: int
    has_contiguous_outs: bool

    @property
    def is_empty(self) -> bool:
        return 0 in (self.extents.M, self.extents.N, self.extents.L)


@dataclass(frozen=True)
class Binding(EpilogueBinding):
    """One call with its matrices, ready for lowering."""

    a: MatrixReading
    b: MatrixReading
    signature: Signature


def bind_epilogue(
    graph: Graph,
    extents: Extents,
    operands: Mapping[str, Tensor | float],
    dtypes: Sequence[DType],
    outs: Sequence[Tensor | None] = (),
) -> EpilogueBinding:
    """Decide how every operand of an epilogue is read.

    Args:
        operands: by name; the graph's unused ones may be missing.
        dtypes: the stored dtype of each result.
        outs: for each result the tensor to write; none for new contiguous ones.

    Raises:
        UnsupportedOp: an extent does not fit the 32 bits that kernels count in.
    """
    if max(extents.M, extents.N, extents.K, extents.L) > MAX_EXTENT:
        raise UnsupportedOp(
            f"`{graph.name}`: (M, N, K, L) = ({extents.M}, {extents.N}, {extents.K}, {extents.L}) has an extent of "
            "2^31 or more\n  Kernels count in 32 bits. Call it on parts of the matrices."
        )
    by_name = {p.name: read_operand(p, operands[p.name], extents) for p in graph.loads()}
    slots = slots_of(graph, {name: reading.kind for name, reading in by_name.items()})
    readings = tuple(by_name[slot.name] if slot.name is not None else None for slot in slots)
    inputs = tuple(
        Input(slot.kind, reading.dtype if reading else DType.I32) for slot, reading in zip(slots, readings, strict=True)
    )
    alignment = _tile_alignment(graph, extents, readings, dtypes, outs)
    contiguous = all(out is None or out.is_contiguous() for out in outs)
    return EpilogueBinding(
        graph, extents, slots, readings, inputs, outputs_of(graph, dtypes), tuple(dtypes), alignment, contiguous
    )


def bind(epilogue: EpilogueBinding, A: Tensor, B: Tensor, math: str) -> Binding:
    """Decide how A and B are read, beside their bound `epilogue`.

    Args:
        math: "tensor", "tf32" or "simt".
    """
    a_dtype, b_dtype = dtype_of(A.dtype), dtype_of(B.dtype)
    a = read_matrix(A, -1, k_major_only=a_dtype in EIGHT_BIT)
    b = read_matrix(B, -2, k_major_only=a_dtype in EIGHT_BIT)
    signature = Signature(
        a=Matrix(a_dtype, a.k_major, max(1, a.aligned_bytes // a_dtype.bytes)),
        b=Matrix(b_dtype, b.k_major, max(1, b.aligned_bytes // b_dtype.bytes)),
        accum=epilogue.graph.accum,
        math=math,
        inputs=epilogue.inputs,
        outputs=epilogue.outputs,
        tile_alignment=epilogue.tile_alignment,
    )
    shared = {field.name: getattr(epilogue, field.name) for field in fields(EpilogueBinding)}
    return Binding(**shared, a=a, b=b, signature=signature)


def outputs_of(graph: Graph, dtypes: Sequence[DType]) -> tuple[Output, ...]:
    """What a kernel writes for each result; a reduction becomes f32 partials."""
    outputs = []
    for result, dtype in zip(graph.results, dtypes, strict=True):
        if result.is_reduction:
            # over both axes: partials along M first, the finish then reduces N as well
            kind = Kind.COL if result.node.axes is Axes.COL else Kind.ROW
            outputs.append(Output(kind, DType.F32, REDUCE_OF_OP[result.node.op]))
        else:
            outputs.append(Output(Kind.TILE, dtype))
    return tuple(outputs)


def read_matrix(matrix: Tensor, k_axis: int, k_major_only: bool) -> MatrixReading:
    """How a kernel reads A (`k_axis` -1) or B (`k_axis` -2)."""
    other_axis = -3 - k_axis
    K, other = matrix.shape[k_axis], matrix.shape[other_axis]
    k_stride, other_stride = matrix.stride(k_axis), matrix.stride(other_axis)
    batch_stride = matrix.stride(0) if matrix.dim() == 3 and matrix.shape[0] > 1 else 0
    size, address = matrix.element_size(), address_of(matrix)
    if (k_stride == 1 or K == 1) and (other_stride > 0 or other == 1):
        ld = other_stride if other > 1 else _rounded_up(K, size)
        return MatrixReading(True, ld, batch_stride, aligned_bytes(address, size, K, ld, batch_stride))
    if not k_major_only and (other_stride == 1 or other == 1) and k_stride > 0:
        return MatrixReading(False, k_stride, batch_stride, aligned_bytes(address, size, other, k_stride, batch_stride))
    batch_stride = K * other if matrix.dim() == 3 and matrix.shape[0] > 1 else 0
    return MatrixReading(True, K, batch_stride, aligned_bytes(0, size, K), copied=True)


def read_operand(parameter: Parameter, value: Tensor | float, extents: Extents) -> OperandReading:
    """How a kernel reads an operand of the epilogue."""
    kind = KIND_OF_AXES[parameter.axes]
    if not isinstance(value, Tensor):
        return OperandReading(Kind.SCALAR, DType.F32, 0, 0, ACCESS_BYTES, is_number=True)
    dtype = dtype_of(value.dtype)
    plain = len(extents.unbatched(parameter.axes))
    batch_stride = value.stride(0) if value.dim() > plain and value.shape[0] > 1 else 0
    if kind is Kind.SCALAR:
        return OperandReading(kind, dtype, 0, batch_stride, ACCESS_BYTES)
    if kind is Kind.TILE:
        return _read_tile(value, dtype, batch_stride, extents)
    if value.shape[-1] > 1 and value.stride(-1) == 0:  # one value, expanded
        return OperandReading(Kind.SCALAR, dtype, 0, batch_stride, ACCESS_BYTES)
    copied = value.shape[-1] > 1 and value.stride(-1) != 1
    if copied:
        batch_stride = value.shape[-1] if batch_stride else 0
    aligned = ACCESS_BYTES if copied else aligned_bytes(address_of(value), dtype.bytes, batch_stride)
    return OperandReading(kind, dtype, 0, batch_stride, aligned, copied)


def _read_tile(value: Tensor, dtype: DType, batch_stride: int, extents: Extents) -> OperandReading:
    (M, N), (row_stride, column_stride) = value.shape[-2:], value.stride()[-2:]
    constant_over_m, constant_over_n = M > 1 and row_stride == 0, N > 1 and column_stride == 0
    if constant_over_m and constant_over_n:
        return OperandReading(Kind.SCALAR, dtype, 0, batch_stride, ACCESS_BYTES)
    if constant_over_m and (column_stride == 1 or N == 1):
        return OperandReading(Kind.ROW, dtype, 0, batch_stride, ACCESS_BYTES)
    if constant_over_n and (row_stride == 1 or M == 1):
        return OperandReading(Kind.COL, dtype, 0, batch_stride, ACCESS_BYTES)
    size = dtype.bytes
    if column_stride == 1 or N == 1:
        row_stride = row_stride if M > 1 else _rounded_up(N, size)
        aligned = aligned_bytes(address_of(value), size, N, row_stride, batch_stride)
        return OperandReading(Kind.TILE, dtype, row_stride, batch_stride, aligned)
    batch_stride = M * N if value.dim() == 3 and value.shape[0] > 1 else 0
    return OperandReading(Kind.TILE, dtype, N, batch_stride, aligned_bytes(0, size, N), copied=True)


def address_of(tensor: Tensor) -> int:
    """Where the tensor's data starts; 0, which is aligned to everything, for one without data."""
    return 0 if tensor.is_meta else tensor.data_ptr()


def aligned_bytes(address: int, size: int, *elements: int) -> int:
    """The largest power of two up to 16 that divides the address and all extents and strides, in bytes."""
    joined = address | ACCESS_BYTES
    for count in elements:
        joined |= count * size
    return joined & -joined


def _rounded_up(extent: int, size: int) -> int:
    """A legal leading stride for a dimension of extent 1, whose stride is never used."""
    step = ACCESS_BYTES // size
    return -(-extent // step) * step


def _tile_alignment(
    graph: Graph,
    extents: Extents,
    readings: Sequence[OperandReading | None],
    dtypes: Sequence[DType],
    outs: Sequence[Tensor | None],
) -> int:
    """Columns that one aligned access may take in every TILE tensor, where an access is at most 16 bytes."""
    tiles = [(r.dtype.bytes, r.aligned_bytes) for r in readings if r is not None and r.kind is Kind.TILE]
    for index, (result, dtype) in enumerate(zip(graph.results, dtypes, strict=True)):
        if not result.is_reduction:
            out = outs[index] if index < len(outs) else None
            tiles.append((dtype.bytes, _output_alignment(out, dtype, extents)))
    columns = ACCESS_BYTES
    while columns > 1 and any(aligned < min(ACCESS_BYTES, columns * size) for size, aligned in tiles):
        columns //= 2
    while extents.N % columns:
        columns //= 2
    return columns


def _output_alignment(out: Tensor | None, dtype: DType, extents: Extents) -> int:
    if out is None:
        return aligned_bytes(0, dtype.bytes, extents.N)
    strides = [out.stride(axis) for axis in range(out.dim() - 1) if out.shape[axis] > 1]
    return aligned_bytes(address_of(out), dtype.bytes, extents.N, *strides)


def is_writable_layout(out: Tensor, graph_axes: Axes) -> bool:
    """Whether a kernel can write `out` directly: columns contiguous, no element written twice."""
    if graph_axes is not Axes.TILE:
        return out.is_contiguous()
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        return False
    if out.shape[-2] > 1 and out.stride(-2) < out.shape[-1]:
        return False
    return out.dim() == 2 or out.shape[0] <= 1 or out.stride(0) >= out.stride(-2) * max(1, out.shape[-2] - 1)


def result_shape(binding: EpilogueBinding, index: int) -> tuple[int, ...]:
    """The shape of result `index`."""
    return binding.extents.shape(result_axes(binding.graph.results[index]))
