"""Turns `KernelSource`s into cached cubins and launchers, in parallel: skeletons once, a link per kernel."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from gemmgen.arch import Arch
from gemmgen.errors import CacheError, CompileError, CompileForbidden, GemmgenError, ToolchainError, UnfitKernel
from gemmgen.jit.cache import INPUTS, KERNELS, MODULES, SKELETONS, Cache, Entry, cache_of
from gemmgen.jit.compile import compile_cubin, compile_functor, compile_skeleton
from gemmgen.jit.identity import inputs_key, kernel_key, module_key, skeleton_key
from gemmgen.jit.link import link
from gemmgen.jit.progress import Progress
from gemmgen.jit.toolchain import nvrtc, tool_versions, toolchain
from gemmgen.jit.workers import Workers, build_jobs
from gemmgen.settings import Settings, settings
from gemmgen.source import KernelSource


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel in the cache, ready for `load_kernel`.

    Attributes:
        function: mangled name of the kernel in the cubin.
        registers, stack_bytes: per thread, as ptxas reports them.
        skeleton_seconds, link_seconds: what the compilers took when it was built.
        tools: versions of the tools that built it.
    """

    name: str
    arch: str
    cubin: Path
    launcher: Path
    function: str
    registers: int
    stack_bytes: int
    skeleton_seconds: float
    link_seconds: float
    tools: tuple[tuple[str, str], ...] = ()


# ---- looking up


# the tools whose versions tell entries of one kind and key apart, and those without which none can be built
_TOOLS = {
    SKELETONS: ("nvcc", "cutlass"),
    KERNELS: ("nvcc", "cutlass", "nvrtc", "nvjitlink"),
    MODULES: ("nvrtc",),
}
_NEEDED = {SKELETONS: {"nvcc", "cutlass"}, KERNELS: {"nvcc", "cutlass"}, MODULES: {"nvrtc"}}


@dataclass(frozen=True)
class _Place:
    """Where to look and to publish: the cache, as the settings and the installed tools make it."""

    cache: Cache
    tools: dict[str, str]
    settings: Settings

    def find(self, kind: str, key: str) -> Entry | None:
        """The entry of exactly these tools; or of any, where none can be built."""
        can_build = self.settings.compile_allowed and _NEEDED[kind] <= self.tools.keys()
        return self.cache.find(kind, key, self._tools_of(kind), any_tools=not can_build)

    def key_of(self, source: KernelSource) -> str:
        """The key of a kernel: known from its inputs, where such a source was asked for before, else from its texts."""
        if not source.inputs:
            return kernel_key(source)
        inputs = inputs_key(source)
        if known := self.cache.find(INPUTS, inputs, {}):
            return str(known.facts["kernel"])
        key = kernel_key(source)
        self.cache.note(INPUTS, inputs, {"name": source.name, "arch": source.arch.name, "kernel": key})
        return key

    def publish(self, kind: str, key: str, files: dict[str, bytes | Path], facts: dict[str, object]) -> Entry:
        return self.cache.publish(kind, key, self._tools_of(kind), files, facts)

    def _tools_of(self, kind: str) -> dict[str, str]:
        return {name: self.tools[name] for name in _TOOLS[kind] if name in self.tools}


def _place() -> _Place:
    current = settings()
    return _Place(cache_of(current), tool_versions(current), current)


def find(source: KernelSource) -> BuiltKernel | None:
    """The kernel of `source` if it is in the cache, in about a millisecond; compiles nothing."""
    place = _place()
    entry = place.find(KERNELS, place.key_of(source))
    return _built(source, entry) if entry and not _refusal_in(entry) else None


def _built(source: KernelSource, entry: Entry) -> BuiltKernel:
    facts = entry.facts
    return BuiltKernel(
        name=source.name,
        arch=source.arch.name,
        cubin=entry.file("kernel.cubin"),
        launcher=entry.file("launcher.so"),
        function=facts["function"],
        registers=facts["registers"],
        stack_bytes=facts["stack_bytes"],
        skeleton_seconds=facts["skeleton_seconds"],
        link_seconds=facts["link_seconds"],
        tools=tuple(sorted(entry.tools.items())),
    )


# ---- building


@overload
def build(sources: Sequence[KernelSource], *, on_error: Literal["raise"] = "raise") -> list[BuiltKernel]: ...
@overload
def build(sources: Sequence[KernelSource], *, on_error: Literal["return"]) -> list[BuiltKernel | GemmgenError]: ...
def build(
    sources: Sequence[KernelSource], *, on_error: Literal["raise", "return"] = "raise"
) -> Sequence[BuiltKernel | GemmgenError]:
    """The kernels of `sources`, in their order, from the cache or built now.

    Skeletons that several sources share are compiled once. As many are compiled at a time as cores and memory
    allow (`GEMMGEN_BUILD_JOBS`). Other processes that want the same kernel wait for it rather than build it too.

    Args:
        on_error: "raise" stops at the first failure; "return" puts the error in the place of its kernel.

    Raises:
        CompileError: a compiler refuses a source; the message names where the source is kept.
        CompileForbidden: `GEMMGEN_COMPILE=0`, and a kernel is not in the cache.
        ToolchainError: the tools are missing or do not fit each other.
    """
    place = _place()
    keys = [place.key_of(source) for source in sources]
    unique = dict(zip(keys, sources, strict=True))
    found = {key: place.find(KERNELS, key) for key in unique}
    missing = {key: source for key, source in unique.items() if found[key] is None}
    built = _Build(place, stop_at_error=on_error == "raise").run(missing) if missing else {}
    results: list[BuiltKernel | GemmgenError] = []
    for source, key in zip(sources, keys, strict=True):
        entry = found[key] or built[key]
        if isinstance(entry, Entry):
            entry = _refusal_in(entry) or entry
        if isinstance(entry, GemmgenError) and on_error == "raise":
            raise entry
        results.append(entry if isinstance(entry, GemmgenError) else _built(source, entry))
    return results


def _refusal_in(entry: Entry) -> CompileError | None:
    """The error of a kernel that was built before and found unfit; compiling it again would end the same way."""
    refusal = entry.facts.get("refused")
    return UnfitKernel(refusal) if refusal else None


class _Build:
    """One call of `build`: its worker threads, its progress line, and the event that stops its compilers."""

    def __init__(self, place: _Place, *, stop_at_error: bool):
        self._place = place
        self._stop_at_error = stop_at_error
        self._cancelled = threading.Event()

    def run(self, missing: dict[str, KernelSource]) -> dict[str, Entry | GemmgenError]:
        """Build every missing kernel; each result is its entry or its error."""
        if refusal := self._refusal(missing):
            return refusal
        with Progress(len(missing)) as self._progress:
            try:
                return self._run(missing)
            finally:
                self._cancelled.set()  # for an interrupt; harmless when all is done
                self._place.cache.sweep()
                self._place.cache.evict()

    def _refusal(self, missing: dict[str, KernelSource]) -> dict[str, Entry | GemmgenError]:
        if not self._place.settings.compile_allowed:
            return {key: forbidden(self._place.cache, KERNELS, key, source.name) for key, source in missing.items()}
        try:
            toolchain()
        except ToolchainError as error:
            return dict.fromkeys(missing, error)
        return {}

    def _run(self, missing: dict[str, KernelSource]) -> dict[str, Entry | GemmgenError]:
        workers = Workers(build_jobs(self._place.settings))
        skeletons: dict[str, Future[Entry]] = {}
        for source in missing.values():  # before any kernel: a worker that waits for a skeleton waits for one at work
            key = skeleton_key(source)
            if key not in skeletons:
                skeletons[key] = workers.submit(functools.partial(self._skeleton, key, source))
        kernels = {
            key: workers.submit(functools.partial(self._kernel, key, source, skeletons[skeleton_key(source)]))
            for key, source in missing.items()
        }
        workers.close()
        if self._stop_at_error:
            _raise_first_error([*skeletons.values(), *kernels.values()])
        return {key: _outcome(kernels[key]) for key in missing}

    def _skeleton(self, key: str, source: KernelSource) -> Entry:
        cache = self._place.cache
        if entry := self._place.find(SKELETONS, key):
            return entry
        with self._progress.step(f"compiling the skeleton of {source.name}"), self._lock(SKELETONS, key):
            if entry := self._place.find(SKELETONS, key):
                return entry
            skeleton = compile_skeleton(
                source.skeleton,
                source.arch,
                name=source.name,
                failed_dir=cache.failed_dir,
                cancelled=self._cancelled,
            )
            files: dict[str, bytes | Path] = {
                "skeleton.ltoir": skeleton.ltoir,
                "launcher.so": skeleton.launcher,
                "source.cu": source.skeleton.encode(),
            }
            facts = {"name": source.name, "arch": source.arch.name, "seconds": skeleton.seconds}
            return self._place.publish(SKELETONS, key, files, facts)

    def _kernel(self, key: str, source: KernelSource, skeleton: Future[Entry]) -> Entry:
        part = skeleton.result()
        with self._progress.step(f"linking {source.name}", counts=True), self._lock(KERNELS, key):
            return self._place.find(KERNELS, key) or self._link(key, source, part)

    def _link(self, key: str, source: KernelSource, skeleton: Entry) -> Entry:
        cache = self._place.cache
        functor = compile_functor(source.functor, source.arch, name=source.name, failed_dir=cache.failed_dir)
        try:
            ltoir = skeleton.file("skeleton.ltoir").read_bytes()
        except OSError as error:
            raise CacheError(f"the skeleton of `{source.name}` was removed while it was in use; try again") from error
        facts: dict[str, object] = {"name": source.name, "arch": source.arch.name}
        try:
            linked = link({"skeleton": ltoir, "functor": functor}, source.arch, name=source.name)
        except UnfitKernel as error:
            self._place.publish(
                KERNELS, key, {"functor.cu": source.functor.encode()}, facts | {"refused": str(error)}
            )
            raise
        facts |= {
            "function": linked.kernel,
            "registers": linked.registers,
            "stack_bytes": linked.stack_bytes,
            "skeleton_seconds": skeleton.facts["seconds"],
            "link_seconds": linked.seconds,
        }
        files: dict[str, bytes | Path] = {
            "kernel.cubin": linked.cubin,
            "launcher.so": skeleton.file("launcher.so"),
            "functor.cu": source.functor.encode(),
        }
        return self._place.publish(KERNELS, key, files, facts)

    def _lock(self, kind: str, key: str) -> AbstractContextManager[None]:
        return self._place.cache.lock(kind, key, self._cancelled)


def _raise_first_error(futures: list[Future[Entry]]) -> None:
    """Wait until all are done, or raise the first error at once."""
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        if error := future.exception():
            raise error


def _outcome(future: Future[Entry]) -> Entry | GemmgenError:
    try:
        return future.result()
    except GemmgenError as error:
        return error


def build_module(text: str, arch: Arch, *, name: str = "module") -> Path:
    """The cubin of the plain kernels in `text`, from the cache or built now by NVRTC alone; well under a second.

    Raises:
        CompileError, CompileForbidden, ToolchainError: as `build` does.
    """
    place, key = _place(), module_key(text, arch)
    entry = place.find(MODULES, key)
    if entry is None:
        if not place.settings.compile_allowed:
            raise forbidden(place.cache, MODULES, key, name)
        with place.cache.lock(MODULES, key):
            entry = place.find(MODULES, key) or _compile_module(place, key, text, arch, name)
    return entry.file("module.cubin")


def _compile_module(place: _Place, key: str, text: str, arch: Arch, name: str) -> Entry:
    nvrtc()
    cubin = compile_cubin(text, arch, name=name, failed_dir=place.cache.failed_dir)
    files: dict[str, bytes | Path] = {"module.cubin": cubin, "source.cu": text.encode()}
    return place.publish(MODULES, key, files, {"name": name, "arch": arch.name})


def forbidden(cache: Cache, kind: str, key: str, name: str) -> CompileForbidden:
    """The error for kernel `name`, which is not in the cache while compiling is forbidden."""
    fault = cache.fault(kind, key)
    return CompileForbidden(
        f"kernel `{name}` is not in the cache {cache.root}, and GEMMGEN_COMPILE=0 forbids compiling it.\n"
        + (f"  An entry is there but not used: {fault}\n" if fault else "")
        + "  Build it ahead of time with `gemmgen build`, or unset GEMMGEN_COMPILE."
    )
