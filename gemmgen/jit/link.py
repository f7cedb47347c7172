"""Links a skeleton's LTO-IR with a functor's to a cubin (nvJitLink), and refuses cubins that spill registers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmgen.arch import Arch
from gemmgen.errors import CompileError, UnfitKernel
from gemmgen.jit.compile import SERIALIZED_REASON, is_serialized
from gemmgen.jit.toolchain import nvjitlink

LINK_FLAGS = ("-lto", "-O3", "-Xptxas=-v")  # -v puts the resource usage into the info log
# What the driver's own cache holds is not compiled, and the log then says nothing of it: neither kernels nor spills.
# Not among LINK_FLAGS, which are part of a kernel's key: the kernel is the same.
NO_DRIVER_CACHE = "-no-cache"


@dataclass(frozen=True)
class Linked:
    """A cubin and what ptxas said of it.

    Attributes:
        kernel: the mangled name of its one kernel.
        registers: per thread.
        spill_bytes: stores and loads of spilled registers, in bytes per thread.
        stack_bytes: stack frame per thread.
        log: nvJitLink's info log.
    """

    cubin: bytes = field(repr=False)
    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    seconds: float
    log: str = field(repr=False)


def link(parts: Mapping[str, bytes], arch: Arch, *, name: str = "kernel", allow_spills: bool = False) -> Linked:
    """Link the LTO-IR `parts` (name to bytes) for `arch`; half a second for a CUTLASS kernel.

    Raises:
        CompileError: an undefined functor, LTO-IR that is newer than nvJitLink, more or fewer kernels than one.
        UnfitKernel: spills that are not allowed, or serialised wgmma.
        ToolchainError: nvJitLink is missing.
    """
    started = time.perf_counter()
    cubin, log = _run(parts, [f"-arch=sm_{arch.target}", *LINK_FLAGS, NO_DRIVER_CACHE], name)
    kernels = re.findall(r"Compiling entry function '(\S+)'", log)
    if len(kernels) != 1:
        raise CompileError(f"kernel `{name}`: a cubin must hold one kernel, and this one holds {len(kernels)}", log=log)
    linked = Linked(cubin, kernels[0], **resources(log), seconds=time.perf_counter() - started, log=log)
    if is_serialized(log):
        raise UnfitKernel(f"kernel `{name}`: {SERIALIZED_REASON}", log=log)
    if linked.spill_bytes and not allow_spills:
        raise UnfitKernel(
            f"kernel `{name}` spills {linked.spill_bytes} bytes of registers per thread ({linked.registers} used), "
            "which makes it slow.\n  Take a smaller tile_shape or epilogue_tile.",
            log=log,
        )
    return linked


def resources(log: str) -> dict[str, int]:
    """Registers, spills and stack that ptxas reports in an info log; the worst function counts."""
    spills = [sum(map(int, pair)) for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)]
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        "spill_bytes": max(spills, default=0),
        "stack_bytes": max(map(int, re.findall(r"(\d+) bytes stack frame", log)), default=0),
    }


def _run(parts: Mapping[str, bytes], options: list[str], name: str) -> tuple[bytes, str]:
    binding = nvjitlink()
    linker = binding.create(len(options), options)
    try:
        for part, ir in parts.items():
            binding.add_data(linker, binding.InputType.LTOIR, ir, len(ir), part)
        binding.complete(linker)
        cubin = bytearray(binding.get_linked_cubin_size(linker))
        binding.get_linked_cubin(linker, cubin)
        return bytes(cubin), _log(linker, binding.get_info_log_size, binding.get_info_log)
    except binding.nvJitLinkError as error:
        log = _log(linker, binding.get_error_log_size, binding.get_error_log)
        raise _link_error(name, str(error), log) from error
    finally:
        binding.destroy(linker)


def _log(linker: int, size_of: Any, copy_to: Any) -> str:
    size = size_of(linker)
    if size <= 1:
        return ""
    text = bytearray(size)
    copy_to(linker, text)
    return text.rstrip(b"\0").decode(errors="replace")


def _link_error(name: str, status: str, log: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in lines if re.search("fatal|error", line, re.IGNORECASE)), status)
    mend = ""
    if "OUTDATED" in status or "newer toolkit" in log:
        mend = "\n  nvJitLink is older than the compilers: `gemmgen doctor` says which wheels fit."
    return CompileError(f"nvJitLink failed on kernel `{name}`:\n  {reason[:600]}{mend}", log=f"{status}\n{log}")
