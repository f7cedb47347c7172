"""Lines of the contract that no other test shows; README lists them all."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gemmgen as gg
from gemmgen import ops
from gemmgen.arch import arch_of_capability
from gemmgen.errors import NoBackward, OperandError, TraceError
from tests.oracle import integers

ROOT = Path(__file__).parents[2]
M, N, K = 6, 10, 4


@gg.epilogue
def bias_gelu(accum: gg.Value, bias: gg.Row) -> gg.Value:
    return gg.gelu(accum + bias)


@gg.epilogue
def two(accum: gg.Value) -> tuple[gg.Value, ...]:
    return accum, accum + 1


# Names


KEYWORDS = ["arch", "backward", "configs", "most", "rounds", "given", "self", "x", "first", "A", "operands"]


@pytest.mark.parametrize("name", KEYWORDS)
def test_operands_named_as_keywords_of_methods(name):
    scope: dict[str, object] = {"gg": gg}
    exec(f"def named(accum, {name}: gg.Row): return accum + {name}", scope)
    op = gg.Gemm(gg.epilogue(scope["named"]))
    A, B, row = integers(M, K), integers(K, N), integers(N)
    meta = [torch.empty_like(t, device="meta") for t in (A, B, row)]
    assert "fused" in op.explain(meta[0], meta[1], {name: meta[2]}, arch="sm90")
    assert "gemmgen_functor_0" in op.source(meta[0], meta[1], {name: meta[2]}, arch="sm90")
    layer = gg.nn.Linear(K, N, bias=False, epilogue=op)
    torch.testing.assert_close(layer(A, {name: row}), A @ layer.weight.t() + row)
    if name != "self":  # torch.nn.Module.__call__ takes that one
        assert torch.equal(layer(A, {name: row}), layer(A, **{name: row}))


# Extents


@pytest.mark.parametrize("M, N, K, L", [(2**31, 8, 8, ()), (8, 2**31, 8, ()), (8, 8, 2**31, ()), (1, 1, 1, (2**31,))])
def test_extents_beyond_32_bits_are_refused(M, N, K, L):
    A = torch.empty((), dtype=torch.bfloat16, device="meta").expand(*L, M, K)
    B = torch.empty((), dtype=torch.bfloat16, device="meta").expand(*L, K, N)
    bias = torch.empty((), device="meta").expand(N)
    with pytest.raises(gg.UnsupportedOp, match=r"2\^31 or more"):
        gg.Gemm(bias_gelu).explain(A, B, arch="sm90", bias=bias)


@gg.epilogue
def every_kind(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, alpha: gg.Scalar):
    value = gg.tanh(accum * alpha + row) * col + tile
    return {"D": value, "over_m": gg.sum(value, over="M"), "over_n": gg.sum(value, over="N"),
            "largest": gg.amax(value, over="M")}  # fmt: skip


def by_torch(A, B, row, col, tile, alpha):
    value = torch.tanh(A @ B * alpha + row) * col.unsqueeze(-1) + tile
    return value, value.sum(-2), value.sum(-1)


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("M, N, K", list(itertools.product((0, 1, 3), repeat=3)), ids=str)
def test_extents_of_0_and_1_forward_and_backward(M, N, K, lead):
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, dtype=torch.float64).requires_grad_()

    leaves = [leaf(M, K), leaf(K, N), leaf(N), leaf(M), leaf(M, N), leaf() if lead else torch.randn(()).double()]
    theirs = by_torch(*leaves[:2], leaves[2].unsqueeze(-2), *leaves[3:5], leaves[5].view(*lead, 1, 1))
    A, B, *operands = leaves
    ours = list(gg.Gemm(every_kind)(A, B, **dict(zip(("row", "col", "tile", "alpha"), operands, strict=True))).values())
    assert torch.equal(ours[3], theirs[0].detach().amax(-2) if M else torch.full((*lead, N), -torch.inf).double())
    trained = [x for x in leaves if x.requires_grad]
    for mine, want in zip(ours[:3], theirs, strict=True):
        torch.testing.assert_close(mine, want)
    for mine, want in zip(*(torch.autograd.grad(sum(x.sum() for x in xs[:3]), trained) for xs in (ours, theirs)),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(mine, want)


# out=


@pytest.mark.parametrize("first, second", [
    (lambda buffer: buffer[:, :N], lambda buffer: buffer[:, N - 1 : 2 * N - 1]),
    (lambda buffer: buffer[:M, :N], lambda buffer: buffer[1 : M + 1, :N]),
    (lambda buffer: buffer[:, : 2 * N : 2], lambda buffer: buffer[:, 2 : 2 * N + 2 : 2]),
    (lambda buffer: buffer[:M, :N], lambda buffer: buffer.flatten()[: M * N].view(N, M).t()),
], ids=["columns", "rows", "strided", "transposed"])  # fmt: skip
def test_outs_that_share_an_element_are_refused(first, second):
    buffer = torch.zeros(M + 1, 3 * N)
    outs = first(buffer)[:M], second(buffer)[:M]
    with pytest.raises(OperandError, match="`out0` and out for result `out1` share memory"):
        gg.Gemm(two)(integers(M, K), integers(K, N), out=outs)
    assert not buffer.any()


def test_memory_that_is_not_torchs_is_one_memory():
    """numpy's and dlpack's views of one buffer have a storage each."""
    buffer = torch.zeros(M + 1, N).numpy()
    outs = torch.from_numpy(buffer[:M]), torch.from_numpy(buffer[1:])
    with pytest.raises(OperandError, match="share memory"):
        gg.Gemm(two)(integers(M, K), integers(K, N), out=outs)
    assert not buffer.any()
    assert ops._overlaps(outs[1], outs[:1]) and not ops._overlaps(outs[1], [torch.from_numpy(buffer[:1])])


def test_outs_that_are_parts_of_one_buffer_are_written():
    A, B, buffer = integers(M, K), integers(K, N), torch.zeros(M, 2 * N)
    for outs in [(buffer[:, :N], buffer[:, N:]), (buffer[:, ::2], buffer[:, 1::2]),
                 tuple(buffer.flatten().view(2, M, N))]:  # fmt: skip
        buffer.zero_()
        gg.Gemm(two)(A, B, out=outs)
        assert torch.equal(outs[0], A @ B) and torch.equal(outs[1], A @ B + 1)


# Tracers


def test_out_is_functionalised():
    op = gg.Gemm(two)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def doubled(A: Tensor, B: Tensor, first: Tensor, second: Tensor) -> Tensor:
        first.add_(1)
        op(A, B, out=(first, second))
        return first * 2 + second

    A, B, first, second = integers(M, K), integers(K, N), torch.zeros(M, N), torch.zeros(M, N)
    assert torch.equal(doubled(A, B, first, second), A @ B * 3 + 1)
    assert torch.equal(first, A @ B) and torch.equal(second, A @ B + 1)


def test_modules_are_leaves_of_torch_fx():
    model = torch.nn.Sequential(gg.nn.MLP(8, 16, bias_gelu), gg.nn.Linear(8, 4, epilogue=bias_gelu))
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    x = torch.randn(2, 3, 8)
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("module", [gg.nn.MLP(8, 16, bias_gelu), gg.nn.Linear(8, 4)], ids=["MLP", "Linear"])
def test_torch_fx_cannot_look_into_a_module_and_says_what_can(module):
    with pytest.raises(TraceError, match=r"torch\.nn\.Sequential\(module\), or use torch\.export"):
        torch.fx.symbolic_trace(module)


def test_torch_fx_around_a_call_is_refused_with_the_way_out():
    with pytest.raises(OperandError, match=r"torch\.fx\.wrap"):
        torch.fx.symbolic_trace(lambda x: gg.linear(x, torch.ones(N, K), gg.Gemm(bias_gelu), bias=torch.ones(N)))


def test_compiled_gradients_of_trainable_parameters():
    layer = gg.nn.Linear(K, N, epilogue=bias_gelu)
    parameters, x = dict(layer.named_parameters()), torch.randn(M, K)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).sum()

    gradients = torch.func.grad(loss)
    compiled = torch.compile(gradients, backend="aot_eager")(parameters, x)
    for name, gradient in gradients(parameters, x).items():
        torch.testing.assert_close(compiled[name], gradient)
    with pytest.raises(NoBackward, match="no derivative itself"):  # which is one's own only to differentiate
        compiled["weight"].sum().backward()


# Toolchain, processes


def test_a_gpu_newer_than_any_known_arch_is_refused_with_the_way_out():
    with pytest.raises(gg.UnsupportedArch, match=r"B9000 has compute capability 13\.0(.|\n)*move the tensors to the"):
        arch_of_capability((13, 0), "B9000")


def test_no_text_reaches_a_shell():
    for path in (ROOT / "gemmgen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.keyword) and node.arg == "shell"), path
            assert not (isinstance(node, ast.Attribute) and node.attr in ("system", "popen", "getoutput")), path


def test_names_never_reach_a_path_or_a_command():
    def fn(accum):
        return accum

    fn.__name__ = "../../$(touch pwned); `touch pwned`"
    A = torch.empty(64, 64, device="meta", dtype=torch.bfloat16)
    text = gg.Gemm(gg.epilogue(fn)).source(A, A, arch="sm90")
    assert not re.search(r"[$;`]\s*touch", text)


# README


def test_every_test_that_readme_names_exists():
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## What you can rely on")[2].partition("\n## ")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", section)
    assert len(named) > 40
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not test or test in functions, f"{file}::{test}"


def test_every_promise_in_readme_names_a_test():
    section = (ROOT / "README.md").read_text().partition("## What you can rely on")[2].partition("\n## ")[0]
    promises = re.findall(r"^\* .*?(?=^\* |^\*\*|\Z)", section, re.MULTILINE | re.DOTALL)
    assert len(promises) > 25
    for promise in promises:
        assert "`tests/" in promise, promise
