"""Every rung either can run or says why not."""

import pytest

from bench import rungs
from bench.cases import CASES
from bench.rungs import RUNGS, Unavailable
from bench.shapes import Shape

SHAPE = Shape(4096, 4096, 4096)


def reason_of(rung, case, shape):
    with pytest.raises(Unavailable) as raised:
        RUNGS[rung].prepare(CASES[case], shape)
    return str(raised.value)


def test_the_ladder():
    assert list(RUNGS) == ["gemmgen", "eager", "compiled_tail", "cublaslt", "max_autotune", "triton", "bare"]
    assert [name for name, rung in RUNGS.items() if not rung.is_whole] == ["bare"]


@pytest.mark.parametrize("rung", ["compiled_tail", "max_autotune", "triton"])
def test_without_triton_three_rungs_say_so(rung, monkeypatch):
    monkeypatch.setattr(rungs, "has_triton", lambda: False)

    assert "Triton is not installed" in reason_of(rung, "bias_silu", SHAPE)


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
