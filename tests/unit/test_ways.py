"""The split way: torch's products, when they can run, and that plans fall back from way to way."""

from __future__ import annotations

import itertools

import pytest
import torch

import gemmgen as gg
from gemmgen import ways
from gemmgen.arch import ARCHS
from gemmgen.dtypes import DType
from gemmgen.plan import run
from gemmgen.runtime import Runner, bind_call
from gemmgen.torch_ops import PRODUCTS
from gemmgen.ways import SPLIT, Fused, first_of, select
from tests.unit import fake_device
from tests.unit.fake_device import SM90, call_of, doubled

ARCH = ARCHS["sm90"]

pytestmark = pytest.mark.usefixtures("tf32")


@pytest.fixture
def device(monkeypatch):
    return fake_device.installed(monkeypatch)


@gg.epilogue
def plain(accum):
    return accum


def bound(A, B, epilogue=plain, out_dtype=None, outs=None, **operands):
    op = gg.Gemm(epilogue)._op
    return bind_call(op.graph_for, A, B, operands, out_dtype, outs)


def matrix(*shape, dtype=torch.float32, transposed=False):
    if transposed:
        *lead, rows, columns = shape
        return torch.randint(-3, 4, (*lead, columns, rows)).to(dtype).mT
    return torch.randint(-3, 4, shape).to(dtype)


A_SHAPES = {"2d": (), "3d": (3,), "one": (1,)}


@pytest.mark.parametrize("lead_a, lead_b", list(itertools.product(A_SHAPES, A_SHAPES)))
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_every_batching(lead_a, lead_b, transposed):
    if "3d" in (lead_a, lead_b) and "one" in (lead_a, lead_b):
        pytest.skip("the op folds a batch of one away beside a larger one")
    A = matrix(*A_SHAPES[lead_a], 20, 16, transposed=transposed)
    B = matrix(*A_SHAPES[lead_b], 16, 24, transposed=not transposed)
    binding = bound(A, B)
    accum = torch.full((binding.extents.L, 20, 24), float("nan"))
    PRODUCTS[DType.F32].bound(binding)(A, B, accum)
    assert torch.equal(accum, (A @ B).reshape(accum.shape))


def test_rows_of_a_padded_or_expanded_batch():
    padded = torch.zeros(3, 24, 16)[:, :20]
    padded.copy_(matrix(3, 20, 16))
    B = matrix(16, 24)
    for A in (padded, matrix(20, 16).expand(3, 20, 16)):
        for right in (B, B.expand(3, 16, 24), matrix(3, 16, 24)):
            accum = torch.full((3, 20, 24), float("nan"))
            PRODUCTS[DType.F32].bound(bound(A, right))(A, right, accum)
            assert torch.equal(accum, A @ right)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("layout", list(itertools.product([False, True], [False, True])))
def test_int8_is_exact_in_every_layout(layout, lead):
    A = matrix(*lead, 32, 16, dtype=torch.int8, transposed=layout[0])
    B = matrix(*lead, 16, 24, dtype=torch.int8, transposed=layout[1])
    binding = bound(A, B)
    assert SPLIT.reject_reason(binding, ARCH) is None
    accum = torch.empty(binding.extents.L, 32, 24, dtype=torch.int32)
    PRODUCTS[DType.I8].bound(binding)(A, B, accum)
    assert torch.equal(accum.double(), (A.double() @ B.double()).reshape(accum.shape))


def _meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REJECTED = [
    pytest.param(_meta(16, 64, dtype=torch.int8), _meta(64, 64, dtype=torch.int8), "17 rows", id="int8-rows"),
    pytest.param(_meta(64, 60, dtype=torch.int8), _meta(60, 64, dtype=torch.int8), "multiples of 8", id="int8-k"),
    pytest.param(_meta(64, 64, dtype=torch.int8), _meta(64, 60, dtype=torch.int8), "multiples of 8", id="int8-n"),
    pytest.param(_meta(20, 64, 64, dtype=torch.int8), _meta(20, 64, 8, dtype=torch.int8), "too many", id="int8-many"),
    pytest.param(_meta(64, 64, dtype=E4M3), _meta(64, 72, dtype=E4M3), "multiples of 16", id="fp8-n"),
    pytest.param(_meta(64, 40, dtype=E4M3), _meta(40, 64, dtype=E4M3), "multiples of 16", id="fp8-k"),
    pytest.param(_meta(64, 64, dtype=E5M2), _meta(64, 64, dtype=E5M2), "e5m2 by e5m2", id="e5m2"),
]  # fmt: skip


@pytest.mark.parametrize("A, B, reason", REJECTED)
def test_what_torch_cannot_multiply(A, B, reason):
    assert reason in SPLIT.reject_reason(bound(A, B), ARCH)


TAKEN = [
    pytest.param(_meta(1, 63, dtype=torch.bfloat16), _meta(63, 7, dtype=torch.bfloat16), id="bf16-odd"),
    pytest.param(_meta(3, 4, 64, dtype=torch.float16), _meta(64, 8, dtype=torch.float16), id="fp16-shared-b"),
    pytest.param(_meta(20, 8, 64, dtype=torch.int8), _meta(64, 64, dtype=torch.int8), id="int8-rows-of-a-batch"),
    pytest.param(_meta(1, 64, dtype=E4M3), _meta(64, 64, dtype=E5M2), id="mixed-fp8"),
]


@pytest.mark.parametrize("A, B", TAKEN)
def test_what_torch_multiplies(A, B):
    assert SPLIT.reject_reason(bound(A, B), ARCH) is None


def test_fp8_needs_tensor_cores_for_it():
    A, B = _meta(64, 64, dtype=E4M3), _meta(64, 64, dtype=E4M3)
    assert "sm80 has no fp8" in SPLIT.reject_reason(bound(A, B), ARCHS["sm80"])


# plans


def test_split_plan_computes_the_epilogue(device):
    op = gg.Gemm(doubled)._op
    A, B, operands = call_of()
    plan = SPLIT.plan(bind_call(op.graph_for, A, B, operands, None), SM90)
    assert plan.way == "split"
    (D,) = run(plan, (A, B), operands, A.device)
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])
    assert device.ran == ["gemmgen_pointwise"]
    assert device.built == []


def test_the_op_runs_the_fused_kernel(device):
    op = gg.Gemm(doubled)._op
    A, B, operands = call_of()
    (D,) = Runner(op.graph_for)(A, B, operands)
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])
    assert len(device.built) == 1
    assert device.ran == device.built


def test_what_a_compiler_refuses_gives_way_to_the_next(device):
    op = gg.Gemm(doubled)._op
    A, B, operands = call_of()
    binding = bind_call(op.graph_for, A, B, operands, None)
    fused = [way for way in select(binding, SM90).ways if isinstance(way, Fused)]
    device.refused = {way.source(binding, SM90.arch).name for way in fused}
    (D,) = Runner(op.graph_for)(A, B, operands)
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])
    assert device.ran == ["gemmgen_pointwise"]  # split is the last of the ways


def test_a_given_config_has_no_substitute(device):
    op = gg.Gemm(doubled, config=gg.GemmConfig("sm90", (128, 128, 32)))._op
    A, B, operands = call_of()
    binding = bind_call(op.graph_for, A, B, operands, None)
    selection = select(binding, SM90, op.runner.options.config)
    device.refused = {selection.ways[0].source(binding, SM90.arch).name}
    with pytest.raises(gg.CompileError, match="spills"):
        first_of(selection.ways, binding, lambda way: way.plan(binding, SM90))


def test_split_comes_first_only_where_it_is_clearly_faster(monkeypatch):
    bf16 = {"dtype": torch.bfloat16}
    binding = bound(_meta(512, 512, **bf16), _meta(512, 512, **bf16), doubled, bias=_meta(512, **bf16))
    fused = select(binding, SM90).table[0]
    assert isinstance(fused.way, Fused)
    for factor, first in ((0.99, "fused"), (0.75, "split")):
        monkeypatch.setattr(ways.choose, "estimate_split_us", lambda *_, f=factor: f * fused.time_us)
        selection = select(binding, SM90)
        assert selection.ways[0].name == first
        assert selection.table[0].way is SPLIT
