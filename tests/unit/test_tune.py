"""Tuning: the rule of buckets, what is kept on disk, and the search, on a device in memory."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch

import gemmgen as gg
from gemmgen import tune, tuned, ways
from gemmgen.config import GemmConfig
from gemmgen.runtime import Options, Runner
from gemmgen.torch_ops import TorchOp
from gemmgen.tuned import Entry, Measured, bucket_of
from gemmgen.ways import LIBRARY, SPLIT, Fused, Timed, way_of
from tests.unit import fake_device
from tests.unit.fake_device import SM90, call_of, doubled

# buckets


def test_buckets_are_few_and_cover_every_m():
    buckets = sorted({bucket_of(M) for M in range(1, 16385)})
    assert buckets == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
                       12288, 16384]  # fmt: skip
    for M in range(1, 40000):
        assert M <= bucket_of(M) <= max(16, 1.5 * M)
        assert bucket_of(bucket_of(M)) == bucket_of(M)


# the device


class FakeRecorder:
    """Times by the name of the kernel that ran last: `times_us` for each run, or 100 for those that are not in it."""

    def __init__(self, device, times_us):
        self.device, self.times_us, self.recorded = device, times_us, []

    def record(self, call):
        before = len(self.device.ran)
        call()
        name, runs = self.device.ran[-1], len(self.device.ran) - before
        self.recorded.append(name)
        return lambda: runs * self.times_us.get(name, 100.0)

    def synchronize(self):
        pass


@pytest.fixture
def device(monkeypatch, tmp_path, tf32):
    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield fake_device.installed(monkeypatch)
    tuned.forget()


def runner(mode="cached") -> Runner:
    op = gg.Gemm(doubled)._op
    return Runner(op.graph_for, Options(tune=mode), op.reference)


def bound_call(M=64):
    A, B, operands = call_of(M)
    return runner().tunable(A, B, operands)


def names(call, configs):
    return [Fused(config).source(call.binding, SM90.arch).name for config in configs]


CONFIGS = [GemmConfig("sm90", (64, n, 32), (1, 1), "pingpong") for n in (32, 64, 128)]


def test_the_fastest_is_kept_and_used(device):
    call = bound_call()
    slow, fast, middle = names(call, CONFIGS)
    recorder = FakeRecorder(device, {slow: 50.0, fast: 20.0, middle: 30.0, "gemmgen_pointwise": 40.0})
    entry = tune.measured(call, CONFIGS, recorder=recorder)
    assert entry.rows[0].way.config.tile_shape == CONFIGS[1].tile_shape
    assert {row.way for row in entry.rows} >= {SPLIT, *map(Fused, CONFIGS)}
    A, B, operands = call_of()
    device.ran.clear()
    (D,) = runner()(A, B, operands)
    assert device.ran == [fast]
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])


def test_clear_losers_are_dropped_early(device):
    call = bound_call()
    slow, fast, middle = names(call, CONFIGS)
    recorder = FakeRecorder(device, {slow: 90.0, fast: 20.0, middle: 23.0})
    tune.measured(call, CONFIGS, rounds=40, recorder=recorder)
    counts = {name: recorder.recorded.count(name) for name in (slow, fast, middle)}
    assert counts[slow] == 1 + 3  # one to warm up
    assert 40 > counts[middle] > 1 + 3
    assert counts[fast] > 40


def test_long_products_are_timed_on_a_settled_card(device, monkeypatch):
    """For its first tenth of a second the card is rested, and one kernel is faster than at its power limit."""
    monkeypatch.setattr(tune, "SETTLE_S", 0.2)
    call = bound_call()
    burst, steady, slow = names(call, CONFIGS)
    began = []

    class OfState(FakeRecorder):
        def record(self, call):
            began.append(time.monotonic())
            self.times_us[burst] = 1100.0 if began[-1] < began[0] + 0.1 else 1600.0
            time_us = super().record(call)()
            return lambda: time_us

    times_us = {steady: 1500.0, slow: 3000.0, "gemmgen_pointwise": 3000.0}
    entry = tune.measured(call, CONFIGS, recorder=OfState(device, times_us))
    assert entry.rows[0].way == Fused(CONFIGS[1])
    assert [row.time_us for row in entry.rows if row.way == Fused(CONFIGS[0])] == [1600.0]


@pytest.mark.parametrize(
    "best_us, spins", [(20.0, 200_000), (1500.0, 990_000), (9000.0, 1_485_000)], ids=["small", "large", "largest"]
)
def test_large_products_are_timed_with_pauses(device, monkeypatch, best_us, spins):
    monkeypatch.setattr(tune, "SETTLE_S", 0.0)
    call = bound_call()
    spun = []

    def recorder(device_of_call, spin_cycles):
        spun.append(spin_cycles)
        return FakeRecorder(device, dict.fromkeys((*names(call, CONFIGS), "gemmgen_pointwise"), best_us))

    monkeypatch.setattr(tune, "ColdL2Recorder", recorder)
    tune.measured(call, CONFIGS)
    assert spun == [200_000, spins, spins]  # nothing is known before the first stage


def matrices_of_one_record(call, device, monkeypatch):
    """A and B of the calls that one sample holds."""
    found = []
    monkeypatch.setattr(tune, "run", lambda plan, matrices, *_: found.append(matrices))
    recorder = FakeRecorder(device, {})
    monkeypatch.setattr(recorder, "record", lambda call: call() or (lambda: 1.0))
    plans, _ = tune._planned(call, [Fused(CONFIGS[0])])
    (plan,) = plans.values()
    tune._measured(call, plans, tune._chain(call, plan), 1, recorder)
    return found[: len(found) // 2]  # the other half is the warm-up's


def test_calls_with_few_rows_are_timed_one_behind_the_other(device, monkeypatch):
    A, B, operands = call_of(M=8, N=128, K=512)
    found = matrices_of_one_record(runner().tunable(A, B, operands), device, monkeypatch)
    assert len(found) == 4 and all(a is A for a, _ in found)
    assert len({b.data_ptr() for _, b in found}) == 4, "none finds its B in L2"
    assert all(torch.equal(b, B) and b.stride() == B.stride() for _, b in found)


@pytest.mark.parametrize("M, N, K, is_padded", [(64, 128, 64, False), (8, 128, 8, False), (8, 128, 512, True)])
def test_calls_with_many_rows_or_large_results_or_a_padded_b_are_timed_alone(device, monkeypatch, M, N, K, is_padded):
    A, B, operands = call_of(M, N, K)
    if is_padded:
        B = torch.zeros(N, K + 8).t()[:-8].copy_(B)
    assert len(matrices_of_one_record(runner().tunable(A, B, operands), device, monkeypatch)) == 1


def test_without_memory_for_copies_calls_are_timed_alone(device, monkeypatch):
    call = runner().tunable(*call_of(M=8, N=128, K=512))

    def exhausted(self):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.Tensor, "clone", exhausted)
    assert len(matrices_of_one_record(call, device, monkeypatch)) == 1


def test_finalists_are_of_several_kernels(device):
    call = bound_call()
    times_us = dict(zip(names(call, CONFIGS), (20.0, 21.0, 21.5), strict=True))
    recorder = FakeRecorder(device, times_us)
    tune.measured(call, CONFIGS, rounds=40, recorder=recorder)
    assert all(recorder.recorded.count(name) > 40 for name in times_us)


def test_what_is_kept_out_of_the_final_is_not_ahead_of_what_ran_in_it(device, monkeypatch):
    """Three orders of one kernel are alike until the final, where that kernel turns out slower than another."""
    call = bound_call()
    first, second = (Fused(config) for config in CONFIGS[:2])
    orders = [Fused(config) for config in tune._orders(call, CONFIGS[0])]
    stages = iter(
        [
            {first: 20.0, second: 20.5},
            dict.fromkeys((first, *orders), 20.0) | {second: 20.5},
            dict.fromkeys((first, *orders), 22.0) | {second: 20.0},
        ]
    )
    monkeypatch.setattr(tune, "_variants", lambda call, plans: dict.fromkeys(orders))

    def measured(call, plans, *_):
        times = next(stages)
        return {way: times[way] for way in plans}

    monkeypatch.setattr(tune, "_measured", measured)
    monkeypatch.setattr(tune, "_chain", lambda call, plan: [call.matrices])
    times = tune._halved(call, dict.fromkeys((first, second)), 25, FakeRecorder(device, {}))
    assert min(times, key=times.get) == second
    assert sorted(times.values())[1] == 22.0


def test_split_can_win(device):
    call = bound_call()
    tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {"gemmgen_pointwise": 10.0}))
    A, B, operands = call_of()
    device.ran.clear()
    runner()(A, B, operands)
    assert device.ran == ["gemmgen_pointwise"]


def torch_doubles(device, monkeypatch, fault=0.0):
    """Let torch have an op for `doubled`, which is off by `fault`."""

    def compute(A, B, operands, D):
        device.ran.append("torch")
        D.copy_(2 * (A @ B) + operands["bias"] + fault)

    monkeypatch.setattr(ways, "torch_op", lambda binding, arch: TorchOp("torch.doubled", compute))


def test_torchs_op_is_measured_and_can_win(device, monkeypatch):
    torch_doubles(device, monkeypatch)
    entry = tune.measured(bound_call(), CONFIGS, recorder=FakeRecorder(device, {"torch": 10.0}))
    assert entry.rows[0].way is LIBRARY
    device.ran.clear()
    A, B, operands = call_of()
    (D,) = runner()(A, B, operands)
    assert device.ran == ["torch"]
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])


def test_torchs_op_is_checked_as_any_other_way(device, monkeypatch):
    torch_doubles(device, monkeypatch, fault=100.0)
    entry = tune.measured(bound_call(), CONFIGS, recorder=FakeRecorder(device, {"torch": 10.0}))
    assert "is wrong in" in entry.failures[LIBRARY]

    def refusing(A, B, operands, D):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(ways, "torch_op", lambda binding, arch: TorchOp("torch.refusing", refusing))
    entry = tune.measured(bound_call(), CONFIGS, recorder=FakeRecorder(device, {"torch": 10.0}))
    assert "NOT_SUPPORTED" in entry.failures[LIBRARY]


def test_a_call_of_the_bucket_that_torch_does_not_take_runs_otherwise(device, monkeypatch):
    torch_doubles(device, monkeypatch)
    call = bound_call()
    entry = tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {"torch": 10.0}))
    assert entry.selection(call.binding, SM90).ways[0] is LIBRARY
    monkeypatch.setattr(ways, "torch_op", lambda binding, arch: "its bias is misaligned")
    assert LIBRARY not in entry.selection(call.binding, SM90).ways


def test_wrong_failing_and_refused_kernels_cannot_win_and_are_remembered(device, caplog):
    call = bound_call()
    wrong, failing, good = names(call, CONFIGS)
    device.faults[wrong] = 1.0
    device.failing.add(failing)
    entry = tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {wrong: 1.0, failing: 1.0}))
    assert "is wrong in" in entry.failures[Fused(CONFIGS[0])]
    assert "does not run" in entry.failures[Fused(CONFIGS[1])]
    assert good in names(call, [row.way.config for row in entry.rows if isinstance(row.way, Fused) and row.time_us])
    tuned.forget()
    device.ran.clear()
    again = tune.measured(call, recorder=FakeRecorder(device, {}))
    assert wrong not in device.ran
    assert again.failures.items() >= entry.failures.items()


def test_a_kernel_that_does_not_compile_is_a_failure_of_its_own(device):
    call = bound_call()
    device.refused = set(names(call, CONFIGS[:1]))
    entry = tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {}))
    assert "spills" in entry.failures[Fused(CONFIGS[0])]


def test_a_kernel_that_writes_nothing_is_wrong(device, monkeypatch):
    call = bound_call()
    monkeypatch.setattr(fake_device.FakeKernel, "run", lambda self, args, workspace, stream: None)
    entry = tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {}))
    assert set(entry.failures) == set(map(Fused, CONFIGS))


def test_without_split_the_reference_is_asked(device, monkeypatch):
    monkeypatch.setattr(ways.Split, "reject_reason", lambda self, binding, arch: "none")
    call = bound_call()
    wrong = names(call, CONFIGS)[0]
    device.faults[wrong] = 1.0
    entry = tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {}))
    assert set(entry.failures) == {Fused(CONFIGS[0])}
    assert all(isinstance(row.way, Fused) for row in entry.rows)


def test_an_illegal_config_is_refused_with_its_reason(device):
    with pytest.raises(gg.IllegalConfig, match="pingpong takes multiples"):
        tune.measured(bound_call(), [GemmConfig("sm90", (100, 64, 32), (1, 1), "pingpong")])


def test_inputs_and_given_outputs_are_not_written(device):
    A, B, operands = call_of()
    copies = [A.clone(), B.clone(), operands["bias"].clone()]
    out = torch.full((64, 128), 7.0)
    call = runner().tunable(A, B, operands, None, [out])
    tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {}))
    assert (out == 7).all()
    assert all(torch.equal(x, y) for x, y in zip((A, B, operands["bias"]), copies, strict=True))


def test_the_first_call_measures_once_for_a_bucket(device, monkeypatch):
    times = FakeRecorder(device, {})
    monkeypatch.setattr(tune, "ColdL2Recorder", lambda device, spin_cycles: times)
    run = runner("first-call")
    built_at_first: list[str] = []
    for M in (60, 50, 64):
        A, B, operands = call_of(M)
        (D,) = run(A, B, operands)
        assert torch.equal(D, 2 * (A @ B) + operands["bias"])
        built_at_first = built_at_first or list(device.built)
        assert device.built == built_at_first, "a new M of the bucket builds nothing"
    count = len(times.recorded)
    A, B, operands = call_of(70)
    run(A, B, operands)
    assert len(times.recorded) > count


def test_off_ignores_what_was_measured(device):
    call = bound_call()
    tune.measured(call, CONFIGS[:1], recorder=FakeRecorder(device, {"gemmgen_pointwise": 1.0}))
    A, B, operands = call_of()
    device.ran.clear()
    runner("off")(A, B, operands)
    assert device.ran != ["gemmgen_pointwise"]


# entries


def entry_at(M: int, *timed: tuple[GemmConfig, float]) -> Entry:
    return Entry.of(M, tuple(Measured(Fused(config), time_us) for config, time_us in timed))


def test_at_the_measured_m_the_times_are_as_measured(device):
    call = bound_call()
    selection = entry_at(64, (CONFIGS[0], 30.0), (CONFIGS[1], 20.0)).selection(call.binding, SM90)
    assert selection.table == (Timed(Fused(CONFIGS[1]), 20.0), Timed(Fused(CONFIGS[0]), 30.0))
    assert selection.measured


def test_another_m_is_scaled_by_the_model(device, monkeypatch):
    factors = {32: 1.0, 64: 2.0}

    def estimate(self, signature, extents, target):
        return 10.0 * (factors[self.config.tile_shape[1]] if extents.M == 60 else 1.0)

    monkeypatch.setattr(Fused, "estimate_us", estimate)
    call = bound_call(60)
    selection = entry_at(64, (CONFIGS[0], 22.0), (CONFIGS[1], 20.0)).selection(call.binding, SM90)
    assert [timed.time_us for timed in selection.table] == [22.0, 40.0]
    far = entry_at(64, (CONFIGS[0], 40.0), (CONFIGS[1], 20.0)).selection(call.binding, SM90)
    assert len(far.ways) == 1, "what was clearly slower is not brought back by the model"


def test_only_failures_select_nothing(device):
    entry = Entry.of(64, (Measured(SPLIT, None, "it broke"),))
    assert entry.selection(bound_call().binding, SM90) is None


def test_files_survive_a_round_trip_and_damage_is_ignored(device, tmp_path, caplog):
    key = tuned.key_of(bound_call().binding, SM90)
    config = GemmConfig("sm90", (128, 192, 64), (2, 1), "pingpong", (64, 64), swizzle=8, raster="N")
    rows = (Measured(Fused(config), 12.5), Measured(LIBRARY, 14.0), Measured(SPLIT, None, "out of luck"))
    entry = Entry.of(64, rows)
    tuned.put(key, entry)
    (path,) = (tmp_path / "tuned").glob("*.json")
    tuned.forget()
    assert tuned.find(key) == entry
    content = json.loads(path.read_text())
    assert content["key"]["gpu"] == "Fake H200"
    content["rows"][0]["time_us"] = 1.0
    path.write_text(json.dumps(content))
    tuned.forget()
    assert tuned.find(key) is None
    path.write_text("{")
    assert tuned.find(key) is None
    assert "are not used" in caplog.text


def test_every_component_of_the_key_counts(device, monkeypatch):
    call = bound_call()
    key = tuned.key_of(call.binding, SM90)
    assert tuned.key_of(bound_call(60).binding, SM90) == key, "the same bucket"
    assert tuned.key_of(bound_call(70).binding, SM90).name != key.name
    monkeypatch.setattr(tuned, "driver_version", lambda: "999.1")
    assert tuned.key_of(call.binding, SM90).name != key.name
    monkeypatch.undo()
    for name in ("cuda", "cutlass", "gemmgen"):
        monkeypatch.setattr(tuned, "_versions", lambda name=name: {**key.facts, name: "other"})
        assert tuned.key_of(call.binding, SM90).name != key.name


def test_what_another_process_measured_is_found(device):
    key = tuned.key_of(bound_call().binding, SM90)
    assert tuned.find(key) is None
    tuned._write(tuned._path(key), key, entry_at(64, (CONFIGS[0], 5.0)))
    assert tuned.find(key) is not None


def test_a_folder_that_cannot_be_written_keeps_times_in_memory(device, monkeypatch, tmp_path, caplog):
    (tmp_path / "tuned").write_text("a file")
    key = tuned.key_of(bound_call().binding, SM90)
    tuned.put(key, entry_at(64, (CONFIGS[0], 5.0)))
    assert tuned.find(key) is not None
    assert "not kept on disk" in caplog.text


@pytest.mark.parametrize("facts", [{"way": "magic"}, {"way": "fused", "config": {"tile": 1}}, {}])
def test_what_is_no_way_is_an_error(facts):
    with pytest.raises((ValueError, TypeError, KeyError)):
        way_of(facts)


# agreement


def test_rounding_agrees_and_a_wrong_tile_does_not():
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(512, 512, generator=generator)
    assert not tune.disagreement([want.bfloat16()], [(want * (1 + 1e-3)).bfloat16()])
    got = want.clone()
    got[:16, :16] = 0
    assert "result 0 is wrong" in tune.disagreement([got], [want])


def test_nan_and_infinity_agree_with_themselves_alone():
    want = torch.tensor([float("nan"), float("inf"), 1.0])
    assert not tune.disagreement([want], [want.clone()])
    for index in range(2):
        got = want.clone()
        got[index] = 1.0
        assert tune.disagreement([got], [want])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_poison_is_nan(dtype):
    assert tune._poisoned((3, 5), dtype, torch.device("cpu")).float().isnan().all()
    assert tune._poisoned((), dtype, torch.device("cpu")).float().isnan().all()


def test_the_search_survives_noise(device):
    call = bound_call()
    noise = random.Random(0)
    best = names(call, CONFIGS)[2]

    class Noisy(FakeRecorder):
        def record(self, call):
            time_us = super().record(call)()
            return lambda: time_us * noise.uniform(0.99, 1.01)

    entry = tune.measured(call, CONFIGS, recorder=Noisy(device, {best: 50.0}))
    assert entry.rows[0].way.config.tile_shape == CONFIGS[2].tile_shape
    assert entry.rows[0].time_us == pytest.approx(50.0, rel=0.02)


def test_what_may_not_be_compiled_is_neither_measured_nor_remembered(device, monkeypatch):
    call = bound_call()
    missing = names(call, CONFIGS[:1])[0]
    build = device.build

    def forbidding(sources, *, on_error="raise"):
        built = build(sources, on_error=on_error)
        return [gg.CompileForbidden(s.name) if s.name == missing else b for s, b in zip(sources, built, strict=True)]

    monkeypatch.setattr(tune.jit, "build", forbidding)
    entry = tune.measured(call, CONFIGS, recorder=FakeRecorder(device, {}))
    assert not entry.failures
    assert Fused(CONFIGS[0]) not in {row.way for row in entry.rows}


def test_without_memory_for_a_measurement_the_model_chooses(device, monkeypatch):
    def exhausted(call):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(tune, "found_or_measured", exhausted)
    A, B, operands = call_of()
    (D,) = runner("first-call")(A, B, operands)
    assert torch.equal(D, 2 * (A @ B) + operands["bias"])
