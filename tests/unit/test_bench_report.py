"""The README's table from a result file, losses included."""

import json

import pytest

from bench import plot, report
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


def test_plot_is_relative_to_eager():
    problems = report.by_problem(ROWS)

    assert plot.relative_speeds(problems, "gemmgen") == [(1.5, 0), (1.2, 1)]


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")

    assert "written" in plot.save(ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
