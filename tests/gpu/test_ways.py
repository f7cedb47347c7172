"""The split way, torch's own ops and background builds on a GPU: the same answers as the fused kernels, everywhere."""

from __future__ import annotations

import time

import pytest
import torch

import gemmgen as gg
from gemmgen import library, training, tuned
from gemmgen.device import target_of
from gemmgen.plan import run
from gemmgen.runtime import bind_call
from gemmgen.tuned import Entry, Measured
from gemmgen.ways import LIBRARY, SPLIT, Fused, select
from tests.gpu.test_fused import CUDA, DTYPES, LAYOUTS, assert_exact, kitchen, matrices, operands_of, totals
from tests.oracle import assert_close, integers, uniform

pytestmark = pytest.mark.gpu(sm=90)


def split(op: gg.Gemm, A, B, operands, out_dtype=None):
    """The results of the split way; the test is skipped where torch has no such product."""
    binding = bind_call(op._op.graph_for, A, B, operands, out_dtype)
    target = target_of(A.device)
    if reason := SPLIT.reject_reason(binding, target.arch):
        pytest.skip(reason)
    return op._packed(run(SPLIT.plan(binding, target), (A, B), operands, A.device))


SHAPES = [
    pytest.param(128, 256, 64, id="aligned"),
    pytest.param(200, 136, 72, id="ragged"),
    pytest.param(77, 131, 45, id="odd"),
    pytest.param(1, 264, 136, id="one-row"),
    pytest.param(192, 192, 64, id="square"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_split_is_exact_on_integers(M, N, K, layout, dtype):
    op = gg.Gemm(kitchen)
    A, B = matrices(M, N, K, layout, dtype)
    operands = operands_of(M, N)
    assert_exact(op, A, B, operands, split(op, A, B, operands, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("lead_a, lead_b", [((3,), (3,)), ((3,), ()), ((), (3,))], ids=str)
def test_split_batches_are_exact_on_integers(lead_a, lead_b, dtype):
    op = gg.Gemm(kitchen)
    M, N, K = 136, 272, 80
    A, _ = matrices(M, N, K, "nt", dtype, lead=lead_a)
    _, B = matrices(M, N, K, "nt", dtype, lead=lead_b)
    operands = operands_of(M, N, lead=(3,))
    assert_exact(op, A, B, operands, split(op, A, B, operands, torch.float32))


def test_split_rounds_once():
    @gg.epilogue
    def shifted(accum, bias: gg.Row):
        return accum + bias

    op = gg.Gemm(shifted)
    A = torch.ones(32, 264, dtype=torch.bfloat16, device=CUDA)
    A[:, 257:] = 0
    B = torch.ones(264, 64, dtype=torch.bfloat16, device=CUDA)
    bias = torch.full((64,), -256, dtype=torch.bfloat16, device=CUDA)
    assert (split(op, A, B, {"bias": bias}) == 1).all()  # 257 is no bf16


def test_split_reductions():
    op = gg.Gemm(totals)
    A, B = matrices(300, 520, 136, "nt", torch.bfloat16)
    operands = {"row": integers(520, dtype=torch.bfloat16, device=CUDA)}
    assert_exact(op, A, B, operands, split(op, A, B, operands))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_split_is_as_accurate_as_torch(dtype):
    op = gg.Gemm(gg.library.bias_gelu_tanh)
    A, B = matrices(512, 768, 1024, "nt", dtype, make=uniform)
    operands = {"bias": uniform(768, dtype=dtype, device=CUDA)}
    assert_close(op, A, B, operands, split(op, A, B, operands))


def test_split_in_a_cuda_graph():
    op = gg.Gemm(kitchen)
    A, B = matrices(128, 256, 64, "nt", torch.bfloat16)
    operands = operands_of(128, 256)
    binding = bind_call(op._op.graph_for, A, B, operands, torch.float32)
    plan = SPLIT.plan(binding, target_of(A.device))
    run(plan, (A, B), operands, A.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = op._packed(run(plan, (A, B), operands, A.device))
    for _ in range(2):
        A.copy_(integers(128, 64, dtype=torch.bfloat16, device=CUDA))
        graph.replay()
        assert_exact(op, A, B, operands, results)


def test_background_serves_at_once_and_switches(tmp_path, monkeypatch):
    @gg.epilogue
    def never_built(accum, row: gg.Row):
        return gg.relu(accum * 3 + row)

    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path))
    op = gg.Gemm(never_built, compile="background")
    A, B = matrices(256, 512, 128, "nt", torch.bfloat16)
    operands = {"row": integers(512, dtype=torch.bfloat16, device=CUDA)}
    torch.mm(A, B, out_dtype=torch.float32)  # cuBLAS is there
    torch.cuda.synchronize()
    started = time.monotonic()
    first = op(A, B, **operands)
    torch.cuda.synchronize()
    assert time.monotonic() - started < 5.0
    assert_exact(op, A, B, operands, first)
    runner = op._op.runner
    assert runner.plan(A, B, operands).way == "split"
    deadline = time.monotonic() + 200
    while runner.plan(A, B, operands).way == "split":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert_exact(op, A, B, operands, op(A, B, **operands))
    assert runner.plan(A, B, operands).way == "fused"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M, N, K", SHAPES[:4])
def test_exact_fp32_fused_is_exact_on_integers(M, N, K, layout):
    """By the model exact fp32 runs split, so that other tests do not see its fused kernels."""
    op = gg.Gemm(kitchen)
    A, B = matrices(M, N, K, layout, torch.float32)
    operands = operands_of(M, N)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        binding = bind_call(op._op.graph_for, A, B, operands, None)
    finally:
        torch.set_float32_matmul_precision(before)
    target = target_of(A.device)
    fused = next(way for way in select(binding, target).ways if isinstance(way, Fused))
    results = run(fused.plan(binding, target), (A, B), operands, A.device)
    assert_exact(op, A, B, operands, op._packed(results))


# torch's own ops


@gg.epilogue
def plain(accum):
    return accum


@gg.epilogue
def plain_f32(accum):
    return accum.to(torch.float32)


@gg.epilogue
def plain_i32(accum):
    return accum.to(torch.int32)


@gg.epilogue
def scaled_bias(accum, scale_a: gg.Col, scale_b: gg.Row, bias: gg.Row):
    return accum * scale_a * scale_b + bias


@gg.epilogue
def by_scalars(accum, scale_a: gg.Scalar, scale_b: gg.Scalar, bias: gg.Row):
    return accum * scale_a * scale_b + bias


def by_torch(op: gg.Gemm, A, B, operands, outs=None):
    """The results of torch's own op, which has to take the call."""
    binding = bind_call(op._op.graph_for, A, B, operands, None, outs)
    target = target_of(A.device)
    assert LIBRARY.reject_reason(binding, target.arch) is None
    return op._packed(run(LIBRARY.plan(binding, target), (A, B), operands, A.device, outs))


def biased(N: int, dtype: torch.dtype = torch.bfloat16):
    return {"bias": integers(N, dtype=dtype, device=CUDA)}


PLAIN = [
    pytest.param(plain, torch.bfloat16, id="bf16"),
    pytest.param(plain, torch.float16, id="fp16"),
    pytest.param(plain, torch.float32, id="fp32"),
    pytest.param(plain_f32, torch.bfloat16, id="bf16-to-fp32"),
]


@pytest.mark.parametrize("lead_a, lead_b", [((), ()), ((3,), ()), ((3,), (3,)), ((), (3,))], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epilogue, dtype", PLAIN)
def test_torchs_products_are_exact_on_integers(epilogue, dtype, layout, lead_a, lead_b):
    op = gg.Gemm(epilogue)
    for M, N, K in ((200, 136, 72), (77, 131, 45), (1, 264, 136)):
        A, _ = matrices(M, N, K, layout, dtype, lead=lead_a)
        _, B = matrices(M, N, K, layout, dtype, lead=lead_b)
        assert_exact(op, A, B, {}, by_torch(op, A, B, {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_8_bit_products_are_exact_on_integers(layout):
    for epilogue, dtype in ((plain_i32, torch.int8), (plain, torch.float8_e4m3fn)):
        A, B = matrices(64, 272, 80, layout, dtype)
        op = gg.Gemm(epilogue)
        assert_exact(op, A, B, {}, by_torch(op, A, B, {}))


BIASED = [library.bias, library.bias_relu]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epilogue", BIASED, ids=lambda e: e.name)
def test_torchs_bias_is_exact_on_integers(epilogue, layout, dtype):
    op = gg.Gemm(epilogue)
    for M, N, K in ((128, 256, 64), (200, 136, 72), (77, 131, 45), (1, 264, 136), (130, 1, 33), (70, 66, 1)):
        A, B = matrices(M, N, K, layout, dtype)
        operands = biased(N, dtype)
        assert_exact(op, A, B, operands, by_torch(op, A, B, operands))


@pytest.mark.parametrize("epilogue", [*BIASED, library.bias_gelu_tanh], ids=lambda e: e.name)
def test_torchs_bias_for_the_rows_of_all_batches(epilogue):
    op = gg.Gemm(epilogue)
    for lead in ((1,), (3,)):
        A, _ = matrices(72, 136, 64, "nt", torch.bfloat16, lead=lead)
        _, B = matrices(72, 136, 64, "nt", torch.bfloat16)
        operands = biased(136)
        results = by_torch(op, A, B, operands)
        if epilogue is library.bias_gelu_tanh:
            assert_close(op, A, B, operands, results)
        else:
            assert_exact(op, A, B, operands, results)


@pytest.mark.parametrize("epilogue", BIASED, ids=lambda e: e.name)
def test_torchs_bias_rounds_once(epilogue):
    A = torch.ones(32, 264, dtype=torch.bfloat16, device=CUDA)
    A[:, 257:] = 0
    B = torch.ones(264, 64, dtype=torch.bfloat16, device=CUDA)
    bias = torch.full((64,), -256, dtype=torch.bfloat16, device=CUDA)
    for rows in (32, 1):
        assert (by_torch(gg.Gemm(epilogue), A[:rows], B, {"bias": bias}) == 1).all()  # 257 is no bf16


def gelu_of_one(M: int, N: int, K: int, padding: int = 0):
    """tanh-GELU of 257 - 256 is that of 1, 0.8412; of 256 - 256 or 258 - 256, as they round, it would be 0 or 1.95."""
    A = torch.zeros(M, K + padding, dtype=torch.bfloat16, device=CUDA)[:, :K]
    A[:, 0], A[:, 1] = 256, 1
    B = torch.ones(N, K + padding, dtype=torch.bfloat16, device=CUDA)[:, :K].t()
    return A, B, {"bias": torch.full((N,), -256, dtype=torch.bfloat16, device=CUDA)}


@pytest.mark.parametrize("M, N, K", [(32, 64, 264), (77, 136, 72), (2, 8, 8), (511, 768, 1024)], ids=str)
def test_torchs_gelu_rounds_once(M, N, K):
    A, B, operands = gelu_of_one(M, N, K)
    D = by_torch(gg.Gemm(library.bias_gelu_tanh), A, B, operands)
    assert (D.float() - 0.8412).abs().max() < 0.004


UNALIGNED = [(77, 131, 45, 0), (64, 132, 64, 0), (64, 128, 44, 0), (64, 128, 64, 4), (1, 131, 45, 0)]


@pytest.mark.parametrize("M, N, K, padding", UNALIGNED, ids=str)
def test_gelu_rounds_once_where_torchs_does_not(M, N, K, padding):
    A, B, operands = gelu_of_one(M, N, K, padding)
    op = gg.Gemm(library.bias_gelu_tanh, tune="off")
    assert op._op.runner.plan(A, B, operands).way != "library"
    assert (op(A, B, **operands).float() - 0.8412).abs().max() < 0.004


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M, N, K", [(512, 768, 1024), (16, 4096, 1024), (77, 136, 48)], ids=str)
def test_torchs_gelu_is_as_accurate_as_torch(M, N, K, dtype):
    op = gg.Gemm(library.bias_gelu_tanh)
    A, B = matrices(M, N, K, "nt", dtype, make=uniform)
    operands = {"bias": uniform(N, dtype=dtype, device=CUDA)}
    assert_close(op, A, B, operands, by_torch(op, A, B, operands))


@pytest.mark.parametrize("epilogue", [*BIASED, library.bias_gelu_tanh], ids=lambda e: e.name)
def test_torchs_ops_keep_nan(epilogue):
    A, B = matrices(64, 128, 64, "nt", torch.bfloat16)
    operands = biased(128)
    A[3, 5] = float("nan")
    operands["bias"][7] = float("nan")
    D = by_torch(gg.Gemm(epilogue), A, B, operands)
    expected = torch.zeros(64, 128, dtype=torch.bool, device=CUDA)
    expected[3], expected[:, 7] = True, True
    assert torch.equal(D.isnan(), expected)


def test_torchs_fp8_scales_are_exact():
    for M in (144, 16, 1):
        A, B = matrices(M, 272, 80, "nt", torch.float8_e4m3fn)
        powers = {
            "scale_a": 2.0 ** torch.randint(-2, 3, (M,), device=CUDA),
            "scale_b": 2.0 ** torch.randint(-2, 3, (272,), device=CUDA),
            **biased(272),
        }
        op = gg.Gemm(scaled_bias)
        assert_exact(op, A, B, powers, by_torch(op, A, B, powers))
        op, scalars = gg.Gemm(by_scalars), {"scale_a": torch.tensor(2.0, device=CUDA),
                                            "scale_b": torch.tensor([0.25], device=CUDA), **biased(272)}  # fmt: skip
        assert_exact(op, A, B, scalars, by_torch(op, A, B, scalars))


def test_torchs_op_in_a_cuda_graph():
    for epilogue, dtype in ((library.bias_relu, torch.bfloat16), (plain, torch.float8_e4m3fn)):
        op = gg.Gemm(epilogue)
        A, B = matrices(128, 256, 64, "nt", dtype)
        operands = biased(256) if epilogue is library.bias_relu else {}
        plan = LIBRARY.plan(bind_call(op._op.graph_for, A, B, operands, None), target_of(A.device))
        run(plan, (A, B), operands, A.device)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = op._packed(run(plan, (A, B), operands, A.device))
        for _ in range(2):
            A.copy_(integers(128, 64, dtype=dtype, device=CUDA))
            for value in operands.values():
                value.copy_(integers(256, dtype=value.dtype, device=CUDA))
            graph.replay()
            assert_exact(op, A, B, operands, results)


def test_torchs_op_runs_on_the_current_stream():
    op = gg.Gemm(library.bias)
    A, B = matrices(256, 256, 64, "nt", torch.bfloat16)
    operands = biased(256)
    by_torch(op, A, B, operands)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        A.mul_(2)
        results = by_torch(op, A, B, operands)
    assert not side.query()
    side.synchronize()
    assert_exact(op, A, B, operands, results)


def test_torchs_op_writes_out():
    op = gg.Gemm(library.bias_relu)
    A, B = matrices(128, 256, 64, "nt", torch.bfloat16)
    operands = biased(256)
    out = torch.full((128, 256), float("nan"), dtype=torch.bfloat16, device=CUDA)
    assert by_torch(op, A, B, operands, [out]).data_ptr() == out.data_ptr()
    assert_exact(op, A, B, operands, out)
    padded = torch.full((128, 264), 7.0, dtype=torch.bfloat16, device=CUDA)
    op(A, B, out=padded[:, :256], **operands)
    assert_exact(op, A, B, operands, padded[:, :256])
    assert (padded[:, 256:] == 7).all()


def test_a_misaligned_bias_runs_otherwise_and_is_right():
    op = gg.Gemm(library.bias_relu)
    A, B = matrices(16, 4096, 256, "nt", torch.bfloat16)
    aligned = biased(4096)
    operands = {"bias": torch.cat([aligned["bias"][:1], aligned["bias"]])[1:]}
    binding = bind_call(op._op.graph_for, A, B, operands, None)
    assert "less than 16 bytes" in LIBRARY.reject_reason(binding, target_of(A.device).arch)
    assert op._op.runner.plan(A, B, operands).way != "library"
    assert_exact(op, A, B, operands, op(A, B, **operands))


# dgrad and wgrad


def gradients(op: gg.Gemm, x, weight, bias):
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    result = gg.linear(*leaves, op, bias=bias)
    result.backward(torch.ones_like(result))
    return [leaf.grad for leaf in leaves]


def test_the_gemms_of_a_backward_run_by_torch_unless_measured_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "_path", lambda key: tmp_path / f"{key.name}.json")
    op = gg.Gemm(library.bias)
    x, weight = (integers(*shape, dtype=torch.bfloat16, device=CUDA) for shape in ((256, 128), (192, 128)))
    bias = integers(192, dtype=torch.bfloat16, device=CUDA)
    ones = torch.ones(256, 192, dtype=torch.bfloat16, device=CUDA)
    expected = [(ones.double() @ weight.double()).bfloat16(), (ones.mT.double() @ x.double()).bfloat16()]
    (gemm, *_), _ = training.gemms_of_backward(op._op, x, weight.t()).values()
    gemm.runner.forget_plans()
    assert all(map(torch.equal, gradients(op, x, weight, bias), expected))
    products = ((ones, weight), (ones.mT, x))
    assert [gemm.runner.plan(*pair, {}).way for pair in products] == ["library", "library"]
    target = target_of(x.device)
    for pair in products:
        binding = bind_call(gemm.graph_for, *pair, {}, None)
        fused = next(way for way in select(binding, target).ways if isinstance(way, Fused))
        tuned.put(tuned.key_of(binding, target), Entry.of(binding.extents.M, (Measured(fused, 1.0),)))
    gemm.runner.forget_plans()
    try:
        assert all(map(torch.equal, gradients(op, x, weight, bias), expected))
        assert [gemm.runner.plan(*pair, {}).way for pair in products] == ["fused", "fused"]
    finally:
        tuned.forget()
        gemm.runner.forget_plans()
