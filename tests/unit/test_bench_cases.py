"""The cases mean what they say, and torch's own ways to compute them agree with that."""

import math

import pytest
import torch

from bench import gemmgen_api
from bench.cases import CASES, draw_inputs, int_mm_reason, reference, scaled_mm_reason
from bench.check import errors, torch_errors
from bench.shapes import Shape
from bench.without_gpu import cpu_verdict

SHAPE = Shape(32, 48, 64)


def gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + math.exp(-x))


# One element of the first output, in plain Python, from accum and the operands at that element.
SCALAR_MEANING = {
    "bias_gelu_tanh": lambda accum, bias: gelu_tanh(accum + bias),
    "bias_silu": lambda accum, bias: silu(accum + bias),
    "scale_bias_gelu_residual": lambda accum, scale, bias, residual: gelu(accum * scale + bias) + residual,
    "int8_dequant_bias": lambda accum, scale_a, scale_b, bias: accum * scale_a * scale_b + bias,
    "fp8_dequant_bias_gelu_tanh": lambda accum, scale_a, scale_b, bias: gelu_tanh(accum * scale_a * scale_b + bias),
    "bias_relu_column_sums": lambda accum, bias: max(accum + bias, 0.0),
}


def element(operand, axis, m, n):
    return operand[{"row": n, "col": m, "tile": (m, n)}[axis]].item()


def test_the_six_cases():
    assert set(CASES) == set(SCALAR_MEANING)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_reference_is_the_meaning_element_by_element(case):
    inputs = draw_inputs(case, SHAPE, device="cpu", seed=7)

    D = reference(case, inputs)[0]

    for m, n in ((0, 0), (3, 5), (31, 47)):
        accum = sum((inputs.A[m, k].double() * inputs.B[k, n].double()).item() for k in range(SHAPE.K))
        at = {name: element(inputs.operands[name].double(), axis, m, n) for name, axis in case.operands.items()}
        assert D[m, n].item() == pytest.approx(SCALAR_MEANING[case.name](accum, **at), rel=1e-12, abs=1e-12)


def test_column_sums_add_over_the_rows_of_d():
    case = CASES["bias_relu_column_sums"]

    D, sums = reference(case, draw_inputs(case, SHAPE, device="cpu"))

    assert sums.shape == (SHAPE.N,)
    torch.testing.assert_close(sums, torch.stack([D[:, n].sum() for n in range(SHAPE.N)]))


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_eager_torch_agrees_with_the_reference(case):
    inputs = draw_inputs(case, SHAPE, device="cpu")

    for error in torch_errors(case, inputs, reference(case, inputs)):
        assert 1e-5 < error.relative < 1e-2  # a bf16 result, neither exact nor wrong


def product_of(call, inputs):
    """What torch's product gives, where this torch has it on the CPU (row scales of fp8 are newer than 2.9)."""
    try:
        return call(inputs.A, inputs.B, **inputs.operands)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} on the CPU: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_product_and_tail_agree_with_the_reference(case):
    inputs = draw_inputs(case, SHAPE, device="cpu")
    product = product_of(case.matmul, inputs)

    for error in errors(case.after_matmul(product, **inputs.operands), reference(case, inputs)):
        assert error.relative < 1e-2


@pytest.mark.parametrize("case", [c for c in CASES.values() if not isinstance(c.cublaslt, str)], ids=str)
def test_cublaslt_way_agrees_with_the_reference(case):
    inputs = draw_inputs(case, SHAPE, device="cpu")

    for error in errors(product_of(case.cublaslt, inputs), reference(case, inputs)):
        assert error.relative < 1e-2


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_inputs_are_in_range_and_b_is_a_transposed_weight(case):
    inputs = draw_inputs(case, SHAPE, device="cpu")

    assert inputs.A.dtype == inputs.B.dtype == case.dtype
    assert inputs.A.shape == (SHAPE.M, SHAPE.K) and inputs.B.shape == (SHAPE.K, SHAPE.N)
    assert inputs.B.stride() == (1, SHAPE.K)
    limit = 127 if case.dtype is torch.int8 else 1
    assert 0.9 * limit < inputs.A.double().abs().max() <= limit


def test_seeds_draw_different_inputs_and_the_same_seed_the_same():
    case = CASES["bias_silu"]
    first, same, other = (draw_inputs(case, SHAPE, device="cpu", seed=seed) for seed in (0, 0, 1))

    assert torch.equal(first.A, same.A) and not torch.equal(first.A, other.A)


def test_inputs_on_meta_have_shapes_only():
    inputs = draw_inputs(CASES["int8_dequant_bias"], Shape(8192, 14336, 4096), device="meta")

    assert inputs.A.is_meta and inputs.operands["scale_a"].shape == (8192,)


@pytest.mark.parametrize(
    "reason, shape, words",
    [
        pytest.param(int_mm_reason, Shape(16, 64, 64), "M > 16", id="int8-few-rows"),
        pytest.param(int_mm_reason, Shape(1000, 1003, 777), "multiples of 8", id="int8-odd"),
        pytest.param(scaled_mm_reason, Shape(1000, 1003, 777), "multiples of 16", id="fp8-odd"),
    ],
)
def test_shapes_that_torch_cannot_take_have_a_reason(reason, shape, words):
    assert words in reason(shape)


def test_shapes_that_torch_can_take_have_none():
    assert int_mm_reason(Shape(17, 64, 64)) is None
    assert scaled_mm_reason(Shape(1, 64, 64)) is None


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_gemmgen_means_the_same(case):
    assert cpu_verdict(case, SHAPE) is None


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_gemmgen_names_the_kernel_that_it_would_run(case):
    inputs = draw_inputs(case, Shape(8192, 4096, 1024), device="meta")

    assert "sm90" in gemmgen_api.gemm(case).explain(inputs.A, inputs.B, arch="sm90", **inputs.operands)
