"""torch's own ops as a way to run a call: which epilogues and calls they take, and that they compute the same."""

from __future__ import annotations

import pytest
import torch

import gemmgen as gg
from gemmgen import library
from gemmgen.arch import ARCHS
from gemmgen.plan import run
from gemmgen.runtime import Options, Runner, bind_call
from gemmgen.torch_ops import TorchOp, torch_op
from gemmgen.ways import LIBRARY, SPLIT, Fused, select
from tests.unit import fake_device
from tests.unit.fake_device import SM90

ARCH = ARCHS["sm90"]
BF16, F16, F32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def device(monkeypatch):
    return fake_device.installed(monkeypatch)


@gg.epilogue
def plain(accum):
    return accum


@gg.epilogue
def plain_f32(accum):
    return accum.to(F32)


@gg.epilogue
def plain_i32(accum):
    return accum.to(torch.int32)


@gg.epilogue
def bias_first(accum, bias: gg.Row):
    return gg.relu(bias + accum)


@gg.epilogue
def scaled(accum, scale_a: gg.Col, scale_b: gg.Row):
    return scale_b * (accum * scale_a)


@gg.epilogue
def scaled_bias(accum, scale_a: gg.Col, scale_b: gg.Row, bias: gg.Row):
    return bias + accum * (scale_a * scale_b)


@gg.epilogue
def by_scalars(accum, scale_b: gg.Scalar, scale_a: gg.Scalar, bias: gg.Row):
    return scale_a * accum * scale_b + bias


@gg.epilogue
def by_one_scalar(accum, scale: gg.Scalar):
    return accum * scale


def integers(*shape, dtype=BF16):
    return torch.randint(-3, 4, shape).to(dtype)


def matrices(M=24, N=32, K=48, dtype=BF16, lead_a=(), lead_b=()):
    return integers(*lead_a, M, K, dtype=dtype), integers(*lead_b, N, K, dtype=dtype).mT


def bound(epilogue, A, B, outs=None, out_dtype=None, **operands):
    return bind_call(gg.Gemm(epilogue)._op.graph_for, A, B, operands, out_dtype, outs)


def op_of(epilogue, A, B, **operands):
    found = torch_op(bound(epilogue, A, B, **operands), ARCH)
    assert isinstance(found, TorchOp), found
    return found.name


def result(epilogue, A, B, outs=None, **operands):
    binding = bound(epilogue, A, B, outs, **operands)
    plan = LIBRARY.plan(binding, SM90)
    assert (plan.way, plan.kernel, plan.module) == ("library", None, None)
    (D,) = run(plan, (A, B), operands, A.device, outs)
    return D


# epilogues


def test_the_epilogues_that_torch_has():
    A, B = matrices()
    bias = integers(32)
    assert op_of(plain, A, B) == "torch.mm"
    assert op_of(library.bias, A, B, bias=bias) == "torch.addmm"
    assert op_of(library.bias_relu, A, B, bias=bias) == "torch.addmm, then relu_"
    assert op_of(bias_first, A, B, bias=bias) == "torch.addmm, then relu_"
    assert op_of(library.bias_gelu_tanh, A, B, bias=bias) == "torch._addmm_activation"


def test_the_erf_gelu_and_others_are_not_torchs():
    A, B = matrices()
    bias = integers(32)
    others = [
        library.bias_gelu, library.bias_silu, gg.epilogue(lambda accum, bias: gg.quick_gelu(accum + bias)),
        gg.epilogue(lambda accum, bias: accum - bias), gg.epilogue(lambda accum, bias: 2 * accum + bias),
        gg.epilogue(lambda accum, bias: accum + bias + bias), gg.epilogue(lambda accum, bias: accum * accum + bias),
        gg.epilogue(lambda accum, bias: gg.relu(accum) + bias), gg.epilogue(lambda accum, bias: bias + bias),
        gg.epilogue(lambda accum, bias: {"D": accum + bias, "preact": accum}),
        gg.epilogue(lambda accum, bias: gg.sum(accum + bias, over="M")),
        gg.epilogue(lambda accum, bias: gg.relu(accum)),
    ]  # fmt: skip
    for epilogue in others:
        epilogue.fn.__annotations__ = epilogue.fn.__annotations__ or {"bias": gg.Row}
        assert "torch has no op" in LIBRARY.reject_reason(bound(epilogue, A, B, bias=bias), ARCH)


def test_a_column_or_a_tile_is_no_bias():
    A, B = matrices(32, 32)
    for kind, value in ((gg.Col, integers(32)), (gg.Tile, integers(32, 32))):
        epilogue = gg.epilogue(lambda accum, bias: accum + bias)
        epilogue.fn.__annotations__["bias"] = kind
        assert LIBRARY.reject_reason(bound(epilogue, A, B, bias=value), ARCH)


# results


LEADS = [((), ()), ((3,), ()), ((3,), (3,)), ((), (3,)), ((1,), ())]


@pytest.mark.parametrize("lead_a, lead_b", LEADS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_products_of_every_batching(lead_a, lead_b, dtype):
    A, B = matrices(dtype=dtype, lead_a=lead_a, lead_b=lead_b)
    assert torch.equal(result(plain, A, B), (A.float() @ B.float()).to(dtype))


def test_int8_gives_int32():
    A, B = matrices(dtype=torch.int8)
    assert torch.equal(result(plain_i32, A, B), (A.double() @ B.double()).to(torch.int32))
    assert op_of(plain_i32, A, B) == "torch._int_mm"
    for narrow in (None, torch.int8):
        assert "torch multiplies i8 into no" in LIBRARY.reject_reason(bound(plain, A, B, out_dtype=narrow), ARCH)


@pytest.mark.parametrize("lead", [(), (3,), (1,)], ids=str)
def test_biases_and_activations(lead):
    A, B = matrices(lead_a=lead)
    bias = integers(32)
    accum = A.double() @ B.double() + bias.double()
    assert torch.equal(result(library.bias, A, B, bias=bias), accum.to(BF16))
    assert torch.equal(result(library.bias_relu, A, B, bias=bias), accum.relu().to(BF16))
    gelu = torch.nn.functional.gelu(accum, approximate="tanh")
    torch.testing.assert_close(result(library.bias_gelu_tanh, A, B, bias=bias).double(), gelu, rtol=0.02, atol=1e-3)


def test_relu_keeps_nan():
    A, B = matrices()
    A[3, 5] = float("nan")
    D = result(library.bias_relu, A, B, bias=integers(32))
    assert D[3].isnan().all() and not D[:3].isnan().any()


def test_one_row_takes_a_bias_but_no_gelu():
    A, B = matrices(1)
    bias = integers(32)
    assert torch.equal(result(library.bias, A, B, bias=bias), (A.double() @ B.double() + bias.double()).to(BF16))
    assert "rounds before its GELU" in LIBRARY.reject_reason(bound(library.bias_gelu_tanh, A, B, bias=bias), ARCH)


UNALIGNED = [(33, 48, 0, 0), (36, 48, 0, 0), (32, 45, 0, 0), (32, 44, 0, 0), (32, 48, 4, 0), (32, 48, 0, 4)]


@pytest.mark.parametrize("N, K, more_in_A, more_in_B", UNALIGNED, ids=str)
def test_rows_that_are_not_aligned_take_a_bias_but_no_gelu(N, K, more_in_A, more_in_B):
    A, B, bias = integers(24, K + more_in_A)[:, :K], integers(N, K + more_in_B)[:, :K].t(), integers(N)
    assert torch.equal(result(library.bias, A, B, bias=bias), (A.double() @ B.double() + bias.double()).to(BF16))
    assert "rounds before its GELU" in LIBRARY.reject_reason(bound(library.bias_gelu_tanh, A, B, bias=bias), ARCH)
    assert LIBRARY.reject_reason(bound(library.bias_relu, A, B, bias=bias), ARCH) is None


def test_a_bias_that_is_a_batch_of_one():
    A, B = matrices(lead_a=(1,))
    bias = integers(1, 32)
    assert torch.equal(result(library.bias, A, B, bias=bias), (A.double() @ B.double() + bias.double()).to(BF16))


def test_fp8_scales_of_rows_and_columns_in_any_order():
    A, B = matrices(dtype=E4M3)
    row, column = 2.0 ** torch.randint(-2, 3, (32,)), 2.0 ** torch.randint(-2, 3, (24,))
    accum, bias = A.double() @ B.double(), integers(32)
    try:
        torch._scaled_mm(A, B, column[:, None], row[None, :], out_dtype=BF16)
    except RuntimeError as error:  # newer than 2.9, on the CPU that these tests have
        pytest.skip(f"torch {torch.__version__} on the CPU: {str(error).splitlines()[0]}")
    expected = accum * column[:, None] * row
    assert torch.equal(result(scaled, A, B, scale_a=column, scale_b=row), expected.to(BF16))
    D = result(scaled_bias, A, B, scale_a=column, scale_b=row, bias=bias)
    assert torch.equal(D, (expected + bias.double()).to(BF16))


def test_fp8_scales_of_one_element():
    A, B = matrices(dtype=E4M3)
    accum, bias = A.double() @ B.double(), integers(32)
    two, half = torch.tensor(2.0), torch.tensor([0.5])
    D = result(by_scalars, A, B, scale_a=two, scale_b=half, bias=bias)
    assert torch.equal(D, (accum + bias.double()).to(BF16))
    assert torch.equal(result(by_one_scalar, A, B, scale=two), (2 * accum).to(BF16))
    assert torch.equal(result(plain, A, B), accum.to(BF16))


def test_fp8_that_is_not_k_contiguous_is_copied():
    A, B = matrices(dtype=E4M3)
    A, B = A.float().t().contiguous().to(E4M3).t(), B.float().contiguous().to(E4M3)
    assert torch.equal(result(plain, A, B), (A.double() @ B.double()).to(BF16))


def test_out_is_written():
    A, B = matrices()
    out = torch.full((24, 32), float("nan"), dtype=BF16)
    assert result(library.bias, A, B, [out], bias=integers(32)) is out
    assert not out.isnan().any()


def test_an_out_with_gaps_is_left_to_the_other_ways():
    A, B = matrices()
    out = torch.empty(24, 40, dtype=BF16)[:, :32]
    assert "not contiguous" in LIBRARY.reject_reason(bound(plain, A, B, [out]), ARCH)


# calls that torch rounds twice, or does not take


def misaligned(bias):
    return torch.cat([bias[:1], bias])[1:]


BIASES = [
    pytest.param(lambda b: b.float(), "takes bf16", id="f32"),
    pytest.param(lambda b: b[:1].expand(32), "not contiguous", id="expanded"),
    pytest.param(lambda b: torch.stack([b, b], 1)[:, 0], "not contiguous", id="strided"),
    pytest.param(misaligned, "less than 16 bytes", id="misaligned"),
]


@pytest.mark.parametrize("change, reason", BIASES)
@pytest.mark.parametrize("epilogue", [library.bias, library.bias_relu, library.bias_gelu_tanh], ids=lambda e: e.name)
def test_biases_that_are_left_to_the_other_ways(epilogue, change, reason):
    A, B = matrices()
    assert reason in LIBRARY.reject_reason(bound(epilogue, A, B, bias=change(integers(32))), ARCH)


def test_batches_and_dtypes_that_are_left_to_the_other_ways():
    A, B = matrices(lead_a=(3,), lead_b=(3,))
    assert "one product" in LIBRARY.reject_reason(bound(library.bias, A, B, bias=integers(32)), ARCH)
    A, B = matrices(lead_a=(3,))
    assert "between batches" in LIBRARY.reject_reason(bound(library.bias, A, B, bias=integers(3, 32)), ARCH)
    A, B = matrices()
    reason = LIBRARY.reject_reason(bound(library.bias, A, B, out_dtype=F32, bias=integers(32)), ARCH)
    assert "rounds a biased product once" in reason
    assert "into no f16" in LIBRARY.reject_reason(bound(plain, A, B, out_dtype=F16), ARCH)
    assert LIBRARY.reject_reason(bound(plain_f32, A, B), ARCH) is None
    A, B = matrices(dtype=F32)
    reason = LIBRARY.reject_reason(bound(library.bias, A, B, bias=integers(32, dtype=F32)), ARCH)
    assert "rounds a biased product once" in reason
    assert "scales no product" in LIBRARY.reject_reason(bound(by_one_scalar, A, B, scale=torch.ones(())), ARCH)


def test_fp8_calls_that_are_left_to_the_other_ways():
    ones = {"scale_a": torch.ones(24), "scale_b": torch.ones(32)}
    A, B = matrices(dtype=E4M3)

    def reason(epilogue, A=A, B=B, arch="sm90", **operands):
        return LIBRARY.reject_reason(bound(epilogue, A, B, **operands), ARCHS[arch])

    assert "is a number" in reason(by_one_scalar, scale=2.0)
    assert "takes f32" in reason(scaled, scale_a=torch.ones(24).bfloat16(), scale_b=torch.ones(32))
    assert "not contiguous" in reason(scaled, scale_a=torch.ones(1).expand(24), scale_b=torch.ones(32))
    assert "takes bf16" in reason(scaled_bias, bias=torch.ones(32), **ones)
    assert "no fp8 tensor cores" in reason(scaled, arch="sm80", **ones)
    assert "one bf16 result" in reason(scaled, out_dtype=F16, **ones)
    mixed = integers(32, 48, dtype=E5M2).mT
    assert "e4m3 only" in reason(scaled, B=mixed, **ones)
    assert reason(by_one_scalar, B=mixed, scale=torch.ones(())) is None
    assert "multiples of 16" in reason(plain, *matrices(24, 40, 48, dtype=E4M3))
    batch = matrices(dtype=E4M3, lead_a=(3,))
    assert "without a batch" in reason(plain, *batch)


def test_an_illegal_plan_is_refused_with_the_reason():
    A, B = matrices()
    with pytest.raises(gg.IllegalConfig, match="no op of torch computes `bias_silu`"):
        LIBRARY.plan(bound(library.bias_silu, A, B, bias=integers(32)), SM90)


# choosing


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_few_rows_run_by_torchs_op_and_explain_says_so():
    A, B, bias = meta(64, 4096), meta(4096, 4096).t(), meta(4096)
    text = gg.Gemm(library.bias).explain(A, B, arch="sm90", bias=bias)
    assert "torch's own op, torch.addmm: by the model" in text
    assert "us  library: torch's own op\n" in text
    text = gg.Gemm(library.bias_gelu).explain(A, B, arch="sm90", bias=bias)
    assert "library: torch's own op" not in text
    assert "no library way: torch has no op with this epilogue" in text


@pytest.mark.parametrize("M, N, K", [(4096, 4096, 4096), (8192, 4096, 1024), (64, 4096, 4096), (1000, 1003, 777)])
def test_a_bare_product_is_torchs(M, N, K):
    assert select(bound(plain, meta(M, K), meta(N, K).t()), SM90).ways[0] is LIBRARY
    assert select(bound(plain, meta(M, K), meta(N, K).t(), out_dtype=F32), SM90).ways[0] is LIBRARY


def test_int8_products_are_ours():
    A, B = meta(4096, 4096, dtype=torch.int8), meta(4096, 4096, dtype=torch.int8).t()
    assert isinstance(select(bound(plain_i32, A, B), SM90).ways[0], Fused)


def test_a_given_config_stays():
    config = gg.GemmConfig("sm90", (128, 128, 64))
    A, B, bias = meta(16, 4096), meta(4096, 4096).t(), meta(4096)
    assert select(bound(library.bias, A, B, bias=bias), SM90, config).ways == (Fused(config),)


def test_in_the_background_torchs_op_serves_or_stays():
    A, B, bias = meta(8192, 1024), meta(4096, 1024).t(), meta(4096)
    first = select(bound(library.bias_gelu_tanh, A, B, bias=bias), SM90).ways[0]
    assert isinstance(first, Fused)
    op = gg.Gemm(library.bias_gelu_tanh, compile="background")
    assert "calls run by library: torch's own op" in op.explain(A, B, arch="sm90", bias=bias)
    op = gg.Gemm(library.bias_gelu, compile="background")
    assert "calls run by split" in op.explain(A, B, arch="sm90", bias=bias)


def test_the_op_runs_it_and_builds_nothing(device):
    A, B = matrices()
    bias = integers(32)
    (D,) = Runner(gg.Gemm(library.bias)._op.graph_for, Options(compile="background"))(A, B, {"bias": bias})
    assert torch.equal(D, (A.double() @ B.double() + bias.double()).to(BF16))
    assert device.ran == device.built == []


def test_a_misaligned_bias_runs_otherwise_in_the_same_op(device):
    runner = Runner(gg.Gemm(library.bias)._op.graph_for)
    A, B = matrices()
    assert runner.plan(A, B, {"bias": integers(32)}).way == "library"
    assert runner.plan(A, B, {"bias": misaligned(integers(32))}).way != "library"
    assert SPLIT.reject_reason(bound(library.bias, A, B, bias=misaligned(integers(32))), ARCH) is None
