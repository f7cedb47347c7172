"""What planning and launching ask of a CUDA device. The only module that does, so that tests can stand in for one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gemmgen.arch import Arch, arch_of_capability
from gemmgen.errors import LaunchError
from gemmgen.jit import load

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_thread = threading.local()


@dataclass(frozen=True)
class Target:
    """A device that plans are made for. `name` is empty for one that is not here."""

    arch: Arch
    sm_count: int
    name: str = ""


@functools.lru_cache(maxsize=64)
def target_of(device: torch.device) -> Target:
    """The target that a CUDA device is."""
    properties = torch.cuda.get_device_properties(device)
    arch = arch_of_capability((properties.major, properties.minor), properties.name)
    return Target(arch, properties.multi_processor_count, properties.name)


def absent_target(arch: Arch) -> Target:
    """A device of `arch` that is not in this machine: for ahead-of-time builds."""
    return Target(arch, arch.sm_count)


def current_index() -> int:
    """The index of torch's current device."""
    return torch.cuda.current_device()


def is_current(index: int) -> bool:
    """Whether device `index` is torch's current one and its CUDA context is current in this thread."""
    return getattr(_thread, "has_context", False) and torch.cuda.current_device() == index


@contextlib.contextmanager
def made_current(device: torch.device) -> Iterator[None]:
    """A block in which `device` is the current one, with its CUDA context in this thread.

    torch leaves a thread without a context until its first CUDA call there, and autograd's threads may reach a
    kernel of ours before one.
    """
    with torch.cuda.device(device):
        load.adopt_context(torch.cuda.current_device() if device.index is None else device.index)
        _thread.has_context = True
        yield


def stream_of(index: int) -> int:
    """torch's current stream on device `index`, as a CUstream."""
    return _raw_stream()(index)


@functools.lru_cache(maxsize=1)
def _raw_stream() -> Callable[[int], int]:
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without a Stream object for each call
    return fast or (lambda index: torch.cuda.current_stream(index).cuda_stream)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=1)
def driver_version() -> str:
    """The version of the NVIDIA driver, else the CUDA version that it supports; empty where there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\d+\.\d+(\.\d+)*", _DRIVER_FILE.read_text().partition("Module")[2]):
            return found.group()
    with contextlib.suppress(LaunchError):
        version = ctypes.c_int()
        load.driver().cuDriverGetVersion(ctypes.byref(version))
        return f"CUDA {version.value}"
    return ""
