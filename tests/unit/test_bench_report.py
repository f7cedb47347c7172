"""The README's table from a result file, losses included."""

import json

import pytest

from bench import plot, report, suite_jit
from bench.results import ResultFile, read

FIXED = {
    "suite": "epilogue",
    "device": "NVIDIA H200",
    "driver": "580",
    "torch": "2.11",
    "cuda": "13.0",
    "triton": "3.6",
    "cutlass": "4.2",
    "gemmgen": "0.1",
    "commit": "abc",
}


def row(case, rung, median_us, reason=None):
    return {
        **FIXED,
        "case": case,
        "M": 4096,
        "N": 2048,
        "K": 64,
        "rung": rung,
        "median_us": median_us,
        "reason": reason,
    }


ROWS = [
    row("bias_silu", "gemmgen", 100.0),
    row("bias_silu", "eager", 150.0),
    row("bias_silu", "compiled_tail", 125.0),
    row("bias_silu", "cublaslt", None, "cuBLASLt has no SiLU epilogue"),
    row("bias_silu", "bare", 90.0),
    row("bias_gelu_tanh", "gemmgen", 2000.0),
    row("bias_gelu_tanh", "eager", 2400.0),
    row("bias_gelu_tanh", "cublaslt", 1900.0),
]


@pytest.fixture
def result_file(tmp_path):
    path = tmp_path / "epilogue.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_markdown_table(result_file):
    assert report.markdown_table(read(result_file)).splitlines() == [
        "| case | M x N x K | gemmgen | cuBLAS + eager | cuBLAS + compiled tail | cuBLASLt epilogue | bare product "
        "| gemmgen against the fastest other |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| bias_silu | 4096 x 2048 x 64 | **100.0** | 150.0 | 125.0 | - | 90.0 | 1.25x cuBLAS + compiled tail |",
        "| bias_gelu_tanh | 4096 x 2048 x 64 | 2000 | 2400 | - | **1900** | - | 0.95x cuBLASLt epilogue (loss) |",
    ]


def test_summary_names_losses_and_reasons():
    summary = report.summary(ROWS)

    assert "- gemmgen is the fastest in 1 of 2 problems" in summary
    assert "- loss: bias_gelu_tanh at 4096 x 2048 x 64, 0.95x cuBLASLt epilogue (loss)" in summary
    assert "- no figure for cuBLASLt epilogue in 1 problem(s): cuBLASLt has no SiLU epilogue" in summary


def test_summary_has_the_geometric_mean_of_each_rung():
    assert "cuBLAS + eager: 1.34x as fast (geometric mean of 2 problems, 1.20x to 1.50x)" in report.summary(ROWS)


def test_summary_keeps_compile_times_apart():
    rows = [{**row("bias_silu", "triton", 10.0), "first_call_s": seconds} for seconds in (1.0, 3.0, 8.0)]

    assert "- 3.00 s first call of Triton, autotuned, kernels shared between shapes (median; up to 8.0 s)" in (
        report.summary(rows)
    )


def test_the_bare_product_is_never_the_fastest_other():
    rungs = report.by_problem(ROWS)["bias_silu", 4096, 2048, 64]

    assert report.fastest_other(rungs) == "compiled_tail"


def test_a_problem_where_gemmgen_has_no_time_has_no_ratio():
    rows = [row("bias_silu", "gemmgen", None, "wrong answer"), row("bias_silu", "eager", 10.0)]

    assert report.markdown_table(rows).splitlines()[-1].endswith("| - | **10.0** | - |")
    assert "fastest in 0 of 0" in report.summary(rows)


def at(M, rung, median_us, case="bias_silu", **more):
    return {**row(case, rung, median_us), "M": M, **more}


def test_the_short_summary_counts_losses_by_case_and_m_and_names_the_worst():
    rows = [at(16, "gemmgen", 10.0), at(16, "eager", 9.0), at(128, "gemmgen", 10.0), at(128, "eager", 12.0)]
    rows += [at(16, "gemmgen", 10.0, N=64), at(16, "triton", 8.0, N=64)]
    rows += [at(16, "gemmgen", 10.0, N=96), at(16, "eager", 11.0, N=96)]
    rows += [at(128, "gemmgen", 10.0, "bias_gelu_tanh"), at(128, "cublaslt", 5.0, "bias_gelu_tanh")]

    assert report.short_summary(rows).partition("\n\n")[2].splitlines() == [
        "| losses, and the worst, at M = | 16 | 128 | lost to |",
        "| --- | ---: | ---: | ---: |",
        "| bias_silu | 2 of 3, 0.80x | - | cuBLAS + eager 1, Triton 1 |",
        "| bias_gelu_tanh | - | 1 of 1, 0.50x | cuBLASLt epilogue 1 |",
    ]
    assert "- loss:" not in report.short_summary(rows)


def test_without_losses_there_is_no_table_of_them():
    rows = [row("bias_silu", "gemmgen", 1.0), row("bias_silu", "eager", 2.0)]

    assert "losses" not in report.short_summary(rows) and "fastest in 1 of 1" in report.short_summary(rows)


def test_missing_figures_are_grouped_by_reason():
    rows = [at(M, "eager", None, reason=f"torch._int_mm needs M > 16, M is {M}") for M in (1, 16)]
    rows += [at(M, "bare", None, reason=f"torch._int_mm needs M > 16, M is {M}") for M in (1, 16)]
    rows += [at(1, "cublaslt", None, reason="torch._int_mm needs N and K to be multiples of 8, they are 1003 and 777")]
    rows += [at(M, "triton", None, reason=f"wrong answer: output 0 has relative error {M}") for M in (1, 16)]
    rows += [at(1, "gemmgen", None, reason="wrong answer: output 0 has relative error 3")]

    lines = report.short_summary(rows).splitlines()

    assert [line for line in lines if line.startswith("- no figure")] == [
        "- no figure, torch._int_mm needs M > 16: cuBLAS + eager in 2, bare product in 2 problem(s)",
        "- no figure, torch._int_mm needs N and K to be multiples of 8: cuBLASLt epilogue in 1 problem(s)",
        "- no figure, wrong answer: Triton in 2 problem(s)",
        "- no figure, wrong answer: output 0 has relative error 3: gemmgen in 1 problem(s)",
    ]


def test_the_readme_shows_the_table_of_a_few_problems_alone():
    few, many = ([at(M, name, 1.0) for M in range(count) for name in ("gemmgen", "eager")] for count in (40, 41))

    assert "| bias_silu | 39 x 2048 x 64 |" in report.short(few)
    assert "| bias_silu |" not in report.short(many) and "fastest in 41 of 41" in report.short(many)
    assert "| bias_silu | 40 x 2048 x 64 |" in report.full(many)


def test_a_problem_that_two_runs_measured_has_the_rows_of_the_later_one():
    earlier = [at(1, "gemmgen", 1.0, started="1"), at(1, "eager", 2.0, started="1"), at(2, "eager", 5.0, started="1")]
    later = [at(1, "gemmgen", 3.0, started="2")]

    assert report.newest([*later, *earlier]) == [later[0], earlier[2]]


def printed_of_two(suite, tmp_path, capsys):
    for name, rows in (("a", ROWS[:5]), ("b", [{**row, "commit": "def"} for row in ROWS[5:]])):
        text = "".join(json.dumps({**row, "suite": suite}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert report.main([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    return capsys.readouterr().out


def test_main_merges_the_parts_of_a_run_and_says_both_conditions(tmp_path, capsys):
    printed = printed_of_two("llama", tmp_path, capsys)

    assert printed.startswith("`a.jsonl`, `b.jsonl`: ") and printed.count("| case | M x N x K |") == 1
    assert " at abc and def." in printed and "fastest in 1 of 2" in printed


def test_main_keeps_the_files_of_other_suites_apart(tmp_path, capsys):
    printed = printed_of_two("epilogue", tmp_path, capsys)

    assert printed.startswith("`a.jsonl`: ") and "\n`b.jsonl`: " in printed
    assert printed.count("| case | M x N x K |") == 2 and "fastest in 0 of 1" in printed


def test_main_prints_other_suites_too(tmp_path, capsys):
    path = tmp_path / "jit.jsonl"
    rows = [{**FIXED, "suite": "jit", "cores": 2, "metric": metric, "median_s": 0.5, "max_s": 2.0}
            for metric in suite_jit.MEANINGS]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.main([str(path)]) == 0

    printed = capsys.readouterr().out
    assert printed.startswith("`jit.jsonl`: Median seconds. NVIDIA H200, 2 cores, driver 580,")
    assert all(f"| {meaning} | 0.500 | 2.000 |" in printed for meaning in suite_jit.MEANINGS.values())


def test_main_prints_conditions_table_and_summary(result_file, capsys):
    assert report.main([str(result_file)]) == 0

    printed = capsys.readouterr().out
    assert "NVIDIA H200, driver 580, torch 2.11" in printed and "**100.0**" in printed and "loss" in printed
    assert "one eager call" not in printed


def test_main_prints_the_eager_times_of_small_problems(tmp_path, capsys):
    path = tmp_path / "epilogue.jsonl"
    path.write_text(json.dumps({**row("bias_silu", "gemmgen", 9.0), "method": "graph", "eager_us": 31.5}) + "\n")
    assert report.main([str(path)]) == 0

    _, _, eager = capsys.readouterr().out.partition("one eager call")
    assert "**31.5**" in eager


def test_result_file_round_trip(tmp_path):
    results = ResultFile(tmp_path / "results", "epilogue", {"device": "x"})

    results.add([{"case": "a"}])
    results.add([{"case": "b"}])

    assert [(row["suite"], row["device"], row["case"]) for row in read(results.path)] == [
        ("epilogue", "x", "a"),
        ("epilogue", "x", "b"),
    ]


def test_parts_that_start_together_write_files_of_their_own(tmp_path):
    one, two = (ResultFile(tmp_path, "llama", {}, label) for label in ("-1of2", "-2of2"))

    assert one.path.name.endswith("-1of2.jsonl") and one.path != two.path


def test_plot_is_relative_to_eager():
    problems = report.by_problem(ROWS)

    assert plot.relative_speeds(problems, "gemmgen") == [(1.5, 0), (1.2, 1)]


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")

    assert "written" in plot.save(ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
