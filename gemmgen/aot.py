"""Ahead of a call: what it would run, built or explained from metadata alone without a GPU, or tuned on one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemmgen import choose, jit, ways
from gemmgen.arch import Arch, arch_named, arch_of_capability
from gemmgen.bind import Binding
from gemmgen.config import GemmConfig
from gemmgen.device import Target, absent_target, current_index, made_current, target_of
from gemmgen.errors import OperandError, UnsupportedArch
from gemmgen.ir.text import to_text
from gemmgen.jit.build import BuiltKernel
from gemmgen.ops import EpilogueOp
from gemmgen.plan import Operands, finish_texts, pointwise_text
from gemmgen.runtime import bind_call, selected
from gemmgen.source import KernelSource
from gemmgen.torch_ops import TorchOp, torch_op
from gemmgen.tuned import Entry
from gemmgen.ways import UNFUSED, Fused, Library, Selection, Way

MAX_LISTED = 8


def arch_for(name: str | None) -> Arch:
    """The arch called `name`, or that of the current GPU.

    Raises:
        UnsupportedArch: unknown, or none given and there is no GPU.
    """
    if name is not None:
        return arch_named(name)
    if not torch.cuda.is_available():
        raise UnsupportedArch(
            "there is no GPU here to take the architecture from\n"
            '  Name one: arch="sm90", or --arch sm90 on the command line.'
        )
    return arch_of_capability(torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def _target(arch: Arch) -> Target:
    """The current GPU where it is of `arch`, else one of that kind that is not here."""
    if torch.cuda.is_available():
        here = target_of(torch.device("cuda", current_index()))
        if here.arch == arch:
            return here
    return absent_target(arch)


def source(
    op: EpilogueOp, A: Tensor, B: Tensor, operands: Operands, arch: str | None, out_dtype: torch.dtype | None
) -> KernelSource:
    """The CUDA text of the fused kernel of a call with such tensors."""
    binding, target = bind_call(op.graph_for, A, B, operands, out_dtype), arch_for(arch)
    return _fused_ways(op, binding, target)[0].source(binding, target)


def build(
    op: EpilogueOp, A: Tensor, B: Tensor, operands: Operands, arch: str | None, out_dtype: torch.dtype | None
) -> BuiltKernel:
    """Compile the fused kernel of a call with such tensors, and the small kernels beside it, into the cache."""
    binding, target = bind_call(op.graph_for, A, B, operands, out_dtype), arch_for(arch)
    _, built = ways.first_built(_fused_ways(op, binding, target), binding, target)
    for text in (*finish_texts(binding), pointwise_text(binding)):
        jit.build_module(text, target)
    return built


def _fused_ways(op: EpilogueOp, binding: Binding, arch: Arch) -> list[Fused]:
    chosen = selected(binding, _target(arch), op.runner.options)
    others = ways.select(binding, _target(arch), op.runner.options.config)
    return [way for way in (*chosen.ways, *others.ways) if isinstance(way, Fused)]


def tune(
    op: EpilogueOp,
    A: Tensor,
    B: Tensor,
    operands: Operands,
    out_dtype: torch.dtype | None,
    configs: Sequence[GemmConfig] | None,
    most: int,
    rounds: int,
) -> Entry:
    """Measure the ways to run a call with these tensors, and let the op choose by that from now on."""
    with torch.no_grad(), made_current(A.device):
        from gemmgen.tune import measured  # only what is measured needs it

        call = op.runner.tunable(A.detach(), B.detach(), operands, out_dtype)
        if call.binding.is_empty or call.binding.extents.K == 0:
            raise OperandError(f"`{op.graph.name}` has nothing to tune: an extent is 0")
        entry = measured(call, configs, most, rounds)
    op.runner.forget_plans()
    return entry


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
    return "\n".join(lines + _choices(op, binding, _target(target)))


def explain_product(op: EpilogueOp, A: Tensor, B: Tensor, arch: str | None) -> str:
    """In one line, what a call without operands multiplies, by what and why."""
    binding, target = bind_call(op.graph_for, A, B, {}, None), _target(arch_for(arch))
    extents = binding.extents
    mnkl = f"(M, N, K, L) = ({extents.M}, {extents.N}, {extents.K}, {extents.L})"
    if binding.is_empty or extents.K == 0:
        return f"{mnkl}, nothing to multiply"
    selection = selected(binding, target, op.runner.options)
    return f"{mnkl}, {_title(selection.ways[0], binding, target)}: {selection.why}"


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


def _choices(op: EpilogueOp, binding: Binding, target: Target) -> list[str]:
    selection = selected(binding, target, op.runner.options)
    first = selection.ways[0]
    notes = [*selection.notes, *_why_not_preferred(selection, binding, target)]
    if isinstance(first, Fused):
        notes += _meanwhile(op, binding, target)
    return [f"{_title(first, binding, target)}: {selection.why}", *_table(selection), *notes]


def _title(way: Way, binding: Binding, target: Target) -> str:
    if isinstance(way, Fused):
        return f"fused kernel {way.config.label}"
    found = torch_op(binding, target.arch) if isinstance(way, Library) else None
    return f"torch's own op, {found.name}" if isinstance(found, TorchOp) else "unfused: a kernel after cuBLAS"


def _meanwhile(op: EpilogueOp, binding: Binding, target: Target) -> list[str]:
    if op.runner.options.compile != "background":
        return []
    able = [way for way in UNFUSED.values() if way.reject_reason(binding, target.arch) is None]
    if not able:
        return ["the first call waits for the compilers, as torch has no such product"]
    return [f"until that kernel is built, calls run by {able[0].label}"]


def _table(selection: Selection) -> list[str]:
    return [f"  {timed.time_us:9.1f} us  {timed.way.label}" for timed in selection.table[:MAX_LISTED]]


def _why_not_preferred(selection: Selection, binding: Binding, target: Target) -> list[str]:
    preferred = target.arch.families[0]
    if any(isinstance(way, Fused) and way.config.family == preferred for way in selection.ways):
        return []
    return [f"not {preferred}: {choose.rejections(binding.signature, target.arch, preferred)[0]}"]
