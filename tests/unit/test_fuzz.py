"""The fuzzer itself: it passes on sound code, finds planted faults, and prints short programs."""

from __future__ import annotations

import random
import re
import subprocess
import sys

from gemmgen import autodiff, ops
from gemmgen.ir import Op, build
from tests import fuzz


def examples(count: int, seed: int = 1) -> list[fuzz.Example]:
    choose = random.Random(seed)
    return [fuzz.example(choose, "cpu", 24) for _ in range(count)]


def test_sound_code_has_no_fault_and_programs_are_short():
    for example in examples(40):
        assert fuzz.fault(example) is None, example.program
        assert len(example.program.splitlines()) <= 15


def test_programs_for_a_gpu_are_short_and_draw_from_few_skeletons():
    choose = random.Random(4)
    drawn = [fuzz.example(choose, "cuda", 24) for _ in range(2000)]
    assert max(len(example.program.splitlines()) for example in drawn) <= 15
    for example in drawn:
        compile(example.program, "<fuzz>", "exec")
    fused = [example for example in drawn if example.path.config == fuzz.SM90]
    heads = {example.epilogue.splitlines()[1] for example in fused}
    assert 150 < len(fused) < 500 and len(heads) <= 4
    assert sum(example.is_differentiable for example in drawn) > 100


def test_it_runs_from_the_command_line():
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", "0.02", "--jobs", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"[1-9]\d* examples on cpu in 2 processes, 0 faults\n", done.stdout)


def test_a_wrong_derivative_is_found(monkeypatch):
    monkeypatch.setitem(autodiff.VJP, Op.TANH, lambda node, cotangent: (build.mul(cotangent, build.const(0.5)),))
    found = [fuzz.fault(example) for example in examples(60, seed=2) if "tanh(" in example.epilogue]
    assert any(reason and "gradient" in reason for reason in found)


def test_a_wrong_result_is_found(monkeypatch):
    cpu = ops.EpilogueOp.cpu
    monkeypatch.setattr(ops.EpilogueOp, "cpu", lambda *args: [1.1 * result for result in cpu(*args)])
    found = [fuzz.fault(example) for example in examples(10, seed=3)]
    assert any(reason and "result 0" in reason for reason in found)
