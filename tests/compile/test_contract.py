"""Processes that share a cache, with the real compilers: built once, killed at any point, paths of any characters."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmgen.jit.cache import KERNELS, Cache
from gemmgen.jit.toolchain import toolchain

pytestmark = pytest.mark.compile
ROOT = Path(__file__).parents[2]
BUILD = """
from gemmgen.arch import arch_named
from gemmgen.jit import build
from gemmgen.source import KernelSource
from tests.compile.test_jit import FUNCTOR, SKELETON
print(build([KernelSource("add_row", arch_named("sm90"), SKELETON, FUNCTOR)])[0].cubin)
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Of a builder: a cache on an unpleasant path, and an nvcc that notes the skeletons it compiles in `compiled`."""
    nvcc, temporary = tmp_path / "nvcc", tmp_path / "temporary"
    temporary.mkdir()
    noted = f'case "$*" in *-ltoir*) echo one >> "{tmp_path}/compiled" ;; esac'
    nvcc.write_text(f'#!/bin/sh\n{noted}\nexec "{shutil.which(toolchain().nvcc)}" "$@"\n')
    nvcc.chmod(0o755)
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "GEMMGEN_NVCC": str(nvcc), "TMPDIR": str(temporary),
        "GEMMGEN_CACHE_DIR": str(tmp_path / "größe; $(touch pwned) `touch pwned` 'cache'"),
    }  # fmt: skip


def builder(environment: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD], env=environment, cwd=cwd, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_processes_that_start_cold_at_once_build_a_kernel_once(environment, tmp_path):
    processes = [builder(environment, tmp_path) for _ in range(8)]
    printed = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert {code for *_, code in printed} == {0}, printed
    assert len({out for out, *_ in printed}) == 1
    assert (tmp_path / "compiled").read_text() == "one\n"
    assert Cache(Path(environment["GEMMGEN_CACHE_DIR"])).verify() == []
    assert not list(tmp_path.rglob("pwned"))


def test_a_builder_killed_at_any_point_leaves_nothing_wrong(environment, tmp_path):
    cache = Cache(Path(environment["GEMMGEN_CACHE_DIR"]))
    started = time.monotonic()
    reference = builder({**environment, "GEMMGEN_CACHE_DIR": str(tmp_path / "reference")}, tmp_path)
    reference.communicate(timeout=300)
    seconds = time.monotonic() - started
    for part in (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0):
        process = builder(environment, tmp_path)
        time.sleep(part * seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert cache.verify() == []
    last = builder(environment, tmp_path)
    out, errors = last.communicate(timeout=300)
    assert last.returncode == 0, errors
    assert Path(out.strip()).read_bytes().startswith(b"\x7fELF")
    assert [entry.kind for entry in cache.entries()].count(KERNELS) == 1 and cache.verify() == []
