"""The calls into gemmgen that need more than `op(A, B, **operands)`. Importing this imports gemmgen."""

from __future__ import annotations

import functools
from typing import Any

import gemmgen as gg
from bench.cases import Case, Inputs, draw_inputs
from bench.shapes import Shape

EPILOGUES = {
    epilogue.name: epilogue
    for epilogue in (
        gg.library.bias_gelu_tanh,
        gg.library.bias_silu,
        gg.library.bias_silu_residual,
        gg.library.scale_bias_gelu_residual,
        gg.library.int8_dequant_bias,
        gg.library.fp8_dequant_bias_gelu_tanh,
        gg.library.bias_relu_column_sums,
    )
}


@functools.cache
def gemm(case: Case) -> gg.Gemm:
    return gg.Gemm(EPILOGUES[case.name])


def build(case: Case, shape: Shape, arch: str) -> float:
    """Compile, or find in the cache, the kernel that `case` takes at `shape`; needs no GPU.

    Returns:
        Seconds that the compilers took for it when it was built.
    """
    return build_op(gemm(case), draw_inputs(case, shape, device="meta"), arch)


def build_op(op: gg.Gemm, inputs: Inputs, arch: str) -> float:
    built = op.build(inputs.A, inputs.B, arch=arch, **inputs.operands)
    return built.skeleton_seconds + built.link_seconds


def tune(op: gg.Gemm, inputs: Inputs, most: int) -> Any:
    """Measure at most `most` fused kernels, and the split way, for the bucket of these inputs; what was measured."""
    return op.tune(inputs.A, inputs.B, most=most, **inputs.operands)


def heuristic_loss(op: gg.Gemm, inputs: Inputs, entry: Any) -> float | None:
    """How much slower than the best measured way the model's own choice is; None where it has no time."""
    from gemmgen import ways

    call = op._op.runner.tunable(inputs.A, inputs.B, inputs.operands)
    times = {row.way: row.time_us for row in entry.rows if row.time_us is not None}
    chosen = times.get(ways.select(call.binding, call.target).ways[0])
    return round(chosen / min(times.values()) - 1, 4) if chosen else None


def kernel_of(op: gg.Gemm, inputs: Inputs) -> str:
    """The line of `explain` that names the kernel."""
    lines = op.explain(inputs.A, inputs.B, **inputs.operands).splitlines()
    return next((line for line in lines if " kernel " in line), lines[-1])
