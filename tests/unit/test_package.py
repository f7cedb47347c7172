"""The package as it is installed: what the wheel holds, what an import costs, and the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gemmgen as gg

ROOT = Path(__file__).parents[2]
LATE = ["bench", "click", "cuda.bindings.nvjitlink", "cuda.bindings.nvrtc", "hypothesis", "jinja2", "matplotlib",
        "platformdirs", "rich", "triton"]  # fmt: skip


def python(code: str, folder: Path) -> str:
    """What `code` prints in a new process whose gemmgen is the one in `folder`."""
    command = [sys.executable, "-c", code]  # looks in the current folder first
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's content, as pip would lay it out."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("gemmgen-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_module_and_template_and_nothing_else(installed):
    names = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    info = next(installed.glob("*.dist-info")).name
    sources = {path.relative_to(ROOT) for path in (ROOT / "gemmgen").rglob("*") if path.suffix in (".py", ".typed")}
    templates = {path.relative_to(ROOT / "templates") for path in (ROOT / "templates").rglob("*") if path.is_file()}
    assert {name for name in names if name.parts[0] != info} == sources | {
        Path("gemmgen/_templates") / template for template in templates
    }
    assert Path(info, "licenses/LICENSE") in names
    assert "gemmgen = gemmgen.__main__:main" in (installed / info / "entry_points.txt").read_text()


def test_the_wheel_renders_kernels(installed):
    code = """
import torch, gemmgen as gg
A = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
bias = torch.empty(256, device="meta")
op = gg.Gemm(gg.library.bias_gelu)
print(gg.__file__)
print(all("gemmgen_functor_0" in op.source(A, A.t(), bias=bias, arch=arch) for arch in ("sm80", "sm90", "sm100")))
from gemmgen.jit.toolchain import template_include_dir
print(template_include_dir())
"""
    file, rendered, include = python(code, installed).splitlines()
    assert Path(file).is_relative_to(installed) and rendered == "True"
    assert Path(include).is_relative_to(installed)


def test_an_import_loads_nothing_that_only_some_calls_need():
    code = f"""
import sys, torch
before = set(sys.modules)
import gemmgen
print(*[name for name in {LATE} if name in set(sys.modules) - before])
"""
    assert python(code, ROOT).split() == []


def test_public_names_exist_and_say_what_they_are():
    assert len(set(gg.__all__)) == len(gg.__all__)
    for name in gg.__all__:
        value = getattr(gg, name)
        assert inspect.ismodule(value) or inspect.getdoc(value), name


def test_every_error_is_public_and_a_gemmgen_error():
    from gemmgen import errors

    declared = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert declared <= set(gg.__all__)
    assert all(issubclass(getattr(gg, name), gg.GemmgenError) for name in declared)
