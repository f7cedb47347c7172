"""The fused functions that are measured: what each means in torch, and torch's own ways to compute it.

Every function of a case takes `(A, B, **operands)` (a tail takes the product instead of A and B) and ignores
the operands that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.shapes import Shape

Outputs = tuple[Tensor, ...]
Reason = str | None

OUT_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """`A [M, K]`, `B [K, N]` (the transposed view of an `[N, K]` weight) and the epilogue's operands."""

    A: Tensor
    B: Tensor
    operands: Mapping[str, Tensor]

    def bind(self, function: Callable[..., object]) -> Callable[[], object]:
        return lambda: function(self.A, self.B, **self.operands)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.A, self.B, *self.operands.values()))


# Torch's products.


def bf16_mm(A: Tensor, B: Tensor, **_: Tensor) -> Tensor:
    return torch.mm(A, B)


def int_mm(A: Tensor, B: Tensor, **_: Tensor) -> Tensor:
    return torch._int_mm(A, B)


def scaled_mm(A: Tensor, B: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Row and column scales are part of the product here, because torch has no fp8 product without scales."""
    return torch._scaled_mm(A, B, scale_a[:, None], scale_b[None, :], bias=bias, out_dtype=OUT_DTYPE)


def scaled_mm_without_bias(A: Tensor, B: Tensor, scale_a: Tensor, scale_b: Tensor, **_: Tensor) -> Tensor:
    return scaled_mm(A, B, scale_a, scale_b)


def int_mm_reason(shape: Shape) -> Reason:
    """Why `torch._int_mm` cannot take `shape` on CUDA."""
    if shape.M <= 16:
        return f"torch._int_mm needs M > 16, M is {shape.M}"
    if shape.N % 8 or shape.K % 8:
        return f"torch._int_mm needs N and K to be multiples of 8, they are {shape.N} and {shape.K}"
    return None


def scaled_mm_reason(shape: Shape) -> Reason:
    """Why `torch._scaled_mm` cannot take `shape` on CUDA."""
    if shape.N % 16 or shape.K % 16:
        return f"torch._scaled_mm needs N and K to be multiples of 16, they are {shape.N} and {shape.K}"
    return None


@dataclass(frozen=True, eq=False)  # each case is its own object, and hashable
class Case:
    """One fused function.

    Attributes:
        name: also the name of its gemmgen epilogue.
        operands: axis of each operand: "row" `[N]`, "col" `[M]` or "tile" `[M, N]`.
        function: `(accum, **operands) -> outputs`, in the dtype of what it is given; the meaning of the case.
        eager: the whole function as one would write it in torch.
        cublaslt: the whole function with cuBLASLt's epilogue, or the reason why there is none.
        dtype: of A and B.
        matmul: the bare product as torch offers it.
        tail: `(product, **operands) -> outputs` in bf16: what is left to do after `matmul`; by default `function`.
        matmul_reason: why torch's product cannot take a shape, or None.
    """

    name: str
    operands: Mapping[str, str]
    function: Callable[..., Outputs]
    eager: Callable[..., Outputs]
    cublaslt: Callable[..., Outputs] | str
    dtype: torch.dtype = torch.bfloat16
    matmul: Callable[..., Tensor] = bf16_mm
    tail: Callable[..., Outputs] | None = None
    matmul_reason: Callable[[Shape], Reason] = lambda shape: None

    def __str__(self) -> str:
        return self.name

    @property
    def after_matmul(self) -> Callable[..., Outputs]:
        return self.tail or self.function


# The meaning of each case. Given doubles, these compute the reference.


def bias_gelu_tanh(accum: Tensor, bias: Tensor, **_: Tensor) -> Outputs:
    return (F.gelu(accum + bias, approximate="tanh"),)


def bias_silu(accum: Tensor, bias: Tensor) -> Outputs:
    return (F.silu(accum + bias),)


def scale_bias_gelu_residual(accum: Tensor, scale: Tensor, bias: Tensor, residual: Tensor) -> Outputs:
    return (F.gelu(accum * scale + bias) + residual,)


def int8_dequant_bias(accum: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Outputs:
    return (accum * scale_a[:, None] * scale_b + bias,)


def fp8_dequant_bias_gelu_tanh(accum: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Outputs:
    return bias_gelu_tanh(accum * scale_a[:, None] * scale_b, bias)


def bias_relu_column_sums(accum: Tensor, bias: Tensor) -> Outputs:
    activated = torch.relu(accum + bias)
    return activated, activated.sum(0)


# Whole functions in eager torch: with the bias in `addmm`, as F.linear has it, where that is possible.


def eager_bias_gelu_tanh(A: Tensor, B: Tensor, bias: Tensor) -> Outputs:
    return (F.gelu(torch.addmm(bias, A, B), approximate="tanh"),)


def eager_bias_silu(A: Tensor, B: Tensor, bias: Tensor) -> Outputs:
    return (F.silu(torch.addmm(bias, A, B)),)


def eager_scale_bias_gelu_residual(A: Tensor, B: Tensor, **operands: Tensor) -> Outputs:
    return scale_bias_gelu_residual(torch.mm(A, B), **operands)


def eager_int8_dequant_bias(A: Tensor, B: Tensor, **operands: Tensor) -> Outputs:
    return rounded_int8_dequant_bias(int_mm(A, B), **operands)


def eager_fp8_dequant_bias_gelu_tanh(A: Tensor, B: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Outputs:
    return bias_gelu_tanh(scaled_mm(A, B, scale_a, scale_b), bias)


def eager_bias_relu_column_sums(A: Tensor, B: Tensor, bias: Tensor) -> Outputs:
    activated = torch.relu(torch.addmm(bias, A, B))
    return activated, activated.sum(0)


def rounded_int8_dequant_bias(accum: Tensor, **operands: Tensor) -> Outputs:
    (dequantised,) = int8_dequant_bias(accum, **operands)
    return (dequantised.to(OUT_DTYPE),)


# cuBLASLt's epilogues.


def cublaslt_bias_gelu_tanh(A: Tensor, B: Tensor, bias: Tensor) -> Outputs:
    return (torch._addmm_activation(bias, A, B, use_gelu=True),)  # on CUDA this is the tanh form


def cublaslt_fp8_dequant_bias_gelu_tanh(
    A: Tensor, B: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor
) -> Outputs:
    return (F.gelu(scaled_mm(A, B, scale_a, scale_b, bias), approximate="tanh"),)


def cublaslt_bias_relu_column_sums(A: Tensor, B: Tensor, bias: Tensor) -> Outputs:
    activated = torch._addmm_activation(bias, A, B)
    return activated, activated.sum(0)


_DEQUANT_OPERANDS = {"scale_a": "col", "scale_b": "row", "bias": "row"}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="bias_gelu_tanh",
            operands={"bias": "row"},
            function=bias_gelu_tanh,
            eager=eager_bias_gelu_tanh,
            cublaslt=cublaslt_bias_gelu_tanh,
        ),
        Case(
            name="bias_silu",
            operands={"bias": "row"},
            function=bias_silu,
            eager=eager_bias_silu,
            cublaslt="cuBLASLt has no SiLU epilogue",
        ),
        Case(
            name="scale_bias_gelu_residual",
            operands={"scale": "row", "bias": "row", "residual": "tile"},
            function=scale_bias_gelu_residual,
            eager=eager_scale_bias_gelu_residual,
            cublaslt="cuBLASLt has neither an erf GELU nor a vector scale nor a residual after the activation",
        ),
        Case(
            name="int8_dequant_bias",
            dtype=torch.int8,
            operands=_DEQUANT_OPERANDS,
            function=int8_dequant_bias,
            matmul=int_mm,
            tail=rounded_int8_dequant_bias,
            eager=eager_int8_dequant_bias,
            cublaslt="torch offers no epilogue of cuBLASLt's int8 product",
            matmul_reason=int_mm_reason,
        ),
        Case(
            name="fp8_dequant_bias_gelu_tanh",
            dtype=torch.float8_e4m3fn,
            operands=_DEQUANT_OPERANDS,
            function=fp8_dequant_bias_gelu_tanh,
            matmul=scaled_mm_without_bias,
            tail=bias_gelu_tanh,
            eager=eager_fp8_dequant_bias_gelu_tanh,
            cublaslt=cublaslt_fp8_dequant_bias_gelu_tanh,
            matmul_reason=scaled_mm_reason,
        ),
        Case(
            name="bias_relu_column_sums",
            operands={"bias": "row"},
            function=bias_relu_column_sums,
            eager=eager_bias_relu_column_sums,
            cublaslt=cublaslt_bias_relu_column_sums,
        ),
    )
}


def draw_inputs(case: Case, shape: Shape, device: str = "cuda", seed: int = 0) -> Inputs:
    """Fresh inputs uniform in [-1, 1]; 8-bit A and B are quantised from that, and their scales undo it."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def uniform(*extents: int) -> Tensor:
        return torch.rand(extents, device=device, generator=generator).mul_(2).sub_(1)

    def operand(name: str, axis: str) -> Tensor:
        extents = {"row": (shape.N,), "col": (shape.M,), "tile": (shape.M, shape.N)}[axis]
        is_dequantiser = name.startswith("scale_")
        return _dequantising(uniform(*extents), case.dtype) if is_dequantiser else uniform(*extents).to(OUT_DTYPE)

    A = _quantised(uniform(shape.M, shape.K), case.dtype)
    weight = _quantised(uniform(shape.N, shape.K), case.dtype)
    return Inputs(A, weight.t(), {name: operand(name, axis) for name, axis in case.operands.items()})


def _quantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.mul_(127).round_().to(dtype) if dtype is torch.int8 else x.to(dtype)


def _dequantising(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 scales within a factor of two of the one that undoes the quantisation."""
    scale = x.mul_(0.5).add_(1.0)
    return scale.div_(127) if dtype is torch.int8 else scale


def reference(case: Case, inputs: Inputs) -> Outputs:
    """The outputs in float64, accumulated in float64."""
    accum = inputs.A.double() @ inputs.B.double()
    return case.function(accum, **{name: operand.double() for name, operand in inputs.operands.items()})
