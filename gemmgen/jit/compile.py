"""Runs the compilers: nvcc on the two halves of a skeleton at once, NVRTC on functors and on plain kernels."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gemmgen.arch import Arch
from gemmgen.errors import CompileError, ToolchainError
from gemmgen.jit.toolchain import Toolchain, find_host_compiler, nvrtc, template_include_dir, toolchain
from gemmgen.settings import settings

# without NDEBUG device asserts stay in and ptxas serialises wgmma (C7510)
NVCC_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr")
LAUNCHER_FLAGS = ("-DGEMMGEN_LAUNCHER", "-Xcompiler", "-fPIC", "-shared", "-Xlinker", "-s")
# optimised before it is written, LTO-IR is a 60th of the size, and the link takes 0.5 s in the place of 4
LTOIR_FLAGS = ("-rdc=true", "-ltoir", "-gen-opt-lto")
FUNCTOR_FLAGS = ("-dlto", "-rdc=true", "--std=c++17")
CUBIN_FLAGS = ("--std=c++17",)
LIBRARY_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-s")

# compiler messages that are the machine's fault rather than the source's, with the mend
_MENDS = (
    ("unsupported GNU version", "Set GEMMGEN_CXX to an older g++ that this nvcc accepts."),
    ("No space left on device", "Free space in the folder for temporary files (TMPDIR)."),
    ("cannot find -lcudart_static", 'Install the CUDA runtime library: pip install "nvidia-cuda-runtime==13.0.*"'),
    ("cuda_runtime.h: No such file", 'Install the CUDA headers: pip install "nvidia-cuda-runtime==13.0.*"'),
    ("gcc: No such file", "Install g++, or set GEMMGEN_CXX."),
)
SERIALIZED_REASON = "ptxas serialises wgmma (C7510), which is many times slower: this config is refused"
_ERROR_LINE = re.compile(r"\berror\b.*:|\bfatal\s*:|cannot find -l|^Killed|undefined reference")


@dataclass(frozen=True)
class Skeleton:
    """Both compiled halves of a skeleton: device LTO-IR and the launcher library, and the seconds they took."""

    ltoir: bytes = field(repr=False)
    launcher: bytes = field(repr=False)
    seconds: float


def compile_skeleton(
    text: str,
    arch: Arch,
    *,
    name: str = "skeleton",
    failed_dir: Path | None = None,
    cancelled: threading.Event | None = None,
) -> Skeleton:
    """Compile both halves of skeleton `text` with nvcc, side by side.

    Args:
        failed_dir: where the source and the log of a failure are kept; None keeps nothing.
        cancelled: when set during the compilation, the compilers are killed.

    Raises:
        CompileError: nvcc refuses the source, or the result would be slow (C7510).
        ToolchainError: the tools are missing or do not fit.
    """
    tools = toolchain()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gemmgen-build-") as folder:
        directory = Path(folder)
        source = directory / "skeleton.cu"
        source.write_text(text, encoding="utf-8")
        log = _run_together(_skeleton_commands(tools, arch, directory), directory, cancelled or threading.Event())
        outputs = [directory / "skeleton.ltoir", directory / "launcher.so"]
        if log.failed or is_serialized(log.text) or not all(map(Path.is_file, outputs)):
            raise failure(name, "nvcc", log.text, text, failed_dir)
        ltoir, launcher = (path.read_bytes() for path in outputs)
    return Skeleton(ltoir, launcher, time.perf_counter() - started)


def _skeleton_commands(tools: Toolchain, arch: Arch, directory: Path) -> list[list[str]]:
    includes = [f"-I{folder}" for folder in (*tools.cutlass.include_dirs, template_include_dir())]
    driver = [str(tools.nvcc), "-ccbin", str(tools.host_compiler), *NVCC_FLAGS, *includes]
    source = str(directory / "skeleton.cu")
    target = f"arch=compute_{arch.target},code="
    device = ["-gencode", f"{target}lto_{arch.target}", *LTOIR_FLAGS, "-o", str(directory / "skeleton.ltoir")]
    launcher = ["-gencode", f"{target}sm_{arch.target}", *LAUNCHER_FLAGS, "-o", str(directory / "launcher.so")]
    libraries = [f"-L{folder}" for folder in tools.library_dirs]
    return [[*driver, *device, source], [*driver, *launcher, source, *libraries]]


def compile_library(
    text: str,
    flags: Sequence[str],
    *,
    name: str,
    failed_dir: Path | None = None,
    cancelled: threading.Event | None = None,
) -> bytes:
    """The shared library of C++ `text`, by the host compiler alone.

    Args:
        flags: for compiling and linking, beyond those that make it a shared library.
        failed_dir, cancelled: as of `compile_skeleton`.

    Raises:
        CompileError: the compiler refuses the source.
        ToolchainError: there is no host compiler.
    """
    compiler = str(find_host_compiler(settings()))
    with tempfile.TemporaryDirectory(prefix="gemmgen-build-") as folder:
        directory = Path(folder)
        source, library = directory / f"{name}.cpp", directory / f"{name}.so"
        source.write_text(text, encoding="utf-8")
        command = [compiler, *LIBRARY_FLAGS, str(source), "-o", str(library), *flags]
        log = _run_together([command], directory, cancelled or threading.Event())
        if log.failed or not library.is_file():
            raise failure(name, compiler, log.text, text, failed_dir)
        return library.read_bytes()


@dataclass(frozen=True)
class _Log:
    text: str
    failed: bool


def _run_together(commands: list[list[str]], directory: Path, cancelled: threading.Event) -> _Log:
    """Run all commands at once until all are done, one fails, or `cancelled` is set."""
    logs = [directory / f"{i}.log" for i in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            _refuse_if_cancelled(cancelled)
            processes.append(_start(command, log, directory))
            _running.add(processes[-1])
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or cancelled.wait(0.05):
                break
        _refuse_if_cancelled(cancelled)
    finally:
        for process in processes:
            _kill(process)
            _running.discard(process)
    # the half that failed speaks first: the other was only stopped
    order = sorted(range(len(processes)), key=lambda i: (processes[i].returncode or 0) <= 0)
    text = "".join(logs[i].read_text(encoding="utf-8", errors="replace") for i in order)
    text = text.replace(f"{directory}{os.sep}", "")
    return _Log(text, failed=any(process.returncode for process in processes))


def _start(command: list[str], log: Path, directory: Path) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")}
    environment.update(TMPDIR=str(directory), LC_ALL="C.UTF-8")
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that nvcc's own children can be killed with it
            )
        except OSError as error:
            raise ToolchainError(f"{command[0]} does not run: {error}.\n  Set GEMMGEN_NVCC to another.") from error


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_running: set[subprocess.Popen[bytes]] = set()
_exiting = threading.Event()


def _refuse_if_cancelled(cancelled: threading.Event) -> None:
    if cancelled.is_set() or _exiting.is_set():
        raise CompileError("the build was cancelled")


def _kill_all_at_exit() -> None:
    """A program that ends during a background build ends at once, and leaves no compiler running."""
    _exiting.set()
    for process in list(_running):
        _kill(process)


atexit.register(_kill_all_at_exit)


# ---- failures


def is_serialized(log: str) -> bool:
    """Whether ptxas warned that it serialises wgmma."""
    return re.search(r"\(C75\d\d\)|wgmma.*serializ", log, re.IGNORECASE) is not None


def failure(name: str, tool: str, log: str, source: str, failed_dir: Path | None) -> CompileError | ToolchainError:
    """The error for a failed compilation of `source`, which is kept in `failed_dir` for reading."""
    reason = first_error(log)
    if is_serialized(log) and not _ERROR_LINE.search(log):
        reason = SERIALIZED_REASON
    for text, mend in _MENDS:
        if text in log:
            return ToolchainError(f"{tool} cannot compile here: {reason}\n  {mend}")
    path = _keep(name, log, source, failed_dir) if failed_dir else None
    kept = f"\n  Source and complete log: {path}" if path else ""
    return CompileError(f"{tool} failed on kernel `{name}`:\n  {reason}{kept}", log=log, source_path=path)


def first_error(log: str) -> str:
    """The first line of a compiler's log that states an error, else its first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR_LINE.search(line)), lines[0] if lines else "no message")[:600]


def _keep(name: str, log: str, source: str, failed_dir: Path) -> str | None:
    """Write source and log into `failed_dir`, replacing those of an earlier failure of this name."""
    stem = re.sub(r"[^\w.-]", "_", name)[:120]
    try:
        failed_dir.mkdir(parents=True, exist_ok=True)
        (failed_dir / f"{stem}.cu").write_text(source, encoding="utf-8")
        (failed_dir / f"{stem}.log").write_text(log, encoding="utf-8")
    except OSError:
        return None  # the error itself matters more than its keepsake
    return str(failed_dir / f"{stem}.cu")


# ---- NVRTC


def compile_functor(text: str, arch: Arch, *, name: str = "functor", failed_dir: Path | None = None) -> bytes:
    """LTO-IR of functor `text` for `arch`, by NVRTC; about 0.03 s. Raises CompileError, ToolchainError."""
    return _nvrtc_output("LTOIR", FUNCTOR_FLAGS, text, arch, name, failed_dir)


def compile_cubin(text: str, arch: Arch, *, name: str = "module", failed_dir: Path | None = None) -> bytes:
    """Cubin of the plain kernels in `text` for `arch`, by NVRTC alone. Raises CompileError, ToolchainError."""
    return _nvrtc_output("CUBIN", CUBIN_FLAGS, text, arch, name, failed_dir)


def _nvrtc_output(
    kind: Literal["LTOIR", "CUBIN"], flags: tuple[str, ...], text: str, arch: Arch, name: str, failed_dir: Path | None
) -> bytes:
    binding = nvrtc()
    options = [f"-arch=sm_{arch.target}", *flags, f"-I{template_include_dir()}"]
    program = _value(binding.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (status,) = binding.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = _copied(binding.nvrtcGetProgramLogSize, binding.nvrtcGetProgramLog, program)
            raise failure(name, "NVRTC", log.decode(errors="replace").rstrip("\0"), text, failed_dir)
        size_of, copy_to = {
            "LTOIR": (binding.nvrtcGetLTOIRSize, binding.nvrtcGetLTOIR),
            "CUBIN": (binding.nvrtcGetCUBINSize, binding.nvrtcGetCUBIN),
        }[kind]
        return _copied(size_of, copy_to, program)
    finally:
        binding.nvrtcDestroyProgram(program)


def _copied(size_of: Callable[[Any], Any], copy_to: Callable[[Any, bytes], Any], program: Any) -> bytes:
    size: int = _value(size_of(program))
    buffer = b" " * size  # NVRTC's binding writes into this bytes object
    _value(copy_to(program, buffer))
    return buffer


def _value(result: tuple[Any, ...]) -> Any:
    """The value of a cuda-bindings call, or CompileError with the name of its status."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC reports {status.name}")
    return values[0] if values else None
