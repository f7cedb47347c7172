"""Each vjp row against central differences and against torch, and the points where torch makes a choice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmgen.autodiff import VJP, dependents, derive, reduced
from gemmgen.backward import plan_backward
from gemmgen.dtypes import DType
from gemmgen.errors import NoBackward
from gemmgen.evaluate import evaluate
from gemmgen.ir import COMPARISONS, LEAVES, Axes, Graph, Op, Parameter, Result, build
from tests.gradients import by_autograd, by_plan, cotangents_for
from tests.strategies import BINARY, CASTS, KINDS, UNARY, Bounded, epilogues, inputs

ACCUM, TILE = build.accum(), build.load("tile", Axes.TILE)
PARAMETERS = tuple(Parameter(name, axes) for name, axes in KINDS.items())
NAN, INF = float("nan"), float("inf")


def one_result(node, dtype=None):
    return Graph("f", DType.F32, PARAMETERS, (Result("D", node, dtype),), "single")


def gradients(graph, accum, operands, cotangents):
    plan = plan_backward(graph, {"accum", *KINDS}, tile_dtype=DType.F64)
    return by_plan(plan, accum, operands, cotangents)


def slope(node, points, **operands):
    """d node / d accum at each of `points`."""
    accum = torch.tensor(points, dtype=torch.float64).view(1, 1, -1)
    operands = {name: torch.tensor(value, dtype=torch.float64).view(1, 1, -1) for name, value in operands.items()}
    plan = plan_backward(one_result(node), {"accum"}, tile_dtype=DType.F64)
    return by_plan(plan, accum, operands, {"D": torch.ones_like(accum)})["d_accum"].flatten()


def test_every_op_has_a_row():
    assert set(VJP) == set(Op) - LEAVES - COMPARISONS


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary_matches_central_differences_and_autograd(name):
    check_both(one_result(UNARY[name](Bounded(ACCUM, 4)).node), seed=1)


@pytest.mark.parametrize("name", sorted(BINARY))
@pytest.mark.parametrize("second", [TILE, build.load("row", Axes.ROW), build.load("col", Axes.COL), build.const(1.5)])
def test_binary_matches_central_differences_and_autograd(name, second):
    check_both(one_result(BINARY[name](Bounded(ACCUM, 4), Bounded(second, 4)).node), seed=2)


@pytest.mark.parametrize("over", ["M", "N", "MN"])
@pytest.mark.parametrize("op", [Op.SUM, Op.MAX, Op.MIN, Op.AMAX])
def test_reductions_match_central_differences_and_autograd(op, over):
    check_both(one_result(build.reduce(op, build.mul(ACCUM, build.load("row", Axes.ROW)), over)), seed=3)


@pytest.mark.parametrize("name", sorted(CASTS))
def test_float_casts_pass_the_cotangent_and_integer_casts_stop_it(name):
    cast = CASTS[name](Bounded(build.unary(Op.SIN, ACCUM), 1)).node
    accum, operands = inputs(4)
    graph = one_result(build.add(build.mul(cast, TILE), ACCUM))
    cotangents = cotangents_for(graph, ("D",), accum.shape)
    assert_same(gradients(graph, accum, operands, cotangents), by_autograd(graph, accum, operands, cotangents))


def check_both(graph, seed):
    accum, operands = inputs(seed)
    cotangents = cotangents_for(graph, ("D",), accum.shape)
    derived = gradients(graph, accum, operands, cotangents)
    assert_same(derived, by_autograd(graph, accum, operands, cotangents))
    for name, value in {"accum": accum, **operands}.items():
        slopes = central_differences(graph, accum, operands, cotangents["D"], name)
        torch.testing.assert_close(derived[f"d_{name}"], slopes.view_as(value), rtol=1e-5, atol=1e-6)


def central_differences(graph, accum, operands, cotangent, name, step=1e-5):
    def loss(**moved):
        given = {"accum": accum, **operands, **moved}
        rest = {key: value for key, value in given.items() if key != "accum"}
        return (evaluate(graph, given["accum"], rest, {"D": None}, torch.float64)["D"] * cotangent).sum()

    base = {"accum": accum, **operands}[name]
    slopes = []
    for i in range(base.numel()):
        offset = torch.zeros_like(base)
        offset.view(-1)[i] = step
        slopes.append((loss(**{name: base + offset}) - loss(**{name: base - offset})) / (2 * step))
    return torch.stack(slopes)


def assert_same(derived, expected):
    assert derived.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            derived[name], value, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@settings(max_examples=150, deadline=None)
@given(graph=epilogues(), seed=st.integers(0, 10))
def test_random_epilogues_match_autograd(graph, seed):
    try:
        plan = plan_backward(graph, {"accum", *KINDS}, tile_dtype=DType.F64)
    except NoBackward:
        return  # no result depends on anything but through integers
    accum, operands = inputs(seed)
    cotangents = cotangents_for(graph, plan.cotangents, accum.shape, seed)
    assert_same(by_plan(plan, accum, operands, cotangents), by_autograd(graph, accum, operands, cotangents))


X = ACCUM
NON_SMOOTH = {
    "relu": (build.unary(Op.RELU, X), torch.relu, [0.0, -0.0, 1, -1, NAN, INF, -INF]),
    "abs": (build.unary(Op.ABS, X), torch.abs, [0.0, -0.0, 1, -1, NAN, INF, -INF]),
    "clamp": (build.clamp(X, -1, 1), lambda x: x.clamp(-1, 1), [0, 2, -2, NAN, INF, -INF]),
    "clamp_min": (build.clamp(X, 1, None), lambda x: x.clamp(min=1), [0, 2, NAN, INF]),
    "clamp_empty": (build.add(X, build.clamp(X, 1, -1)), lambda x: x + x.clamp(1, -1), [-1, 1, 0, 2, NAN]),
    "leaky_relu": (build.leaky_relu(X), F.leaky_relu, [0.0, -0.0, 1, -1, NAN, INF, -INF]),
    "hardswish": (build.hardswish(X), F.hardswish, [-3, 3, 0, -4, 4, 2.5, -INF]),
    "hardswish_special": (build.hardswish(X), F.hardswish, [INF, -INF, NAN]),
    "relu_squared": (build.relu_squared(X), lambda x: torch.relu(x) ** 2, [0.0, -0.0, 1, -1]),
    "sqrt": (build.unary(Op.SQRT, X), torch.sqrt, [0.0, 4, INF, -1]),
    "rsqrt": (build.unary(Op.RSQRT, X), torch.rsqrt, [0.0, 4, INF, -1]),
    "square": (build.power(X, build.const(2)), lambda x: x**2, [0.0, -1, 3, INF, NAN]),
    "cube": (build.power(X, build.const(3)), lambda x: x**3, [0.0, -1, 3, -INF, NAN]),
    "root": (build.power(X, build.const(0.5)), lambda x: x**0.5, [0.0, -0.0, 4, -1, INF, -INF]),
    "pow_zero": (build.add(X, build.power(X, build.const(0))), lambda x: x + x**0, [0.0, -1, 3, INF, NAN]),
    "pow_1.5": (build.power(X, build.const(1.5)), lambda x: x**1.5, [0.0, -1, 4, INF, NAN]),
    "pow_-2": (build.power(X, build.const(-2)), lambda x: x**-2, [0.0, -1, 4, INF, NAN]),
    "reciprocal": (build.power(X, build.const(-1)), lambda x: 1 / x, [0.0, -0.0, 4, INF, NAN]),
    "two_to": (build.power(build.const(2), X), lambda x: 2**x, [0.0, -1, 4, NAN]),
    "zero_to": (build.power(build.const(0), X), lambda x: 0.0**x, [0.0, -1, 4, NAN]),
    "log": (build.unary(Op.LOG, X), torch.log, [0.0, -1, 4, INF]),
    "where": (build.where(build.compare(Op.GT, X, build.const(0)), X, build.const(0)),
              lambda x: torch.where(x > 0, x, 0.0), [0.0, 1, -1, NAN]),
    "self_max": (build.binary(Op.MAXIMUM, X, build.mul(X, X)), lambda x: torch.maximum(x, x * x), [0.0, 1, 2, -1, NAN]),
}  # fmt: skip


@pytest.mark.parametrize("name", NON_SMOOTH)
def test_non_smooth_points_are_torchs(name):
    node, fn, points = NON_SMOOTH[name]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    torch.testing.assert_close(slope(node, points), expected, equal_nan=True)


@pytest.mark.parametrize("low, high", [(-1, 1), (-1, None), (None, 1)])
def test_the_slope_of_clamp_is_1_at_both_ends(low, high):
    ends = [float(end) for end in (low, high) if end is not None]
    assert slope(build.clamp(X, low, high), ends).tolist() == [1.0] * len(ends)


@pytest.mark.parametrize("op, fn", [(Op.MAXIMUM, torch.maximum), (Op.MINIMUM, torch.minimum)])
def test_ties_and_nan_of_two_are_torchs(op, fn):
    x = torch.tensor([1.0, 1, 2, 0, NAN, 1, NAN, INF], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.0, 2, 1, 0, 1, NAN, NAN, INF], dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(fn(x, y).sum(), (x, y))
    plan = plan_backward(one_result(build.binary(op, ACCUM, TILE)), {"accum", "tile"}, tile_dtype=DType.F64)
    given = x.detach().view(1, 1, -1), {"tile": y.detach().view(1, 1, -1)}
    grads = by_plan(plan, *given, {"D": torch.ones(1, 1, len(x), dtype=torch.float64)})
    torch.testing.assert_close(grads["d_accum"].flatten(), expected[0])
    torch.testing.assert_close(grads["d_tile"].flatten(), expected[1])


TIES = [
    [1.0, 2, 2, 0], [2.0, 2, 2, 2], [NAN, 2, NAN, 2], [1.0, NAN, 5, 5], [-INF, -INF, -INF, -INF], [0.0, -0.0, INF, INF],
]  # fmt: skip


@pytest.mark.parametrize("over, dims", [("M", (0,)), ("N", (1,)), ("MN", (0, 1))])
@pytest.mark.parametrize("op, method", [(Op.MAX, "max"), (Op.MIN, "min"), (Op.AMAX, "amax")])
def test_ties_of_reductions_are_torchs(op, method, over, dims):
    matrix = torch.tensor(TIES, dtype=torch.float64)
    for rows in (matrix, matrix[:2], matrix.T.contiguous(), matrix[[0, 1, 0, 5]]):
        x = rows.clone().requires_grad_()
        reduction = getattr(x, method)
        value = x.amax(dims) if op is Op.AMAX else reduction() if over == "MN" else reduction(dims[0]).values
        (expected,) = torch.autograd.grad(value.sum(), x)
        plan = plan_backward(one_result(build.reduce(op, ACCUM, over)), {"accum"}, tile_dtype=DType.F64)
        grads = by_plan(plan, rows[None], {}, {"D": torch.ones_like(value)[None]})
        torch.testing.assert_close(grads["d_accum"][0], expected, equal_nan=True)


ACTIVATIONS = {
    "gelu": build.gelu, "gelu_tanh": build.gelu_tanh, "quick_gelu": build.quick_gelu, "silu": build.silu,
    "mish": build.mish, "hardswish": build.hardswish, "leaky_relu": build.leaky_relu,
    "softplus": lambda x: build.unary(Op.SOFTPLUS, x), "sigmoid": lambda x: build.unary(Op.SIGMOID, x),
    "tanh": lambda x: build.unary(Op.TANH, x), "erf": lambda x: build.unary(Op.ERF, x),
    "relu": lambda x: build.unary(Op.RELU, x),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_finite_slopes_at_extreme_values(name, dtype):
    points = torch.tensor([1e30, -1e30, 3e38, -3e38, 100, -100, 1e4, -1e4, 20, -20, 1e-38, 0], dtype=dtype)
    plan = plan_backward(one_result(ACTIVATIONS[name](ACCUM)), {"accum"}, tile_dtype=DType.F64)
    grads = by_plan(plan, points.view(1, 1, -1), {}, {"D": torch.ones(1, 1, len(points), dtype=dtype)})["d_accum"]
    assert grads.isfinite().all(), grads
    assert torch.allclose(grads[0, 0, ::2][:3], torch.ones(3, dtype=dtype)) or name in ("sigmoid", "tanh", "erf")


def test_a_row_reduced_over_m_counts_its_rows():
    row = build.load("row", Axes.ROW)
    graph = one_result(build.reduce(Op.SUM, build.gelu(row), "M"))
    accum, operands = inputs(5)
    cotangents = cotangents_for(graph, ("D",), accum.shape)
    assert_same(gradients(graph, accum, operands, cotangents), by_autograd(graph, accum, operands, cotangents))


def test_fan_out_accumulates():
    assert slope(build.add(build.mul(X, X), X), [3.0]).item() == 7.0


def test_derive_leaves_out_what_the_roots_do_not_depend_on():
    assert derive({ACCUM: build.load("d_D", Axes.TILE)}, [TILE]) == {}
    assert TILE not in dependents([build.mul(ACCUM, TILE)], [ACCUM])


def test_a_gradient_is_reduced_over_the_axes_that_the_operand_lacks():
    assert reduced(TILE, Axes.ROW) is build.reduce(Op.SUM, TILE, "M")
    assert reduced(TILE, Axes.COL) is build.reduce(Op.SUM, TILE, "N")
    assert reduced(TILE, Axes.SCALAR) is build.reduce(Op.SUM, TILE, "MN")
    assert reduced(TILE, Axes.TILE) is TILE
