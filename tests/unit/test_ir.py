"""Nodes, builders, graphs, their text, and verification."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings

from gemmgen.dtypes import DType
from gemmgen.errors import VerifyError
from gemmgen.ir import Axes, Graph, Location, Op, Parameter, Result, build, to_text, topological, verified
from gemmgen.ir.node import _interned, make
from gemmgen.ir.text import describe
from gemmgen.ir.verify import ARITY, located
from tests.strategies import epilogues

ACCUM, ROW, COL = build.accum(), build.load("bias", Axes.ROW), build.load("scale", Axes.COL)
BIAS = Parameter("bias", Axes.ROW)


def graph_of(node, dtype=None, **options):
    return Graph("f", DType.F32, (BIAS,), (Result("D", node, dtype),), "single", **options)


def test_equal_nodes_are_one_object():
    assert build.add(ACCUM, ROW) is build.add(build.accum(), build.load("bias", Axes.ROW))
    assert build.load("bias", Axes.ROW) is not build.load("bias", Axes.COL)
    assert build.add(ACCUM, ROW) is not build.add(ROW, ACCUM)


def test_constants_keep_the_sign_of_zero_and_find_nan_again():
    assert build.const(0.0) is not build.const(-0.0)
    assert build.const(float("nan")) is build.const(float("nan"))
    assert build.const(1) is build.const(1.0)


def test_nodes_that_nobody_holds_are_forgotten():
    node = build.const(123.456)
    before = len(_interned)
    del node
    gc.collect()
    assert len(_interned) < before


def test_copied_and_pickled_nodes_are_the_same_nodes():
    graph = golden_graph()
    assert copy.deepcopy(graph).results[0].node is graph.results[0].node
    assert pickle.loads(pickle.dumps(graph)).results[0].node is graph.results[0].node
    assert copy.copy(ACCUM) is ACCUM


def test_nodes_cannot_be_changed():
    with pytest.raises(AttributeError):
        ACCUM.op = Op.NEG


@pytest.mark.parametrize(
    "node, axes",
    [
        (build.mul(ROW, COL), Axes.TILE),
        (build.mul(ROW, build.const(2)), Axes.ROW),
        (build.unary(Op.EXP, COL), Axes.COL),
        (build.row_index(), Axes.COL),
        (build.col_index(), Axes.ROW),
        (build.reduce(Op.SUM, ACCUM, "M"), Axes.ROW),
        (build.reduce(Op.SUM, ACCUM, "N"), Axes.COL),
        (build.reduce(Op.SUM, ROW, "N"), Axes.COL),
        (build.reduce(Op.SUM, ACCUM, "MN"), Axes.SCALAR),
        (build.where(build.compare(Op.LT, ROW, build.const(0)), COL, build.const(1)), Axes.TILE),
    ],
)
def test_builders_fix_the_axes(node, axes):
    assert node.axes is axes


def test_integers_become_fp32_on_first_arithmetic_use():
    assert build.add(build.row_index(), build.const(1)).args[0].op is Op.CAST
    assert build.add(build.accum(DType.I32), ROW).args[0] is build.cast(build.accum(DType.I32), DType.F32)


def test_integers_are_compared_as_integers_with_whole_numbers_only():
    index = build.row_index()
    assert build.compare(Op.LT, index, build.const(3)).args[0] is index
    assert build.compare(Op.LT, index, build.col_index()).args == (index, build.col_index())
    assert build.compare(Op.LT, index, build.const(2.5)).args[0].dtype is DType.F32
    assert build.compare(Op.LT, index, build.const(2.0**40)).args[0].dtype is DType.F32


@pytest.mark.parametrize(
    "exponent, op",
    [(0.5, Op.SQRT), (-0.5, Op.RSQRT), (2, Op.MUL), (3, Op.MUL), (-1, Op.DIV), (1, Op.ACCUM), (1.7, Op.POW)],
)
def test_common_exponents_become_cheaper_ops(exponent, op):
    assert build.power(ACCUM, build.const(exponent)).op is op


def test_a_condition_that_is_no_boolean_is_compared_with_zero():
    assert build.where(ACCUM, ROW, COL).args[0] is build.compare(Op.NE, ACCUM, build.const(0))


def test_topological_gives_arguments_first_and_each_node_once():
    shared = build.mul(ACCUM, ACCUM)
    order = list(topological([build.add(shared, ROW), build.neg(shared)]))
    assert order == [ACCUM, shared, ROW, build.add(shared, ROW), build.neg(shared)]


def test_a_chain_of_thousands_needs_no_recursion():
    node = ACCUM
    for _ in range(5000):
        node = build.add(node, ROW)
    assert len(list(topological([node]))) == 5002


GOLDEN = """\
epilogue f(accum: f32[M,N], bias: f32[N])
  %0: f32[M,N] = accum
  %1: f32[N] = load "bias"
  %2: f32[M,N] = add %0 %1
  %3: f32[M,N] = clamp %2 (0.0, None)
  %4: bf16[M,N] = cast %3 bf16
  %5: f32[M,N] = cast %4 f32
  %6: f32[] = const 2.0
  %7: f32[M,N] = mul %5 %6
  %8: f32[] = amax %7 MN
  return dict D: %7 as bf16, amax: %8"""


def golden_graph():
    rounded = build.cast(build.clamp(build.add(ACCUM, ROW), 0, None), DType.BF16)
    y = build.mul(rounded, build.const(2))
    results = (Result("D", y, DType.BF16), Result("amax", build.reduce(Op.AMAX, y, "MN")))
    return Graph("f", DType.F32, (BIAS,), results, "dict")


def test_the_text_of_a_graph():
    assert to_text(golden_graph()) == GOLDEN


def test_the_digest_identifies_the_computation_not_the_name_or_the_lines():
    graph = golden_graph()
    here = {ACCUM: Location("model.py", 3, "x")}
    assert graph.digest == replace(graph, name="g", locations=here).digest
    assert graph.digest != replace(graph, container="tuple").digest
    assert graph.digest != replace(graph, results=graph.results[:1]).digest
    assert len(graph.digest) == 12


def test_loads_are_the_parameters_in_use():
    graph = replace(graph_of(ROW), parameters=(Parameter("scale", Axes.COL), BIAS))
    assert graph.loads() == (BIAS,)


@settings(max_examples=30, deadline=None)
@given(graph=epilogues())
def test_text_is_stable_and_has_a_line_for_each_node(graph):
    assert to_text(graph) == to_text(graph)
    assert to_text(graph).count("\n") == len(list(graph.nodes())) + 1


def test_describing_a_node_takes_no_longer_for_much_sharing():
    node = ACCUM
    for _ in range(60):
        node = build.mul(node, node)
    assert describe(node, golden_graph()) == "%68: f32[M,N] = mul %67 %67"
    assert describe(ROW, golden_graph()) == '%1: f32[N] = load "bias"'


def test_every_op_has_its_arity():
    assert set(Op) >= set(ARITY)
    assert all(ARITY.get(op, 1) in (0, 1, 2, 3) for op in Op)


def test_a_used_reduction_is_refused_at_its_line():
    total = build.reduce(Op.SUM, ACCUM, "M")
    graph = graph_of(build.add(total, ACCUM), locations={total: Location("model.py", 41, "t = gg.sum(x, over='M')")})
    with pytest.raises(VerifyError) as error:
        verified(graph)
    assert "the result of `sum(over='M')` is used inside the epilogue" in str(error.value)
    assert "in epilogue `f`, model.py:41:   t = gg.sum(x, over='M')" in str(error.value)
    assert "value: %1: f32[N] = sum %0 M" in str(error.value)


@pytest.mark.parametrize(
    "node, what",
    [
        (make(Op.ADD, ACCUM), "`add` has 1 arguments"),
        (make(Op.ADD, ROW, COL, axes=Axes.ROW), "`add` does not broadcast its arguments"),
        (build.explicit_cast(ACCUM, DType.F64), "cannot cast to f64"),
        (build.explicit_cast(ACCUM, DType.BOOL), "cannot cast to bool"),
        (build.compare(Op.LT, ACCUM, ROW), "a result is boolean"),
    ],
)
def test_broken_rules_are_named(node, what):
    with pytest.raises(VerifyError, match=what):
        verified(graph_of(node))


def test_a_boolean_result_with_a_dtype_is_fine():
    graph = graph_of(build.compare(Op.LT, ACCUM, ROW), DType.I8)
    assert verified(graph) is graph


def test_an_error_without_a_node_names_the_epilogue():
    assert str(located(VerifyError, golden_graph(), None, "what", "mend")) == "what\n  in epilogue `f`\n  mend"
