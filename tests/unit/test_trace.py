"""From functions to graphs, and what is said when a function is no epilogue."""

from __future__ import annotations

import math

import pytest
import torch

import gemmgen.dsl as gg
from gemmgen import library
from gemmgen.dtypes import DType
from gemmgen.errors import TraceError, UnsupportedOp, VerifyError
from gemmgen.ir import Axes, Op, Parameter, build, to_text
from gemmgen.trace import parameters_of, trace


def traced(fn, accum=DType.F32):
    return trace(gg.epilogue(fn), accum)


def scaled_bias_gelu(accum, scale_a: gg.Col, scale_b: gg.Row, bias: gg.Row, residual: gg.Tile, alpha: gg.Scalar):
    preact = accum * scale_a * scale_b + bias
    return {"D": gg.gelu(preact) + residual * alpha, "preact": preact.to(torch.bfloat16)}


def test_parameters_are_in_order_with_their_axes():
    assert parameters_of(gg.epilogue(scaled_bias_gelu)) == (
        Parameter("scale_a", Axes.COL), Parameter("scale_b", Axes.ROW), Parameter("bias", Axes.ROW),
        Parameter("residual", Axes.TILE), Parameter("alpha", Axes.SCALAR),
    )  # fmt: skip


def test_results_have_names_dtypes_and_a_container():
    graph = traced(scaled_bias_gelu)
    assert (graph.name, graph.container) == ("scaled_bias_gelu", "dict")
    assert [(r.name, r.dtype) for r in graph.results] == [("D", None), ("preact", DType.BF16)]
    assert graph.results[1].node.op is Op.ADD  # the last cast is the result's dtype: one rounding


@pytest.mark.parametrize(
    "fn, container, names",
    [
        (lambda accum: accum, "single", ["D"]),
        (lambda accum: (accum, accum * 2), "tuple", ["out0", "out1"]),
        (lambda accum: [accum], "tuple", ["out0"]),
        (lambda accum: {"y": accum}, "dict", ["y"]),
    ],
)
def test_containers(fn, container, names):
    graph = traced(fn)
    assert (graph.container, [r.name for r in graph.results]) == (container, names)


def test_reflected_operators_and_python_numbers():
    def fn(accum):
        return -(1 - 2 / (3 + 4 * accum)) ** 1 + 2**accum - +abs(accum)

    x = build.accum()
    quotient = build.div(build.const(2), build.add(build.const(3), build.mul(build.const(4), x)))
    inner = build.sub(build.const(1), quotient)
    expected = build.sub(build.add(build.neg(inner), build.power(build.const(2), x)), build.unary(Op.ABS, x))
    assert traced(fn).results[0].node is expected


def test_closures_over_numbers_become_constants():
    numpy = pytest.importorskip("numpy")
    for number in (2, 2.0, numpy.float32(2), numpy.float64(2), numpy.int64(2), torch.tensor(2.0)):
        for fn in (_times(number), _times_reflected(number)):
            assert build.const(2) in traced(fn).results[0].node.args


def _times(number):
    return lambda accum: accum * number


def _times_reflected(number):
    return lambda accum: number * accum


def test_an_epilogue_can_use_another():
    inner = gg.epilogue(gg.relu)
    assert traced(lambda accum: inner(accum) * 2).results[0].node.args[0].op is Op.RELU


def test_a_constant_is_a_legal_result():
    assert traced(lambda accum: 3).results[0].node is build.const(3)


def test_the_accumulator_may_be_int32():
    graph = traced(lambda accum: accum * 2, DType.I32)
    assert graph.accum is DType.I32
    assert to_text(graph).splitlines()[1:3] == ["  %0: i32[M,N] = accum", "  %1: f32[M,N] = cast %0 f32"]


def test_locations_are_the_users_lines():
    graph = traced(scaled_bias_gelu)
    preact = graph.results[1].node
    assert graph.locations[preact].line == "preact = accum * scale_a * scale_b + bias"
    assert graph.locations[preact].filename == __file__
    assert graph.locations[graph.results[0].node].line.startswith("return {")


def test_operands_are_located_at_the_declaration():
    graph = traced(scaled_bias_gelu)
    assert graph.locations[build.accum()].line.startswith("def scaled_bias_gelu(")
    assert graph.locations[build.load("bias", Axes.ROW)].line.startswith("def scaled_bias_gelu(")


def test_tracing_twice_gives_the_same_graph():
    assert traced(scaled_bias_gelu) == traced(scaled_bias_gelu)
    assert traced(scaled_bias_gelu).digest == traced(scaled_bias_gelu).digest


def test_annotations_may_be_text():
    def fn(accum, bias, scale):
        return accum * scale + bias

    fn.__annotations__ = {"bias": "gg.Row", "scale": "Col"}

    assert [p.axes for p in traced(fn).parameters] == [Axes.ROW, Axes.COL]


def test_clamp_takes_numbers_none_and_values():
    x, row = build.accum(), build.load("row", Axes.ROW)

    def fn(accum, row: gg.Row):
        return gg.clamp(accum, 0, 1), gg.clamp(accum, max=1), gg.clamp(accum, row, 1), gg.clamp(accum, max=row)

    nodes = [r.node for r in traced(fn).results]
    assert nodes[0] is build.clamp(x, 0, 1)
    assert nodes[1] is build.clamp(x, None, 1)
    assert nodes[2] is build.binary(Op.MINIMUM, build.binary(Op.MAXIMUM, x, row), build.const(1))
    assert nodes[3] is build.binary(Op.MINIMUM, x, row)


def branches(accum):
    if accum > 0:
        return accum
    return -accum


def unfinished(accum):
    total = gg.sum(accum, over="M")
    return accum / total


class NotANumber:
    pass


REFUSED = {
    "no parameter": (lambda: 1, "has no parameter"),
    "no kind": (lambda accum, bias: accum + bias, "is not annotated with its kind"),
    "wrong kind": (eval("lambda accum, bias: accum", {}), "is not annotated"),
    "variadic": (lambda accum, *rest: accum, "Operands are passed by name"),
    "keywords": (lambda accum, **rest: accum, "Operands are passed by name"),
    "nothing": (lambda accum: {}, "returns nothing"),
    "None": (lambda accum: None, "returns NoneType"),
    "string": (lambda accum: "x", "returns str"),
    "bool": (lambda accum: True, "returns bool"),
    "bad name": (lambda accum: {"a b": accum}, "under the name 'a b'"),
    "no name": (lambda accum: {1: accum}, "under the name 1"),
    "branch": (branches, "the truth of a value is not known"),
    "chained": (lambda accum: gg.where(0 < accum < 1, accum, 0), "chained comparisons"),
    "tensor": (lambda accum: accum + torch.ones(3), "Tensors come in as operands"),
    "object": (lambda accum: accum + NotANumber(), "NotANumber is neither a value"),
    "text": (lambda accum: accum + "1 one", "str is neither a value"),
    "over": (lambda accum: gg.sum(accum, over="K"), "`over` is 'K'"),
    "no bound": (lambda accum: gg.clamp(accum, None), "clamp needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    fn, reason = REFUSED[name]
    with pytest.raises(TraceError, match=reason):
        traced(fn)


def test_reserved_names_are_refused():
    def fn(accum, out: gg.Row):
        return accum

    with pytest.raises(TraceError, match="has a name that `Gemm` uses itself"):
        traced(fn)


def test_errors_name_the_users_line_and_the_function():
    with pytest.raises(TraceError) as error:
        traced(branches)
    assert "if accum > 0:" in str(error.value) and "test_trace.py" in str(error.value)
    assert "while tracing epilogue `branches`" in str(error.value)


def test_a_used_reduction_names_the_users_line():
    with pytest.raises(VerifyError, match="is used inside the epilogue") as error:
        traced(unfinished)
    assert 'total = gg.sum(accum, over="M")' in str(error.value)


def test_locations_in_the_library_are_its_lines():
    graph = traced(library.bias_gelu)
    preact = build.add(build.accum(), build.load("bias", Axes.ROW))
    assert graph.locations[preact].filename == library.__file__
    assert graph.locations[preact].line == "return gg.gelu(accum + bias)"


def test_an_unknown_dtype_is_refused_at_its_line():
    with pytest.raises(UnsupportedOp, match=r"(?s)no element type for torch\.complex64.*at .*test_trace\.py"):
        traced(lambda accum: accum.to(torch.complex64))


def test_a_declaration_must_be_a_function():
    with pytest.raises(TraceError, match="takes a function"):
        gg.epilogue(3)


def test_nothing_is_traced_at_declaration():
    def fn(accum):
        raise AssertionError

    assert gg.epilogue(fn).name == "fn"
    with pytest.raises(AssertionError):
        traced(fn)


def test_a_failed_trace_leaves_no_trace_behind():
    with pytest.raises(TraceError):
        traced(branches)
    assert gg.current_locations.get() is None


def test_infinite_and_nan_constants_are_kept():
    graph = traced(lambda accum: gg.where(accum > 0, math.inf, math.nan))
    assert "const inf" in to_text(graph) and "const nan" in to_text(graph)
