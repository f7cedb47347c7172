"""Every rung either can run or says why not."""

import sys
import types
from pathlib import Path

import pytest
import torch

from bench import rungs
from bench.cases import CASES, draw_inputs
from bench.rungs import RUNGS, Unavailable
from bench.shapes import Shape

SHAPE = Shape(4096, 4096, 4096)


def reason_of(rung, case, shape):
    with pytest.raises(Unavailable) as raised:
        RUNGS[rung].prepare(CASES[case], shape)
    return str(raised.value)


def test_the_ladder():
    ours = [name for name, rung in RUNGS.items() if not rung.is_peer]
    assert ours == ["gemmgen", "eager", "compiled_tail", "cublaslt", "max_autotune", "triton", "bare"]
    assert [name for name, rung in RUNGS.items() if not rung.is_whole] == ["bare"]


@pytest.mark.parametrize("rung", ["compiled_tail", "max_autotune", "triton"])
def test_without_triton_three_rungs_say_so(rung, monkeypatch):
    monkeypatch.setattr(rungs, "has_triton", lambda: False)

    assert "Triton is not installed" in reason_of(rung, "bias_silu", SHAPE)


def test_peers_that_are_not_installed_say_so(monkeypatch):
    monkeypatch.setattr(rungs.importlib.util, "find_spec", lambda name: None)
    assert "QuACK is not installed" in reason_of("quack", "bias_gelu_tanh", SHAPE)


def test_quack_computes_the_case_it_is_asked_for(monkeypatch):
    calls = []

    def gemm_act(A, B, bias, activation, store_preact, tuned):
        calls.append((activation, store_preact, tuned))
        return None, torch.nn.functional.gelu(A @ B + bias, approximate="tanh")

    module = types.ModuleType("quack.gemm_interface")
    module.gemm_act = gemm_act
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    monkeypatch.setattr(rungs.importlib.util, "find_spec", lambda name: object())
    inputs = draw_inputs(CASES["bias_gelu_tanh"], Shape(8, 16, 8), device="cpu")
    (result,) = inputs.bind(RUNGS["quack"].prepare(CASES["bias_gelu_tanh"], SHAPE).function)()
    assert calls == [("gelu_tanh_approx", False, True)]
    assert result.shape == (8, 16)
    assert "no such epilogue" in reason_of("quack", "bias_silu", SHAPE)


def test_inductor_is_pointed_to_the_cutlass_that_is_installed(monkeypatch):
    monkeypatch.setattr(rungs, "has_triton", lambda: True)
    compiled = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.update(options) or function)
    case = CASES["bias_gelu_tanh"]
    assert RUNGS["cutlass_inductor"].prepare(case, SHAPE).function is case.eager
    assert compiled["options"]["max_autotune_gemm_backends"] == "CUTLASS"
    (folder,) = (value for key, value in compiled["options"].items() if key.endswith("cutlass_dir"))
    assert (Path(folder) / "include/cutlass/cutlass.h").is_file()


@pytest.mark.parametrize("rung", ["eager", "compiled_tail", "max_autotune", "bare"])
def test_int8_with_few_rows_has_no_torch_product(rung):
    assert "M > 16" in reason_of(rung, "int8_dequant_bias", Shape(16, 4096, 4096))


@pytest.mark.parametrize("rung", ["eager", "compiled_tail", "cublaslt", "bare"])
def test_fp8_at_odd_extents_has_no_torch_product(rung):
    assert "multiples of 16" in reason_of(rung, "fp8_dequant_bias_gelu_tanh", Shape(1000, 1003, 777))


@pytest.mark.parametrize("case", ["bias_silu", "scale_bias_gelu_residual", "int8_dequant_bias"])
def test_cublaslt_without_such_an_epilogue_says_so(case):
    assert "epilogue" in reason_of("cublaslt", case, SHAPE) or "cuBLASLt has neither" in reason_of(
        "cublaslt", case, SHAPE
    )


@pytest.mark.parametrize("case", CASES.values(), ids=str)
@pytest.mark.parametrize("rung", ["eager", "bare"])
def test_torch_rungs_are_prepared_without_a_gpu(rung, case):
    assert callable(RUNGS[rung].prepare(case, SHAPE).function)
