"""Loads built kernels into the current CUDA context and launches them, through ctypes alone.

`Args` and its parts mirror `templates/include/gemmgen/abi.h`; a test compiles that header and compares.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_uint, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmgen.errors import CacheError, LaunchError

if TYPE_CHECKING:
    from gemmgen.jit.build import BuiltKernel

ABI_VERSION = 1
MAX_INPUTS = 16
MAX_OUTPUTS = 8
_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SMEM_BYTES_WITHOUT_ASKING = 48 * 1024


class MatrixArgs(ctypes.Structure):
    _fields_ = (("ptr", c_void_p), ("ld", c_int64), ("batch_stride", c_int64))


class InputArgs(ctypes.Structure):
    _fields_ = (
        ("ptr", c_void_p),
        ("row_stride", c_int64),
        ("batch_stride", c_int64),
        ("value", c_float),
        ("unused", c_int32),
    )


class OutputArgs(ctypes.Structure):
    _fields_ = (("ptr", c_void_p), ("row_stride", c_int64), ("batch_stride", c_int64))


class Args(ctypes.Structure):
    """One launch: extents, pointers and strides in elements. See `gemmgen/abi.h` for what each field means."""

    _fields_ = (
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("l", c_int32),
        ("a", MatrixArgs),
        ("b", MatrixArgs),
        ("inputs", InputArgs * MAX_INPUTS),
        ("outputs", OutputArgs * MAX_OUTPUTS),
        ("sm_count", c_int32),
        ("swizzle", c_int32),
        ("raster", c_int32),
        ("split_k", c_int32),
    )


# ---- the driver


@functools.lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """libcuda, with its symbols visible to the launchers. Raises LaunchError where there is no NVIDIA driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LaunchError(f"libcuda.so.1 cannot be loaded: {error}\n  Install the NVIDIA driver.") from error
    library.cuLaunchKernel.argtypes = (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p)
    return library


def _check(status: int, what: str) -> None:
    if status != 0:
        raise LaunchError(f"{what}: {describe(status)}")


def describe(status: int) -> str:
    """The driver's name and words for a CUresult."""
    texts = []
    for function in (driver().cuGetErrorName, driver().cuGetErrorString):
        text = c_char_p()
        if function(status, byref(text)) == 0 and text.value:
            texts.append(text.value.decode())
    return ": ".join(texts) or f"CUresult {status}"


def current_context() -> int:
    """The CUDA context of this thread, which torch has made current for its current device."""
    context = c_void_p()
    status: int = driver().cuCtxGetCurrent(byref(context))
    if status != 0 or not context.value:
        reason = f" ({describe(status)})" if status else ""
        raise LaunchError(
            f"no CUDA context is current in this thread{reason}.\n"
            "  Use the device first: torch.cuda.set_device, or create a tensor on it."
        )
    return context.value


def adopt_context(ordinal: int) -> None:
    """Make the primary context of device `ordinal` current in this thread, if the thread has none."""
    context, device = c_void_p(), c_int()
    if driver().cuCtxGetCurrent(byref(context)) == 0 and context.value:
        return
    _check(driver().cuDeviceGet(byref(device), ordinal), f"CUDA device {ordinal}")
    _check(driver().cuDevicePrimaryCtxRetain(byref(context), device), f"the context of CUDA device {ordinal}")
    _check(driver().cuCtxSetCurrent(context), f"the context of CUDA device {ordinal}")


@contextlib.contextmanager
def _while_capturing() -> Iterator[None]:
    """A block in which modules may be loaded although this thread captures a stream into a CUDA graph.

    Loading is forbidden then, since it may wait for the device; it enqueues nothing, so that the graph is unharmed.
    """
    mode = c_int(_CAPTURE_MODE_RELAXED)
    _check(driver().cuThreadExchangeStreamCaptureMode(byref(mode)), "the capture mode of this thread")
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(byref(mode))


# ---- what is loaded, per process

_generation = 0  # counts forks: handles of a parent process mean nothing in its child
_guard = threading.Lock()
_kernels: dict[tuple[Path, int], Kernel] = {}
_modules: dict[tuple[Path, int], Module] = {}


def _after_fork() -> None:
    global _generation, _guard
    _generation += 1
    _guard = threading.Lock()
    _kernels.clear()
    _modules.clear()


os.register_at_fork(after_in_child=_after_fork)


def load_kernel(built: BuiltKernel) -> Kernel:
    """`built`, loaded into the current context; the same object each time for the same context.

    Raises:
        LaunchError: no context is current, or the driver or the launcher refuses.
        CacheError: the kernel is no longer in the cache.
    """
    key = (built.cubin, current_context())
    if key not in _kernels:
        with _guard:
            if key not in _kernels:
                with _while_capturing():
                    _kernels[key] = Kernel(built)
    return _kernels[key]


def load_module(cubin: Path) -> Module:
    """The module in `cubin`, loaded into the current context; the same object each time. Raises as `load_kernel`."""
    key = (cubin, current_context())
    if key not in _modules:
        with _guard:
            if key not in _modules:
                with _while_capturing():
                    _modules[key] = Module(cubin)
    return _modules[key]


def _load_cubin(cubin: Path) -> int:
    try:
        image = cubin.read_bytes()
    except OSError as error:
        raise CacheError(f"{cubin} was removed from the cache while it was in use: build it again") from error
    module = c_void_p()
    _check(driver().cuModuleLoadData(byref(module), image), f"the driver cannot load {cubin}")
    assert module.value is not None
    return module.value


def _function(module: int, name: str) -> int:
    function = c_void_p()
    _check(driver().cuModuleGetFunction(byref(function), c_void_p(module), name.encode()), f"no function {name}")
    assert function.value is not None
    return function.value


class _Loaded:
    """What `Kernel` and `Module` share: the module's handle, and the process that it is valid in."""

    def __init__(self, cubin: Path):
        self._generation = _generation
        self._module = _load_cubin(cubin)

    def _refuse_after_fork(self, name: str) -> None:
        if self._generation != _generation:
            raise LaunchError(
                f"`{name}` was loaded before this process was forked, and CUDA handles do not survive a fork.\n"
                "  Start workers with the `spawn` method, or use gemmgen only after the fork."
            )


class Kernel(_Loaded):
    """A GEMM kernel in the context that was current when it was loaded. Safe to run from several threads."""

    def __init__(self, built: BuiltKernel):
        super().__init__(built.cubin)
        self.name = built.name
        self._library = _launcher(built)
        self._handle = c_void_p(_function(self._module, built.function))
        self.smem_bytes: int = self._library.gemmgen_smem_bytes()
        self._run = self._library.gemmgen_run
        # for a caller that is not Python, which launches as `run` does
        self.entry = ctypes.cast(self._run, c_void_p).value
        self.workspace_of = ctypes.cast(self._library.gemmgen_workspace_bytes, c_void_p).value
        self.handle = self._handle.value
        if self.smem_bytes > _SMEM_BYTES_WITHOUT_ASKING:
            status = driver().cuFuncSetAttribute(self._handle, _MAX_DYNAMIC_SMEM, self.smem_bytes)
            _check(status, f"kernel `{self.name}` cannot have {self.smem_bytes} bytes of shared memory")

    def run(self, args: Args, workspace: int, stream: int) -> None:
        """Launch on `stream` (a CUstream), with scratch memory at the device address `workspace`.

        Raises:
            LaunchError: the kernel cannot run `args`, or the driver refuses the launch.
        """
        if self._generation != _generation:
            self._refuse_after_fork(self.name)
        status = self._run(self._handle, args, workspace, stream)
        if status != 0:
            raise LaunchError(self._refusal(status, args))

    def workspace_bytes(self, args: Args) -> int:
        """Device memory that `run` needs for `args`."""
        return int(self._library.gemmgen_workspace_bytes(args))

    def partial_count(self, args: Args, output: int) -> int:
        """P of the partials `[L, P, N]` or `[L, P, M]` of reduction `output`."""
        return int(self._library.gemmgen_partial_count(args, output))

    def _refusal(self, status: int, args: Args) -> str:
        reason = "it cannot run these arguments" if status < 0 else describe(status)
        extents = f"M={args.m}, N={args.n}, K={args.k}, L={args.l}, split_k={args.split_k}"
        return f"kernel `{self.name}` was not launched: {reason}\n  {extents}, {self.smem_bytes} bytes of shared memory"


class Module(_Loaded):
    """Plain kernels, compiled by NVRTC, in the context that was current when they were loaded."""

    def __init__(self, cubin: Path):
        super().__init__(cubin)
        self._functions: dict[str, c_void_p] = {}
        self._launch = driver().cuLaunchKernel

    def launch(
        self,
        function_name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        stream: int,
        smem_bytes: int = 0,
    ) -> None:
        """Launch `function_name` (an extern "C" kernel) with `arguments`, one ctypes value per parameter.

        Raises:
            LaunchError: there is no such function, or the driver refuses the launch.
        """
        if self._generation != _generation:
            self._refuse_after_fork(function_name)
        function = self._functions.get(function_name) or self._found(function_name)
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        status = self._launch(function, *grid, *block, smem_bytes, stream, pointers, None)
        if status != 0:
            raise LaunchError(f"`{function_name}` was not launched: {describe(status)}\n  grid {grid}, block {block}")

    def function(self, name: str) -> int:
        """The CUfunction of a kernel, for a caller that is not Python."""
        return (self._functions.get(name) or self._found(name)).value or 0

    def _found(self, name: str) -> c_void_p:
        with _while_capturing():
            return self._functions.setdefault(name, c_void_p(_function(self._module, name)))


def _launcher(built: BuiltKernel) -> ctypes.CDLL:
    driver()  # its symbols must be there before the launcher is
    if not built.launcher.exists():
        raise CacheError(f"{built.launcher} was removed from the cache while it was in use: build it again")
    try:
        library = ctypes.CDLL(str(built.launcher))
    except OSError as error:
        raise LaunchError(f"the launcher of kernel `{built.name}` cannot be loaded: {error}") from error
    if (version := library.gemmgen_abi_version()) != ABI_VERSION:
        raise LaunchError(f"the launcher of `{built.name}` has ABI {version}, gemmgen {ABI_VERSION}: clear the cache")
    library.gemmgen_run.argtypes = (c_void_p, POINTER(Args), c_void_p, c_void_p)
    library.gemmgen_workspace_bytes.argtypes = (POINTER(Args),)
    library.gemmgen_workspace_bytes.restype = c_int64
    library.gemmgen_partial_count.argtypes = (POINTER(Args), c_int)
    return library
