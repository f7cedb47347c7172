"""Which `GemmConfig` runs a problem: the candidates of an architecture, ranked by an analytic model of time.

Nothing is measured here. The model counts waves of CTA tiles, and for a tile the larger of its tensor-core and
its memory time, plus the part of the epilogue that no mainloop hides. Its constants were fitted on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gemmgen.arch import Arch
from gemmgen.config import GemmConfig
from gemmgen.errors import IllegalConfig
from gemmgen.lower import sm80, sm90, sm100
from gemmgen.problem import FP8, Extents
from gemmgen.signature import Kind, Signature

CLOCK_GHZ = 1.7  # under load
MACS_PER_CLOCK = 2048  # of one SM, 16-bit inputs
MEMORY_BYTES_PER_CLOCK = 2400  # of the whole device
SM_BYTES_PER_CLOCK = 44  # what one SM draws through L2
LAUNCH_CYCLES = 4000

Rejector = Callable[[Signature, GemmConfig, Arch], "str | None"]
REJECT: dict[str, Rejector] = {
    "sm90": sm90.reject_reason,
    "sm80": sm80.reject_reason,
    "sm100": sm100.reject_reason,
}


def _sm90(
    m: int, n: int, schedule: str, cluster: tuple[int, int], epilogue: tuple[int, int] | None = None
) -> GemmConfig:
    raster = "N" if cluster[0] > 1 else "M" if cluster[1] > 1 else "heuristic"  # neighbours in time share an operand
    return GemmConfig("sm90", (m, n, 64), cluster, schedule, epilogue, raster=raster)


# tile k is given for 16-bit inputs; `_scaled_k` adapts it to the bytes of a K line
SM90_CANDIDATES: tuple[GemmConfig, ...] = (
    _sm90(128, 256, "cooperative", (2, 1)),
    _sm90(256, 128, "cooperative", (2, 1)),
    _sm90(256, 192, "cooperative", (1, 2), (128, 64)),
    _sm90(256, 192, "cooperative", (1, 2)),
    _sm90(128, 192, "cooperative", (2, 1)),
    _sm90(128, 128, "cooperative", (1, 2)),
    _sm90(128, 192, "pingpong", (2, 1), (64, 64)),
    _sm90(128, 192, "pingpong", (2, 1)),
    _sm90(128, 128, "pingpong", (1, 2)),
    _sm90(64, 256, "pingpong", (1, 2)),
    _sm90(64, 128, "pingpong", (1, 2)),
    _sm90(64, 64, "pingpong", (1, 1)),
    _sm90(64, 32, "pingpong", (1, 1)),
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
    return [_scaled_k(config, signature) for config in {"sm90": SM90_CANDIDATES, "sm100": SM100_CANDIDATES}[family]]


def ranked(signature: Signature, extents: Extents, arch: Arch, sm_count: int | None = None) -> list[Ranked]:
    """The legal candidates of the first family that has any, fastest first by the model.

    Raises:
        IllegalConfig: no candidate is legal; the message lists the reasons.
    """
    for family in arch.families:
        legal = [c for c in candidates(signature, arch, family) if REJECT[family](signature, c, arch) is None]
        roomy = [c for c in legal if has_registers(signature, c)]
        if signature.math == "simt":  # one chain of K sums is twice as inaccurate as cuBLAS's several
            roomy = [c for c in legal if c.split_k > 1]
        if roomy or legal:
            swizzled = [_swizzled(extents, c) for c in roomy or legal]
            timed = [Ranked(c, estimate_us(signature, extents, c, sm_count or arch.sm_count)) for c in swizzled]
            return sorted(timed, key=lambda choice: choice.time_us)
    reasons = [f"{family}: {reason}" for family in arch.families for reason in rejections(signature, arch, family)]
    raise IllegalConfig(f"no kernel of {arch.name} runs this problem\n  " + "\n  ".join(reasons))


def has_registers(signature: Signature, config: GemmConfig) -> bool:
    """Whether the accumulators leave a thread enough registers for this epilogue; else ptxas would spill.

    A warpgroup's thread has 240 of them. The limits are what compiled without a spill.
    """
    if config.family != "sm90":
        return True
    threads = 256 if config.kernel_schedule.startswith("cooperative") else 128
    accums = config.tile_shape[0] * config.tile_shape[1] // threads
    if signature.a.dtype in FP8 and not config.kernel_schedule.endswith("fast_accum"):
        accums *= 2  # partial sums are promoted into a second set
    kinds = [value.kind for value in signature.inputs] + [value.kind for value in signature.outputs]
    reduces = any(output.reduce for output in signature.outputs)
    vectors = sum(value.kind in (Kind.ROW, Kind.COL) for value in signature.inputs)
    most = 1 if config.epilogue_tile else 2  # the automatic epilogue tile is narrower than the ones named here
    is_simple = kinds.count(Kind.TILE) <= most and vectors <= most and not reduces
    return accums <= (192 if is_simple else 128)


def _swizzled(extents: Extents, config: GemmConfig) -> GemmConfig:
    """`config` with the widest swizzle that pads the grid no further than the cluster does.

    CUTLASS rounds the tiles of both axes up to the swizzle times the cluster, and empty tiles take their turn.
    """
    if config.family != "sm90":
        return config
    counts = [
        _rounded(math.ceil(extent / tile), cluster)
        for extent, tile, cluster in zip((extents.M, extents.N), config.tile_shape, config.cluster_shape, strict=False)
    ]
    fits = [
        swizzle
        for swizzle in (8, 4, 2, 1)
        if all(n % (swizzle * c) == 0 for n, c in zip(counts, config.cluster_shape, strict=True))
    ]
    return replace(config, swizzle=(fits or [1])[0])


def rejections(signature: Signature, arch: Arch, family: str) -> list[str]:
    """Why no config of `family` runs the problem: each distinct reason."""
    configs = candidates(signature, arch, family) or [_sm80_probe()]  # that family lists legal configs only
    reasons = [REJECT[family](signature, config, arch) for config in configs]
    return list(dict.fromkeys(reason for reason in reasons if reason)) or [f"{family} has no mainloop for it"]


def _sm80_probe() -> GemmConfig:
    return GemmConfig("sm80", (128, 128, 64), kernel_schedule="multistage", stages=2, warp_shape=(64, 64, 64))


def estimate_us(signature: Signature, extents: Extents, config: GemmConfig, sm_count: int) -> float:
    """The model's time of one kernel, in microseconds."""
    tm, tn, tk = config.tile_shape
    cm, cn = config.cluster_shape
    bytes_per_element = signature.a.dtype.bytes
    tiles_m, tiles_n = _rounded(math.ceil(extents.M / tm), cm), _rounded(math.ceil(extents.N / tn), cn)
    tiles = tiles_m * tiles_n * extents.L * config.split_k
    active = min(tiles, sm_count)
    waves = math.ceil(tiles / sm_count)
    k = math.ceil(extents.K / tk / config.split_k) * tk
    macs = _rate(signature, config)
    compute = tm * tn * k / macs
    traffic = k * (tm / cn + tn / cm) * bytes_per_element
    memory = traffic / min(SM_BYTES_PER_CLOCK * 1.5, SM_BYTES_PER_CLOCK * sm_count / active * 1.0)
    dram = (extents.M + extents.N) * extents.K * extents.L * bytes_per_element / MEMORY_BYTES_PER_CLOCK
    epilogue = _epilogue_cycles(signature, config)
    hidden = config.kernel_schedule.startswith("pingpong") and waves > 1
    per_tile = max(compute, memory) + (0.15 * epilogue if hidden else epilogue)
    cycles = LAUNCH_CYCLES + max(waves * per_tile, dram) + (epilogue if hidden else 0)
    return cycles / (CLOCK_GHZ * 1e3)


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# share of the tensor cores' rate that a mainloop reaches
_EFFICIENCY = {(256, 192): 0.93, (128, 256): 0.92, (256, 128): 0.92, (128, 192): 0.92, (128, 128): 0.86,
               (64, 256): 0.75, (64, 128): 0.70, (64, 64): 0.55, (64, 32): 0.35}


def _rate(signature: Signature, config: GemmConfig) -> float:
    rate = MACS_PER_CLOCK * 2 / signature.a.dtype.bytes
    if config.family == "sm80":
        rate *= 0.5 if signature.math != "simt" else 0.06
    return rate * _EFFICIENCY.get(config.tile_shape[:2], 0.6)


def _epilogue_cycles(signature: Signature, config: GemmConfig) -> float:
    tm, tn, _ = config.tile_shape
    tile_bytes = sum(p.dtype.bytes for p in signature.inputs if p.kind is Kind.TILE)
    tile_bytes += sum(p.dtype.bytes for p in signature.outputs if p.kind is Kind.TILE)
    return tm * tn * (tile_bytes / SM_BYTES_PER_CLOCK + 1 / 16) + 500


def _scaled_k(config: GemmConfig, signature: Signature) -> GemmConfig:
    m, n, k = config.tile_shape
    return replace(config, tile_shape=(m, n, k * 2 // signature.a.dtype.bytes))
