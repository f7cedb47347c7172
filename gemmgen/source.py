"""`KernelSource`: the two rendered texts that the JIT turns into a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from gemmgen.arch import Arch


@dataclass(frozen=True)
class KernelSource:
    """CUDA text of one kernel.

    Attributes:
        name: readable name for files, progress lines and errors, such as `bias_gelu_sm90_128x256x64_2x1`.
        arch: what to compile for.
        skeleton: mainloop, loads and stores; compiled by nvcc, twice: to LTO-IR, and with
            `-DGEMMGEN_LAUNCHER` to a host library with the C ABI of `gemmgen/abi.h`.
        functor: the arithmetic; compiled by NVRTC to LTO-IR.
    """

    name: str
    arch: Arch
    skeleton: str
    functor: str
