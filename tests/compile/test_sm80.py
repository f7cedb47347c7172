"""The sm80 family: what it refuses and why, what it renders, and that nvcc and nvJitLink accept it without a spill."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gemmgen.arch import ARCHS, arch_named
from gemmgen.dtypes import DType
from gemmgen.errors import IllegalConfig
from gemmgen.jit.build import build
from gemmgen.lower.sm80 import legal_configs, reject_reason, render_skeleton
from gemmgen.signature import Input, Kind, Matrix, Output, Reduce, Signature
from gemmgen.source import KernelSource

SM80, SM86, SM89, SM90, SM120 = (arch_named(name) for name in ("sm80", "sm86", "sm89", "sm90", "sm120"))
ROW = Input(Kind.ROW, DType.BF16)
D = Output(Kind.TILE, DType.BF16)


def signature(
    a: DType = DType.BF16,
    b: DType | None = None,
    *,
    k_major: tuple[bool, bool] = (True, True),
    alignment: tuple[int, int] = (8, 8),
    math: str = "tensor",
    inputs: tuple[Input, ...] = (ROW,),
    outputs: tuple[Output, ...] = (D,),
    tile_alignment: int = 8,
) -> Signature:
    return Signature(
        a=Matrix(a, k_major[0], alignment[0]),
        b=Matrix(b or a, k_major[1], alignment[1]),
        accum=DType.I32 if a is DType.I8 else DType.F32,
        math=math,
        inputs=inputs,
        outputs=outputs,
        tile_alignment=tile_alignment,
    )


def first_config(value: Signature, arch=SM90):
    return legal_configs(value, arch)[0]


def functor(value: Signature) -> str:
    """A functor for each output: the sum of everything that it is given."""
    types = ["int" if i.kind in (Kind.ROW_INDEX, Kind.COL_INDEX) else "float" for i in value.inputs]
    accum = "int" if value.accum is DType.I32 else "float"
    parameters = ", ".join([f"{accum} accum", *(f"{t} in{j}" for j, t in enumerate(types))])
    total = " + ".join(["accum", *(f"in{j}" for j in range(len(types)))])
    returned = ["int" if o.dtype is DType.I32 and o.reduce is None else "float" for o in value.outputs]
    return "".join(
        f'extern "C" __device__ {t} gemmgen_functor_{i}({parameters}) {{ return {total}; }}\n'
        for i, t in enumerate(returned)
    )


# ---- what is refused

MAINLOOPS = [
    pytest.param(DType.BF16, DType.BF16, "tensor", id="bf16"),
    pytest.param(DType.F16, DType.F16, "tensor", id="f16"),
    pytest.param(DType.F32, DType.F32, "tf32", id="tf32"),
    pytest.param(DType.F32, DType.F32, "simt", id="simt"),
    pytest.param(DType.I8, DType.I8, "tensor", id="i8"),
    pytest.param(DType.E4M3, DType.E5M2, "tensor", id="f8"),
]


@pytest.mark.parametrize("a, b, math", MAINLOOPS)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_no_layout_or_alignment_is_refused(a, b, math, arch):
    for *k_major, a_alignment, b_alignment, columns in itertools.product(
        (True, False), (True, False), *[(16, 4, 2, 1)] * 3
    ):
        value = signature(
            a, b, k_major=tuple(k_major), alignment=(a_alignment, b_alignment), math=math, tile_alignment=columns
        )
        configs = legal_configs(value, arch)
        assert bool(configs) == (a is not DType.E4M3 or arch.has_fp8_mma), value
        for config in configs:
            assert render_skeleton(value, config, arch)


def test_cp_async_needs_four_bytes():
    config = first_config(signature())
    for alignment in ((1, 8), (8, 1)):
        assert "need stages=2, not 4" in reject_reason(signature(alignment=alignment), config, SM90)
    assert reject_reason(signature(alignment=(2, 8)), config, SM90) is None
    assert first_config(signature(alignment=(1, 8))).stages == 2


def test_fp32_has_no_register_staged_mainloop():
    for math in ("tf32", "simt"):
        value = signature(DType.F32, math=math)
        config = replace(first_config(value), stages=2)
        assert f"a {math} mainloop of f32 has 3 stages or more" in reject_reason(value, config, SM90)


def test_fp8_needs_its_tensor_cores():
    value = signature(DType.E4M3)
    assert "sm80 has no fp8 tensor cores" in reject_reason(value, first_config(value, SM89), SM80)


def test_a_tile_must_fit_shared_memory():
    config = next(c for c in legal_configs(signature(), SM80) if c.tile_shape[0] == 256)
    assert "sm89 has 101376 B: take a smaller tile" in reject_reason(signature(), config, SM89)


@pytest.mark.parametrize(
    "change, reason",
    [
        pytest.param({"family": "sm90"}, "no sm90 templates in this family", id="family"),
        pytest.param({"warp_shape": None}, "needs warp_shape", id="no-warp-shape"),
        pytest.param({"cluster_shape": (2, 1)}, "no clusters", id="cluster"),
        pytest.param({"tile_shape": (96, 128, 32)}, "powers of two", id="not-a-power-of-two"),
        pytest.param({"warp_shape": (64, 64, 16)}, "split its K", id="k-of-a-warp"),
        pytest.param({"warp_shape": (64, 16, 32)}, "and warps 32, not", id="small-warp"),
        pytest.param(
            {"tile_shape": (64, 64, 16), "warp_shape": (32, 32, 16)}, "less than two instructions", id="short-k"
        ),
        pytest.param(
            {"tile_shape": (256, 256, 32), "warp_shape": (32, 32, 32)},
            "more than a CTA may have",
            id="too-many-threads",
        ),
    ],
)
def test_an_illegal_config_is_refused_with_the_reason(change, reason):
    config = replace(first_config(signature()), **change)
    assert reason in reject_reason(signature(), config, SM90)
    with pytest.raises(IllegalConfig, match="sm90: "):
        render_skeleton(signature(), config, SM90)


def test_narrow_accesses_must_cover_a_row_of_the_tile():
    config = replace(first_config(signature()), tile_shape=(64, 256, 32), warp_shape=(64, 128, 32))
    assert "do not cover a tile row of 256" in reject_reason(signature(tile_alignment=1), config, SM90)


def test_other_arithmetic_is_refused():
    config = first_config(signature())
    assert "multiplies f64 by f64" in reject_reason(signature(DType.F64, math="simt"), config, SM90)
    assert "multiplies bf16 by f16" in reject_reason(signature(DType.BF16, DType.F16), config, SM90)
    assert "accumulate in f32, not i32" in reject_reason(replace(signature(), accum=DType.I32), config, SM90)


# ---- what is rendered


def rendered(value: Signature, arch=SM90) -> str:
    return render_skeleton(value, first_config(value, arch), arch)


def test_functors_take_accum_and_every_input_in_order():
    inputs = (ROW, Input(Kind.ROW_INDEX, DType.I32), Input(Kind.SCALAR, DType.F32), Input(Kind.COL_INDEX, DType.I32))
    text = rendered(signature(inputs=inputs))
    assert 'extern "C" __device__ float gemmgen_functor_0(float, float, int32_t, float, int32_t);' in text


def test_an_i32_output_of_int8_inputs_never_passes_through_float():
    text = rendered(signature(DType.I8, outputs=(Output(Kind.TILE, DType.I32), D)))
    assert 'extern "C" __device__ int32_t gemmgen_functor_0(int32_t, float);' in text
    assert "AuxStore<int32_t, int32_t, Map> out0" in text
    assert 'extern "C" __device__ float gemmgen_functor_1(int32_t, float);' in text


def test_reductions_report_their_partials():
    outputs = (Output(Kind.ROW, DType.F32, Reduce.SUM), Output(Kind.COL, DType.F32, Reduce.MAX))
    text = rendered(signature(outputs=outputs, tile_alignment=1))
    assert "AuxStore" not in text
    assert "RowReduction<gemmgen::sm80::Sum, Map> out0" in text
    assert "case 0: return int(Launcher::grid_m(*args));" in text
    assert "case 1: return int(Launcher::grid_n(*args) * 1);" in text
    scalar_columns = rendered(signature(outputs=(*outputs, D), tile_alignment=1))
    assert "case 1: return int(Launcher::grid_n(*args) * 4);" in scalar_columns  # 128 columns are 4 warps wide


def test_the_launcher_includes_no_cutlass():
    launcher = rendered(signature()).split("#else")[1]
    assert "cutlass" not in launcher and "Mma" not in launcher


def test_run_time_values_do_not_change_the_text():
    config = first_config(signature())
    for other in (replace(config, swizzle=8), replace(config, raster="N"), config.compiled()):
        assert render_skeleton(signature(), other, SM90) == render_skeleton(signature(), config, SM90)


# ---- what compiles

EVERY_INPUT = (
    ROW,
    Input(Kind.COL, DType.F32),
    Input(Kind.SCALAR, DType.F32),
    Input(Kind.TILE, DType.BF16),
    Input(Kind.ROW_INDEX, DType.I32),
    Input(Kind.COL_INDEX, DType.I32),
    Input(Kind.ROW, DType.BOOL),
)
EVERY_OUTPUT = (
    *(Output(Kind.TILE, t) for t in (DType.BF16, DType.F32, DType.E4M3, DType.I8, DType.I32)),
    Output(Kind.ROW, DType.F32, Reduce.SUM),
    Output(Kind.COL, DType.F32, Reduce.MAX),
    Output(Kind.COL, DType.F32, Reduce.MIN),
)
COMPILED = [
    pytest.param(signature(), SM90, id="bf16"),
    pytest.param(signature(), SM80, id="bf16-sm80"),
    pytest.param(signature(), SM86, id="bf16-sm86"),
    pytest.param(signature(), SM120, id="bf16-sm120"),
    pytest.param(signature(DType.E4M3, alignment=(16, 16)), SM120, id="f8-sm120"),
    pytest.param(signature(inputs=EVERY_INPUT, outputs=EVERY_OUTPUT, tile_alignment=4), SM90, id="every-visitor"),
    pytest.param(signature(DType.F16, k_major=(False, True), alignment=(1, 8), tile_alignment=1), SM90, id="f16-odd"),
    pytest.param(signature(DType.F32, math="tf32", k_major=(False, False), alignment=(1, 4)), SM90, id="tf32"),
    pytest.param(signature(DType.F32, math="simt", k_major=(True, False), alignment=(1, 1)), SM90, id="simt"),
    pytest.param(
        signature(DType.I8, k_major=(False, False), outputs=(Output(Kind.TILE, DType.I32),)), SM90, id="i8-gathered"
    ),
    pytest.param(signature(DType.E4M3, DType.E5M2, alignment=(16, 16)), SM89, id="f8-sm89"),
    pytest.param(signature(DType.E4M3, alignment=(1, 1)), SM90, id="f8-odd"),
]


@pytest.mark.compile
@pytest.mark.parametrize("value, arch", COMPILED)
def test_it_compiles_without_a_spill(value, arch):
    source = KernelSource("sm80_test", arch, rendered(value, arch), functor(value))
    (kernel,) = build([source])
    assert kernel.stack_bytes == 0


@pytest.mark.compile
def test_split_k_compiles_without_a_spill():
    value = signature(inputs=(ROW, Input(Kind.TILE, DType.BF16)))
    config = next(c for c in legal_configs(value, SM90) if c.scheduler == "stream_k")
    (kernel,) = build([KernelSource("sm80_split_k", SM90, render_skeleton(value, config, SM90), functor(value))])
    assert kernel.stack_bytes == 0
