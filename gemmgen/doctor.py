"""Looks at everything that gemmgen needs of a machine, and says what to do about what is missing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gemmgen.arch import arch_of_capability
from gemmgen.errors import GemmgenError
from gemmgen.jit import toolchain
from gemmgen.jit.cache import cache_of
from gemmgen.settings import settings

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What was found about one topic; `mend` says what to do, and is empty when there is nothing to do."""

    topic: str
    status: Status
    text: str
    mend: str = ""


def diagnose() -> list[Finding]:
    """Look at GPU, driver, torch, compilers, CUTLASS and the cache. Changes nothing; takes about a second."""
    return [_guarded(topic, look) for topic, look in _TOPICS.items()]


def _guarded(topic: str, look: Callable[[], tuple[Status, str, str]]) -> Finding:
    """The finding of one look; an error of gemmgen is a failure whose later lines are the mend."""
    try:
        return Finding(topic, *look())
    except GemmgenError as error:
        text, _, mend = str(error).partition("\n")
        return Finding(topic, "fail", text, " ".join(mend.split()))


def _look_at_torch() -> tuple[Status, str, str]:
    import torch

    cuda = torch.version.cuda
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 9):
        return "fail", f"torch {torch.__version__}", 'gemmgen needs 2.9 or newer: pip install -U "torch>=2.9"'
    if cuda is None:
        return "warn", f"torch {torch.__version__}, without CUDA", "Install a CUDA build of torch to run on a GPU."
    return "ok", f"torch {torch.__version__}, CUDA {cuda}", ""


def _look_at_gpu() -> tuple[Status, str, str]:
    import torch

    if not torch.cuda.is_available():
        return "warn", "no usable GPU: only the CPU implementation and ahead-of-time builds work", ""
    names = []
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        names.append(f"{name} ({arch_of_capability(capability, name).name})")
    return "ok", ", ".join(names), ""


def _look_at_driver() -> tuple[Status, str, str]:
    version = _driver_version()
    if version is None:
        return "warn", "no NVIDIA driver (libcuda.so.1)", "Install the driver to run on a GPU."
    linker = toolchain.nvjitlink_version()
    text = f"supports CUDA {toolchain.version_text(version)}"
    if version[0] < linker[0]:
        mend = f"Install a driver for CUDA {linker[0]}, or torch and cuda-bindings for CUDA {version[0]}."
        return "fail", f"{text}, and kernels are linked for CUDA {linker[0]}", mend
    return "ok", text, ""


def _driver_version() -> toolchain.Version | None:
    """CUDA version that the driver supports, or None without a driver. Does not start CUDA."""
    import ctypes

    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return (version.value // 1000, version.value % 1000 // 10) if status == 0 else None


def _look_at_nvcc() -> tuple[Status, str, str]:
    nvcc = toolchain.find_nvcc(settings())
    version = toolchain.nvcc_version(nvcc)
    text = f"{toolchain.version_text(version)} at {nvcc}"
    if fault := toolchain.version_fault(version, nvcc) or toolchain.wheels_fault(nvcc, version):
        return "fail", text, " ".join(fault.split())
    return "ok", text, ""


def _look_at_nvrtc() -> tuple[Status, str, str]:
    return "ok", toolchain.version_text(toolchain.nvrtc_version()), ""


def _look_at_nvjitlink() -> tuple[Status, str, str]:
    return "ok", toolchain.version_text(toolchain.nvjitlink_version()), ""


def _look_at_fit() -> tuple[Status, str, str]:
    tools = toolchain.toolchain()
    return "ok", f"nvcc {tools.nvcc_version}, NVRTC and nvJitLink fit each other", ""


def _look_at_cutlass() -> tuple[Status, str, str]:
    cutlass = toolchain.find_cutlass()
    return "ok", f"{cutlass.version} at {cutlass.include_dirs[0]}", ""


def _look_at_host_compiler() -> tuple[Status, str, str]:
    return "ok", str(toolchain.find_host_compiler(settings())), ""


def _look_at_dispatcher() -> tuple[Status, str, str]:
    from gemmgen import dispatcher

    if not settings().dispatcher:
        return "warn", "off: every call goes through Python", "Unset GEMMGEN_DISPATCHER."
    if entry := dispatcher.find():
        dispatcher.load_library(entry.path)  # says what is wrong
        return "ok", "built for this torch", ""
    toolchain.find_host_compiler(settings())  # says what is missing
    return "warn", "not built for this torch: calls go through Python", "Run `gemmgen dispatcher`, once."


def _look_at_cache() -> tuple[Status, str, str]:
    current = settings()
    cache = cache_of(current)
    entries = cache.entries()
    used = sum(entry.size_bytes for entry in entries) / 1e9
    text = f"{cache.root}: {len(entries)} entries, {used:.2f} of {cache.max_bytes / 1e9:g} GB"
    if reason := _write_fault(cache.root):
        return "warn", f"{text}; cannot be written ({reason})", "Set GEMMGEN_CACHE_DIR to a folder that can be written."
    return "ok", text, ""


def _write_fault(folder: Path) -> str | None:
    """Why nothing can be written to `folder`, which need not exist yet; or None."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _look_at_compiling() -> tuple[Status, str, str]:
    if settings().compile_allowed:
        return "ok", "allowed", ""
    return "warn", "forbidden: only kernels in the cache can run", "Unset GEMMGEN_COMPILE to build others."


_TOPICS: dict[str, Callable[[], tuple[Status, str, str]]] = {
    "torch": _look_at_torch,
    "GPU": _look_at_gpu,
    "driver": _look_at_driver,
    "nvcc": _look_at_nvcc,
    "host compiler": _look_at_host_compiler,
    "NVRTC": _look_at_nvrtc,
    "nvJitLink": _look_at_nvjitlink,
    "fit": _look_at_fit,
    "CUTLASS": _look_at_cutlass,
    "compiling": _look_at_compiling,
    "C++ dispatcher": _look_at_dispatcher,
    "cache": _look_at_cache,
}
