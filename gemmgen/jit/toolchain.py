"""Finds nvcc, CUTLASS, the host compiler, NVRTC and nvJitLink, and says what to do where one is missing or unfit.

The rule that binds them: LTO-IR may only be linked by an nvJitLink of the same major version that is at least as
new as the compiler that made it. The nvJitLink that torch has loaded wins, so nvcc and NVRTC are chosen to fit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmgen.errors import ToolchainError
from gemmgen.settings import Settings, settings
from gemmgen.templates import templates_dir

Version = tuple[int, ...]

MINIMUM_NVCC: Version = (12, 8)
SYSTEM_CUDA = Path("/usr/local/cuda")
# every wheel that compiling a skeleton needs, beside NVRTC and nvJitLink; all of nvcc's own major.minor
TOOLKIT_WHEELS = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
)
# a file of each part that a toolkit may lack: (path below an include folder, what it is, the wheel that brings it)
_HEADERS = (
    ("cuda_runtime.h", "CUDA runtime headers", "nvidia-cuda-runtime"),
    ("cuda.h", "CUDA driver header", "nvidia-cuda-runtime"),
    ("crt/host_config.h", "compiler headers", "nvidia-cuda-crt"),
    ("cuda/std/utility", "CCCL headers", "nvidia-cuda-cccl"),
)


@dataclass(frozen=True)
class Cutlass:
    """The installed CUTLASS source: its folders for `-I` and its version, such as `4.2.0`."""

    include_dirs: tuple[Path, ...]
    version: str


@dataclass(frozen=True)
class Toolchain:
    """A complete set of tools that fit each other, as far as can be seen without compiling.

    Attributes:
        nvcc: path of the compiler driver; `nvcc_version` such as `13.0.88`.
        host_compiler: path of the C++ compiler that nvcc calls.
        library_dirs: folders that the launcher must be linked with, beyond those that nvcc knows.
    """

    nvcc: Path
    nvcc_version: str
    cutlass: Cutlass
    host_compiler: Path
    library_dirs: tuple[Path, ...]


def toolchain() -> Toolchain:
    """The tools that the current settings choose.

    Raises:
        ToolchainError: one is missing, too old, or does not fit; the message names the mend.
    """
    current = settings()
    nvcc = find_nvcc(current)
    version = nvcc_version(nvcc)
    if fault := version_fault(version, nvcc):
        raise ToolchainError(fault)
    return _fitting(nvcc, version, find_host_compiler(current), find_cutlass())


@functools.lru_cache(maxsize=8)
def _fitting(nvcc: Path, version: Version, host_compiler: Path, cutlass: Cutlass) -> Toolchain:
    """The toolchain of these parts, checked once."""
    layout = _toolkit_layout(nvcc, host_compiler)
    if fault := _headers_fault(layout, version) or wheels_fault(nvcc, version) or fit_fault(
        version, nvrtc_version(), nvjitlink_version()
    ):
        raise ToolchainError(fault)
    return Toolchain(nvcc, version_text(version), cutlass, host_compiler, layout.library_dirs)


# ---- nvcc


def find_nvcc(current: Settings) -> Path:
    """The nvcc that the settings and the machine give: the first of `nvcc_candidates`."""
    if current.nvcc is not None:
        return _explicit_nvcc(Path(current.nvcc))
    if current.cuda_home is not None:
        return _cuda_home_nvcc(Path(current.cuda_home))
    for candidate in nvcc_candidates():
        return candidate
    raise ToolchainError(
        "nvcc was not found: neither on PATH, nor in /usr/local/cuda, nor as a wheel.\n"
        f"  Install it with {_wheels_command((13, 0))}\n"
        "  or set GEMMGEN_NVCC to an nvcc, or CUDA_HOME to a CUDA toolkit."
    )


def nvcc_candidates() -> Iterator[Path]:
    """Every nvcc that is found without being named: on PATH, in /usr/local/cuda, in the PyPI wheels."""
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    if _is_executable(SYSTEM_CUDA / "bin/nvcc"):
        yield SYSTEM_CUDA / "bin/nvcc"
    for folder in _nvidia_folders():
        yield from (path for path in sorted(folder.glob("cu*/bin/nvcc"), reverse=True) if _is_executable(path))


def _explicit_nvcc(path: Path) -> Path:
    if not _is_executable(path):
        raise ToolchainError(f"GEMMGEN_NVCC={path} is not an executable file.\n  Correct it, or unset it.")
    return path


def _cuda_home_nvcc(home: Path) -> Path:
    if not _is_executable(home / "bin/nvcc"):
        raise ToolchainError(
            f"CUDA_HOME={home} has no bin/nvcc.\n"
            "  Point it at a complete CUDA toolkit, unset it (and CUDA_PATH), or set GEMMGEN_NVCC."
        )
    return home / "bin/nvcc"


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _nvidia_folders() -> list[Path]:
    """The `nvidia` namespace folders of the installed wheels."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def nvcc_version(nvcc: Path) -> Version:
    """(major, minor, build) that `nvcc --version` reports; about 3 ms once, then remembered."""
    stat = nvcc.stat()
    return _nvcc_version(nvcc, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=8)
def _nvcc_version(nvcc: Path, mtime_ns: int, size: int) -> Version:
    del mtime_ns, size  # part of the cache key only
    output = _output_of([str(nvcc), "--version"])
    if match := re.search(r"\bV(\d+)\.(\d+)\.(\d+)", output):
        return tuple(map(int, match.groups()))
    raise ToolchainError(f"{nvcc} --version does not print a version:\n  {output[:200]!r}\n  Set GEMMGEN_NVCC.")


def _output_of(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{command[0]} does not run: {error}.\n  Set GEMMGEN_NVCC to one that does.") from error
    return result.stdout + result.stderr


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


def version_fault(version: Version, nvcc: Path) -> str | None:
    """Why this nvcc is too old, or None."""
    if version >= MINIMUM_NVCC:
        return None
    others = [str(path) for path in nvcc_candidates() if path != nvcc]
    hint = f" (also here: {', '.join(others)})" if others else ""
    return (
        f"{nvcc} is version {version_text(version)}; gemmgen needs {version_text(MINIMUM_NVCC)} or newer.\n"
        f"  Set GEMMGEN_NVCC to a newer one{hint}, or install it with {_wheels_command((13, 0))}"
    )


# ---- headers and wheels


@dataclass(frozen=True)
class _Layout:
    """Where one nvcc looks for the parts of its toolkit."""

    include_dirs: tuple[Path, ...]
    cicc: Path
    library_dirs: tuple[Path, ...]


@functools.lru_cache(maxsize=8)
def _toolkit_layout(nvcc: Path, host_compiler: Path) -> _Layout:
    """Ask nvcc itself, which also sees through wrapper scripts and distributions' own layouts.

    Raises:
        ToolchainError: nvcc does not work with the host compiler; it asks that first.
    """
    output = _output_of([str(nvcc), "-ccbin", str(host_compiler), "-dryrun", "-E", "-x", "cu", os.devnull])
    if fatal := re.search(r"^nvcc fatal.*$", output, re.MULTILINE):
        raise ToolchainError(
            f"{nvcc} does not work with the host compiler {host_compiler}:\n  {fatal[0]}\n"
            "  See whether that compiler works by itself, or set GEMMGEN_CXX to another g++."
        )
    found = dict(re.findall(r"^#\$ (TOP|INCLUDES|SYSTEM_INCLUDES|CICC_PATH)=(.*)$", output, re.MULTILINE))
    top = Path(found.get("TOP", nvcc.parent.parent))
    quoted = re.findall(r'"(?:-I)?(/[^"]+)"', found.get("INCLUDES", "") + found.get("SYSTEM_INCLUDES", ""))
    include_dirs = (*map(Path, quoted), top / "include", top / "include/cccl", Path("/usr/include"))
    # the wheels keep their libraries in lib, where their nvcc looks in lib64
    library_dirs = (top / "lib",) if (top / "lib/libcudart_static.a").is_file() else ()
    return _Layout(include_dirs, Path(found.get("CICC_PATH", top / "nvvm/bin")) / "cicc", library_dirs)


def _headers_fault(layout: _Layout, version: Version) -> str | None:
    """Which part of the toolkit is missing, and the wheel that brings it; or None."""
    parts = [(f, what, wheel) for f, what, wheel in _HEADERS if not any((d / f).exists() for d in layout.include_dirs)]
    if not layout.cicc.exists() and not shutil.which("cicc"):
        parts.append((str(layout.cicc), "device compiler (cicc)", "nvidia-nvvm"))
    if not parts:
        return None
    file, what, wheel = parts[0]
    return (
        f"the CUDA toolkit of nvcc {version_text(version)} has no {what} ({file}).\n"
        f'  Install the complete toolkit, or the wheel: pip install "{wheel}=={version_text(version[:2])}.*"'
    )


def wheels_fault(nvcc: Path, version: Version) -> str | None:
    """Which wheels differ in major.minor from an nvcc that is itself a wheel, or None.

    pip takes the newest cicc, CCCL and headers for an nvcc that is pinned alone, and those do not fit it.
    """
    if not any(folder in nvcc.parents for folder in _nvidia_folders()):
        return None
    wanted = version_text(version[:2])
    found = {wheel: distribution_version(wheel) for wheel in TOOLKIT_WHEELS}
    unfit = [f"{wheel} {have or '(missing)'}" for wheel, have in found.items() if not have.startswith(wanted + ".")]
    if not unfit:
        return None
    return f"nvcc is the wheel {version_text(version)}, but: {', '.join(unfit)}.\n  Fit: {_wheels_command(version)}"


def _wheels_command(version: Version) -> str:
    pin = version_text(version[:2])
    return "pip install " + " ".join(f'"{wheel}=={pin}.*"' for wheel in TOOLKIT_WHEELS)


def distribution_version(*names: str) -> str:
    """Version of the first of these distributions that is installed; empty when none is."""
    from importlib import metadata

    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


# ---- CUTLASS, our headers, the host compiler


@functools.lru_cache(maxsize=1)
def find_cutlass() -> Cutlass:
    """The CUTLASS source of the nvidia-cutlass wheel, found without importing its slow package."""
    source = _cutlass_source()
    if source is None:
        raise ToolchainError('the CUTLASS headers are not installed.\n  pip install "nvidia-cutlass==4.2.*"')
    version_header = source / "include/cutlass/version.h"
    if not version_header.is_file():
        raise ToolchainError(
            f"{source} has no include/cutlass/version.h: the nvidia-cutlass wheel is damaged.\n"
            '  pip install --force-reinstall --no-deps "nvidia-cutlass==4.2.*"'
        )
    numbers = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", version_header.read_text()))
    version = ".".join(numbers.get(part, "0") for part in ("MAJOR", "MINOR", "PATCH"))
    return Cutlass((source / "include", source / "tools/util/include"), version)


def _cutlass_source() -> Path | None:
    spec = importlib.util.find_spec("cutlass_library")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        return Path(folder) / "source"
    return None


def template_include_dir() -> Path:
    """The folder with `gemmgen/abi.h` and the other headers that skeletons include."""
    folder = templates_dir() / "include"
    if not (folder / "gemmgen/abi.h").is_file():
        raise ToolchainError(f"gemmgen's own headers are missing from {folder}: reinstall gemmgen")
    return folder


def find_host_compiler(current: Settings) -> Path:
    name = current.host_compiler or "g++"
    if found := shutil.which(name):
        return Path(found)
    if current.host_compiler:
        raise ToolchainError(f"the host compiler {name!r} (GEMMGEN_CXX or NVCC_CCBIN) does not exist.\n  Correct it.")
    raise ToolchainError(
        "nvcc needs a host C++ compiler, and g++ is not on PATH.\n"
        "  Install it (apt-get install g++, dnf install gcc-c++), or set GEMMGEN_CXX to one."
    )


# ---- NVRTC and nvJitLink


@functools.lru_cache(maxsize=1)
def nvrtc() -> Any:
    """The binding `cuda.bindings.nvrtc`, its library loaded. Raises ToolchainError where that fails."""
    return _binding("nvrtc", "NVRTC", "nvidia-cuda-nvrtc", "nvrtcVersion")


@functools.lru_cache(maxsize=1)
def nvjitlink() -> Any:
    """The binding `cuda.bindings.nvjitlink`, its library loaded: torch's, where torch has loaded one."""
    return _binding("nvjitlink", "nvJitLink", "nvidia-nvjitlink", "version")


def nvrtc_version() -> Version:
    """(major, minor) of the NVRTC library."""
    _, major, minor = nvrtc().nvrtcVersion()
    return int(major), int(minor)


def nvjitlink_version() -> Version:
    """(major, minor) of the nvJitLink library."""
    major, minor = nvjitlink().version()
    return int(major), int(minor)


def _binding(module: str, what: str, wheel: str, first_call: str) -> Any:
    _load_wheels_library(what)
    try:
        binding = importlib.import_module(f"cuda.bindings.{module}")
        getattr(binding, first_call)()  # the library is looked for at the first call
    except (ImportError, RuntimeError) as error:
        raise _library_error(what, wheel, error) from error
    return binding


def _load_wheels_library(what: str) -> None:
    """Load the wheel's library of cuda-bindings' CUDA version where torch, built for an older CUDA, has loaded its own.

    The binding would else take that one.
    """
    stem, major = "libnvrtc" if what == "NVRTC" else f"lib{what}", distribution_version("cuda-bindings").split(".")[0]
    if not major or _is_loaded(f"{stem}.so.{major}") or not _is_loaded(f"{stem}.so.{int(major) - 1}"):
        return
    for folder in (nvidia / f"cu{major}/lib" for nvidia in _nvidia_folders()):
        # what the library looks for by name comes first; of a damaged file the binding says what it finds
        for path in (*sorted(folder.glob(f"{stem}-builtins.so.{major}.*")), folder / f"{stem}.so.{major}"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))


def _is_loaded(file: str) -> bool:
    try:
        ctypes.CDLL(file, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _library_error(what: str, wheel: str, error: Exception) -> ToolchainError:
    if isinstance(error, ImportError):
        return ToolchainError(f'cuda-bindings is not usable: {error}.\n  pip install "cuda-bindings==13.0.*"')
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    major = distribution_version("cuda-bindings").split(".")[0] or "13"
    return ToolchainError(
        f"{what} was not found: {reason}\n"
        f'  Install the wheel of cuda-bindings\' CUDA version: pip install "{wheel}=={major}.*"'
    )


def fit_fault(nvcc: Version | None, nvrtc: Version, nvjitlink: Version) -> str | None:
    """Why LTO-IR of these compilers cannot be linked by this nvJitLink, or None."""
    for name, version, wheel in (("nvcc", nvcc, "nvidia-cuda-nvcc"), ("NVRTC", nvrtc, "nvidia-cuda-nvrtc")):
        if version is None or (version[0] == nvjitlink[0] and version[:2] <= nvjitlink[:2]):
            continue
        have, linker = version_text(version), version_text(nvjitlink[:2])
        unfit = (
            f"{name} {have} does not fit nvJitLink {linker}: "
            f"its LTO-IR needs an nvJitLink of CUDA {version[0]} that is at least as new.\n"
        )
        if nvjitlink[0] < version[0]:  # torch's, built for an older CUDA
            pin = f"{version_text(version[:2])}.*"
            return (
                f"{unfit}  Install those of CUDA {version[0]}, which are used beside torch's own: "
                f'pip install "nvidia-nvjitlink=={pin}" "nvidia-cuda-nvrtc=={pin}"'
            )
        return (
            f'{unfit}  Take {name} {linker}: pip install "{wheel}=={linker}.*"'
            + (" (with its fellow wheels), or set GEMMGEN_NVCC to one" if name == "nvcc" else "")
            + f', or a newer nvJitLink: pip install "nvidia-nvjitlink>={version_text(version[:2])}"'
        )
    return None


# ---- identity


def tool_versions(current: Settings) -> dict[str, str]:
    """Versions of the tools that are installed, for the identity of cache entries; a missing tool is left out.

    Loads no library, so that a lookup stays fast: NVRTC and nvJitLink are known by their wheels.
    """
    versions = dict(_library_versions())
    with contextlib.suppress(ToolchainError):  # absence is the answer; `toolchain` says why when asked to build
        versions["nvcc"] = version_text(nvcc_version(find_nvcc(current)))
        versions["cutlass"] = find_cutlass().version
    return versions


@functools.lru_cache(maxsize=1)
def _library_versions() -> tuple[tuple[str, str], ...]:
    wheels = {"nvrtc": "nvidia-cuda-nvrtc", "nvjitlink": "nvidia-nvjitlink"}
    found = [(name, distribution_version(wheel, f"{wheel}-cu12")) for name, wheel in wheels.items()]
    return tuple((name, version) for name, version in found if version)
