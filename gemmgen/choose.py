"""Which `GemmConfig` runs a problem: the candidates of an architecture, ranked by an analytic model of time.

Nothing is measured here. The model counts waves of CTA tiles, and for a tile the larger of its tensor-core and
its memory time, plus the part of the epilogue that no mainloop hides. Its constants were fitted on an H200.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gemmgen.arch import Arch
from gemmgen.config import CLUSTER_SPLIT, GemmConfig
from gemmgen.dtypes import DType
from gemmgen.errors import IllegalConfig
from gemmgen.lower import sm80, sm90, sm100
from gemmgen.problem import FP8, Extents
from gemmgen.signature import Kind, Output, Signature

CLOCK_GHZ = 1.7  # under load
MACS_PER_CLOCK = 2048  # of one SM, 16-bit inputs
MEMORY_BYTES_PER_CLOCK = 2400  # of the whole device
SM_BYTES_PER_CLOCK = 44  # what one SM draws of what L2 holds
FROM_MEMORY = 0.41  # by what share longer it takes for what no other tile has read: bench/results/ways-h200-3.json
IN_FLIGHT_BYTES_PER_CLOCK = 146  # stages of a whole tile over the latency of memory; a tile beyond M or N has less
# of the whole device, beside its memory: what lies beyond M or N. Fitted to kernels that left it to TMA to fill in; for
# those that sm90_edges.hpp serves, in ways-h200-3.json, 10000 is as good
OUTSIDE_BYTES_PER_CLOCK = 4000
L2_MISSES = 0.1  # share of what a second tile reads of the same rows or columns
LAUNCH_CYCLES = 4000
CLEAR_CYCLES = 3000  # of the counters of a kernel that splits K, before its launch
TURN_TRAFFIC = 4  # times its partial sums, which are written and read back through L2
TURN_CYCLES = 1500  # until a CTA sees that the one before it has added its partial sums
GATHER_CYCLES = 800  # two barriers of a cluster and the latency of its distributed shared memory
START_CYCLES = 1200  # of a CTA that is not persistent: barriers, and memory until the first k tile is there
STREAM_K_DOUBT = 1.5  # fp8 on an H200: 192 us at 4096^3 where whole tiles took 131
LARGE_CLUSTERS = 0.92  # of those that the SMs would hold: of 33 clusters of four fewer than 32 are resident at once
SMEM_BYTES, RESERVED_SMEM_BYTES = 228 * 1024, 1024  # of an SM, and what each CTA takes beside its own
SWIZZLES = (1, 2, 4, 8, 16)
WAVE = 132  # tiles at a time
MOST_PADDING = 1.02  # tiles that a swizzle may add
# partial sums are promoted to fp32, beside the other warpgroup's WGMMAs or one's own
EXACT_FP8_RATE = {"cooperative": 0.88, "pingpong": 0.72, "single": 0.66}

COOPERATIVE_128_192 = 0.93  # beside pingpong, whose warpgroups multiply all of its rows

# torch's product and the pointwise kernel
PRODUCT_RATE = {DType.I8: 0.5, DType.E4M3: 0.78, DType.E5M2: 0.78}  # against a kernel of ours
PRODUCT_SIMT_MACS_PER_CLOCK = 110
TMA_BYTES = 16

# The constants from here on were fitted on bench/results/epilogue-h200-{llama,headline}.jsonl.

# By how much a fused kernel takes longer than its estimate, where cuBLAS hardly does: 1.15 times up to M of 512, less
# from there on, as far as kernels have been measured there.
SHORTFALL = 3.3  # times M ** -0.5
SHORTFALL_LEAST_ROWS = 512
# kernels of the swapped problem beside others, fitted on bench/results/ways-h200-2.json
SWAPPED_AT_ONE_ROW = 0.96
SWAPPED_PER_ROW = 0.0018
SWAPPED_MOST_ROWS = 128  # no wider tile: more rows are more tiles of the same
PRODUCT_SWAPPED_MOST_ROWS = 512
PRODUCT_WAIT = 5.0  # of its 8-bit products: 2.0 (1.4 to 2.4) at M of 1 and 16, 1.4 at 128
PRODUCT_WAIT_LEAST_ROWS = 13
PRODUCT_EPILOGUE_ELEMENTS_PER_CLOCK = 1570  # of the whole device: what cuBLASLt's bias and GELU add to a bare product
# By how much cuBLASLt's products with a bias, and those with an activation, take longer than this model says, with few
# rows and with many. The latter beside fused kernels, fitted on bench/results/ways-h200-{2,3}.json.
PRODUCT_SHORTFALL = (1.0, 1.03)
ACTIVATION_SHORTFALL = (1.2, 1.08)
PRODUCT_SHORTFALL_LEAST_ROWS = 1024
UNALIGNED_PRODUCT_EPILOGUE = 10.0  # times slower than aligned; one measurement, 1000 x 1003 x 777

Rejector = Callable[[Signature, GemmConfig, Arch], "str | None"]
REJECT: dict[str, Rejector] = {
    "sm90": sm90.reject_reason,
    "sm80": sm80.reject_reason,
    "sm100": sm100.reject_reason,
}
RUN_TIME_VALUES = {"swizzle": SWIZZLES, "raster": ("heuristic", "M", "N")}


def reject_reason(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    """Why `config` cannot run `signature` on `arch`, or None when it can."""
    if config.family not in REJECT:
        return f"unknown family {config.family!r}; there are {', '.join(REJECT)}"
    for name, legal in RUN_TIME_VALUES.items():
        if (value := getattr(config, name)) not in legal:
            return f"{name} is {value!r}; it may be {', '.join(map(str, legal))}"
    if config.split_k < 1:
        return f"split_k = {config.split_k}: 1 for no split, or more"
    return REJECT[config.family](signature, config, arch)


_SPLITTING = {"cooperative": "stream_k", "single": CLUSTER_SPLIT}  # the schedulers of schedules that split K


def _sm90(
    m: int,
    n: int,
    schedule: str,
    cluster: tuple[int, int] = (1, 1),
    epilogue: tuple[int, int] | None = None,
    split_k: int | None = None,
) -> GemmConfig:
    raster = "N" if cluster[0] > 1 else "M" if cluster[1] > 1 else "heuristic"  # neighbours in time share an operand
    config = GemmConfig("sm90", (m, n, 64), cluster, schedule, epilogue, raster=raster)
    return replace(config, scheduler=_SPLITTING[schedule], split_k=split_k) if split_k else config


def _swapped(
    m: int, n: int, k: int, schedule: str = "pingpong", split_k: int = 1, stages: int | None = None
) -> GemmConfig:
    """A kernel of the swapped problem: `m` columns of D and `n` of its rows a tile."""
    scheduler = _SPLITTING.get(schedule, "persistent")
    config = GemmConfig("sm90", (m, n, k), kernel_schedule=schedule, stages=stages, scheduler=scheduler, swapped=True)
    return replace(config, split_k=split_k)


# tile k is given for 16-bit inputs; `_scaled_k` adapts it to the bytes of a K line
SM90_CANDIDATES: tuple[GemmConfig, ...] = (
    _sm90(128, 256, "cooperative", (2, 1)),
    _sm90(256, 128, "cooperative", (2, 1)),
    _sm90(256, 192, "cooperative", (1, 2), (128, 64)),
    _sm90(128, 128, "cooperative", (1, 2)),
    *(_sm90(256, 160, "cooperative", cluster) for cluster in ((2, 1), (1, 2))),  # the second for an odd count along M
    *(_sm90(128, n, "cooperative", (2, 1)) for n in (96, 160, 192)),  # one wave of tiles at some 256 or 512 rows
    _sm90(128, 192, "pingpong", (2, 1), (64, 64)),
    *(_sm90(128, 160, "pingpong", cluster) for cluster in ((2, 1), (1, 2))),
    _sm90(128, 128, "pingpong", (1, 2)),
    _sm90(64, 256, "pingpong", (2, 1)),
    _sm90(64, 128, "pingpong", (2, 1)),
    _sm90(64, 64, "pingpong"),
    _sm90(64, 32, "pingpong"),
    # few rows: as many CTAs as there are SMs, each with its share of B
    _sm90(64, 224, "pingpong"),
    _sm90(64, 112, "pingpong"),
    _sm90(64, 96, "pingpong"),
    _sm90(64, 48, "pingpong"),
    _sm90(64, 16, "pingpong"),
    _sm90(64, 160, "single", split_k=2),  # two SMs for each tile
    # few tiles, long K: split_k 1 is stream-K
    *(_sm90(128, n, "cooperative", split_k=split_k) for n in (64, 128) for split_k in (2, 3, 4, 6, 8)),
    _sm90(128, 128, "cooperative", split_k=1),
    _sm90(128, 256, "cooperative", (2, 1), split_k=1),
    # of wide tiles whose pairs share the weights: the longer K, the more of its time is L2's
    *(_sm90(128, 128, "cooperative", (2, 1), split_k=split_k) for split_k in (2, 4)),
)
# few rows: weights along the 64 rows of a WGMMA, and no wider than the rows; each SM keeps long runs of B in flight
SWAPPED_CANDIDATES: tuple[GemmConfig, ...] = (
    *(_swapped(64, n, 128) for n in (8, 16, 32, 64, 128)),
    *(_swapped(64, n, 128, "single", split_k) for n in (8, 16, 32, 64, 128) for split_k in (1, 2, 4)),
    _swapped(64, 16, 128, "single", stages=5),  # two CTAs for each SM
)
# where partial sums are promoted: the widest tile whose halves do so in turn
EXACT_FP8_CANDIDATES: tuple[GemmConfig, ...] = (_sm90(128, 192, "cooperative", (2, 1)),)
# worth a measurement: the tuner tries them too
SM90_FURTHER: tuple[GemmConfig, ...] = (
    _sm90(128, 256, "cooperative", (1, 2)),
    _sm90(256, 128, "cooperative", (1, 2)),
    _sm90(128, 256, "cooperative"),
    _sm90(128, 256, "cooperative", (2, 1), (128, 64)),
    _sm90(256, 128, "cooperative", (1, 2), (128, 64)),
    _sm90(256, 192, "cooperative", (2, 1), (128, 64)),
    *(_sm90(128, 224, "cooperative", cluster) for cluster in ((2, 1), (1, 2))),
    _sm90(128, 192, "pingpong", (1, 2), (64, 64)),
    _sm90(192, 128, "pingpong", (1, 2)),
    *(_sm90(128, 128, "pingpong", cluster, (64, 64)) for cluster in ((2, 1), (1, 2))),
    _sm90(128, 128, "pingpong"),
    _sm90(64, 256, "pingpong", (1, 2)),
    _sm90(64, 128, "pingpong", (1, 2)),
    _sm90(256, 128, "cooperative", (2, 1), split_k=1),
    _sm90(128, 128, "cooperative", (2, 1), split_k=3),
    *(_sm90(128, 256, "cooperative", (2, 1), split_k=split_k) for split_k in (2, 3, 4)),
    # up to 128 rows: one tile for each SM, whose neighbour has the same rows
    *(_sm90(128, n, "cooperative", (1, 2)) for n in (48, 64, 80)),
    _sm90(64, 128, "single", split_k=2),  # two SMs for each tile
    _swapped(64, 16, 256, "single", 2),
    _swapped(64, 16, 128, "single", 8),
    _swapped(64, 16, 256),
    *(_swapped(128, n, 128, "cooperative", split_k) for n in (16, 64) for split_k in (1, 2, 4)),
)
EXACT_FP8_FURTHER: tuple[GemmConfig, ...] = (
    _sm90(128, 192, "cooperative", (1, 2)),
    _sm90(64, 192, "pingpong", (1, 2)),
    _sm90(64, 192, "pingpong", (2, 1)),
)
SM100_CANDIDATES: tuple[GemmConfig, ...] = (GemmConfig("sm100", (128, 128, 64), (1, 1), "auto"),)


@dataclass(frozen=True)
class Ranked:
    """A legal config and the model's time for it."""

    config: GemmConfig
    time_us: float


def candidates(signature: Signature, arch: Arch, family: str) -> list[GemmConfig]:
    """The configs of a template family, legal for the problem or not."""
    if family == "sm80":
        return sm80.legal_configs(signature, arch)
    configs = {"sm90": SM90_CANDIDATES + SWAPPED_CANDIDATES, "sm100": SM100_CANDIDATES}[family]
    if family == "sm90" and signature.a.dtype in FP8:
        configs += EXACT_FP8_CANDIDATES
    return [_scaled_k(config, signature.a.dtype) for config in configs]


def ranked(signature: Signature, extents: Extents, arch: Arch, sm_count: int | None = None) -> list[Ranked]:
    """The legal candidates of the first family that has any, fastest first by the model.

    Raises:
        IllegalConfig: no candidate is legal; the message lists the reasons.
    """
    for family in arch.families:
        if fit := _fitting(signature, tuple(candidates(signature, arch, family)), arch):
            return _timed(signature, extents, fit, sm_count or arch.sm_count)
    reasons = [f"{family}: {reason}" for family in arch.families for reason in rejections(signature, arch, family)]
    raise IllegalConfig(f"no kernel of {arch.name} runs this problem\n  " + "\n  ".join(reasons))


def worth_measuring(
    signature: Signature, extents: Extents, arch: Arch, sm_count: int, within: float = 1.7, most: int = 20
) -> list[Ranked]:
    """What a tuner should try: `ranked`, further tiles and clusters, and nothing that the model calls hopeless.

    Args:
        within: how many times slower than the best estimate a candidate may be.
        most: candidates at most.
    """
    best = ranked(signature, extents, arch, sm_count)
    further = SM90_FURTHER if best[0].config.family == "sm90" else ()
    if further and signature.a.dtype in FP8:
        further += EXACT_FP8_FURTHER
    scaled = tuple(_scaled_k(config, signature.a.dtype) for config in further)
    more = _timed(signature, extents, _fitting(signature, scaled, arch), sm_count)
    pool = sorted(dict.fromkeys([*best, *more]), key=lambda choice: choice.time_us)
    return [choice for choice in pool if choice.time_us <= within * pool[0].time_us][:most]


@functools.lru_cache(maxsize=1024)
def _fitting(signature: Signature, configs: tuple[GemmConfig, ...], arch: Arch) -> list[GemmConfig]:
    """The legal ones; of these the ones that will not spill, where there are any. The same for every M."""
    named = (sm90.without_default(signature, c) if c.family == "sm90" else c for c in configs)
    legal = [c for c in dict.fromkeys(named) if REJECT[c.family](signature, c, arch) is None]
    if signature.math == "simt":  # one chain of K sums is twice as inaccurate as cuBLAS's several
        return [c for c in legal if c.split_k > 1] or legal
    return [c for c in legal if has_registers(signature, c)] or legal


def _timed(signature: Signature, extents: Extents, configs: Sequence[GemmConfig], sm_count: int) -> list[Ranked]:
    fitted = [fitted_to(extents, config) for config in configs]
    timed = [Ranked(config, estimate_us(signature, extents, config, sm_count)) for config in fitted]
    return sorted(timed, key=lambda choice: choice.time_us)


def has_registers(signature: Signature, config: GemmConfig) -> bool:
    """Whether the accumulators leave a thread enough registers for this epilogue; else ptxas would spill.

    A warpgroup's thread has 240 of them. The limits are what compiled without a spill. Sums that are to be promoted are
    dead by the time of the epilogue.
    """
    if config.family != "sm90":
        return True
    threads = 256 if config.kernel_schedule.startswith("cooperative") else 128
    accums = config.tile_shape[0] * config.tile_shape[1] // threads
    if config.scheduler == "stream_k" and sm90.is_promoted(signature, config):
        accums += 64  # what stream-K knows of its work finds no room beside the sums
    kinds = [value.kind for value in signature.inputs] + [value.kind for value in signature.outputs]
    reduces = any(output.reduce for output in signature.outputs)
    vectors = sum(value.kind in (Kind.ROW, Kind.COL) for value in signature.inputs)
    tiles = kinds.count(Kind.TILE)
    is_rich, is_simple = reduces or tiles > 4, tiles <= 1 and vectors <= 1
    return accums <= (128 if is_rich else 192 if is_simple else 160)


def fitted_to(extents: Extents, config: GemmConfig) -> GemmConfig:
    """`config` with the swizzle that suits the problem, and a raster that goes with it.

    Our own order of tiles (sm90_scheduler.hpp) pads nothing: the tiles that run at a time read the fewest rows of A and
    columns of B, which L2 then holds; with small groups of a large problem it does not, and at times a kernel takes a
    third longer. CUTLASS's stream-K rounds the tiles of both axes up to the swizzle times the cluster, and computes the
    empty tiles; it takes the widest swizzle that hardly adds any. Without a swizzle a raster along the longer side
    would stream all of the other operand once for each row of tiles; the heuristic takes the shorter side.
    """
    if config.family != "sm90":
        return config
    if config.scheduler == CLUSTER_SPLIT:  # its clusters have one order
        return config.unordered()
    extents = _kernel_extents(extents, config)
    if config.scheduler != "stream_k":
        return replace(config, swizzle=min(SWIZZLES, key=lambda s: _read_at_a_time(extents, config, s)))
    (rows, columns), (cm, cn) = _grid(extents, config), config.cluster_shape
    swizzle = next(
        s for s in (8, 4, 2, 1)
        if s == 1 or _rounded(rows, s * cm) * _rounded(columns, s * cn) <= MOST_PADDING * rows * columns
    )  # fmt: skip
    return replace(config, swizzle=swizzle, raster=config.raster if swizzle > 1 else "heuristic")


def _read_at_a_time(extents: Extents, config: GemmConfig, swizzle: int) -> float:
    """Rows of A and columns of B that the tiles of one wave read."""
    (tm, tn, _), (cm, cn), (rows, columns) = config.tile_shape, config.cluster_shape, _grid(extents, config)
    is_along_n = config.raster == "N" or (config.raster == "heuristic" and columns <= rows)
    # a group: so many tiles across, and those of a wave along the raster
    most_along, most_across = (columns, rows) if is_along_n else (rows, columns)
    group = min(swizzle * (cm if is_along_n else cn), most_across)
    along = min(WAVE / group, most_along)
    across = min(max(WAVE / most_along, group), most_across)  # of several groups, where one is less than a wave
    return across * tm + along * tn if is_along_n else along * tm + across * tn


def rejections(signature: Signature, arch: Arch, family: str) -> list[str]:
    """Why no config of `family` runs the problem: each distinct reason."""
    configs = candidates(signature, arch, family) or [_sm80_probe()]  # that family lists legal configs only
    reasons = [REJECT[family](signature, config, arch) for config in configs]
    return list(dict.fromkeys(reason for reason in reasons if reason)) or [f"{family} has no mainloop for it"]


def _sm80_probe() -> GemmConfig:
    return GemmConfig("sm80", (128, 128, 64), kernel_schedule="multistage", stages=2, warp_shape=(64, 64, 64))


def estimate_us(signature: Signature, extents: Extents, config: GemmConfig, sm_count: int) -> float:
    """The model's time of one kernel, in microseconds."""
    return _cycles(signature, extents, config, sm_count, _rate(signature, config)) / (CLOCK_GHZ * 1e3)


def beside_other_ways_us(estimate_us: float, config: GemmConfig, extents: Extents) -> float:
    """The estimate of a fused kernel as it compares with those of ways that torch multiplies in."""
    if config.swapped:
        return estimate_us * (SWAPPED_AT_ONE_ROW + SWAPPED_PER_ROW * min(extents.M, SWAPPED_MOST_ROWS))
    return estimate_us * (1 + SHORTFALL / math.sqrt(max(extents.M, SHORTFALL_LEAST_ROWS)))


def _cycles(signature: Signature, extents: Extents, config: GemmConfig, sm_count: int, macs_per_clock: float) -> float:
    extents = _kernel_extents(extents, config)
    tiles, resident = _tiles(extents, config), _resident(signature, config, sm_count)
    steps = math.ceil(extents.K / config.tile_shape[2])
    active = min(tiles * (config.split_k if config.scheduler != "stream_k" or config.split_k > 1 else steps), resident)
    step = _step_cycles(signature, extents, config, active, sm_count, macs_per_clock)
    epilogue = _epilogue_cycles(signature, config)
    memory = _memory_cycles(signature, extents, config)
    if config.scheduler == CLUSTER_SPLIT:
        return LAUNCH_CYCLES + _cluster_cycles(config, tiles, resident, steps, step, epilogue, memory)
    if config.scheduler == "stream_k":
        turns = _splitting_cycles(config, tiles, active, steps, step, epilogue)
        return LAUNCH_CYCLES + CLEAR_CYCLES + max(turns, memory)
    waves = math.ceil(tiles / resident)
    hidden = config.kernel_schedule.startswith("pingpong") and waves > 1
    per_tile = steps * step + (0.15 * epilogue if hidden else epilogue)
    return LAUNCH_CYCLES + max(waves * per_tile, memory) + (epilogue if hidden else 0)


def _kernel_extents(extents: Extents, config: GemmConfig) -> Extents:
    """The extents of the problem that the kernel computes, swapped or not."""
    return replace(extents, M=extents.N, N=extents.M) if config.swapped else extents


def _grid(extents: Extents, config: GemmConfig) -> tuple[int, int]:
    """Tiles along M and N, in whole clusters."""
    (tm, tn, _), (cm, cn) = config.tile_shape, config.cluster_shape
    return _rounded(math.ceil(extents.M / tm), cm), _rounded(math.ceil(extents.N / tn), cn)


def _tiles(extents: Extents, config: GemmConfig) -> int:
    return math.prod(_grid(extents, config)) * extents.L


def _memory_cycles(signature: Signature, extents: Extents, config: GemmConfig) -> float:
    """A and B read once, a share of their further readings, and what the tiles reach beyond M and N.

    That is not read, but costs nevertheless.
    """
    (tm, tn, _), (cm, cn), (rows, columns) = config.tile_shape, config.cluster_shape, _grid(extents, config)
    line_bytes = extents.K * extents.L * signature.a.dtype.bytes
    again = extents.M * (columns // cn - 1) + extents.N * (rows // cm - 1)
    lines = extents.M + extents.N + L2_MISSES * again
    outside = (rows * tm - extents.M) * columns + (columns * tn - extents.N) * rows
    return line_bytes * (lines / MEMORY_BYTES_PER_CLOCK + outside / OUTSIDE_BYTES_PER_CLOCK)


def _resident(signature: Signature, config: GemmConfig, sm_count: int) -> int:
    """CTAs at work at once: whole clusters only."""
    if config.scheduler == CLUSTER_SPLIT:
        clusters = sm_count // config.split_k
        if config.split_k > 2:  # the SMs of a GPC are no multiple of them
            clusters = int(clusters * LARGE_CLUSTERS)
        return max(1, clusters) * config.split_k * _ctas_per_sm(signature, config)
    size = config.cluster_shape[0] * config.cluster_shape[1]
    return max(1, sm_count // size) * size


def _ctas_per_sm(signature: Signature, config: GemmConfig) -> int:
    """Small CTAs share an SM in pairs; those that take as many stages as fit do not."""
    if config.stages is None:
        return 1
    tm, tn, tk = config.tile_shape
    stages_bytes = config.stages * (tm + tn) * tk * signature.a.dtype.bytes
    epilogue_bytes = tm * sm90.share_n(config) * _tile_bytes(signature)
    return 2 if 2 * (stages_bytes + epilogue_bytes + RESERVED_SMEM_BYTES) <= SMEM_BYTES else 1


def _step_cycles(
    signature: Signature, extents: Extents, config: GemmConfig, active: int, sm_count: int, macs_per_clock: float
) -> float:
    """One k tile of the mainloop: the slower of its tensor cores and its loads, where `active` CTAs load at once."""
    (tm, tn, tk), (cm, cn), (tiles_m, tiles_n) = config.tile_shape, config.cluster_shape, _grid(extents, config)
    rows, columns = min(tm, extents.M), min(tn, extents.N)
    in_flight = IN_FLIGHT_BYTES_PER_CLOCK * (rows + columns) / (tm + tn)
    loads = min(SM_BYTES_PER_CLOCK * min(1, sm_count / active), in_flight)
    lines = rows / cn * (1 + FROM_MEMORY * cn / tiles_n) + columns / cm * (1 + FROM_MEMORY * cm / tiles_m)
    return max(tm * tn * tk / macs_per_clock, tk * lines * signature.a.dtype.bytes / loads)


def _cluster_cycles(
    config: GemmConfig, tiles: int, resident: int, steps: int, step: float, epilogue: float, memory: float
) -> float:
    """A kernel whose clusters split K: a CTA adds what the others have summed of its share of the tile.

    Nothing is loaded after the last tiles have their slices.
    """
    others, share = config.split_k - 1, config.tile_shape[0] * sm90.share_n(config)
    gather = GATHER_CYCLES + others * 4 * share / SM_BYTES_PER_CLOCK if others else 0
    waves = math.ceil(tiles * config.split_k / resident)
    tail = gather + epilogue
    loading = waves * math.ceil(steps / config.split_k) * step + (waves - 1) * (tail + START_CYCLES)
    return max(loading, memory) + tail


def _splitting_cycles(
    config: GemmConfig, tiles: int, active: int, steps: int, step: float, epilogue: float
) -> float:
    """A kernel that splits K: CTAs of one tile add their partial sums in turn, through memory."""
    tm, tn, _ = config.tile_shape
    turn = TURN_TRAFFIC * 4 * tm * tn / SM_BYTES_PER_CLOCK + TURN_CYCLES
    if config.split_k > 1:
        waves = math.ceil(tiles * config.split_k / active)
        finished = math.ceil(tiles / active)  # epilogues one behind the other, each after its turns
        return waves * math.ceil(steps / config.split_k) * step + finished * ((config.split_k - 1) * turn + epilogue)
    waves = math.ceil(tiles / active)
    sharing = max(2, math.ceil(active / tiles))  # CTAs that work on a tile which is cut
    return STREAM_K_DOUBT * (tiles * steps / active * step + (sharing - 1) * turn + waves * epilogue)


PRODUCT_CONFIGS = tuple(
    _sm90(m, n, "cooperative", split_k=split_k)
    for m, n in ((256, 192), (256, 160), (128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64))
    for split_k in (None, 2, 4, 8)
)


LIBRARY_CONFIGS = (*SM90_CANDIDATES, *SWAPPED_CANDIDATES, *SM90_FURTHER, *PRODUCT_CONFIGS)  # as good as ours at least


@functools.lru_cache(maxsize=1024)
def estimate_split_us(signature: Signature, extents: Extents, sm_count: int) -> float:
    """The model's time of torch's product into a wide accumulator in memory, and of the pointwise kernel over it."""
    bare = replace(signature, inputs=(), outputs=(Output(Kind.TILE, signature.accum),))
    product = _product_cycles(bare, extents, sm_count, "split")
    elements = extents.M * extents.N * extents.L
    pointwise = elements * (signature.accum.bytes + _tile_bytes(signature)) / MEMORY_BYTES_PER_CLOCK
    return (product + LAUNCH_CYCLES + pointwise) / (CLOCK_GHZ * 1e3)


def estimate_library_us(
    signature: Signature, extents: Extents, sm_count: int, passes: int = 0, activates: bool = False
) -> float:
    """The model's time of torch's product with an epilogue of its own.

    Args:
        passes: over the result in place, behind it.
        activates: whether that epilogue has an activation.
    """
    cycles = _product_cycles(signature, extents, sm_count, "library")
    elements = extents.M * extents.N * extents.L
    if signature.inputs and signature.a.dtype not in FP8:  # scales are part of the fp8 product
        few, many = ACTIVATION_SHORTFALL if activates else PRODUCT_SHORTFALL
        cycles *= many if extents.M >= PRODUCT_SHORTFALL_LEAST_ROWS else few
        cycles += elements / PRODUCT_EPILOGUE_ELEMENTS_PER_CLOCK
        cycles *= 1.0 if _is_aligned(signature) else UNALIGNED_PRODUCT_EPILOGUE
    moved = 2 * elements * signature.outputs[0].dtype.bytes
    return (cycles + passes * (LAUNCH_CYCLES + moved / MEMORY_BYTES_PER_CLOCK)) / (CLOCK_GHZ * 1e3)


def _product_cycles(
    signature: Signature, extents: Extents, sm_count: int, of: Literal["library", "split"]
) -> float:
    rates = _product_rates(of, signature.a.dtype, signature.math, _is_aligned(signature))
    cycles = min(
        _cycles(signature, extents, config, sm_count, rate)
        for config, rate in rates.items()
        if not config.swapped or extents.M <= PRODUCT_SWAPPED_MOST_ROWS
    )
    if signature.a.dtype.bytes > 1:
        return cycles
    return cycles * (1 + PRODUCT_WAIT / math.sqrt(max(extents.M, PRODUCT_WAIT_LEAST_ROWS)))


@functools.lru_cache(maxsize=32)
def _product_rates(of: str, a: DType, math: str, is_aligned: bool) -> Mapping[GemmConfig, float]:
    """Kernels that torch's product may be one of, as far as they differ to the model, and their MACs per clock."""
    rate = MACS_PER_CLOCK * 2 / a.bytes * PRODUCT_RATE.get(a, 1.0) * (1.0 if is_aligned else 0.5)
    configs = LIBRARY_CONFIGS if of == "library" else PRODUCT_CONFIGS
    plain = (replace(config, epilogue_tile=None, raster="heuristic") for config in configs)
    scaled = dict.fromkeys(_scaled_k(config, a) for config in plain)
    if math == "simt":
        return dict.fromkeys(scaled, PRODUCT_SIMT_MACS_PER_CLOCK)
    return {config: rate * _EFFICIENCY.get(config.tile_shape[:2], 0.6) for config in scaled}


def _is_aligned(signature: Signature) -> bool:
    return all(x.alignment * x.dtype.bytes >= TMA_BYTES for x in (signature.a, signature.b))


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# share of the tensor cores' rate that a mainloop reaches
_EFFICIENCY = {(256, 192): 0.93, (128, 256): 0.92, (256, 128): 0.92, (256, 160): 0.92, (128, 224): 0.92,
               (128, 192): 0.92, (192, 128): 0.92, (128, 160): 0.89, (128, 128): 0.86, (128, 96): 0.78,
               (64, 256): 0.75, (64, 224): 0.74, (64, 128): 0.70, (128, 64): 0.70, (64, 112): 0.66, (64, 96): 0.63,
               (64, 64): 0.55, (64, 48): 0.45, (64, 32): 0.35, (64, 16): 0.18, (64, 8): 0.09,
               (128, 32): 0.45, (128, 16): 0.25}


def _rate(signature: Signature, config: GemmConfig) -> float:
    rate = MACS_PER_CLOCK * 2 / signature.a.dtype.bytes
    if config.family == "sm80":
        rate *= 0.5 if signature.math != "simt" else 0.06
    elif config.family == "sm90" and sm90.is_promoted(signature, config):
        rate *= EXACT_FP8_RATE[config.kernel_schedule]
    elif config.kernel_schedule == "cooperative" and config.tile_shape[:2] == (128, 192):
        rate *= COOPERATIVE_128_192
    return rate * _EFFICIENCY.get(config.tile_shape[:2], 0.6)


def _epilogue_cycles(signature: Signature, config: GemmConfig) -> float:
    elements = config.tile_shape[0] * sm90.share_n(config)  # of one CTA
    return elements * (_tile_bytes(signature) / SM_BYTES_PER_CLOCK + 1 / 16) + 500


def _tile_bytes(signature: Signature) -> int:
    """Bytes that the epilogue reads and writes for one element of the tile."""
    loaded = sum(x.dtype.bytes for x in signature.inputs if x.kind is Kind.TILE)
    return loaded + sum(x.dtype.bytes for x in signature.outputs if x.kind is Kind.TILE)


def _scaled_k(config: GemmConfig, a: DType) -> GemmConfig:
    m, n, k = config.tile_shape
    k = k * 2 // a.bytes
    if a in FP8:
        k = min(k, sm90.EXACT_SUM_EVERY_K)
    return replace(config, tile_shape=(m, n, k))
