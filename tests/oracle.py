"""The one rule of closeness: error against float64 at most twice the error of the same computation in torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import gemmgen as gg
from gemmgen.dtypes import DType, dtype_of
from gemmgen.evaluate import evaluate
from gemmgen.ops import broadcastable
from gemmgen.problem import extents_of, result_axes, result_dtype

Operands = Mapping[str, "Tensor | float"]
EIGHT_BIT = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
FLOOR = 1e-7  # fp32 sums in another order


def uniform(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Uniform in [-1, 1]; int8 takes its whole range."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, device=device, dtype=dtype)
    return (torch.rand(*shape, device=device) * 2 - 1).to(dtype)


def integers(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", high: int = 2) -> Tensor:
    """Small whole numbers, whose products and sums are exact in fp32."""
    return torch.randint(-high, high + 1, shape, device=device).to(dtype)


def listed(results: object) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return list(results.values() if isinstance(results, Mapping) else results)  # type: ignore[call-overload]


def torch_results(op: gg.Gemm, A: Tensor, B: Tensor, operands: Operands, out_dtype: torch.dtype | None) -> list[Tensor]:
    """The same computation as torch's users write it: a matmul, then ops on its rounded result."""
    a = dtype_of(A.dtype)
    graph = op._op.graph_for(DType.I32 if a is DType.I8 else DType.F32)
    if a is DType.I8:
        accum, compute = (A.double() @ B.double()).to(torch.int32), torch.float32
    elif A.dtype in EIGHT_BIT:
        accum, compute = (A.float() @ B.float()).to(torch.bfloat16), torch.bfloat16
    else:
        accum, compute = A @ B, A.dtype
    extents = extents_of(graph.name, A, B)
    accum = accum.reshape(extents.L, extents.M, extents.N)
    shaped = broadcastable(graph, operands, extents, compute, A.device)
    wanted = dtype_of(out_dtype) if out_dtype else None
    dtypes = {r.name: result_dtype(r, a, wanted) for r in graph.results}
    values = evaluate(graph, accum, shaped, dtypes, compute)
    return [values[r.name].reshape(extents.shape(result_axes(r))) for r in graph.results]


def errors(result: Tensor, expected: Tensor) -> tuple[float, float]:
    """(relative in the Frobenius norm, largest absolute over the largest expected), NaN and inf matched exactly."""
    got, want = result.double(), expected.double()
    assert got.shape == want.shape
    special = ~torch.isfinite(want)
    assert torch.equal(torch.nan_to_num(got[special], nan=7.0), torch.nan_to_num(want[special], nan=7.0)), (
        "NaN or inf differ"
    )
    got, want = got[~special], want[~special]
    if want.numel() == 0:
        return 0.0, 0.0
    difference = got - want
    assert torch.isfinite(difference).all(), "an element is NaN or infinite that should not be"
    norm, peak = want.norm().item() or 1.0, want.abs().max().item() or 1.0
    return difference.norm().item() / norm, difference.abs().max().item() / peak


def assert_close(
    op: gg.Gemm, A: Tensor, B: Tensor, operands: Operands, results: object, out_dtype: torch.dtype | None = None
) -> None:
    """`results` against the float64 reference, by the rule of this module."""
    names = op._result_names
    references = listed(op.reference(A, B, **operands))
    for name, got, want, own in zip(
        names, listed(results), references, torch_results(op, A, B, operands, out_dtype), strict=True
    ):
        ours, theirs = errors(got, want), errors(own, want)
        for measure, mine, limit in zip(("norm", "peak"), ours, theirs, strict=True):
            assert mine <= 2 * limit + FLOOR, f"result {name}: {measure} error {mine:.3e}, torch's own {limit:.3e}"
