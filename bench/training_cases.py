"""The layers that the suite `training` measures, and the ways to compute them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import gemmgen as gg
from bench.rungs import Unavailable

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    inner: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.hidden} -> {self.inner}"


SIZES = (Size(8192, 4096, 14336), Size(16384, 4096, 14336), Size(8192, 2048, 8192))


@dataclass(frozen=True, eq=False)
class Inputs:
    """Leaves by name, all of which require a gradient, and the cotangent of the result."""

    named: Mapping[str, Tensor]
    cotangent: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.named.values())

    def cast(self, dtype: torch.dtype) -> Inputs:
        leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in self.named.items()}
        return Inputs(leaves, self.cotangent.to(dtype))


Function = Callable[..., Tensor]  # of an input's leaves by name


@dataclass(frozen=True, eq=False)
class Case:
    """A layer.

    Attributes:
        shapes: of the leaves and, last, of the result; from a size.
        eager, fused: the layer in torch, and by gemmgen.
        products: the bare GEMMs of the forward, and of the backward; from the leaves.
    """

    name: str
    shapes: Callable[[Size], Mapping[str, tuple[int, ...]]]
    eager: Function
    fused: Function
    products: Callable[[Inputs], tuple[Callable[[], object], Callable[[], object]]]


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _linear_silu_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) + residual


def _mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight, bias), approximate="tanh"), weight2, bias2)


GELU, SILU, BIAS = (gg.Gemm(e) for e in (gg.library.bias_gelu_tanh, gg.library.bias_silu_residual, gg.library.bias))
CHAIN = gg.chain(GELU, BIAS)


def _fused_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gg.linear(x, weight, GELU, bias=bias)  # type: ignore[return-value]


def _fused_silu_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return gg.linear(x, weight, SILU, bias=bias, residual=residual)  # type: ignore[return-value]


def _fused_mlp(x: Tensor, weight: Tensor, bias: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return CHAIN.linear(x, weight, weight2, first={"bias": bias}, second={"bias": bias2})  # type: ignore[return-value]


def _linear_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    tokens, hidden, inner = size.tokens, size.hidden, size.inner
    return {"x": (tokens, hidden), "weight": (inner, hidden), "bias": (inner,), "result": (tokens, inner)}


def _residual_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    shapes = _linear_shapes(size)
    result = shapes.pop("result")
    return {**shapes, "residual": result, "result": result}


def _mlp_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    shapes = _linear_shapes(size)
    shapes.pop("result")
    second = {"weight2": (size.hidden, size.inner), "bias2": (size.hidden,)}
    return {**shapes, **second, "result": (size.tokens, size.hidden)}


def _linear_products(inputs: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    x, weight = (inputs.named[name].detach() for name in ("x", "weight"))
    d = inputs.cotangent
    return lambda: x @ weight.t(), lambda: (d @ weight, d.t() @ x)


def _mlp_products(inputs: Inputs) -> tuple[Callable[[], object], Callable[[], object]]:
    x, weight, weight2 = (inputs.named[name].detach() for name in ("x", "weight", "weight2"))
    h, d = x @ weight.t(), inputs.cotangent

    def backward() -> object:
        d_h = d @ weight2
        return d_h, d.t() @ h, d_h @ weight, d_h.t() @ x

    return lambda: (x @ weight.t(), h @ weight2.t()), backward


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("linear_gelu_tanh", _linear_shapes, _linear_gelu, _fused_gelu, _linear_products),
        Case("linear_silu_residual", _residual_shapes, _linear_silu_residual, _fused_silu_residual, _linear_products),
        Case("mlp_gelu_tanh", _mlp_shapes, _mlp, _fused_mlp, _mlp_products),
    )
}


def draw_inputs(case: Case, size: Size, device: str) -> Inputs:
    """Weights of a variance that keeps activations near one, as initialised networks have them."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(DTYPE)

    shapes = dict(case.shapes(size))
    cotangent = drawn(shapes.pop("result"), 1.0)
    scales = {name: shape[-1] ** -0.5 if name.startswith("weight") else 1.0 for name, shape in shapes.items()}
    leaves = {name: drawn(shape, scales[name]).requires_grad_() for name, shape in shapes.items()}
    return Inputs(leaves, cotangent)


@dataclass(frozen=True, eq=False)
class Layer:
    """A case, ready to be called on its inputs. `is_whole`: it computes the case, and not the bare products alone."""

    forward: Callable[[], Tensor]
    forward_backward: Callable[[], object]
    step: Callable[[], object] | None
    is_whole: bool = True


def layer_of(function: Function, inputs: Inputs) -> Layer:
    """Forward, gradients of all leaves, and a step of AdamW on those that are parameters."""
    weights = [leaf for name, leaf in inputs.named.items() if name not in ("x", "residual")]
    optimizer = torch.optim.AdamW(weights, fused=inputs.cotangent.is_cuda)

    def forward() -> Tensor:
        return function(**inputs.named)

    def step() -> None:
        forward().backward(inputs.cotangent)
        optimizer.step()
        for leaf in inputs.leaves:
            leaf.grad = None

    return Layer(forward, lambda: torch.autograd.grad(forward(), inputs.leaves, inputs.cotangent), step)


# Rungs: what makes a layer of a case, or raises `Unavailable`


def _compiled(case: Case, inputs: Inputs) -> Layer:
    if importlib.util.find_spec("triton") is None:
        raise Unavailable("Triton is not installed")
    return layer_of(torch.compile(case.eager, dynamic=False, fullgraph=True), inputs)


def _bare(case: Case, inputs: Inputs) -> Layer:
    forward, backward = case.products(inputs)
    return Layer(forward, lambda: (forward(), backward()), None, is_whole=False)  # type: ignore[arg-type]


def _liger(case: Case, inputs: Inputs) -> Layer:
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("Liger is not installed")
    raise Unavailable("Liger has gated MLPs, and no kernel of this function")


def _transformer_engine(case: Case, inputs: Inputs) -> Layer:
    if importlib.util.find_spec("transformer_engine") is None:
        raise Unavailable("TransformerEngine is not installed")
    import transformer_engine.pytorch as te

    def linear(weight: Tensor, bias: Tensor) -> torch.nn.Module:
        module = te.Linear(weight.shape[1], weight.shape[0], params_dtype=DTYPE, device="cuda")
        module.weight, module.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
        return module

    named = inputs.named
    modules = [linear(named["weight"], named["bias"])]
    if "weight2" in named:
        modules.append(linear(named["weight2"], named["bias2"]))
    leaves = {"x": named["x"], "weight": modules[0].weight, "bias": modules[0].bias}
    leaves |= {"weight2": modules[1].weight, "bias2": modules[1].bias} if len(modules) == 2 else {}
    leaves |= {"residual": named["residual"]} if "residual" in named else {}

    def function(x: Tensor, residual: Tensor | None = None, **_: Tensor) -> Tensor:
        preact = modules[0](x)
        if residual is not None:
            return F.silu(preact) + residual
        activated = F.gelu(preact, approximate="tanh")
        return modules[1](activated) if len(modules) == 2 else activated

    return layer_of(function, Inputs({name: leaves[name] for name in named}, inputs.cotangent))


RUNGS: dict[str, Callable[[Case, Inputs], Layer]] = {
    "gemmgen": lambda case, inputs: layer_of(case.fused, inputs),
    "eager": lambda case, inputs: layer_of(case.eager, inputs),
    "compiled": _compiled,
    "liger": _liger,
    "transformer_engine": _transformer_engine,
    "bare": _bare,
}
