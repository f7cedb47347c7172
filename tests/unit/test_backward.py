"""Backward plans: right gradients, the cheapest saves, and clear refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmgen.dsl as gg
from gemmgen.backward import differentiable, fused_into_dgrad, plan_backward
from gemmgen.dtypes import DType
from gemmgen.errors import NoBackward
from gemmgen.ir import Axes, Op, to_text
from gemmgen.mincut import UNCUTTABLE, cheapest_cut
from gemmgen.trace import trace
from tests.gradients import by_autograd, by_plan, cotangents_for
from tests.strategies import KINDS, SHAPES, epilogues


def bias_only(accum, bias: gg.Row):
    return accum + bias


def bias_gelu(accum, bias: gg.Row):
    return gg.gelu_tanh(accum + bias)


def bias_relu(accum, bias: gg.Row):
    return gg.relu(accum + bias)


def relu_residual(accum, bias: gg.Row, residual: gg.Tile):
    return gg.relu(accum + bias) + residual


def bias_tanh(accum, bias: gg.Row):
    return gg.tanh(accum + bias)


def tanh_as_fp8(accum, bias: gg.Row):
    return gg.tanh(accum + bias).to(torch.float8_e4m3fn)


def gelu_and_preact(accum, bias: gg.Row):
    preact = accum + bias
    return {"D": gg.gelu(preact), "preact": preact.to(torch.bfloat16)}


def scaled_gelu(accum, row: gg.Row, col: gg.Col, bias: gg.Row):
    return gg.gelu(accum * row * col + bias)


def gated(accum, gate: gg.Tile):
    return accum * gg.silu(gate)


def sum_of_residual(accum, residual: gg.Tile):
    return gg.gelu(accum + residual)


def quantized(accum, scale: gg.Scalar):
    return gg.sigmoid((accum * scale).to(torch.float8_e4m3fn).float()) * 3 + accum


def stats(accum, bias: gg.Row):
    y = gg.silu(accum + bias)
    return {"D": y, "amax": gg.amax(abs(y), over="N"), "top": gg.max(y, over="M"), "low": gg.min(accum, over="MN")}


def plan_of(fn, wants=None, **options):
    graph = trace(gg.epilogue(fn))
    return plan_backward(graph, {"accum", *(p.name for p in graph.parameters)} if wants is None else wants, **options)


#                      function          bytes  what is saved                              results read
SAVES = {
    "bias_only":       (bias_only,       0, [], []),
    "bias_gelu":       (bias_gelu,       2, ["mul(const(0.5), add(accum(), load('bias')))"], ["saved0"]),
    "bias_relu":       (bias_relu,       0, ["relu(add(accum(), load('bias')))"], ["D"]),
    "relu_residual":   (relu_residual,   1, ["le(relu(add(accum(), load('bias'))), const(0.0))"], ["saved0"]),
    "bias_tanh":       (bias_tanh,       0, ["tanh(add(accum(), load('bias')))"], ["D"]),
    "tanh_as_fp8":     (tanh_as_fp8,     2, ["tanh(add(accum(), load('bias')))"], ["saved0"]),
    "gelu_and_preact": (gelu_and_preact, 0, ["add(accum(), load('bias'))"], ["preact"]),
    "scaled_gelu":     (scaled_gelu,     2, ["accum()"], ["saved0"]),
    "gated":           (gated,           2, ["accum()"], ["saved0"]),
    "sum_of_residual": (sum_of_residual, 2, ["mul(const(0.5), add(accum(), load('residual')))"], ["saved0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVES)
def test_the_fewest_bytes_are_saved(name):
    fn, size, nodes, results = SAVES[name]
    plan = plan_of(fn)
    assert plan.bytes_saved_per_element == size
    assert [repr(each.node) for each in plan.saved] == nodes
    assert [each.result for each in plan.saved] == results
    assert not plan.reruns_mainloop


def test_only_wanted_gradients_are_computed():
    plan = plan_of(scaled_gelu, wants={"bias"})
    assert [r.name for r in plan.backward.results] == ["d_bias"]
    (saved,) = plan.saved
    assert repr(saved.node) == "mul(const(0.5), add(mul(mul(accum(), load('row')), load('col')), load('bias')))"
    assert [p.name for p in plan.backward.parameters] == ["d_D", "saved0"]


def test_a_gate_needs_no_saved_tile_for_accum_alone():
    plan = plan_of(gated, wants={"accum"})
    assert plan.bytes_saved_per_element == 0
    assert [p.name for p in plan.backward.parameters] == ["d_D", "gate"]


def test_an_fp8_value_is_saved_as_fp8():
    plan = plan_of(quantized, wants={"accum"})
    assert [(each.dtype, each.bytes) for each in plan.saved] == [(DType.E4M3, 1)]


def test_a_mask_is_stored_as_a_byte():
    result = plan_of(relu_residual).forward.results[-1]
    assert (result.name, result.dtype, result.node.dtype) == ("saved0", DType.I8, DType.BOOL)


def test_wider_tiles_weigh_more():
    assert plan_of(bias_gelu, tile_dtype=DType.F32).bytes_saved_per_element == 4


def test_bf16_results_are_too_coarse_for_f32_tiles():
    assert plan_of(gelu_and_preact, tile_dtype=DType.F32).bytes_saved_per_element == 4


def test_recompute_saves_nothing_and_runs_the_mainloop_again():
    plan = plan_of(bias_relu, save="recompute")
    assert (plan.saved, plan.reruns_mainloop, plan.forward) == ((), True, plan.graph)
    assert not plan_of(bias_only, save="recompute").reruns_mainloop


def test_the_backward_is_printed_the_same_every_time():
    assert to_text(plan_of(bias_relu).backward) == """\
epilogue bias_relu_backward(accum: f32[M,N], d_D: f32[M,N], saved0: f32[M,N])
  %0: f32[M,N] = load "saved0"
  %1: f32[] = const 0.0
  %2: bool[M,N] = le %0 %1
  %3: f32[M,N] = load "d_D"
  %4: f32[M,N] = where %2 %1 %3
  %5: f32[N] = sum %4 M
  return dict d_accum: %4, d_bias: %5"""


def test_gradients_that_are_the_cotangent_itself_are_named():
    plan = plan_of(bias_only)
    assert plan.aliases == {"accum": "D"}
    assert [r.name for r in plan.without_aliases().results] == ["d_bias"]
    assert plan_of(relu_residual).aliases == {"residual": "D"}
    assert plan_of(bias_gelu).aliases == {}


def test_the_cotangent_of_a_sum_is_not_an_alias_of_the_tile():
    assert plan_of(lambda accum: gg.sum(accum, over="M")).aliases == {}


SHAPE = torch.Size((2, 3, 4))


def numbers(plan, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    operands = {
        p.name: torch.randn(SHAPES[p.axes], generator=generator, dtype=dtype) for p in plan.graph.parameters
    }
    return torch.randn(SHAPE, generator=generator, dtype=dtype), operands


def check(plan, seed=0):
    accum, operands = numbers(plan, seed=seed)
    cotangents = cotangents_for(plan.graph, plan.cotangents, SHAPE, seed)
    expected = by_autograd(plan.graph, accum, operands, cotangents)
    for name, value in by_plan(plan, accum, operands, cotangents).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


FUNCTIONS = [*(row[0] for row in SAVES.values()), quantized, stats]


@pytest.mark.parametrize("save", ["auto", "recompute"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_gradients_match_autograd(fn, save):
    check(plan_of(fn, save=save, tile_dtype=DType.F64))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), graph=epilogues(max_ops=8), seed=st.integers(0, 3))
def test_any_part_of_a_plan_matches_autograd(data, graph, seed):
    save = data.draw(st.sampled_from(["auto", "recompute"]))
    wants = data.draw(st.sets(st.sampled_from(["accum", *KINDS]), min_size=1))
    try:
        plan = plan_backward(graph, wants, save=save, tile_dtype=DType.F64)
    except NoBackward:
        return
    check(plan, seed)
    check(plan.restricted(cotangents=plan.cotangents[:1]), seed)
    fewer = plan.restricted(wants=plan.wants[:1])
    check(fewer, seed)
    assert fewer.saved == plan.saved


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_bf16_saves_err_no_more_than_an_eager_bf16_matmul(fn):
    """Eager rounds accum to bf16 and then errs in each op; half of that, the first rounding, is held against us."""
    plan = plan_of(fn, cotangents={"D"})
    accum, operands = numbers(plan)
    cotangents = cotangents_for(plan.graph, ("D",), SHAPE)
    exact = by_autograd(plan.graph, accum, operands, cotangents)
    eager = by_autograd(plan.graph, accum.bfloat16().double(), operands, cotangents)
    for name, value in by_plan(plan, accum, operands, cotangents, tile_dtype=DType.BF16).items():
        floor = 2**-8 * exact[name].abs().max()
        assert (value - exact[name]).abs().max() <= 2 * (eager[name] - exact[name]).abs().max() + floor, name


def linear_stats(accum, bias: gg.Row):
    y = accum + bias
    return {"D": y, "amax": gg.amax(abs(y), over="N"), "top": gg.max(y, over="M"), "low": gg.min(y * 2, over="MN")}


def test_the_winners_of_maxima_are_found_among_rounded_values():
    """However saved tiles are rounded, each cotangent of a reduction arrives whole."""
    plan = plan_of(linear_stats, cotangents={"top", "low"})
    accum, operands = numbers(plan)
    cotangents = cotangents_for(plan.graph, plan.cotangents, SHAPE)
    grads = by_plan(plan, accum * 1.001, operands, cotangents, tile_dtype=DType.BF16)
    total = cotangents["top"].sum() + 2 * cotangents["low"].sum()
    torch.testing.assert_close(grads["d_accum"].sum(), total)
    torch.testing.assert_close(grads["d_bias"].sum(), total)


def test_fusing_puts_accum_in_the_place_of_the_cotangent():
    assert to_text(fused_into_dgrad(plan_of(bias_relu))) == """\
epilogue bias_relu_backward(accum: f32[M,N], saved0: f32[M,N])
  %0: f32[M,N] = load "saved0"
  %1: f32[] = const 0.0
  %2: bool[M,N] = le %0 %1
  %3: f32[M,N] = accum
  %4: f32[M,N] = where %2 %1 %3
  %5: f32[N] = sum %4 M
  return dict d_accum: %4, d_bias: %5"""


@pytest.mark.parametrize("fn", [row[0] for row in SAVES.values()], ids=list(SAVES))
def test_fused_epilogues_are_legal(fn):
    fused = fused_into_dgrad(plan_of(fn))
    assert "d_D" not in [p.name for p in fused.parameters]
    assert fused.results[0].name == "d_accum"


def test_a_recomputing_backward_cannot_be_fused():
    with pytest.raises(NoBackward, match="cannot be fused"):
        fused_into_dgrad(plan_of(bias_relu, save="recompute"))


def test_the_cotangent_of_a_reduction_cannot_be_fused():
    with pytest.raises(NoBackward, match="cannot be fused"):
        fused_into_dgrad(plan_of(stats), "d_amax")


def as_int8(accum, scale: gg.Scalar):
    quantity = accum * scale
    return quantity.to(torch.int8)


def index_and_value(accum):
    return {"D": accum * 2, "row": gg.row_index() + 0, "sign": (accum > 0).to(torch.float32), "q": accum.to(torch.int8)}


def test_an_integer_result_has_no_backward_and_the_error_names_the_line():
    with pytest.raises(NoBackward, match=r"result `D` has no gradient: it is stored as i8") as error:
        plan_of(as_int8)
    assert "quantity = accum * scale" in str(error.value)
    assert "test_backward.py" in str(error.value)


@pytest.mark.parametrize("name", ["row", "sign", "q"])
def test_asking_for_the_gradient_of_an_index_condition_or_integer_is_refused(name):
    assert plan_of(index_and_value).cotangents == ("D",)
    with pytest.raises(NoBackward, match=rf"result `{name}` has no gradient"):
        plan_of(index_and_value, cotangents={"D", name})


def test_what_is_differentiable_can_be_asked_without_an_error():
    graph = trace(gg.epilogue(index_and_value))
    assert differentiable(graph, {"accum"}) == ("D",)
    assert differentiable(graph, set()) == ()
    assert differentiable(trace(gg.epilogue(as_int8)), {"accum", "scale"}) == ()


def test_integers_inside_stop_the_gradient_but_raise_nothing():
    def inside(accum, s: gg.Row):
        return accum + (s * 2).to(torch.int8).float()

    plan = plan_of(inside)
    assert (plan.wants, plan.zeros) == (("accum",), ("s",))
    check(plan_of(inside, tile_dtype=DType.F64))


def test_unused_operands_have_zero_gradients():
    def unused(accum, s: gg.Row, t: gg.Col):
        return accum * s

    assert plan_of(unused).zeros == ("t",)


def test_unknown_names_are_refused():
    with pytest.raises(NoBackward, match="has no operand nope"):
        plan_of(bias_only, wants={"nope"})


def test_names_that_the_backward_needs_are_refused():
    def clash(accum, d_D: gg.Row):
        return accum * d_D

    def kept(accum, saved0: gg.Row):
        return gg.gelu(accum + saved0)

    for fn in (clash, kept):
        with pytest.raises(NoBackward, match="Rename"):
            plan_of(fn)


def test_the_int32_accumulator_has_no_gradient_but_operands_do():
    graph = trace(gg.epilogue(scaled_gelu), DType.I32)
    plan = plan_backward(graph, {"accum", "bias", "row"})
    assert (plan.wants, plan.zeros) == (("row", "bias"), ("accum",))
    assert [repr(each.node) for each in plan.saved] == ["cast(accum(), f32)"]


def test_maxima_take_two_passes_over_a_saved_tile():
    plan = plan_of(stats)
    assert [len(each.results) for each in plan.passes] == [3, 3]
    assert all(r.is_reduction for each in plan.passes for r in each.results)
    assert not any(node.op is Op.ACCUM for each in plan.passes for node in each.nodes())
    assert plan.restricted(cotangents=("D",)).passes == ()


def test_explain_names_saves_kernels_and_zero_gradients():
    text = plan_of(gelu_and_preact).explain()
    assert "is result `preact`, 0 bytes" in text
    assert "pass over the tile: d_accum, d_bias (summed over M)" in text
    assert "2 bytes per element" in plan_of(bias_gelu).explain()
    assert "none: d_accum is d_D" in plan_of(bias_only).explain()
    assert "GEMM again" in plan_of(bias_gelu, save="recompute").explain()


def test_the_cut_prefers_what_is_near_at_equal_cost():
    graph = trace(gg.epilogue(bias_gelu))
    nodes = list(graph.nodes())
    root = nodes[-1]
    assert cheapest_cut([root], lambda n: n.op is Op.ACCUM, lambda n: 1) == [root]
    cost = {root: UNCUTTABLE}
    (accum,) = cheapest_cut([root], lambda n: n.op is Op.ACCUM, lambda n: cost.get(n, 1 if n.op is Op.ACCUM else 5))
    assert accum.op is Op.ACCUM and accum.axes is Axes.TILE
