"""The sm80 family: cp.async + mma.sync mainloops of CUTLASS 2.x around one epilogue of our own.

It serves sm80, sm86, sm89 and sm120, and on Hopper every operand that TMA cannot take, so it refuses no
shape, stride or alignment: where cp.async (4 bytes or more) cannot load, the mainloop stages through registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gemmgen.arch import Arch
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType
from gemmgen.errors import IllegalConfig
from gemmgen.signature import Input, Kind, Matrix, Output, Reduce, Signature
from gemmgen.templates import render

Shape = tuple[int, int, int]

_CP_ASYNC_BYTES = 4  # the least that cp.async moves
_VECTOR_BYTES = 16  # the widest access of a thread
_WARP = 32
_LEAST_TILE = 64  # elements that CUTLASS's layouts in shared memory need of an operand without contiguous K
_LEAST_WARP = 32

_VISITORS = {
    Kind.SCALAR: "ScalarBroadcast",
    Kind.ROW: "RowBroadcast",
    Kind.COL: "ColBroadcast",
    Kind.TILE: "AuxLoad",
    Kind.ROW_INDEX: "RowIndex",
    Kind.COL_INDEX: "ColIndex",
}
_REDUCTIONS = {Kind.ROW: "RowReduction", Kind.COL: "ColReduction"}
_PARTIAL_COUNTS = {
    Kind.ROW: "Launcher::grid_m(*args)",
    Kind.COL: "Launcher::grid_n(*args) * {}",
    Kind.TILE: "0",
}
_REDUCE_OPS = {Reduce.SUM: "Sum", Reduce.MAX: "Max", Reduce.MIN: "Min"}


@dataclass(frozen=True)
class _Math:
    """One kind of multiply-accumulate, and the (tile, warp, stages) that suit it, the most useful first."""

    operator_class: str
    instruction_shape: Shape
    math_operator: str
    accum: DType
    tiles: tuple[tuple[Shape, Shape, int], ...]
    register_tiles: tuple[tuple[Shape, Shape, int], ...] = ()  # for operands that are staged through registers


_TENSOR_16 = _Math(
    "OpClassTensorOp",
    (16, 8, 16),
    "cutlass::arch::OpMultiplyAdd",
    DType.F32,
    (
        ((128, 128, 32), (64, 64, 32), 4),
        ((256, 128, 32), (64, 64, 32), 3),
        ((128, 64, 32), (64, 32, 32), 4),
        ((64, 64, 32), (32, 32, 32), 4),
    ),
    (
        ((128, 128, 32), (32, 64, 32), 2),
        ((64, 64, 32), (32, 32, 32), 2),
    ),
)
_TENSOR_8_TILES = (
    ((128, 128, 64), (64, 64, 64), 4),
    ((256, 128, 64), (64, 64, 64), 3),
    ((128, 64, 64), (64, 32, 64), 4),
    ((64, 64, 64), (32, 32, 64), 4),
)
_TENSOR_8_REGISTER_TILES = (
    ((128, 128, 64), (32, 64, 64), 2),
    ((64, 64, 64), (32, 32, 64), 2),
)
_TENSOR_I8 = _Math(
    "OpClassTensorOp",
    (16, 8, 32),
    "cutlass::arch::OpMultiplyAddSaturate",
    DType.I32,
    _TENSOR_8_TILES,
    _TENSOR_8_REGISTER_TILES,
)
_TENSOR_F8 = _Math(
    "OpClassTensorOp",
    (16, 8, 32),
    "gemmgen::sm80::PromotedMultiplyAdd",
    DType.F32,
    (
        ((128, 128, 64), (32, 64, 64), 4),
        ((128, 64, 64), (32, 32, 64), 4),
        ((64, 64, 64), (32, 32, 64), 4),
    ),
    (
        ((128, 64, 64), (32, 32, 64), 2),
        ((64, 64, 64), (32, 32, 64), 2),
    ),
)
_TF32 = _Math(
    "OpClassTensorOp",
    (16, 8, 8),
    "cutlass::arch::OpMultiplyAdd",
    DType.F32,
    (
        ((128, 128, 16), (64, 64, 16), 4),
        ((128, 64, 16), (64, 32, 16), 4),
        ((64, 64, 16), (32, 32, 16), 4),
    ),
)
_SIMT = _Math(
    "OpClassSimt",
    (1, 1, 1),
    "cutlass::arch::OpMultiplyAdd",
    DType.F32,
    (
        ((128, 128, 8), (32, 64, 8), 4),
        ((128, 64, 8), (64, 32, 8), 4),
        ((64, 64, 8), (32, 32, 8), 4),
    ),
)
_F8 = (DType.E4M3, DType.E5M2)


def _math_of(signature: Signature) -> _Math | None:
    dtypes = (signature.a.dtype, signature.b.dtype)
    if signature.math == "tensor" and dtypes in ((DType.BF16,) * 2, (DType.F16,) * 2):
        return _TENSOR_16
    if signature.math == "tensor" and dtypes == (DType.I8, DType.I8):
        return _TENSOR_I8
    if signature.math == "tensor" and dtypes[0] in _F8 and dtypes[1] in _F8:
        return _TENSOR_F8
    if dtypes == (DType.F32, DType.F32):
        return {"tf32": _TF32, "simt": _SIMT}.get(signature.math)
    return None


def render_skeleton(signature: Signature, config: GemmConfig, arch: Arch) -> str:
    """The CUDA text of the skeleton: both halves of one kernel with `signature` and `config` for `arch`.

    Raises:
        IllegalConfig: `reject_reason` has a reason.
    """
    if reason := reject_reason(signature, config, arch):
        raise IllegalConfig(f"{config.label} on {arch.name}: {reason}")
    math_ = _math_of(signature)
    assert math_ and config.warp_shape and config.stages
    vector = _vector(signature)
    row_partials = max(1, config.tile_shape[1] // vector // _WARP)
    return render(
        "sm80.cu.jinja",
        title=f"{config.label} for {arch.name}",
        a=_matrix(signature, signature.a, "RowMajor", "ColumnMajor"),
        b=_matrix(signature, signature.b, "ColumnMajor", "RowMajor"),
        accum=signature.accum.cutlass,
        mainloop="gemmgen::sm80::StridedMma" if _is_strided(signature) else "cutlass::gemm::threadblock::DefaultMma",
        operator_class=math_.operator_class,
        math_operator=math_.math_operator,
        stage="StageSimt" if math_ is _SIMT else "StageTensorOp",
        tile_shape=_shape(config.tile_shape),
        warp_shape=_shape(config.warp_shape),
        instruction_shape=_shape(math_.instruction_shape),
        tile_m=config.tile_shape[0],
        tile_n=config.tile_shape[1],
        tile_k=config.tile_shape[2],
        stages=config.stages,
        threads=_threads(config),
        splits_k=_bool(config.scheduler == "stream_k"),
        vector=vector,
        slots=_slots(signature, config, vector),
        smem_bytes=_smem_bytes(signature, config),
        inputs=[_input(i) for i in signature.inputs],
        outputs=[_output(index, o, row_partials) for index, o in enumerate(signature.outputs)],
        functor_parameters=", ".join([signature.accum.cutlass, *map(_parameter, signature.inputs)]),
        functor_arguments=", ".join(["accum[i]", *(f"in{j}.value(slot, i)" for j in range(len(signature.inputs)))]),
    )


def reject_reason(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    """Why `config` cannot run `signature` on `arch`, or None when it can."""
    math_ = _math_of(signature)
    if "sm80" not in arch.families or config.family != "sm80":
        return f"{arch.name} has no {config.family} templates in this family"
    if math_ is None:
        return f"no {signature.math} mainloop multiplies {signature.a.dtype!r} by {signature.b.dtype!r}"
    if math_ is _TENSOR_F8 and not arch.has_fp8_mma:
        return f"{arch.name} has no fp8 tensor cores: convert A and B to bf16"
    if signature.accum is not math_.accum:
        return f"{signature.a.dtype!r} inputs accumulate in {math_.accum!r}, not {signature.accum!r}"
    return (
        _reject_shape(config, math_) or _reject_stages(signature, config) or _reject_epilogue(signature, config, arch)
    )


def legal_configs(signature: Signature, arch: Arch) -> list[GemmConfig]:
    """Configs worth trying for `signature` on `arch`, the best guess for a large problem first, split-K last."""
    math_ = _math_of(signature)
    if math_ is None:
        return []
    tiles = math_.register_tiles if _needs_registers(signature) else math_.tiles
    configs = [_config(*tile) for tile in tiles]
    configs += [replace(config, scheduler="stream_k", split_k=4) for config in (configs[0], configs[-1])]
    return [config for config in configs if reject_reason(signature, config, arch) is None]


def _config(tile_shape: Shape, warp_shape: Shape, stages: int) -> GemmConfig:
    return GemmConfig("sm80", tile_shape, kernel_schedule="multistage", stages=stages, warp_shape=warp_shape, swizzle=4)


def _reject_shape(config: GemmConfig, math_: _Math) -> str | None:
    tile, warp, instruction = config.tile_shape, config.warp_shape, math_.instruction_shape
    if warp is None or config.stages is None:
        return "sm80 needs warp_shape and stages"
    if config.cluster_shape != (1, 1) or config.epilogue_tile:
        return "sm80 has no clusters and no epilogue tile"
    if config.swapped:
        return "sm80 does not swap A and B"
    if config.scheduler not in ("persistent", "stream_k"):
        return f"sm80 has no scheduler {config.scheduler!r}; split-K is 'stream_k'"
    if config.split_k > 1 and config.scheduler == "persistent":
        return "split_k needs the scheduler stream_k"
    if any(extent & (extent - 1) for extent in (*tile, *warp)):
        return f"tile {tile} and warp {warp} must be powers of two"
    if warp[0] > tile[0] or warp[1] > tile[1] or warp[2] != tile[2]:
        return f"warps of {warp} do not divide the tile {tile}, or split its K"
    if min(tile[:2]) < _LEAST_TILE or min(warp[:2]) < _LEAST_WARP:
        return f"tiles are {_LEAST_TILE} or more along M and N and warps {_LEAST_WARP}, not {tile} and {warp}"
    if tile[2] < 2 * instruction[2]:
        return f"tile K {tile[2]} is less than two instructions of {instruction[2]}"
    if _threads(config) > 1024:
        return f"{_threads(config)} threads are more than a CTA may have"
    return None


def _reject_stages(signature: Signature, config: GemmConfig) -> str | None:
    assert config.stages is not None
    if _needs_registers(signature) and config.stages != 2:
        return f"cp.async moves {_CP_ASYNC_BYTES} bytes or more: these operands need stages=2, not {config.stages}"
    least = 3 if signature.a.dtype is DType.F32 else 2
    if config.stages < least:
        return f"a {signature.math} mainloop of {signature.a.dtype!r} has {least} stages or more"
    return None


def _reject_epilogue(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    vector = _vector(signature)
    if config.tile_shape[1] > _threads(config) * vector:
        return f"{_threads(config)} threads of {vector} columns do not cover a tile row of {config.tile_shape[1]}"
    need = _smem_bytes(signature, config)
    if need > arch.smem_bytes:
        return (
            f"needs {need} B of shared memory, {arch.name} has {arch.smem_bytes} B: take a smaller tile or fewer stages"
        )
    return None


def _smem_bytes(signature: Signature, config: GemmConfig) -> int:
    """Shared memory of the kernel; its device half asserts that this is enough."""
    epilogue = _epilogue_smem_bytes(config, _vector(signature))
    return max(_mainloop_smem_bytes(signature, config), epilogue) + _VECTOR_BYTES


def _mainloop_smem_bytes(signature: Signature, config: GemmConfig) -> int:
    m, n, k = config.tile_shape
    assert config.stages is not None
    return config.stages * k * (m * signature.a.dtype.bytes + n * signature.b.dtype.bytes)


def _epilogue_smem_bytes(config: GemmConfig, vector: int) -> int:
    m, n, _ = config.tile_shape
    return 4 * (m * (n + 8) + _threads(config) * vector)


def _threads(config: GemmConfig) -> int:
    assert config.warp_shape is not None
    return config.tile_shape[0] // config.warp_shape[0] * (config.tile_shape[1] // config.warp_shape[1]) * _WARP


def _tile_dtypes(signature: Signature) -> list[DType]:
    inputs = [i.dtype for i in signature.inputs if i.kind is Kind.TILE]
    return inputs + [o.dtype for o in signature.outputs if o.kind is Kind.TILE]


def _vector(signature: Signature) -> int:
    """Columns of the tile that a thread owns: one access of at most 16 bytes in every TILE tensor."""
    dtypes = _tile_dtypes(signature)
    if not dtypes:
        return 4
    widest = max(dtype.bytes for dtype in dtypes)
    return math.gcd(signature.tile_alignment, min(8, _VECTOR_BYTES // widest))


def _slots(signature: Signature, config: GemmConfig, vector: int) -> int:
    """Rows whose loads a thread has in flight: enough to cover the latency of TILE inputs."""
    tiles = sum(i.kind is Kind.TILE for i in signature.inputs)
    values = {0: 8, 1: 32, 2: 16}.get(tiles, 8)
    steps = config.tile_shape[0] * config.tile_shape[1] // vector // _threads(config)
    return min(max(1, values // vector), steps)


def _alignment(signature: Signature, matrix: Matrix) -> int:
    """Elements that one load of the mainloop takes."""
    if signature.math == "simt" or (_is_strided(signature) and not matrix.k_major):
        return 1
    return math.gcd(matrix.alignment, _VECTOR_BYTES // matrix.dtype.bytes)


def _is_strided(signature: Signature) -> bool:
    """8-bit mma.sync reads both operands along K: others are gathered element by element."""
    return signature.a.dtype.bits == 8 and not (signature.a.k_major and signature.b.k_major)


def _needs_registers(signature: Signature) -> bool:
    """Whether cp.async cannot load an operand, so that the mainloop stages through registers."""
    matrices = (signature.a, signature.b)
    return any(_alignment(signature, x) * x.dtype.bytes < _CP_ASYNC_BYTES for x in matrices)


def _shape(shape: Shape) -> str:
    return ", ".join(map(str, shape))


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _matrix(signature: Signature, matrix: Matrix, k_major_layout: str, mn_major_layout: str) -> dict[str, object]:
    layout = k_major_layout if matrix.k_major else mn_major_layout
    return {
        "element": matrix.dtype.cutlass,
        "layout": f"cutlass::layout::{layout}",
        "alignment": _alignment(signature, matrix),
        "bytes": matrix.dtype.bytes,
        "k_major": _bool(matrix.k_major),
    }


def _input(value: Input) -> dict[str, str]:
    return {"node": f"gemmgen::sm80::{_VISITORS[value.kind]}<{value.dtype.cutlass}, Map>"}


def _parameter(value: Input) -> str:
    return "int32_t" if value.kind in (Kind.ROW_INDEX, Kind.COL_INDEX) else "float"


def _output(index: int, output: Output, row_partials: int) -> dict[str, object]:
    functor_type = "int32_t" if output.dtype is DType.I32 and output.reduce is None else "float"
    if output.reduce is None:
        node = f"AuxStore<{output.dtype.cutlass}, {functor_type}, Map>"
    else:
        node = f"{_REDUCTIONS[output.kind]}<gemmgen::sm80::{_REDUCE_OPS[output.reduce]}, Map>"
    return {
        "index": index,
        "node": f"gemmgen::sm80::{node}",
        "functor_type": functor_type,
        "is_reduction": output.reduce is not None,
        "partial_count": _PARTIAL_COUNTS[output.kind].format(row_partials),
    }
