"""Links a skeleton's LTO-IR with a functor's to a cubin (nvJitLink), and refuses cubins that spill registers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmgen.arch import Arch
from gemmgen.errors import CompileError
from gemmgen.jit.toolchain import nvjitlink_version

LINK_FLAGS = ("-lto", "-O3", "-Xptxas=-v")  # -v puts the resource usage into the info log


@dataclass(frozen=True)
class Linked:
    """A cubin and what ptxas said of it.

    Attributes:
        registers: per thread, of the kernel that needs most.
        spill_bytes: stores and loads of spilled registers, in bytes per thread.
        stack_bytes: stack frame per thread.
        log: nvJitLink's info log.
    """

    cubin: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    stack_bytes: int
    seconds: float
    log: str = field(repr=False)


def link(parts: Mapping[str, bytes], arch: Arch, *, name: str = "kernel", allow_spills: bool = False) -> Linked:
    """Link the LTO-IR `parts` (name to bytes) for `arch`; 2 to 4 s for a CUTLASS kernel.

    Raises:
        CompileError: an undefined functor, LTO-IR that is newer than nvJitLink, or spills that are not allowed.
        ToolchainError: nvJitLink is missing.
    """
    nvjitlink_version()  # a missing library becomes a ToolchainError here
    started = time.perf_counter()
    cubin, log = _run(parts, [f"-arch=sm_{arch.target}", *LINK_FLAGS], name)
    linked = Linked(cubin, **resources(log), seconds=time.perf_counter() - started, log=log)
    if linked.spill_bytes and not allow_spills:
        raise CompileError(
            f"kernel `{name}` spills {linked.spill_bytes} bytes of registers per thread ({linked.registers} used), "
            "which makes it slow.\n  Take a smaller tile_shape or epilogue_tile.",
            log=log,
        )
    return linked


def resources(log: str) -> dict[str, int]:
    """Registers, spills and stack that ptxas reports in an info log; the worst kernel counts."""
    spills = [sum(map(int, pair)) for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)]
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        "spill_bytes": max(spills, default=0),
        "stack_bytes": max(map(int, re.findall(r"(\d+) bytes stack frame", log)), default=0),
    }


def _run(parts: Mapping[str, bytes], options: list[str], name: str) -> tuple[bytes, str]:
    from cuda.bindings import nvjitlink

    linker = nvjitlink.create(len(options), options)
    try:
        for part, ir in parts.items():
            nvjitlink.add_data(linker, nvjitlink.InputType.LTOIR, ir, len(ir), part)
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        return bytes(cubin), _log(linker, nvjitlink.get_info_log_size, nvjitlink.get_info_log)
    except nvjitlink.nvJitLinkError as error:
        log = _log(linker, nvjitlink.get_error_log_size, nvjitlink.get_error_log)
        raise _link_error(name, str(error), log) from error
    finally:
        nvjitlink.destroy(linker)


def _log(linker: int, size_of: Any, copy_to: Any) -> str:
    size = size_of(linker)
    if size <= 1:
        return ""
    text = bytearray(size)
    copy_to(linker, text)
    return text.rstrip(b"\0").decode(errors="replace")


def _link_error(name: str, status: str, log: str) -> CompileError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else status)
    mend = ""
    if "OUTDATED" in status or "newer toolkit" in log:
        mend = "\n  nvJitLink is older than the compilers: `gemmgen doctor` says which wheels fit."
    return CompileError(f"nvJitLink failed on kernel `{name}`:\n  {reason[:600]}{mend}", log=f"{status}\n{log}")
