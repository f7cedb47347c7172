"""What the bench does on a machine without a GPU, with a stand-in for gemmgen."""

import io
import sys
from types import ModuleType

import pytest
from rich.console import Console

from bench import without_gpu
from bench.cases import CASES, OUT_DTYPE, Inputs, reference
from bench.rungs import RUNGS
from bench.settings import Settings
from bench.shapes import Shape


def standing_in(case):
    """Eager torch, or the rounded answer where this torch has no such product on the CPU."""

    def call(A, B, **operands):
        try:
            return case.eager(A, B, **operands)
        except RuntimeError:
            return tuple(x.to(OUT_DTYPE) for x in reference(case, Inputs(A, B, operands)))

    return call


@pytest.fixture
def api(monkeypatch):
    """gemmgen's place taken by eager torch; builds are noted in `api.built`."""
    module = ModuleType("bench.gemmgen_api")
    module.built = []
    module.gemm = standing_in
    module.build = lambda case, shape, arch: module.built.append((case.name, arch))
    monkeypatch.setitem(sys.modules, "bench.gemmgen_api", module)
    monkeypatch.setattr("bench.gemmgen_api", module, raising=False)
    return module


def run(tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    settings = Settings(tuple(CASES.values()), (), tuple(RUNGS.values()), tmp_path)
    return without_gpu.run(settings, console), console.export_text()


def test_it_compiles_a_couple_of_kernels_checks_every_case_and_says_what_is_missing(api, tmp_path):
    code, text = run(tmp_path)

    assert code == 0 and "Needs a GPU" in text
    assert api.built == [("bias_gelu_tanh", "sm90"), ("bias_silu", "sm90")]
    assert all(f"{name}: CPU answers agree with float64" in text for name in CASES)


def test_a_kernel_that_does_not_compile_fails_the_run(api, tmp_path):
    def build(case, shape, arch):
        raise RuntimeError("nvcc not found")

    api.build = build
    code, text = run(tmp_path)

    assert code == 1 and "nvcc not found" in text


def test_a_wrong_cpu_answer_fails_the_run(api, tmp_path):
    api.gemm = lambda case: lambda A, B, **operands: [x + 1 for x in case.eager(A, B, **operands)]
    code, text = run(tmp_path)

    assert code == 1 and "wrong answer" in text


def test_cpu_verdict_reports_what_gemmgen_raises(api):
    def broken(A, B, **operands):
        raise TypeError("no such operand")

    api.gemm = lambda case: broken

    assert without_gpu.cpu_verdict(CASES["bias_silu"], Shape(4, 8, 16)) == "TypeError: no such operand"
