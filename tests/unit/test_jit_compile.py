"""Running nvcc, with fake ones: both halves at once, the first real error, and no compiler left running."""

import threading
import time
from pathlib import Path

import pytest

from gemmgen.arch import arch_named
from gemmgen.errors import CompileError, ToolchainError
from gemmgen.jit import compile as compile_module
from gemmgen.jit.compile import compile_skeleton, first_error
from gemmgen.jit.link import resources
from gemmgen.jit.toolchain import Cutlass, Toolchain

SM90 = arch_named("sm90")
# writes to the file after -o; `$half` is ltoir or launcher
PREAMBLE = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = "-o" ] && out="$2"; shift; done
half=$(basename "$out" | sed 's/skeleton.ltoir/ltoir/; s/launcher.so/launcher/')
"""


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """A function that makes the toolchain's nvcc a shell script."""

    def make(script: str) -> Path:
        path = tmp_path / "nvcc"
        path.write_text(PREAMBLE + script)
        path.chmod(0o755)
        tools = Toolchain(path, "13.0.88", Cutlass((tmp_path / "cutlass",), "4.2.0"), Path("g++"), ())
        monkeypatch.setattr(compile_module, "toolchain", lambda: tools)
        monkeypatch.setattr(compile_module, "template_include_dir", lambda: tmp_path)
        return path

    return make


def test_both_halves_are_compiled_side_by_side(nvcc, tmp_path):
    # each half waits for the other, so one after the other would never end
    both = f'[ -e "{tmp_path}/ltoir" ] && [ -e "{tmp_path}/launcher" ]'
    nvcc(f'touch "{tmp_path}/$half"; until {both}; do sleep 0.01; done; printf "$half" > "$out"\n')
    skeleton = compile_skeleton("text", SM90)
    assert (skeleton.ltoir, skeleton.launcher) == (b"ltoir", b"launcher")


def test_flags_name_the_target_of_the_arch(nvcc, tmp_path):
    script = nvcc("")
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{tmp_path}/args"; exit 1\n')
    with pytest.raises(CompileError):
        compile_skeleton("text", arch_named("sm80"))
    args = (tmp_path / "args").read_text().split("\n")
    assert {"-DNDEBUG", "-std=c++17", f"-I{tmp_path / 'cutlass'}"} <= set(args)
    assert {"arch=compute_80,code=lto_80", "arch=compute_80,code=sm_80"} & set(args)


def test_flags_from_the_environment_do_not_reach_nvcc(nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-O0")
    nvcc('printf "[$NVCC_APPEND_FLAGS$NVCC_PREPEND_FLAGS]" > "$out"\n')
    assert compile_skeleton("text", SM90).ltoir == b"[]"


def test_a_failure_shows_the_first_error_and_keeps_source_and_log(nvcc, tmp_path):
    nvcc('echo "skeleton.cu(1): warning: odd"; echo "skeleton.cu(7): error: no T"; echo "9 errors detected"; exit 2\n')
    with pytest.raises(CompileError, match=r"failed on kernel `a/b`:\n  skeleton\.cu\(7\): error: no T\n") as caught:
        compile_skeleton("the text", SM90, name="a/b", failed_dir=tmp_path / "failed")
    kept = Path(caught.value.source_path)
    assert kept.read_text() == "the text"
    assert "warning: odd" in kept.with_suffix(".log").read_text()
    assert "warning: odd" in caught.value.log


def test_the_failing_half_speaks_and_the_other_is_stopped(nvcc):
    nvcc('[ $half = launcher ] && echo "error: bad launcher" && exit 1\necho "error: slow half"; sleep 30\n')
    started = time.monotonic()
    with pytest.raises(CompileError, match="bad launcher"):
        compile_skeleton("text", SM90)
    assert time.monotonic() - started < 20


def test_serialised_wgmma_is_a_failure(nvcc):
    nvcc('echo "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"; '
         'printf x > "$out"\n')
    with pytest.raises(CompileError, match="C7510"):
        compile_skeleton("text", SM90)


def test_an_unsupported_host_compiler_is_the_toolchains_fault(nvcc):
    nvcc('echo "host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 15"; exit 1\n')
    with pytest.raises(ToolchainError, match="GEMMGEN_CXX"):
        compile_skeleton("text", SM90)


def test_a_compiler_that_was_killed_is_a_failure(nvcc):
    nvcc("kill -9 $$\n")
    with pytest.raises(CompileError):
        compile_skeleton("text", SM90)


def is_running(pid: str) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_cancelling_kills_the_compilers_and_their_children(nvcc, tmp_path):
    nvcc(f'sh -c \'echo $$ >> "{tmp_path}/pids"; exec sleep 60\'\n')
    cancelled = threading.Event()
    caught = []

    def compile_it():
        try:
            compile_skeleton("text", SM90, cancelled=cancelled)
        except CompileError as error:
            caught.append(error)

    thread = threading.Thread(target=compile_it)
    thread.start()
    while not (tmp_path / "pids").exists() or (tmp_path / "pids").read_text().count("\n") < 2:
        time.sleep(0.01)
    cancelled.set()
    thread.join(20)
    assert len(caught) == 1
    deadline = time.monotonic() + 20
    while running := [pid for pid in (tmp_path / "pids").read_text().split() if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


@pytest.mark.parametrize(
    "line",
    [
        "a.h(4): error: y is undefined",
        "a.h:4:10: fatal error: z.h: No such file or directory",
        "nvcc fatal   : Unsupported gpu architecture 'compute_1'",
        "ptxas fatal   : Unresolved extern function 'f'",
        "/usr/bin/ld: cannot find -lcuda",
    ],
)
def test_the_first_error_line_is_found(line):
    assert first_error(f"a.h(3): warning: x\n{line}\nb.h(1): error: later\n2 errors detected") == line


def test_a_log_without_an_error_gives_its_first_line():
    assert first_error("\n something odd\nmore") == "something odd"
    assert first_error("") == "no message"


def test_resources_are_read_from_the_linkers_log():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers\n"
    )
    assert resources(log) == {"registers": 168, "spill_bytes": 20, "stack_bytes": 16}
