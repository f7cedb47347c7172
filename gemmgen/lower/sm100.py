"""SM100: CUTLASS 3.x collectives (TMA, UMMA, tensor memory) around the functors; 16-bit inputs, one C, one D."""

from __future__ import annotations

from gemmgen.arch import Arch
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType
from gemmgen.lower import sm90
from gemmgen.signature import Kind, Signature
from gemmgen.templates import render

MMA_ROWS = 128  # rows of the accumulator that one CTA holds in tensor memory
UMMA_K_BYTES = 32


def render_skeleton(signature: Signature, config: GemmConfig, arch: Arch) -> str:
    """The CUDA text of the skeleton; compile it for `arch.target`, once plain and once with GEMMGEN_LAUNCHER.

    `reject_reason(signature, config, arch)` must be None.
    """
    ctas = _ctas_per_mma(config)
    tile_m, tile_n, tile_k = config.tile_shape
    return render(
        "sm100.cu.jinja",
        **sm90.collective_values(signature, config),
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        mma_m=tile_m * ctas,
        mma_ctas=ctas,
        epilogue_tile=sm90.epilogue_tile(config.epilogue_tile),
        epilogue_schedule=f"TmaWarpSpecialized{ctas}Sm",
        kernel_schedule=f"KernelTmaWarpSpecialized{ctas}SmSm100",
        stages=sm90.stage_count(config),
        scheduler="void",
        cluster_split=0,
        argument_statements=(),
    )


def reject_reason(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    """Why `config` cannot run `signature` on `arch` with this family, or None when it can."""
    if "sm100" not in arch.families or config.family != "sm100":
        return f"the sm100 family does not run {config.family} configs on {arch.name}"
    rules = (
        _reject_mainloop,
        sm90.reject_alignment,
        sm90.reject_operands,
        _reject_epilogue,
        _reject_config,
        _reject_tile,
    )
    reasons = (rule(signature, config, arch) for rule in rules)
    return next((reason for reason in reasons if reason), None)


def _reject_mainloop(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    a, b = signature.a.dtype, signature.b.dtype
    if a is not b or a not in (DType.BF16, DType.F16) or signature.math != "tensor":
        return f"the sm100 family multiplies bf16 or f16 so far, not {a.text} by {b.text}"
    if signature.accum is not DType.F32:
        return f"{a.text} inputs do not accumulate in {signature.accum.text}"
    return None


def _reject_epilogue(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    if any(output.reduce is not None for output in signature.outputs):
        return "the sm100 family has no reductions yet"
    if len(signature.outputs) != 1:
        return "the sm100 family stores one [M, N] output so far"
    if sum(value.kind is Kind.TILE for value in signature.inputs) > 1:
        return "the sm100 family loads one [M, N] operand so far"
    return None


def _reject_config(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    if config.kernel_schedule != "auto":
        return f"unknown kernel_schedule {config.kernel_schedule!r}; sm100 has 'auto'"
    if config.scheduler != "persistent" or config.split_k != 1:
        return "the sm100 family has no split-K yet"
    if config.swapped:
        return "the sm100 family does not swap A and B yet"
    if config.epilogue_tile is not None:
        return "the sm100 family chooses the epilogue tile itself"
    if not set(config.cluster_shape) <= {1, 2, 4} or config.cluster_shape[0] * config.cluster_shape[1] > 8:
        return f"cluster_shape {config.cluster_shape}: powers of two, at most 4 along a side and 8 CTAs"
    return None


def _reject_tile(signature: Signature, config: GemmConfig, arch: Arch) -> str | None:
    m, n, k = config.tile_shape
    k_step = UMMA_K_BYTES // signature.a.dtype.bytes
    if m != MMA_ROWS:
        return f"tile_shape m = {m}: a CTA's part of an UMMA has {MMA_ROWS} rows"
    if n % 32 or not 32 <= n <= 256:
        return f"tile_shape n = {n}: multiples of 32 up to 256"
    if k % k_step or k <= 0:
        return f"tile_shape k = {k}: an UMMA on {signature.a.dtype.text} takes multiples of {k_step}"
    stages = 2 if config.stages is None else config.stages
    stage_bytes = k * (m + n) * signature.a.dtype.bytes
    if stages < 2 or stages * stage_bytes > arch.smem_bytes:
        return f"{stages} stages of {stage_bytes} B: at least 2, within {arch.smem_bytes} B of shared memory"
    return None


def _ctas_per_mma(config: GemmConfig) -> int:
    """Pairs of CTAs share an UMMA where the cluster has pairs along M."""
    return 2 if config.cluster_shape[0] % 2 == 0 else 1
