"""A plan is everything about a call but its pointers: loaded kernels, strides, what to allocate. A run fills it in.

A run makes no copy that its plan does not name, and never synchronises, so that it can be captured into a CUDA graph.
What it allocates is its own, from torch's caching allocator, so that calls on several streams share nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from gemmgen import jit, pipeline, pointwise
from gemmgen.arch import Arch
from gemmgen.bind import Binding, EpilogueBinding, MatrixReading, result_shape
from gemmgen.config import GemmConfig
from gemmgen.device import Target, stream_of
from gemmgen.dtypes import DType
from gemmgen.errors import CacheError
from gemmgen.evaluate import TORCH_DTYPES, round_to
from gemmgen.jit.build import BuiltKernel
from gemmgen.settings import settings
from gemmgen.signature import Kind, Reduce

RASTER = {"heuristic": 0, "M": 1, "N": 2}
IDENTITY = {Reduce.SUM: 0.0, Reduce.MAX: float("-inf"), Reduce.MIN: float("inf")}

Key = tuple[object, ...]
Found = TypeVar("Found")
Used = TypeVar("Used")
Operands = Mapping[str, "Tensor | float"]
Product = Callable[[Tensor, Tensor, Tensor], object]
TorchCall = Callable[[Tensor, Tensor, Operands, Tensor], object]

_WORD_BYTES = 8
_Words = ctypes.c_uint64 * (ctypes.sizeof(jit.Args) // _WORD_BYTES)
Words = ctypes.Array[ctypes.c_uint64]
MAX_SPARE = 4  # argument structs that a plan keeps; as many threads may run it at once without a new one
_A_WORD = (jit.Args.a.offset + jit.MatrixArgs.ptr.offset) // _WORD_BYTES
_B_WORD = (jit.Args.b.offset + jit.MatrixArgs.ptr.offset) // _WORD_BYTES


class PlainTorchOp(NamedTuple):
    """An op of torch, such as "torch.addmm", and the operand that it adds to A @ B."""

    name: str
    bias: str | None


class Load(NamedTuple):
    """An operand of the epilogue.

    Attributes:
        word: of the argument struct: its pointer.
        value_offset: of the argument struct, in bytes: the number, where `is_number`.
        copied: whether it is made contiguous first.
    """

    name: str
    slot: int
    word: int
    value_offset: int
    copied: bool
    is_number: bool


class Store(NamedTuple):
    """A result. Its pointer, or that of its partials, is word `word` of the argument struct."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    word: int
    is_reduction: bool


class Step(NamedTuple):
    """One launch of `gemmgen_finish`: partials of `shape` [L, P, X], contiguous, are combined along P into [L, X]."""

    module: jit.Module
    shape: tuple[int, int, int]
    grid: tuple[int, int, int]
    is_narrow: bool


class Finish(NamedTuple):
    """What turns the partials of result `result` into it: a second step reduces N as well, for one over both axes."""

    result: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    """Everything about a call but its pointers.

    Attributes:
        way: "fused", "split", "library", or "pointwise" where there is no product to compute.
        config: of the fused kernel.
        kernel: the fused kernel, or None where the pointwise `module` does the work.
        module: the pointwise kernel; None beside a fused kernel or `torch_call`, and for an empty result.
        copies_matrices: whether A or B is made contiguous along K first.
        is_final: whether calls of its class run it from now on; not while a fused kernel is being built to take its
            place, nor where the call was to be measured and could not be.
        spare: argument structs of finished calls, to be filled again; a launch has read its own when it returns.
        product: of a split plan: `product(A, B, accum)` writes A @ B into accum `[L, M, N]`.
        plain_product: of a split plan: the op of torch that makes accum `[M, N]` of A and B as they are given, if one
            does.
        torch_call: of a library plan: `torch_call(A, B, operands, D)` writes the only result.
        plain_torch_op: of a library plan: what makes that result of the tensors as they are given, if one op does.
        args: the argument struct without its pointers.
    """

    binding: EpilogueBinding
    way: str
    args: jit.Args
    loads: tuple[Load, ...]
    stores: tuple[Store, ...]
    finishes: tuple[Finish, ...] = ()
    config: GemmConfig | None = None
    kernel: jit.Kernel | None = None
    workspace_bytes: int = 0
    module: jit.Module | None = None
    grid: tuple[int, int, int] = (1, 1, 1)
    product: Product | None = None
    plain_product: str | None = None
    torch_call: TorchCall | None = None
    plain_torch_op: PlainTorchOp | None = None
    copies_matrices: bool = False
    is_final: bool = True
    spare: list[tuple[jit.Args, Words]] = field(default_factory=list, compare=False, repr=False)

    a_word: ClassVar[int] = _A_WORD
    b_word: ClassVar[int] = _B_WORD

    @property
    def depends_on_precision(self) -> bool:
        """Whether torch's setting for fp32 products chose it."""
        return isinstance(self.binding, Binding) and self.binding.signature.a.dtype is DType.F32

    def with_order(self, config: GemmConfig) -> Plan:
        """The same kernel walking its tiles by the raster and the swizzle of `config`."""
        args = jit.Args.from_buffer_copy(self.args)
        args.swizzle, args.raster = config.swizzle, RASTER[config.raster]
        workspace_bytes = self.kernel.workspace_bytes(args) if self.kernel else 0
        return replace(self, config=config, args=args, workspace_bytes=workspace_bytes, spare=[])


# Making plans

_texts: dict[Key, str] = {}  # one for each epilogue and layout of its operands
_modules: dict[Key, Path] = {}


def fused_plan(binding: Binding, config: GemmConfig, built: BuiltKernel, target: Target) -> Plan:
    """The plan of a fused kernel, which is loaded into the current context."""
    kernel = jit.load_kernel(built)
    args = _filled(binding)
    for matrix, reading in ((args.a, binding.a), (args.b, binding.b)):
        matrix.ld, matrix.batch_stride = reading.ld, reading.batch_stride
    args.sm_count, args.swizzle, args.raster = target.sm_count, config.swizzle, RASTER[config.raster]
    args.split_k = config.split_k
    counts = [kernel.partial_count(args, i) if output.reduce else 0 for i, output in enumerate(binding.outputs)]
    finishes = _finishes(binding, target.arch, counts, args)
    return Plan(
        binding, "fused", args, _loads(binding), _stores(binding), finishes,
        config=config, kernel=kernel, workspace_bytes=kernel.workspace_bytes(args),
        copies_matrices=binding.a.copied or binding.b.copied,
    )  # fmt: skip


def pointwise_plan(
    binding: EpilogueBinding, arch: Arch, product: Product | None = None, plain_product: str | None = None
) -> Plan:
    """The plan of the pointwise kernel, over what `product` accumulates or, without one, over an accum of 0."""
    extents = binding.extents
    vector = _vector(binding)
    args = _filled(binding)
    way = "pointwise" if product is None else "split"
    if binding.is_empty:
        return Plan(binding, way, args, (), _stores(binding))
    args.a.ld, args.a.batch_stride = extents.N, extents.M * extents.N
    module = _module(pointwise_text(binding), arch)
    counts = [
        pointwise.partial_count(output.kind, extents.M, extents.N, vector) if output.reduce else 0
        for output in binding.outputs
    ]
    finishes = _finishes(binding, arch, counts, args)
    tiles_m, tiles_n = pointwise.grid(extents.M, extents.N, vector)
    grid = (tiles_m * tiles_n, 1, min(extents.L, pointwise.MAX_GRID_Z))
    return Plan(
        binding, way, args, _loads(binding), _stores(binding), finishes,
        module=module, grid=grid, product=product, plain_product=plain_product,
    )  # fmt: skip


def library_plan(binding: Binding, torch_call: TorchCall, plain: PlainTorchOp | None) -> Plan:
    """The plan of a call that an op of torch computes."""
    return Plan(
        binding, "library", _filled(binding), (), _stores(binding), torch_call=torch_call, plain_torch_op=plain
    )


def pointwise_text(binding: EpilogueBinding) -> str:
    """The module of the pointwise kernel of a binding; the same for every M."""
    vector = _vector(binding)
    key = (binding.graph.name, binding.graph.digest, binding.slots, binding.inputs, binding.outputs, vector)
    if key not in _texts:
        _texts[key] = pipeline.pointwise_source(binding, vector)
    return _texts[key]


def _module(text: str, arch: Arch) -> jit.Module:
    """The kernels in `text`, in the current context. They are looked for in the cache, or built, once."""
    key = (settings().cache_dir, text, arch)
    return found_once(_modules, key, lambda: jit.build_module(text, arch), jit.load_module)


def found_once(known: dict[Key, Found], key: Key, find: Callable[[], Found], use: Callable[[Found], Used]) -> Used:
    """What `use` makes of what is `known`, or else of what `find` looks for in the cache or builds."""
    if (found := known.get(key)) is not None:
        with contextlib.suppress(CacheError):  # it was removed from the cache, and has to be built again
            return use(found)
    known[key] = found = find()
    return use(found)


def _vector(binding: EpilogueBinding) -> int:
    return min(pointwise.MAX_VECTOR, binding.tile_alignment)


def finish_texts(binding: EpilogueBinding) -> list[str]:
    """The modules that finish the reductions of a binding."""
    texts = []
    for output, result, dtype in zip(binding.outputs, binding.graph.results, binding.dtypes, strict=True):
        if output.reduce is not None:
            texts.append(pointwise.render_finish(output.reduce, dtype))
            if result.node.attr == "MN":
                texts.append(pointwise.render_finish(output.reduce, DType.F32))
    return texts


def _filled(binding: EpilogueBinding) -> jit.Args:
    """The argument struct with the extents and the strides of the epilogue's tensors."""
    args = jit.Args()
    extents = binding.extents
    args.m, args.n, args.k, args.l = extents.M, extents.N, extents.K, extents.L
    for i, reading in enumerate(binding.readings):
        if reading is not None:
            args.inputs[i].row_stride, args.inputs[i].batch_stride = reading.row_stride, reading.batch_stride
    for i, output in enumerate(binding.outputs):
        if output.reduce is None:
            args.outputs[i].row_stride = extents.N
            args.outputs[i].batch_stride = extents.M * extents.N
    return args


def _loads(binding: EpilogueBinding) -> tuple[Load, ...]:
    size = ctypes.sizeof(jit.InputArgs)
    starts = [jit.Args.inputs.offset + i * size for i in range(len(binding.slots))]
    return tuple(
        Load(
            slot.name, i, (starts[i] + jit.InputArgs.ptr.offset) // _WORD_BYTES,
            starts[i] + jit.InputArgs.value.offset, reading.copied, reading.is_number,
        )
        for i, (slot, reading) in enumerate(zip(binding.slots, binding.readings, strict=True))
        if slot.name is not None and reading is not None
    )  # fmt: skip


def _stores(binding: EpilogueBinding) -> tuple[Store, ...]:
    start, size = jit.Args.outputs.offset + jit.OutputArgs.ptr.offset, ctypes.sizeof(jit.OutputArgs)
    return tuple(
        Store(result_shape(binding, i), TORCH_DTYPES[dtype], (start + i * size) // _WORD_BYTES, bool(output.reduce))
        for i, (output, dtype) in enumerate(zip(binding.outputs, binding.dtypes, strict=True))
    )


def _finishes(binding: EpilogueBinding, arch: Arch, counts: Sequence[int], args: jit.Args) -> tuple[Finish, ...]:
    """The last steps of the reductions; also fills in the strides of their partials."""
    extents = binding.extents
    finishes = []
    for i, (output, result) in enumerate(zip(binding.outputs, binding.graph.results, strict=True)):
        if output.reduce is None:
            continue
        kept = extents.N if output.kind is Kind.ROW else extents.M
        args.outputs[i].row_stride, args.outputs[i].batch_stride = kept, kept * counts[i]
        is_over_both, dtype = result.node.attr == "MN", binding.dtypes[i]
        first = _step(output.reduce, DType.F32 if is_over_both else dtype, (extents.L, counts[i], kept), arch)
        second = (_step(output.reduce, dtype, (extents.L, kept, 1), arch),) if is_over_both else ()
        finishes.append(Finish(i, (first, *second)))
    return tuple(finishes)


def _step(reduce: Reduce, dtype: DType, shape: tuple[int, int, int], arch: Arch) -> Step:
    module = _module(pointwise.render_finish(reduce, dtype), arch)
    return Step(module, shape, *pointwise.finish_grid(shape[0], shape[2]))


# Running them


def run(
    plan: Plan,
    matrices: tuple[Tensor, Tensor] | None,
    operands: Operands,
    device: torch.device,
    outs: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The results of a call, on the current stream of `device`, which must be the current device.

    Args:
        matrices: A and B; None for a plan that was bound without them.
        outs: written into where given.
    """
    if plan.torch_call is not None and matrices is not None:
        (D,) = outs or _allocated(plan, device)
        plan.torch_call(*matrices, operands, D)
        return [D]
    stream = stream_of(device.index)
    if outs is None:
        results = _allocated(plan, device)
        args, words = _spare(plan)
    else:
        results = list(outs)
        args, words = _copied(plan.args)
        _set_strides(plan, args, results)
    keep = _bind_inputs(plan, args, words, operands)
    partials = _bind_outputs(plan, words, results, device)
    if plan.kernel is not None:
        _run_fused(plan, plan.kernel, args, words, matrices, device, stream)
    elif plan.module is not None:
        accum = _multiplied(plan, matrices, device)
        words[_A_WORD] = 0 if accum is None else accum.data_ptr()
        plan.module.launch("gemmgen_pointwise", plan.grid, (pointwise.THREADS, 1, 1), [args], stream)
    if plan.finishes:
        for finish, partial in zip(plan.finishes, partials, strict=True):
            _finish(finish, partial, results[finish.result], stream)
    if outs is None and len(plan.spare) < MAX_SPARE:
        plan.spare.append((args, words))
    del keep
    return results


def _allocated(plan: Plan, device: torch.device) -> list[Tensor]:
    return [torch.empty(store.shape, dtype=store.dtype, device=device) for store in plan.stores]


def _spare(plan: Plan) -> tuple[jit.Args, Words]:
    try:
        return plan.spare.pop()
    except IndexError:  # all in use, by other threads
        return _copied(plan.args)


def _copied(args: jit.Args) -> tuple[jit.Args, Words]:
    """A copy of the argument struct, and the same memory as 64-bit words."""
    copy = jit.Args.from_buffer_copy(args)
    return copy, _Words.from_buffer(copy)


def _run_fused(
    plan: Plan,
    kernel: jit.Kernel,
    args: jit.Args,
    words: Words,
    matrices: tuple[Tensor, Tensor] | None,
    device: torch.device,
    stream: int,
) -> None:
    assert matrices is not None
    A, B = matrices
    if plan.copies_matrices:
        binding: Binding = plan.binding  # type: ignore[assignment]
        A, B = laid_out(A, binding.a, -1), laid_out(B, binding.b, -2)
    words[_A_WORD], words[_B_WORD] = A.data_ptr(), B.data_ptr()
    if not plan.workspace_bytes:
        kernel.run(args, 0, stream)
        return
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    kernel.run(args, workspace.data_ptr(), stream)


def _multiplied(plan: Plan, matrices: tuple[Tensor, Tensor] | None, device: torch.device) -> Tensor | None:
    if plan.product is None or matrices is None:
        return None
    extents = plan.binding.extents
    accum = torch.empty(
        (extents.L, extents.M, extents.N), dtype=TORCH_DTYPES[plan.binding.graph.accum], device=device
    )
    plan.product(*matrices, accum)
    return accum


def laid_out(matrix: Tensor, reading: MatrixReading, k_axis: int) -> Tensor:
    """`matrix`, or its copy with K contiguous, where no kernel takes its strides: A `[..., M, K]`, B `[..., N, K]`."""
    if not reading.copied:
        return matrix
    return matrix.contiguous() if k_axis == -1 else matrix.mT.contiguous()


def _bind_inputs(plan: Plan, args: jit.Args, words: Words, operands: Operands) -> list[Tensor]:
    """Fill the operands' pointers; the copies returned must live until the launch."""
    keep = []
    for name, slot, word, _, copied, _ in plan.loads:
        value = operands[name]
        if not isinstance(value, Tensor):
            args.inputs[slot].value = float(value)
            continue
        if copied:
            value = value.contiguous()
            keep.append(value)
        words[word] = value.data_ptr()
    return keep


def _bind_outputs(plan: Plan, words: Words, results: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Fill the results' pointers; the partials of the reductions, in the order of the plan's finishes."""
    for store, result in zip(plan.stores, results, strict=True):
        words[store.word] = result.data_ptr()
    if plan.binding.is_empty:
        _set_identities(plan, results)
    partials = []
    for finish in plan.finishes:
        partials.append(torch.empty(finish.steps[0].shape, dtype=torch.float32, device=device))
        words[plan.stores[finish.result].word] = partials[-1].data_ptr()
    return partials


def _set_identities(plan: Plan, results: Sequence[Tensor]) -> None:
    """Over nothing a reduction is its identity."""
    for output, dtype, result in zip(plan.binding.outputs, plan.binding.dtypes, results, strict=True):
        if output.reduce is not None:
            # no copy of host memory, which a CUDA graph would read again
            result.fill_(float(round_to(torch.tensor(IDENTITY[output.reduce]), dtype)))


def _set_strides(plan: Plan, args: jit.Args, outs: Sequence[Tensor]) -> None:
    for output, store, out in zip(args.outputs, plan.stores, outs, strict=False):
        if not store.is_reduction:
            if out.shape[-2] > 1:
                output.row_stride = out.stride(-2)
            output.batch_stride = out.stride(0) if out.dim() == 3 and out.shape[0] > 1 else 0


def _finish(finish: Finish, partials: Tensor, result: Tensor, stream: int) -> None:
    first, *rest = finish.steps
    if not rest:
        _launch(first, partials, result, stream)
        return
    batches, _, kept = first.shape
    columns = torch.empty((batches, kept), dtype=torch.float32, device=partials.device)
    _launch(first, partials, columns, stream)
    _launch(rest[0], columns, result, stream)


def _launch(step: Step, partials: Tensor, result: Tensor, stream: int) -> None:
    batches, count, kept = step.shape
    arguments = [
        ctypes.c_void_p(partials.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(count),
        ctypes.c_int64(kept), ctypes.c_int64(batches), ctypes.c_int64(kept), ctypes.c_int64(kept * count),
        ctypes.c_int(step.is_narrow),
    ]
    step.module.launch("gemmgen_finish", step.grid, (pointwise.FINISH_THREADS, 1, 1), arguments, stream)
