"""The C++ dispatcher on a GPU: the same answers, on the current stream, in graphs and under threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gemmgen as gg
from gemmgen import dispatcher, runtime, ways

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _library():
    dispatcher.build()
    assert dispatcher.is_available()


CONFIG = gg.GemmConfig("sm90", (64, 128, 64), (1, 1), "pingpong")


def new_op(number: int, config: gg.GemmConfig | None = CONFIG) -> gg.Gemm:
    """An op of its own for each `number`, which nobody else has called."""

    @gg.epilogue
    def scaled_bias(accum, scale: gg.Scalar, bias: gg.Row):
        result = gg.relu(accum * scale + bias) + float(number)
        return result, gg.sum(result, over="M")

    return gg.Gemm(scaled_bias, config=config)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").bfloat16()


def call_of(M: int = 64, N: int = 128, K: int = 64):
    return integers(M, K, seed=M), integers(N, K, seed=1).t(), integers(N, seed=2)


def check(op: gg.Gemm, A, B, scale, bias):
    assert_exact(op, op(A, B, scale=scale, bias=bias), A, B, scale, bias)


def assert_exact(op: gg.Gemm, results, A, B, scale, bias):
    D, sums = results
    want_D, want_sums = op.reference(A, B, scale=scale, bias=bias)
    assert torch.equal(D.double(), want_D.to(D.dtype).double())
    assert torch.equal(sums.double(), want_sums.to(sums.dtype).double())


def launches(op: gg.Gemm) -> int:
    return op._op.runner.dispatched.launches


def test_calls_alike_are_launched_by_cpp():
    op = new_op(1)
    for M in (64, 64, 200, 64, 200):
        A, B, bias = call_of(M)
        check(op, A, B, 2.0, bias)
    assert launches(op) == 3


def test_other_metadata_and_dtypes_are_told_apart():
    op = new_op(2, config=None)
    A, B, bias = call_of()
    for _ in range(2):
        check(op, A, B, 2.0, bias)
        check(op, A, B, torch.tensor(3.0, device="cuda"), bias)
        check(op, A.half(), B.half(), 2.0, bias)
        check(op, A, B, 2.0, bias.float())
        check(op, torch.cat((A.flatten()[:1], A.flatten()))[1:].view_as(A), B, 2.0, bias)
        check(op, A.t().contiguous().t(), B.contiguous(), 2.0, bias)
    assert launches(op) == 6


def test_numbers_are_read_at_every_call():
    op = new_op(3)
    A, B, bias = call_of()
    for scale in (1.0, -2.0, 3, 0.5):
        check(op, A, B, scale, bias)


def run_on_another_stream(op: gg.Gemm) -> None:
    """The second call of `op` is on a stream that has yet to fill A."""
    A, B, bias = call_of()
    check(op, A, B, 1.0, bias)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # tens of ms: a launch elsewhere would read A before it is filled
        later = torch.empty_like(A).copy_(A)
        D, _ = op(later, B, scale=1.0, bias=bias)
    side.synchronize()
    assert launches(op) == 1
    assert torch.equal(D, op(A, B, scale=1.0, bias=bias)[0])


def test_the_current_stream_is_used():
    run_on_another_stream(new_op(4))


def test_graph_replays_with_new_inputs():
    op = new_op(5)
    A, B, bias = call_of(200)
    op.warmup(A, B, scale=2.0, bias=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        D, sums = op(A, B, scale=2.0, bias=bias)
    for seed in range(3):
        A.copy_(integers(200, 64, seed=seed + 10))
        D.fill_(float("nan"))
        sums.fill_(float("nan"))
        graph.replay()
        want_D, want_sums = op(A, B, scale=2.0, bias=bias)
        assert torch.equal(D, want_D)
        assert torch.equal(sums, want_sums)


def test_threads_on_their_own_streams():
    op = new_op(6)
    calls = [call_of(M) for M in (1, 16, 64, 200)]
    want = [[r.clone() for r in op(A, B, scale=2.0, bias=bias)] for A, B, bias in calls]
    torch.cuda.synchronize()
    barrier = threading.Barrier(4)

    def work(start: int) -> bool:
        barrier.wait(10)
        same = True
        with torch.cuda.stream(torch.cuda.Stream()):
            for index in range(100):
                at = (start + index) % 4
                A, B, bias = calls[at]
                same &= all(map(torch.equal, op(A, B, scale=2.0, bias=bias), want[at]))
        return same

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_gradients_still_flow():
    op = gg.Gemm(gg.library.bias_gelu_tanh, tune="off")
    A, B, bias = call_of()
    leaf = bias.clone().requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            op(A, B, bias=bias)
        op(A, B, bias=leaf).sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


def test_ops_switched_off_stay_in_python(monkeypatch):
    monkeypatch.setenv("GEMMGEN_DISPATCHER", "0")
    op = new_op(7)
    monkeypatch.undo()
    assert op._op.runner.dispatched is None
    A, B, bias = call_of()
    check(op, A, B, 2.0, bias)


def test_the_launches_that_a_launcher_keeps():
    op = new_op(9)
    A, B, bias = call_of(200)
    weights = [integers(128, 64, seed=seed).t() for seed in range(150)]  # more than it keeps
    buffer = integers(400, 128, seed=3)
    halves, narrow = buffer.view(800, 64), buffer[:, :64]
    views = (halves[:200], halves[:64], halves[:400:2], narrow[:200], narrow[:399])  # of one address
    for _ in range(3):
        for weight in weights:
            check(op, A, weight, 2.0, bias)
        for view in views:
            check(op, view, B, 2.0, bias)
        buffer.copy_(integers(400, 128, seed=4))
        bias.copy_(integers(128, seed=5))


def test_a_kept_launch_clears_its_workspace():
    config = gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=2)
    op = new_op(10, config)
    A, B, bias = call_of(200, K=512)
    for _ in range(5):
        check(op, A, B, 1.0, bias)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_another_device():
    op = new_op(8)
    A, B, bias = call_of()
    check(op, A, B, 2.0, bias)
    there = [x.to("cuda:1") for x in (A, B, bias)]
    for _ in range(2):
        check(op, *there[:2], 2.0, there[2])  # cuda:0 is current
        with torch.cuda.device(1):
            check(op, *there[:2], 2.0, there[2])
    check(op, A, B, 2.0, bias)


# The split way: torch's product, and the pointwise kernel


@pytest.fixture
def split(monkeypatch):
    chosen = ways.Selection((ways.SPLIT,), "as the test wants it", ())
    monkeypatch.setattr(runtime, "selected", lambda *_: chosen)


def without_reduction(number: int) -> gg.Gemm:
    @gg.epilogue
    def shifted(accum, shift: gg.Col, bias: gg.Row, residual: gg.Tile):
        return gg.relu(accum + shift + bias) + residual + float(number)

    return gg.Gemm(shifted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_split_calls_of_a_class_of_m_are_launched_by_cpp(split, dtype):
    op = without_reduction({torch.bfloat16: 8, torch.float16: 9, torch.int8: 10}[dtype])
    for M in (72, 65, 72, 66, 1088, 1025, 1030):
        A, B, bias = call_of(M, N=1032)
        A, B = A.to(dtype), B.t().to(dtype).t()
        operands = {"shift": integers(M, seed=3), "bias": bias, "residual": integers(M, 1032, seed=4)}
        want = op.reference(A, B, **operands)
        D = op(A, B, **operands)
        assert torch.equal(D.double(), want.to(D.dtype).double())
    assert op._op.runner.plan(A, B, operands).way == "split"
    assert launches(op) == 5


def test_the_product_of_a_split_call_is_not_rounded(split):
    @gg.epilogue
    def magnitude(accum):
        return gg.abs(accum).to(torch.float32)

    op = gg.Gemm(magnitude)
    A, B = integers(64, 4096).abs() + 5, integers(128, 4096, seed=1).t().abs() + 5  # sums of 18 bits
    for _ in range(2):
        assert torch.equal(op(A, B).double(), A.double() @ B.double())
    assert launches(op) == 1


@pytest.mark.parametrize("M", [1, 64, 300])
def test_split_calls_with_reductions_are_launched_by_cpp(split, M):
    op = new_op({1: 11, 64: 14, 300: 15}[M], config=None)
    A, B, bias = call_of(M, N=520)
    for scale in (2.0, -1.0, 0.5):
        check(op, A, B, scale, bias)
    assert launches(op) == 2


def test_split_calls_replay_in_a_graph_with_new_inputs(split):
    op = new_op(12, config=None)
    A, B, bias = call_of(200)
    op(A, B, scale=2.0, bias=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        D, sums = op(A, B, scale=2.0, bias=bias)
    assert launches(op) == 1
    for seed in range(3):
        A.copy_(integers(200, 64, seed=seed + 20))
        D.fill_(float("nan"))
        sums.fill_(float("nan"))
        graph.replay()
        assert_exact(op, (D, sums), A, B, 2.0, bias)


def test_split_calls_use_the_current_stream(split):
    run_on_another_stream(new_op(13, config=None))
