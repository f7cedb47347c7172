"""Is a rung's answer right? Its error against float64 may be at most twice the error that eager torch makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import OUT_DTYPE, Case, Inputs, Outputs

MARGIN = 2.0
# The largest error of one element is noisier than the norm, but it is what shows a single wrong row or column.
ELEMENT_MARGIN = 4.0


@dataclass(frozen=True)
class Error:
    """Of one output: `relative` is |out - reference| / |reference| in the 2-norm, `largest` of one element."""

    relative: float
    largest: float

    def exceeds(self, torch_error: Error) -> bool:
        """Whether this is too large beside `torch_error`; NaN is."""
        within = self.relative <= MARGIN * torch_error.relative and self.largest <= ELEMENT_MARGIN * torch_error.largest
        return not within


def as_tuple(result: object) -> Outputs:
    """The outputs of a rung in order, whichever container it returns them in."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(result.values()) if isinstance(result, Mapping) else tuple(result)  # type: ignore[arg-type]


def run_poisoned(call: Callable[[], object]) -> Outputs:
    """The outputs of `call`, in memory that held NaN before, so that an element not written shows.

    A first run's outputs are filled with NaN and freed; the allocator hands the same blocks to the second.
    """
    _poison(as_tuple(call()))
    return as_tuple(call())


def _poison(outputs: Outputs) -> None:
    for output in outputs:
        output.fill_(float("nan"))


def errors(outputs: Outputs, expected: Outputs) -> tuple[Error, ...]:
    """One `Error` per output.

    Raises:
        ValueError: number or shape of the outputs differ from what is expected.
    """
    shapes, wanted = ([tuple(x.shape) for x in outputs], [tuple(x.shape) for x in expected])
    if shapes != wanted:
        raise ValueError(f"outputs have shapes {shapes}, expected {wanted}")
    return tuple(_error(output, reference) for output, reference in zip(outputs, expected, strict=True))


def _error(output: Tensor, reference: Tensor) -> Error:
    difference = output.double().sub_(reference)
    norm = torch.linalg.vector_norm
    return Error((norm(difference) / norm(reference)).item(), norm(difference, float("inf")).item())


def torch_errors(case: Case, inputs: Inputs, expected: Outputs) -> tuple[Error, ...]:
    """What eager torch makes of the same inputs; where it cannot run, one rounding of the exact answer."""
    try:
        outputs = case.eager(inputs.A, inputs.B, **inputs.operands)
    except RuntimeError:
        outputs = tuple(x.to(OUT_DTYPE) for x in expected)
    return errors(outputs, expected)


def verdict(found: tuple[Error, ...], torch_found: tuple[Error, ...]) -> str | None:
    """Why an answer is wrong, or None when it is right."""
    for index, (error, limit) in enumerate(zip(found, torch_found, strict=True)):
        if error.exceeds(limit):
            return (
                f"wrong answer: output {index} has relative error {error.relative:.2e} (largest {error.largest:.2e}), "
                f"torch's own is {limit.relative:.2e} (largest {limit.largest:.2e})"
            )
    return None
