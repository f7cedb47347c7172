"""What the model of time chooses and says, against what was measured on an H200: bench/results, committed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

import gemmgen as gg
from gemmgen.arch import ARCHS
from gemmgen.device import Target
from gemmgen.ir.node import Axes
from gemmgen.runtime import bind_call
from gemmgen.ways import Fused, select

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FILES = [RESULTS / f"epilogue-h200-{name}.jsonl" for name in ("llama", "headline")]
TARGET = Target(ARCHS["sm90"], 132, "NVIDIA H200")
DTYPES = {"int8": torch.int8, "fp8_": torch.float8_e4m3fn}


def _measured() -> dict[tuple[str, int, int, int], dict[str, float]]:
    """Microseconds by problem (case, M, N, K), then by rung."""
    problems: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for line in (line for path in FILES for line in path.read_text().splitlines()):
        row = json.loads(line)
        if row.get("median_us"):
            problems.setdefault((row["case"], row["M"], row["N"], row["K"]), {})[row["rung"]] = row["median_us"]
    return problems


MEASURED = _measured()
BIAS_GELU = {problem: times for problem, times in MEASURED.items() if problem[0] == "bias_gelu_tanh"}


def _binding(case, M, N, K):
    op = gg.Gemm(getattr(gg.library, case))._op
    dtype = DTYPES.get(case[:4], torch.bfloat16)
    A, B = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((M, K), (N, K)))
    shapes = {Axes.COL: (M,), Axes.ROW: (N,), Axes.TILE: (M, N)}
    operands = {
        p.name: torch.empty(shapes[p.axes], dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32,
                            device="meta")
        for p in op.graph.parameters
    }  # fmt: skip
    return bind_call(op.graph_for, A, B.t(), operands, None)


def _times_of_ways(times: dict[str, float]) -> dict[str, float]:
    """The rungs that stand for ways; cuBLAS with its eager tail is at least as slow as a split of two kernels."""
    return {"fused": times["gemmgen"], "library": times["cublaslt"], "split": times["eager"]}


def test_there_is_enough_to_compare_with():
    assert len(BIAS_GELU) >= 30
    assert len(MEASURED) >= 95


@pytest.mark.parametrize("problem", BIAS_GELU, ids=str)
def test_the_way_that_is_chosen_is_the_fastest_or_nearly(problem):
    """Within 4 percent of the better of the fused kernel and cuBLASLt's epilogue, without a measurement.

    At M = 1 torch rounds before its GELU: there the fused kernel and the split way are compared.
    """
    times = _times_of_ways(BIAS_GELU[problem])
    selection = select(_binding(*problem), TARGET)
    legal = {timed.way.name for timed in selection.table}
    assert ("library" in legal) == (problem[1] > 1)
    others = {"fused", "library"} if "library" in legal else {"fused", "split"}
    assert times[selection.ways[0].name] <= 1.04 * min(times[name] for name in others)


def test_the_few_rows_of_a_decode_do_not_run_fused():
    chosen = {problem: select(_binding(*problem), TARGET).ways[0] for problem in BIAS_GELU if problem[1] <= 128}
    assert len(chosen) == 15
    assert not any(isinstance(way, Fused) for way in chosen.values())


def test_eight_bits_run_fused_where_that_was_measured_to_be_faster():
    """The rung nearest to split is torch's product, here into bf16, and one compiled kernel behind it."""
    for problem, times in MEASURED.items():
        if problem[0] in ("int8_dequant_bias", "fp8_dequant_bias_gelu_tanh") and "compiled_tail" in times:
            way = select(_binding(*problem), TARGET).ways[0]
            chosen = times["gemmgen"] if isinstance(way, Fused) else times["compiled_tail"]
            assert chosen <= 1.01 * min(times["gemmgen"], times["compiled_tail"]), problem


@pytest.mark.parametrize("case", sorted({problem[0] for problem in MEASURED}))
def test_the_estimate_of_the_fused_kernel_is_close(case):
    """Within a fifth for half of them, and within a half for all but the one that TMA cannot feed."""
    errors = {}
    for problem, times in MEASURED.items():
        if problem[0] == case and problem[1:] != (1000, 1003, 777):
            table = select(_binding(*problem), TARGET).table
            estimate = next(timed.time_us for timed in table if isinstance(timed.way, Fused))
            errors[problem] = max(estimate / times["gemmgen"], times["gemmgen"] / estimate) - 1
    assert statistics.median(errors.values()) <= 0.2, errors
    assert max(errors.values()) <= 0.5, errors


def test_the_estimate_of_torchs_op_is_close():
    """Within a tenth for half of them; what takes less than 20 us is faster in the model than on the GPU."""
    errors = {}
    for problem, times in BIAS_GELU.items():
        for timed in select(_binding(*problem), TARGET).table:
            if timed.way.name == "library":
                errors[problem] = max(timed.time_us / times["cublaslt"], times["cublaslt"] / timed.time_us) - 1
    assert statistics.median(errors.values()) <= 0.1, errors
    assert max(errors.values()) <= 0.6, errors
