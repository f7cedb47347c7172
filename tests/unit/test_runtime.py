"""What a call with a new M costs: no choice and no search for a kernel that calls like it have made before."""

from __future__ import annotations

import math

import pytest
import torch

import gemmgen as gg
from gemmgen import choose, jit, runtime, tuned
from gemmgen.problem import Extents, representative_of
from gemmgen.runtime import Options, Runner
from gemmgen.ways import Fused
from tests.unit import fake_device
from tests.unit.fake_device import FakeKernel, call_of, doubled


@pytest.fixture
def device(monkeypatch, tf32):
    return fake_device.installed(monkeypatch)


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


def representative(M: int) -> int:
    return representative_of(Extents(M, 4096, 4096, 1, False)).M


def test_a_class_of_m_has_as_many_tiles_throughout_and_one_bucket():
    for M in range(1, 5000):
        largest = representative(M)
        assert 0 <= largest - M < 64 and representative(largest) == largest
        assert tuned.bucket_of(largest) == tuned.bucket_of(M)
        # of many rows, no kernel with lower tiles is worth trying
        for height in (h for h in HEIGHTS if M <= 1024 or h >= 64):
            assert math.ceil(largest / height) == math.ceil(M / height), (M, height)
    assert len({representative(M) for M in range(1, 16385)}) < 450


@pytest.mark.parametrize("order", [(81, 88), (88, 81)])
def test_the_first_call_of_a_class_does_not_decide_for_the_others(device, order):
    alone, run = runner(), runner()
    wanted = {}
    for M in order:
        A, B, operands = call_of(M)
        alone.forget_plans()
        wanted[M] = alone.plan(A, B, operands).config
        assert run.plan(A, B, operands).config == wanted[M]
    assert wanted[81] == wanted[88]


def test_a_class_whose_m_was_measured_runs_what_was_the_fastest(device):
    A, B, operands = call_of(84)
    run = runner()
    call = run.tunable(A, B, operands)
    first, second = [way for way in run.selection(call.binding, call.target).ways if isinstance(way, Fused)][:2]
    entry = tuned.Entry.of(84, (tuned.Measured(second, 10.0), tuned.Measured(first, 10.1)))
    for M in (81, 84, 88):
        A, B, operands = call_of(M)
        binding = run.tunable(A, B, operands).binding
        selection = entry.selection(binding, call.target)
        assert selection is not None and selection.ways[0] == second


def test_a_choice_that_memory_did_not_suffice_to_measure_is_not_kept(device, monkeypatch):
    run = runner(tune="first-call")
    tried = []

    def measure(call):
        tried.append(call)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("gemmgen.tune.found_or_measured", measure)
    for M in (72, 71):
        assert_right(run, M)
    assert len(tried) == 2
