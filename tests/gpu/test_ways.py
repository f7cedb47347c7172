"""The split way and background builds on a GPU: the same answers as the fused kernels, under graphs and streams too."""

from __future__ import annotations

import time

import pytest
import torch

import gemmgen as gg
from gemmgen.device import target_of
from gemmgen.plan import run
from gemmgen.runtime import bind_call
from gemmgen.ways import SPLIT, Fused, select
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
