"""The suite `llama` without a GPU: its problems and parts, a run with a stand-in for the GPU, and its report."""

from __future__ import annotations

import io
import itertools
import types

import pytest
import torch
from rich.console import Console

import gemmgen as gg
from bench import gemmgen_api, llama, llama_report
from bench.cases import CASES, draw_inputs
from bench.problem import Problem
from bench.results import read
from bench.rungs import RUNGS
from bench.settings import Settings
from bench.shapes import Shape
from gemmgen import tuned
from gemmgen.arch import ARCHS
from gemmgen.device import Target
from gemmgen.jit.identity import kernel_key
from gemmgen.ways import SPLIT, Fused, select

TARGET = Target(ARCHS["sm90"], 132, "Fake H200")
GELU, SILU, INT8, FP8 = (case.name for case in llama.LLAMA_CASES)


def settings(tmp_path, **changes):
    return Settings(llama.LLAMA_CASES, (), (RUNGS["gemmgen"], RUNGS["eager"]), tmp_path, **changes)


# The problems


def test_every_layer_case_and_m(tmp_path):
    everything = llama.problems(settings(tmp_path))
    assert len(everything) == len(set(everything)) == 11 * 8 * 4
    assert {p.shape.M for p in everything} == {1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
    few = llama.problems(settings(tmp_path, ms=(16,)))
    assert few and {p.shape.M for p in few} == {16}
    assert all(isinstance(p, Problem) for p in few)


def test_only_the_cases_asked_for(tmp_path):
    few = llama.problems(Settings(llama.LLAMA_CASES[:1], (), (), tmp_path))
    assert len(few) == 11 * 8 and {p.case for p in few} == {CASES["bias_gelu_tanh"]}


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_share_the_problems_out(tmp_path, parts):
    found = [llama.problems(settings(tmp_path, part=(i, parts))) for i in range(1, parts + 1)]
    assert sorted(map(str, itertools.chain(*found))) == sorted(map(str, llama.problems(settings(tmp_path))))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_two_parts_have_no_case_in_common(tmp_path):
    one, two = ({p.case for p in llama.problems(settings(tmp_path, part=(i, 2)))} for i in (1, 2))
    assert one and two and not one & two


@pytest.mark.parametrize("case", llama.LLAMA_CASES, ids=str)
def test_every_case_has_its_epilogue(case):
    assert gemmgen_api.gemm(case)


# A run


@pytest.fixture
def gpu(monkeypatch):
    """What was built, tuned and run, in order, on a GPU that is not there; `gpu.clock` is what the time is."""
    gpu = types.SimpleNamespace(done=[], clock=0.0)

    def run_problem(problem, settings, refused, device):
        gpu.done.append(("run", str(problem)))
        gpu.clock += 10.0
        fixed = {"case": problem.case.name, "M": problem.shape.M, "N": problem.shape.N, "K": problem.shape.K,
                 "p10_us": 1.0, "p90_us": 1.0, "n": 1, "tflops": 1.0, "eager_us": None, "error": None,
                 "first_call_s": None, "note": "", "reason": None, "method": "events"}  # fmt: skip
        return [{**fixed, "rung": rung.name, "median_us": 1.0} for rung in settings.rungs]

    def tuned(problem, settings, console):
        gpu.done.append(("tune", str(problem)))
        return {"tune_s": 2.0, "best_us": 1.0, "model_us": 1.5, "heuristic_loss": 0.5}

    def built(group, settings, console):
        gpu.done.append(("build", len(group)))
        return 3.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(llama, "current_gpu", lambda: None)
    monkeypatch.setattr(llama.time, "perf_counter", lambda: gpu.clock)
    for name, function in (("run_problem", run_problem), ("_tuned", tuned), ("_built", built)):
        monkeypatch.setattr(llama, name, function)
    return gpu


def run(tmp_path, **changes):
    names = ("device", "driver", "torch", "cuda", "triton", "cutlass", "gemmgen", "commit")
    console = Console(file=io.StringIO(), width=200)
    code = llama.run(settings(tmp_path, environment=dict.fromkeys(names, "x"), **changes), console)
    (path,) = tmp_path.glob("*.jsonl")
    return code, path, read(path), console.file.getvalue()


def test_kernels_of_one_m_are_built_together_and_a_problem_is_tuned_just_before_it_runs(gpu, tmp_path, capsys):
    code, _, rows, _ = run(tmp_path, ms=(16, 64), tuned=12)

    assert code == 0 and [what for what, _ in gpu.done] == (["build"] + ["tune", "run"] * 32) * 2
    assert gpu.done[1][1] == gpu.done[2][1]
    ours, eager = rows[:2]
    assert (ours["tune_s"], ours["build_share_s"], ours["heuristic_loss"], ours["tuned"]) == (2.0, 3.0, 0.5, 12)
    assert "tune_s" not in eager
    assert "Targets" in capsys.readouterr().out


def test_without_tuning_nothing_is_tuned(gpu, tmp_path):
    _, path, rows, _ = run(tmp_path, ms=(16,), part=(2, 2))

    assert [what for what, _ in gpu.done] == ["build"] + ["run"] * 16
    assert "tune_s" not in rows[0] and rows[0]["tuned"] == 0
    assert path.name.endswith("-2of2.jsonl")


def test_the_budget_ends_within_a_group_and_the_rest_is_named(gpu, tmp_path):
    _, _, rows, printed = run(tmp_path, ms=(16, 64), budget_s=15.0)

    assert [what for what, _ in gpu.done] == ["build", "run", "run"]
    assert len(rows) == 4 and "budget of 15 s is over" in printed
    assert "int8_dequant_bias 16x6144x4096" in printed and "64x8192x28672" in printed
    assert "bias_silu_residual 16x6144x4096 " not in printed.partition("is over")[2]


# Tuning


def test_what_is_built_before_tuning_is_what_the_tuner_tries(monkeypatch):
    from gemmgen import tune

    case, shape = CASES["bias_gelu_tanh"], Shape(512, 4096, 4096)
    sources = gemmgen_api.sources_to_tune(case, shape, 5, TARGET)
    inputs = draw_inputs(case, shape, device="meta")
    monkeypatch.setattr("gemmgen.runtime.target_of", lambda device: TARGET)
    call = gemmgen_api.gemm(case)._op.runner.tunable(inputs.A, inputs.B, inputs.operands)
    fused = [way for way in tune.candidates_of(call, most=5) if isinstance(way, Fused)]

    assert len(sources) == 5
    assert list(map(kernel_key, sources)) == [kernel_key(way.source(call.binding, TARGET.arch)) for way in fused]


def tuned_times(monkeypatch, times):
    """Of an entry in which the model's choice ("model"), split and some other config took so long."""
    case = CASES["bias_gelu_tanh"]
    op, inputs = gemmgen_api.gemm(case), draw_inputs(case, Shape(4096, 4096, 4096), device="meta")
    monkeypatch.setattr("gemmgen.runtime.target_of", lambda device: TARGET)
    call = op._op.runner.tunable(inputs.A, inputs.B, inputs.operands)
    other = Fused(gg.GemmConfig("sm90", (64, 64, 64), (1, 1), "pingpong"))
    ways = {"model": select(call.binding, TARGET).ways[0], "split": SPLIT, "other": other}
    rows = tuple(tuned.Measured(ways[name], time_us, "" if time_us else "spills") for name, time_us in times.items())
    return gemmgen_api.tuned_times(op, inputs, tuned.Entry.of(4096, rows))


@pytest.mark.parametrize(
    "times, best_us, model_us, loss",
    [
        pytest.param({"model": 11.0, "split": 12.0, "other": 10.0}, 10.0, 11.0, 0.1, id="a-loss"),
        pytest.param({"model": 9.0, "split": 12.0}, 9.0, 9.0, 0.0, id="the-choice-is-the-best"),
        pytest.param({"model": None, "split": 12.0}, 12.0, None, None, id="the-choice-failed"),
        pytest.param({"model": None}, None, None, None, id="everything-failed"),
    ],
)
def test_times_of_the_models_choice_and_of_the_best(monkeypatch, times, best_us, model_us, loss):
    found = tuned_times(monkeypatch, times)
    assert found == {"best_us": best_us, "model_us": model_us, "heuristic_loss": loss}


def test_the_kernels_of_a_group_are_built_in_one_batch(monkeypatch, tmp_path):
    batches = []
    monkeypatch.setattr("gemmgen.device.target_of", lambda device: TARGET)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("gemmgen.jit.build", lambda sources, on_error: batches.append(sources))
    group = llama.problems(settings(tmp_path, ms=(4096,)))[:4]
    chosen = settings(tmp_path, tuned=3)

    assert llama._built(group, chosen, Console(quiet=True)) >= 0
    (batch,) = batches
    names = {source.name.partition("_sm90")[0] for source in batch}
    assert len(batch) == 12 and names == {case.name for case in llama.LLAMA_CASES}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(llama, "draw_inputs", lambda case, shape: draw_inputs(case, shape, device="meta"))
    return Problem(CASES["bias_gelu_tanh"], Shape(64, 64, 64))


def test_a_tuned_problem_says_what_it_took(monkeypatch, tmp_path, on_cpu):
    monkeypatch.setattr("gemmgen.runtime.target_of", lambda device: TARGET)
    entry = tuned.Entry.of(64, (tuned.Measured(SPLIT, 5.0),))
    monkeypatch.setattr(gemmgen_api, "tune", lambda op, inputs, most: entry)
    found = llama._tuned(on_cpu, settings(tmp_path, tuned=3), Console(quiet=True))

    assert found["tune_s"] >= 0 and found["best_us"] == 5.0 and found["heuristic_loss"] is None


def test_a_tuning_that_fails_does_not_end_the_run(monkeypatch, tmp_path, on_cpu):
    def tune(op, inputs, most):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(gemmgen_api, "tune", tune)
    found = llama._tuned(on_cpu, settings(tmp_path, tuned=3), Console(quiet=True))

    assert found == {"tune_s": None, "heuristic_loss": None, "tune_failure": "OutOfMemoryError: too large"}


def test_without_gemmgen_nothing_is_built_or_tuned(tmp_path, on_cpu):
    others = Settings(llama.LLAMA_CASES, (), (RUNGS["eager"],), tmp_path, tuned=3)
    assert llama._tuned(on_cpu, others, Console(quiet=True)) == {}
    assert llama._built([on_cpu], others, Console(quiet=True)) == 0.0


# The report


def row(case, M, rung, median_us, NK=(4096, 4096), reason=None, **more):
    return {"suite": "llama", "case": case, "M": M, "N": NK[0], "K": NK[1], "rung": rung, "median_us": median_us,
            "reason": reason, **more}  # fmt: skip


def test_a_line_for_each_case_and_m():
    rows = [row(GELU, 4096, "gemmgen", 110.0), row(GELU, 4096, "bare", 100.0), row(GELU, 4096, "cublaslt", 100.0)]
    rows += [row(GELU, 4096, "eager", 120.0), row(GELU, 4096, "quack", 220.0)]
    other = (6144, 4096)
    rows += [row(GELU, 4096, "gemmgen", 100.0, other), row(GELU, 4096, "bare", 110.0, other)]
    rows += [row(GELU, 4096, "eager", 125.0, other), row(GELU, 4096, "quack", 200.0, other)]
    rows += [row(GELU, 16, "gemmgen", 5.0), row(GELU, 16, "triton", 10.0), row(GELU, 16, "gemmgen", None, other)]
    rows += [row(INT8, 1, "gemmgen", 5.0)]

    assert llama_report.ratio_table(rows).splitlines()[2:] == [
        "| case | M | layers | bare product | fastest other | slower in | worst | QuACK |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| {GELU} | 16 | 1 of 2 | - | 0.50 | 0 | 0.50 at 4096 x 4096, Triton | - |",
        f"| {GELU} | 4096 | 2 | 1.00 | 0.94 | 1 | 1.10 at 4096 x 4096, cuBLASLt epilogue | 0.50 |",
        f"| {INT8} | 1 | 1 | - | - | 0 | - | - |",
    ]
    assert "tuned before, over 12 kernels" in llama_report.ratio_table([{**r, "tuned": 12} for r in rows])
    assert "tuned" not in llama_report.ratio_table(rows)
    assert "QuACK" not in llama_report.ratio_table([r for r in rows if r["rung"] != "quack"])


def lines_of(rows, most=None):
    return [line.removeprefix("- ") for line in llama_report.targets(rows, most).splitlines()[2:]]


def test_targets_at_large_m():
    rows = [row(GELU, M, "gemmgen", us) for M, us in ((1024, 104.0), (2048, 96.0), (512, 200.0))]
    rows += [row(GELU, M, "bare", 100.0) for M in (512, 1024, 2048)] + [row(GELU, 1024, "quack", 103.0)]
    rows += [row(FP8, 4096, "gemmgen", 103.1), row(FP8, 4096, "bare", 100.0)]
    bare, quack, fp8, int8, *_ = lines_of(rows)

    assert bare == (
        "met: bias_gelu_tanh at M >= 1024 against bare product: geometric mean 0.999 (goal 1.00), "
        "worst 1.040 (goal 1.05) at 1024 x 4096 x 4096; 2 problems"
    )
    assert quack == (
        "**not met**: bias_gelu_tanh at M >= 1024 against QuACK: geometric mean 1.010 (goal 1.00), "
        "worst 1.010 at 1024 x 4096 x 4096; 1 problems, 1 without a figure"
    )
    assert fp8.startswith(f"**not met**: {FP8} at M >= 1024 against bare product: geometric mean 1.031 (goal 1.03)")
    assert int8 == f"no figure: {INT8} at M >= 1024 against bare product"


def test_one_problem_beyond_the_worst_misses_a_target_that_the_mean_meets():
    rows = [row(GELU, 1024, "gemmgen", 106.0), row(GELU, 2048, "gemmgen", 50.0)]
    rows += [row(GELU, M, "bare", 100.0) for M in (1024, 2048)]

    first = lines_of(rows)[0]
    assert first.startswith("**not met**: bias_gelu_tanh at M >= 1024")
    assert "mean 0.728 (goal 1.00), worst 1.060" in first


def unfused(M, ours, eager, NK=(4096, 4096), **others):
    rows = [row(GELU, M, "gemmgen", ours, NK), row(GELU, M, "eager", eager, NK)]
    return rows + [row(GELU, M, rung, us, NK) for rung, us in others.items()]


def test_the_unfused_rungs_do_not_include_generated_kernels():
    rows = unfused(16, 102.0, 100.0, triton=50.0, max_autotune=50.0, quack=50.0, bare=40.0)
    small, large, any_m = lines_of(rows)[4:]

    assert small.startswith("met: M <= 128 against the fastest of cuBLAS + eager, cuBLAS + compiled tail, cuBLASLt epi")
    assert "worst 1.020 (goal 1.02), bias_gelu_tanh at 16 x 4096 x 4096; more than 1.02 in 0; 1 problems" in small
    assert large.startswith("no figure: M > 128") and any_m.startswith("met: any M")


def test_shapes_that_are_slower_than_unfused_are_named_the_worst_first():
    rows = unfused(1, 110.0, 130.0, cublaslt=100.0) + unfused(128, 90.0, 60.0) + unfused(256, 11.0, 10.0)
    rows += [*unfused(64, 10.0, 10.0), row(INT8, 1, "gemmgen", 5.0)]
    small, large, any_m = lines_of(rows)[4:]

    assert "worst 1.500 (goal 1.02), bias_gelu_tanh at 128 x 4096 x 4096; more than 1.02 in 2; " in small
    assert small.endswith(
        "3 problems, 1 without a figure. They are bias_gelu_tanh 128 x 4096 x 4096 (1.50), "
        "bias_gelu_tanh 1 x 4096 x 4096 (1.10)"
    )
    assert large.endswith("more than 1.02 in 1; 1 problems. They are bias_gelu_tanh 256 x 4096 x 4096 (1.10)")
    assert any_m.startswith("**not met**: any M") and any_m.endswith("in 3; 4 problems, 1 without a figure")
    assert lines_of(rows, 1)[4].endswith("They are bias_gelu_tanh 128 x 4096 x 4096 (1.50), and 1 more")


def tuned_row(case, M, loss, tune_s=1.0, best_us=100.0, **more):
    model_us = None if loss is None else best_us * (1 + loss)
    measured = {"heuristic_loss": loss, "tune_s": tune_s, "best_us": best_us, "model_us": model_us}
    return row(case, M, "gemmgen", best_us, **measured, **more)


def test_heuristic_loss_by_case():
    rows = [tuned_row(GELU, 16, 0.0), tuned_row(GELU, 64, 0.21), tuned_row(GELU, 1, None), tuned_row(SILU, 1, None)]
    text, table = llama_report.heuristic_loss(rows).split("\n\n")

    assert table.splitlines()[2:] == [
        f"| {GELU} | 3 | 1 | 10.0% | 21.0% | 64 x 4096 x 4096 |",
        f"| {SILU} | 1 | 1 | - | - | - |",
        "| all | 4 | 2 | 10.0% | 21.0% | 64 x 4096 x 4096 |",
    ]
    assert "5% in geometric mean and 15% at worst, is **not met**; 1 of 2 problems lose more than 15%" in text


@pytest.mark.parametrize(
    "losses, is_met",
    [([0.0, 0.09], True), ([0.06, 0.06], False), ([0.0, 0.0, 0.0, 0.0, 0.16], False), ([None], False)],
)
def test_the_goal_of_the_heuristic(losses, is_met):
    rows = [tuned_row(GELU, index, loss) for index, loss in enumerate(losses)]
    assert ("is met;" in llama_report.heuristic_loss(rows)) is is_met


def test_tuning_cost_and_when_it_is_paid_back():
    rows = [tuned_row(GELU, 1, 0.1, 1.0, build_share_s=2.0), tuned_row(GELU, 2, 0.5, 2.0, build_share_s=2.0)]
    rows += [tuned_row(GELU, 3, 0.0, 9.0), tuned_row(GELU, 4, None, 1.0), tuned_row(GELU, 5, None, None)]
    cost, paid = llama_report.tuning_cost(rows).splitlines()

    assert "1.50 s (median; up to 9.0 s), 13 s for 4 problems; before that 4 s to build" in cost
    assert "after 70,000 calls (median of 2 problems); never in 1 problems" in paid  # 1 s / 10 us and 2 s / 50 us


def test_what_was_not_tuned_says_nothing_of_tuning():
    rows = [row(GELU, 16, "gemmgen", 5.0), row(GELU, 16, "eager", 6.0)]
    for text in (llama_report.short(rows), llama_report.full(rows)):
        assert "tuning" not in text and "heuristic" not in text and "Targets" in text


def test_the_readme_hides_no_loss_and_no_missing_figure():
    rows = [*unfused(16, 11.0, 10.0), row(GELU, 16, "cublaslt", None, reason="not here")]
    text = llama_report.short(rows)

    assert f"| {GELU} | 16 | 1 | - | 1.10 | 1 | 1.10 at 4096 x 4096, cuBLAS + eager |" in text
    assert "fastest in 0 of 1" in text and "- no figure, not here: cuBLASLt epilogue in 1 problem(s)" in text
    assert "- loss: bias_gelu_tanh at 16 x 4096 x 4096, 0.91x cuBLAS + eager (loss)" in llama_report.full(rows)
