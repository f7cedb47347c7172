"""Runs an epilogue's GEMM on a CUDA device: plans a call once per distinct metadata, then only fills pointers.

A plan holds the loaded kernel, the argument struct with every stride filled in, and what to allocate. It makes no
copy of anything and never synchronises, so that a call can be captured into a CUDA graph once its plan exists.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmgen import choose, jit, pipeline, pointwise
from gemmgen.arch import Arch, arch_of_capability
from gemmgen.bind import Binding, EpilogueBinding, MatrixReading, bind, bind_epilogue, result_shape
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import CompileError, UnsupportedOp
from gemmgen.evaluate import TORCH_DTYPES, round_to
from gemmgen.ir.graph import Graph
from gemmgen.jit.build import BuiltKernel
from gemmgen.problem import Extents, check_matrices, check_operands, extents_of, result_dtype
from gemmgen.signature import Kind, Output, Reduce

logger = logging.getLogger(__name__)

MAX_PLANS = 4096  # per op; a plan without its kernel is about 5 KB
RASTER = {"heuristic": 0, "M": 1, "N": 2}
IDENTITY = {Reduce.SUM: 0.0, Reduce.MAX: float("-inf"), Reduce.MIN: float("inf")}

Operands = Mapping[str, "Tensor | float"]


@dataclass(frozen=True)
class Finish:
    """The last step of reduction output `index`: its partials [L, P, X] become the result."""

    index: int
    module: jit.Module
    second: jit.Module | None  # reduces N as well, for a result over both axes
    partials: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """Everything about a call but its pointers.

    Attributes:
        kernel: the fused kernel, or None where the pointwise `module` does all the work.
        module: the pointwise kernel; None beside a fused kernel and for an empty result.
    """

    binding: EpilogueBinding
    config: GemmConfig | None
    kernel: jit.Kernel | None
    module: jit.Module | None
    args: jit.Args
    workspace_bytes: int
    finishes: tuple[Finish, ...]
    shapes: tuple[tuple[int, ...], ...]
    torch_dtypes: tuple[torch.dtype, ...]
    grid: tuple[int, int, int] = (1, 1, 1)


class Plans:
    """A bounded table of plans by the metadata of the calls; safe to use from several threads."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...], make: Callable[[], Plan]) -> Plan:
        plan = self._plans.get(key)
        if plan is None:
            plan = make()
            with self._lock:
                self._plans[key] = plan
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
        return plan


class Runner:
    """Runs the fused GEMM of one graph (per accumulator type) on CUDA devices."""

    def __init__(self, graph_for: Callable[[DType], Graph], config: GemmConfig | None = None):
        self._graph_for = graph_for
        self.config = config
        self._plans = Plans()

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        operands: Operands,
        out_dtype: torch.dtype | None = None,
        outs: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The results of the graph in order; written into `outs` where given."""
        with torch.cuda.device(A.device):
            return _run(self.plan(A, B, operands, out_dtype, outs), (A, B), operands, A.device, outs)

    def plan(
        self,
        A: Tensor,
        B: Tensor,
        operands: Operands,
        out_dtype: torch.dtype | None = None,
        outs: Sequence[Tensor] | None = None,
    ) -> Plan:
        """The plan of a call, made now (the device being current) if it has not been made yet."""
        precision = torch.get_float32_matmul_precision() if A.dtype == torch.float32 else None
        tensors = (A, B, *operands.values(), *(outs or ()))
        key = (A.get_device(), out_dtype, precision, len(outs or ()), *map(_metadata, tensors))
        return self._plans.get(key, lambda: self._make(A, B, operands, out_dtype, outs))

    def _make(
        self,
        A: Tensor,
        B: Tensor,
        operands: Operands,
        out_dtype: torch.dtype | None,
        outs: Sequence[Tensor] | None,
    ) -> Plan:
        binding = bind_call(self._graph_for, A, B, operands, out_dtype, outs)
        if binding.extents.K == 0 or binding.is_empty:
            return _pointwise_plan(binding, _arch_of(A.device))
        return _fused_plan(binding, A.device, self.config)


class PointwiseRunner:
    """Runs an elementwise graph, one without a mainloop, on CUDA devices."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._plans = Plans()

    def __call__(
        self, extents: Extents, operands: Operands, dtypes: Sequence[DType], device: torch.device
    ) -> list[Tensor]:
        """The results of the graph in order.

        Args:
            extents: of the tile; K is not read.
            dtypes: the stored dtype of each result.
        """
        key = (device.index, extents, *dtypes, *map(_metadata, operands.values()))
        with torch.cuda.device(device):
            plan = self._plans.get(key, lambda: self._make(extents, operands, dtypes, device))
            return _run(plan, None, operands, device, None)

    def _make(self, extents: Extents, operands: Operands, dtypes: Sequence[DType], device: torch.device) -> Plan:
        return _pointwise_plan(bind_epilogue(self._graph, extents, operands, dtypes), _arch_of(device))


def bind_call(
    graph_for: Callable[[DType], Graph],
    A: Tensor,
    B: Tensor,
    operands: Operands,
    out_dtype: torch.dtype | None,
    outs: Sequence[Tensor] | None = None,
) -> Binding:
    """Check the operands of a call and decide how they are read.

    Raises:
        GemmgenError: says which operand is wrong, what was expected, and what to do.
    """
    a = dtype_of(A.dtype)
    graph = graph_for(DType.I32 if a is DType.I8 else DType.F32)
    check_matrices(graph.name, A, B)
    extents = extents_of(graph.name, A, B)
    check_operands(graph, operands, extents, A)
    if a is DType.F64 and not A.is_cpu:
        raise UnsupportedOp(
            f"`{graph.name}`: there is no float64 mainloop for {A.device.type}\n  Use float32, or run it on the CPU."
        )
    wanted = dtype_of(out_dtype) if out_dtype is not None else None
    dtypes = [result_dtype(result, a, wanted) for result in graph.results]
    return bind(bind_epilogue(graph, extents, operands, dtypes, outs or ()), A, B, math_of(a))


def math_of(a: DType) -> str:
    """The mainloop's arithmetic; fp32 follows `torch.set_float32_matmul_precision`."""
    if a is not DType.F32:
        return "tensor"
    return "simt" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _metadata(value: Tensor | float) -> object:
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, value.stride(), value.data_ptr() & 15)
    return None


# Plans


def _arch_of(device: torch.device) -> Arch:
    properties = torch.cuda.get_device_properties(device)
    return arch_of_capability((properties.major, properties.minor), properties.name)


def _fused_plan(binding: Binding, device: torch.device, config: GemmConfig | None) -> Plan:
    arch, sm_count = _arch_of(device), torch.cuda.get_device_properties(device).multi_processor_count
    configs = [config] if config is not None else [
        choice.config for choice in choose.ranked(binding.signature, binding.extents, arch, sm_count)
    ]
    config, built = build_first(binding, configs, arch)
    kernel = jit.load_kernel(built)
    args = _filled(binding)
    for target, reading in ((args.a, binding.a), (args.b, binding.b)):
        target.ld, target.batch_stride = reading.ld, reading.batch_stride
    args.sm_count, args.swizzle, args.raster = sm_count, config.swizzle, RASTER[config.raster]
    args.split_k = config.split_k
    counts = [kernel.partial_count(args, i) if output.reduce else 0 for i, output in enumerate(binding.outputs)]
    finishes = _finishes(binding, arch, counts, args)
    return Plan(
        binding, config, kernel, None, args, kernel.workspace_bytes(args), finishes, *_results_of(binding)
    )


def build_first(binding: Binding, configs: Sequence[GemmConfig], arch: Arch) -> tuple[GemmConfig, BuiltKernel]:
    """The first config whose kernel builds. One that a compiler refuses, as it spills, gives way to the next.

    Raises:
        CompileError: no config builds; the error of the first.
    """
    refusals: list[CompileError] = []
    for config in configs:
        try:
            (built,) = jit.build([pipeline.kernel_source(binding, config, arch)])
        except CompileError as error:
            refusals.append(error)
            logger.warning("%s is refused for `%s`: %s", config.label, binding.graph.name, error)
        else:
            return config, built
    raise refusals[0]


def _pointwise_plan(binding: EpilogueBinding, arch: Arch) -> Plan:
    extents = binding.extents
    vector = min(pointwise.MAX_VECTOR, binding.tile_alignment)
    args = _filled(binding)
    if binding.is_empty:
        return Plan(binding, None, None, None, args, 0, (), *_results_of(binding))
    module = jit.load_module(jit.build_module(pipeline.pointwise_source(binding, vector), arch))
    counts = [
        pointwise.partial_count(output.kind, extents.M, extents.N, vector) if output.reduce else 0
        for output in binding.outputs
    ]
    finishes = _finishes(binding, arch, counts, args)
    tiles_m, tiles_n = pointwise.grid(extents.M, extents.N, vector)
    grid = (tiles_m * tiles_n, 1, min(extents.L, pointwise.MAX_GRID_Z))
    return Plan(binding, None, None, module, args, 0, finishes, *_results_of(binding), grid=grid)


def _results_of(binding: EpilogueBinding) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    shapes = tuple(result_shape(binding, i) for i in range(len(binding.dtypes)))
    return shapes, tuple(TORCH_DTYPES[dtype] for dtype in binding.dtypes)


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
        first = _finish_module(output, DType.F32 if is_over_both else dtype, arch)
        second = _finish_module(output, dtype, arch) if is_over_both else None
        finishes.append(Finish(i, first, second, (extents.L, counts[i], kept)))
    return tuple(finishes)


def _finish_module(output: Output, dtype: DType, arch: Arch) -> jit.Module:
    assert output.reduce is not None
    return jit.load_module(jit.build_module(pointwise.render_finish(output.reduce, dtype), arch))


# Calls


def _run(
    plan: Plan,
    matrices: tuple[Tensor, Tensor] | None,
    operands: Operands,
    device: torch.device,
    outs: Sequence[Tensor] | None,
) -> list[Tensor]:
    stream = torch.cuda.current_stream(device).cuda_stream
    args = jit.Args.from_buffer_copy(plan.args)
    keep = _bind_inputs(plan, args, matrices, operands)
    results, partials = _bind_outputs(plan, args, device, outs)
    if plan.kernel is not None:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
        plan.kernel.run(args, workspace.data_ptr(), stream)
    elif plan.module is not None:
        plan.module.launch("gemmgen_pointwise", plan.grid, (pointwise.THREADS, 1, 1), [args], stream)
    for finish in plan.finishes:
        _finish(finish, partials[finish.index], results[finish.index], stream)
    del keep
    return results


def _bind_inputs(
    plan: Plan, args: jit.Args, matrices: tuple[Tensor, Tensor] | None, operands: Operands
) -> list[Tensor]:
    """Fill the input pointers; the tensors returned must live until the launch."""
    binding, keep = plan.binding, []
    if matrices is not None and plan.kernel is not None:
        assert isinstance(binding, Binding)
        a, b = _laid_out(matrices[0], binding.a, -1), _laid_out(matrices[1], binding.b, -2)
        keep += [a, b]
        args.a.ptr, args.b.ptr = a.data_ptr(), b.data_ptr()
    for i, (slot, reading) in enumerate(zip(binding.slots, binding.readings, strict=True)):
        if slot.name is None or reading is None:
            continue
        value = operands[slot.name]
        if not isinstance(value, Tensor):
            args.inputs[i].value = float(value)
            continue
        if reading.copied:
            value = value.contiguous()
        keep.append(value)
        args.inputs[i].ptr = value.data_ptr()
    return keep


def _laid_out(matrix: Tensor, reading: MatrixReading, k_axis: int) -> Tensor:
    """`matrix`, or its copy with K contiguous where no kernel takes its strides."""
    if not reading.copied:
        return matrix
    return matrix.contiguous() if k_axis == -1 else matrix.mT.contiguous()


def _bind_outputs(
    plan: Plan, args: jit.Args, device: torch.device, outs: Sequence[Tensor] | None
) -> tuple[list[Tensor], dict[int, Tensor]]:
    results = list(outs) if outs is not None else [
        torch.empty(shape, dtype=dtype, device=device)
        for shape, dtype in zip(plan.shapes, plan.torch_dtypes, strict=True)
    ]
    for i, (output, result) in enumerate(zip(plan.binding.outputs, results, strict=True)):
        if output.reduce is not None:
            if plan.binding.is_empty:  # over nothing a reduction is its identity
                result.copy_(round_to(torch.tensor(IDENTITY[output.reduce]), plan.binding.dtypes[i]))
            continue
        args.outputs[i].ptr = result.data_ptr()
        if outs is not None:
            _set_strides(args.outputs[i], result)
    partials = {}
    for finish in plan.finishes:
        partials[finish.index] = torch.empty(finish.partials, dtype=torch.float32, device=device)
        args.outputs[finish.index].ptr = partials[finish.index].data_ptr()
    return results, partials


def _set_strides(output: jit.OutputArgs, out: Tensor) -> None:
    if out.shape[-2] > 1:
        output.row_stride = out.stride(-2)
    output.batch_stride = out.stride(0) if out.dim() == 3 and out.shape[0] > 1 else 0


def _finish(finish: Finish, partials: Tensor, result: Tensor, stream: int) -> None:
    L, P, X = finish.partials
    if finish.second is None:
        _launch_finish(finish.module, partials, result, (L, P, X), stream)
        return
    columns = torch.empty((L, X), dtype=torch.float32, device=partials.device)
    _launch_finish(finish.module, partials, columns, (L, P, X), stream)
    _launch_finish(finish.second, columns, result, (L, X, 1), stream)


def _launch_finish(
    module: jit.Module, partials: Tensor, result: Tensor, shape: tuple[int, int, int], stream: int
) -> None:
    """Combine `partials` of `shape` [L, P, X], contiguous, along P into `result` [L, X]."""
    batches, count, kept = shape
    grid, is_narrow = pointwise.finish_grid(batches, kept)
    arguments = [
        ctypes.c_void_p(partials.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(count),
        ctypes.c_int64(kept), ctypes.c_int64(batches), ctypes.c_int64(kept), ctypes.c_int64(kept * count),
        ctypes.c_int(is_narrow),
    ]
    module.launch("gemmgen_finish", grid, (pointwise.FINISH_THREADS, 1, 1), arguments, stream)
