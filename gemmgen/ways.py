"""The ways to run a call: a fused kernel of some config, or split into torch's product and a pointwise kernel.

All keep one numerics contract: accumulate in fp32 (int32 for int8), the whole epilogue in fp32, one rounding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from gemmgen import choose, jit, pipeline
from gemmgen.arch import Arch
from gemmgen.bind import Binding
from gemmgen.config import GemmConfig
from gemmgen.device import Target, is_capturing
from gemmgen.dtypes import DType
from gemmgen.errors import CompileError
from gemmgen.jit.build import BuiltKernel
from gemmgen.plan import Plan, Product, fused_plan, laid_out, pointwise_plan
from gemmgen.problem import EIGHT_BIT, FP8, Extents
from gemmgen.signature import Signature
from gemmgen.source import KernelSource

logger = logging.getLogger(__name__)

MAX_LOOPED_BATCHES = 16  # torch's 8-bit products take no batch: one launch each
INT8_MIN_ROWS = 17
INT8_MULTIPLE = 8
FP8_ALIGNED_BYTES = 16

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Fused:
    """One kernel of `config`."""

    config: GemmConfig
    name: ClassVar[str] = "fused"

    @property
    def label(self) -> str:
        return f"fused {self.config.label}{_run_time_values(self.config)}"

    def reject_reason(self, binding: Binding, arch: Arch) -> str | None:
        """Why it cannot run the call, or None when it can."""
        return choose.REJECT[self.config.family](binding.signature, self.config, arch)

    def estimate_us(self, signature: Signature, extents: Extents, target: Target) -> float:
        """The model's time, in microseconds."""
        return choose.estimate_us(signature, extents, self.config, target.sm_count)

    def fitted_to(self, extents: Extents) -> Fused:
        """This way for another M: with a swizzle that pads its grid no further."""
        fitted = choose.fitted_to(extents, self.config)
        return self if self.config.swizzle <= fitted.swizzle else Fused(fitted)

    def facts(self) -> dict[str, object]:
        """What `way_of` makes this way from again; JSON."""
        return {"way": self.name, "config": asdict(self.config)}

    def source(self, binding: Binding, arch: Arch) -> KernelSource:
        """The CUDA text. Raises IllegalConfig where `reject_reason` has a reason."""
        return pipeline.kernel_source(binding, self.config, arch)

    def is_built(self, binding: Binding, arch: Arch) -> bool:
        """Whether its kernel is in the cache."""
        return jit.find(self.source(binding, arch)) is not None

    def plan(self, binding: Binding, target: Target) -> Plan:
        """The plan, its kernel built now if it is not in the cache. Raises what `jit.build` raises."""
        (built,) = jit.build([self.source(binding, target.arch)])
        return self.plan_of(built, binding, target)

    def plan_of(self, built: BuiltKernel, binding: Binding, target: Target) -> Plan:
        """The plan of a kernel that is built."""
        return fused_plan(binding, self.config, built, target)


@dataclass(frozen=True)
class Split:
    """torch's product into an fp32 (or int32) accumulator in memory, then the pointwise kernel over it."""

    name: ClassVar[str] = "split"
    label: ClassVar[str] = "split: cuBLAS, then the pointwise kernel"

    def reject_reason(self, binding: Binding, arch: Arch) -> str | None:
        """Why it cannot run the call, or None when it can."""
        product = PRODUCTS.get(binding.signature.a.dtype)
        if product is None:
            return f"torch has no product of {binding.signature.a.dtype.text} that accumulates in fp32"
        return product.reject_reason(binding, arch)

    def estimate_us(self, signature: Signature, extents: Extents, target: Target) -> float:
        """The model's time, in microseconds."""
        return choose.estimate_split_us(signature, extents, target.sm_count)

    def fitted_to(self, extents: Extents) -> Split:
        """This way for another M."""
        return self

    def facts(self) -> dict[str, object]:
        """What `way_of` makes this way from again; JSON."""
        return {"way": self.name}

    def plan(self, binding: Binding, target: Target) -> Plan:
        """The plan; its kernel needs NVRTC alone. Raises what `jit.build_module` raises."""
        return pointwise_plan(binding, target.arch, PRODUCTS[binding.signature.a.dtype].bound(binding))


Way = Fused | Split
AnyWay = TypeVar("AnyWay", Fused, Way)
T = TypeVar("T")


def way_of(facts: Mapping[str, Any]) -> Way:
    """The way that `facts()` described.

    Raises:
        ValueError, TypeError, KeyError: it described none.
    """
    if facts["way"] == Split.name:
        return SPLIT
    if facts["way"] != Fused.name:
        raise ValueError(f"no way is called {facts['way']!r}")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts["config"].items()
    }
    return Fused(GemmConfig(**fields))
SPLIT = Split()


def _run_time_values(config: GemmConfig) -> str:
    """What `GemmConfig.label` leaves out, because no skeleton is compiled for it."""
    parts = [f" split_k {config.split_k}"] if config.split_k > 1 else []
    parts += [f" swizzle {config.swizzle}"] if config.swizzle > 1 else []
    parts += [f" raster {config.raster}"] if config.raster != "heuristic" else []
    return "".join(parts)


# torch's products


@dataclass(frozen=True)
class TorchProduct:
    """How torch multiplies two matrices of one dtype into a wider accumulator.

    Attributes:
        one: `one(A, B, accum)` for `[M, K]`, `[K, N]` and `[M, N]`.
        many: the same for `[L, ...]`; None where torch has none.
        reject_reason: why it cannot run a call, or None.
    """

    one: Product
    many: Product | None
    reject_reason: Callable[[Binding, Arch], str | None]

    def bound(self, binding: Binding) -> Product:
        """`product(A, B, accum)` for calls that are read as `binding` says, with accum `[L, M, N]`."""

        def multiply(A: Tensor, B: Tensor, accum: Tensor) -> None:
            if binding.signature.a.dtype in EIGHT_BIT:  # only those with K contiguous
                A = laid_out(A, binding.a, -1)
                B = laid_out(B, binding.b, -2).mT if binding.b.copied else B
            self._multiply(_unbatched(A), _unbatched(B), accum)

        return multiply

    def _multiply(self, A: Tensor, B: Tensor, accum: Tensor) -> None:
        L, _, N = accum.shape
        if B.dim() == 2 and A.dim() == 3 and _rows_follow(A):
            self.one(A.view(-1, A.shape[-1]), B, accum.view(-1, N))
        elif L == 1:
            self.one(_batch(A, 0), _batch(B, 0), accum[0])
        elif self.many is not None:
            self.many(A.expand(L, *A.shape[-2:]), B.expand(L, *B.shape[-2:]), accum)
        else:
            for index in range(L):
                self.one(_batch(A, index), _batch(B, index), accum[index])


def _unbatched(matrix: Tensor) -> Tensor:
    """A batch that is one matrix many times, as that matrix."""
    return matrix[0] if matrix.dim() == 3 and (matrix.shape[0] == 1 or matrix.stride(0) == 0) else matrix


def _batch(matrix: Tensor, index: int) -> Tensor:
    return matrix[index] if matrix.dim() == 3 else matrix


def _rows_follow(A: Tensor) -> bool:
    """Whether the rows of all batches can be viewed as those of one matrix."""
    return A.stride(0) == A.shape[1] * A.stride(1)


def _mm_widened(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten.mm.dtype_out(A, B, torch.float32, out=accum)


def _bmm_widened(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten.bmm.dtype_out(A, B, torch.float32, out=accum)


def _mm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten.mm.out(A, B, out=accum)


def _bmm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten.bmm.out(A, B, out=accum)


def _int_mm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    _aten._int_mm.out(A, B, out=accum)


def _scaled_mm(A: Tensor, B: Tensor, accum: Tensor) -> None:
    one = _fresh_unit(A.device) if is_capturing() else _unit(A.device)
    _aten._scaled_mm.out(A, B, one, one, out_dtype=torch.float32, use_fast_accum=False, out=accum)


def _fresh_unit(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


_unit = functools.lru_cache(maxsize=64)(_fresh_unit)  # never one that was made in a graph's memory


def _never(binding: Binding, arch: Arch) -> str | None:
    return None


def _reject_int8(binding: Binding, arch: Arch) -> str | None:
    extents = binding.extents
    rows = extents.M * extents.L if _is_one_product(binding) else extents.M
    if rows < INT8_MIN_ROWS:
        return f"torch._int_mm takes {INT8_MIN_ROWS} rows or more, not {rows}"
    if extents.K % INT8_MULTIPLE or extents.N % INT8_MULTIPLE:
        return f"torch._int_mm takes multiples of {INT8_MULTIPLE}, not K = {extents.K} and N = {extents.N}"
    if min(binding.a.aligned_bytes, binding.b.aligned_bytes) < INT8_MULTIPLE:
        return f"A or B is aligned to less than {INT8_MULTIPLE} bytes"
    return _reject_batches(binding)


def _reject_fp8(binding: Binding, arch: Arch) -> str | None:
    signature, extents = binding.signature, binding.extents
    if not arch.has_fp8_mma:
        return f"{arch.name} has no fp8 tensor cores"
    if (signature.a.dtype, signature.b.dtype) == (DType.E5M2, DType.E5M2):
        return "torch._scaled_mm does not multiply e5m2 by e5m2"
    if extents.K % FP8_ALIGNED_BYTES or extents.N % FP8_ALIGNED_BYTES:
        return f"torch._scaled_mm takes multiples of {FP8_ALIGNED_BYTES}, not K = {extents.K} and N = {extents.N}"
    if min(binding.a.aligned_bytes, binding.b.aligned_bytes) < FP8_ALIGNED_BYTES:
        return f"A or B is aligned to less than {FP8_ALIGNED_BYTES} bytes"
    return _reject_batches(binding)


def _reject_batches(binding: Binding) -> str | None:
    if binding.extents.L > MAX_LOOPED_BATCHES and not _is_one_product(binding):
        return f"torch multiplies no batches of {binding.signature.a.dtype.text}, and {binding.extents.L} are too many"
    return None


def _is_one_product(binding: Binding) -> bool:
    """Whether all batches share B and their rows follow each other in A, so that they are one product."""
    a, extents = binding.a, binding.extents
    return extents.L == 1 or (
        binding.b.batch_stride == 0 and a.k_major and a.batch_stride == extents.M * a.ld and extents.M > 1
    )


PRODUCTS: dict[DType, TorchProduct] = {
    DType.BF16: TorchProduct(_mm_widened, _bmm_widened, _never),
    DType.F16: TorchProduct(_mm_widened, _bmm_widened, _never),
    DType.F32: TorchProduct(_mm, _bmm, _never),
    DType.I8: TorchProduct(_int_mm, None, _reject_int8),
    **dict.fromkeys(FP8, TorchProduct(_scaled_mm, None, _reject_fp8)),
}


# Choosing


@dataclass(frozen=True)
class Timed:
    """A way and its time: measured, or the model's."""

    way: Way
    time_us: float


@dataclass(frozen=True)
class Selection:
    """What a call runs.

    Attributes:
        ways: to be tried in this order: a kernel that a compiler refuses, as it spills, gives way to the next.
        why: the reason in one line.
        table: the ways that were compared, fastest first.
        measured: whether the times are; else they are the model's.
    """

    ways: tuple[Way, ...]
    why: str
    table: tuple[Timed, ...]
    measured: bool = False
    notes: tuple[str, ...] = ()


SPLIT_MARGIN = 1.25  # the model must say that split is so much faster before it is chosen unmeasured


def select(binding: Binding, target: Target, config: GemmConfig | None = None) -> Selection:
    """The ways to run a call, by the model alone.

    Args:
        config: the only one to use, where the user gave one.

    Raises:
        IllegalConfig: no way is legal; the message lists the reasons.
    """
    if config is not None:
        return Selection((Fused(config),), "the config given to Gemm", ())
    ranked = choose.ranked(binding.signature, binding.extents, target.arch, target.sm_count)
    fused = [Timed(Fused(choice.config), choice.time_us) for choice in ranked]
    if reason := SPLIT.reject_reason(binding, target.arch):
        only = tuple(timed.way for timed in fused)
        why = "the fastest by the model (no measurement)"
        return Selection(only, why, tuple(fused), notes=(f"no split: {reason}",))
    split = Timed(SPLIT, SPLIT.estimate_us(binding.signature, binding.extents, target))
    table = tuple(sorted([*fused, split], key=lambda timed: timed.time_us))
    if split.time_us * SPLIT_MARGIN < fused[0].time_us:
        why = f"by the model {fused[0].time_us / split.time_us:.1f} times faster than any fused kernel (no measurement)"
        return Selection((SPLIT, *(timed.way for timed in fused)), why, table)
    return Selection(
        (*(timed.way for timed in fused), SPLIT), "the fastest fused kernel by the model (no measurement)", table
    )


def first_plan(ways: Sequence[Way], binding: Binding, target: Target) -> Plan:
    """The plan of the first of `ways` that builds.

    Raises:
        CompileError: none builds; the error of the first.
    """
    return _first(ways, binding, lambda way: way.plan(binding, target))


def first_built(ways: Sequence[Fused], binding: Binding, arch: Arch) -> tuple[Fused, BuiltKernel]:
    """The first of `ways` that builds, with its kernel. Raises as `first_plan`."""

    def build(way: Fused) -> tuple[Fused, BuiltKernel]:
        (built,) = jit.build([way.source(binding, arch)])
        return way, built

    return _first(ways, binding, build)


def _first(ways: Sequence[AnyWay], binding: Binding, attempt: Callable[[AnyWay], T]) -> T:
    refusals: list[CompileError] = []
    for way in ways:
        try:
            return attempt(way)
        except CompileError as error:
            refusals.append(error)
            logger.warning("%s is refused for `%s`: %s", way.label, binding.graph.name, error)
    raise refusals[0]
