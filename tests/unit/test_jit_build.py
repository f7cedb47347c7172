"""The build: what is compiled, how often, in which order, and what happens on failure. The compilers are fakes."""

import sys
import threading
import time

import pytest

from gemmgen.arch import arch_named
from gemmgen.errors import CompileError, CompileForbidden, ToolchainError, UnfitKernel
from gemmgen.jit import build, build_module, find
from gemmgen.jit.compile import Skeleton
from gemmgen.jit.identity import kernel_key, skeleton_key
from gemmgen.jit.link import Linked
from gemmgen.jit.progress import LINE_EVERY_S, QUIET_S, Progress
from gemmgen.jit.workers import NVCC_PAIR_BYTES, Workers, build_jobs
from gemmgen.settings import Settings
from gemmgen.source import KernelSource

build_module_of = sys.modules["gemmgen.jit.build"]  # the name in the package is the function
SM90 = arch_named("sm90")
TOOLS = {"nvcc": "13.0.88", "cutlass": "4.2.0", "nvrtc": "13.0.88", "nvjitlink": "13.0.88"}


def source(skeleton: str = "skeleton", functor: str = "functor", name: str = "kernel", arch=SM90) -> KernelSource:
    return KernelSource(name, arch, skeleton, functor)


class Compilers:
    """Fakes that count; a text with `bad` in it is refused, and `slow` ones wait for `gate`."""

    def __init__(self):
        self.skeletons: list[str] = []
        self.links: list[str] = []
        self.modules: list[str] = []
        self.at_once = self.most_at_once = 0
        self.gate = threading.Event()
        self._guard = threading.Lock()

    def compile_skeleton(self, text, arch, *, name, failed_dir, cancelled):
        with self._guard:
            self.skeletons.append(text)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            while "slow" in text and not self.gate.wait(0.01):
                if cancelled.is_set():
                    raise CompileError("the build was cancelled")
            time.sleep(0.02)
            if "bad" in text:
                raise CompileError(f"nvcc failed on kernel `{name}`")
        finally:
            with self._guard:
                self.at_once -= 1
        return Skeleton(b"ltoir of " + text.encode(), b"launcher of " + text.encode(), 30.0)

    def compile_functor(self, text, arch, *, name, failed_dir):
        return b"ltoir of " + text.encode()

    def link(self, parts, arch, *, name):
        self.links.append(name)
        if b"bad" in parts["functor"]:
            raise CompileError(f"nvJitLink failed on kernel `{name}`")
        if b"unfit" in parts["functor"]:
            raise UnfitKernel(f"kernel `{name}` spills")
        return Linked(b"|".join(parts.values()), "mangled", 168, 0, 0, 3.0, "")

    def compile_cubin(self, text, arch, *, name, failed_dir):
        self.modules.append(text)
        return b"cubin of " + text.encode()


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    fakes = Compilers()
    for name in ("compile_skeleton", "compile_functor", "link", "compile_cubin"):
        monkeypatch.setattr(build_module_of, name, getattr(fakes, name))
    monkeypatch.setattr(build_module_of, "toolchain", lambda: None)
    monkeypatch.setattr(build_module_of, "tool_versions", lambda _: dict(TOOLS))
    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GEMMGEN_COMPILE", raising=False)
    monkeypatch.setenv("GEMMGEN_BUILD_JOBS", "4")
    return fakes


# ---- identity


def test_names_do_not_change_the_key_but_text_and_arch_do():
    key = kernel_key(source())
    assert kernel_key(source(name="other")) == key
    assert kernel_key(source(functor="other")) != key
    assert kernel_key(source(skeleton="other")) != key
    assert kernel_key(source(arch=arch_named("sm80"))) != key
    assert skeleton_key(source(functor="other")) == skeleton_key(source())


def test_a_changed_header_changes_the_key(monkeypatch, tmp_path):
    from gemmgen.jit import identity

    (tmp_path / "gemmgen").mkdir()
    (tmp_path / "gemmgen/outer.hpp").write_text('#include "inner.hpp"\n#include "outer.hpp"\n')
    (tmp_path / "gemmgen/inner.hpp").write_text("1")
    monkeypatch.setattr(identity, "template_include_dir", lambda: tmp_path)
    identity._header.cache_clear()
    try:
        text = "#include <cutlass/x.h>\n#  include <gemmgen/outer.hpp>\n"
        keys = [skeleton_key(source(text)), skeleton_key(source("no header"))]
        (tmp_path / "gemmgen/inner.hpp").write_text("2")
        identity._header.cache_clear()
        assert skeleton_key(source(text)) != keys[0]
        assert skeleton_key(source("no header")) == keys[1]
    finally:
        identity._header.cache_clear()


# ---- building


def test_a_kernel_is_built_once_and_then_found(compilers):
    assert find(source()) is None
    (built,) = build([source()])

    assert find(source()) == built
    assert build([source()]) == [built]
    assert (len(compilers.skeletons), len(compilers.links)) == (1, 1)
    assert built.cubin.read_bytes() == b"ltoir of skeleton|ltoir of functor"
    assert built.launcher.read_bytes() == b"launcher of skeleton"
    assert (built.name, built.arch, built.function, built.registers) == ("kernel", "sm90", "mangled", 168)
    assert (built.skeleton_seconds, built.link_seconds, dict(built.tools)) == (30.0, 3.0, TOOLS)


def test_results_are_in_the_order_of_the_sources_and_equal_ones_are_built_once(compilers):
    sources = [source(functor=f, name=n) for f, n in [("b", "1"), ("a", "2"), ("b", "3"), ("c", "4")]]
    assert [built.name for built in build(sources)] == ["1", "2", "3", "4"]
    assert len(compilers.links) == 3
    assert compilers.skeletons == ["skeleton"]


def test_skeletons_are_compiled_in_parallel_up_to_the_job_cap(compilers, monkeypatch):
    monkeypatch.setenv("GEMMGEN_BUILD_JOBS", "2")
    build([source(skeleton=str(i)) for i in range(6)])
    assert len(compilers.skeletons) == 6
    assert compilers.most_at_once == 2


def test_one_job_builds_everything(compilers, monkeypatch):
    monkeypatch.setenv("GEMMGEN_BUILD_JOBS", "1")
    assert len(build([source(skeleton=str(i % 2), functor=str(i)) for i in range(5)])) == 5


def test_the_second_epilogue_of_a_skeleton_only_links(compilers):
    build([source(functor="a")])
    build([source(functor="b")])
    assert (len(compilers.skeletons), len(compilers.links)) == (1, 2)


def test_new_tools_build_again_and_leave_the_old_entry(compilers, monkeypatch):
    (old,) = build([source()])
    monkeypatch.setattr(build_module_of, "tool_versions", lambda _: TOOLS | {"nvcc": "13.1.20"})
    (new,) = build([source()])
    assert new.cubin != old.cubin
    assert old.cubin.exists()


def test_new_nvrtc_alone_does_not_compile_skeletons_again(compilers, monkeypatch):
    build([source()])
    monkeypatch.setattr(build_module_of, "tool_versions", lambda _: TOOLS | {"nvrtc": "13.0.99"})
    build([source()])
    assert (len(compilers.skeletons), len(compilers.links)) == (1, 2)


def test_a_machine_without_nvcc_uses_what_another_built(compilers, monkeypatch):
    (built,) = build([source()])
    monkeypatch.setattr(build_module_of, "tool_versions", lambda _: {"nvrtc": "13.0.1"})
    assert find(source()) == built


def test_a_damaged_entry_is_built_again(compilers):
    (built,) = build([source()])
    built.cubin.write_bytes(b"damaged")
    assert build([source()]) == [built]
    assert built.cubin.read_bytes() != b"damaged"
    assert (len(compilers.skeletons), len(compilers.links)) == (1, 2)


# ---- failing


def test_the_first_error_is_raised_and_stops_the_rest(compilers):
    sources = [source(skeleton="bad", name="bad one"), *(source(skeleton=f"slow {i}") for i in range(8))]
    with pytest.raises(CompileError, match="bad one"):
        build(sources)
    assert not compilers.gate.is_set()


def test_errors_can_be_returned_in_their_places(compilers):
    sources = [source(functor="a"), source(functor="bad"), source(skeleton="bad"), source(functor="b")]
    results = build(sources, on_error="return")
    assert [isinstance(result, CompileError) for result in results] == [False, True, True, False]


def test_forbidden_compilation_names_kernel_folder_and_command(compilers, monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMGEN_COMPILE", "0")
    with pytest.raises(CompileForbidden) as caught:
        build([source(name="bias_gelu")])
    for text in ("`bias_gelu`", str(tmp_path / "cache"), "`gemmgen build`", "GEMMGEN_COMPILE"):
        assert text in str(caught.value)
    with pytest.raises(CompileForbidden, match="module"):
        build_module("text", SM90)
    assert compilers.skeletons == []


def test_forbidden_compilation_still_uses_the_cache(compilers, monkeypatch):
    (built,) = build([source()])
    cubin = build_module("text", SM90)
    monkeypatch.setenv("GEMMGEN_COMPILE", "0")
    assert build([source()]) == [built]
    assert build_module("text", SM90) == cubin


def test_forbidden_compilation_says_why_an_entry_is_not_used(compilers, monkeypatch):
    (built,) = build([source()])
    built.cubin.write_bytes(b"damaged")
    monkeypatch.setenv("GEMMGEN_COMPILE", "0")
    with pytest.raises(CompileForbidden, match=r"kernel\.cubin is damaged"):
        build([source()])


def test_a_missing_toolchain_is_every_kernels_error(compilers, monkeypatch):
    def no_toolchain():
        raise ToolchainError("nvcc was not found")

    monkeypatch.setattr(build_module_of, "toolchain", no_toolchain)
    with pytest.raises(ToolchainError):
        build([source()])
    assert all(isinstance(result, ToolchainError) for result in build([source(), source("b")], on_error="return"))


# ---- modules


def test_a_module_is_compiled_once(compilers):
    cubin = build_module("text", SM90)
    assert cubin.read_bytes() == b"cubin of text"
    assert build_module("text", SM90) == cubin
    assert build_module("other", SM90) != cubin
    assert build_module("text", arch_named("sm80")) != cubin
    assert compilers.modules == ["text", "other", "text"]


# ---- workers and progress


def test_jobs_follow_cores_and_memory(monkeypatch):
    from gemmgen.jit import workers

    def jobs(cores: int, gigabytes: float) -> int:
        monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setattr(workers, "available_bytes", lambda: int(gigabytes * 1e9))
        return build_jobs(Settings())

    assert jobs(16, 64) == 8
    assert jobs(16, 7) == 2
    assert jobs(1, 64) == 1
    assert jobs(16, 0.5) == 1
    assert build_jobs(Settings(build_jobs=5)) == 5


def test_memory_is_limited_by_the_cgroup(monkeypatch):
    from gemmgen.jit import workers

    files = {"/proc/meminfo": ["MemTotal: 9 kB", "MemAvailable: 8000000 kB"]}
    monkeypatch.setattr(workers, "_lines", lambda path: files.get(path, []))
    assert workers.available_bytes() == 8_000_000 * 1024
    files |= {"/sys/fs/cgroup/memory.max": ["5000000000"], "/sys/fs/cgroup/memory.current": ["4000000000"]}
    assert workers.available_bytes() == 1_000_000_000
    files |= {"/sys/fs/cgroup/memory.max": ["max"]}
    assert workers.available_bytes() == 8_000_000 * 1024
    files.clear()
    assert workers.available_bytes() == NVCC_PAIR_BYTES


def test_workers_hand_back_results_and_errors_and_end():
    workers = Workers(2)
    good, bad = workers.submit(lambda: 7), workers.submit(lambda: 1 // 0)
    workers.close()
    assert good.result(10) == 7
    with pytest.raises(ZeroDivisionError):
        bad.result(10)
    for thread in workers._threads:
        thread.join(10)
        assert not thread.is_alive()


def test_short_builds_are_silent(capfd):
    with Progress(1, quiet_s=10) as progress, progress.step("linking a", counts=True):
        pass
    assert capfd.readouterr().err == ""


def test_nobody_waits_10_seconds_without_a_line():
    assert (QUIET_S, LINE_EVERY_S) == (2.0, 5.0)
    assert vars(Progress(1))["_quiet_s"] == QUIET_S and vars(Progress(1))["_every_s"] == LINE_EVERY_S


def test_long_builds_print_plain_lines_where_stderr_is_no_terminal(capfd):
    with Progress(3, quiet_s=0.01, every_s=0.01) as progress:
        with progress.step("linking a", counts=True):
            pass
        with progress.step("linking b"), progress.step("linking c"), progress.step("linking d"):
            time.sleep(0.3)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) > 2
    assert any("1 of 3 kernels built" in line and "linking b, linking c and 1 more" in line for line in lines)


def test_a_link_that_failed_is_tried_again_and_an_unfit_kernel_is_not(compilers):
    for name, links in (("bad functor", 2), ("unfit functor", 1)):
        for _ in range(2):
            with pytest.raises(CompileError):
                build([source(functor=name, name=name)])
        assert compilers.links.count(name) == links
