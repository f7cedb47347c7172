"""SM90: CUTLASS 3.x collectives (TMA, WGMMA, persistent kernels) around the functors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gemmgen.arch import ARCHS, Arch
from gemmgen.config import CLUSTER_SPLIT, GemmConfig
from gemmgen.dtypes import DType
from gemmgen.lower.evt import EvtTree, Functor, Operand, Visitor
from gemmgen.signature import Input, Kind, Matrix, Output, Reduce, Signature
from gemmgen.templates import render

TMA_BYTES = 16  # alignment that TMA needs of addresses and strides
MAX_CLUSTER_SIZE = 8  # portable
MIN_STAGES = 2
LINE_BYTES = 128  # of memory, and the widest swizzle of shared memory
MOST_EPILOGUE_COLUMNS = 64  # as far as a thread has registers for
NARROW_COLUMNS = 32  # of an epilogue tile of CUTLASS's choice
SWIZZLE_BYTES = 1024  # alignment of what is swizzled
PIPELINE_BYTES = 256  # enough for the barriers of the epilogue's loads, and for what alignment takes
BARRIER_BYTES = 16  # of a stage
MAX_TRANSPOSED_TF32_REGISTERS = 32  # the consumers transpose B on the way, which takes the rest
EXACT_SUM_EVERY_K = 128  # fp8: 4 WGMMAs in the tensor core's own precision, then an fp32 addition
MAX_ACCUM_REGISTERS = 192  # per thread; more leave too few for the epilogue, and the kernel would spill
CUTE_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)  # of the WGMMAs that CuTe knows unasked
PROMOTED_WIDTHS = (128, 96, 64)  # of a part of a tile; a narrower WGMMA takes longer to read A than to multiply it


@dataclass(frozen=True)
class Schedule:
    """A `kernel_schedule`: its CUTLASS tags, and how its warpgroups share a CTA tile.

    Attributes:
        mainloop, epilogue: CUTLASS schedule tags.
        kernel_header: CUTLASS header of the kernel layer.
        threads: threads that hold one accumulator tile.
        is_fast_accum: fp8 accumulates in the tensor core's own precision.
        schedulers: the `scheduler`s that go with it.
    """

    mainloop: str
    epilogue: str
    kernel_header: str
    threads: int
    is_fast_accum: bool = False
    schedulers: tuple[str, ...] = ("persistent",)

    @property
    def epilogue_m(self) -> int:
        """Rows of an epilogue tile: 64 per warpgroup that works on it."""
        return self.threads // 2


_KERNEL_HEADER = "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_"
_COOPERATIVE = ("TmaWarpSpecializedCooperative", _KERNEL_HEADER + "cooperative.hpp", 256)
_PINGPONG = ("TmaWarpSpecialized", _KERNEL_HEADER + "pingpong.hpp", 128)
_SINGLE = ("TmaWarpSpecialized", "gemmgen/sm90_cluster_split.hpp", 128)
_ANY_SHARE = ("persistent", "stream_k")

SCHEDULES = {
    "cooperative": Schedule("KernelTmaWarpSpecializedCooperative", *_COOPERATIVE, schedulers=_ANY_SHARE),
    "pingpong": Schedule("KernelTmaWarpSpecializedPingpong", *_PINGPONG),
    "cooperative_fast_accum": Schedule(
        "KernelTmaWarpSpecializedCooperativeFP8FastAccum", *_COOPERATIVE, True, schedulers=_ANY_SHARE
    ),
    "pingpong_fast_accum": Schedule("KernelTmaWarpSpecializedPingpongFP8FastAccum", *_PINGPONG, True),
    "single": Schedule("KernelTmaWarpSpecialized", *_SINGLE, schedulers=(CLUSTER_SPLIT,)),
    "single_fast_accum": Schedule("KernelTmaWarpSpecializedFP8FastAccum", *_SINGLE, True, schedulers=(CLUSTER_SPLIT,)),
}
SCHEDULERS = {
    "persistent": "gemmgen::GroupedTiles",
    "stream_k": "cutlass::gemm::StreamKScheduler",
    CLUSTER_SPLIT: "",  # a kernel of its own
}
FP8 = (DType.E4M3, DType.E5M2)
FLOATS_16_BIT = (DType.BF16, DType.F16)
EPILOGUE_DTYPES = (DType.F32, DType.BF16, DType.F16, DType.E4M3, DType.E5M2, DType.I8, DType.I32, DType.BOOL)
REDUCERS = {Reduce.SUM: "gemmgen::Sum", Reduce.MAX: "gemmgen::Max", Reduce.MIN: "gemmgen::Min"}


def render_skeleton(signature: Signature, config: GemmConfig, arch: Arch) -> str:
    """The CUDA text of the skeleton; compile it for `arch.target`, once plain and once with GEMMGEN_LAUNCHER.

    `reject_reason(signature, config, arch)` must be None.
    """
    schedule = SCHEDULES[config.kernel_schedule]
    tile_m, tile_n, tile_k = config.tile_shape
    computed = signature.swapped() if config.swapped else signature
    vectors = _vectors(computed)
    by_warp = stores_by_warp(signature, config)
    return render(
        "sm90.cu.jinja",
        **collective_values(signature, config, by_warp),
        headers=_headers(signature, config),
        stores_by_warp=by_warp,
        epilogue_shape="SwappedEpilogueShape" if config.swapped else "EpilogueShape",
        # CUTLASS 4.2's stream-K does not compile with it, and its counters are cleared between it and the kernel ahead
        starts_early=config.scheduler != "stream_k",
        extended_mma_shapes=_takes_extended_mma(signature, config),
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        share_n=share_n(config),
        epilogue_tile=epilogue_tile(config.epilogue_tile or default_epilogue_tile(signature, config)),
        epilogue_schedule=schedule.epilogue,
        kernel_schedule=schedule.mainloop,
        loads_edges=not _takes_a_from_registers(computed),
        promoted_chunks=promoted_chunks(config) if is_promoted(signature, config) else 0,
        stages=stage_count(config, by_warp),
        scheduler=SCHEDULERS[config.scheduler],
        cluster_split=config.split_k if config.scheduler == CLUSTER_SPLIT else 0,
        vector_count=len(vectors),
        argument_statements=_argument_statements(config, vectors),
    )


def collective_values(signature: Signature, config: GemmConfig, is_staged: bool = False) -> dict[str, object]:
    """What `collectives.cu.jinja` needs, whatever the arch. `is_staged`: see `lower_to_evt`."""
    cluster_m, cluster_n = config.cluster_shape
    summary = _summary(signature)
    if config.swapped:
        signature = signature.swapped()
    return {
        "label": config.label,
        "summary": summary,
        "cluster_m": cluster_m,
        "cluster_n": cluster_n,
        "accum": signature.accum.cutlass,
        "evt": lower_to_evt(signature, config.swapped, is_staged),
        "problem": "gemmgen::swapped(*x)" if config.swapped else "*x",
        "a": _matrix(signature.a, "a", "x.m", "RowMajor", "ColumnMajor"),
        "b": _matrix(signature.b, "b", "x.n", "ColumnMajor", "RowMajor"),
        "tma_tensors": _tma_tensors(signature, config.swapped),
        "partials": _partials(signature, config),
    }


def lower_to_evt(signature: Signature, swapped: bool = False, is_staged: bool = False) -> EvtTree:
    """The epilogue of `signature` as visitors: a load per input, a functor and a store per output.

    Args:
        swapped: the signature is that of the swapped problem, whose TILEs have M contiguous.
        is_staged: vectors and numbers are brought to shared memory ahead of the epilogue.
    """
    layout = TileLayout(swapped)
    c_index, d_index = _c_index(signature), _d_index(signature)
    return EvtTree(
        c=layout.operand(signature.inputs[c_index] if c_index >= 0 else None, f"x.inputs[{c_index}]"),
        d=layout.operand(signature.outputs[d_index] if d_index >= 0 else None, f"x.outputs[{d_index}]"),
        d_index=d_index,
        loads=tuple(_load(i, value, i == c_index, layout, is_staged) for i, value in enumerate(signature.inputs)),
        functors=tuple(_functor(i, signature) for i in range(len(signature.outputs))),
        stores=tuple(_store(i, value, i == d_index, layout) for i, value in enumerate(signature.outputs)),
    )


@dataclass(frozen=True)
class TileLayout:
    """How TILEs lie in memory: N contiguous, or M in the swapped problem."""

    swapped: bool

    @property
    def prefix(self) -> str:
        """What the names of the visitors begin with in C++."""
        return "gemmgen::Swapped" if self.swapped else "gemmgen::"

    @property
    def rows(self) -> str:
        """C++ expression of how often `row_stride` is stepped."""
        return "x.n" if self.swapped else "x.m"

    def stride(self, where: str) -> str:
        """C++ initialiser of the strides (M, N, L) of a tensor."""
        row, batch = f"tma_stride({where}.row_stride, {self.rows})", f"tma_stride({where}.batch_stride, x.l)"
        return f"cute::_1{{}}, {row}, {batch}" if self.swapped else f"{row}, cute::_1{{}}, {batch}"

    def operand(self, value: Input | Output | None, where: str) -> Operand:
        """A tensor as the collective's C or D; None for no tensor."""
        if value is None:
            return Operand("void", "nullptr", "cute::_1{}, 0, 0" if self.swapped else "0, cute::_1{}, 0")
        return Operand(element(value.dtype), f"{where}.ptr", self.stride(where))


# Legality

Rule = Callable[[Signature, GemmConfig, Arch], "str | None"]


def reject_reason(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    """Why `config` cannot run `signature` on `arch` with this family, or None when it can."""
    if "sm90" not in arch.families or config.family != "sm90":
        return f"the sm90 family does not run {config.family} configs on {arch.name}"
    if reason := _first_reason((_reject_types, reject_alignment, reject_operands), signature, config, arch):
        return reason
    rules = (_reject_layout, _reject_schedule, _reject_tile, _reject_subtile, _reject_stages)
    if not config.swapped:
        return _first_reason(rules, signature, config, arch)
    reason = _first_reason(rules, signature.swapped(), config, arch)
    return f"of the swapped problem, D^T = B^T A^T: {reason}" if reason else None


def _first_reason(rules: Sequence[Rule], signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    reasons = (rule(signature, config, arch) for rule in rules)
    return next((reason for reason in reasons if reason), None)


def _reject_types(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    a, b = signature.a.dtype, signature.b.dtype
    if signature.math == "simt":
        return "the sm90 family has tensor-core mainloops only"
    if not (a is b or (a in FP8 and b in FP8)):
        return f"no WGMMA multiplies {a.text} by {b.text}"
    if a is DType.F32 and signature.math != "tf32":
        return "f32 inputs run as tf32 only"
    if a not in (*FLOATS_16_BIT, *FP8, DType.F32, DType.I8):
        return f"no WGMMA takes {a.text} inputs"
    if signature.accum is not (DType.I32 if a is DType.I8 else DType.F32):
        return f"{a.text} inputs do not accumulate in {signature.accum.text}"
    return None


def _reject_layout(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    a, b = signature.a, signature.b
    if a.dtype in FLOATS_16_BIT or (a.k_major and b.k_major):
        return None
    if a.dtype is not DType.F32:
        return f"WGMMA takes {a.dtype.text} A and B with K contiguous only"
    if a.k_major:  # CUTLASS would exchange A and B, and with them the rows and columns of the epilogue
        return "the tf32 mainloop does not take B with N contiguous beside A with K contiguous"
    return None


def reject_alignment(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    """What TMA cannot address, or None."""
    for name, matrix in (("A", signature.a), ("B", signature.b)):
        if matrix.alignment * matrix.dtype.bytes < TMA_BYTES:
            return f"{name} is aligned to {matrix.alignment * matrix.dtype.bytes} bytes, TMA needs {TMA_BYTES}"
    tiles = [value for value in _operands(signature) if _is_tile(value)]
    if any(signature.tile_alignment * value.dtype.bytes < TMA_BYTES for value in tiles):
        return f"the [M, N] operands are aligned to {signature.tile_alignment} elements, TMA needs {TMA_BYTES} bytes"
    return None


def reject_operands(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    """What the epilogue cannot hold, or None."""
    for value in _operands(signature):
        if value.dtype not in EPILOGUE_DTYPES:
            return f"the epilogue cannot hold {value.dtype.text} operands"
    if not signature.outputs:
        return "there is no output"
    return None


def _reject_schedule(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    schedule = SCHEDULES.get(config.kernel_schedule)
    if schedule is None:
        return f"unknown kernel_schedule {config.kernel_schedule!r}; sm90 has {', '.join(SCHEDULES)}"
    if schedule.is_fast_accum and signature.a.dtype not in FP8:
        return "fast accumulation is for fp8 inputs"
    if config.scheduler not in SCHEDULERS:
        return f"unknown scheduler {config.scheduler!r}; sm90 has {', '.join(SCHEDULERS)}"
    if config.scheduler not in schedule.schedulers:
        wanted = [name for name, other in SCHEDULES.items() if config.scheduler in other.schedulers]
        return f"the scheduler {config.scheduler} needs a kernel_schedule of {', '.join(wanted)}"
    if config.split_k > 1 and config.scheduler == "persistent":
        return f"split_k needs the scheduler stream_k or {CLUSTER_SPLIT}"
    return _reject_cluster_split(signature, config) if config.scheduler == CLUSTER_SPLIT else None


def _reject_cluster_split(signature: Signature, config: GemmConfig) -> str | None:
    if config.split_k not in (1, 2, 4, 8):
        return f"split_k = {config.split_k}: a cluster has 1, 2, 4 or 8 CTAs to share a tile"
    if config.cluster_shape != (1, 1):
        return f"cluster_shape {config.cluster_shape}: the CTAs of a cluster share one tile"
    if _takes_a_from_registers(signature):
        return "the mainloop of tf32 A with M contiguous has kernels of its own only"
    return None


def _reject_tile(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    schedule = SCHEDULES[config.kernel_schedule]
    m, n, k = config.tile_shape
    cluster_m, cluster_n = config.cluster_shape
    k_step = 32 // signature.a.dtype.bytes  # of one WGMMA
    if m % schedule.epilogue_m or not 0 < m <= 256:
        return f"tile_shape m = {m}: {config.kernel_schedule} takes multiples of {schedule.epilogue_m} up to 256"
    if (n % 16 or not 16 <= n <= 256) and not (n == 8 and config.swapped):
        return f"tile_shape n = {n}: the epilogue takes {'8, or ' if config.swapped else ''}multiples of 16 up to 256"
    if n % 32 and signature.math == "tf32":
        return f"tile_shape n = {n}: the layouts of tf32 in shared memory need multiples of 32"
    if k % k_step or k <= 0:
        return f"tile_shape k = {k}: a WGMMA on {signature.a.dtype.text} takes multiples of {k_step}"
    if signature.a.dtype in FP8 and EXACT_SUM_EVERY_K % k:
        return f"tile_shape k = {k}: fp8 adds to its exact sums every {EXACT_SUM_EVERY_K}, which a tile must divide"
    limit = MAX_TRANSPOSED_TF32_REGISTERS if _transposes_b(signature) else MAX_ACCUM_REGISTERS
    if _accum_registers(signature, config) > limit:
        what = "accumulators, and sums to be promoted," if is_promoted(signature, config) else "accumulators"
        return f"{m}x{n} {what} over {schedule.threads} threads do not fit the registers"
    if not {cluster_m, cluster_n} <= {1, 2, 4, 8} or cluster_m * cluster_n > MAX_CLUSTER_SIZE:
        return f"cluster_shape {config.cluster_shape}: powers of two, at most {MAX_CLUSTER_SIZE} CTAs"
    return None


def _reject_subtile(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    if config.epilogue_tile is None:
        return None
    m, n = config.epilogue_tile
    wanted_m = SCHEDULES[config.kernel_schedule].epilogue_m
    if m != wanted_m:
        return f"epilogue_tile m = {m}: the warpgroups of {config.kernel_schedule} share {wanted_m} rows"
    if n % 16 or share_n(config) % n:
        return f"epilogue_tile n = {n} is no multiple of 16 that divides the {share_n(config)} columns of a CTA"
    if (width := _mma_width(signature, config)) % n:
        return f"epilogue_tile n = {n} does not divide the {width} columns of a WGMMA"
    is_heavy = sum(_is_tile(value) for value in _operands(signature)) > 1 or any(o.reduce for o in signature.outputs)
    if is_heavy and n > 32 and _accum_registers(signature, config) >= MAX_ACCUM_REGISTERS:
        return f"epilogue_tile n = {n}: this epilogue would spill registers above 32 columns"
    return None


def share_n(config: GemmConfig) -> int:
    """Columns of a tile that one CTA finishes: all, but where CTAs split K and share them.

    A tile has one WGMMA's rows then: in a thread, the accumulators of a share follow one another.
    """
    m, n, _ = config.tile_shape
    share = n // config.split_k
    is_shared = config.scheduler == CLUSTER_SPLIT and m == 64 and share * config.split_k == n and share % 16 == 0
    return share if is_shared else n


def _transposes_b(signature: Signature) -> bool:
    return _takes_a_from_registers(signature) and not signature.b.k_major


def is_promoted(signature: Signature, config: GemmConfig) -> bool:
    """Whether what the tensor cores sum is added to accumulators in fp32 after each k tile."""
    return signature.a.dtype in FP8 and not SCHEDULES[config.kernel_schedule].is_fast_accum


def promoted_chunks(config: GemmConfig) -> int:
    """How many runs of columns a tile is promoted in: the fewest, so the widest, that leave registers."""
    n = config.tile_shape[1]
    legal = [1, *(n // width for width in PROMOTED_WIDTHS if width < n and n % width == 0)]
    return next((chunks for chunks in legal if _promoted_registers(config, chunks) <= MAX_ACCUM_REGISTERS), legal[-1])


def _promoted_registers(config: GemmConfig, chunks: int) -> int:
    """Accumulators of one thread, and the sums of two chunks of 64 rows: one is computed while one is promoted."""
    m, n, _ = config.tile_shape
    return m * n // SCHEDULES[config.kernel_schedule].threads + 2 * (64 * n // chunks // 128)


def _accum_registers(signature: Signature, config: GemmConfig) -> int:
    """Accumulators of one thread, with the sums that are to be promoted."""
    if is_promoted(signature, config):
        return _promoted_registers(config, promoted_chunks(config))
    return config.tile_shape[0] * config.tile_shape[1] // SCHEDULES[config.kernel_schedule].threads


def _reject_stages(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    m, n, k = config.tile_shape
    stage_bytes = k * (m * signature.a.dtype.bytes + n * signature.b.dtype.bytes)
    stages = MIN_STAGES if config.stages is None else config.stages
    if stages < MIN_STAGES:
        return f"stages = {stages}: the pipeline needs at least {MIN_STAGES}"
    exchanged = m * n * signature.accum.bytes if config.scheduler == CLUSTER_SPLIT and config.split_k > 1 else 0
    staged = stages * stage_bytes
    if config.stages is not None and staged < exchanged:
        return f"stages = {stages}: {staged} B are too few, the cluster exchanges its sums in {exchanged} B of stages"
    need = staged + _epilogue_bytes(signature, config)
    if need > arch.smem_bytes:
        return f"{stages} stages and the epilogue need about {need} B of shared memory, more than {arch.smem_bytes}"
    return None


def _epilogue_bytes(signature: Signature, config: GemmConfig, columns: int | None = None) -> int:
    """About what the epilogue keeps in shared memory; CUTLASS counts exactly when it compiles.

    Args:
        columns: of an epilogue tile, where not those of `config`.
    """
    schedule, share = SCHEDULES[config.kernel_schedule], share_n(config)
    if columns is None:
        tile = config.epilogue_tile or default_epilogue_tile(signature, config)
        columns = tile[1] if tile else math.gcd(NARROW_COLUMNS, share)
    subtiles = config.tile_shape[0] * share // (schedule.epilogue_m * columns)
    loaded = sum(value.dtype.bytes for value in signature.inputs if _is_tile(value)) * min(subtiles, 4)
    stored = sum(value.dtype.bytes for value in signature.outputs if _is_tile(value)) * min(subtiles, 2)
    partials = sum(4 for value in signature.outputs if value.reduce and value.kind is Kind.ROW) * schedule.threads // 32
    tiles = schedule.epilogue_m * columns * (loaded + stored)
    if not stores_by_warp(signature, config):
        rows = sum(value.dtype.bytes for value in signature.inputs if value.kind is Kind.ROW)
        return tiles + share * (rows + partials)
    extents = {Kind.ROW: share, Kind.COL: config.tile_shape[0], Kind.SCALAR: 1}
    staged = sum(extents.get(value.kind, 0) for value in signature.inputs) * DType.F32.bytes
    return math.ceil((tiles + staged + share * partials) / SWIZZLE_BYTES) * SWIZZLE_BYTES + PIPELINE_BYTES


# Names in C++


def element(dtype: DType) -> str:
    """The C++ element type of an epilogue operand; bool tensors are bytes."""
    return "uint8_t" if dtype is DType.BOOL else dtype.cutlass


def _operands(signature: Signature) -> list[Input | Output]:
    return [*signature.inputs, *signature.outputs]


def _is_tile(value: Input | Output) -> bool:
    return value.kind is Kind.TILE and getattr(value, "reduce", None) is None


def _d_index(signature: Signature) -> int:
    return next((i for i, output in enumerate(signature.outputs) if _is_tile(output)), -1)


def _c_index(signature: Signature) -> int:
    """The first TILE input goes through the collective's own C, which can share buffers with D."""
    if _d_index(signature) < 0:
        return -1
    return next((i for i, value in enumerate(signature.inputs) if _is_tile(value)), -1)


def _summary(signature: Signature) -> str:
    inputs = ", ".join(f"{value.kind.value} {value.dtype.text}" for value in signature.inputs)
    outputs = ", ".join(f"{_reduce_prefix(value)}{value.kind.value} {value.dtype.text}" for value in signature.outputs)
    return f"{signature.a.dtype.text} x {signature.b.dtype.text}; ({inputs}) -> ({outputs})"


def _reduce_prefix(output: Output) -> str:
    return f"{output.reduce.value} to " if output.reduce else ""


def epilogue_tile(tile: tuple[int, int] | None) -> str:
    """The C++ type of an epilogue tile; of None the tag that lets CUTLASS choose."""
    if tile is None:
        return "cutlass::epilogue::collective::EpilogueTileAuto"
    return f"cute::Shape<cute::Int<{tile[0]}>, cute::Int<{tile[1]}>>"


def default_epilogue_tile(signature: Signature, config: GemmConfig) -> tuple[int, int] | None:
    """What a config without an `epilogue_tile` takes; None for CUTLASS's choice, 32 columns.

    Where each warp stores its part of D, a row of it fills a line of memory, if that costs no stage of the mainloop and
    registers suffice: not for a reduction.
    """
    if not stores_by_warp(signature, config) or any(output.reduce for output in signature.outputs):
        return None
    columns = min(LINE_BYTES // signature.outputs[_d_index(signature)].dtype.bytes, MOST_EPILOGUE_COLUMNS)
    if share_n(config) % columns or _mma_width(signature, config) % columns:
        return None
    narrow = math.gcd(NARROW_COLUMNS, share_n(config))
    stages = config.stages or _stages_beside(signature, config, narrow)
    costs_a_stage = _stages_beside(signature, config, columns) < stages
    return None if costs_a_stage else (SCHEDULES[config.kernel_schedule].epilogue_m, columns)


def _stages_beside(signature: Signature, config: GemmConfig, columns: int) -> int:
    """How many stages of the mainloop find room beside an epilogue with tiles of so many columns."""
    m, n, k = config.tile_shape
    stage_bytes = k * (m * signature.a.dtype.bytes + n * signature.b.dtype.bytes) + BARRIER_BYTES
    return (ARCHS["sm90"].smem_bytes - _epilogue_bytes(signature, config, columns)) // stage_bytes


def without_default(signature: Signature, config: GemmConfig) -> GemmConfig:
    """`config`, whose `epilogue_tile` is not named where it is the default one: the same kernel has one label."""
    is_default = config.epilogue_tile == default_epilogue_tile(signature, config)
    return replace(config, epilogue_tile=None) if is_default else config


def stage_count(config: GemmConfig, is_staged: bool = False) -> str:
    """The C++ tag of the mainloop's stages: a number, or as many as fit beside the epilogue.

    With staged vectors the epilogue's storage as a whole, rounded up twice to what swizzles need, would cost a stage.
    """
    if config.stages is not None:
        return f"cutlass::gemm::collective::StageCount<{config.stages}>"
    carveout = "int(sizeof(typename Epilogue::SharedStorage))"
    if is_staged:
        carveout = f"int(sizeof(typename Epilogue::TensorStorage)) + {PIPELINE_BYTES}"
    return f"cutlass::gemm::collective::StageCountAutoCarveout<{carveout}>"


def _argument_statements(config: GemmConfig, vectors: Sequence[str]) -> list[str]:
    """What the kernel's `args` take beside what all kernels do, as C++."""
    if config.scheduler == "stream_k":
        return ["args.scheduler.splits = x.split_k;"]
    if config.scheduler == CLUSTER_SPLIT:
        return [f"args.vectors[{i}] = {vector};" for i, vector in enumerate(vectors)]
    return []


def stores_by_warp(signature: Signature, config: GemmConfig) -> bool:
    """Whether each warp stores its part of D itself: where D is the only tile of the epilogue, with N contiguous.

    Not where a kernel would spill for it: in stream-K, where a wide tile's sums are promoted, and beside many vectors.
    """
    n = config.tile_shape[1]
    has_registers = not (n > 192 and len(_vectors(signature)) > 2) and not (n > 128 and is_promoted(signature, config))
    if config.swapped or config.scheduler == "stream_k" or not has_registers:
        return False
    return _d_index(signature) >= 0 and sum(map(_is_tile, _operands(signature))) == 1


def _vectors(signature: Signature) -> list[str]:
    """C++ initialisers of a `gemmgen::EpilogueVector` for each vector and each number that the epilogue reads."""
    along = {Kind.COL: "kM", Kind.ROW: "kN", Kind.SCALAR: "kNothing"}
    return [
        f"{{x.inputs[{i}].ptr, x.inputs[{i}].batch_stride, sizeof({element(value.dtype)}), "
        f"gemmgen::EpilogueVector::{along[value.kind]}}}"
        for i, value in enumerate(signature.inputs)
        if value.kind in along
    ]


def _takes_extended_mma(signature: Signature, config: GemmConfig) -> bool:
    """Whether CuTe has to be asked for a WGMMA as wide as the tile; else it takes several narrow ones, half as fast."""
    return config.tile_shape[1] not in CUTE_WIDTHS and not is_promoted(signature, config)


def _mma_width(signature: Signature, config: GemmConfig) -> int:
    """Columns of a WGMMA, in whose order the epilogue finds the accumulators."""
    n = config.tile_shape[1]
    return n if _takes_extended_mma(signature, config) else max(known for known in CUTE_WIDTHS if n % known == 0)


def _takes_a_from_registers(signature: Signature) -> bool:
    """Whether WGMMA reads A from registers, and so in any order, in the place of shared memory."""
    return signature.a.dtype is DType.F32 and not signature.a.k_major


def _headers(signature: Signature, config: GemmConfig) -> list[str]:
    """What the skeleton includes beside what all do."""
    parts = {
        "gemmgen/sm90_swapped.hpp": config.swapped,
        "gemmgen/sm90_warp_epilogue.hpp": stores_by_warp(signature, config),
        "gemmgen/sm90_scheduler.hpp": config.scheduler == "persistent",
    }
    computed = signature.swapped() if config.swapped else signature
    ours = [header for header, is_needed in parts.items() if is_needed]
    return [*ours, _mainloop_header(computed, config), SCHEDULES[config.kernel_schedule].kernel_header]


def _mainloop_header(signature: Signature, config: GemmConfig) -> str:
    if is_promoted(signature, config):
        return "gemmgen/sm90_promoted.hpp"
    operands = "rs" if _takes_a_from_registers(signature) else "ss"
    return f"cutlass/gemm/collective/sm90_mma_tma_gmma_{operands}_warpspecialized.hpp"


def _matrix(matrix: Matrix, name: str, extent: str, k_major: str, mn_major: str) -> dict[str, object]:
    ld = f"tma_stride(x.{name}.ld, {extent if matrix.k_major else 'x.k'})"
    batch_stride = f"tma_stride(x.{name}.batch_stride, x.l)"
    strides = (ld, "cute::_1{}", batch_stride) if matrix.k_major else ("cute::_1{}", ld, batch_stride)
    return {
        "element": matrix.dtype.cutlass,
        "layout": k_major if matrix.k_major else mn_major,
        "alignment": TMA_BYTES // matrix.dtype.bytes,
        "stride": "{" + ", ".join(strides) + "}",
    }


def _load(index: int, value: Input, is_c: bool, layout: TileLayout, is_staged: bool) -> Visitor:
    """Input `index` as a visitor."""
    where, t = f"x.inputs[{index}]", element(value.dtype)
    ptr = f"static_cast<{t} const*>({where}.ptr)"
    zero, row, col = f"{t}(0)", "cute::_0{}, cute::_1{}", "cute::_1{}, cute::_0{}"
    types = {
        Kind.ROW: (f"gemmgen::RowLoad<Epi, {t}>", f"{{{ptr}, {zero}, {{{row}, {where}.batch_stride}}}}"),
        Kind.COL: (f"gemmgen::ColLoad<Epi, {t}>", f"{{{ptr}, {zero}, {{{col}, {where}.batch_stride}}}}"),
        Kind.SCALAR: (f"gemmgen::ScalarLoad<{t}>", f"{{{ptr}, {where}.batch_stride, {where}.value}}"),
        Kind.TILE: (f"{layout.prefix}TileLoad<Epi, {t}>", f"{{{ptr}, {zero}, {{{layout.stride(where)}}}}}"),
        Kind.ROW_INDEX: ("gemmgen::IndexLoad<0>", "{}"),
        Kind.COL_INDEX: ("gemmgen::IndexLoad<1>", "{}"),
    }
    if is_staged:
        vector = f"{{{ptr}, {where}.batch_stride}}"
        types |= {
            Kind.ROW: (f"gemmgen::StagedVector<Epi, 1, {t}>", vector),
            Kind.COL: (f"gemmgen::StagedVector<Epi, 0, {t}>", vector),
            Kind.SCALAR: (f"gemmgen::StagedScalar<{t}>", types[Kind.SCALAR][1]),
        }
    cpp_type, arguments = types[value.kind]
    if is_c:
        cpp_type, arguments = f"cutlass::epilogue::fusion::Sm90SrcFetch<{t}>", "{}"
    comment = f"input {index}: {value.kind.value} {value.dtype.text}" + (", as C" if is_c else "")
    return Visitor(f"Load{index}", cpp_type, comment, arguments)


def _store(index: int, value: Output, is_d: bool, layout: TileLayout) -> Visitor:
    """Output `index` as a visitor."""
    where, t = f"x.outputs[{index}]", element(value.dtype)
    comment = f"output {index}: {_reduce_prefix(value)}{value.kind.value} {value.dtype.text}"
    alias = f"Store{index}"
    if is_d:
        return Visitor(alias, "gemmgen::StoreD", f"{comment}, as D")
    if value.reduce is not None:
        node = "RowPartials" if value.kind is Kind.ROW else "ColPartials"
        arguments = f"{{static_cast<float*>({where}.ptr), {where}.row_stride, {where}.batch_stride}}"
        return Visitor(alias, f"gemmgen::{node}<Epi, {REDUCERS[value.reduce]}>", comment, arguments)
    arguments = f"{{static_cast<{t}*>({where}.ptr), {{{layout.stride(where)}}}}}"
    return Visitor(alias, f"{layout.prefix}TileStore<Epi, {t}>", comment, arguments)


def _functor(index: int, signature: Signature) -> Functor:
    output = signature.outputs[index]
    indices = (Kind.ROW_INDEX, Kind.COL_INDEX)
    accum = "int" if signature.accum is DType.I32 else "float"
    parameters = (accum, *("int" if value.kind in indices else "float" for value in signature.inputs))
    value = "int" if output.dtype is DType.I32 and output.reduce is None else "float"
    stored = "float" if output.reduce else element(output.dtype)
    return Functor(f"gemmgen_functor_{index}", f"Functor{index}", value, parameters, stored)


def _tma_tensors(signature: Signature, swapped: bool) -> list[dict[str, str]]:
    """Everything that TMA reads or writes, for the launcher's check."""
    tensors = [
        _tma_tensor("x.a", "ld", signature.a.dtype, "x.m" if signature.a.k_major else "x.k"),
        _tma_tensor("x.b", "ld", signature.b.dtype, "x.n" if signature.b.k_major else "x.k"),
    ]
    named: list[tuple[str, Input | Output]] = [(f"x.inputs[{i}]", value) for i, value in enumerate(signature.inputs)]
    named += [(f"x.outputs[{i}]", value) for i, value in enumerate(signature.outputs)]
    tiles = ((where, value.dtype) for where, value in named if _is_tile(value))
    rows = TileLayout(swapped).rows
    return tensors + [_tma_tensor(where, "row_stride", dtype, rows) for where, dtype in tiles]


def _tma_tensor(where: str, stride: str, dtype: DType, rows: str) -> dict[str, str]:
    return {
        "ptr": f"{where}.ptr",
        "row_stride": f"{where}.{stride}",
        "batch_stride": f"{where}.batch_stride",
        "rows": rows,
        "element": element(dtype),
    }


def _partials(signature: Signature, config: GemmConfig) -> list[dict[str, object]]:
    """Per reduction output: how many CTA tiles lie along the mode that it reduces."""
    tile_m, tile_n = config.tile_shape[0], share_n(config)
    m, n = ("x->n", "x->m") if config.swapped else ("x->m", "x->n")  # of a caller, who knows nothing of the swap
    along = {Kind.ROW: (m, tile_m), Kind.COL: (n, tile_n)}
    return [
        {"output": i, "extent": along[output.kind][0], "tile": along[output.kind][1]}
        for i, output in enumerate(signature.outputs)
        if output.reduce is not None
    ]
