"""The load test itself: it runs on the CPU, and sees wrong results, errors and growing memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import gemmgen as gg
from gemmgen import ops
from tests import load


def test_it_runs_from_the_command_line(tmp_path):
    out = tmp_path / "load.json"
    command = [sys.executable, "-m", "tests.load", "--calls", "200", "--processes", "2", "--device", "cpu",
               "--check-each", "5", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = json.loads(out.read_text())
    assert page["calls"] == 200 and page["checked"] == 40 and page["verdict"] == "clean" and page["backwards"] > 10


def test_wrong_results_are_seen(monkeypatch):
    cpu = ops.EpilogueOp.cpu
    monkeypatch.setattr(ops.EpilogueOp, "cpu", lambda *args: [result + 1 for result in cpu(*args)])
    tally = load.work(0, 2, 20, 60, 1, "cpu")
    assert tally.calls == 20 and tally.wrong and "cpu" in tally.wrong[0]
    assert load.summary([tally], 1.0)["verdict"] == "wrong"


def test_errors_are_seen(monkeypatch):
    monkeypatch.setattr(load.Case, "is_right", lambda self, results: torch.ones(2) + torch.ones(3))
    tally = load.work(0, 2, 20, 60, 1, "cpu")
    assert any(each.startswith("RuntimeError") for each in tally.wrong)


def test_time_ends_it():
    assert load.work(0, 1, 10**9, 0.2, 10**6, "cpu").calls < 10**6


@pytest.mark.parametrize("kind", ["host", "device"])
def test_growing_memory_is_a_leak(kind):
    tally = load.Tally(calls=100, host=[10**8] * 100, device=[10**8] * 100)
    assert load.summary([tally], 1.0)["verdict"] == "clean"
    setattr(tally, kind, [10**8 + 10**6 * i for i in range(100)])
    assert load.summary([tally], 1.0)["verdict"] == "leak"


def test_gradients_are_checked():
    case = load.Case("cpu", 3, 45, 131, "cpu")
    gradients = case.backward()
    assert case.is_right(gradients) and not case.is_right([gradients[0] * 1.1, *gradients[1:]])
    assert isinstance(case.op, gg.Gemm)
