"""The model of time: that it ranks as an H200 measured, that few rows spread over all SMs, that nothing spills."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmgen import choose
from gemmgen.arch import ARCHS
from gemmgen.choose import (
    REJECT,
    estimate_split_us,
    estimate_us,
    fitted_to,
    has_registers,
    ranked,
    worth_measuring,
)
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType
from gemmgen.errors import IllegalConfig
from gemmgen.problem import Extents
from gemmgen.signature import Input, Kind, Matrix, Output, Signature

SM90 = ARCHS["sm90"]
SMS = 132


BIAS = (Input(Kind.ROW, DType.BF16),)


def signature(a=DType.BF16, *, inputs=BIAS, outputs=None, math="tensor", alignment=None):
    matrix = Matrix(a, True, alignment or 16 // a.bytes)
    accum = DType.I32 if a is DType.I8 else DType.F32
    return Signature(matrix, matrix, accum, math, inputs, outputs or (Output(Kind.TILE, DType.BF16),), 16)


def extents(M, N, K, L=1):
    return Extents(M, N, K, L, batched=L > 1)


# microseconds on an H200, bias + GELU, bf16
MEASURED = {
    (4096, 4096, 4096): {(128, 256, "cooperative"): 185.0, (128, 128, "pingpong"): 191.2, (128, 192, "pingpong"): 202.8,
                         (64, 256, "pingpong"): 200.0, (64, 64, "pingpong"): 444.2},
    (8192, 14336, 4096): {(128, 192, "pingpong"): 1280.1, (128, 256, "cooperative"): 1294.3,
                          (128, 128, "pingpong"): 1353.1, (64, 64, "pingpong"): 3202.3},
    (8192, 4096, 1024): {(128, 128, "pingpong"): 105.2, (128, 192, "pingpong"): 105.7, (128, 256, "cooperative"): 117.2,
                         (64, 256, "pingpong"): 107.0},
    (2048, 6144, 4096): {(256, 192, "cooperative"): 139.5, (128, 192, "pingpong"): 139.7,
                         (128, 256, "cooperative"): 141.9, (128, 128, "pingpong"): 142.0},
}  # fmt: skip


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_the_first_choice_is_close_to_the_best_measured(shape):
    best = ranked(signature(), extents(*shape), SM90, SMS)[0].config
    times = MEASURED[shape]
    chosen = times[(*best.tile_shape[:2], best.kernel_schedule)]
    assert chosen <= 1.03 * min(times.values())


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_the_estimate_is_close_to_the_time(shape):
    for choice in ranked(signature(), extents(*shape), SM90, SMS):
        config = choice.config
        time_us = MEASURED[shape].get((*config.tile_shape[:2], config.kernel_schedule))
        if time_us and config.scheduler == "persistent":
            assert choice.time_us == pytest.approx(time_us, rel=0.15)


@pytest.mark.parametrize("M", [1, 16, 64])
@pytest.mark.parametrize("N, K", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_few_rows_are_read_at_nearly_the_bandwidth(M, N, K):
    """Within a third of the time that reading B takes at full bandwidth, which few CTAs cannot reach."""
    best = ranked(signature(), extents(M, N, K), SM90, SMS)[0]
    assert best.time_us <= 4 / 3 * N * K * 2 / (choose.MEMORY_BYTES_PER_CLOCK * choose.CLOCK_GHZ * 1e3) + 3
    ctas = -(-N // best.config.tile_shape[1]) * best.config.split_k
    assert ctas >= 80


# microseconds on an H200, bias + tanh-GELU, bf16, one row: a tile of rows that the problem does not have
MEASURED_ONE_ROW = {
    (1, 1024, 4096): ((64, 16), (1, 1), "pingpong", 8.9),
    (1, 4096, 4096): ((64, 32), (1, 1), "pingpong", 22.3),
    (1, 4096, 14336): ((64, 32), (1, 1), "pingpong", 66.9),
    (1, 6144, 4096): ((64, 64), (1, 1), "pingpong", 25.1),
    (1, 28672, 4096): ((128, 128), (1, 2), "cooperative", 96.6),
}


@pytest.mark.parametrize("shape", MEASURED_ONE_ROW, ids=str)
def test_rows_beyond_the_edge_cost(shape):
    tile, cluster, schedule, time_us = MEASURED_ONE_ROW[shape]
    config = GemmConfig("sm90", (*tile, 64), cluster, schedule)
    assert estimate_us(signature(), extents(*shape), config, SMS) == pytest.approx(time_us, rel=0.2)


@pytest.mark.parametrize("M", [1, 8, 16])
@pytest.mark.parametrize("N, K", [(1024, 4096), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_few_rows_swap_the_problem_and_take_a_narrow_tile(M, N, K):
    best = ranked(signature(), extents(M, N, K), SM90, SMS)[0].config
    assert best.swapped
    assert best.tile_shape[1] <= max(8, M)


def test_many_rows_do_not_swap():
    for shape in MEASURED:
        assert not ranked(signature(), extents(*shape), SM90, SMS)[0].config.swapped


def test_the_swapped_problem_is_estimated_as_the_problem_that_it_is():
    tall = GemmConfig("sm90", (64, 32, 64), (1, 1), "pingpong")
    problem, turned = extents(4096, 96, 2048), extents(96, 4096, 2048)
    swapped = replace(tall, swapped=True)
    assert estimate_us(signature(), turned, swapped, SMS) == estimate_us(signature(), problem, tall, SMS)


def test_few_tiles_share_k_in_clusters():
    best = ranked(signature(), extents(16, 1024, 8192), SM90, SMS)[0].config
    assert best.scheduler == "cluster_split"
    assert best.split_k > 1


def test_small_ctas_share_an_sm():
    def time_us(stages: int | None) -> float:
        config = GemmConfig("sm90", (64, 16, 128), (1, 1), "single", stages=stages, scheduler="cluster_split")
        return estimate_us(signature(), extents(64 * 264, 16, 128), config, SMS)

    assert time_us(5) < time_us(None)


@pytest.mark.parametrize("tiles, is_alone", [(2, False), (3, True)])
def test_ctas_whose_epilogue_takes_too_much_memory_do_not_share_an_sm(tiles, is_alone):
    """Of 228 KiB five stages take 100, and each tile in fp32 4, of either CTA."""
    config = GemmConfig("sm90", (64, 16, 128), (1, 1), "single", stages=5, scheduler="cluster_split", swapped=True)

    def time_us(tiles: int) -> float:
        inputs = (*BIAS, *(Input(Kind.TILE, DType.F32),) * tiles)
        value = signature(inputs=inputs, outputs=(Output(Kind.TILE, DType.F32),))
        return estimate_us(value, extents(16, 10240, 8192), config, SMS)

    assert (time_us(tiles) > 1.1 * time_us(0)) == is_alone


def test_fp8_keeps_its_exact_sums_under_long_k_tiles():
    value = signature(DType.E4M3)
    for choice in ranked(value, extents(16, 4096, 4096), SM90, SMS):
        assert choice.config.tile_shape[2] <= 128


def test_few_ctas_cannot_pull_the_bandwidth():
    wide = GemmConfig("sm90", (64, 256, 64), (1, 1), "pingpong")
    narrow = GemmConfig("sm90", (64, 32, 64), (1, 1), "pingpong")
    problem = extents(64, 4096, 4096)
    assert estimate_us(signature(), problem, wide, SMS) > 2 * estimate_us(signature(), problem, narrow, SMS)


def test_few_tiles_of_a_long_k_are_split():
    best = ranked(signature(), extents(256, 512, 65536), SM90, SMS)[0].config
    assert best.scheduler in ("stream_k", "cluster_split")
    assert best.split_k > 1


def test_splitting_a_short_k_does_not_pay():
    split = GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=4)
    whole = GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative")
    problem = extents(2048, 2048, 512)
    assert estimate_us(signature(), problem, split, SMS) > estimate_us(signature(), problem, whole, SMS)


def test_every_slice_costs_a_turn():
    def time_us(split_k: int, K: int) -> float:
        config = GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=split_k)
        return estimate_us(signature(), extents(128, 128, K), config, SMS)

    assert time_us(8, 512) > time_us(4, 512) > time_us(2, 512)
    assert time_us(8, 65536) < time_us(2, 65536)


def test_a_tail_wave_costs_a_wave():
    config = GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative")
    full, over = extents(128 * 12, 128 * 11, 4096), extents(128 * 12, 128 * 11 + 1, 4096)
    assert estimate_us(signature(), over, config, SMS) > 1.7 * estimate_us(signature(), full, config, SMS)


@pytest.mark.parametrize("a", [DType.BF16, DType.F16, DType.I8, DType.E4M3], ids=repr)
@pytest.mark.parametrize("inputs", [(), (Input(Kind.TILE, DType.BF16),) * 2, BIAS * 3], ids=len)
def test_what_is_proposed_is_legal_and_will_not_spill(a, inputs):
    value, problem = signature(a, inputs=inputs), extents(512, 512, 512)
    for choices in (ranked(value, problem, SM90), worth_measuring(value, problem, SM90, SMS)):
        assert choices
        for choice in choices:
            assert REJECT[choice.config.family](value, choice.config, SM90) is None
            assert has_registers(value, choice.config)


def test_wide_tiles_of_exact_fp8_leave_registers_for_a_rich_epilogue_but_not_with_stream_k():
    rich = signature(DType.E4M3, inputs=(*BIAS, Input(Kind.TILE, DType.BF16)))
    wide = GemmConfig("sm90", (128, 256, 128), (2, 1), "cooperative")
    stream_k = replace(wide, scheduler="stream_k")
    assert REJECT["sm90"](rich, wide, SM90) is None and has_registers(rich, wide)
    assert not has_registers(rich, stream_k)
    assert has_registers(rich, replace(stream_k, tile_shape=(128, 128, 128)))


@pytest.mark.parametrize("tiles, most", [(0, 192), (1, 160), (3, 160), (4, 128)])
def test_registers_beside_the_accumulators(tiles, most):
    """As compiled for sm90: beside one result, three tiles leave room for 160 accumulators and four spill."""
    value = signature(inputs=(*BIAS, *(Input(Kind.TILE, DType.BF16),) * tiles))
    for accums in (128, 160, 192):
        config = GemmConfig("sm90", (128, accums, 64), (2, 1), "pingpong")
        assert has_registers(value, config) == (accums <= most)


def test_more_is_measured_than_the_model_ranks_but_nothing_hopeless():
    problem = extents(4096, 4096, 4096)
    choices = worth_measuring(signature(), problem, SM90, SMS)
    kinds = {(c.config.tile_shape[:2], c.config.cluster_shape) for c in choices}
    assert {((128, 256), (2, 1)), ((128, 256), (1, 2)), ((256, 128), (1, 2))} <= kinds
    assert len(choices) <= 20
    assert choices[-1].time_us <= 1.7 * choices[0].time_us
    assert [c.time_us for c in choices] == sorted(c.time_us for c in choices)


def test_what_tma_cannot_take_falls_to_sm80():
    value = signature(alignment=1)
    assert {choice.config.family for choice in ranked(value, extents(77, 131, 45), SM90)} == {"sm80"}
    assert worth_measuring(value, extents(77, 131, 45), SM90, SMS)[0].config.family == "sm80"


def test_exact_fp32_splits_its_sums():
    choices = ranked(signature(DType.F32, math="simt"), extents(64, 64, 64), SM90)
    assert all(choice.config.split_k > 1 for choice in choices)


SM80 = GemmConfig("sm80", (128, 128, 32), kernel_schedule="multistage", stages=3, warp_shape=(64, 64, 32))
SM90_TILE = GemmConfig("sm90", (128, 128, 64))
SM100 = GemmConfig("sm100", (128, 128, 64), kernel_schedule="auto")


@pytest.mark.parametrize("config, reason", [
    (replace(SM80, swapped=True), "sm80 does not swap"),
    (replace(SM80, scheduler="cluster_split", split_k=2), "no scheduler 'cluster_split'"),
    (replace(SM80, split_k=2), "needs the scheduler stream_k"),
    (replace(SM100, swapped=True), "sm100 family does not swap"),
    (replace(SM90_TILE, family="sm70"), "unknown family 'sm70'; there are sm90, sm80, sm100"),
    (replace(SM90_TILE, raster="X"), "raster is 'X'; it may be heuristic, M, N"),
    (replace(SM90_TILE, swizzle=3), "swizzle is 3; it may be 1, 2, 4, 8, 16"),
    (replace(SM90_TILE, scheduler="stream_k", split_k=0), "split_k = 0"),
], ids=lambda value: value.label if isinstance(value, GemmConfig) else "")  # fmt: skip
def test_fields_that_a_family_does_not_know_are_refused_and_not_ignored(config, reason):
    arch = ARCHS["sm100" if config.family == "sm100" else "sm90"]
    assert reason in choose.reject_reason(signature(), config, arch)


def test_the_configs_that_those_are_made_of_are_legal():
    for config, arch in ((SM80, "sm90"), (SM90_TILE, "sm90"), (SM100, "sm100")):
        assert choose.reject_reason(signature(), config, ARCHS[arch]) is None


def test_a_tile_for_each_pair_of_sms_is_worth_measuring():
    """10240 columns are 64 tiles of 160: on an H200 faster than any kernel that gives an SM a tile of its own."""
    tried = [choice.config for choice in worth_measuring(signature(), extents(64, 10240, 8192), SM90, SMS, most=18)]
    assert GemmConfig("sm90", (64, 160, 64), (1, 1), "single", scheduler="cluster_split", split_k=2) in tried


def test_no_kernel_at_all_is_an_error_with_the_reasons():
    value = signature(DType.F64)
    with pytest.raises(IllegalConfig, match="no kernel of sm90"):
        ranked(value, extents(64, 64, 64), SM90)


@pytest.mark.parametrize("M, N, swizzle", [(4096, 4096, 8), (1024, 768, 2), (384, 384, 1)])
def test_the_swizzle_of_stream_k_pads_nothing(M, N, swizzle):
    config = GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", raster="M")
    fitted = fitted_to(extents(M, N, 64), config)
    assert fitted.swizzle == swizzle
    assert fitted.raster == ("M" if swizzle > 1 else "heuristic")


@pytest.mark.parametrize("tile, cluster, raster, swizzle", [
    ((128, 160), (2, 1), "N", 8), ((128, 160), (2, 1), "M", 8), ((128, 160), (1, 2), "N", 16),
    ((128, 160), (1, 2), "M", 4), ((128, 256), (1, 1), "N", 16), ((128, 256), (1, 1), "heuristic", 8),
])  # fmt: skip
def test_tiles_that_run_at_a_time_share_rows_and_columns_alike(tile, cluster, raster, swizzle):
    config = GemmConfig("sm90", (*tile, 64), cluster, "pingpong", raster=raster)
    assert fitted_to(extents(16384, 57344, 8192), config) == replace(config, swizzle=swizzle)


@pytest.mark.parametrize("M, N", [(128, 8200), (384, 384)])
def test_a_group_is_no_wider_than_the_problem(M, N):
    config = GemmConfig("sm90", (128, 128, 64), (1, 1), "pingpong", raster="N")
    assert fitted_to(extents(M, N, 64), config).swizzle <= -(-M // 128)


def test_clusters_that_split_k_have_one_order_of_tiles():
    config = GemmConfig("sm90", (64, 160, 64), (1, 1), "single", scheduler="cluster_split", split_k=2)
    for raster in ("heuristic", "M", "N"):
        assert fitted_to(extents(64, 10240, 8192), replace(config, raster=raster, swizzle=4)) == config


# the split way


@pytest.mark.parametrize("shape, product_us", [((4096, 4096, 4096), 177.7), ((8192, 14336, 4096), 1230.0),
                                               ((8192, 4096, 1024), 101.6), ((2048, 6144, 4096), 137.5)])  # fmt: skip
def test_split_costs_the_product_and_a_pass_over_memory(shape, product_us):
    problem = extents(*shape)
    passes_us = shape[0] * shape[1] * (4 + 4 + 2) / 4.08e6  # the accumulator written and read, D written
    assert product_us < estimate_split_us(signature(), problem, SMS) < 1.1 * (product_us + passes_us)


def test_split_is_not_chosen_where_the_kernels_are_alike():
    for value in (signature(), signature(DType.I8), signature(DType.E4M3), signature(alignment=2)):
        for shape in MEASURED:
            best = ranked(value, extents(*shape), SM90, SMS)[0]
            assert best.time_us < 1.25 * estimate_split_us(value, extents(*shape), SMS)


def test_more_tiles_in_the_epilogue_cost_split_more():
    heavy = signature(inputs=(Input(Kind.TILE, DType.F32),) * 2)
    assert estimate_split_us(heavy, extents(4096, 4096, 512), SMS) > estimate_split_us(
        signature(), extents(4096, 4096, 512), SMS
    )
