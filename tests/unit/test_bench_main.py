"""The command line and the suites' parts that need no GPU."""

import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import __main__ as cli
from bench import builds, suite_jit
from bench.cases import CASES
from bench.llama import LLAMA_CASES
from bench.problem import Problem
from bench.rungs import RUNGS
from bench.shapes import Shape


@pytest.fixture
def asked(monkeypatch):
    """Runs the command line; gives the settings that the suite would get."""

    def run(*arguments):
        seen = []
        suite = lambda settings, console: seen.append(settings) or 0  # noqa: E731
        monkeypatch.setattr(cli, "SUITES", dict.fromkeys(cli.SUITES, suite))
        result = CliRunner().invoke(cli.main, arguments)
        return result, seen[0] if seen else None

    return run


def test_by_default_every_case_and_rung_at_the_headline_shapes(asked):
    result, settings = asked()

    assert result.exit_code == 0
    assert settings.cases == tuple(CASES.values())
    assert settings.rungs == tuple(rung for rung in RUNGS.values() if not rung.is_peer)
    assert len(settings.shapes) == 4 and settings.rounds == 25 and settings.min_rounds == 7
    assert settings.autotune_groups == ("headline",)


def test_peers_run_where_they_are_asked_for(asked):
    _, settings = asked("--peers")
    assert settings.rungs[-2:] == (RUNGS["quack"], RUNGS["cutlass_inductor"])


def test_selection(asked):
    _, settings = asked("--cases", "bias_silu", "--shapes", "llama", "--ms", "1,16", "--rungs", "gemmgen,eager")

    assert [case.name for case in settings.cases] == ["bias_silu"]
    assert len(settings.shapes) == 10 and [rung.name for rung in settings.rungs] == ["gemmgen", "eager"]


def test_llama_takes_its_own_cases_or_those_asked_for(asked):
    assert asked("--suite", "llama")[1].cases == LLAMA_CASES
    assert asked("--suite", "llama", "--cases", "bias_silu_residual")[1].cases == (LLAMA_CASES[1],)
    assert asked("--suite", "llama", "--quick")[1].cases == LLAMA_CASES


def test_parts(asked):
    assert asked()[1].part == (1, 1)
    assert asked("--part", "2/3")[1].part == (2, 3)


def test_no_max_autotune_keeps_the_rung_so_that_it_is_reported(asked):
    _, settings = asked("--no-max-autotune")

    assert settings.autotune_groups == () and RUNGS["max_autotune"] in settings.rungs


def test_quick_is_small(asked):
    _, settings = asked("--quick")

    assert len(settings.cases) == 2 and len(settings.shapes) == 1 and settings.rounds == 7


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--cases", "nonsense"), "nonsense"),
        (("--shapes", "nonsense"), "nonsense"),
        (("--shapes", "headline", "--ms", "3"), "no shape"),
        (("--part", "3/2"), "not a part"),
        (("--part", "2"), "not a part"),
    ],
)
def test_names_that_do_not_exist_are_refused(asked, arguments, words):
    result, settings = asked(*arguments)

    assert result.exit_code == 2 and words in result.output and settings is None


def test_build_all_records_failures_and_goes_on(monkeypatch):
    def build(case, shape, arch):
        if case.name == "bias_silu":
            raise RuntimeError("no nvcc")
        return 30.0

    monkeypatch.setattr(builds, "_api_build", build)
    problems = [Problem(CASES[name], Shape(64, 64, 64)) for name in ("bias_silu", "bias_gelu_tanh")]

    broken, built = builds.build_all(problems, "sm90", Console(quiet=True), workers=2).values()

    assert "no nvcc" in broken.failure and broken.compilers_s is None
    assert built.failure is None and built.compilers_s == 30.0 and built.again_s >= 0


def test_jit_suite_gathers_samples_of_all_processes(monkeypatch, tmp_path):
    answers = {"cold": {"cold_skeleton": [30.0], "new_epilogue": [3.0, 2.0]}, "import": {"import": [0.1]},
               "find": {"find_in_cache": [0.2]}, "first_call": {}, "background_first_call": {}, "tune": {}}  # fmt: skip
    monkeypatch.setattr(suite_jit, "_in_new_process", lambda what, arch, cache: answers[what])

    samples = suite_jit.collect("sm90", tmp_path)

    assert samples["cold_skeleton"] == [30.0] * 3 and samples["new_epilogue"] == [3.0, 2.0] * 3
    assert len(samples["import"]) == len(samples["find_in_cache"]) == suite_jit.REPEATS


def test_a_jit_row_summarises_its_samples():
    row = suite_jit._row("new_epilogue", [3.0, 2.0, 4.0])

    assert json.loads(json.dumps(row)) == {
        "metric": "new_epilogue",
        "median_s": 3.0,
        "min_s": 2.0,
        "max_s": 4.0,
        "n": 3,
    }
    assert set(suite_jit.MEANINGS) >= {"cold_skeleton", "new_epilogue", "import"}
