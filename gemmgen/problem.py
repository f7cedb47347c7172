"""What one call computes: its extents, the checks of its operands, and the shapes and dtypes of its results.

Works on anything with a tensor's metadata, so that the CPU, CUDA and fake implementations agree by construction.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import OperandError, ShapeMismatch, UnsupportedOp
from gemmgen.ir.graph import Graph, Parameter, Result
from gemmgen.ir.node import Axes

MATRIX_DTYPES = (DType.F64, DType.F32, DType.BF16, DType.F16, DType.E4M3, DType.E5M2, DType.I8)
EIGHT_BIT = (DType.E4M3, DType.E5M2, DType.I8)
FP8 = (DType.E4M3, DType.E5M2)
# of results; float64 ones come of float64 matrices
RESULT_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32,
)  # fmt: skip
KIND_NAMES = {Axes.ROW: "gg.Row", Axes.COL: "gg.Col", Axes.TILE: "gg.Tile", Axes.SCALAR: "gg.Scalar"}

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@dataclass(frozen=True)
class Extents:
    """`D[L, M, N]` from `A[L, M, K]` and `B[L, K, N]`; `batched` tells whether results keep the L axis."""

    M: int
    N: int
    K: int
    L: int
    batched: bool

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of something that varies along `axes`, L in front when batched."""
        return ((self.L,) if self.batched else ()) + self.unbatched(axes)

    def unbatched(self, axes: Axes) -> tuple[int, ...]:
        return ((self.M,) if Axes.COL in axes else ()) + ((self.N,) if Axes.ROW in axes else ())


# up to that M, how far apart the largest M of classes are
M_CLASSES = ((64, 1), (1024, 8), (sys.maxsize, 64))


def representative_of(extents: Extents) -> Extents:
    """The extents, in the place of these, that a way is chosen for: the largest M of its class.

    In a class every height of tile worth trying comes as often into M, and M is in one bucket. Of a batch, M also
    decides whether torch can take it as one product: there every M is its own class.
    """
    M = extents.M
    step = next(step for up_to, step in M_CLASSES if up_to >= M) if extents.L == 1 else 1
    return replace(extents, M=-(-M // step) * step)


def extents_of(name: str, A: Tensor, B: Tensor) -> Extents:
    """The extents of `A[(L,) M, K] @ B[(L,) K, N]`.

    Raises:
        ShapeMismatch: the ranks or the extents do not fit.
    """
    for matrix, letter in ((A, "A"), (B, "B")):
        if matrix.dim() not in (2, 3):
            raise ShapeMismatch(
                f"`{name}`: {letter} has shape {tuple(matrix.shape)}, that is {matrix.dim()} dimensions\n"
                f"  A is [M, K] or [L, M, K], B is [K, N] or [L, K, N]. For a vector use {letter}.unsqueeze(0)."
            )
    M, K = A.shape[-2], A.shape[-1]
    if B.shape[-2] != K:
        hint = " Did you mean B.t()? (nn.Linear weights are [N, K]: use gg.linear.)" if B.shape[-1] == K else ""
        raise ShapeMismatch(
            f"`{name}`: A is {tuple(A.shape)} and B is {tuple(B.shape)}: K is {K} in A and {B.shape[-2]} in B\n"
            f"  A's last and B's last but one extent must be equal.{hint}"
        )
    batched = A.dim() == 3 or B.dim() == 3
    L = A.shape[0] if A.dim() == 3 else B.shape[0] if B.dim() == 3 else 1
    if A.dim() == 3 and B.dim() == 3 and A.shape[0] != B.shape[0]:
        raise ShapeMismatch(
            f"`{name}`: A is {tuple(A.shape)} and B is {tuple(B.shape)}: L is {A.shape[0]} in A and {B.shape[0]} in B\n"
            "  Batched matrices need the same L; a 2-D one is shared by all batches."
        )
    return Extents(M, B.shape[-1], K, L, batched)


def check_matrices(name: str, A: Tensor, B: Tensor) -> tuple[DType, DType]:
    """The element types of A and B.

    Raises:
        OperandError: they cannot be multiplied with each other.
        UnsupportedOp: gemmgen has no mainloop for the type.
    """
    a, b = _dtype(f"`{name}`: A", A), _dtype(f"`{name}`: B", B)
    for letter, dtype in (("A", a), ("B", b)):
        if dtype not in MATRIX_DTYPES:
            raise UnsupportedOp(
                f"`{name}`: {letter} is {dtype.text}, for which there is no mainloop\n"
                f"  A and B may be {', '.join(d.text for d in MATRIX_DTYPES)}."
            )
    if a is not b and not (a in FP8 and b in FP8):
        raise OperandError(
            f"`{name}`: A is {A.dtype} and B is {B.dtype}\n"
            "  They must have one dtype (the two fp8 types may be mixed). Cast one of them."
        )
    _check_device(f"`{name}`: B", B, A)
    return a, b


def check_types(
    name: str, parameters: Sequence[Parameter], A: object, B: object, operands: Mapping[str, object]
) -> None:
    """Refuses what is neither a dense tensor on A's device nor, for a Scalar, a number.

    Torch would choose an implementation by such arguments before any other check could see them.

    Raises:
        OperandError: says what was given and what was expected.
    """
    check_tensor(f"`{name}`: A", A, A)
    check_tensor(f"`{name}`: B", B, A)
    for parameter in parameters:
        value, operand = operands[parameter.name], f"`{name}`: operand `{parameter.name}`"
        if isinstance(value, Tensor) or parameter.axes is not Axes.SCALAR:
            check_tensor(operand, value, A, f" for the declared {KIND_NAMES[parameter.axes]}")
        elif not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
            raise OperandError(f"{operand} is {_given(value)}\n  A gg.Scalar is a number or a one-element tensor.")


def check_out(what: str, out: object, A: Tensor) -> None:
    """Refuses an `out` that is no dense tensor of a result on A's device, or has elements that share memory.

    Raises:
        OperandError: says what was given.
    """
    check_tensor(what, out, A)
    assert isinstance(out, Tensor)
    check_out_dtype(f"{what}: its dtype", A, out.dtype)
    if _overlaps_itself(out):
        raise OperandError(f"{what} has elements that share memory: strides {out.stride()}\n  Give its .contiguous().")


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether a dimension steps back into what those of smaller strides cover."""
    span = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride < span:
                return True
            span += (extent - 1) * stride
    return False


@functools.lru_cache(maxsize=1024)
def _meet(one: Layout, other: Layout, distance: int) -> bool:
    """Whether two layouts, the second `distance` bytes behind the first, have a byte in common."""

    def span(layout: Layout) -> int:
        return 1 + sum((extent - 1) * stride for extent, stride in zip(*layout, strict=True))

    if not (math.prod(one[0]) and math.prod(other[0])) or not -span(other) < distance < span(one):
        return False
    start = max(-distance, 0)
    bytes_ = torch.zeros(max(start + span(one), start + distance + span(other)), dtype=torch.bool)
    bytes_.as_strided(*one, start).fill_(True)
    return bool(bytes_.as_strided(*other, start + distance).any())


def _layout_in_bytes(tensor: Tensor) -> Layout:
    size = tensor.element_size()
    return (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)


def check_apart(name: str, outs: Sequence[Tensor], results: Sequence[Result]) -> None:
    """Refuses tensors of `out` that share an element.

    Raises:
        OperandError: names the results of two that do.
    """
    for (a, one), (b, other) in itertools.combinations(zip(results, outs, strict=True), 2):
        if _meet(_layout_in_bytes(one), _layout_in_bytes(other), other.data_ptr() - one.data_ptr()):
            raise OperandError(
                f"`{name}`: out for result `{a.name}` and out for result `{b.name}` share memory\n"
                "  Each result needs elements of its own."
            )


def check_tensor(what: str, value: object, A: object, wanted: str = "") -> None:
    """Refuses a `value` that is no dense tensor on A's device."""
    if not isinstance(value, Tensor):
        raise OperandError(f"{what} is {_given(value)}\n  Give a tensor{wanted}.")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise OperandError(f"{what} is a {kind} tensor\n  Give a dense one, such as its .to_dense().")
    if isinstance(A, Tensor):
        _check_device(what, value, A)


def _given(value: object) -> str:
    if isinstance(value, torch.fx.Proxy):
        return "a stand-in of torch.fx (use gg.nn's modules, or give torch.fx.wrap a function that calls the op)"
    return "None" if value is None else f"of type {type(value).__name__}"


def _check_device(what: str, value: Tensor, A: Tensor) -> None:
    if value.device != A.device:
        raise OperandError(f"{what} is on {value.device}, A on {A.device}\n  Move them to one device.")


def _dtype(what: str, tensor: Tensor) -> DType:
    try:
        return dtype_of(tensor.dtype)
    except UnsupportedOp as error:
        raise UnsupportedOp(f"{what}: {error}") from None


def check_out_dtype(what: str, A: Tensor, dtype: object) -> None:
    """Refuses a dtype that no result of a call with `A` can have.

    Raises:
        OperandError: names those that one can have.
    """
    if dtype not in RESULT_DTYPES and not dtype == A.dtype == torch.float64:
        raise OperandError(f"{what} is {dtype!r}\n  It may be {', '.join(map(str, RESULT_DTYPES))}.")


def check_operands(graph: Graph, operands: Mapping[str, Tensor | float], extents: Extents, A: Tensor) -> None:
    """`check_operand` for every tensor operand of `graph`."""
    for parameter in graph.parameters:
        value = operands[parameter.name]
        if isinstance(value, Tensor):
            check_operand(graph.name, parameter, value, extents, A)


def check_operand(name: str, parameter: Parameter, value: Tensor, extents: Extents, A: Tensor) -> None:
    """Refuses an operand of the wrong shape, dtype or device.

    Raises:
        ShapeMismatch, OperandError: says what was expected.
    """
    operand = f"`{name}`: operand `{parameter.name}`"
    _check_device(operand, value, A)
    _dtype(operand, value)
    plain = extents.unbatched(parameter.axes)
    allowed = [plain, (extents.L, *plain)] if extents.batched else [plain]
    if parameter.axes is Axes.SCALAR:
        allowed.append((1,))
    if tuple(value.shape) not in allowed:
        raise ShapeMismatch(
            f"{operand} has shape {tuple(value.shape)}; declared {KIND_NAMES[parameter.axes]}, it must be "
            f"{' or '.join(str(shape) for shape in allowed)}\n"
            f"  (M, N, K, L) = ({extents.M}, {extents.N}, {extents.K}, {extents.L}). "
            + _shape_hint(parameter, tuple(value.shape), extents)
        )


def _shape_hint(parameter: Parameter, shape: tuple[int, ...], extents: Extents) -> str:
    if parameter.axes is Axes.ROW and shape == (extents.M,):
        return "This is one value per row of D: annotate it gg.Col."
    if parameter.axes is Axes.COL and shape == (extents.N,):
        return "This is one value per column of D: annotate it gg.Row."
    if sorted((1, *extents.unbatched(parameter.axes))) == sorted(shape):
        return "Drop the axis of extent 1 with .squeeze()."
    return "Reshape it, or declare another kind."


def result_dtype(result: Result, a: DType, out_dtype: DType | None) -> DType:
    """The dtype that `result` is stored in: its own, else fp32 for reductions, else `out_dtype` or A's.

    8-bit A gives bf16; float64 A gives float64 throughout.
    """
    if result.dtype is not None:
        return result.dtype
    if result.is_reduction:
        return DType.F64 if a is DType.F64 else DType.F32
    return out_dtype or (DType.BF16 if a in EIGHT_BIT else a)


def result_axes(result: Result) -> Axes:
    """What the stored result varies along: a reduction's axes, else the whole tile."""
    return result.node.axes if result.is_reduction else Axes.TILE


T = TypeVar("T")


def bind_names(name: str, parameters: Sequence[Parameter], operands: Mapping[str, T]) -> dict[str, T]:
    """The operands of a call by name, in declared order.

    Raises:
        OperandError: one is missing or unknown.
    """
    expected = [p.name for p in parameters]
    missing = [p for p in expected if p not in operands]
    unknown = [p for p in operands if p not in expected]
    if missing or unknown:
        raise OperandError(
            f"`{name}` got operands {sorted(operands)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unknown: {', '.join(unknown)}" if unknown else "")
            + f"\n  It is declared as {name}(accum{''.join(', ' + p for p in expected)})."
        )
    return {p: operands[p] for p in expected}
