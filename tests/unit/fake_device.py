"""A GPU in memory: plans are made and run as on a real one, but kernels are Python functions on the CPU.

The fake kernels compute one epilogue, `doubled`: D = 2 * accum + bias, in fp32.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path

import pytest
import torch

import gemmgen as gg
from gemmgen import jit, plan, runtime, torch_ops
from gemmgen.arch import ARCHS
from gemmgen.device import Target
from gemmgen.errors import CompileError

SM90 = Target(ARCHS["sm90"], 132, "Fake H200")


@gg.epilogue
def doubled(accum, bias: gg.Row):
    return 2 * accum + bias


def floats(address: int, *shape: int) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32).view(*shape)


def epilogue_of(args: jit.Args, accum: torch.Tensor) -> None:
    floats(args.outputs[0].ptr, args.m, args.n).copy_(2 * accum + floats(args.inputs[0].ptr, args.n))


class FakeKernel:
    """A fused kernel; `fault` is added to what it computes."""

    def __init__(self, device: FakeDevice, name: str):
        self.device, self.name = device, name

    def run(self, args: jit.Args, workspace: int, stream: int) -> None:
        self.device.ran.append(self.name)
        if self.name in self.device.failing:
            raise gg.LaunchError(f"{self.name} does not run")
        A = floats(args.a.ptr, args.m, args.k)
        B = floats(args.b.ptr, args.n, args.k).t()
        epilogue_of(args, A @ B + self.device.faults.get(self.name, 0.0))

    def workspace_bytes(self, args: jit.Args) -> int:
        return 64 if args.split_k > 1 else 0

    def partial_count(self, args: jit.Args, output: int) -> int:
        return 1


class FakeModule:
    def __init__(self, device: FakeDevice):
        self.device = device

    def launch(self, name, grid, block, arguments, stream, smem_bytes=0) -> None:
        self.device.ran.append(name)
        args = arguments[0]
        accum = floats(args.a.ptr, args.m, args.n) if args.a.ptr else torch.zeros(args.m, args.n)
        epilogue_of(args, accum)


class FakeDevice:
    """What ran, what was built, and what goes wrong.

    Attributes:
        ran: names of the kernels in the order of their launches; `gemmgen_pointwise` is the split way's.
        built: sources that were built and not found in the cache, by name.
        refused: names of kernels that do not compile.
        gate: set while builds may finish.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.built: list[str] = []
        self.refused: set[str] = set()
        self.failing: set[str] = set()
        self.faults: dict[str, float] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._cached: set[str] = set()
        self._lock = threading.Lock()

    def build(self, sources, *, on_error: str = "raise"):
        self.gate.wait(10)
        results: list[object] = []
        for source in sources:
            if source.name in self.refused:
                error = CompileError(f"{source.name} spills")
                if on_error == "raise":
                    raise error
                results.append(error)
                continue
            with self._lock:
                if source.name not in self._cached:
                    self.built.append(source.name)
                    self._cached.add(source.name)
            results.append(self._kernel(source.name))
        return results

    def find(self, source):
        return self._kernel(source.name) if source.name in self._cached else None

    def _kernel(self, name: str) -> jit.BuiltKernel:
        return jit.BuiltKernel(name, "sm90", Path(name), Path(name), "kernel", 168, 0, 0.0, 0.0)


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A fake device in the place of the real one, for tensors on the CPU."""
    device = FakeDevice()
    monkeypatch.setattr(jit, "build", device.build)
    monkeypatch.setattr(jit, "find", device.find)
    monkeypatch.setattr(jit, "build_module", lambda text, arch, name="module": Path("module"))
    monkeypatch.setattr(jit, "load_kernel", lambda built: FakeKernel(device, built.name))
    monkeypatch.setattr(jit, "load_module", lambda path: FakeModule(device))
    monkeypatch.setattr(plan, "stream_of", lambda index: 7)
    monkeypatch.setattr(runtime, "is_current", lambda index: False)
    monkeypatch.setattr(runtime, "made_current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(runtime, "target_of", lambda device: SM90)
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    monkeypatch.setattr(torch_ops, "is_capturing", lambda: False)
    return device


def call_of(M: int = 64, N: int = 128, K: int = 64):
    """A, B and the operands of `doubled`, in fp32: the tf32 mainloop takes them."""
    generator = torch.Generator().manual_seed(M)
    A = torch.randint(-3, 4, (M, K), generator=generator).float()
    B = torch.randint(-3, 4, (N, K), generator=generator).float().t()
    return A, B, {"bias": torch.randint(-3, 4, (N,), generator=generator).float()}
