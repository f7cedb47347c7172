"""What a call with a new M costs: no choice and no search for a kernel that calls like it have made before."""

from __future__ import annotations

import math

import pytest
import torch

import gemmgen as gg
from gemmgen import choose, jit, runtime, tuned
from gemmgen.runtime import Options, Runner
from tests.unit import fake_device
from tests.unit.fake_device import FakeKernel, call_of, doubled


@pytest.fixture
def device(monkeypatch):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield fake_device.installed(monkeypatch)
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def counted(monkeypatch):
    """How often something was chosen, and how often a kernel was looked for or built."""
    counts = {"selected": 0, "build": 0}

    def counting(module, name):
        original = getattr(module, name)

        def call(*arguments, **named):
            counts[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    counting(runtime, "selected")
    counting(jit, "build")
    return counts


def runner(**options) -> Runner:
    return Runner(gg.Gemm(doubled)._op.graph_for, Options(**options))


def assert_right(run: Runner, M: int) -> None:
    A, B, operands = call_of(M)
    (D,) = run(A, B, operands)
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])


def test_calls_alike_but_for_m_share_a_choice_and_a_kernel(device, counted):
    run = runner()
    for M in range(65, 73):
        assert_right(run, M)
    assert counted == {"selected": 1, "build": 1}
    assert_right(run, 73)
    assert counted["selected"] == 2


def test_other_columns_are_another_choice(device, counted):
    run = runner()
    for N in (128, 256):
        A, B, operands = call_of(72, N)
        (D,) = run(A, B, operands)
        assert torch.equal(D, 2 * (A @ B) + operands["bias"])
    assert counted["selected"] == 2


def test_what_is_measured_later_is_chosen_once_plans_are_forgotten(device, counted):
    run = runner()
    assert_right(run, 72)
    run.forget_plans()
    assert_right(run, 71)
    assert counted == {"selected": 2, "build": 2}


def test_a_kernel_that_left_the_cache_is_built_again(device, counted, monkeypatch):
    run = runner()
    assert_right(run, 72)
    gone = [True]

    def load(built):
        if gone.pop():
            gone.append(False)
            raise gg.CacheError("it was removed")
        gone.append(False)
        return FakeKernel(device, built.name)

    monkeypatch.setattr(jit, "load_kernel", load)
    assert_right(run, 71)
    assert counted == {"selected": 1, "build": 2}


def test_a_choice_that_could_not_be_measured_while_capturing_is_not_kept(device, counted, monkeypatch):
    run = runner(tune="first-call")
    measured = []
    monkeypatch.setattr("gemmgen.tune.found_or_measured", measured.append)
    monkeypatch.setattr(runtime, "is_capturing", lambda: True)
    assert_right(run, 72)
    assert not measured
    monkeypatch.setattr(runtime, "is_capturing", lambda: False)
    assert_right(run, 71)
    assert_right(run, 70)
    assert len(measured) == 1 and counted["selected"] == 2


def test_who_only_asks_leaves_the_first_call_to_be_measured(device, monkeypatch):
    run = runner(tune="first-call")
    measured = []
    monkeypatch.setattr("gemmgen.tune.found_or_measured", measured.append)
    A, B, operands = call_of(72)
    call = run.tunable(A, B, operands)
    run.selection(call.binding, call.target)
    assert not measured
    assert_right(run, 72)
    assert len(measured) == 1


def test_an_op_of_torch_is_not_chosen_for_results_that_it_cannot_write(device, monkeypatch):
    monkeypatch.setattr("gemmgen.choose.estimate_library_us", lambda *_: 0.1)
    run = Runner(gg.Gemm(gg.library.bias)._op.graph_for)
    A, B, operands = call_of(72)
    A, B, operands = A.bfloat16(), B.bfloat16(), {"bias": operands["bias"].bfloat16()}
    wide = torch.empty(72, 256, dtype=torch.bfloat16)
    assert run.plan(A, B, operands, None, [wide[:, :128].contiguous()]).way == "library"
    assert run.plan(A, B, operands, None, [wide[:, :128]]).way != "library"


def test_an_op_of_torch_is_not_chosen_for_a_batch_that_is_no_single_product(device, monkeypatch):
    monkeypatch.setattr("gemmgen.choose.estimate_library_us", lambda *_: 0.1)
    run = Runner(gg.Gemm(gg.library.bias)._op.graph_for)
    A, B = torch.empty(3, 72, 64, dtype=torch.bfloat16), torch.empty(128, 64, dtype=torch.bfloat16).t()
    operands = {"bias": torch.empty(128, dtype=torch.bfloat16)}
    assert run.plan(A, B, operands).way == "library"
    assert run.plan(A[:, :71], B, operands).way != "library"


CANDIDATES = (*choose.SM90_CANDIDATES, *choose.SM90_FURTHER, *choose.SWAPPED_CANDIDATES)
HEIGHTS = sorted({c.tile_shape[1 if c.swapped else 0] for c in CANDIDATES})


def test_a_class_of_m_has_as_many_tiles_throughout_and_one_bucket():
    for M in range(1, 5000):
        representative = runtime._representative(M)
        assert 0 <= representative - M < 64
        assert tuned.bucket_of(representative) == tuned.bucket_of(M)
        # of many rows, no kernel with lower tiles is worth trying
        for height in (h for h in HEIGHTS if M <= 1024 or h >= 64):
            assert math.ceil(representative / height) == math.ceil(M / height), (M, height)
    assert len({runtime._representative(M) for M in range(1, 16385)}) < 450
