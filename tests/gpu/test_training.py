"""Gradients on a GPU: within twice the error of torch's own backward against float64, through every part of torch.

Each distinct GEMM skeleton costs half a minute of nvcc, so that the tests share a few epilogues and layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gemmgen as gg
from gemmgen import library
from gemmgen.evaluate import evaluate
from gemmgen.ops import broadcastable
from gemmgen.problem import extents_of, result_axes
from tests.oracle import FLOOR, errors

pytestmark = pytest.mark.gpu(sm=90)
CUDA = "cuda"
M, K, N = 200, 136, 264

BIAS, GELU = gg.Gemm(library.bias), gg.Gemm(library.bias_gelu_tanh)


@gg.epilogue
def kitchen(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, alpha: gg.Scalar):
    value = gg.silu(accum * alpha + row) * col + tile
    return {"D": value, "sums": gg.sum(value, over="M"), "peaks": gg.max(value, over="N")}


@pytest.fixture(autouse=True)
def _fixed_seed_and_precision():
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(dtype)


def linear_leaves(dtype: torch.dtype, m: int = M, k: int = K, n: int = N) -> dict[str, Tensor]:
    weight = drawn(n, k, dtype=dtype, scale=k**-0.5)
    return {"x": drawn(m, k, dtype=dtype), "weight": weight, "bias": drawn(n, dtype=dtype)}


def mlp_leaves(dtype: torch.dtype, m: int = M) -> dict[str, Tensor]:
    first = linear_leaves(dtype, m, K, N)
    second = {"weight2": drawn(K, N, dtype=dtype, scale=N**-0.5), "bias2": drawn(K, dtype=dtype)}
    return {**first, **second}


Function = Callable[..., Tensor]


def gradients(
    function: Function, leaves: Mapping[str, Tensor], cotangent: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The result and the gradient of every leaf, with leaves and cotangent cast to `dtype`."""
    own = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in leaves.items()}
    result = function(**own)
    result.backward(cotangent.to(result.dtype))
    return {"result": result.detach(), **{name: x.grad for name, x in own.items()}}


def assert_close(ours: Mapping[str, Tensor], torchs: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    for name, want in exact.items():
        assert ours[name].dtype == torchs[name].dtype and ours[name].shape == torchs[name].shape
        for measure, mine, limit in zip(
            ("norm", "peak"), errors(ours[name], want), errors(torchs[name], want), strict=True
        ):
            assert mine <= 2 * limit + FLOOR, f"{name}: {measure} error {mine:.3e}, torch's own {limit:.3e}"


def check(ours: Function, torchs: Function, leaves: Mapping[str, Tensor], cotangent: Tensor) -> None:
    assert_close(
        gradients(ours, leaves, cotangent),
        gradients(torchs, leaves, cotangent),
        gradients(torchs, leaves, cotangent, torch.float64),
    )


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gg.linear(x, weight, GELU, bias=bias)


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")


MLP = gg.chain(GELU, BIAS)


def fused_mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return MLP.linear(x, weight, weight2, first={"bias": bias}, second={"bias": bias2})


def torch_mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return torch.nn.functional.linear(torch_linear(x, weight, bias), weight2, bias2)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]  # float32 as tf32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(dtype):
    check(fused_linear, torch_linear, linear_leaves(dtype), drawn(M, N, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlp(dtype):
    check(fused_mlp, torch_mlp, mlp_leaves(dtype), drawn(M, K, dtype=dtype))


def test_mlp_at_a_real_size():
    leaves = {"x": drawn(2048, 1024), "weight": drawn(4096, 1024, scale=1 / 32), "bias": drawn(4096),
              "weight2": drawn(1024, 4096, scale=1 / 64), "bias2": drawn(1024)}  # fmt: skip
    check(fused_mlp, torch_mlp, leaves, drawn(2048, 1024))


def test_odd_extents():
    leaves = linear_leaves(torch.bfloat16, 77, 45, 131)
    check(fused_linear, torch_linear, leaves, drawn(77, 131))


def composed(op: gg.Gemm, compute: torch.dtype) -> Callable[..., list[Tensor]]:
    """The op's results by torch ops in `compute`, for autograd to follow."""

    def call(A: Tensor, B: Tensor, **operands: Tensor) -> list[Tensor]:
        graph, extents = op._op.graph, extents_of("composed", A, B)
        shaped = broadcastable(graph, operands, extents, compute, A.device)
        accum = (A.to(compute) @ B.to(compute)).reshape(extents.L, extents.M, extents.N)
        values = evaluate(graph, accum, shaped, {r.name: None for r in graph.results}, compute)
        return [values[r.name].reshape(extents.shape(result_axes(r))) for r in graph.results]

    return call


@pytest.mark.parametrize("save", ["auto", "recompute"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["plain", "batched"])
def test_every_operand_kind_and_reductions(save, lead):
    op = gg.Gemm(kitchen, save=save)
    leaves = {"A": drawn(*lead, M, K), "B": drawn(*lead, K, N, scale=K**-0.5), "row": drawn(N), "col": drawn(*lead, M),
              "tile": drawn(M, N), "alpha": drawn(1).float()}  # fmt: skip
    shapes = {"D": (*lead, M, N), "sums": (*lead, N), "peaks": (*lead, M)}
    cotangents = [drawn(*shape) for shape in shapes.values()]

    def scalar(function: Callable[..., object]) -> Function:
        def call(**own: Tensor) -> Tensor:
            results = function(own.pop("A"), own.pop("B"), **own)
            listed = results.values() if isinstance(results, dict) else results
            return sum((r.double() * c.double()).sum() for r, c in zip(listed, cotangents, strict=True))

        return call

    one = torch.ones((), device=CUDA)
    ours = gradients(scalar(op), leaves, one)
    torchs = gradients(scalar(composed(op, torch.bfloat16)), leaves, one)
    exact = gradients(scalar(composed(op, torch.float64)), leaves, one, torch.float64)
    for each in (ours, torchs, exact):
        del each["result"]
    # where two elements are within a rounding of the maximum, another one may win: compare what does not depend on it
    assert_close(ours, torchs, exact)


COTANGENTS = {
    "expanded": lambda: torch.ones((), device=CUDA, dtype=torch.bfloat16).expand(M, N),
    "rows_shared": lambda: drawn(N).expand(M, N),
    "columns_shared": lambda: drawn(M, 1).expand(M, N),
    "transposed": lambda: drawn(N, M).t(),
    "strided": lambda: drawn(M, 2 * N)[:, ::2],
    "misaligned": lambda: drawn(M * N + 1)[1:].view(M, N),
}


@pytest.mark.parametrize("layout", COTANGENTS)
@pytest.mark.parametrize("op", [GELU, BIAS], ids=["gelu", "bias"])
def test_cotangents_of_any_layout(op, layout):
    leaves, cotangent = linear_leaves(torch.bfloat16), COTANGENTS[layout]()
    want = gradients(lambda x, weight, bias: gg.linear(x, weight, op, bias=bias), leaves, cotangent.contiguous())
    got = gradients(lambda x, weight, bias: gg.linear(x, weight, op, bias=bias), leaves, cotangent)
    for name in ("x", "weight"):
        assert torch.equal(got[name], want[name]), name
    torch.testing.assert_close(got["bias"], want["bias"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("bias2",), ("x", "weight2"), ("weight", "bias2")])
def test_any_subset_of_gradients_is_the_same_bits(wanted):
    leaves, cotangent = mlp_leaves(torch.bfloat16), drawn(M, K)
    full = gradients(fused_mlp, leaves, cotangent)
    some = {name: x.detach().requires_grad_(name in wanted) for name, x in leaves.items()}
    fused_mlp(**some).backward(cotangent)
    for name, x in some.items():
        assert (x.grad is not None) == (name in wanted)
        if name in wanted and len(wanted) > 1:
            torch.testing.assert_close(x.grad, full[name], rtol=1e-2, atol=1e-2)


def test_gradients_are_the_same_bits_every_time():
    leaves, cotangent = mlp_leaves(torch.bfloat16), drawn(M, K)
    first = gradients(fused_mlp, leaves, cotangent)
    for _ in range(3):
        again = gradients(fused_mlp, leaves, cotangent)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("m", [0, 1])
def test_few_rows(m):
    leaves = mlp_leaves(torch.bfloat16, m)
    got = gradients(fused_mlp, leaves, drawn(m, K))
    if m == 0:
        assert all(got[name].shape == x.shape and not got[name].any() for name, x in leaves.items())
    else:
        check(fused_mlp, torch_mlp, leaves, drawn(m, K))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(fused_mlp, fullgraph=True, dynamic=dynamic)
    for m in (M, 2 * M) if dynamic else (M,):
        check(compiled, torch_mlp, mlp_leaves(torch.bfloat16, m), drawn(m, K))


def test_checkpointed_and_functional():
    leaves, cotangent = mlp_leaves(torch.bfloat16), drawn(M, K)
    want = gradients(fused_mlp, leaves, cotangent)
    kept = gradients(lambda **own: checkpoint(fused_mlp, *own.values(), use_reentrant=False), leaves, cotangent)
    functional = torch.func.grad(lambda own: (fused_mlp(**own) * cotangent).sum())(leaves)
    for name in leaves:
        assert torch.equal(kept[name], want[name])
        torch.testing.assert_close(functional[name], want[name], rtol=1e-2, atol=1e-2)


def test_modules_under_autocast():
    eager = torch.nn.Sequential(
        torch.nn.Linear(K, N), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(N, K)
    ).to(CUDA)
    fused = gg.nn.MLP.from_linear(eager[0], eager[2], library.bias_gelu_tanh)
    x, cotangent = drawn(2, 100, K, dtype=torch.float32), drawn(2, 100, K)

    def step(module: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is None):
            result = module(x if dtype is None else x.to(dtype))
        result.backward(cotangent.to(result.dtype))
        grads = {str(i): p.grad for i, p in enumerate(module.parameters())}
        module.zero_grad()
        return {"result": result.detach(), **grads}

    ours, torchs = step(fused, None), step(eager, None)
    assert_close(ours, torchs, step(eager.double(), torch.float64))


def test_a_training_step_keeps_the_preactivation_alone():
    leaves = {name: x.requires_grad_() for name, x in linear_leaves(torch.bfloat16, 1024, 512, 1024).items()}
    fused_linear(**leaves).sum().backward()  # everything is built and cached
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = fused_linear(**leaves)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= 2 * result.numel() * result.element_size() + 2**16


def test_opcheck():
    leaves = linear_leaves(torch.bfloat16)
    args = [leaves["x"], leaves["weight"].t(), leaves["bias"]]
    torch.library.opcheck(GELU._op.overload, tuple(x.detach().requires_grad_() for x in args))
    leaves = mlp_leaves(torch.bfloat16)
    args = [leaves["x"], leaves["weight"].t(), leaves["bias"], leaves["weight2"].t(), leaves["bias2"]]
    torch.library.opcheck(MLP._op.overload, tuple(x.detach().requires_grad_() for x in args))


def test_a_step_can_be_captured_into_a_graph():
    leaves = {name: x.requires_grad_() for name, x in mlp_leaves(torch.bfloat16).items()}
    cotangent = drawn(M, K)

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(fused_mlp(**leaves), list(leaves.values()), cotangent))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    cotangent.copy_(drawn(M, K))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weight_gradients_are_added_to_an_fp32_buffer(dtype):
    torch.set_float32_matmul_precision("highest")  # fp32 products in fp32
    op = gg.Gemm(gg.library.bias, grad_accum=True)
    weight = torch.nn.Parameter(torch.randn(136, 72, device="cuda", dtype=dtype))
    weight.main_grad = torch.zeros(136, 72, device="cuda")
    want = torch.zeros(136, 72, device="cuda", dtype=torch.float64)
    for rows in (200, 64):
        x = torch.randn(rows, 72, device="cuda", dtype=dtype)
        cotangent = torch.randn(rows, 136, device="cuda", dtype=dtype)
        gg.linear(x, weight, op, bias=torch.zeros(136, device="cuda", dtype=dtype)).backward(cotangent)
        want += cotangent.double().t() @ x.double()
    assert weight.grad is None
    assert (weight.main_grad - want).norm() < 1e-5 * want.norm()  # fp32 sums, where bf16 gradients would be 1e-3 away
