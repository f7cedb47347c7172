"""The ladder: every way to compute a case that is timed beside gemmgen.

A rung is prepared for a case and a shape. Where it cannot run it raises `Unavailable` with the reason, which
is reported in its place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cases import Case, Inputs, Outputs
from bench.shapes import Shape


class Unavailable(Exception):
    """A rung cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Prepared:
    """`function(A, B, **operands)` computes the case; `note(inputs)`, asked after a call on them, says how."""

    function: Callable[..., object]
    note: Callable[[Inputs], str] = lambda inputs: ""


@dataclass(frozen=True)
class Rung:
    """One way to compute a case.

    Attributes:
        name: in `--rungs` and in the JSON lines.
        label: in tables.
        prepare: raises `Unavailable` where the rung cannot run.
        is_whole: whether it computes the case, and not the bare product alone.
        is_peer: another project's fused kernels, which run where they are asked for.
    """

    name: str
    label: str
    prepare: Callable[[Case, Shape], Prepared]
    is_whole: bool = True
    is_peer: bool = False


def _gemmgen(case: Case, shape: Shape) -> Prepared:
    from bench import gemmgen_api

    op = gemmgen_api.gemm(case)
    return Prepared(op, lambda inputs: gemmgen_api.kernel_of(op, inputs))


def _eager(case: Case, shape: Shape) -> Prepared:
    _require_product(case, shape)
    return Prepared(case.eager)


def _compiled_tail(case: Case, shape: Shape) -> Prepared:
    _require_product(case, shape)
    _require_triton()
    tail = torch.compile(case.after_matmul, dynamic=False, fullgraph=True)

    def product_then_tail(A: torch.Tensor, B: torch.Tensor, **operands: torch.Tensor) -> Outputs:
        return tail(case.matmul(A, B, **operands), **operands)

    before = _kernels_generated()
    return Prepared(product_then_tail, lambda inputs: f"product + {_kernels_generated() - before} compiled kernel(s)")


def _cublaslt(case: Case, shape: Shape) -> Prepared:
    if isinstance(case.cublaslt, str):
        raise Unavailable(case.cublaslt)
    _require_product(case, shape)
    return Prepared(case.cublaslt)


def _max_autotune(case: Case, shape: Shape) -> Prepared:
    """The whole function. Without CUDA graphs: those would hide launch cost from this rung alone, and copy inputs."""
    _require_product(case, shape)
    _require_triton()
    _silence_autotune_tables()

    def whole(A: torch.Tensor, B: torch.Tensor, **operands: torch.Tensor) -> Outputs:
        return case.after_matmul(case.matmul(A, B, **operands), **operands)

    compiled = torch.compile(whole, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
    before = _kernels_generated()
    return Prepared(compiled, lambda inputs: f"{_kernels_generated() - before} generated kernel(s)")


NOT_IN_TRITON = ("bias_silu_residual",)


def _triton(case: Case, shape: Shape) -> Prepared:
    if case.name in NOT_IN_TRITON:
        raise Unavailable("the plain Triton kernel has no such case")
    _require_triton()
    from bench import triton_rung

    function, chosen = triton_rung.fused(case.name)
    return Prepared(function, lambda inputs: chosen())


QUACK_ACTIVATIONS = {"bias_gelu_tanh": "gelu_tanh_approx"}  # of the cases that its gemm_act can say


def _quack(case: Case, shape: Shape) -> Prepared:
    """QuACK's GEMM with an activation, tuned by itself at the first call."""
    if importlib.util.find_spec("quack") is None:
        raise Unavailable("QuACK is not installed")
    if case.name not in QUACK_ACTIVATIONS:
        raise Unavailable("QuACK's gemm_act has no such epilogue")
    from quack.gemm_interface import gemm_act

    activation = QUACK_ACTIVATIONS[case.name]

    def fused(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor) -> Outputs:
        return (gemm_act(A, B, bias=bias, activation=activation, store_preact=False, tuned=True)[1],)

    return Prepared(fused, lambda inputs: f"gemm_act, {activation}, tuned")


def _cutlass_inductor(case: Case, shape: Shape) -> Prepared:
    """The whole function by Inductor, which may take its CUTLASS templates for the product and nothing else."""
    _require_product(case, shape)
    _require_triton()
    from gemmgen.errors import ToolchainError
    from gemmgen.jit.toolchain import find_cutlass

    try:
        source = find_cutlass().include_dirs[0].parent
    except ToolchainError as error:
        raise Unavailable(str(error).partition("\n")[0]) from None
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CUTLASS", **_cutlass_folder(str(source))}
    whole = torch.compile(case.eager, options=options, dynamic=False, fullgraph=True)
    before = _kernels_generated()
    return Prepared(whole, lambda inputs: f"{_kernels_generated() - before} generated kernel(s)")


def _cutlass_folder(path: str) -> dict[str, object]:
    """Inductor's option for the folder of CUTLASS, which has moved between versions of torch."""
    from torch._inductor import config

    for section in ("cutlass", "cuda"):
        if hasattr(getattr(config, section, None), "cutlass_dir"):
            return {f"{section}.cutlass_dir": path}
    raise Unavailable("this torch's Inductor has no CUTLASS backend")


def _bare(case: Case, shape: Shape) -> Prepared:
    _require_product(case, shape)
    return Prepared(case.matmul)


RUNGS: dict[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung("gemmgen", "gemmgen", _gemmgen),
        Rung("eager", "cuBLAS + eager", _eager),
        Rung("compiled_tail", "cuBLAS + compiled tail", _compiled_tail),
        Rung("cublaslt", "cuBLASLt epilogue", _cublaslt),
        Rung("max_autotune", "torch.compile max-autotune", _max_autotune),
        Rung("triton", "Triton", _triton),
        Rung("quack", "QuACK", _quack, is_peer=True),
        Rung("cutlass_inductor", "Inductor with CUTLASS", _cutlass_inductor, is_peer=True),
        Rung("bare", "bare product", _bare, is_whole=False),
    )
}


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _require_triton() -> None:
    if not has_triton():
        raise Unavailable("Triton is not installed")


def _require_product(case: Case, shape: Shape) -> None:
    if reason := case.matmul_reason(shape):
        raise Unavailable(reason)


def _kernels_generated() -> int:
    from torch._inductor import metrics

    return metrics.generated_kernel_count


def _silence_autotune_tables() -> None:
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False


def forget_compilations() -> None:
    """Drop Dynamo's caches, so that a new shape is a first compilation and not one of too many."""
    torch._dynamo.reset()
