"""Are a layer's gradients right? Their error against float64 may be at most twice that of eager torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.training_cases import Case, Inputs, Layer

MARGIN = 2.0


def errors_of(layers: Mapping[str, Layer], case: Case, inputs: Inputs) -> dict[str, dict[str, float]]:
    """For each layer the relative error of its result and of each gradient, in the 2-norm."""
    wide = inputs.cast(torch.float64)
    expected = _values(case.eager(**wide.named), wide)
    found = {}
    for name, layer in layers.items():
        values = [layer.forward().detach(), *layer.forward_backward()]  # type: ignore[misc]
        errors = (_relative(value, want) for value, want in zip(values, expected, strict=True))
        found[name] = dict(zip(("result", *inputs.named), errors, strict=True))
    return found


def _values(result: Tensor, inputs: Inputs) -> list[Tensor]:
    return [result.detach(), *torch.autograd.grad(result, inputs.leaves, inputs.cotangent)]


def _relative(value: Tensor, expected: Tensor) -> float:
    norm = torch.linalg.vector_norm
    return (norm(value.double().sub_(expected)) / norm(expected)).item()


def verdict(found: Mapping[str, float], eager: Mapping[str, float]) -> str | None:
    """Why the answers are wrong, or None when they are right."""
    for name, error in found.items():
        if not error <= MARGIN * eager[name]:
            return f"wrong: relative error of {name} is {error:.2e}, eager's own {eager[name]:.2e}"
    return None
