"""The sm100 family: what it refuses, and that nvcc and nvJitLink accept what it renders. No Blackwell has run it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmgen.arch import arch_named
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType
from gemmgen.jit.build import build
from gemmgen.lower.sm100 import reject_reason, render_skeleton
from gemmgen.source import KernelSource
from tests.compile.test_sm90 import COL, COOPERATIVE, MAX_OVER_N, ROW, TILE, D, functors, signature

SM100 = arch_named("sm100")
PAIR = GemmConfig("sm100", (128, 256, 64), (2, 1), "auto")
SINGLE = replace(PAIR, cluster_shape=(1, 1))

REFUSED = [
    pytest.param(signature(DType.E4M3), PAIR, "bf16 or f16", id="fp8"),
    pytest.param(signature(outputs=(D, MAX_OVER_N)), PAIR, "no reductions", id="reduction"),
    pytest.param(signature(outputs=(D, D)), PAIR, "one [M, N] output", id="two-outputs"),
    pytest.param(signature(inputs=(TILE, TILE)), PAIR, "one [M, N] operand", id="two-tiles"),
    pytest.param(signature(), replace(PAIR, tile_shape=(64, 256, 64)), "128 rows", id="tile-m"),
    pytest.param(signature(), replace(PAIR, tile_shape=(128, 48, 64)), "multiples of 32", id="tile-n"),
    pytest.param(signature(), replace(PAIR, scheduler="stream_k"), "split-K", id="stream-k"),
    pytest.param(signature(), replace(PAIR, epilogue_tile=(128, 32)), "epilogue tile", id="epilogue-tile"),
    pytest.param(signature(), replace(PAIR, stages=6), "shared memory", id="stages"),
    pytest.param(signature(), COOPERATIVE, "does not run sm90", id="family"),
]


@pytest.mark.parametrize("value, config, reason", REFUSED)
def test_refusal_names_the_reason(value, config, reason):
    assert reason in reject_reason(value, config, SM100)


@pytest.mark.parametrize("config, rows", [(PAIR, 256), (SINGLE, 128)], ids=["pair", "single"])
def test_pairs_of_ctas_share_an_mma(config, rows):
    value = signature(inputs=(ROW, COL, TILE))
    assert reject_reason(value, config, SM100) is None
    text = render_skeleton(value, config, SM100)
    assert f"using MmaTile = cute::Shape<cute::Int<{rows}>," in text
    assert "using TileShape = cute::Shape<cute::Int<128>," in text


@pytest.mark.compile
def test_builds_without_a_stack():
    skeleton = render_skeleton(signature(inputs=(ROW, COL, TILE)), PAIR, SM100)
    (built,) = build([KernelSource(PAIR.label, SM100, skeleton, functors(skeleton))])
    assert built.stack_bytes == 0
