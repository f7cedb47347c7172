"""Random epilogues over the whole vocabulary, on ragged shapes: the kernels, the CPU implementation, the reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType
from gemmgen.evaluate import evaluate
from gemmgen.ir import Graph, Op, Result, build, verified
from gemmgen.ops import EpilogueOp
from gemmgen.runtime import DEFAULT, Options
from gemmgen.simplify import simplify
from gemmgen.training import differentiable
from tests.oracle import integers
from tests.strategies import KINDS, UNARY, epilogues

pytestmark = pytest.mark.gpu(sm=90)
CUDA = "cuda"
AT_ONCE = 12
MISMATCHES = 2e-3  # share of elements that a comparison or a cast decides otherwise, one ulp from its threshold


def with_every_operand(graph: Graph) -> Graph:
    """The graph's first tile with a use of every operand, as a tile and two reductions: one signature for all."""
    value = next((r.node for r in graph.results if not r.is_reduction), build.accum())
    for name, axes in KINDS.items():
        value = build.add(value, build.mul(build.const(0.125), build.load(name, axes)))
    inside = build.compare(Op.GE, build.add(build.row_index(), build.col_index()), build.const(0))
    value = build.where(inside, value, build.const(0))
    results = (
        Result("D", value, DType.F32),
        Result("sums", build.reduce(Op.SUM, value, "M"), DType.F32),
        Result("peaks", build.reduce(Op.MAX, value, "N"), DType.F32),
    )
    return verified(simplify(replace(graph, results=results)))


def call(op: EpilogueOp, M: int, N: int, K: int):
    """Results on the GPU and on the CPU, and the reference, of small whole numbers: accum and operands are exact."""
    A, B = integers(M, K, dtype=torch.bfloat16, device=CUDA), integers(K, N, dtype=torch.bfloat16, device=CUDA)
    operands = {
        "row": integers(N, dtype=torch.bfloat16, device=CUDA) / 4,
        "col": integers(M, dtype=torch.bfloat16, device=CUDA) / 4,
        "tile": integers(M, N, dtype=torch.bfloat16, device=CUDA) / 4,
        "scalar": torch.tensor(0.75, device=CUDA),
    }
    on_cpu = {name: value.cpu() for name, value in operands.items()}
    results = op.overload(A / 4, B / 4, *op.flat_operands(operands))
    return results, op.cpu(A.cpu() / 4, B.cpu() / 4, on_cpu, None), op.reference(A / 4, B / 4, operands)


def assert_agree(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    got, want = got.cpu().double(), want.cpu().double()
    scale = want.abs().max().clamp(min=1)
    wrong = ((got - want).abs() > 2e-5 * scale + 2e-5 * want.abs()) | (got.isnan() != want.isnan())
    allowed = MISMATCHES * wrong.numel()
    assert wrong.sum() <= max(1, allowed), f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ"


ROWS = st.integers(1, 200)
ALIGNED = st.integers(1, 25).map(lambda count: 8 * count)  # to the 16 bytes that TMA needs
ODD = st.integers(0, 99).map(lambda half: 2 * half + 1)
# one config for all shapes that TMA takes, so that all share a skeleton; the others take what the model chooses
PROBLEMS = st.one_of(
    st.tuples(ROWS, ALIGNED, ALIGNED, st.just(Options(GemmConfig("sm90", (64, 64, 64), kernel_schedule="pingpong")))),
    st.tuples(ROWS, ODD, ODD, st.just(DEFAULT)),
)


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(epilogues(casts=False), PROBLEMS), min_size=AT_ONCE, max_size=AT_ONCE))
def test_random_epilogues_agree_on_every_path(drawn):
    graphs = [(with_every_operand(graph), problem[3]) for graph, problem in drawn]
    ops = [differentiable({DType.F32: g, DType.I32: g}, options) for g, options in graphs]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda op, problem: call(op, *problem[:3]), ops, [problem for _, problem in drawn]))
    for op, (_, problem), (results, on_cpu, reference) in zip(ops, drawn, outcomes, strict=True):
        text = f"{problem[:3]}, {op.schema}"
        assert_agree(results[0], reference[0], f"kernel against reference, {text}")
        assert_agree(on_cpu[0], reference[0], f"CPU against reference, {text}")
        # the reductions of the kernel, from its own tile
        tile = results[0].double()
        assert ((results[1] - tile.sum(0)).abs() <= 1e-6 * tile.abs().sum(0) + 1e-3).all(), text
        assert torch.equal(results[2], results[0].amax(1)), text


@pytest.mark.parametrize("name", sorted(UNARY))
def test_functions_are_accurate_to_fp32(name):
    """Each function of the vocabulary by itself, in the exact form that fp32 results use."""
    from gemmgen.ir import Axes, Parameter
    from gemmgen.ops import register_elementwise
    from gemmgen.problem import Extents
    from tests.strategies import Bounded

    x = build.load("x", Axes.TILE)
    node = UNARY[name](Bounded(x, 4)).node
    graph = Graph(f"only_{name}", DType.F32, (Parameter("x", Axes.TILE),), (Result("D", node, DType.F32),), "single")
    op = register_elementwise(verified(simplify(graph)))
    values = torch.linspace(-4, 4, 64 * 96, device=CUDA).reshape(64, 96)
    extents = Extents(64, 96, 0, 1, False)
    (got,), (on_cpu,) = op(extents, {"x": values}), op(extents, {"x": values.cpu()})
    wide = values.cpu().double()[None]
    want = evaluate(op.graph, wide, {"x": wide}, {"D": None}, torch.float64)["D"][0]
    # some formulas cancel, on the CPU as well: the bound is what torch's fp32 loses
    scale = want.abs().clamp(min=1e-2)
    error, own = ((x.cpu().double() - want).abs() / scale for x in (got, on_cpu))
    assert error.max() < 2 * own.max() + 1e-6
