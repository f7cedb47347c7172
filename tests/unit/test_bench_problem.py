"""One problem's way through checking, with rungs of the test's own on the CPU."""

from dataclasses import replace

import pytest
import torch

from bench.cases import CASES
from bench.device import Device
from bench.problem import Entry, Problem, check_rungs, graph_calls, row_of, run_problem
from bench.rungs import RUNGS, Prepared, Rung, Unavailable
from bench.settings import Settings
from bench.shapes import Shape
from bench.suite_epilogue import autotune_seconds, refusals
from gemmgen.timing import Timing, WallRecorder

CASE = CASES["bias_silu"]
PROBLEM = Problem(CASE, Shape(32, 48, 64))


def nothing():
    pass


CPU = Device(
    torch_name="cpu",
    l2_bytes=100_000,
    gpu_recorder=lambda: WallRecorder(nothing),
    wall_recorder=WallRecorder(nothing),
    capture=lambda call: call,
    synchronize=nothing,
    release_memory=nothing,
)


def rung_of(function, is_whole=True):
    return Rung("gemmgen", "gemmgen", lambda case, shape: Prepared(function, lambda inputs: "how"), is_whole)


def checked(rung, refused=()):
    (entry,) = check_rungs(PROBLEM, [rung], dict(refused), CPU)
    return entry


def test_a_right_answer_passes_with_its_error():
    entry = checked(rung_of(CASE.eager))

    assert entry.reason is None and 0 < entry.error < 1e-2 and entry.first_call_s > 0 and entry.note == "how"


def test_a_wrong_answer_gets_no_time():
    entry = checked(rung_of(lambda A, B, bias: CASE.eager(A, B, bias=bias + 0.1)))

    assert entry.reason.startswith("wrong answer")


def test_one_wrong_column_is_seen():
    def wrong_column(A, B, bias):
        shifted = bias.clone()
        shifted[5] += 1.0
        return CASE.eager(A, B, bias=shifted)

    assert checked(rung_of(wrong_column)).reason.startswith("wrong answer")


def test_a_rung_that_raises_is_reported_with_its_message():
    def broken(A, B, bias):
        raise RuntimeError("no kernel image\nmore lines")

    assert checked(rung_of(broken)).reason == "RuntimeError: no kernel image"


def test_a_rung_that_is_unavailable_gives_its_reason():
    def prepare(case, shape):
        raise Unavailable("not today")

    assert checked(Rung("triton", "Triton", prepare)).reason == "not today"


def test_a_refused_rung_is_not_called():
    def never(A, B, bias):
        raise AssertionError

    assert checked(rung_of(never), {"gemmgen": "left out"}).reason == "left out"


def test_the_bare_product_is_not_compared_with_the_case():
    entry = checked(rung_of(lambda A, B, bias: torch.mm(A, B), is_whole=False))

    assert entry.reason is None and entry.error is None


@pytest.mark.parametrize(
    "set_bytes, expected",
    [
        pytest.param(8_000_000, 15, id="as-many-as-overflow-L2-twice"),
        pytest.param(500_000_000, 4, id="at-least-four"),
        pytest.param(1000, 32, id="at-most-32"),
    ],
)
def test_graph_calls(set_bytes, expected):
    assert graph_calls(set_bytes, l2_bytes=60_000_000) == expected


def test_a_row_of_a_timed_rung():
    entry = Entry(RUNGS["gemmgen"], CASE.eager, 0.5, 1e-3, gpu=Timing.of([10.0, 12.0, 11.0]))

    row = row_of(Problem(CASE, Shape(4096, 4096, 4096)), entry)

    assert (row["case"], row["M"], row["rung"], row["method"]) == ("bias_silu", 4096, "gemmgen", "events")
    assert (row["median_us"], row["n"], row["reason"]) == (11.0, 3, None)
    assert row["tflops"] == pytest.approx(2 * 4096**3 / 11e-6 / 1e12, rel=1e-3)


def test_a_row_of_an_absent_rung_has_a_reason_and_no_time():
    row = row_of(PROBLEM, Entry(RUNGS["triton"], reason="Triton is not installed"))

    assert row["median_us"] is None and row["n"] == 0 and row["reason"] == "Triton is not installed"


def settings(tmp_path, **changes):
    return Settings((CASE,), (), tuple(RUNGS.values()), tmp_path, **changes)


def test_max_autotune_is_for_headline_shapes_and_within_its_budget(tmp_path):
    headline, llama = Problem(CASE, Shape(4096, 4096, 4096)), Problem(CASE, Shape(1, 4096, 4096))

    assert refusals(headline, settings(tmp_path), spent_s=10) == {}
    assert "max_autotune" in refusals(llama, settings(tmp_path), spent_s=0)
    assert "90 s" in refusals(headline, settings(tmp_path), spent_s=91)["max_autotune"]
    assert refusals(headline, settings(tmp_path, autotune_groups=()), spent_s=0)


def test_autotune_seconds_count_that_rung_alone():
    rows = [
        {"rung": "max_autotune", "first_call_s": 12.0},
        {"rung": "max_autotune", "first_call_s": None},
        {"rung": "compiled_tail", "first_call_s": 5.0},
    ]

    assert autotune_seconds(rows) == 12.0


def run_on(device, shape, tmp_path, names=("eager", "cublaslt", "bare")):
    problem = Problem(CASES["bias_gelu_tanh"], shape)
    chosen = Settings((problem.case,), (shape,), tuple(RUNGS[name] for name in names), tmp_path, rounds=8, min_rounds=7)
    return {row["rung"]: row for row in run_problem(problem, chosen, {"cublaslt": "left out"}, device)}


def test_a_small_problem_has_gpu_and_eager_times(tmp_path):
    rows = run_on(CPU, Shape(16, 64, 64), tmp_path)

    assert rows["eager"]["method"] == "graph" and rows["eager"]["n"] == rows["bare"]["n"] == 8
    assert rows["eager"]["median_us"] > 0 and rows["eager"]["eager_us"] > 0
    assert rows["cublaslt"]["median_us"] is None and rows["cublaslt"]["reason"] == "left out"


def test_a_large_problem_has_gpu_times_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Shape, "is_small", False)
    rows = run_on(CPU, Shape(16, 64, 64), tmp_path)

    assert rows["eager"]["method"] == "events" and rows["eager"]["n"] == 8 and rows["eager"]["eager_us"] is None


@pytest.mark.parametrize("is_small", [True, False])
def test_each_problem_has_a_recorder_of_its_own(tmp_path, monkeypatch, is_small):
    monkeypatch.setattr(Shape, "is_small", is_small)
    made = []
    device = replace(CPU, gpu_recorder=lambda: made.append(WallRecorder(nothing)) or made[-1])
    for count in (1, 2):
        run_on(device, Shape(16, 64, 64), tmp_path)
        assert len(made) == count


def test_a_rung_that_cannot_be_captured_keeps_its_eager_time(tmp_path):
    def capture(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    row = run_on(replace(CPU, capture=capture), Shape(16, 64, 64), tmp_path)["eager"]

    assert "cannot be captured" in row["reason"] and row["median_us"] is None and row["eager_us"] > 0
