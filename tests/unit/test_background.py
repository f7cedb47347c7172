"""`compile="background"`: the split way serves until the fused kernel is built, under threads too."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

import gemmgen as gg
from gemmgen import background, runtime, ways
from gemmgen.runtime import Options, Runner
from gemmgen.torch_ops import TorchOp
from gemmgen.ways import SPLIT, Split
from tests.unit import fake_device
from tests.unit.fake_device import call_of, doubled

BACKGROUND = Options(compile="background")
POINTWISE = "gemmgen_pointwise"


@pytest.fixture
def device(monkeypatch, tf32):
    monkeypatch.setattr(background, "_builds", background.Builds())
    return fake_device.installed(monkeypatch)


@pytest.fixture
def runner(device):
    return Runner(gg.Gemm(doubled)._op.graph_for, BACKGROUND)


def expected(A, B, bias):
    return 2 * (A @ B) + bias


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def is_done(runner: Runner) -> bool:
    return all(upgrade.building.done() for upgrade in runner._pending.values())


def call_whose_kernel_is_built(device, runner):
    """A call that was served by a stand-in, while its kernel was built; that has not been noticed yet."""
    A, B, operands = call_of()
    device.gate.clear()
    runner(A, B, operands)
    device.gate.set()
    until(lambda: is_done(runner))
    return A, B, operands


def test_split_serves_until_the_kernel_is_built(device, runner):
    A, B, operands = call_of()
    device.gate.clear()
    for _ in range(3):
        (D,) = runner(A, B, operands)
        assert torch.equal(D, expected(A, B, **operands))
    assert device.ran == [POINTWISE] * 3
    device.gate.set()
    until(lambda: is_done(runner))
    (D,) = runner(A, B, operands)
    assert torch.equal(D, expected(A, B, **operands))
    assert device.ran[3:] == device.built
    assert len(device.built) == 1


def test_all_m_that_wait_for_a_kernel_are_upgraded_at_once(device, runner):
    calls = [call_of(M) for M in (65, 66, 67)]
    device.gate.clear()
    for A, B, operands in calls:
        runner(A, B, operands)
    device.gate.set()
    until(lambda: is_done(runner))
    A, B, operands = calls[1]
    runner(A, B, operands)
    assert not runner._pending
    device.ran.clear()
    for A, B, operands in calls:
        (D,) = runner(A, B, operands)
        assert torch.equal(D, expected(A, B, **operands))
    assert POINTWISE not in device.ran


def test_what_waits_on_another_device_is_left_to_its_own_calls(device, runner):
    A, B, operands = call_whose_kernel_is_built(device, runner)
    ((key, upgrade),) = runner._pending.items()
    elsewhere = (7, *key[1:])
    runner._pending[elsewhere] = upgrade
    runner(A, B, operands)
    assert list(runner._pending) == [elsewhere]


def test_plans_that_are_forgotten_during_an_upgrade_are_made_anew(device, runner, monkeypatch):
    A, B, operands = call_whose_kernel_is_built(device, runner)
    settled = runner._settled

    def forgetting(upgrade):
        runner.forget_plans()
        return settled(upgrade)

    monkeypatch.setattr(runner, "_settled", forgetting)
    for _ in range(2):
        device.ran.clear()
        runner(A, B, operands)
        assert POINTWISE not in device.ran
    assert not runner._pending


def test_a_kernel_that_is_built_runs_at_once(device, runner):
    A, B, operands = call_of()
    Runner(runner._graph_for)(A, B, operands)
    runner(A, B, operands)
    assert device.ran == device.built * 2


def test_threads_see_right_answers_through_the_switch_and_build_once(device, runner):
    calls = [call_of(M) for M in (64, 96, 128)]
    wrong, stop = [], threading.Event()

    def work(A, B, operands):
        while not stop.is_set():
            (D,) = runner(A, B, operands)
            if not torch.equal(D, expected(A, B, **operands)):
                wrong.append(D)

    device.gate.clear()
    threads = [threading.Thread(target=work, args=call) for call in calls for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(device.ran) > 20)
    assert set(device.ran) == {POINTWISE}
    device.gate.set()
    until(lambda: not runner._pending)
    seen = len(device.ran)
    until(lambda: len(device.ran) > seen + 20)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(device.built) == len(set(device.built))
    device.ran.clear()  # until here a thread may have been asleep between its plan and its launch
    for A, B, operands in calls:
        runner(A, B, operands)
    assert len(device.ran) == len(calls) and POINTWISE not in device.ran


def test_a_failed_build_is_logged_once_and_split_stays(device, runner, monkeypatch, caplog):
    device.refused = _Everything()
    calls = [call_of(), call_of(96)]
    for _ in range(3):
        for A, B, operands in calls:
            (D,) = runner(A, B, operands)
            assert torch.equal(D, expected(A, B, **operands))
        until(lambda: is_done(runner))
    assert set(device.ran) == {POINTWISE}
    assert caplog.text.count("was not built in the background") <= len(calls)
    assert not runner._pending


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


def test_nothing_is_switched_inside_a_capture(device, runner, monkeypatch):
    A, B, operands = call_whose_kernel_is_built(device, runner)
    monkeypatch.setattr(runtime, "is_capturing", lambda: True)
    runner(A, B, operands)
    assert set(device.ran) == {POINTWISE}
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    runner(A, B, operands)
    assert device.ran[-1] == device.built[0]


def test_what_is_chosen_anew_is_not_replaced_by_an_older_build(device, runner, monkeypatch):
    A, B, operands = call_of()
    device.gate.clear()
    runner(A, B, operands)
    (upgrade,) = runner._pending.values()
    monkeypatch.setattr(ways.choose, "estimate_split_us", lambda *_: 1e-6)  # as a measurement would say
    runner.forget_plans()
    device.gate.set()
    until(upgrade.building.done)
    for _ in range(2):
        runner(A, B, operands)
    assert device.ran == [POINTWISE] * 3


def test_torchs_op_serves_before_split_does(device, runner, monkeypatch):
    def compute(A, B, operands, D):
        device.ran.append("torch")
        D.copy_(expected(A, B, **operands))

    monkeypatch.setattr(ways, "torch_op", lambda binding, arch: TorchOp("torch.doubled", compute))
    monkeypatch.setattr(ways.choose, "estimate_library_us", lambda *_: 1e6)
    A, B, operands = call_of()
    device.gate.clear()
    (D,) = runner(A, B, operands)
    assert torch.equal(D, expected(A, B, **operands))
    assert device.ran == ["torch"]
    device.gate.set()
    until(lambda: is_done(runner))
    runner(A, B, operands)
    assert device.ran[1:] == device.built
    monkeypatch.setattr(ways.choose, "estimate_library_us", lambda *_: 1e-6)
    A, B, operands = call_of(96)
    runner(A, B, operands)
    assert device.ran[2:] == ["torch"], "what is chosen needs no build"
    assert not runner._pending


def test_where_split_cannot_serve_the_call_waits(device, runner, monkeypatch):
    monkeypatch.setattr(Split, "reject_reason", lambda self, binding, arch: "torch has none")
    A, B, operands = call_of()
    runner(A, B, operands)
    assert device.ran == device.built
    assert SPLIT.reject_reason(None, None)


def test_equal_builds_are_one_while_they_run():
    builds, gate, runs = background.Builds(), threading.Event(), []

    def build():
        gate.wait(10)
        runs.append(1)
        return "built"

    futures = {builds.submit("key", "it", build) for _ in range(5)}
    gate.set()
    assert [future.result(10) for future in futures] == ["built"]
    assert len(runs) == 1


def test_a_program_ends_during_a_build():
    program = (
        "import threading, time\nfrom gemmgen import background\n"
        "started = threading.Event()\n"
        "def build():\n    started.set()\n    time.sleep(60)\n"
        "background.submit('key', 'it', build)\nstarted.wait()\n"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
    assert time.monotonic() - started < 45
