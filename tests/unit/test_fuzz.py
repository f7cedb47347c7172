"""The fuzzer itself: it passes on sound code, finds planted faults, and prints short programs."""

from __future__ import annotations

import random

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


def test_a_wrong_derivative_is_found(monkeypatch):
    monkeypatch.setitem(autodiff.VJP, Op.TANH, lambda node, cotangent: (build.mul(cotangent, build.const(0.5)),))
    found = [fuzz.fault(example) for example in examples(60, seed=2) if "tanh(" in example.epilogue]
    assert any(reason and "gradient" in reason for reason in found)


def test_a_wrong_result_is_found(monkeypatch):
    cpu = ops.EpilogueOp.cpu
    monkeypatch.setattr(ops.EpilogueOp, "cpu", lambda *args: [1.1 * result for result in cpu(*args)])
    found = [fuzz.fault(example) for example in examples(10, seed=3)]
    assert any(reason and "result 0" in reason for reason in found)
