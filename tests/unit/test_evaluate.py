"""The torch evaluation of each op against torch itself, and the rounding of results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmgen.dsl as gg
from gemmgen.dtypes import DType
from gemmgen.evaluate import EVALUATE, evaluate, round_to
from gemmgen.ir import LEAVES, REDUCTIONS, Op
from gemmgen.trace import trace

NAN, INF = float("nan"), float("inf")
GRID = torch.linspace(-6, 6, 121, dtype=torch.float64)
SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e30, -1e30, 3, -3], dtype=torch.float64)
POSITIVE = torch.linspace(0.01, 9, 100, dtype=torch.float64)

VOCABULARY = {
    "neg": (lambda x: -x, torch.neg, GRID),
    "abs": (gg.abs, torch.abs, GRID),
    "exp": (gg.exp, torch.exp, GRID),
    "exp2": (gg.exp2, torch.exp2, GRID),
    "log": (gg.log, torch.log, POSITIVE),
    "log1p": (gg.log1p, torch.log1p, POSITIVE),
    "sqrt": (gg.sqrt, torch.sqrt, POSITIVE),
    "rsqrt": (gg.rsqrt, torch.rsqrt, POSITIVE),
    "tanh": (gg.tanh, torch.tanh, GRID),
    "sigmoid": (gg.sigmoid, torch.sigmoid, GRID),
    "erf": (gg.erf, torch.erf, GRID),
    "sin": (gg.sin, torch.sin, GRID),
    "cos": (gg.cos, torch.cos, GRID),
    "relu": (gg.relu, F.relu, GRID),
    "leaky_relu": (lambda x: gg.leaky_relu(x, 0.01), F.leaky_relu, GRID),
    "leaky_relu_0.3": (lambda x: gg.leaky_relu(x, 0.3), lambda x: F.leaky_relu(x, 0.3), GRID),
    "relu_squared": (gg.relu_squared, lambda x: F.relu(x) ** 2, GRID),
    "gelu": (gg.gelu, F.gelu, GRID),
    "gelu_tanh": (gg.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), 4 * GRID),
    "quick_gelu": (gg.quick_gelu, lambda x: x * torch.sigmoid(1.702 * x), GRID),
    "silu": (gg.silu, F.silu, GRID),
    "softplus": (gg.softplus, F.softplus, GRID),
    "mish": (gg.mish, F.mish, GRID),
    "hardswish": (gg.hardswish, F.hardswish, GRID),
    "clamp": (lambda x: gg.clamp(x, -1, 2), lambda x: x.clamp(-1, 2), GRID),
    "minimum": (lambda x: gg.minimum(x, 1), lambda x: torch.minimum(x, torch.ones_like(x)), GRID),
    "maximum": (lambda x: gg.maximum(1, x), lambda x: torch.maximum(x, torch.ones_like(x)), GRID),
    "arithmetic": (lambda x: (1 - x) * x / (x * x + 1) + x, lambda x: (1 - x) * x / (x * x + 1) + x, GRID),
    "square": (lambda x: x**2, lambda x: x**2, GRID),
    "cube": (lambda x: x**3, lambda x: x**3, GRID),
    "root": (lambda x: x**0.5, lambda x: x**0.5, POSITIVE),
    "reciprocal_root": (lambda x: x**-0.5, lambda x: x**-0.5, POSITIVE),
    "reciprocal": (lambda x: x**-1, lambda x: x**-1, POSITIVE),
    "power": (lambda x: x**1.7, lambda x: x**1.7, POSITIVE),
    "base": (lambda x: 2**x, lambda x: 2**x, GRID),
    "where": (lambda x: gg.where(x > 1, x, -x), lambda x: torch.where(x > 1, x, -x), GRID),
    "comparisons": (
        lambda x: gg.where(x < 0, 1, 0) + gg.where(x <= 1, 2, 0) + gg.where(x >= 2, 4, 0) + gg.where(x == 3, 8, 0)
        + gg.where(x != 0, 16, 0),
        lambda x: (x < 0).to(x) + (x <= 1) * 2 + (x >= 2) * 4 + (x == 3) * 8 + (x != 0) * 16,
        GRID,
    ),
}  # fmt: skip


def apply(fn, x, dtype=None, compute=None, **operands):
    """`fn` evaluated on the vector `x` as a `[1, 1, N]` accumulator."""
    graph = trace(gg.epilogue(fn))
    x = x.view(1, 1, -1)
    return evaluate(graph, x, operands, {r.name: dtype or r.dtype for r in graph.results}, compute or x.dtype)["D"]


def test_every_op_can_be_evaluated():
    assert set(EVALUATE) == set(Op) - LEAVES - REDUCTIONS - {Op.CLAMP, Op.CAST}


@pytest.mark.parametrize("name", VOCABULARY)
def test_float64_values_are_torchs(name):
    ours, theirs, points = VOCABULARY[name]
    torch.testing.assert_close(apply(ours, points).flatten(), theirs(points), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", VOCABULARY)
def test_float32_errs_at_most_twice_as_much_as_torch(name):
    ours, theirs, points = VOCABULARY[name]
    single = points.float()
    exact = theirs(single.double())
    allowed = 2 * (theirs(single) - exact).abs() + 2e-7 * (exact.abs() + single.abs())
    assert ((apply(ours, single).flatten() - exact).abs() <= allowed).all()


# gelu, silu and mish of -inf are NaN here and in torch; softplus and quick_gelu have their own limits below
@pytest.mark.parametrize(
    "name",
    ["neg", "abs", "exp", "tanh", "sigmoid", "erf", "relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "mish",
     "hardswish", "clamp", "minimum", "maximum", "square", "cube", "where", "comparisons"],
)  # fmt: skip
def test_special_values_are_torchs(name):
    ours, theirs, _ = VOCABULARY[name]
    torch.testing.assert_close(apply(ours, SPECIAL).flatten(), theirs(SPECIAL), equal_nan=True)


def test_softplus_is_accurate_at_both_ends():
    points = torch.tensor([-1e30, -50.0, 50.0, 1e30, INF, -INF], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.9287498479639178e-22, 50.0, 1e30, INF, 0.0], dtype=torch.float64)
    torch.testing.assert_close(apply(gg.softplus, points).flatten(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("over, dims", [("M", -2), ("N", -1), ("MN", (-2, -1))])
def test_reductions(over, dims):
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def fn(accum):
        return {
            "sum": gg.sum(accum, over=over), "max": gg.max(accum, over=over), "min": gg.min(accum, over=over),
            "amax": gg.amax(accum, over=over),
        }  # fmt: skip

    expected = {"sum": x.sum(dims), "max": x.amax(dims), "min": x.amin(dims), "amax": x.amax(dims)}
    graph = trace(gg.epilogue(fn))
    torch.testing.assert_close(evaluate(graph, x, {}, dict.fromkeys(expected), torch.float64), expected)


@pytest.mark.parametrize("name", ["max", "min", "amax"])
@pytest.mark.parametrize("over", ["M", "N", "MN"])
def test_nan_wins_a_reduction(name, over):
    x = torch.ones(1, 3, 4)
    x[0, 1, 2] = NAN
    graph = trace(gg.epilogue(lambda accum: getattr(gg, name)(accum, over=over)))
    value = evaluate(graph, x, {}, {"D": None}, torch.float32)["D"]
    assert value.isnan().sum() == 1


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("over, dims", [("M", (1,)), ("N", (2,)), ("MN", (1, 2))])
def test_empty_extents_give_the_identity(shape, over, dims):
    def fn(accum):
        return gg.sum(accum, over=over), gg.max(accum, over=over), gg.min(accum, over=over), gg.amax(accum, over=over)

    graph = trace(gg.epilogue(fn))
    values = evaluate(graph, torch.empty(shape), {}, dict.fromkeys(r.name for r in graph.results), torch.float32)
    kept = tuple(extent for i, extent in enumerate(shape) if i not in dims)
    assert all(value.shape == kept for value in values.values())
    if any(shape[dim] == 0 for dim in dims) and 0 not in kept:
        assert [value.flatten()[0].item() for value in values.values()] == [0, -INF, INF, -INF]


def test_operands_broadcast_by_their_kind():
    def fn(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, scalar: gg.Scalar):
        return accum * row + col - tile * scalar

    generator = torch.Generator().manual_seed(0)
    x, tile = torch.randn(2, 2, 3, 3, generator=generator, dtype=torch.float64)
    row, col = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    operands = {"row": row.view(1, 1, 3), "col": col.view(1, 3, 1), "tile": tile, "scalar": torch.tensor(2.0)}
    value = evaluate(trace(gg.epilogue(fn)), x, operands, {"D": None}, torch.float64)["D"]
    torch.testing.assert_close(value, x * row + col[:, None] - tile * 2)


def test_indices_count_rows_and_columns():
    x = torch.zeros(2, 3, 4)
    graph = trace(gg.epilogue(lambda accum: accum + gg.row_index() * 10 + gg.col_index()))
    value = evaluate(graph, x, {}, {"D": None}, torch.float32)["D"]
    assert value[1].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]


def test_a_value_that_does_not_vary_fills_the_tile():
    graph = trace(gg.epilogue(lambda accum: (3, gg.row_index() * 1)))
    values = evaluate(graph, torch.zeros(2, 3, 4), {}, {"out0": None, "out1": None}, torch.float32)
    assert values["out0"].shape == values["out1"].shape == (2, 3, 4)


def test_the_int32_accumulator_is_converted_on_first_use():
    graph = trace(gg.epilogue(lambda accum: accum * 0.5), DType.I32)
    x = torch.tensor([[[3, 2**24 + 2]]], dtype=torch.int32)
    assert evaluate(graph, x, {}, {"D": None}, torch.float32)["D"].tolist() == [[[1.5, 2**23 + 1.0]]]


def test_a_large_int32_accumulator_is_compared_exactly():
    graph = trace(gg.epilogue(lambda accum: gg.where(accum > 2**24, 1, 0)), DType.I32)
    x = torch.tensor([[[2**24, 2**24 + 1]]], dtype=torch.int32)
    assert evaluate(graph, x, {}, {"D": None}, torch.float32)["D"].tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize("dtype, limit", [(DType.E4M3, 448.0), (DType.E5M2, 57344.0)])
def test_fp8_saturates_and_keeps_nan(dtype, limit):
    x = torch.tensor([1e6, -1e6, INF, -INF, NAN, 1.0, limit, -0.0])
    rounded = round_to(x, dtype).float()
    assert rounded[:4].tolist() == [limit, -limit, limit, -limit]
    assert rounded[4].isnan()
    assert rounded[5:].tolist() == [1.0, limit, 0.0] and rounded[7].signbit()


@pytest.mark.parametrize("dtype, low, high", [(DType.I8, -128, 127), (DType.I32, -(2**31), 2**31 - 1)])
def test_integers_saturate_round_to_even_and_have_no_nan(dtype, low, high):
    x = torch.tensor([1e30, -1e30, INF, -INF, NAN, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    assert round_to(x, dtype).tolist() == [high, low, high, low, 0, 0, 2, 2, 0, -2, 126]
    assert round_to(x.double(), dtype).tolist() == [high, low, high, low, 0, 0, 2, 2, 0, -2, 126]


def test_integers_saturate_from_integers():
    x = torch.tensor([1000, -1000, 5], dtype=torch.int32)
    assert round_to(x, DType.I8).tolist() == [127, -128, 5]
    assert round_to(x > 0, DType.I8).tolist() == [1, 0, 1]


def test_bf16_and_f16_round_to_nearest_even():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1e6])
    assert round_to(x, DType.BF16).float()[:2].tolist() == [1.0, 1 + 2**-6]
    assert round_to(x, DType.F16).float()[2:].tolist() == [1.0, 1 + 2**-9, INF]


@settings(max_examples=50, deadline=None)
@given(x=st.floats(-500, 500, width=32))
def test_fp8_rounds_to_the_nearest_value(x):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]
    rounded = round_to(torch.tensor([x]), DType.E4M3).float()
    assert (rounded - x).abs() == (every - x).abs().min()


def test_a_cast_inside_rounds_and_goes_on_in_fp32():
    x = torch.tensor([1 + 2**-9, 300.0])
    assert apply(lambda a: a.to(torch.bfloat16) * 2, x).flatten().tolist() == [2.0, 600.0]
    assert apply(lambda a: a.to(torch.int8) * 2, x).flatten().tolist() == [2.0, 254.0]
    assert apply(lambda a: a.to(torch.float8_e4m3fn) + 0.5, x).flatten().tolist() == [1.5, 288.5]


def test_casts_pass_gradients_between_floats_only():
    x = torch.tensor([[[0.3, 1.7]]], requires_grad=True)
    for dtype, expected in ((torch.bfloat16, 3.0), (torch.float8_e5m2, 3.0), (torch.int8, 1.0)):
        graph = trace(_cast_twice(dtype))
        value = evaluate(graph, x, {}, {"D": None}, torch.float32)["D"]
        (grad,) = torch.autograd.grad(value.sum(), x)
        assert grad.tolist() == [[[expected, expected]]]


def _cast_twice(dtype):
    return gg.epilogue(lambda accum: accum.to(dtype) * 2 + accum)


def test_results_take_the_dtype_asked_for():
    value = apply(lambda accum: accum * 2, torch.ones(3), dtype=DType.BF16)
    assert value.dtype is torch.bfloat16
    assert apply(lambda accum: (accum > 0).to(torch.int8), torch.ones(3)).tolist() == [[[1, 1, 1]]]
