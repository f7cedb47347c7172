"""Rewrites change no bit; a table of what becomes what, and of what must stay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmgen.dtypes import DType
from gemmgen.evaluate import evaluate
from gemmgen.ir import Axes, Graph, Location, Op, Result, build, to_text, verified
from gemmgen.ir.build import add, cast, clamp, compare, const, div, explicit_cast, mul, neg, sub, unary, where
from gemmgen.simplify import simplified, simplify, substituted
from tests.strategies import epilogues, exact_epilogues, inputs, special_inputs

X, Y, ROW = build.accum(), build.load("tile", Axes.TILE), build.load("row", Axes.ROW)
TRUE, FALSE = compare(Op.LT, const(1), const(2)), compare(Op.EQ, const(1), const(2))

REWRITTEN = {
    "x*1": (mul(X, const(1)), X),
    "1*x": (mul(const(1), X), X),
    "x*-1": (mul(X, const(-1)), neg(X)),
    "x/1": (div(X, const(1)), X),
    "x/4": (div(X, const(4)), mul(X, const(0.25))),
    "x/-0.5": (div(X, const(-0.5)), mul(X, const(-2))),
    "x-0": (sub(X, const(0.0)), X),
    "-0-x": (sub(const(-0.0), X), neg(X)),
    "x+-0": (add(X, const(-0.0)), X),
    "x+-y": (add(X, neg(Y)), sub(X, Y)),
    "-x+y": (add(neg(X), Y), sub(Y, X)),
    "x--y": (sub(X, neg(Y)), add(X, Y)),
    "--x": (neg(neg(X)), X),
    "-x*-y": (mul(neg(X), neg(Y)), mul(X, Y)),
    "-x/-y": (div(neg(X), neg(Y)), div(X, Y)),
    "-x*3": (mul(neg(X), const(3)), mul(X, const(-3))),
    "abs(-x)": (unary(Op.ABS, neg(X)), unary(Op.ABS, X)),
    "abs(abs(x))": (unary(Op.ABS, unary(Op.ABS, X)), unary(Op.ABS, X)),
    "relu(relu(x))": (unary(Op.RELU, unary(Op.RELU, X)), unary(Op.RELU, X)),
    "clamp(clamp(x))": (clamp(clamp(X, 0, 1), 0, 1), clamp(X, 0, 1)),
    "min(x,x)": (build.binary(Op.MINIMUM, X, X), X),
    "max(x,x)": (build.binary(Op.MAXIMUM, X, X), X),
    "x**0": (build.binary(Op.POW, X, const(0)), const(1)),
    "x**2": (build.binary(Op.POW, X, const(2)), mul(X, X)),
    "where(true)": (where(TRUE, X, Y), X),
    "where(false)": (where(FALSE, X, Y), Y),
    "where(c,x,x)": (where(compare(Op.LT, X, Y), X, X), X),
    "truth as a number": (add(X, cast(TRUE, DType.F32)), add(X, const(1))),
    "f32(f32)": (explicit_cast(X, DType.F32), X),
    "bf16(bf16)": (explicit_cast(explicit_cast(X, DType.BF16), DType.BF16), explicit_cast(X, DType.BF16)),
    "bf16(f32(bf16))": (cast(cast(cast(X, DType.BF16), DType.F32), DType.BF16), cast(X, DType.BF16)),
    "2+3": (mul(X, add(const(2), const(3))), mul(X, const(5))),
    "exp(0)": (mul(X, unary(Op.EXP, const(0))), X),
    "nested": (mul(X, div(sub(const(3), const(1)), const(2))), X),
}
KEPT = {
    "x+0": add(X, const(0.0)),
    "x--0": sub(X, const(-0.0)),
    "0-x": sub(const(0.0), X),
    "0*x": mul(X, const(0)),
    "x-x": sub(X, X),
    "x/x": div(X, X),
    "x/3": div(X, const(3)),
    "x/0": div(X, const(0)),
    "x/inf": div(X, const(math.inf)),
    "x/2**127": div(X, const(2.0**127)),
    "1/x": div(const(1), X),
    "-(x-y)": neg(sub(X, Y)),
    "clamp of another": clamp(clamp(X, 0, 2), 0, 1),
    "i32(f32(i32))": cast(cast(cast(X, DType.I32), DType.F32), DType.I32),
    "f32(bf16)": cast(cast(X, DType.BF16), DType.F32),
    "overflow in fp32": mul(X, mul(const(1e30), const(1e30))),
    "subnormal in fp32": mul(X, mul(const(1e-30), const(1e-15))),
    "log(0)": mul(X, unary(Op.LOG, const(0))),
    "1/0": mul(X, div(const(1), const(0))),
    "nan": mul(X, add(const(math.nan), const(1))),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name):
    node, expected = REWRITTEN[name]
    assert simplified([node])[node] is expected


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    assert simplified([KEPT[name]])[KEPT[name]] is KEPT[name]


def run(graph, accum, operands):
    return evaluate(graph, accum, operands, {result.name: None for result in graph.results}, accum.dtype)


def same_bits(a, b):
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


@settings(max_examples=150, deadline=None)
@given(graph=exact_epilogues(), given=special_inputs())
def test_no_bit_changes_whatever_the_values(graph, given):
    before, after = run(graph, *given), run(verified(simplify(graph)), *given)
    for name, value in before.items():
        assert same_bits(value, after[name]), f"{name}\n{to_text(graph)}\n{to_text(simplify(graph))}"


@settings(max_examples=60, deadline=None)
@given(graph=epilogues(), seed=st.integers(0, 3))
def test_random_epilogues_keep_their_values(graph, seed):
    simpler = verified(simplify(graph))
    before, after = run(graph, *inputs(seed)), run(simpler, *inputs(seed))
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert simplify(simpler) == simpler


def test_a_reduction_over_fewer_axes_keeps_its_meaning():
    tile_of_row = where(compare(Op.LT, X, Y), ROW, ROW)  # varies along N alone once simplified
    graph = verified(Graph("f", DType.F32, (), (Result("D", build.reduce(Op.SUM, tile_of_row, "M")),), "single"))
    accum, operands = inputs(0)
    simpler = simplify(graph)
    assert simpler.results[0].node.args[0] is ROW
    torch.testing.assert_close(run(simpler, accum, operands)["D"], operands["row"][:, 0] * accum.shape[1])


def test_locations_follow_the_nodes_that_survive():
    here, there = Location("model.py", 1, "y = x * 1"), Location("model.py", 2, "z = exp(y)")
    y = mul(X, const(1))
    z = unary(Op.EXP, y)
    simpler = simplify(Graph("f", DType.F32, (), (Result("D", z),), "single", {y: here, z: there}))
    assert simpler.locations[simpler.results[0].node] == there
    assert simpler.locations[X] == here


def test_substitution_goes_through_the_builders():
    node = add(mul(X, X), ROW)
    forms = substituted([node], {X: ROW})
    assert forms[node] is add(mul(ROW, ROW), ROW)
    assert forms[node].axes is Axes.ROW
    assert substituted([X], {X: ROW})[X] is ROW
