"""The calls into gemmgen that need more than `op(A, B, **operands)`. Importing this imports gemmgen."""

from __future__ import annotations

import gemmgen as gg
from bench.cases import Case, Inputs, draw_inputs
from bench.epilogues import EPILOGUES
from bench.shapes import Shape


def gemm(case: Case) -> gg.Gemm:
    return gg.Gemm(EPILOGUES[case.name])


def build(case: Case, shape: Shape, arch: str) -> None:
    """Compile, or find in the cache, the kernel that `case` takes at `shape`; needs no GPU."""
    build_op(gemm(case), draw_inputs(case, shape, device="meta"), arch)


def build_op(op: gg.Gemm, inputs: Inputs, arch: str) -> None:
    op.build(inputs.A, inputs.B, arch=arch, **inputs.operands)
