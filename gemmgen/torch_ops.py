"""What torch itself can compute of a call: the product into a wide accumulator, or all of it by an op of its own.

A whole call is torch's only where its op means the same: accumulation in fp32, every term of the epilogue in fp32, one
rounding, NaN kept. The rules for when torch takes cuBLASLt's epilogue, and so rounds once, are those of torch 2.9 to
2.13 (`addmm_out_cuda_impl`). How cuBLAS accumulates follows torch's own settings
(`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` and its siblings).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemmgen.arch import Arch
from gemmgen.bind import ACCESS_BYTES, Binding, OperandReading
from gemmgen.device import is_capturing
from gemmgen.dtypes import DType
from gemmgen.ir import build
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import Axes, Node, Op
from gemmgen.plan import Operands, Product, TorchCall, laid_out
from gemmgen.problem import EIGHT_BIT, FP8
from gemmgen.signature import Kind
from gemmgen.simplify import simplified

MAX_LOOPED_BATCHES = 16  # torch's 8-bit products take no batch: one launch each
INT8_MIN_ROWS = 17
INT8_MULTIPLE = 8
FP8_ALIGNED_BYTES = 16
LT_ALIGNED_BYTES = 16  # of rows, else torch's GELU is a kernel of its own: bench/results/torch-gelu-h200.json

_aten: Any = torch.ops.aten


# Products

@dataclass(frozen=True)
class TorchProduct:
    """How torch multiplies two matrices of one dtype into a wider accumulator.

    Attributes:
        name: the op of torch that `one` is, in an entry of `PRODUCTS`.
        one: `one(A, B, accum)` for `[M, K]`, `[K, N]` and `[M, N]`.
        many: the same for `[L, ...]`; None where torch has none.
        reject_reason: why it cannot run a call, or None.
    """

    name: str
    one: Product
    many: Product | None
    reject_reason: Callable[[Binding, Arch], str | None]

    def plain(self, binding: Binding) -> str | None:
        """The op that makes accum of A and B as they are given; None for batches, and where one is copied first."""
        is_copied = binding.signature.a.dtype in EIGHT_BIT and (binding.a.copied or binding.b.copied)
        return None if binding.extents.batched or is_copied else self.name

    def bound(self, binding: Binding) -> Product:
        """`product(A, B, accum)` for calls that are read as `binding` says, with accum `[M, N]` or `[L, M, N]`."""

        multiply = functools.partial(_multiply, self.one, self.many)
        if binding.signature.a.dtype not in EIGHT_BIT:
            return multiply

        def with_contiguous_k(A: Tensor, B: Tensor, accum: Tensor) -> None:
            B = laid_out(B, binding.b, -2).mT if binding.b.copied else B
            multiply(laid_out(A, binding.a, -1), B, accum)

        return with_contiguous_k


def _multiply(one: Product, many: Product | None, A: Tensor, B: Tensor, accum: Tensor) -> None:
    """`A @ B` into accum `[M, N]` or `[L, M, N]`, contiguous, by as few products as its strides allow."""
    if accum.dim() == 2:
        one(A, B, accum)
        return
    A, B = _unbatched(A), _unbatched(B)
    L, _, N = accum.shape
    if B.dim() == 2 and A.dim() == 3 and _rows_follow(A):
        one(A.view(-1, A.shape[-1]), B, accum.view(-1, N))
    elif L == 1:
        one(_batch(A, 0), _batch(B, 0), accum[0])
    elif many is not None:
        many(A.expand(L, *A.shape[-2:]), B.expand(L, *B.shape[-2:]), accum)
    else:
        for index in range(L):
            one(_batch(A, index), _batch(B, index), accum[index])


def _unbatched(matrix: Tensor) -> Tensor:
    """A batch that is one matrix many times, as that matrix."""
    return matrix[0] if matrix.dim() == 3 and (matrix.shape[0] == 1 or matrix.stride(0) == 0) else matrix


def _batch(matrix: Tensor, index: int) -> Tensor:
    return matrix[index] if matrix.dim() == 3 else matrix


def _rows_follow(A: Tensor) -> bool:
    """Whether the rows of all batches can be viewed as those of one matrix."""
    return A.stride(0) == A.shape[1] * A.stride(1)


def _mm_widened(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten.mm.dtype_out(A, B, torch.float32, out=accum)


def _bmm_widened(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten.bmm.dtype_out(A, B, torch.float32, out=accum)


def _mm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    torch.mm(A, B, out=accum)


def _bmm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    torch.bmm(A, B, out=accum)


def _int_mm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten._int_mm.out(A, B, out=accum)


def _scaled_mm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    one = _one(A.device)
    _aten._scaled_mm.out(A, B, one, one, out_dtype=torch.float32, use_fast_accum=False, out=accum)


def _one(device: torch.device) -> Tensor:
    return _fresh_unit(device) if is_capturing() else _unit(device)


def _fresh_unit(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


_unit = functools.lru_cache(maxsize=64)(_fresh_unit)  # never one that was made in a graph's memory


def _never(binding: Binding, arch: Arch) -> str | None:
    return None


def _reject_int8(binding: Binding, arch: Arch) -> str | None:
    extents = binding.extents
    rows = extents.M * extents.L if _is_one_product(binding) else extents.M
    if rows < INT8_MIN_ROWS:
        return f"torch._int_mm takes {INT8_MIN_ROWS} rows or more, not {rows}"
    if extents.K % INT8_MULTIPLE or extents.N % INT8_MULTIPLE:
        return f"torch._int_mm takes multiples of {INT8_MULTIPLE}, not K = {extents.K} and N = {extents.N}"
    if min(binding.a.aligned_bytes, binding.b.aligned_bytes) < INT8_MULTIPLE:
        return f"A or B is aligned to less than {INT8_MULTIPLE} bytes"
    return _reject_batches(binding)


def _reject_fp8(binding: Binding, arch: Arch) -> str | None:
    signature, extents = binding.signature, binding.extents
    if not arch.has_fp8_mma:
        return f"{arch.name} has no fp8 tensor cores"
    if (signature.a.dtype, signature.b.dtype) == (DType.E5M2, DType.E5M2):
        return "torch._scaled_mm does not multiply e5m2 by e5m2"
    if extents.K % FP8_ALIGNED_BYTES or extents.N % FP8_ALIGNED_BYTES:
        return f"torch._scaled_mm takes multiples of {FP8_ALIGNED_BYTES}, not K = {extents.K} and N = {extents.N}"
    if min(binding.a.aligned_bytes, binding.b.aligned_bytes) < FP8_ALIGNED_BYTES:
        return f"A or B is aligned to less than {FP8_ALIGNED_BYTES} bytes"
    return _reject_batches(binding)


def _reject_batches(binding: Binding) -> str | None:
    if binding.extents.L > MAX_LOOPED_BATCHES and not _is_one_product(binding):
        return f"torch multiplies no batches of {binding.signature.a.dtype.text}, and {binding.extents.L} are too many"
    return None


def _is_one_product(binding: Binding) -> bool:
    """Whether all batches share B and their rows follow each other in A, so that they are one product."""
    a, extents = binding.a, binding.extents
    return extents.L == 1 or (
        binding.b.batch_stride == 0 and a.k_major and a.batch_stride == extents.M * a.ld and extents.M > 1
    )


PRODUCTS: dict[DType, TorchProduct] = {
    DType.BF16: TorchProduct("aten::mm.dtype", _mm_widened, _bmm_widened, _never),
    DType.F16: TorchProduct("aten::mm.dtype", _mm_widened, _bmm_widened, _never),
    DType.F32: TorchProduct("aten::mm", _mm, _bmm, _never),
    DType.I8: TorchProduct("aten::_int_mm", _int_mm, None, _reject_int8),
    **dict.fromkeys(FP8, TorchProduct("aten::_scaled_mm", _scaled_mm, None, _reject_fp8)),
}


# Whole calls


@dataclass(frozen=True)
class TorchOp:
    """An op of torch that computes a whole call.

    Attributes:
        call: `call(A, B, operands, D)` writes D, which is contiguous.
        passes: over D in place, behind the product.
        bias: the operand that it adds.
        is_plain: whether `name` alone, of A, B and the bias as they are given, makes D.
        activates: whether the product's own epilogue has an activation.
    """

    name: str
    call: TorchCall
    passes: int = 0
    bias: str | None = None
    is_plain: bool = False
    activates: bool = False


def torch_op(binding: Binding, arch: Arch) -> TorchOp | str:
    """The op of torch that computes a call, or why there is none."""
    form = _form_of(binding.graph)
    if form is None:
        return "torch has no op with this epilogue"
    if not binding.has_contiguous_outs:
        return "the tensor given as `out` is not contiguous"
    product = PRODUCTS.get(binding.signature.a.dtype)
    if product is None:
        return f"torch has no product of {binding.signature.a.dtype.text} that accumulates in fp32"
    if reason := product.reject_reason(binding, arch):
        return reason
    if binding.signature.a.dtype in FP8:
        return _scaled(form, product, binding)
    if form.scales:
        return f"torch scales no product of {binding.signature.a.dtype.text}"
    if form.bias is not None:
        return _biased(form, form.bias, binding)
    return "torch has no op with this epilogue" if form.activation else _plain(product, binding)


@dataclass(frozen=True)
class _Form:
    """An epilogue `activation(accum * scales + bias)`.

    Attributes:
        scales: names of operands.
        bias: name of a Row.
        activation: "relu", "gelu_tanh" or None.
    """

    scales: tuple[str, ...] = ()
    bias: str | None = None
    activation: str | None = None


def _form_of(graph: Graph) -> _Form | None:
    """The form of a graph with one tile as its result, or None where it has another."""
    if len(graph.results) != 1 or graph.results[0].is_reduction:
        return None
    root = graph.results[0].node
    for name, inner in (("relu", _under_relu(root)), ("gelu_tanh", _under_gelu_tanh(root)), (None, root)):
        if inner is not None and (form := _affine(inner)) is not None:
            return replace(form, activation=name)
    return None


def _under_relu(node: Node) -> Node | None:
    return node.args[0] if node.op is Op.RELU else None


def _under_gelu_tanh(node: Node) -> Node | None:
    """The x that `node` is the tanh form of GELU of."""
    for x in (arg for part in node.args for arg in part.args):
        gelu = build.gelu_tanh(x)
        if simplified([gelu])[gelu] is node:
            return x
    return None


def _affine(node: Node) -> _Form | None:
    if node.op is Op.ADD:
        for inner, bias in (node.args, node.args[::-1]):
            scales = _scales(inner)
            if scales is not None and bias.op is Op.LOAD and bias.axes is Axes.ROW:
                return _Form(scales, str(bias.attr))
        return None
    scales = _scales(node)
    return None if scales is None else _Form(scales)


def _scales(node: Node) -> tuple[str, ...] | None:
    """The operands that accum is multiplied by, in any order; None where `node` is something else."""
    factors = list(_factors(node))
    loads = [factor for factor in factors if factor.op is Op.LOAD]
    accums = [factor for factor in factors if factor.op is Op.ACCUM]
    if len(accums) != 1 or len(loads) + 1 != len(factors):
        return None
    return tuple(str(load.attr) for load in loads)


def _factors(node: Node) -> Sequence[Node]:
    return [node] if node.op is not Op.MUL else [factor for arg in node.args for factor in _factors(arg)]


def _plain(product: TorchProduct, binding: Binding) -> TorchOp | str:
    """accum alone, rounded to the result's dtype."""
    a, stored = binding.signature.a.dtype, binding.dtypes[0]
    if stored is a and a is not DType.I8:
        product = replace(product, one=_mm, many=_bmm)
    elif stored is not binding.graph.accum:
        return f"torch multiplies {a.text} into no {stored.text}"
    multiply = product.bound(binding)
    return TorchOp(
        "torch._int_mm" if a is DType.I8 else "torch.mm" if _is_one_product(binding) else "torch.bmm",
        lambda A, B, operands, D: multiply(A, B, D),
        is_plain=stored is a and not binding.extents.batched,
    )


def _biased(form: _Form, bias: str, binding: Binding) -> TorchOp | str:
    """accum + bias, and an activation of it, by cuBLASLt's epilogue."""
    a, extents = binding.signature.a.dtype, binding.extents
    if a not in (DType.BF16, DType.F16) or binding.dtypes[0] is not a:
        return "torch rounds a biased product once only where A and the result are bf16 or fp16 alike"
    if reason := _reject_vector(bias, Kind.ROW, a, binding):
        return reason
    if not _is_one_product(binding):
        return "torch adds a bias to one product, not to a batch of them"
    if form.activation == "gelu_tanh" and (reason := _reject_gelu(binding)):
        return reason
    name, finish, passes = _BIASED[form.activation]

    def call(A: Tensor, B: Tensor, operands: Operands, D: Tensor) -> None:
        row = _vector(operands[bias])
        _multiply(lambda left, right, out: finish(row, left, right, out), None, A, B, D)

    activates = form.activation is not None and not passes
    return TorchOp(name, call, passes, bias, is_plain=not extents.batched, activates=activates)


def _reject_gelu(binding: Binding) -> str | None:
    """Why torch would not leave its GELU to cuBLASLt, but take it of what is rounded; a bias alone it adds before."""
    extents, size = binding.extents, binding.signature.a.dtype.bytes
    if min(extents.M * extents.L, extents.N, extents.K) == 1:
        return "with an extent of 1 torch rounds before its GELU"
    if min(binding.a.aligned_bytes, binding.b.aligned_bytes, binding.tile_alignment * size) < LT_ALIGNED_BYTES:
        return f"torch rounds before its GELU where rows of A, B or D are not aligned to {LT_ALIGNED_BYTES} bytes"
    return None


def _addmm(bias: Tensor, A: Tensor, B: Tensor, D: Tensor) -> object:
    return torch.addmm(bias, A, B, out=D)


def _addmm_relu(bias: Tensor, A: Tensor, B: Tensor, D: Tensor) -> object:
    """Not cuBLASLt's own ReLU, which makes 0 of NaN. relu of what is rounded is what is rounded of relu."""
    return torch.addmm(bias, A, B, out=D).relu_()


def _addmm_gelu_tanh(bias: Tensor, A: Tensor, B: Tensor, D: Tensor) -> object:
    return torch._addmm_activation(bias, A, B, use_gelu=True, out=D)  # its GELU is the tanh form


_BIASED: Mapping[str | None, tuple[str, Callable[[Tensor, Tensor, Tensor, Tensor], object], int]] = {
    None: ("torch.addmm", _addmm, 0),
    "relu": ("torch.addmm, then relu_", _addmm_relu, 1),
    "gelu_tanh": ("torch._addmm_activation", _addmm_gelu_tanh, 0),
}


def _scaled(form: _Form, product: TorchProduct, binding: Binding) -> TorchOp | str:
    """accum * scales + bias, of fp8."""
    if form.activation is not None:
        return "torch._scaled_mm has no activation"
    if binding.dtypes[0] is not DType.BF16 or binding.extents.L != 1:
        return "torch._scaled_mm is used for one bf16 result without a batch"
    axes = {parameter.name: parameter.axes for parameter in binding.graph.parameters}
    scales = sorted(form.scales, key=lambda name: axes[name] is Axes.ROW)
    is_rowwise = [axes[name] for name in scales] == [Axes.COL, Axes.ROW]
    if not is_rowwise and (len(scales) > 2 or any(axes[name] is not Axes.SCALAR for name in scales)):
        return "torch._scaled_mm takes a gg.Col and a gg.Row as scales, or up to two gg.Scalar"
    if is_rowwise and (binding.signature.a.dtype, binding.signature.b.dtype) != (DType.E4M3, DType.E4M3):
        return "torch._scaled_mm takes scales of rows and columns with e4m3 only"
    for name, kind in zip(scales, (Kind.COL, Kind.ROW) if is_rowwise else (Kind.SCALAR,) * 2, strict=False):
        if reason := _reject_vector(name, kind, DType.F32, binding):
            return reason
    if form.bias is not None and (reason := _reject_vector(form.bias, Kind.ROW, DType.BF16, binding)):
        return reason

    def scale(operands: Operands, at: int, device: torch.device) -> Tensor:
        if at >= len(scales):
            return _one(device)
        value = _vector(operands[scales[at]])
        return value.unsqueeze(1 - at) if is_rowwise else value

    def call(A: Tensor, B: Tensor, operands: Operands, D: Tensor) -> object:
        bias = None if form.bias is None else _vector(operands[form.bias])
        left, right = scale(operands, 0, A.device), scale(operands, 1, A.device)

        def one(A: Tensor, B: Tensor, out: Tensor) -> object:
            return _aten._scaled_mm.out(
                A, B, left, right, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=False, out=out
            )

        return replace(product, one=one).bound(binding)(A, B, D)

    return TorchOp("torch._scaled_mm", call)


def _reading(name: str, binding: Binding) -> OperandReading:
    by_name = {slot.name: reading for slot, reading in zip(binding.slots, binding.readings, strict=True)}
    reading = by_name[name]
    assert reading is not None
    return reading


def _reject_vector(name: str, kind: Kind, dtype: DType, binding: Binding) -> str | None:
    """Why torch cannot read an operand as one contiguous vector (or scalar) of `dtype`."""
    reading = _reading(name, binding)
    if reading.is_number:
        return f"`{name}` is a number, where torch reads a tensor"
    if reading.dtype is not dtype:
        return f"`{name}` is {reading.dtype.text}, where torch takes {dtype.text}"
    if reading.copied or reading.kind is not kind:
        return f"`{name}` is not contiguous"
    if reading.batch_stride:
        return f"`{name}` differs between batches"
    if reading.aligned_bytes < ACCESS_BYTES:
        return f"`{name}` is aligned to less than {ACCESS_BYTES} bytes"
    return None


def _vector(value: Tensor | float) -> Tensor:
    """A vector that all batches share, without their dimension."""
    assert isinstance(value, Tensor)
    return value[0] if value.dim() == 2 else value
