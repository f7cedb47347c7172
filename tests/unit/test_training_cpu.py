"""Gradients of the op on the CPU: right, only those asked for, through every part of torch that takes derivatives."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gemmgen as gg
from gemmgen import library, training
from gemmgen.chain import ChainOp
from gemmgen.dtypes import DType
from gemmgen.evaluate import evaluate
from gemmgen.ir import Graph
from gemmgen.ops import registered
from gemmgen.runtime import Options
from gemmgen.training import Stage, differentiable
from tests.strategies import KINDS, SHAPES, L, M, N, epilogues, inputs

K = 5
LIBRARY = [value for value in vars(library).values() if isinstance(value, gg.Epilogue)]


@gg.epilogue
def kitchen(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, alpha: gg.Scalar):
    value = gg.silu(accum * alpha + row) * col + tile
    reductions = {"peaks": gg.max(value, over="N"), "total": gg.amax(value, over="MN")}
    return {"D": value, "sums": gg.sum(value, over="M"), **reductions}


@gg.epilogue
def quantised(accum, bias: gg.Row):
    return (accum + bias).to(torch.int8)


@gg.epilogue
def with_mask(accum, bias: gg.Row):
    value = gg.gelu(accum + bias)
    return {"D": value, "mask": (value > 0).to(torch.int8), "index": gg.row_index().float()}


def leaf(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def operands_of(epilogue: gg.Epilogue, lead: tuple[int, ...] = (), grad: bool = True) -> dict[str, Tensor]:
    shapes = {"row": (N,), "col": (M,), "tile": (M, N), "scalar": ()}
    kinds = {p.name: next(k for k, axes in KINDS.items() if axes is p.axes) for p in gg.Gemm(epilogue)._parameters}
    return {name: leaf(*lead, *shapes[kind], grad=grad) for name, kind in kinds.items()}


def by_composition(graph: Graph, A: Tensor, B: Tensor, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results in float64 by torch ops that autograd follows."""
    return evaluate(graph, A @ B, operands, {r.name: None for r in graph.results}, torch.float64)


def assert_same(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def loss_of(results, seed: int = 0) -> Tensor:
    """A random projection of all that is differentiable."""
    generator = torch.Generator().manual_seed(seed)
    listed = list(results.values()) if isinstance(results, dict) else results
    listed = [listed] if isinstance(listed, Tensor) else list(listed)
    total = torch.zeros((), dtype=torch.float64)
    for result in listed:
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        if result.requires_grad:
            total = total + (result * weights).sum()
    return total


# Right


@pytest.mark.parametrize("save", ["auto", "recompute"])
@pytest.mark.parametrize("lead", [(), (L,)], ids=["plain", "batched"])
@pytest.mark.parametrize("epilogue", [*LIBRARY, kitchen], ids=lambda e: e.name)
def test_gradcheck(epilogue, lead, save):
    torch.manual_seed(0)
    op, operands = gg.Gemm(epilogue, save=save), operands_of(epilogue, lead)
    names = list(operands)

    def call(A, B, *values):
        results = op(A, B, **dict(zip(names, values, strict=True)))
        return tuple(results.values()) if isinstance(results, dict) else results

    assert torch.autograd.gradcheck(call, (leaf(*lead, M, K), leaf(*lead, K, N), *operands.values()))


@settings(max_examples=120)
@given(graph=epilogues(), seed=st.integers(0, 1000), save=st.sampled_from(["auto", "recompute"]))
def test_random_epilogues_match_torchs_autograd(graph, seed, save):
    op = differentiable({DType.F32: graph, DType.I32: graph}, save=save)
    A, shaped = inputs(seed)
    A, B = A.requires_grad_(), torch.eye(N, dtype=torch.float64).expand(L, N, N).clone().requires_grad_()
    shaped = {name: value.requires_grad_() for name, value in shaped.items()}
    flat = {name: value.reshape([e for e, f in zip(SHAPES[KINDS[name]], (L, M, N), strict=True) if e == f])
            for name, value in shaped.items()}  # fmt: skip
    returned = op.overload(A, B, *op.flat_operands(flat))
    results = [returned] if isinstance(returned, Tensor) else returned
    expected = by_composition(graph, A, B, shaped)
    loss = torch.zeros((), dtype=torch.float64)
    want = torch.zeros((), dtype=torch.float64)
    for result, name in zip(results, expected, strict=True):
        if result.requires_grad:
            weights = torch.randint(-8, 9, result.shape).double() / 4  # exact in the dtype of any cotangent
            loss = loss + (result.double() * weights).sum()
            want = want + (expected[name].reshape(result.shape) * weights).sum()
    if loss.requires_grad:
        leaves = [A, B, *shaped.values()]
        got = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        assert_same(got, torch.autograd.grad(want, leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("wanted", [("A",), ("B",), ("row",), ("col", "alpha"), ("tile", "B"), ("A", "row", "alpha")])
def test_any_subset_of_gradients(wanted):
    torch.manual_seed(0)
    op = gg.Gemm(kitchen)
    leaves = {"A": leaf(M, K), "B": leaf(K, N), "row": leaf(N), "col": leaf(M), "tile": leaf(M, N), "alpha": leaf(1)}
    full = torch.autograd.grad(loss_of(op(leaves["A"], leaves["B"], **_operands(leaves))), list(leaves.values()))
    expected = dict(zip(leaves, full, strict=True))
    some = {name: value.detach().requires_grad_(name in wanted) for name, value in leaves.items()}
    got = torch.autograd.grad(loss_of(op(some["A"], some["B"], **_operands(some))), [some[name] for name in wanted])
    assert_same(got, [expected[name] for name in wanted])


def _operands(leaves):
    return {name: value for name, value in leaves.items() if name not in ("A", "B")}


@pytest.mark.parametrize("results", [("D",), ("sums",), ("peaks", "total"), ("D", "total")])
def test_cotangents_of_some_results(results):
    torch.manual_seed(0)
    op = gg.Gemm(kitchen)
    A, B, operands = leaf(M, K), leaf(K, N), operands_of(kitchen)
    returned = op(A, B, **operands)
    graph = op._op.graph
    shaped = {"row": operands["row"], "col": operands["col"][:, None], "tile": operands["tile"]}
    composed = by_composition(graph, A[None], B, {**shaped, "alpha": operands["alpha"]})
    leaves = [A, B, *operands.values()]
    got = torch.autograd.grad(loss_of([returned[name] for name in results]), leaves)
    want = loss_of([composed[name].reshape(returned[name].shape) for name in results])
    assert_same(got, torch.autograd.grad(want, leaves, allow_unused=True, materialize_grads=True))


COTANGENTS = {
    "contiguous": torch.randn_like,
    "expanded": lambda D: torch.ones((), dtype=D.dtype).expand_as(D),
    "rows_shared": lambda D: torch.randn(D.shape[-1], dtype=D.dtype).expand_as(D),
    "columns_shared": lambda D: torch.randn(*D.shape[:-1], 1, dtype=D.dtype).expand_as(D),
    "transposed": lambda D: torch.randn_like(D.mT).mT,
    "strided": lambda D: torch.randn(*D.shape[:-1], 2 * D.shape[-1], dtype=D.dtype)[..., ::2],
    "misaligned": lambda D: torch.randn(D.numel() + 1, dtype=D.dtype)[1:].view(D.shape),
}


@pytest.mark.parametrize("layout", COTANGENTS)
@pytest.mark.parametrize("epilogue", [library.bias, library.bias_silu_residual], ids=lambda e: e.name)
def test_cotangents_of_any_layout(epilogue, layout):
    torch.manual_seed(0)
    op, operands = gg.Gemm(epilogue), operands_of(epilogue)
    leaves = [leaf(M, K), leaf(K, N), *operands.values()]
    D = op(*leaves[:2], **operands)
    cotangent = COTANGENTS[layout](D)
    want = torch.autograd.grad(D, leaves, cotangent.contiguous(), retain_graph=True)
    assert_same(torch.autograd.grad(D, leaves, cotangent), want)


@pytest.mark.parametrize("m, n, k, lead", [(0, 4, 3, ()), (3, 0, 4, ()), (3, 4, 0, ()), (3, 4, 2, (0,))], ids=str)
def test_empty_problems(m, n, k, lead):
    op = gg.Gemm(library.bias_gelu)
    A, B, bias = leaf(*lead, m, k), leaf(k, n), leaf(n)
    D = op(A, B, bias=bias)
    D.sum().backward()
    expected = torch.nn.functional.gelu(A.detach() @ B.detach() + (b := bias.detach().requires_grad_()))
    expected.sum().backward()
    assert A.grad.shape == A.shape and not A.grad.abs().sum() and not B.grad.abs().sum()
    assert_same([bias.grad], [b.grad])


def test_a_batch_shared_by_matrices_and_operands_is_summed():
    torch.manual_seed(0)
    op = gg.Gemm(kitchen)
    A, B = leaf(L, M, K), leaf(K, N)
    operands = {"row": leaf(N), "col": leaf(L, M), "tile": leaf(M, N), "alpha": leaf()}
    each = [op(a, B, **{**operands, "col": col}) for a, col in zip(A, operands["col"], strict=True)]
    want = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    leaves = [A, B, *operands.values()]
    got = op(A, B, **operands)
    assert_same(torch.autograd.grad(loss_of(got), leaves), torch.autograd.grad(loss_of(want), leaves))


def test_several_batch_dimensions():
    torch.manual_seed(0)
    op = gg.Gemm(library.bias_silu_residual)
    A, B, bias, residual = leaf(2, 3, M, K), leaf(3, K, N), leaf(N), leaf(2, 3, M, N)
    want = torch.nn.functional.silu(A @ B + bias) + residual
    leaves = [A, B, bias, residual]
    got = op(A, B, bias=bias, residual=residual)
    assert_same(torch.autograd.grad(loss_of(got), leaves), torch.autograd.grad(loss_of(want), leaves))


# Only what is needed


def saved_by(fn) -> list[Tensor]:
    """What autograd keeps of a call."""
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        fn()
    return packed


def test_what_the_backward_does_not_read_is_not_kept():
    A, B, bias, residual = leaf(M, K), leaf(K, N), leaf(N), leaf(M, N)
    op = gg.Gemm(library.bias_silu_residual)
    saved = saved_by(lambda: op(A, B, bias=bias, residual=residual))
    assert sum(t.numel() for t in saved) == M * K + K * N + M * N  # A, B and the preactivation

    saved = saved_by(lambda: op(A, B.detach(), bias=bias.detach(), residual=residual))
    assert sum(t.numel() for t in saved) == K * N + M * N

    saved = saved_by(lambda: gg.Gemm(library.bias)(A.detach(), B.detach(), bias=bias))
    assert sum(t.numel() for t in saved) == 0


def test_recompute_keeps_the_inputs_alone():
    A, B, bias = leaf(M, K), leaf(K, N), leaf(N)
    saved = saved_by(lambda: gg.Gemm(library.bias_gelu, save="recompute")(A, B, bias=bias))
    assert sum(t.numel() for t in saved) == M * K + K * N + N


def test_nothing_is_kept_under_no_grad():
    A, B, bias = leaf(M, K), leaf(K, N), leaf(N)
    with torch.no_grad():
        assert not saved_by(lambda: gg.Gemm(library.bias_gelu)(A, B, bias=bias))
        assert not gg.Gemm(library.bias_gelu)(A, B, bias=bias).requires_grad


def test_the_gradient_of_a_transposed_weight_has_its_memory_order():
    weight, x, bias = leaf(N, K), leaf(M, K), leaf(N)
    gg.linear(x, weight, gg.Gemm(library.bias), bias=bias).sum().backward()
    assert weight.grad.stride() == weight.stride()
    B = weight.detach().t().requires_grad_()
    (grad,) = torch.autograd.grad(gg.Gemm(library.bias)(x, B, bias=bias).sum(), B)
    assert grad.stride() == B.stride()


def test_changing_a_saved_tensor_in_place_is_caught():
    op = gg.Gemm(library.bias_relu)
    A, B, bias = leaf(M, K), leaf(K, N), leaf(N)
    for change in ("A", "D"):
        A_used = A.clone()
        D = op(A_used, B, bias=bias)
        loss = D.sum()
        with torch.no_grad():
            (A_used if change == "A" else D).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_changing_an_operand_that_the_backward_does_not_read_is_free():
    A, B, bias, residual = leaf(M, K), leaf(K, N), leaf(N), leaf(M, N)
    used = residual.clone()
    loss = gg.Gemm(library.bias_silu_residual)(A, B, bias=bias, residual=used).sum()
    with torch.no_grad():
        used.zero_()
        bias.zero_()
    loss.backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))


# Refused, or without a gradient


def test_results_that_have_no_derivative_do_not_require_one():
    A, B, bias = leaf(M, K), leaf(K, N), leaf(N)
    quantity = gg.Gemm(quantised)(A, B, bias=bias)
    assert quantity.dtype == torch.int8 and not quantity.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        quantity.double().sum().backward()
    results = gg.Gemm(with_mask)(A, B, bias=bias)
    assert [result.requires_grad for result in results.values()] == [True, False, False]
    results["D"].sum().backward()


def test_the_plan_of_an_epilogue_without_derivative_names_the_line():
    with pytest.raises(gg.NoBackward, match=r"(?s)stored as i8.*quantised.*test_training_cpu\.py"):
        gg.Gemm(quantised).explain(backward=True)


SECOND = {
    "bias": lambda A, B, bias: gg.Gemm(library.bias)(A, B, bias=bias),
    "gelu": lambda A, B, bias: gg.Gemm(library.bias_gelu)(A, B, bias=bias),
    "recompute": lambda A, B, bias: gg.Gemm(library.bias_gelu, save="recompute")(A, B, bias=bias),
    "chain": lambda A, B, bias: gg.chain(gg.Gemm(library.bias), gg.Gemm(library.bias_gelu))(
        A, B, torch.eye(N, dtype=B.dtype), first={"bias": bias}, second={"bias": bias}
    ),
}


@pytest.mark.parametrize("call", SECOND)
@pytest.mark.parametrize("towards", ["A", "B", "bias"])
@pytest.mark.parametrize("frozen", [(), ("A",), ("B",), ("bias",), ("A", "B")], ids=lambda f: "+".join(f) or "none")
def test_a_second_derivative_is_refused_and_never_wrong(call, towards, frozen):
    if towards in frozen:
        frozen = tuple(name for name in frozen if name != towards)
    leaves = {"A": leaf(M, K), "B": leaf(K, N), "bias": leaf(N)}
    leaves = {name: value.detach() if name in frozen else value for name, value in leaves.items()}
    loss = loss_of(SECOND[call](*leaves.values()))
    wanted = [value for value in leaves.values() if value.requires_grad]
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    with pytest.raises(gg.NoBackward, match="first derivatives"):
        torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves[towards])


class Calls(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted, count", [("AB", 2), ("A", 1), ("B", 1), ("", 0)])
def test_dgrad_and_wgrad_are_calls_of_one_op_as_far_as_wanted(wanted, count):
    A, B, bias = leaf(M, K, grad="A" in wanted), leaf(K, N, grad="B" in wanted), leaf(N)
    D = gg.Gemm(library.bias)(A, B, bias=bias)
    with Calls() as calls:
        D.sum().backward()
    assert sum(name.startswith("gemmgen.bias_grad_") for name in calls.names) == count
    assert not any(name.startswith(("aten.mm", "aten.bmm")) for name in calls.names)


def test_epilogues_named_as_parts_of_another_ones_backward_are_ops_of_their_own():
    def part(accum):
        return gg.relu(accum)

    def part_grad(accum):
        return accum

    A, B = leaf(M, K), leaf(K, N)
    gg.Gemm(gg.epilogue(part))(A, B).sum().backward()
    (dA,) = torch.autograd.grad(gg.Gemm(gg.epilogue(part_grad))(A, B).sum(), [A])
    assert_same([dA], [torch.ones(M, N, dtype=dA.dtype) @ B.detach().t()])


def test_dgrad_and_wgrad_are_chosen_by_the_options_of_the_gemm():
    config = gg.GemmConfig("sm90", (128, 128, 64))
    for chosen in (Options(tune="first-call"), Options(compile="background"), Options(config, grad_accum=True)):
        op = gg.Gemm(library.bias_relu, config=chosen.config, tune=chosen.tune, compile=chosen.compile,
                     grad_accum=chosen.grad_accum)  # fmt: skip
        gemms = training.gemms_of_backward(op._op, leaf(M, K), leaf(K, N))
        for gemm, _, _ in gemms.values():
            assert gemm.runner.options == replace(chosen, config=None, grad_accum=False)


def test_explain_says_what_runs_dgrad_and_wgrad():
    op = gg.Gemm(library.bias_gelu)
    A, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 1024), (2048, 1024)))
    bias = torch.empty(2048, dtype=torch.bfloat16, device="meta")
    text = op.explain(A, weight.t(), arch="sm90", backward=True, bias=bias)
    assert "dgrad: (M, N, K, L) = (512, 1024, 2048, 1), torch's own op, torch.mm: by the model" in text
    assert "wgrad: (M, N, K, L) = (2048, 1024, 512, 1), torch's own op, torch.mm: by the model" in text
    assert "GEMMs on d_accum" in op.explain(backward=True)
    batched = (x.expand(3, *x.shape).clone() for x in (A, weight.t()))
    text = op.explain(*batched, arch="sm90", backward=True, bias=bias)
    assert "dgrad: (M, N, K, L) = (512, 1024, 2048, 3), torch's own op, torch.bmm" in text
    empty = op.explain(A[:0], weight.t(), arch="sm90", backward=True, bias=bias)
    assert empty.count("nothing to multiply") == 2


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 2), (torch.float32, 4), (torch.int8, 2)], ids=str)
def test_explain_weighs_saved_tiles_in_the_dtype_of_a(dtype, size):
    A, B = (torch.empty(64, 64, dtype=dtype, device="meta") for _ in range(2))
    bias = torch.empty(64, device="meta")
    text = gg.Gemm(library.bias_gelu).explain(A, B, arch="sm90", backward=True, bias=bias)
    assert f"saved: {size} bytes per element, stored by the forward kernel" in text


def test_explain_of_a_chain_says_what_its_dgrad_gemm_carries():
    gelu, add, quantise = gg.Gemm(library.bias_gelu), gg.Gemm(library.bias), gg.Gemm(quantised)
    text = gg.chain(gelu, add).explain(backward=True)
    carried = "no pass: in the epilogue of the dgrad GEMM of `bias`: d_accum, d_bias (summed over M)"
    assert carried in text.partition("backward of `bias_gelu`")[2]
    assert "saved: 2 bytes per element" in text
    assert "dgrad GEMM of" not in gg.chain(gg.Gemm(library.bias_gelu, save="recompute"), add).explain(backward=True)
    assert "`quantised`: none" in gg.chain(quantise, gg.Gemm(library.int8_dequant_bias)).explain(backward=True)
    with pytest.raises(gg.NoBackward, match="stored as i8"):
        gg.chain(gelu, quantise).explain(backward=True)
    assert gg.chain(gelu, add).explain() == f"{gelu.explain()}\n{add.explain()}"


def test_a_second_derivative_by_torch_func_is_refused():
    B, bias = leaf(K, N, grad=False), leaf(N, grad=False)
    once = torch.func.grad(lambda A: gg.Gemm(library.bias_gelu)(A, B, bias=bias).sum())
    with pytest.raises(gg.NoBackward, match="bias_gelu"):
        torch.func.grad(lambda A: once(A).square().sum())(leaf(M, K, grad=False))


# Through torch


def by_eager(op, A, B, operands):
    leaves = [A, B, *operands.values()]
    return torch.autograd.grad(loss_of(op(A, B, **operands)), leaves)


def _calling(op):
    def call(A, B, **operands):
        return op(A, B, **operands)

    return call


def _compiled(op, A, B, operands):
    torch._dynamo.reset()
    call = torch.compile(_calling(op), fullgraph=True, backend="aot_eager")
    return torch.autograd.grad(loss_of(call(A, B, **operands)), [A, B, *operands.values()])


def _compiled_dynamic(op, A, B, operands):
    torch._dynamo.reset()
    call = torch.compile(_calling(op), fullgraph=True, backend="aot_eager", dynamic=True)
    return torch.autograd.grad(loss_of(call(A, B, **operands)), [A, B, *operands.values()])


def _checkpointed(op, A, B, operands):
    results = checkpoint(lambda A, B, operands: op(A, B, **operands), A, B, operands, use_reentrant=False)
    return torch.autograd.grad(loss_of(results), [A, B, *operands.values()])


def _functional(op, A, B, operands):
    names = list(operands)
    leaves = [x.detach() for x in (A, B, *operands.values())]

    def loss(A, B, *values):
        return loss_of(op(A, B, **dict(zip(names, values, strict=True))))

    return torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*leaves)


WAYS = {
    "compiled": _compiled, "compiled_dynamic": _compiled_dynamic, "checkpointed": _checkpointed,
    "functional": _functional,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("save", ["auto", "recompute"])
@pytest.mark.parametrize("epilogue", [library.bias_gelu_tanh, kitchen], ids=lambda e: e.name)
def test_every_way_gives_the_same_gradients(epilogue, save, way):
    torch.manual_seed(0)
    op, A, B, operands = gg.Gemm(epilogue, save=save), leaf(M, K), leaf(K, N), operands_of(epilogue)
    assert_same(WAYS[way](op, A, B, operands), by_eager(op, A, B, operands))


@pytest.mark.parametrize("epilogue", [library.bias_gelu_tanh, kitchen, quantised, with_mask], ids=lambda e: e.name)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_opcheck(epilogue, grad):
    op, operands = gg.Gemm(epilogue), operands_of(epilogue, grad=grad)
    flat = op._op.flat_operands(operands)
    torch.library.opcheck(op._op.overload, (leaf(M, K, grad=grad), leaf(K, N, grad=grad), *flat))


def test_autocast_casts_the_matrices_and_gradients_come_back_wide():
    op = gg.Gemm(library.bias_gelu)
    A, B, bias = (leaf(*shape, dtype=torch.float32) for shape in ((M, K), (K, N), (N,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        D = op(A, B, bias=bias)
    assert D.dtype == torch.bfloat16
    D.float().sum().backward()
    assert A.grad.dtype == B.grad.dtype == bias.grad.dtype == torch.float32
    low = [A.detach().bfloat16().requires_grad_(), B.detach().bfloat16().requires_grad_()]
    expected = torch.autograd.grad(op(*low, bias=bias).float().sum(), low)
    assert torch.equal(A.grad, expected[0].float()) and torch.equal(B.grad, expected[1].float())


def test_autocast_leaves_other_dtypes_alone():
    op = gg.Gemm(library.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(leaf(M, K), leaf(K, N), bias=leaf(N)).dtype == torch.float64


def test_bf16_gradients_are_rounded_once():
    torch.manual_seed(0)
    op = gg.Gemm(library.bias_gelu)
    leaves = [leaf(*shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N), (N,))]
    loss_of(op(*leaves[:2], bias=leaves[2])).backward()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    eager = [x.detach().requires_grad_() for x in leaves]
    loss_of(torch.nn.functional.gelu(wide[0] @ wide[1] + wide[2])).backward()
    loss_of(torch.nn.functional.gelu(eager[0] @ eager[1] + eager[2])).backward()
    for ours, theirs, want in zip(leaves, eager, wide, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert (ours.grad - want.grad).norm() <= 2 * (theirs.grad - want.grad).norm() + 1e-2 * want.grad.norm()


def test_an_out_dtype_of_its_own():
    torch.manual_seed(0)
    op = gg.Gemm(library.bias_gelu)
    leaves = [leaf(*shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N), (N,))]
    D = op(*leaves[:2], bias=leaves[2], out_dtype=torch.float32)
    assert D.dtype == torch.float32
    D.square().sum().backward()
    low = [x.detach().requires_grad_() for x in leaves]
    op(*low[:2], bias=low[2]).float().square().sum().backward()
    for wide, narrow in zip(leaves, low, strict=True):
        assert wide.grad.dtype == torch.bfloat16
        torch.testing.assert_close(wide.grad, narrow.grad, rtol=0.05, atol=0.05)


def test_gemms_of_the_backward_take_the_options_of_the_op_but_its_config():
    from gemmgen import ops

    config = gg.GemmConfig("sm90", (128, 128, 64))
    op1 = gg.Gemm(library.bias_silu, config=config, compile="background")
    chain = gg.chain(op1, gg.Gemm(library.bias))
    bias = {"bias": leaf(N)}
    chain(leaf(M, K), leaf(K, N), leaf(N, N), first=bias, second=bias).sum().backward()
    options = {name: op.runner.options for name, op in ops._ops.items() if isinstance(op, ops.EpilogueOp)}
    of_dgrad = [o for name, o in options.items() if name.startswith("bias_silu_dgrad") and o.compile == "background"]
    of_forward = [o for name, o in options.items() if name.startswith("bias_silu_train") and o.config == config]
    assert [o.config for o in of_dgrad] == [None] and len(of_forward) == 1


# Chains


FIRSTS = [
    library.bias, library.bias_relu, library.bias_gelu_tanh, library.bias_silu_residual,
    library.scale_bias_gelu_residual, library.int8_dequant_bias, library.bias_relu_column_sums,
]  # fmt: skip
PAIRS = list(itertools.product(FIRSTS, [library.bias, kitchen]))


def chain_inputs(first: gg.Epilogue, second: gg.Epilogue, lead: tuple[int, ...] = ()):
    return leaf(*lead, M, K), leaf(K, N), operands_of(first, lead), leaf(N, N), operands_of(second, lead)


def one_after_the_other(op1, op2, A, B1, operands1, B2, operands2):
    h = op1(A, B1, **operands1)
    return op2(h["D"] if isinstance(h, dict) else h, B2, **operands2)


@pytest.mark.parametrize("save", ["auto", "recompute"])
@pytest.mark.parametrize("first, second", PAIRS, ids=lambda e: e.name)
def test_a_chain_is_the_composition(first, second, save):
    torch.manual_seed(0)
    op1, op2 = gg.Gemm(first, save=save), gg.Gemm(second)
    A, B1, operands1, B2, operands2 = chain_inputs(first, second)
    leaves = [A, B1, B2, *operands1.values(), *operands2.values()]
    got = gg.chain(op1, op2)(A, B1, B2, first=operands1, second=operands2)
    want = one_after_the_other(op1, op2, A, B1, operands1, B2, operands2)
    assert_same(torch.autograd.grad(loss_of(got), leaves), torch.autograd.grad(loss_of(want), leaves))


@pytest.mark.parametrize("lead", [(L,), (2, 3)], ids=str)
def test_a_chain_of_batches(lead):
    torch.manual_seed(0)
    op1, op2 = gg.Gemm(library.bias_silu_residual), gg.Gemm(library.bias_silu_residual)
    A, B1, B2, bias1, bias2 = leaf(*lead, M, K), leaf(K, N), leaf(*lead[-1:], N, N), leaf(N), leaf(*lead, N)
    first, second = {"bias": bias1, "residual": leaf(*lead, M, N)}, {"bias": bias2, "residual": leaf(*lead, M, N)}
    leaves = [A, B1, B2, *first.values(), *second.values()]
    got = gg.chain(op1, op2)(A, B1, B2, first=first, second=second)
    want = op2(op1(A, B1, **first), B2, **second)
    assert_same([got], [want])
    assert_same(torch.autograd.grad(loss_of(got), leaves), torch.autograd.grad(loss_of(want), leaves))


@settings(max_examples=60)
@given(one=epilogues(casts=False), two=epilogues(casts=False), seed=st.integers(0, 1000), data=st.data())
def test_chains_of_random_epilogues_match_the_composition(one, two, seed, data):
    tiles = [r for r in one.results if not r.is_reduction and r.dtype is None]  # op2's B has A's dtype
    if not tiles:
        return
    one = Graph("one", one.accum, one.parameters, tuple(tiles[:1]), "single")
    op1, op2 = (differentiable({DType.F32: graph, DType.I32: graph}) for graph in (one, two))
    name = f"test_{op1.name}_{op2.name}"
    chain = registered(name, ChainOp, lambda: ChainOp(name, (Stage(op1, "auto"), Stage(op2, "auto"))))
    torch.manual_seed(seed)
    named = [{"row": leaf(L, N), "col": leaf(L, M), "tile": leaf(M, N), "scalar": leaf(L)} for _ in range(2)]
    A, B1, B2 = leaf(L, M, N), leaf(N, N), leaf(L, N, N)
    frozen = data.draw(st.sets(st.sampled_from(range(11))))
    leaves = [A, B1, *named[0].values(), B2, *named[1].values()]
    for at in frozen:
        leaves[at].requires_grad_(False)
    wanted = [x for x in leaves if x.requires_grad]
    flat1, flat2 = op1.flat_operands(named[0]), op2.flat_operands(named[1])
    got = loss_of(chain.overload(A, B1, *flat1, B2, *flat2))
    want = loss_of(op2.overload(op1.overload(A, B1, *flat1), B2, *flat2))
    assert got.requires_grad == want.requires_grad
    if got.requires_grad:
        ours = torch.autograd.grad(got, wanted, allow_unused=True, materialize_grads=True)
        theirs = torch.autograd.grad(want, wanted, allow_unused=True, materialize_grads=True)
        for mine, other in zip(ours, theirs, strict=True):
            scale = max(1.0, float(other.detach().abs().nan_to_num(0, 0, 0).max()) if other.numel() else 1.0)
            torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9 * scale, equal_nan=True)


def test_the_gradient_between_is_computed_in_the_dgrad_gemm(monkeypatch):
    from gemmgen import training

    seen = []
    monkeypatch.setattr(training, "_dgrad", lambda *args: seen.append(args) or torch.zeros(M, K, dtype=torch.float64))
    op1, op2 = gg.Gemm(library.bias_gelu), gg.Gemm(library.bias)
    A, B1, operands1, B2, operands2 = chain_inputs(library.bias_gelu, library.bias)
    loss_of(gg.chain(op1, op2)(A, B1, B2, first=operands1, second=operands2)).backward()
    assert len(seen) == 1  # that of the first op


def test_a_chain_through_integers_differentiates_the_second_op():
    op1, op2 = gg.Gemm(quantised), gg.Gemm(library.int8_dequant_bias)
    A, B1, bias = leaf(M, K), leaf(K, N), leaf(N)
    B2 = torch.randint(-5, 5, (N, N), dtype=torch.int8)
    operands = {"scale_a": leaf(M), "scale_b": leaf(N), "bias": leaf(N)}
    D = gg.chain(op1, op2)(A, B1, B2, first={"bias": bias}, second=operands)
    D.float().sum().backward()
    assert A.grad is None or not A.grad.any()
    assert all(value.grad is not None for value in operands.values())


def test_a_chain_with_the_first_frozen_saves_nothing_of_it():
    op1, op2 = gg.Gemm(library.bias_gelu), gg.Gemm(library.bias)
    A, B1, operands1, B2, operands2 = chain_inputs(library.bias_gelu, library.bias)
    frozen = {name: value.detach() for name, value in operands1.items()}
    saved = saved_by(lambda: gg.chain(op1, op2)(A.detach(), B1.detach(), B2, first=frozen, second=operands2))
    assert sum(t.numel() for t in saved) == M * N  # what lies between


@pytest.mark.parametrize("way", ["compiled", "compiled_dynamic", "checkpointed", "functional"])
def test_every_way_gives_the_same_gradients_of_a_chain(way):
    torch.manual_seed(0)
    chain = gg.chain(gg.Gemm(library.bias_gelu_tanh), gg.Gemm(library.bias_silu_residual))
    A, B1, operands1, B2, operands2 = chain_inputs(library.bias_gelu_tanh, library.bias_silu_residual)

    def op(A, B1, B2, bias1, bias2, residual):
        return chain(A, B1, B2, first={"bias": bias1}, second={"bias": bias2, "residual": residual})

    operands = {"B2": B2, "bias1": operands1["bias"], "bias2": operands2["bias"], "residual": operands2["residual"]}
    assert_same(WAYS[way](op, A, B1, operands), by_eager(op, A, B1, operands))


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_opcheck_of_a_chain(grad):
    chain = gg.chain(gg.Gemm(library.bias_gelu_tanh), gg.Gemm(kitchen))
    flat1 = chain._op.flat(0, operands_of(library.bias_gelu_tanh, grad=grad))
    flat2 = chain._op.flat(1, operands_of(kitchen, grad=grad))
    A, B1, B2 = (leaf(*shape, grad=grad) for shape in ((M, K), (K, N), (N, N)))
    torch.library.opcheck(chain._op.overload, (A, B1, *flat1, B2, *flat2))


def test_gradcheck_of_a_chain():
    chain = gg.chain(gg.Gemm(library.bias_silu_residual), gg.Gemm(kitchen))
    first, second = operands_of(library.bias_silu_residual), operands_of(kitchen)

    def call(A, B1, B2, *values):
        results = chain(A, B1, B2, first=dict(zip(first, values, strict=False)),
                        second=dict(zip(second, values[len(first) :], strict=True)))  # fmt: skip
        return tuple(results.values())

    values = (*first.values(), *second.values())
    assert torch.autograd.gradcheck(call, (leaf(M, K), leaf(K, N), leaf(N, N), *values))


def test_a_chain_computes_and_returns_what_its_second_op_returns():
    chain = gg.chain(gg.Gemm(library.bias_relu_column_sums), gg.Gemm(kitchen))
    results = chain(leaf(M, K), leaf(K, N), leaf(N, N), first=operands_of(library.bias_relu_column_sums),
                    second=operands_of(kitchen), out_dtype=torch.float32)  # fmt: skip
    assert list(results) == ["D", "sums", "peaks", "total"] and results["D"].dtype == torch.float32


def test_bad_chains_are_refused():
    @gg.epilogue
    def two_tiles(accum):
        return {"one": accum, "two": -accum}

    with pytest.raises(gg.TraceError, match="name one of them `D`"):
        gg.chain(gg.Gemm(two_tiles), gg.Gemm(library.bias))
    chain = gg.chain(gg.Gemm(library.bias), gg.Gemm(library.bias))
    bias = {"bias": leaf(N)}
    with pytest.raises(gg.ShapeMismatch, match="one after the other"):
        chain(leaf(M, K), leaf(K, N), leaf(L, N, N), first=bias, second=bias)
    with pytest.raises(gg.ShapeMismatch, match="K is"):
        chain(leaf(M, K), leaf(K, N), leaf(N + 1, N), first=bias, second=bias)
    with pytest.raises(gg.OperandError, match="missing: bias"):
        chain(leaf(M, K), leaf(K, N), leaf(N, N), first=bias)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_saved_tiles_are_freed_before_the_weight_gradient(monkeypatch, keeps_graph):
    tiles: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    recalled, wgrad = training._recalled, training._wgrad

    def recalling(calls, tensors, numbers):
        memories = recalled(calls, tensors, numbers)
        tiles.extend(weakref.ref(tile) for c, m in zip(calls, memories, strict=True) for tile in m[len(c.likes) :])
        return memories

    def watching(*args):
        alive.append(sum(tile() is not None for tile in tiles))
        return wgrad(*args)

    monkeypatch.setattr(training, "_recalled", recalling)
    monkeypatch.setattr(training, "_wgrad", watching)
    x, weight = torch.randn(7, 4), torch.randn(5, 4, requires_grad=True)
    y = gg.linear(x, weight, gg.Gemm(gg.library.bias_gelu), bias=torch.randn(5))
    y.sum().backward(retain_graph=keeps_graph)
    assert len(tiles) == 1
    assert alive == [1 if keeps_graph else 0]
    if keeps_graph:
        y.sum().backward()
