"""The order of all passes, on one screen. Pure: no GPU, no disk.

    epilogue function --trace--> Graph --simplify--> Graph --bind--> Signature --choose--> GemmConfig
        --lower and render--> KernelSource (skeleton + functor)   or, unfused, the pointwise module
"""

from __future__ import annotations

from collections.abc import Callable

from gemmgen.arch import Arch
from gemmgen.bind import Binding, EpilogueBinding
from gemmgen.choose import reject_reason
from gemmgen.config import GemmConfig
from gemmgen.dsl import Epilogue
from gemmgen.dtypes import DType
from gemmgen.errors import IllegalConfig
from gemmgen.ir.graph import Graph
from gemmgen.ir.text import to_text
from gemmgen.ir.verify import verified
from gemmgen.lower import sm80, sm90, sm100
from gemmgen.pointwise import render_pointwise
from gemmgen.render import render_functors
from gemmgen.signature import Signature
from gemmgen.simplify import simplify
from gemmgen.source import KernelSource
from gemmgen.trace import trace

RENDER_SKELETON: dict[str, Callable[[Signature, GemmConfig, Arch], str]] = {
    "sm90": sm90.render_skeleton,
    "sm80": sm80.render_skeleton,
    "sm100": sm100.render_skeleton,
}


def graph_of(epilogue: Epilogue, accum: DType = DType.F32) -> Graph:
    """The canonical graph of an epilogue.

    Raises:
        TraceError, VerifyError: the function is not an epilogue; the message names the line.
    """
    return verified(simplify(trace(epilogue, accum)))


def kernel_source(binding: Binding, config: GemmConfig, arch: Arch) -> KernelSource:
    """The CUDA text of the fused kernel.

    Raises:
        IllegalConfig: `config` cannot run the problem on `arch`; the message says why.
    """
    signature = binding.signature
    if reason := reject_reason(signature, config, arch):
        raise IllegalConfig(
            f"{config.label} cannot run `{binding.graph.name}` on {arch.name}: {reason}\n"
            "  Give another config, or none: then one that can run it is chosen."
        )
    compiled = config.compiled()
    dtypes = [output.dtype for output in binding.outputs]
    return KernelSource(
        f"{binding.graph.name}_{config.label}",
        arch,
        skeleton=lambda: RENDER_SKELETON[config.family](signature, compiled, arch),
        functor=lambda: render_functors(binding.graph, binding.slots, dtypes),
        inputs=repr((signature, compiled, arch, to_text(binding.graph), binding.slots)),
    )


def pointwise_source(binding: EpilogueBinding, vector: int) -> str:
    """The CUDA text of the unfused epilogue: the same functors over an accumulator in memory, or over none."""
    return render_pointwise(binding.graph, binding.slots, binding.inputs, binding.outputs, vector)
