"""The command line: parsing of problems, `explain`, `build`, `bench`, and errors without a traceback."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import gemmgen as gg
from gemmgen.__main__ import main
from gemmgen.cli_problem import gemm_named, parsed_dtype, parsed_operands, parsed_shape, problem
from gemmgen.jit.build import BuiltKernel

EPILOGUES = """\
import gemmgen as gg
from sibling import SLOPE

@gg.epilogue
def scaled(accum, alpha: gg.Scalar, bias: gg.Row, residual: gg.Tile):
    return gg.leaky_relu(accum * alpha + bias, SLOPE) + residual

op = gg.Gemm(scaled)
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").write_text("SLOPE = 0.2\n")
    path = tmp_path / "cli_epilogues.py"
    path.write_text(EPILOGUES)
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_explain_without_a_shape_prints_the_graph(file):
    result = call("explain", f"{file}:scaled")
    assert result.exit_code == 0
    assert "leaky_relu" not in result.output and "= add " in result.output
    assert "op gemmgen::scaled_" in result.output


def test_explain_names_the_kernel_of_each_shape(file):
    result = call("explain", f"{file}:op", "--arch", "sm90a", "--shape", "512,512,512", "--shapes", "16,16,17,4")
    assert result.exit_code == 0
    assert "(512, 512, 512, 1)" in result.output and "(16, 16, 17, 4)" in result.output
    assert "fused kernel sm90_" in result.output and "not sm90: A is aligned to 2 bytes" in result.output


def test_explain_backward_prints_the_plan():
    assert "saved: 2 bytes per element" in call("explain", "library:bias_gelu", "--backward").output


def test_build_builds_each_shape(file, monkeypatch, tmp_path):
    calls = []
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(bytes(2000))

    def fake_build(self, A, B, /, *, arch, out_dtype, **operands):
        calls.append((tuple(A.shape), tuple(B.shape), arch, out_dtype, operands))
        return BuiltKernel("kernel", "sm90", cubin, cubin, "f", 168, 0, 30.0, 2.5)

    monkeypatch.setattr(gg.Gemm, "build", fake_build)
    arguments = ["--operand", "bias=f32", "--out-dtype", "f32", "--shape", "8,16,32", "--shape", "8,16,32,2"]
    result = call("build", f"{file}:scaled", "--arch", "sm90a", *arguments)
    assert result.exit_code == 0
    assert result.output.count("kernel for sm90: 2 KB, 168 registers, 0 B of stack, ready after 0.0 s") == 2
    assert [c[:4] for c in calls] == [
        ((8, 32), (32, 16), "sm90a", torch.float32),
        ((2, 8, 32), (2, 32, 16), "sm90a", torch.float32),
    ]
    assert calls[0][4]["alpha"] == 1.0
    assert calls[0][4]["bias"].dtype == torch.float32
    assert calls[0][4]["residual"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["library:nope"], "library has nothing under the name 'nope'"),
        (["bias_gelu"], "Write FILE.py:name or library:name"),
        (["nowhere.py:x"], "there is no Python file nowhere.py"),
        (["{file}:number"], "has a int under the name 'number'\n  Its epilogues are: op, scaled."),
        (["library:bias", "--shape", "1,2"], "'1,2' is no shape"),
        (["library:bias", "--shape", "1,2,-3"], "'1,2,-3' is no shape"),
        (["library:bias", "--shape", "1,2,3", "--arch", "sm70"], "unknown arch 'sm70'"),
        (["library:bias", "--shape", "1,2,3", "--arch", "sm90", "--dtype", "f12"], "'f12' is no dtype"),
        (["library:bias", "--shape", "1,2,3", "--arch", "sm90", "--operand", "bias"], "Write name=dtype"),
        (["library:bias", "--shape", "1,2,3", "--arch", "sm90", "--operand", "b=f32"], "has no operand b"),
        (["library:bias", "--shape", "1,2,3", "--arch", "sm90", "--dtype", "i32"], "there is no mainloop"),
        (["library:bias", "--shape", "1,2,3", "--arch", "sm90", "--dtype", "f64"], "float64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["explain", "build"])
def test_bad_arguments_are_errors_without_a_traceback(command, arguments, message, file):
    if command == "build" and "--shape" not in arguments:
        arguments = [*arguments, "--arch", "sm90"]
    result = call(command, *(argument.replace("{file}", str(file)) for argument in arguments))
    assert result.exit_code == 1
    assert result.output.startswith("Error: ") and "Traceback" not in result.output
    assert message in result.output


def test_without_a_gpu_the_arch_must_be_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("explain", "library:bias", "--shape", "64,64,64")
    assert result.exit_code == 1 and "Name one" in result.output


def test_a_file_that_fails_is_reported_with_its_line(tmp_path):
    path = tmp_path / "cli_broken.py"
    path.write_text("x = 1\ny = x / 0\n")
    result = call("explain", f"{path}:y")
    assert result.exit_code == 1
    assert f"ZeroDivisionError: division by zero\n  at {path}:2" in result.output


def test_bench_is_the_benchmark_of_the_checkout():
    result = call("bench", "--help")
    assert result.exit_code == 0 and "--suite" in result.output


def test_bench_of_a_wheel_says_where_it_is(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = call("bench", "--quick")
    assert result.exit_code == 1 and "python -m bench" in result.output


def test_names_of_dtypes():
    assert parsed_dtype("bf16") == parsed_dtype("bfloat16") == torch.bfloat16
    assert parsed_dtype("float8_e4m3fn") == parsed_dtype("e4m3") == torch.float8_e4m3fn
    assert parsed_operands(["x=f32", "y=i8"]) == {"x": torch.float32, "y": torch.int8}


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_layouts(layout):
    call = problem(gemm_named("library:bias"), parsed_shape("8,16,32,3"), layout=layout)
    assert call.A.shape == (3, 8, 32) and call.B.shape == (3, 32, 16)
    assert call.A.stride() == ((256, 32, 1) if layout[0] == "n" else (256, 1, 8))
    assert call.B.stride() == ((512, 16, 1) if layout[1] == "n" else (512, 1, 32))


def test_eight_bit_problems_have_fp32_operands():
    call = problem(gemm_named("library:fp8_dequant_bias_gelu_tanh"), parsed_shape("8,16,32"), dtype="e4m3,e5m2")
    assert (call.A.dtype, call.B.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert {value.dtype for value in call.operands.values()} == {torch.float32}
