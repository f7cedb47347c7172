"""The op on a GPU: layouts of operands, out=, empty problems, streams, graphs, torch.compile, bad input."""

from __future__ import annotations

import pytest
import torch

import gemmgen as gg
from tests.gpu.test_fused import assert_exact, kitchen, matrices, operands_of
from tests.oracle import integers

pytestmark = pytest.mark.gpu(sm=90)
CUDA = "cuda"
M, N, K = 200, 136, 72


@pytest.fixture
def call():
    A, B = matrices(M, N, K, "nt", torch.bfloat16)
    return gg.Gemm(kitchen), A, B, operands_of(M, N, dtype=torch.bfloat16)


def test_expanded_operands_are_read_as_what_they_are(call):
    op, A, B, operands = call
    operands |= {"tile": operands["row"].expand(M, N), "row": operands["row"][:1].expand(N)}
    assert_exact(op, A, B, operands, op(A, B, **operands))
    operands |= {"tile": operands["col"].unsqueeze(1).expand(M, N)}
    assert_exact(op, A, B, operands, op(A, B, **operands))


def test_operands_of_any_stride_and_alignment(call):
    op, A, B, operands = call
    operands |= {
        "tile": integers(N, M, dtype=torch.bfloat16, device=CUDA).t(),
        "row": integers(2 * N, dtype=torch.bfloat16, device=CUDA)[::2],
        "col": integers(M + 1, dtype=torch.bfloat16, device=CUDA)[1:],
    }
    assert_exact(op, A, B, operands, op(A, B, **operands))
    operands["tile"] = integers(M, N + 1, dtype=torch.bfloat16, device=CUDA)[:, 1:]
    assert_exact(op, A, B, operands, op(A, B, **operands))


@pytest.mark.parametrize("which", ["A", "B"])
def test_misaligned_matrices_after_an_aligned_call(call, which):
    op, A, B, operands = call
    op(A, B, **operands)
    storage = integers(K * max(M, N) + 1, dtype=torch.bfloat16, device=CUDA)[1:]
    if which == "A":
        A = storage[: M * K].view(M, K)
    else:
        B = storage[: N * K].view(N, K).t()
    assert_exact(op, A, B, operands, op(A, B, **operands))


def test_scalar_tensors_and_numbers_are_read_at_run_time(call):
    op, A, B, operands = call
    for alpha in (2.0, -1.0, torch.tensor(3.0, device=CUDA), torch.tensor([0.5], device=CUDA)):
        operands["alpha"] = alpha
        assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))


def test_out_is_written_and_nothing_beside_it(call):
    op, A, B, operands = call
    padded = torch.full((M + 2, N + 16), float("nan"), device=CUDA)
    out = {
        "D": padded[1 : M + 1, 8 : N + 8],
        "masked": torch.full((M, N), float("nan"), device=CUDA),
        "sums": torch.full((N,), float("nan"), device=CUDA),
        "peaks": torch.full((M,), float("nan"), device=CUDA),
    }
    assert op(A, B, out=out, **operands)["D"] is out["D"]
    assert_exact(op, A, B, operands, out)
    padded[1 : M + 1, 8 : N + 8] = float("nan")
    assert padded.isnan().all()


def test_out_of_odd_strides_and_aliasing_an_input(call):
    _, A, B, operands = call

    @gg.epilogue
    def residual(accum, tile: gg.Tile):
        return accum + tile

    op = gg.Gemm(residual)
    tile = operands["tile"]
    want = op(A, B, tile=tile)
    turned = torch.empty(N, M, dtype=torch.bfloat16, device=CUDA).t()
    op(A, B, tile=tile, out=turned)
    assert torch.equal(turned, want)
    op(A, B, tile=tile, out=tile)
    assert torch.equal(tile, want)


@pytest.mark.parametrize("m, n, k", [(0, 16, 8), (16, 0, 8), (16, 24, 0), (0, 0, 0)], ids=str)
def test_empty_problems(m, n, k):
    op = gg.Gemm(kitchen)
    A = torch.empty(m, k, device=CUDA, dtype=torch.bfloat16)
    B = torch.empty(k, n, device=CUDA, dtype=torch.bfloat16)
    operands = operands_of(m, n, dtype=torch.bfloat16)
    assert_exact(op, A, B, operands, op(A, B, **operands))


def test_side_stream_and_second_call(call):
    op, A, B, operands = call
    op.warmup(A, B, **operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = op(A, B, **operands)
    torch.cuda.current_stream().wait_stream(stream)
    assert_exact(op, A, B, operands, results)


def test_cuda_graph_replays_with_new_inputs(call):
    op, A, B, operands = call
    op.warmup(A, B, **operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = op(A, B, **operands)
    for _ in range(2):
        A.copy_(integers(M, K, dtype=torch.bfloat16, device=CUDA))
        operands["tile"].copy_(integers(M, N, dtype=torch.bfloat16, device=CUDA))
        for result in results.values():
            result.fill_(float("nan"))
        graph.replay()
        assert_exact(op, A, B, operands, results)


def test_compiled_with_dynamic_m_does_not_recompile(call):
    op, _, B, _ = call
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def double(A, B, row, col, tile):
        return {name: 2 * value for name, value in op(A, B, row=row, col=col, tile=tile, alpha=2.0).items()}

    for m in (200, 328, 77):
        A = integers(m, K, dtype=torch.bfloat16, device=CUDA)
        vectors = operands_of(m, N, dtype=torch.bfloat16)
        got = double(A, B, vectors["row"], vectors["col"], vectors["tile"])
        want = op(A, B, **vectors)
        assert all(torch.equal(got[name], 2 * want[name]) for name in want)
    assert counter.frame_count == 1


def test_opcheck(call):
    op, A, B, operands = call
    flat = op._op.flat_operands(operands)
    torch.library.opcheck(op._op.overload, (A, B, *flat), {})


def test_bad_input_launches_nothing_and_leaves_the_process_usable(call):
    op, A, B, operands = call
    with pytest.raises(gg.OperandError, match="is on cpu"):
        op(A, B, **(operands | {"row": operands["row"].cpu()}))
    with pytest.raises(gg.ShapeMismatch, match=r"annotate it gg\.Col"):
        op(A, B, **(operands | {"row": operands["col"]}))
    with pytest.raises(gg.OperandError, match="one dtype"):
        op(A, B.half(), **operands)
    with pytest.raises(gg.UnsupportedOp, match="float64"):
        op(A.double(), B.double(), **operands)
    assert_exact(op, A, B, operands, op(A, B, **operands))
