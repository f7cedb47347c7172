"""The launches that a launcher keeps, under a driver that counts: what is encoded again, and what never is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gemmgen.config import GemmConfig
from gemmgen.jit.compile import LAUNCHER_FLAGS, NVCC_FLAGS
from gemmgen.jit.toolchain import template_include_dir, toolchain
from gemmgen.lower.sm90 import render_skeleton
from tests.compile.test_sm90 import SM90, signature

pytestmark = pytest.mark.compile
STREAM_K = GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=2)
SIZE = """
#if defined(GEMMGEN_LAUNCHER) && !defined(__CUDA_ARCH__)
extern "C" size_t params_bytes() { return sizeof(Kernel::Params); }
#endif
"""


def nvcc(source: Path, output: Path, *flags: str) -> None:
    tools = toolchain()
    folders = [f"-I{x}" for x in (*tools.cutlass.include_dirs, template_include_dir())]
    folders += [f"-L{x}" for x in tools.library_dirs]
    command = [tools.nvcc, "-ccbin", tools.host_compiler, *NVCC_FLAGS, *flags, *folders, "-o", output, source]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, dict[str, int]]:
    """By the name of a group of calls: their last bad status, and how many there were of everything else."""
    folder = tmp_path_factory.mktemp("launches")
    (folder / "skeleton.cu").write_text(render_skeleton(signature(), STREAM_K, SM90) + SIZE)
    target = f"arch=compute_{SM90.target},code=sm_{SM90.target}"
    nvcc(folder / "skeleton.cu", folder / "launcher.so", "-gencode", target, *LAUNCHER_FLAGS)
    shutil.copy(folder / "launcher.so", folder / "other.so")
    nvcc(Path(__file__).with_name("launches.cpp"), folder / "launches", "-Xcompiler", "-pthread,-rdynamic", "-ldl")
    command = [folder / "launches", folder / "launcher.so", folder / "other.so"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+) (-?\d+)", rest)}
        for name, rest in (line.split(": ") for line in printed.splitlines())
    }


def counts(sets: int, launched: int) -> dict[str, int]:
    """Of calls that all went right: `sets` times the descriptors of A, B and D were encoded."""
    return {"status": 0, "encoded": 3 * sets, "cleared": launched, "launched": launched, "right": launched}


@pytest.mark.parametrize(
    "name, sets, launched",
    [
        ("first", 1, 1),
        ("again", 0, 3),
        ("other pointers", 3, 7),
        ("other workspace", 1, 1),
        ("other shape and stride", 2, 4),
        ("layers", 78, 80),
        ("layers again", 0, 80),
        ("evicting", 220, 220),
        ("evicted", 1, 2),
        ("a thread", 1, 2),
        ("the first thread", 0, 1),
        ("another launcher", 1, 2),
    ],
)
def test_descriptors_are_encoded_once(calls, name, sets, launched):
    assert calls[name] == counts(sets, launched)


def test_a_refused_descriptor_is_not_kept(calls):
    assert calls["refused"] == {"status": 1, "encoded": 3, "cleared": 0, "launched": 0, "right": 0}
    assert calls["first"] == counts(1, 1)


def test_what_cannot_run_is_refused_again(calls):
    assert calls["misaligned"] == {"status": -1, "encoded": 0, "cleared": 0, "launched": 0, "right": 0}
