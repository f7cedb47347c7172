"""Tuning on a GPU: the winner runs, computes the same, and is kept; nothing of the caller's is written."""

from __future__ import annotations

import pytest
import torch

import gemmgen as gg
from gemmgen import tuned
from gemmgen.device import target_of
from gemmgen.runtime import bind_call
from gemmgen.ways import Fused
from tests.gpu.test_fused import CUDA, assert_exact, matrices
from tests.oracle import integers

pytestmark = pytest.mark.gpu(sm=90)

CONFIGS = [
    gg.GemmConfig("sm90", (128, 128, 64), (1, 2), "pingpong", raster="M"),
    gg.GemmConfig("sm90", (128, 256, 64), (2, 1), "cooperative"),
    gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=2),
]
M, N, K = 512, 768, 512


@gg.epilogue
def with_sums(accum, row: gg.Row, alpha: gg.Scalar):
    value = gg.relu(accum * alpha + row)
    return {"D": value, "sums": gg.sum(value, over="M")}


@pytest.fixture(autouse=True)
def _own_measurements(tmp_path, monkeypatch):
    """Kernels come from the cache of all tests; measured times are this test's own."""
    monkeypatch.setattr(tuned, "_path", lambda key: tmp_path / f"{key.name}.json")
    yield
    gg.Gemm(with_sums)._op.runner.forget_plans()


def call(m: int = M):
    A, B = matrices(m, N, K, "nt", torch.bfloat16)
    return A, B, {"row": integers(N, dtype=torch.bfloat16, device=CUDA), "alpha": 2.0}


def test_the_winner_runs_and_computes_the_same():
    op = gg.Gemm(with_sums)
    A, B, operands = call()
    copies = A.clone(), B.clone(), operands["row"].clone()
    entry = op.tune(A, B, configs=CONFIGS, rounds=9, **operands)
    assert not entry.failures, str(entry)
    assert {row.way.config.label for row in entry.rows if isinstance(row.way, Fused)} == {c.label for c in CONFIGS}
    assert all(torch.equal(x, y) for x, y in zip((A, B, operands["row"]), copies, strict=True))
    for m in (M, M - 40):
        A, B, operands = call(m)
        assert_exact(op, A, B, operands, op(A, B, **operands))
    assert "measured" in op.explain(A, B, **operands)
    plan = op._op.runner.plan(*call()[:2], operands)
    assert plan.config == getattr(entry.rows[0].way, "config", None)
    tuned.forget()
    binding = bind_call(op._op.graph_for, A, B, operands, None)
    assert tuned.find(tuned.key_of(binding, target_of(A.device))) == entry


def test_the_winner_in_a_cuda_graph():
    op = gg.Gemm(with_sums)
    A, B, operands = call()
    op.tune(A, B, configs=CONFIGS[2:], rounds=7, **operands)
    op.warmup(A, B, **operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = op(A, B, **operands)
    for _ in range(2):
        A.copy_(integers(M, K, dtype=torch.bfloat16, device=CUDA))
        graph.replay()
        assert_exact(op, A, B, operands, results)


def test_the_first_call_measures(monkeypatch):
    from gemmgen import choose

    monkeypatch.setattr(
        choose, "worth_measuring", lambda *_, **__: [choose.Ranked(config, 1.0) for config in CONFIGS[:2]]
    )
    op = gg.Gemm(with_sums, tune="first-call")
    A, B, operands = call()
    assert_exact(op, A, B, operands, op(A, B, **operands))
    binding = bind_call(op._op.graph_for, A, B, operands, None)
    assert tuned.find(tuned.key_of(binding, target_of(A.device))) is not None


def test_what_cannot_be_tuned():
    A, B, operands = call()
    with pytest.raises(gg.OperandError, match="fixed config"):
        gg.Gemm(with_sums, config=CONFIGS[0]).tune(A, B, **operands)
    with pytest.raises(gg.OperandError, match="extent is 0"):
        gg.Gemm(with_sums).tune(A[:0], B, **operands)
