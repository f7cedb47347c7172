"""`KernelSource`: the two texts that the JIT turns into a kernel, rendered when somebody needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gemmgen.arch import Arch

Text = str | Callable[[], str]


class KernelSource:
    """CUDA text of one kernel.

    Args:
        name: readable name for files, progress lines and errors, such as `bias_gelu_sm90_128x256x64_2x1`.
        arch: what to compile for.
        skeleton: mainloop, loads and stores; compiled by nvcc, twice: to LTO-IR, and with
            `-DGEMMGEN_LAUNCHER` to a host library with the C ABI of `gemmgen/abi.h`.
        functor: the arithmetic; compiled by NVRTC to LTO-IR.
        inputs: all that the texts are made from, beside gemmgen's own code. Where it is given, a kernel that is in the
            cache is found by it, without rendering anything.
    """

    def __init__(self, name: str, arch: Arch, skeleton: Text, functor: Text, inputs: str = ""):
        self.name = name
        self.arch = arch
        self.inputs = inputs
        self._skeleton, self._functor = skeleton, functor

    @functools.cached_property
    def skeleton(self) -> str:
        return self._skeleton if isinstance(self._skeleton, str) else self._skeleton()

    @functools.cached_property
    def functor(self) -> str:
        return self._functor if isinstance(self._functor, str) else self._functor()

    def __repr__(self) -> str:
        return f"<KernelSource {self.name} for {self.arch.name}>"
