"""The sm90 family: what it refuses and why, what it renders, and that nvcc and nvJitLink accept it without a spill."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from gemmgen.arch import arch_named
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType
from gemmgen.jit.build import build
from gemmgen.jit.compile import Skeleton, compile_functor, compile_skeleton
from gemmgen.jit.link import link
from gemmgen.jit.toolchain import nvjitlink
from gemmgen.lower.sm90 import SCHEDULES, lower_to_evt, promoted_chunks, reject_reason, render_skeleton
from gemmgen.signature import Input, Kind, Matrix, Output, Reduce, Signature
from gemmgen.source import KernelSource

SM90 = arch_named("sm90")
ROW, COL = Input(Kind.ROW, DType.BF16), Input(Kind.COL, DType.F32)
TILE, SCALAR = Input(Kind.TILE, DType.BF16), Input(Kind.SCALAR, DType.F32)
INDICES = (Input(Kind.ROW_INDEX, DType.I32), Input(Kind.COL_INDEX, DType.I32))
D = Output(Kind.TILE, DType.BF16)
SUM_OVER_M = Output(Kind.ROW, DType.F32, Reduce.SUM)
MAX_OVER_N = Output(Kind.COL, DType.F32, Reduce.MAX)
COOPERATIVE = GemmConfig("sm90", (128, 256, 64), (2, 1), "cooperative")
PINGPONG = GemmConfig("sm90", (64, 128, 64), (1, 1), "pingpong")
SWAPPED = GemmConfig("sm90", (64, 8, 128), (1, 1), "pingpong", swapped=True)
SPLIT = GemmConfig("sm90", (64, 16, 128), (1, 1), "single", scheduler="cluster_split", split_k=4, swapped=True)


def signature(
    a: DType = DType.BF16,
    b: DType | None = None,
    *,
    k_major: tuple[bool, bool] = (True, True),
    inputs: tuple[Input, ...] = (ROW,),
    outputs: tuple[Output, ...] = (D,),
) -> Signature:
    """A legal signature: TMA-aligned, with the accumulator and the arithmetic that `a` has."""
    b = b or a
    return Signature(
        a=Matrix(a, k_major[0], 16 // a.bytes),
        b=Matrix(b, k_major[1], 16 // b.bytes),
        accum=DType.I32 if a is DType.I8 else DType.F32,
        math="tf32" if a is DType.F32 else "tensor",
        inputs=inputs,
        outputs=outputs,
        tile_alignment=16,
    )


def functors(skeleton: str) -> str:
    """A definition of each functor that `skeleton` declares: the sum of everything that it is given."""
    declared = re.findall(r'extern "C" __device__ (\w+) (\w+)\((.*)\);', skeleton)
    return "".join(
        f'extern "C" __device__ {returned} {name}('
        + ", ".join(f"{t} x{i}" for i, t in enumerate(types.split(", ")))
        + ") { return "
        + " + ".join(f"x{i}" for i in range(len(types.split(", "))))
        + "; }\n"
        for returned, name, types in declared
    )


# ---- what is refused

LEGAL = [
    pytest.param(signature(), COOPERATIVE, id="bf16"),
    pytest.param(signature(k_major=(False, False)), COOPERATIVE, id="bf16-mn-major"),
    pytest.param(signature(DType.F32), replace(COOPERATIVE, tile_shape=(128, 128, 32)), id="tf32"),
    pytest.param(signature(DType.E4M3, DType.E5M2), replace(PINGPONG, tile_shape=(64, 128, 128)), id="fp8"),
    pytest.param(signature(DType.I8), replace(COOPERATIVE, tile_shape=(128, 256, 128)), id="int8"),
    pytest.param(signature(outputs=(SUM_OVER_M,)), PINGPONG, id="only-a-reduction"),
    pytest.param(signature(), replace(COOPERATIVE, scheduler="stream_k", split_k=4), id="split-k"),
    pytest.param(signature(), replace(COOPERATIVE, tile_shape=(256, 192, 64), epilogue_tile=(128, 64)), id="subtile"),
    pytest.param(
        signature(DType.E4M3),
        replace(COOPERATIVE, tile_shape=(128, 256, 128), kernel_schedule="cooperative_fast_accum"),
        id="fp8-fast",
    ),
    pytest.param(signature(DType.E4M3), replace(COOPERATIVE, tile_shape=(128, 256, 128)), id="fp8-wide"),
    pytest.param(signature(DType.E4M3), replace(COOPERATIVE, tile_shape=(256, 128, 64)), id="fp8-tall"),
    pytest.param(signature(inputs=(ROW, TILE), outputs=(D, SUM_OVER_M)), SWAPPED, id="swapped"),
    pytest.param(signature(DType.I8), replace(SWAPPED, tile_shape=(64, 8, 256)), id="swapped-int8"),
    pytest.param(
        signature(DType.F32, k_major=(True, False)), replace(SWAPPED, tile_shape=(64, 32, 64)), id="swapped-tf32"
    ),
    pytest.param(signature(), SPLIT, id="cluster-split"),
    pytest.param(signature(), replace(SPLIT, tile_shape=(64, 64, 128)), id="cluster-shares"),
    pytest.param(signature(), replace(SPLIT, swapped=False), id="cluster-split-of-rows"),
]


@pytest.mark.parametrize("value, config", LEGAL)
def test_legal_is_not_refused(value, config):
    assert reject_reason(value, config, SM90) is None


REFUSED = [
    pytest.param(signature(DType.BF16, DType.F16), COOPERATIVE, "bf16 by f16", id="mixed"),
    pytest.param(replace(signature(), math="simt"), COOPERATIVE, "tensor-core", id="simt"),
    pytest.param(signature(DType.I8, k_major=(True, False)), COOPERATIVE, "K contiguous", id="int8-layout"),
    pytest.param(signature(DType.F32, k_major=(True, False)), COOPERATIVE, "N contiguous", id="tf32-layout"),
    pytest.param(replace(signature(), b=Matrix(DType.BF16, True, 4)), COOPERATIVE, "B is aligned to 8", id="alignment"),
    pytest.param(replace(signature(), tile_alignment=4), COOPERATIVE, "aligned to 4 elements", id="tile-alignment"),
    pytest.param(signature(inputs=(Input(Kind.ROW, DType.F64),)), COOPERATIVE, "f64", id="f64"),
    pytest.param(signature(outputs=()), COOPERATIVE, "no output", id="no-output"),
    pytest.param(signature(), replace(COOPERATIVE, kernel_schedule="multistage"), "kernel_schedule", id="schedule"),
    pytest.param(signature(), replace(COOPERATIVE, kernel_schedule="pingpong_fast_accum"), "fp8", id="fast-bf16"),
    pytest.param(signature(), replace(PINGPONG, scheduler="stream_k"), "cooperative", id="stream-k-pingpong"),
    pytest.param(signature(), replace(COOPERATIVE, split_k=2), "stream_k", id="split-k-persistent"),
    pytest.param(signature(), replace(COOPERATIVE, tile_shape=(64, 256, 64)), "multiples of 128", id="tile-m"),
    pytest.param(signature(), replace(COOPERATIVE, tile_shape=(128, 72, 64)), "multiples of 16", id="tile-n"),
    pytest.param(signature(DType.F32), replace(PINGPONG, tile_shape=(64, 48, 32)), "multiples of 32", id="tf32-tile-n"),
    pytest.param(signature(DType.F32), replace(PINGPONG, tile_shape=(64, 112, 32)), "multiples of 32", id="tf32-112"),
    pytest.param(signature(), replace(COOPERATIVE, tile_shape=(128, 128, 24)), "multiples of 16", id="tile-k"),
    pytest.param(signature(), replace(COOPERATIVE, tile_shape=(256, 256, 64)), "registers", id="registers"),
    pytest.param(
        signature(DType.E4M3), replace(COOPERATIVE, tile_shape=(256, 192, 128)), "registers", id="fp8-registers"
    ),
    pytest.param(
        signature(DType.F32, k_major=(False, False)),
        replace(COOPERATIVE, tile_shape=(128, 128, 32)),
        "registers",
        id="tf32-transposed-registers",
    ),
    pytest.param(signature(), replace(COOPERATIVE, cluster_shape=(3, 1)), "powers of two", id="cluster"),
    pytest.param(signature(), replace(COOPERATIVE, epilogue_tile=(64, 32)), "share 128 rows", id="subtile-m"),
    pytest.param(signature(), replace(COOPERATIVE, epilogue_tile=(128, 96)), "divides", id="subtile-n"),
    pytest.param(
        signature(inputs=(TILE,)),
        replace(COOPERATIVE, tile_shape=(256, 192, 64), epilogue_tile=(128, 64)),
        "would spill",
        id="subtile-registers",
    ),
    pytest.param(signature(), replace(COOPERATIVE, stages=8), "shared memory", id="stages"),
    pytest.param(signature(), replace(SWAPPED, swapped=False), "multiples of 16", id="narrow"),
    pytest.param(signature(), replace(SWAPPED, tile_shape=(64, 24, 128)), "8, or multiples of 16", id="swapped-tile-n"),
    pytest.param(signature(), replace(SWAPPED, tile_shape=(32, 8, 128)), "D^T = B^T A^T", id="swapped-tile-m"),
    pytest.param(
        signature(DType.F32, k_major=(False, True)),
        replace(SWAPPED, tile_shape=(64, 32, 64)),
        "N contiguous",
        id="swapped-tf32-layout",
    ),
    pytest.param(
        signature(DType.E4M3), replace(SWAPPED, tile_shape=(64, 8, 256)), "exact sums every 128", id="swapped-fp8-k"
    ),
    pytest.param(signature(), replace(SPLIT, kernel_schedule="pingpong"), "single", id="cluster-split-pingpong"),
    pytest.param(signature(), replace(SPLIT, scheduler="stream_k"), "cooperative", id="single-stream-k"),
    pytest.param(signature(), replace(SPLIT, scheduler="persistent"), "cooperative", id="single-persistent"),
    pytest.param(signature(), replace(SPLIT, split_k=3), "1, 2, 4 or 8", id="cluster-of-3"),
    pytest.param(signature(), replace(SPLIT, cluster_shape=(2, 1)), "share one tile", id="cluster-split-cluster"),
    pytest.param(
        signature(),
        replace(SPLIT, tile_shape=(64, 128, 32), stages=2),
        "exchanges its sums in 32768",
        id="stages-too-small-for-sums",
    ),
    pytest.param(
        signature(DType.F32, k_major=(True, False)),
        replace(SPLIT, tile_shape=(64, 32, 64)),
        "M contiguous",
        id="cluster-split-tf32",
    ),
]


@pytest.mark.parametrize("value, config, reason", REFUSED)
def test_refusal_names_the_reason(value, config, reason):
    assert reason in reject_reason(value, config, SM90)


def test_other_families_and_archs_are_refused():
    assert "sm80" in reject_reason(signature(), GemmConfig("sm80", (128, 128, 32)), SM90)
    assert "sm89" in reject_reason(signature(), COOPERATIVE, arch_named("sm89"))


# ---- what is rendered


def test_run_time_values_do_not_change_the_skeleton():
    config = replace(COOPERATIVE, scheduler="stream_k")
    tuned = replace(config, swizzle=8, raster="N", split_k=4)
    assert render_skeleton(signature(), tuned, SM90) == render_skeleton(signature(), config, SM90)


def test_all_start_early_but_stream_k():
    """Its memory is cleared right ahead of it."""
    stream_k = replace(COOPERATIVE, scheduler="stream_k")
    texts = [render_skeleton(signature(), config, SM90) for config in (COOPERATIVE, PINGPONG, SWAPPED, SPLIT, stream_k)]
    assert ["#define CUTLASS_ENABLE_GDC_FOR_SM90\n" in text for text in texts] == [True, True, True, True, False]


def test_slices_of_a_cluster_are_compiled():
    text = render_skeleton(signature(), SPLIT.compiled(), SM90)
    vectors = sum(value.kind in (Kind.ROW, Kind.COL, Kind.SCALAR) for value in signature().inputs)
    assert f"gemmgen::ClusterSplitKernel<Mainloop, Epilogue, 4, {vectors}>" in text
    assert "dim3(4, 1, 1)" in text
    assert text == render_skeleton(signature(), replace(SPLIT, swizzle=8, raster="N").compiled(), SM90)


def test_swapping_exchanges_rows_and_columns_but_not_the_functor():
    value = signature(DType.E4M3, DType.E5M2, k_major=(True, False), inputs=(ROW, COL, *INDICES, TILE))
    view = value.swapped()
    assert (view.a, view.b) == (value.b, value.a)
    assert [x.kind for x in view.inputs] == [Kind.COL, Kind.ROW, Kind.COL_INDEX, Kind.ROW_INDEX, Kind.TILE]
    assert [x.dtype for x in view.inputs] == [x.dtype for x in value.inputs]
    assert view.swapped() == value


def test_swapped_tiles_have_m_contiguous():
    evt = lower_to_evt(signature(inputs=(TILE, TILE, ROW), outputs=(D, D)).swapped(), swapped=True)
    strides = "cute::_1{}, tma_stride(x.outputs[0].row_stride, x.n), tma_stride(x.outputs[0].batch_stride, x.l)"
    assert evt.d.stride == strides
    assert evt.loads[1].cpp_type.startswith("gemmgen::SwappedTileLoad")
    assert evt.loads[2].cpp_type.startswith("gemmgen::ColLoad")
    assert evt.stores[1].cpp_type.startswith("gemmgen::SwappedTileStore")


def test_functor_takes_the_accumulator_then_the_inputs():
    value = signature(DType.I8, inputs=(ROW, *INDICES), outputs=(D, Output(Kind.TILE, DType.I32)))
    text = render_skeleton(value, replace(COOPERATIVE, tile_shape=(128, 128, 128)), SM90)
    assert 'extern "C" __device__ float gemmgen_functor_0(int, float, int, int);' in text
    assert 'extern "C" __device__ int gemmgen_functor_1(int, float, int, int);' in text


def test_first_tiles_are_the_collectives_own():
    evt = lower_to_evt(signature(inputs=(TILE, TILE), outputs=(SUM_OVER_M, D, D)))
    assert [load.cpp_type.split("<")[0] for load in evt.loads] == [
        "cutlass::epilogue::fusion::Sm90SrcFetch",
        "gemmgen::TileLoad",
    ]
    assert evt.d_index == 1 and evt.d.ptr == "x.outputs[1].ptr"
    assert [store.cpp_type.split("<")[0] for store in evt.stores] == [
        "gemmgen::RowPartials",
        "gemmgen::StoreD",
        "gemmgen::TileStore",
    ]


def test_without_a_stored_tile_nothing_is_c_or_d():
    evt = lower_to_evt(signature(inputs=(TILE,), outputs=(MAX_OVER_N,)))
    assert (evt.c.element, evt.d.element, evt.d_index) == ("void", "void", -1)
    assert evt.loads[0].cpp_type.startswith("gemmgen::TileLoad")


def test_partial_counts_follow_the_reduced_mode():
    text = render_skeleton(signature(outputs=(D, SUM_OVER_M, MAX_OVER_N)), COOPERATIVE, SM90)
    assert "if (output == 1) { return cute::ceil_div(x->m, 128); }" in text
    assert "if (output == 2) { return cute::ceil_div(x->n, 256); }" in text


def test_partial_counts_of_the_swapped_problem_are_those_of_the_callers_axes():
    text = render_skeleton(signature(outputs=(D, SUM_OVER_M, MAX_OVER_N)), SWAPPED, SM90)
    assert "if (output == 1) { return cute::ceil_div(x->m, 8); }" in text
    assert "if (output == 2) { return cute::ceil_div(x->n, 64); }" in text
    assert "gemmgen::ColPartials" in text and "gemmgen::RowPartials" in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_renders_its_tags(name):
    config = replace(COOPERATIVE, kernel_schedule=name, tile_shape=(128, 128, 128))
    text = render_skeleton(signature(DType.E4M3), config, SM90)
    assert f"cutlass::gemm::{SCHEDULES[name].mainloop}>" in text
    assert f"cutlass::epilogue::{SCHEDULES[name].epilogue}>" in text


@pytest.mark.parametrize("tile, schedule, chunks", [
    ((128, 128), "cooperative", 1), ((128, 192), "cooperative", 2), ((128, 256), "cooperative", 4),
    ((256, 128), "cooperative", 2), ((64, 112), "pingpong", 1), ((64, 128), "pingpong", 1), ((128, 128), "pingpong", 2),
    ((64, 256), "single", 4),
])  # fmt: skip
def test_promotion_takes_the_widest_chunks_that_leave_registers(tile, schedule, chunks):
    config = replace(COOPERATIVE, tile_shape=(*tile, 128), kernel_schedule=schedule)
    assert promoted_chunks(config) == chunks


def test_only_exact_fp8_is_promoted():
    exact = replace(COOPERATIVE, tile_shape=(128, 192, 128))
    fast = replace(exact, kernel_schedule="cooperative_fast_accum")
    promoted = "gemmgen::PromotedMainloop<gemmgen::EdgeMainloop<WholeMainloop>, 2>"
    assert promoted in render_skeleton(signature(DType.E4M3), exact, SM90)
    assert "PromotedMainloop" not in render_skeleton(signature(DType.E4M3), fast, SM90)
    assert "PromotedMainloop" not in render_skeleton(signature(DType.I8), exact, SM90)


STANDARD_WIDTHS = (16, 32, 64, 96, 128, 192, 256)


@pytest.mark.parametrize("dtype, k", [(DType.BF16, 64), (DType.I8, 128)], ids=["bf16", "int8"])
@pytest.mark.parametrize("n", range(16, 257, 16))
def test_cute_is_asked_for_other_wgmmas_only_where_a_tile_needs_them(n, dtype, k):
    text = render_skeleton(signature(dtype), replace(PINGPONG, tile_shape=(64, n, k)), SM90)
    before_cute, rest = text.split('#include "gemmgen/sm90_kernel.hpp"')
    assert ("#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n" in before_cute) == (n not in STANDARD_WIDTHS)
    assert "EXTENDED_MMA_SHAPES" not in rest


def test_exact_fp8_takes_wgmmas_of_standard_widths_alone():
    exact = replace(PINGPONG, tile_shape=(64, 112, 128))
    fast = replace(exact, kernel_schedule="pingpong_fast_accum")
    assert "EXTENDED_MMA_SHAPES" not in render_skeleton(signature(DType.E4M3), exact, SM90)
    assert "EXTENDED_MMA_SHAPES" in render_skeleton(signature(DType.E4M3), fast, SM90)


# ---- what compiles

BUILT = [
    pytest.param(signature(inputs=(ROW, COL, TILE, SCALAR)), COOPERATIVE, id="row-col-tile-scalar"),
    pytest.param(signature(k_major=(False, False), inputs=INDICES, outputs=(D, D)), PINGPONG, id="mn-major-two-tiles"),
    pytest.param(signature(inputs=(TILE,), outputs=(SUM_OVER_M, MAX_OVER_N)), COOPERATIVE, id="only-reductions"),
    pytest.param(
        signature(inputs=(ROW, COL, TILE, TILE, SCALAR, *INDICES), outputs=(D, D, SUM_OVER_M, MAX_OVER_N)),
        SWAPPED,
        id="swapped",
    ),
    pytest.param(signature(DType.I8, inputs=(ROW, TILE)), SPLIT, id="swapped-cluster-split"),
    pytest.param(
        signature(DType.F32, k_major=(True, False)), replace(SWAPPED, tile_shape=(64, 32, 64)), id="swapped-tf32"
    ),
    pytest.param(
        signature(DType.E4M3, inputs=(ROW, COL, TILE, TILE, SCALAR), outputs=(D, D, SUM_OVER_M, MAX_OVER_N)),
        replace(COOPERATIVE, tile_shape=(128, 256, 128)),
        id="fp8-chunks-of-columns",
    ),
    pytest.param(
        signature(DType.E4M3, DType.E5M2, inputs=(ROW, COL)),
        replace(COOPERATIVE, tile_shape=(256, 128, 128), scheduler="stream_k"),
        id="fp8-chunks-of-rows-and-columns",
    ),
    pytest.param(
        signature(DType.E5M2, inputs=(ROW,)), replace(PINGPONG, tile_shape=(64, 112, 64)), id="fp8-in-one-chunk"
    ),
]


@pytest.mark.compile
@pytest.mark.parametrize("value, config", BUILT)
def test_builds_without_a_stack(value, config):
    skeleton = render_skeleton(value, config, SM90)
    (built,) = build([KernelSource(config.label, SM90, skeleton, functors(skeleton))])
    assert built.function == "gemmgen_kernel"
    assert built.stack_bytes == 0  # no spills, and no array that is indexed at run time


@functools.cache
def compiled(value: Signature, config: GemmConfig) -> Skeleton:
    return compile_skeleton(render_skeleton(value, config, SM90), SM90)


@functools.cache
def ptx(value: Signature, config: GemmConfig) -> str:
    """The PTX of a kernel without its functors."""
    binding, ltoir = nvjitlink(), compiled(value, config).ltoir
    linker = binding.create(3, [f"-arch=sm_{SM90.target}", "-lto", "-ptx"])
    binding.add_data(linker, binding.InputType.LTOIR, ltoir, len(ltoir), "skeleton")
    binding.complete(linker)
    text = bytearray(binding.get_linked_ptx_size(linker))
    binding.get_linked_ptx(linker, text)
    binding.destroy(linker)
    return text.decode(errors="replace")


WIDE = replace(COOPERATIVE, tile_shape=(128, 224, 64))
NARROW = replace(PINGPONG, tile_shape=(64, 112, 128))


@pytest.mark.compile
@pytest.mark.parametrize("value, config, wgmma", [
    pytest.param(signature(), WIDE, "m64n224k16", id="bf16"),
    pytest.param(signature(), replace(COOPERATIVE, tile_shape=(256, 160, 64)), "m64n160k16", id="bf16-160-registers"),
    pytest.param(signature(DType.I8), NARROW, "m64n112k32", id="int8"),
])  # fmt: skip
def test_wgmmas_are_as_wide_as_the_tile(value, config, wgmma):
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx(value, config))) == {wgmma}
    functor = compile_functor(functors(render_skeleton(value, config, SM90)), SM90, name="functor")
    linked = link({"skeleton": compiled(value, config).ltoir, "functor": functor}, SM90)  # refuses spills
    assert linked.stack_bytes == 0


@pytest.mark.compile
@pytest.mark.parametrize("value, config, loading_warps", [
    pytest.param(signature(inputs=()), WIDE, 1, id="cooperative"),
    pytest.param(signature(), WIDE, 2, id="vectors-of-the-epilogue"),
    pytest.param(signature(DType.I8), NARROW, 2, id="pingpong"),
    pytest.param(signature(inputs=(ROW, TILE)), PINGPONG, 2, id="tiles-of-the-epilogue"),
    pytest.param(signature(inputs=(ROW, TILE)), SPLIT, 1, id="cluster-split"),
])  # fmt: skip
def test_each_warp_that_loads_waits_for_the_kernel_ahead(value, config, loading_warps):
    """launch.hpp lets it start early. That the waits come first is for the GPU test to show."""
    text = ptx(value, config)
    assert text.count("griddepcontrol.wait") == loading_warps
    assert text.count("griddepcontrol.launch_dependents") >= 1
