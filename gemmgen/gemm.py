"""`Gemm`: a GEMM with an epilogue fused into it, and `linear`, its form for `nn.Linear`'s weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from gemmgen import aot, pipeline, training
from gemmgen.config import GemmConfig
from gemmgen.dsl import Epilogue
from gemmgen.dtypes import DType
from gemmgen.errors import OperandError, ShapeMismatch, TraceError
from gemmgen.ir.graph import Parameter
from gemmgen.ir.node import Axes
from gemmgen.jit.build import BuiltKernel
from gemmgen.mainloop import Dense
from gemmgen.problem import bind_names

Operand = Tensor | float
Result = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class Gemm:
    """`fn(A @ B, **operands)` as one kernel.

    Args:
        fn: a function declared with `@gg.epilogue`.
        mainloop: what makes the accumulator; `gg.Dense()` is `A @ B`.
        config: a kernel to use always; None chooses one per problem.
        save: what a forward keeps for its backward: "auto" the fewest bytes that need no second GEMM, "recompute"
            nothing beyond the inputs.

    Raises:
        TraceError, VerifyError: `fn` is not an epilogue; the message names the line. Nothing is compiled here.
    """

    def __init__(
        self,
        fn: Epilogue,
        mainloop: Dense | None = None,
        *,
        config: GemmConfig | None = None,
        save: Literal["auto", "recompute"] = "auto",
    ):
        if not isinstance(fn, Epilogue):
            raise TraceError(f"Gemm takes a function declared with @gg.epilogue, not {type(fn).__name__}")
        self.epilogue = fn
        self.mainloop = mainloop or Dense()
        self.config = config
        graphs = {accum: pipeline.graph_of(fn, accum) for accum in (DType.F32, DType.I32)}
        self._op = training.differentiable(graphs, config, save)
        graph = self._op.graph
        self._name, self._container = graph.name, graph.container
        self._parameters = graph.parameters
        self._result_names = tuple(result.name for result in graph.results)
        self._result_axes = tuple(
            result.node.axes if result.is_reduction else Axes.TILE for result in graph.results
        )

    def __call__(
        self,
        A: Tensor,
        B: Tensor,
        /,
        *,
        out: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
        out_dtype: torch.dtype | None = None,
        **operands: Operand,
    ) -> Result:
        """Compute the epilogue of `A @ B`.

        Args:
            A: `[..., M, K]`, any strides.
            B: `[..., K, N]`, any strides; leading dimensions broadcast against A's.
            out: tensors to write the results into, in the shape that the function returns them.
            out_dtype: dtype of the tile results that the function does not cast itself; default A's dtype,
                bf16 for 8-bit A.
            operands: one per parameter of the function after `accum`: `Row` is `[N]`, `Col` is `[M]`, `Tile` is
                `[M, N]`, `Scalar` a number or a one-element tensor; a batch may come in front.

        Returns:
            What the function returns: a tensor, a tuple or a dict. Tiles are `[..., M, N]`.

        Raises:
            ShapeMismatch: extents or ranks do not fit.
            OperandError: an operand is missing, unknown, or of the wrong dtype or device.
            UnsupportedOp, UnsupportedArch: this GPU cannot run it.
        """
        A, B, named, batch = self._folded(A, B, operands)
        flat = self._op.flat_operands(named)
        if out is not None:
            return self._into(out, A, B, flat, batch)
        returned = self._op.overload(A, B, *flat, out_dtype=out_dtype)
        return self._packed(_unfolded([returned] if isinstance(returned, Tensor) else returned, batch))

    def reference(self, A: Tensor, B: Tensor, /, **operands: Operand) -> Result:
        """The float64 answer of the same graph, on the inputs' device, shaped and packed as a call's.

        Arithmetic, accumulation and results are float64; only the function's own casts round.
        """
        A, B, named, batch = self._folded(A, B, operands)
        return self._packed(_unfolded(self._op.reference(A, B, named), batch))

    def warmup(self, A: Tensor, B: Tensor, /, *, out_dtype: torch.dtype | None = None, **operands: Operand) -> None:
        """Build and load what a call with tensors like these needs, so that the call can be captured at once."""
        with torch.no_grad():
            self(A, B, out=None, out_dtype=out_dtype, **operands)

    def build(
        self,
        A: Tensor,
        B: Tensor,
        /,
        *,
        arch: str | None = None,
        out_dtype: torch.dtype | None = None,
        **operands: Operand,
    ) -> BuiltKernel:
        """Compile ahead of time the kernel that a call with such tensors would run. Needs no GPU.

        Args:
            A, B, operands: tensors with the shapes, strides and dtypes of the call; `torch.empty(..., device="meta")`
                does.
            arch: "sm80", "sm86", "sm89", "sm90", "sm100" or "sm120"; default the current GPU's.

        Returns:
            The built kernel; it is in the cache now, together with what finishes its reductions.
        """
        return aot.build(self._op, A, B, self._named(operands), arch, out_dtype)

    def source(
        self,
        A: Tensor,
        B: Tensor,
        /,
        *,
        arch: str | None = None,
        out_dtype: torch.dtype | None = None,
        **operands: Operand,
    ) -> str:
        """The CUDA that a call with such tensors would run: the skeleton, then the functor. Arguments as of `build`."""
        source = aot.source(self._op, A, B, self._named(operands), arch, out_dtype)
        return f"{source.skeleton}\n{source.functor}"

    def explain(
        self,
        A: Tensor | None = None,
        B: Tensor | None = None,
        /,
        *,
        arch: str | None = None,
        out_dtype: torch.dtype | None = None,
        backward: bool = False,
        **operands: Operand,
    ) -> str:
        """What the epilogue is and, given tensors (meta ones do), which kernel would run here and why.

        Args:
            backward: the plan of the backward instead: what is saved, what is recomputed, which kernels run.
        """
        if backward:
            return training.explain(self._op)
        if A is None or B is None:
            return aot.explain_graph(self._op)
        return aot.explain(self._op, A, B, self._named(operands), arch, out_dtype)

    def _folded(
        self, A: Tensor, B: Tensor, operands: Mapping[str, Operand]
    ) -> tuple[Tensor, Tensor, dict[str, Operand], tuple[int, ...]]:
        """The call with at most one batch dimension, and the batch shape that its results get back."""
        named = self._named(operands)
        batch = _batch_shape(self._name, A, B)
        if len(batch) > 1:
            A, B = _folded_matrix(A, batch), _folded_matrix(B, batch)
            named = {p.name: _folded(named[p.name], p, batch) for p in self._parameters}
        elif batch:
            A, B = _unbroadcast(A, batch[0]), _unbroadcast(B, batch[0])
        return A, B, named, batch

    def _listed(self, packed: Result) -> list[Tensor]:
        if isinstance(packed, Tensor):
            return [packed]
        return list(packed.values()) if isinstance(packed, dict) else list(packed)

    def _named(self, operands: Mapping[str, Operand]) -> dict[str, Operand]:
        return bind_names(self._name, self._parameters, operands)

    def _into(
        self,
        out: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
        A: Tensor,
        B: Tensor,
        flat: list[Operand | None],
        batch: tuple[int, ...],
    ) -> Result:
        given = self._unpacked(out)
        targets = given
        if len(batch) > 1:
            targets = [tensor.reshape(-1, *tensor.shape[len(batch) :]) for tensor in given]
        self._op.out_overload(A, B, *flat, **{f"out{i}": target for i, target in enumerate(targets)})
        for tensor, target in zip(given, targets, strict=True):
            if tensor is not target and tensor.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
                tensor.copy_(target.reshape(tensor.shape))  # its batch dimensions could not be viewed as one
        return self._packed(given)

    def _unpacked(self, out: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> list[Tensor]:
        if isinstance(out, Tensor) and len(self._result_names) == 1:
            return [out]
        if isinstance(out, Mapping) and set(out) == set(self._result_names):
            return [out[name] for name in self._result_names]
        if isinstance(out, Sequence) and len(out) == len(self._result_names):
            return list(out)
        raise OperandError(
            f"`{self._name}`: `out` is {type(out).__name__}, but the results are {', '.join(self._result_names)}\n"
            f"  Give a {self._container} of as many tensors."
        )

    def _packed(self, results: Sequence[Tensor]) -> Result:
        if self._container == "single":
            return results[0]
        return tuple(results) if self._container == "tuple" else dict(zip(self._result_names, results, strict=True))


def linear(
    x: Tensor, weight: Tensor, op: Gemm, /, *, out_dtype: torch.dtype | None = None, **operands: Operand
) -> Result:
    """`op` on `x @ weight.T`, by the shape rules of `F.linear`.

    Args:
        x: `[..., K]`; all leading dimensions together are M.
        weight: `[N, K]`, as `nn.Linear` keeps it.
        operands: `Row` `[N]`, `Col` `[...]`, `Tile` `[..., N]` with x's leading dimensions, or flat as `[M]` and
            `[M, N]`.

    Returns:
        As `op`; tiles are `[..., N]`, reductions over N are `[...]`.

    Raises:
        ShapeMismatch: the extents do not fit.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        raise ShapeMismatch(
            f"linear: x is {tuple(x.shape)} and weight {tuple(weight.shape)}\n"
            "  x is [..., K] and weight [N, K] with the same K."
        )
    lead = x.shape[:-1]
    named = op._named(operands)
    flat = {p.name: _flattened(named[p.name], p, lead) for p in op._parameters}
    results = op._listed(op(x.reshape(-1, x.shape[-1]), weight.t(), out=None, out_dtype=out_dtype, **flat))
    return op._packed([_unflattened(r, axes, lead) for r, axes in zip(results, op._result_axes, strict=True)])


def _flattened(value: Operand, parameter: Parameter, lead: torch.Size) -> Operand:
    if not isinstance(value, Tensor) or Axes.COL not in parameter.axes or value.shape[: len(lead)] != lead:
        return value
    return value.reshape(-1, *value.shape[len(lead) :])


def _unflattened(result: Tensor, axes: Axes, lead: torch.Size) -> Tensor:
    return result.reshape(*lead, *result.shape[1:]) if Axes.COL in axes else result


def _batch_shape(name: str, A: Tensor, B: Tensor) -> tuple[int, ...]:
    if A.dim() < 2 or B.dim() < 2:
        raise ShapeMismatch(
            f"`{name}`: A is {tuple(A.shape)} and B is {tuple(B.shape)}; both need at least 2 dimensions\n"
            "  A is [..., M, K], B is [..., K, N]. For a vector use unsqueeze, or gg.linear."
        )
    if A.dim() == 2 and B.dim() == 2:
        return ()
    try:
        return tuple(torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]))
    except RuntimeError:
        raise ShapeMismatch(
            f"`{name}`: batch dimensions {tuple(A.shape[:-2])} of A and {tuple(B.shape[:-2])} of B do not broadcast\n"
            "  They follow torch.matmul's rules."
        ) from None


def _unbroadcast(matrix: Tensor, L: int) -> Tensor:
    """A single batch shared by all L as the 2-D matrix that it is."""
    return matrix[0] if matrix.dim() == 3 and matrix.shape[0] == 1 and L != 1 else matrix


def _unfolded(results: Sequence[Tensor], batch: tuple[int, ...]) -> list[Tensor]:
    return [r.reshape(batch + tuple(r.shape[1:])) for r in results] if len(batch) > 1 else list(results)


def _folded_matrix(matrix: Tensor, batch: tuple[int, ...]) -> Tensor:
    """`[L, rows, columns]`; a matrix without batch dimensions stays 2-D and is shared."""
    if matrix.dim() == 2:
        return matrix
    return matrix.expand(*batch, *matrix.shape[-2:]).reshape(-1, *matrix.shape[-2:])


def _folded(value: object, parameter: Parameter, batch: tuple[int, ...]) -> Operand:
    """An operand with at most one batch dimension."""
    assert isinstance(value, (Tensor, int, float))
    rank = {Axes.SCALAR: 0, Axes.TILE: 2}.get(parameter.axes, 1)
    if not isinstance(value, Tensor) or value.dim() <= rank or tuple(value.shape) == (1,):
        return value
    tail = value.shape[value.dim() - rank :]
    return value.expand(*batch, *tail).reshape(-1, *tail)
