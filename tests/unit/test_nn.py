"""The modules: torch's parameters and keys, the same answers as torch's modules, copied and pickled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gemmgen as gg
from gemmgen import library
from tests.unit.test_training_cpu import assert_same, loss_of

K, N = 6, 8


@gg.epilogue
def gated(accum, bias: gg.Row, gate: gg.Tile, scale: gg.Scalar):
    return {"D": gg.silu(accum + bias) * gate * scale, "sums": gg.sum(accum, over="N")}


@gg.epilogue
def no_bias(accum, residual: gg.Tile):
    return accum + residual


def eager_mlp(bias: bool = True) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(K, N, bias), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(N, K, bias)
    ).double()


def mlp_of(eager: torch.nn.Sequential, **options) -> gg.nn.MLP:
    activation = library.bias_gelu_tanh if eager[0].bias is not None else plain_gelu_tanh
    return gg.nn.MLP.from_linear(eager[0], eager[2], activation, **options)


@gg.epilogue
def plain_gelu_tanh(accum):
    return gg.gelu_tanh(accum)


def gradients(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    wanted = [x, *module.parameters()]
    return [module(x), *torch.autograd.grad(loss_of(module(x)), wanted)]


def inputs(*lead: int) -> Tensor:
    return torch.randn(*lead, K, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs(lead, bias):
    torch.manual_seed(0)
    eager, x = torch.nn.Linear(K, N, bias).double(), inputs(*lead)
    assert_same(gradients(gg.nn.Linear.from_linear(eager), x), gradients(eager, x))


def test_parameters_are_drawn_and_named_as_torchs():
    torch.manual_seed(1)
    ours = gg.nn.Linear(K, N, dtype=torch.float64)
    torch.manual_seed(1)
    theirs = torch.nn.Linear(K, N, dtype=torch.float64)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.state_dict().items())
    other = torch.nn.Linear(K, N).double()
    ours.load_state_dict(other.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, other.weight)


def test_from_linear_shares_the_parameters_and_the_mode():
    eager = torch.nn.Linear(K, N).eval()
    module = gg.nn.Linear.from_linear(eager, library.bias_relu)
    assert module.weight is eager.weight and module.bias is eager.bias and not module.training
    assert module.in_features == K and module.out_features == N


def test_further_operands_are_given_by_name():
    torch.manual_seed(0)
    module, x = gg.nn.Linear(K, N, epilogue=gated, dtype=torch.float64), inputs(2, 3)
    gate = torch.rand(2, 3, N).double()
    results = module(x, gate=gate, scale=0.5)
    accum = F.linear(x, module.weight)
    assert_same([results["D"]], [F.silu(accum + module.bias) * gate * 0.5])
    assert_same([results["sums"]], [accum.sum(-1)])


def test_a_module_without_bias_takes_one_in_the_call():
    module, x = gg.nn.Linear(K, N, bias=False, epilogue=library.bias, dtype=torch.float64), inputs(3)
    bias = torch.randn(N, dtype=torch.float64)
    assert list(module.state_dict()) == ["weight"]
    assert_same([module(x, bias=bias)], [F.linear(x, module.weight, bias)])


def test_a_bias_that_the_epilogue_has_no_place_for_is_refused():
    with pytest.raises(gg.OperandError, match=r"no_bias.*no Row operand called `bias`"):
        gg.nn.Linear(K, N, epilogue=no_bias)
    module = gg.nn.Linear(K, N, epilogue=library.bias)
    with pytest.raises(gg.OperandError, match="bias of its own"):
        module(torch.randn(3, K), bias=torch.randn(N))
    with pytest.raises(gg.OperandError, match="missing: gate, scale"):
        gg.nn.Linear(K, N, epilogue=gated)(torch.randn(3, K))


def test_a_gemm_with_its_options_may_be_given():
    op = gg.Gemm(library.bias_gelu, save="recompute")
    assert gg.nn.Linear(K, N, epilogue=op).op is op
    assert gg.nn.Linear(K, N, epilogue=library.bias_gelu, save="recompute").op.save == "recompute"
    with pytest.raises(gg.OperandError, match="save cannot be given"):
        gg.nn.Linear(K, N, epilogue=op, save="auto")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("save", ["auto", "recompute"])
def test_mlp_is_torchs(bias, save):
    torch.manual_seed(0)
    eager, x = eager_mlp(bias), inputs(2, 3)
    assert_same(gradients(mlp_of(eager, save=save), x), gradients(eager, x))


def test_mlp_has_the_keys_of_two_linears():
    module = gg.nn.MLP(K, N, library.bias_gelu_tanh)
    assert list(module.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert module.fc1.weight.shape == (N, K) and module.fc2.weight.shape == (K, N)


def test_mlp_shares_the_parameters_it_is_made_from():
    eager = eager_mlp()
    module = mlp_of(eager)
    assert module.fc1.weight is eager[0].weight and module.fc2.bias is eager[2].bias
    with pytest.raises(gg.ShapeMismatch, match="have to be equal"):
        gg.nn.MLP.from_linear(eager[0], eager[0], library.bias_gelu_tanh)


def test_mlp_with_operands_of_both_epilogues():
    torch.manual_seed(0)
    module = gg.nn.MLP(K, N, gated, library.bias_silu_residual, dtype=torch.float64)
    x, gate = inputs(2, 3), torch.rand(2, 3, N).double().requires_grad_()
    residual = torch.randn(2, 3, K).double().requires_grad_()
    got = module(x, first={"gate": gate, "scale": 2.0}, second={"residual": residual})
    h = F.silu(F.linear(x, module.fc1.weight, module.fc1.bias)) * gate * 2.0
    want = F.silu(F.linear(h, module.fc2.weight, module.fc2.bias)) + residual
    leaves = [x, gate, residual, *module.parameters()]
    assert_same([got], [want])
    assert_same(torch.autograd.grad(loss_of(got), leaves), torch.autograd.grad(loss_of(want), leaves))


@pytest.mark.parametrize("frozen", ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc1.", "fc2.", "fc"])
def test_frozen_parameters(frozen):
    torch.manual_seed(0)
    eager, x = eager_mlp(), inputs(3)
    module = mlp_of(eager)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    got = torch.autograd.grad(loss_of(module(x)), wanted)
    assert_same(got, torch.autograd.grad(loss_of(eager(x)), wanted))


def modules() -> list[torch.nn.Module]:
    return [gg.nn.Linear(K, N, epilogue=library.bias_gelu_tanh), gg.nn.MLP(K, N, library.bias_gelu_tanh)]


@pytest.mark.parametrize("module", modules(), ids=["Linear", "MLP"])
def test_copied_and_pickled(module, tmp_path):
    x = torch.randn(3, K)
    torch.save(module, tmp_path / "module.pt")
    for other in (
        copy.deepcopy(module), pickle.loads(pickle.dumps(module)),
        torch.load(tmp_path / "module.pt", weights_only=False),
    ):  # fmt: skip
        assert torch.equal(other(x), module(x))
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert not torch.equal(other(x), module(x))


def test_an_epilogue_that_cannot_be_found_again_copies_but_does_not_pickle():
    @gg.epilogue
    def local(accum, bias: gg.Row):
        return gg.relu(accum + bias)

    module = gg.nn.Linear(K, N, epilogue=local)
    copy.deepcopy(module)
    with pytest.raises(pickle.PicklingError, match=r"`local` cannot be pickled.*\n.*top level of a module"):
        pickle.dumps(module)


@pytest.mark.parametrize("make", [lambda: gg.nn.Linear(K, N, epilogue=library.bias_gelu_tanh),
                                  lambda: gg.nn.MLP(K, N, library.bias_gelu_tanh)], ids=["Linear", "MLP"])  # fmt: skip
def test_under_autocast(make):
    module, x = make(), torch.randn(5, K, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        D = module(x)
    assert D.dtype == torch.bfloat16
    D.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in [x, *module.parameters()])


@pytest.mark.parametrize("index", [0, 1], ids=["Linear", "MLP"])
def test_compiled_exported_and_checkpointed(index):
    module, x = modules()[index].double(), inputs(2, 3)
    want = gradients(module, x)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x), *torch.autograd.grad(loss_of(compiled(x)), [x, *module.parameters()])], want)
    exported = torch.export.export(module, (x.detach(),)).module()
    assert_same([exported(x)], want[:1])
    kept = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    assert_same(torch.autograd.grad(loss_of(kept), [x, *module.parameters()]), want[1:])


def test_exported_with_a_dynamic_batch_and_trained_there():
    module, x = modules()[1].double(), inputs(4)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(module, (x.detach(),), dynamic_shapes=({0: batch},)).module()
    y = inputs(7)
    assert_same([exported(y)], [module(y)])
    got = torch.autograd.grad(loss_of(exported(y)), list(exported.parameters()))
    assert_same(got, torch.autograd.grad(loss_of(module(y)), list(module.parameters())))


def test_functional_call_under_torch_func():
    torch.manual_seed(0)
    eager, x = eager_mlp(), torch.randn(4, K).double()
    module = mlp_of(eager)

    def loss(parameters, module):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    ours = {name: p.detach() for name, p in module.named_parameters()}
    theirs = {name: p.detach() for name, p in eager.named_parameters()}
    assert_same(torch.func.grad(loss)(ours, module).values(), torch.func.grad(loss)(theirs, eager).values())


def test_the_text_of_a_module_names_its_epilogue():
    assert "epilogue=bias_gelu_tanh" in str(modules()[1])
