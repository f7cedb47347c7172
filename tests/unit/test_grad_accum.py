"""Weight gradients that are added to an existing fp32 buffer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gemmgen as gg


def weight_of(out_features: int, in_features: int, dtype: torch.dtype) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(out_features, in_features, dtype=dtype))
    weight.main_grad = torch.randn(out_features, in_features)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_backwards_are_added_to_the_buffer(dtype):
    torch.manual_seed(0)
    op = gg.Gemm(gg.library.bias_gelu, grad_accum=True)
    weight, bias = weight_of(6, 4, dtype), torch.randn(6, dtype=dtype, requires_grad=True)
    want = weight.main_grad.clone()
    for rows in (3, 5):
        x = torch.randn(rows, 4, dtype=dtype, requires_grad=True)
        gg.linear(x, weight, op, bias=bias).sum().backward()
        plain = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
        gradients = torch.autograd.grad(F.gelu(F.linear(*plain)).sum(), plain)
        want += gradients[1]
        torch.testing.assert_close(x.grad.float(), gradients[0], atol=0.05, rtol=0.05)
    assert weight.grad is None
    assert bias.grad is not None
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(weight.main_grad, want, atol=tolerance, rtol=tolerance)


def test_b_as_it_is_batched_a_and_a_frozen_input():
    op = gg.Gemm(gg.library.bias, grad_accum=True)
    B = torch.nn.Parameter(torch.randn(4, 6))
    B.main_grad = torch.zeros(4, 6)
    A = torch.randn(2, 3, 4)
    op(A, B, bias=torch.zeros(6)).sum().backward()
    torch.testing.assert_close(B.main_grad, A.flatten(0, 1).t() @ torch.ones(6, 6))


def test_without_a_buffer_or_the_option_the_gradient_goes_to_grad():
    for option, has_buffer in ((True, False), (False, True)):
        weight = weight_of(6, 4, torch.float32)
        before = weight.main_grad.clone()
        if not has_buffer:
            del weight.main_grad
        op = gg.Gemm(gg.library.bias, grad_accum=option)
        gg.linear(torch.randn(3, 4), weight, op, bias=torch.zeros(6)).sum().backward()
        assert weight.grad is not None
        assert not has_buffer or torch.equal(weight.main_grad, before)


def test_modules_hand_the_option_on():
    mlp = gg.nn.MLP(4, 8, gg.library.bias_gelu, grad_accum=True)
    for parameter in (mlp.fc1.weight, mlp.fc2.weight):
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(5, 4)
    mlp(x).sum().backward()
    h = F.gelu(F.linear(x, mlp.fc1.weight, mlp.fc1.bias))
    gradients = torch.autograd.grad(F.linear(h, mlp.fc2.weight, mlp.fc2.bias).sum(), (mlp.fc1.weight, mlp.fc2.weight))
    for parameter, gradient in zip((mlp.fc1.weight, mlp.fc2.weight), gradients, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, gradient)


def test_a_buffer_that_does_not_fit_is_refused():
    op = gg.Gemm(gg.library.bias, grad_accum=True)
    weight = weight_of(6, 4, torch.float32)
    weight.main_grad = weight.main_grad.half()
    with pytest.raises(gg.OperandError, match="fp32"):
        gg.linear(torch.randn(3, 4), weight, op, bias=torch.zeros(6))
    weight = weight_of(6, 4, torch.float32)
    with pytest.raises(gg.OperandError, match="part of a weight"):
        gg.linear(torch.randn(3, 4), weight[:3], op, bias=torch.zeros(3))


def test_compiled_the_gradient_goes_to_grad():
    op = gg.Gemm(gg.library.bias, grad_accum=True)
    weight = weight_of(6, 4, torch.float32)
    before = weight.main_grad.clone()
    step = torch.compile(lambda x: gg.linear(x, weight, op, bias=torch.zeros(6)).sum(), backend="aot_eager")
    step(torch.randn(3, 4)).backward()
    assert weight.grad is not None
    assert torch.equal(weight.main_grad, before)
