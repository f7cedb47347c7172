"""The calls into gemmgen that need more than `op(A, B, **operands)`. Importing this imports gemmgen."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import gemmgen as gg
from bench.cases import Case, Inputs, draw_inputs
from bench.results import Row
from bench.shapes import Shape

if TYPE_CHECKING:
    from gemmgen.device import Target
    from gemmgen.source import KernelSource

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


def sources_to_tune(case: Case, shape: Shape, most: int, target: Target) -> list[KernelSource]:
    """The sources of the fused kernels that `tune` measures for `case` at `shape` on `target`."""
    from gemmgen import tune, ways
    from gemmgen.runtime import bind_call

    inputs = draw_inputs(case, shape, device="meta")
    binding = bind_call(gemm(case)._op.graph_for, inputs.A, inputs.B, inputs.operands, None)
    call = tune.Call(binding, target, (inputs.A, inputs.B), inputs.operands, reference=list)
    candidates = tune.candidates_of(call, most=most)
    return [way.source(binding, target.arch) for way in candidates if isinstance(way, ways.Fused)]


def tuned_times(op: gg.Gemm, inputs: Inputs, entry: Any) -> Row:
    """Microseconds of the best measured way and of the model's own choice, and by what fraction that is slower.

    None where the choice has no time.
    """
    from gemmgen import ways

    call = op._op.runner.tunable(inputs.A, inputs.B, inputs.operands)
    times = {row.way: row.time_us for row in entry.rows if row.time_us is not None}
    best_us, model_us = min(times.values(), default=None), times.get(ways.select(call.binding, call.target).ways[0])
    loss = round(model_us / best_us - 1, 4) if model_us and best_us else None
    return {"best_us": _rounded(best_us), "model_us": _rounded(model_us), "heuristic_loss": loss}


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)


def kernel_of(op: gg.Gemm, inputs: Inputs) -> str:
    """The line of `explain` that names the kernel."""
    lines = op.explain(inputs.A, inputs.B, **inputs.operands).splitlines()
    return next((line for line in lines if " kernel " in line), lines[-1])
