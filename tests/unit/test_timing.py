"""The measuring primitives, with a fake device and a fake clock."""

from collections import Counter

import pytest

from gemmgen.timing import Timing, WallRecorder, measure, quantile, shuffled_rounds


class FakeRecorder:
    """Every call takes the time that `times_us` says, and is readable only after a `synchronize`."""

    def __init__(self, times_us):
        self.times_us = times_us
        self.order = []
        self.synchronized = True

    def record(self, call):
        self.synchronized = False
        name = call()
        self.order.append(name)
        time_us = self.times_us[name]

        def read():
            assert self.synchronized, "read before the device was done"
            return time_us

        return read

    def synchronize(self):
        self.synchronized = True


def named(*names):
    return {name: (lambda name=name: name) for name in names}


def test_timing_summarises_unordered_samples():
    timing = Timing.of([30.0, 10.0, 20.0, 50.0, 40.0])

    assert (timing.median_us, timing.p10_us, timing.p90_us) == (30.0, 14.0, 46.0)
    assert timing.samples == (30.0, 10.0, 20.0, 50.0, 40.0)


@pytest.mark.parametrize("q, expected", [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0)])
def test_quantile_is_linear_between_neighbours(q, expected):
    assert quantile([1.0, 2.0, 3.0, 4.0], q) == expected


def test_quantile_of_one_sample_is_that_sample():
    assert quantile([7.0], 0.9) == 7.0


def test_every_round_holds_every_name_in_its_own_order():
    rounds = list(shuffled_rounds(["a", "b", "c", "d"], 20, seed=1))

    assert all(sorted(order) == ["a", "b", "c", "d"] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 5
    assert rounds == list(shuffled_rounds(["a", "b", "c", "d"], 20, seed=1))


def test_each_name_leads_some_round():
    firsts = Counter(order[0] for order in shuffled_rounds(["a", "b", "c"], 60))

    assert set(firsts) == {"a", "b", "c"}


def test_measure_interleaves_the_callables():
    recorder = FakeRecorder({"a": 1.0, "b": 2.0})

    timings = measure(named("a", "b"), 6, warmup=0, recorder=recorder)

    pairs = list(zip(recorder.order[::2], recorder.order[1::2], strict=True))
    assert all(set(pair) == {"a", "b"} for pair in pairs)
    assert timings["a"].median_us == 1.0 and timings["b"].median_us == 2.0
    assert len(timings["a"].samples) == len(timings["b"].samples) == 6


def test_measure_divides_by_the_calls_of_one_callable():
    timings = measure(named("a"), 3, calls=8, recorder=FakeRecorder({"a": 80.0}))

    assert timings["a"].median_us == 10.0


def test_warmup_calls_are_not_samples():
    count = Counter()
    callables = {"a": lambda: count.update(["a"]) or "a"}

    timings = measure(callables, 4, warmup=3, recorder=FakeRecorder({"a": 1.0}))

    assert count["a"] == 7 and len(timings["a"].samples) == 4


def test_long_calls_are_timed_once_the_card_has_settled():
    seconds, recorder = iter(range(1000)), FakeRecorder({"a": 1.0, "b": 2000.0})

    timings = measure(named("a", "b"), 3, warmup=1, settle_s=4.0, recorder=recorder, clock=lambda: next(seconds))

    assert len(timings["b"].samples) == 3
    assert len(recorder.order) == 2 * (4 + 3)


def test_a_spent_budget_stops_after_the_minimum_of_rounds():
    seconds = iter(range(1000))

    timings = measure(
        named("a"), 25, min_rounds=7, budget_s=0.0, recorder=FakeRecorder({"a": 1.0}), clock=lambda: next(seconds)
    )

    assert len(timings["a"].samples) == 7


def test_a_budget_that_lasts_allows_all_rounds():
    timings = measure(named("a"), 25, budget_s=1.0, recorder=FakeRecorder({"a": 1.0}), clock=lambda: 0.0)

    assert len(timings["a"].samples) == 25


def test_wall_recorder_times_from_quiet_to_quiet():
    events = []
    seconds = iter([1.0, 1.5])
    recorder = WallRecorder(lambda: events.append("synchronize"), lambda: events.append("clock") or next(seconds))

    read = recorder.record(lambda: events.append("call"))

    assert read() == 500_000.0
    assert events == ["synchronize", "clock", "call", "synchronize", "clock"]
