"""Ahead of time: what a call would run, built or explained from metadata alone. Needs no GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from gemmgen import choose, jit, pipeline, pointwise
from gemmgen.arch import Arch, arch_named, arch_of_capability
from gemmgen.bind import Binding
from gemmgen.dtypes import DType
from gemmgen.errors import UnsupportedArch
from gemmgen.ir.text import to_text
from gemmgen.jit.build import BuiltKernel
from gemmgen.ops import EpilogueOp
from gemmgen.runtime import Operands, bind_call, build_first
from gemmgen.source import KernelSource


def arch_for(name: str | None) -> Arch:
    """The arch called `name`, or that of the current GPU.

    Raises:
        UnsupportedArch: unknown, or none given and there is no GPU.
    """
    if name is not None:
        return arch_named(name)
    if not torch.cuda.is_available():
        raise UnsupportedArch("there is no GPU here to take the architecture from\n  Name one, such as arch=\"sm90\".")
    return arch_of_capability(torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def source(
    op: EpilogueOp, A: Tensor, B: Tensor, operands: Operands, arch: str | None, out_dtype: torch.dtype | None
) -> KernelSource:
    """The CUDA text of the fused kernel of a call with such tensors."""
    binding, target = bind_call(op.graph_for, A, B, operands, out_dtype), arch_for(arch)
    return pipeline.kernel_source(binding, op.runner.config or _best(binding, target).config, target)


def build(
    op: EpilogueOp, A: Tensor, B: Tensor, operands: Operands, arch: str | None, out_dtype: torch.dtype | None
) -> BuiltKernel:
    """Compile the fused kernel of a call with such tensors, and what finishes its reductions, into the cache."""
    binding, target = bind_call(op.graph_for, A, B, operands, out_dtype), arch_for(arch)
    ranked = [choice.config for choice in choose.ranked(binding.signature, binding.extents, target)]
    _, built = build_first(binding, [op.runner.config] if op.runner.config else ranked, target)
    for text in _finish_texts(binding):
        jit.build_module(text, target)
    return built


def explain_graph(op: EpilogueOp) -> str:
    """The graph of the epilogue and the op that stands for it."""
    return f"{to_text(op.graph)}\nop gemmgen::{op.schema}"


def explain(
    op: EpilogueOp, A: Tensor, B: Tensor, operands: Operands, arch: str | None, out_dtype: torch.dtype | None
) -> str:
    """Which kernel a call with such tensors runs, and why."""
    target = arch_for(arch)
    binding = bind_call(op.graph_for, A, B, operands, out_dtype)
    extents = binding.extents
    mnkl = f"({extents.M}, {extents.N}, {extents.K}, {extents.L})"
    lines = [explain_graph(op), f"problem on {target.name}: (M, N, K, L) = {mnkl}"]
    lines += [f"  {line}" for line in _readings(binding)]
    if binding.is_empty:
        return "\n".join([*lines, "nothing is launched: the result is empty"])
    if extents.K == 0:
        return "\n".join([*lines, "the pointwise kernel runs alone: K is 0, so accum is 0"])
    return "\n".join(lines + _choices(op, binding, target))


def _readings(binding: Binding) -> list[str]:
    signature = binding.signature
    lines = []
    for name, matrix, reading in (("A", signature.a, binding.a), ("B", signature.b, binding.b)):
        major = "K contiguous" if matrix.k_major else "K strided"
        copied = ", after one transposing copy: no kernel takes its strides" if reading.copied else ""
        lines.append(f"{name}: {matrix.dtype.text}, {major}, aligned to {matrix.alignment} elements{copied}")
    for slot, operand in zip(binding.slots, binding.readings, strict=True):
        if operand is not None:
            copied = ", after a copy that makes it contiguous" if operand.copied else ""
            lines.append(f"{slot.name}: {operand.dtype.text} read as {operand.kind.value}{copied}")
    return lines


def _choices(op: EpilogueOp, binding: Binding, target: Arch) -> list[str]:
    config = op.runner.config
    if config is not None:
        return [f"fused kernel {config.label}: the config given to Gemm"]
    ranked = choose.ranked(binding.signature, binding.extents, target)
    lines = [f"fused kernel {ranked[0].config.label}: the fastest by the model (no measurement)"]
    lines += [f"  {choice.time_us:9.1f} us  {choice.config.label}" for choice in ranked[:6]]
    preferred = target.families[0]
    if ranked[0].config.family != preferred:
        reasons = choose.rejections(binding.signature, target, preferred)
        lines.append(f"not {preferred}: {reasons[0]}")
    return lines


def _best(binding: Binding, arch: Arch) -> choose.Ranked:
    return choose.ranked(binding.signature, binding.extents, arch)[0]


def _finish_texts(binding: Binding) -> list[str]:
    texts = []
    for output, result, dtype in zip(binding.outputs, binding.graph.results, binding.dtypes, strict=True):
        if output.reduce is not None:
            texts.append(pointwise.render_finish(output.reduce, dtype))
            if result.node.attr == "MN":
                texts.append(pointwise.render_finish(output.reduce, DType.F32))
    return texts
