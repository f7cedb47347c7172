"""The C++ dispatcher: calls alike to one that was planned go from torch's dispatcher to the launch without Python.

`templates/dispatcher.cpp` is built once per version of torch, in the background of the first process that runs on a
GPU; ops that are registered from then on use it. Without it, or without a host compiler, every call is Python's.
The structures here mirror those of the C++.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gemmgen import background, jit, pointwise
from gemmgen.errors import CacheError, GemmgenError
from gemmgen.jit import load
from gemmgen.jit.cache import LIBRARIES, Cache, Entry, cache_of, digest
from gemmgen.jit.compile import LIBRARY_FLAGS, compile_library
from gemmgen.plan import Finish, Plan, Store
from gemmgen.problem import M_CLASSES
from gemmgen.settings import settings
from gemmgen.templates import templates_dir

if TYPE_CHECKING:
    from gemmgen.ir.graph import Graph
    from gemmgen.operand_schema import OperandSchema

logger = logging.getLogger(__name__)

ABI_VERSION = 4
LIBRARY_FILE = "dispatcher.so"
# the ops of torch that C++ calls for a whole call, or for its accum, as its TorchOp and its Product number them
TORCH_OPS = {"torch.mm": 1, "torch.addmm": 2, "torch.addmm, then relu_": 3, "torch._addmm_activation": 4}
PRODUCTS = {"aten::mm.dtype": 1, "aten::_int_mm": 2}
MAX_LOADS = 16
MAX_DIMS = 3
# c10::ScalarType, whose values torch never changes
_SCALAR_TYPES = {
    torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip


class _Driver(ctypes.Structure):
    _fields_ = (("context_get_current", c_void_p), ("launch_kernel", c_void_p), ("current_stream", c_void_p))


class _MClasses(ctypes.Structure):
    _fields_ = (("up_to", c_int64), ("step", c_int64))


class _Result(ctypes.Structure):
    _fields_ = (
        ("sizes", c_int64 * MAX_DIMS),
        ("dims", c_int32),
        ("scalar_type", c_int32),
        ("word", c_int32),
        ("m_axis", c_int32),
    )


class _Load(ctypes.Structure):
    _fields_ = (("argument", c_int32), ("word", c_int32), ("value_offset", c_int32), ("is_number", c_int32))


class _Step(ctypes.Structure):
    _fields_ = (
        ("function", c_void_p),
        ("batches", c_int64),
        ("count", c_int64),
        ("kept", c_int64),
        ("grid", c_uint32 * 3),
        ("is_narrow", c_int32),
    )


class _Finish(ctypes.Structure):
    _fields_ = (("result", c_int32), ("step_count", c_int32), ("steps", _Step * 2))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("context", c_void_p),
        ("run", c_void_p),
        ("kernel", c_void_p),
        ("args", c_void_p),
        ("workspace_of", c_void_p),
        ("args_bytes", c_int32),
        ("m_offset", c_int32),
        ("a_word", c_int32),
        ("b_word", c_int32),
        ("result_count", c_int32),
        ("load_count", c_int32),
        ("finish_count", c_int32),
        ("finish_threads", c_uint32),
        ("pointwise", c_void_p),
        ("pointwise_threads", c_uint32),
        ("pointwise_ctas", c_uint32),
        ("product", c_int32),
        ("torch_op", c_int32),
        ("torch_bias", c_int32),
        ("results", _Result * jit.load.MAX_OUTPUTS),
        ("loads", _Load * MAX_LOADS),
        ("finishes", _Finish * jit.load.MAX_OUTPUTS),
    )


class DispatchedOp:
    """An op that C++ implements for one device, with its `python` overload behind it. Get it with `implement`."""

    def __init__(self, library: ctypes.CDLL, handle: int, operands: OperandSchema, is_by_class: bool):
        self._library = library
        self._handle = handle
        self._positions = operands.positions()
        self._is_by_class = is_by_class

    def offer(self, plan: Plan) -> None:
        """Let C++ run calls like the one that this thread is running in Python, if it can."""
        if is_runnable(plan):
            self._library.gemmgen_dispatcher_offer(self._handle, ctypes.byref(self._mirrored(plan)))

    def forget(self) -> None:
        """Have every call come to Python again, to be planned anew."""
        self._library.gemmgen_dispatcher_forget(self._handle)

    @property
    def launches(self) -> int:
        """How many calls C++ has launched."""
        return int(self._library.gemmgen_dispatcher_launches(self._handle))

    def _mirrored(self, plan: Plan) -> _Plan:
        if plan.plain_torch_op is not None:
            name, bias = plan.plain_torch_op
            at = 2 + self._positions[bias] if bias is not None else 0
            return _Plan(context=load.current_context(), torch_op=TORCH_OPS[name], torch_bias=at)
        mirrored = _Plan(
            context=load.current_context(),
            args=ctypes.addressof(plan.args),
            args_bytes=ctypes.sizeof(plan.args),
            m_offset=jit.Args.m.offset,
            a_word=plan.a_word,
            b_word=plan.b_word,
            result_count=len(plan.stores),
            load_count=len(plan.loads),
            finish_count=len(plan.finishes),
            finish_threads=pointwise.FINISH_THREADS,
        )
        _fill_kernel(mirrored, plan)
        for result, store in zip(mirrored.results, plan.stores, strict=False):
            _fill_result(result, store, self._is_by_class)
        for mirror, given in zip(mirrored.loads, plan.loads, strict=False):
            mirror.argument = 2 + self._positions[given.name]
            mirror.word, mirror.value_offset = given.word, given.value_offset
            mirror.is_number = given.is_number
        for mirror, finish in zip(mirrored.finishes, plan.finishes, strict=False):
            _fill_finish(mirror, finish)
        return mirrored


def is_runnable(plan: Plan) -> bool:
    """Whether C++ can run calls of `plan`: by torch, or by kernels whose operands are read where they are.

    A plan that another will replace is Python's, which sees when that is there. So is one of a call that was not
    measured where others of its class will be.
    """
    if plan.depends_on_precision or not plan.is_final:  # torch's tf32 setting is no argument of a call
        return False
    if plan.plain_torch_op is not None:
        return plan.plain_torch_op.name in TORCH_OPS
    return (
        (plan.kernel is not None or plan.plain_product in PRODUCTS)
        and not plan.copies_matrices
        and not any(given.copied for given in plan.loads)
        and len(plan.loads) <= MAX_LOADS
        and all(len(store.shape) <= MAX_DIMS for store in plan.stores)
    )


def _fill_kernel(mirrored: _Plan, plan: Plan) -> None:
    """The fused kernel, or the product and the pointwise kernel behind it."""
    if plan.kernel is not None:
        mirrored.run, mirrored.kernel = plan.kernel.entry, plan.kernel.handle
        mirrored.workspace_of = plan.kernel.workspace_of
        return
    assert plan.module is not None and plan.plain_product is not None
    mirrored.pointwise, mirrored.product = plan.module.function("gemmgen_pointwise"), PRODUCTS[plan.plain_product]
    mirrored.pointwise_threads, mirrored.pointwise_ctas = pointwise.THREADS, plan.grid[0]


def _fill_result(result: _Result, store: Store, is_by_class: bool) -> None:
    dims = len(store.shape)
    result.sizes[:dims] = store.shape
    result.dims, result.scalar_type, result.word = dims, _SCALAR_TYPES[store.dtype], store.word
    result.m_axis = dims - 2 if is_by_class else -1


def _fill_finish(mirror: _Finish, finish: Finish) -> None:
    steps = finish.steps
    mirror.result, mirror.step_count = finish.result, len(steps)
    for target, step in zip(mirror.steps, steps, strict=False):
        target.function = step.module.function("gemmgen_finish")
        target.batches, target.count, target.kept = step.shape
        target.grid[:], target.is_narrow = step.grid, step.is_narrow


# The library


def implement(name: str, graph: Graph, operands: OperandSchema, device_key: str = "CUDA") -> DispatchedOp | None:
    """Implement `gemmgen::<name>` in C++ for `device_key` and Autograd, or None where there is no C++ dispatcher.

    The op's `python` overload, of the same schema and implemented in Python for both keys, must be there. A plan serves
    the class of its M where A and B have two axes and the last of A is contiguous, unless there are reductions: how
    many partials those have depends on M itself.
    """
    library = loaded()
    if library is None:
        return None
    is_by_class = not any(result.is_reduction for result in graph.results)
    along_m = [0, *(2 + at for at in operands.positions_along_m())] if is_by_class else []
    handle = library.gemmgen_dispatcher_implement(
        name.encode(), device_key.encode(), (c_int32 * len(along_m))(*along_m), len(along_m)
    )
    assert handle, f"gemmgen::{name}.python is not defined"
    return DispatchedOp(library, handle, operands, is_by_class)


def is_available() -> bool:
    """Whether ops that are registered now go through C++."""
    return loaded() is not None


_loaded: ctypes.CDLL | None = None


def loaded() -> ctypes.CDLL | None:
    """The library, if this torch runs on CUDA devices and it has been built."""
    global _loaded
    if not settings().dispatcher:
        return None
    if _loaded is None and torch.version.cuda is not None:
        entry = find()
        _loaded = _usable(entry.path) if entry is not None else None
    return _loaded


@functools.lru_cache(maxsize=8)
def _usable(path: Path) -> ctypes.CDLL | None:
    """The library in an entry's folder, ready for calls; None, and a warning, where this machine cannot load it."""
    try:
        return _bound(load_library(path))
    except CacheError as error:
        logger.warning("calls stay in Python: %s", error)
        return None


def load_library(path: Path) -> ctypes.CDLL:
    """The library in an entry's folder, in this process.

    Raises:
        CacheError: it was built for another machine, or is another gemmgen's.
    """
    try:
        library = ctypes.CDLL(str(path / LIBRARY_FILE))
    except OSError as error:
        raise CacheError(
            f"the C++ dispatcher cannot be loaded: {error}\n"
            "  Remove it with `gemmgen cache clear` and build it on this machine, or set GEMMGEN_DISPATCHER=0."
        ) from error
    library.gemmgen_dispatcher_plan_bytes.restype = c_int64
    if library.gemmgen_dispatcher_abi() != ABI_VERSION or library.gemmgen_dispatcher_plan_bytes() != ctypes.sizeof(
        _Plan
    ):
        raise CacheError("the C++ dispatcher is of another gemmgen\n  Run `gemmgen cache clear`.")
    library.gemmgen_dispatcher_implement.restype = c_void_p
    library.gemmgen_dispatcher_implement.argtypes = (c_char_p, c_char_p, c_void_p, c_int)
    library.gemmgen_dispatcher_offer.argtypes = (c_void_p, c_void_p)
    library.gemmgen_dispatcher_forget.argtypes = (c_void_p,)
    library.gemmgen_dispatcher_launches.restype = c_int64
    library.gemmgen_dispatcher_launches.argtypes = (c_void_p,)
    library.gemmgen_dispatcher_representative.restype = c_int64
    library.gemmgen_dispatcher_representative.argtypes = (c_int64,)
    classes = (_MClasses * len(M_CLASSES))(*(_MClasses(*some) for some in M_CLASSES))
    library.gemmgen_dispatcher_classify(classes, len(classes))
    return library


def _bound(library: ctypes.CDLL) -> ctypes.CDLL | None:
    """`library` with the driver's functions; None where there is no driver."""
    try:
        driver, torch_cuda = load.driver(), ctypes.CDLL("libtorch_cuda.so")
        functions = _Driver(
            _address(driver.cuCtxGetCurrent),
            _address(driver.cuLaunchKernel),
            _address(torch_cuda.aoti_torch_get_current_cuda_stream),
        )
    except (GemmgenError, OSError, AttributeError) as error:
        logger.info("calls stay in Python: %s", error)
        return None
    library.gemmgen_dispatcher_bind(ctypes.byref(functions))
    return library


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


# Building it


def find() -> Entry | None:
    """The library in the cache, for this very torch, or None."""
    return _cache().find(LIBRARIES, _key(), _tools())


def build() -> Entry:
    """The library, from the cache or built now; about 10 s.

    Raises:
        ToolchainError: there is no host compiler.
        CompileError: it refuses the source.
    """
    cache = _cache()
    with cache.lock(LIBRARIES, _key()):
        if entry := find():
            return entry
        library = compile_library(_source(), _flags(), name="dispatcher", failed_dir=cache.failed_dir)
        return cache.publish(LIBRARIES, _key(), _tools(), {LIBRARY_FILE: library}, {"name": "dispatcher"})


def build_in_background() -> None:
    """Build the library for ops to come, if it can be built, unless it is there or on its way."""
    current = settings()
    if torch.version.cuda is not None and current.dispatcher and current.compile_allowed and _loaded is None:
        _submitted()


@functools.lru_cache(maxsize=1)
def _submitted() -> None:
    background.submit("dispatcher", "the C++ dispatcher", build, otherwise="calls go through Python")


os.register_at_fork(after_in_child=_submitted.cache_clear)


def _cache() -> Cache:
    return cache_of(settings())


def _source() -> str:
    return (templates_dir() / "dispatcher.cpp").read_text(encoding="utf-8")


def _key() -> str:
    return digest("dispatcher", *LIBRARY_FLAGS, _source())


def _tools() -> Mapping[str, str]:
    return {"torch": torch.__version__, "git": torch.version.git_version or ""}


def _flags() -> Sequence[str]:
    folder = Path(torch.__file__).parent
    includes = (folder / "include", folder / "include/torch/csrc/api/include")
    return (
        *(f"-I{include}" for include in includes),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu",
    )  # fmt: skip
