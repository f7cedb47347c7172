"""`Gemm`: a GEMM with an epilogue fused into it, and `linear`, its form for `nn.Linear`'s weights."""

from __future__ import annotations

import importlib
import operator
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Literal, get_args

import torch
from torch import Tensor

from gemmgen import aot, pipeline, training
from gemmgen.config import GemmConfig
from gemmgen.dsl import Epilogue
from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import GemmgenError, OperandError, ShapeMismatch, TraceError
from gemmgen.ir.node import Axes
from gemmgen.jit.build import BuiltKernel
from gemmgen.mainloop import Dense
from gemmgen.problem import bind_names, check_out, check_out_dtype, check_tensor, check_types, result_axes
from gemmgen.runtime import Compile, Options, Tune
from gemmgen.tuned import MOST, Entry

Operand = Tensor | float
Result = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class Gemm:
    """`fn(A @ B, **operands)` as one kernel.

    Args:
        fn: a function declared with `@gg.epilogue`.
        mainloop: what makes the accumulator; `gg.Dense()` is `A @ B`.
        config: a kernel to use always; None chooses one per problem.
        compile: "eager" waits for the compilers at the first call; "background" serves the first calls by torch's
            own op or by its product and a pointwise kernel, and switches to the fused kernel once it is built.
        tune: "cached" uses what `tune` has measured, "first-call" measures what nobody has, "off" does neither.
        save: what a forward keeps for its backward: "auto" the fewest bytes that need no second GEMM, "recompute"
            nothing beyond the inputs.
        grad_accum: where the weight (B, or what B is the transposed view of) has a `main_grad`, an fp32 tensor of its
            shape, the weight gradient is added to that by the GEMM that makes it, and `weight.grad` stays as it is.
            Under `torch.compile` the gradient goes to `weight.grad` as ever.

    Raises:
        TraceError, VerifyError: `fn` is not an epilogue; the message names the line. Nothing is compiled here.
    """

    def __init__(
        self,
        fn: Epilogue,
        mainloop: Dense | None = None,
        *,
        config: GemmConfig | None = None,
        compile: Compile = "eager",
        tune: Tune = "cached",
        save: Literal["auto", "recompute"] = "auto",
        grad_accum: bool = False,
    ):
        if not isinstance(fn, Epilogue):
            raise TraceError(f"Gemm takes a function declared with @gg.epilogue, not {type(fn).__name__}")
        _check_option("mainloop", mainloop, mainloop is None or isinstance(mainloop, Dense), "gg.Dense() or None")
        _check_option("config", config, config is None or isinstance(config, GemmConfig), "a gg.GemmConfig or None")
        _check_option("compile", compile, compile in get_args(Compile), '"eager" or "background"')
        _check_option("tune", tune, tune in get_args(Tune), '"off", "cached" or "first-call"')
        _check_option("save", save, save in ("auto", "recompute"), '"auto" or "recompute"')
        self.epilogue = fn
        self.mainloop = mainloop or Dense()
        self.config = config
        self.options = Options(config, compile, tune, grad_accum)
        self.save = save
        graphs = {accum: pipeline.graph_of(fn, accum) for accum in (DType.F32, DType.I32)}
        self._op = training.differentiable(graphs, self.options, save)
        self._overload = self._op.overload
        graph = self._op.graph
        self._name, self._container = graph.name, graph.container
        self._parameters = graph.parameters
        self._result_names = tuple(result.name for result in graph.results)
        # of operands: dimensions of one batch, and those behind M where there is M; plain values for torch.compile
        self._ranks = {p.name: (Axes.COL in p.axes) + (Axes.ROW in p.axes) for p in graph.parameters}
        self._behind_rows = {p.name: int(Axes.ROW in p.axes) for p in graph.parameters if Axes.COL in p.axes}
        self._flat_names = None if any(p.axes is Axes.SCALAR for p in graph.parameters) else tuple(self._ranks)
        self._has_rows = tuple(Axes.COL in result_axes(result) for result in graph.results)

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
        try:
            # the usual call goes straight to the op, which checks all that metadata can tell
            if out is None and out_dtype is None and A.dim() == 2 and B.dim() == 2:
                results = self._overload(A, B, *self._flat(operands))
                return results if self._container == "single" else self._packed(results)
        except Exception:
            self._check_types(A, B, operands)  # may know better what is wrong
            raise
        A, B, named, batch = self._folded(A, B, operands, out_dtype)
        flat = self._op.flat_operands(named)
        if out is not None:
            return self._into(out, out_dtype, A, B, flat, batch)
        return self._unfolded(self._overload(A, B, *flat, out_dtype=out_dtype), batch)

    def reference(self, A: Tensor, B: Tensor, /, **operands: Operand) -> Result:
        """The float64 answer of the same graph, on the inputs' device, shaped and packed as a call's.

        Arithmetic, accumulation and results are float64; only the function's own casts round.
        """
        A, B, named, batch = self._folded(A, B, operands)
        return self._unfolded(self._op.reference(A, B, named), batch)

    def warmup(self, A: Tensor, B: Tensor, /, *, out_dtype: torch.dtype | None = None, **operands: Operand) -> None:
        """Build and load what a call with tensors like these needs, so that the call can be captured at once."""
        with torch.no_grad():
            self(A, B, out=None, out_dtype=out_dtype, **operands)

    def tune(
        self,
        A: Tensor,
        B: Tensor,
        given: Mapping[str, Operand] | None = None,
        /,
        *,
        configs: Sequence[GemmConfig] | None = None,
        most: int = MOST,
        rounds: int = 25,
        out_dtype: torch.dtype | None = None,
        **operands: Operand,
    ) -> Entry:
        """Measure the ways to run a call on these very tensors, and keep the times for its bucket of M.

        Kernels are built in parallel; each is checked against torch's product before it may win. Nothing of the
        caller's is written. Later calls use the fastest, in other processes on this machine too. For up to 256 rows
        and B of up to 1 GB it takes three further copies of B, where there is memory for them.

        Args:
            given: operands too, by name; for those whose name is a keyword of this method.
            configs: the fused kernels to try; by default those that the model does not call hopeless.
            most: fused kernels to try where `configs` is not given.
            rounds: samples of each way that is left at the end.

        Returns:
            What was measured; print it for a table.

        Raises:
            OperandError: the op has a fixed config, the tensors are not on a GPU, or there is nothing to compute.
            IllegalConfig: one of `configs` cannot run the call.
        """
        if self.config is not None or not A.is_cuda:
            what = "has a fixed config" if self.config is not None else f"was given A on {A.device}"
            raise OperandError(f"`{self._name}` cannot be tuned: it {what}\n  Tune a Gemm without config, on a GPU.")
        operands |= given or {}
        return aot.tune(self._op, *self._folded(A, B, operands, out_dtype)[:3], out_dtype, configs, most, rounds)

    def build(
        self,
        A: Tensor,
        B: Tensor,
        given: Mapping[str, Operand] | None = None,
        /,
        *,
        arch: str | None = None,
        out_dtype: torch.dtype | None = None,
        **operands: Operand,
    ) -> BuiltKernel:
        """Compile ahead of time the kernel that a call with such tensors would run. Needs no GPU.

        That is a call without gradients: what a training step runs is compiled in its first one.

        Args:
            A, B, operands: tensors with the shapes, strides and dtypes of the call; `torch.empty(..., device="meta")`
                does.
            given: operands too, by name; for those whose name is a keyword of this method.
            arch: "sm80", "sm86", "sm89", "sm90", "sm100" or "sm120"; default the current GPU's.

        Returns:
            The built kernel; it is in the cache now, together with what finishes its reductions.
        """
        operands |= given or {}
        return aot.build(self._op, *self._folded(A, B, operands, out_dtype)[:3], arch, out_dtype)

    def source(
        self,
        A: Tensor,
        B: Tensor,
        given: Mapping[str, Operand] | None = None,
        /,
        *,
        arch: str | None = None,
        out_dtype: torch.dtype | None = None,
        **operands: Operand,
    ) -> str:
        """The CUDA that a call with such tensors would run: the skeleton, then the functor. Arguments as of `build`."""
        operands |= given or {}
        source = aot.source(self._op, *self._folded(A, B, operands, out_dtype)[:3], arch, out_dtype)
        return f"{source.skeleton}\n{source.functor}"

    def explain(
        self,
        A: Tensor | None = None,
        B: Tensor | None = None,
        given: Mapping[str, Operand] | None = None,
        /,
        *,
        arch: str | None = None,
        out_dtype: torch.dtype | None = None,
        backward: bool = False,
        **operands: Operand,
    ) -> str:
        """What the epilogue is and, given tensors (meta ones do), which kernel would run here and why.

        Args:
            given: operands too, by name; for those whose name is a keyword of this method.
            backward: the plan of the backward instead: what is saved, what is recomputed, which kernels run; given
                tensors, also what runs its two GEMMs. Without them A is taken to be bf16.
        """
        operands |= given or {}
        if backward:
            gemms = self._explained_gemms(A, B, operands, arch)
            a = dtype_of(A.dtype) if isinstance(A, Tensor) else DType.BF16
            return "\n".join([training.explain(self._op, self.save, a), *gemms])
        if A is None or B is None:
            return aot.explain_graph(self._op)
        return aot.explain(self._op, *self._folded(A, B, operands, out_dtype)[:3], arch, out_dtype)

    def _explained_gemms(
        self, A: Tensor | None, B: Tensor | None, operands: Mapping[str, Operand], arch: str | None
    ) -> list[str]:
        if A is None or B is None:
            return []
        gemms = training.gemms_of_backward(self._op, *self._folded(A, B, operands)[:2])
        return [f"  {name}: {aot.explain_product(*gemm, arch)}" for name, gemm in gemms.items()]

    def __deepcopy__(self, memo: object) -> Gemm:
        return self  # it never changes

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (*_reference(self.epilogue), self.mainloop, self.options, self.save)

    def _check_types(self, A: Tensor, B: Tensor, operands: Mapping[str, Operand]) -> None:
        try:
            check_types(self._name, self._parameters, A, B, self._named(operands))
        except GemmgenError as error:
            raise error from None  # or the other error, such as torch's, would be printed first

    def _folded(
        self, A: Tensor, B: Tensor, operands: Mapping[str, Operand], out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Operand], tuple[int, ...]]:
        """The call with at most one batch dimension, and the batch shape that its results get back."""
        named = self._named(operands)
        check_types(self._name, self._parameters, A, B, named)
        if out_dtype is not None:
            check_out_dtype(f"`{self._name}`: out_dtype", A, out_dtype)
        batch = _batch_shape(self._name, A, B)
        if not batch:
            return A, B, named, batch
        return folded_matrix(A, batch), folded_matrix(B, batch), self._folded_operands(named, batch), batch

    def _folded_operands(self, operands: Mapping[str, Operand], batch: tuple[int, ...]) -> dict[str, Operand]:
        named = self._named(operands)
        if len(batch) <= 1:
            return named
        return {name: _folded(self._name, name, value, self._ranks[name], batch) for name, value in named.items()}

    def _unfolded(self, results: Tensor | Sequence[Tensor], batch: tuple[int, ...]) -> Result:
        """What the op returned, in the shapes and the container of a call."""
        listed = [results] if isinstance(results, Tensor) else list(results)
        return self._packed([r.reshape(batch + tuple(r.shape[1:])) for r in listed] if len(batch) > 1 else listed)

    def _flattened(self, operands: Mapping[str, Operand], lead: torch.Size) -> dict[str, Operand]:
        """Operands whose rows have the dimensions `lead`, as those of a matrix."""
        named = self._named(operands)
        return {name: _flattened(value, self._behind_rows.get(name), lead) for name, value in named.items()}

    def _unflattened(self, results: Result, lead: torch.Size) -> Result:
        """The results for a matrix, with the rows' dimensions `lead` back."""
        listed = zip(self._listed(results), self._has_rows, strict=True)
        return self._packed([r.reshape(*lead, *r.shape[1:]) if has_rows else r for r, has_rows in listed])

    def _listed(self, packed: Result) -> list[Tensor]:
        if isinstance(packed, Tensor):
            return [packed]
        return list(packed.values()) if isinstance(packed, dict) else list(packed)

    def _named(self, operands: Mapping[str, Operand]) -> dict[str, Operand]:
        if operands.keys() == self._ranks.keys():
            return dict(operands)
        return bind_names(self._name, self._parameters, operands)

    def _flat(self, operands: Mapping[str, Operand]) -> Sequence[Operand | None]:
        """The operands as the op's arguments."""
        if self._flat_names is None or operands.keys() != self._ranks.keys():
            return self._op.flat_operands(self._named(operands))
        return [operands[name] for name in self._flat_names]

    def _into(
        self,
        out: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
        out_dtype: torch.dtype | None,
        A: Tensor,
        B: Tensor,
        flat: list[Operand | None],
        batch: tuple[int, ...],
    ) -> Result:
        if out_dtype is not None:
            raise OperandError(f"`{self._name}` got `out` and `out_dtype`\n  The tensors of `out` have their dtypes.")
        given = self._unpacked(out)
        for name, tensor in zip(self._result_names, given, strict=True):
            check_out(f"`{self._name}`: out for result `{name}`", tensor, A)
        if len(set(map(id, given))) < len(given):
            raise OperandError(f"`{self._name}`: one tensor of `out` stands for two results\n  Each needs its own.")
        targets = given
        if len(batch) > 1:
            for name, tensor in zip(self._result_names, given, strict=True):
                if tuple(tensor.shape[: len(batch)]) != batch:
                    raise ShapeMismatch(
                        f"`{self._name}`: out for result `{name}` has shape {tuple(tensor.shape)}; the matrices have "
                        f"the batch dimensions {batch}\n  Those come first."
                    )
            targets = [joined(tensor, len(batch)) for tensor in given]
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
        wanted = "one tensor" if self._container == "single" else f"a {self._container} of as many tensors"
        raise OperandError(
            f"`{self._name}`: `out` is of type {type(out).__name__}, but the results are "
            f"{', '.join(self._result_names)}\n  Give {wanted}."
        )

    def _packed(self, results: Sequence[Tensor]) -> Result:
        if self._container == "single":
            return results[0]
        return tuple(results) if self._container == "tuple" else dict(zip(self._result_names, results, strict=True))


def _reference(epilogue: Epilogue) -> tuple[str, str]:
    """The module and the name that an epilogue is found under again.

    Raises:
        PicklingError: it is not there.
    """
    module, name = getattr(epilogue, "__module__", ""), getattr(epilogue, "__qualname__", "")
    try:
        found = _looked_up(module, name)
    except (ImportError, AttributeError):
        found = None
    if found is not epilogue:
        raise pickle.PicklingError(
            f"epilogue `{epilogue.name}` cannot be pickled: it is not what `{module}.{name}` names\n"
            "  Epilogues are pickled by reference. Define it at the top level of a module, under its own name."
        )
    return module, name


def _looked_up(module: str, name: str) -> object:
    return operator.attrgetter(name)(importlib.import_module(module))


def _restored(
    module: str, name: str, mainloop: Dense, options: Options, save: Literal["auto", "recompute"]
) -> Gemm:
    epilogue = _looked_up(module, name)
    assert isinstance(epilogue, Epilogue)
    return Gemm(epilogue, mainloop, **{f.name: getattr(options, f.name) for f in fields(options)}, save=save)


def _check_option(name: str, value: object, is_legal: bool, legal: str) -> None:
    if not is_legal:
        raise OperandError(f"Gemm: {name} is {value!r}\n  It may be {legal}.")


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
    if not isinstance(op, Gemm):
        raise OperandError(f"linear: the third argument is of type {type(op).__name__}\n  Give a gg.Gemm.")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        check_tensor("linear: x", x, x)
        check_tensor("linear: weight", weight, x)
    if x.dim() == 2 and weight.dim() == 2 and x.size(1) == weight.size(1):
        return op(x, weight.t(), out=None, out_dtype=out_dtype, **operands)
    check_tensor("linear: x", x, x)
    check_tensor("linear: weight", weight, x)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        raise ShapeMismatch(
            f"linear: x is {tuple(x.shape)} and weight {tuple(weight.shape)}\n"
            "  x is [..., K] and weight [N, K] with the same K."
        )
    lead = x.shape[:-1]
    flat = op._flattened(operands, lead)
    return op._unflattened(op(joined(x, len(lead)), weight.t(), out=None, out_dtype=out_dtype, **flat), lead)


def joined(value: Tensor, count: int) -> Tensor:
    """`value` with its first `count` dimensions as one; with an extent of 0 too, where `reshape` cannot tell."""
    return value.flatten(0, count - 1) if count else value.unsqueeze(0)


def _flattened(value: Operand, behind_rows: int | None, lead: torch.Size) -> Operand:
    """An operand whose M is given as the dimensions `lead`, with one M."""
    if behind_rows is None or not isinstance(value, Tensor):
        return value
    is_flat = value.dim() != len(lead) + behind_rows or value.shape[: len(lead)] != lead
    return value if is_flat else joined(value, len(lead))


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


def folded_matrix(matrix: Tensor, batch: tuple[int, ...]) -> Tensor:
    """`[L, rows, columns]`; a matrix that all of the batch share stays, or becomes, the 2-D one that it is."""
    if len(batch) > 1 and matrix.dim() > 2:
        return joined(matrix.expand(*batch, *matrix.shape[-2:]), len(batch))
    return matrix[0] if matrix.dim() == 3 and matrix.shape[0] == 1 and batch[0] != 1 else matrix


def _folded(name: str, operand: str, value: Operand, rank: int, batch: tuple[int, ...]) -> Operand:
    """An operand with at most one batch dimension."""
    if not isinstance(value, Tensor) or value.dim() <= rank or tuple(value.shape) == (1,):
        return value
    own, tail = value.shape[: value.dim() - rank], value.shape[value.dim() - rank :]
    if len(own) > len(batch) or any(a not in (1, b) for a, b in zip(own[::-1], batch[::-1], strict=False)):
        raise ShapeMismatch(
            f"`{name}`: operand `{operand}` has shape {tuple(value.shape)}, whose batch {tuple(own)} does not "
            f"broadcast to {batch}\n  Leave the batch away, or give it that of the matrices."
        )
    return joined(value.expand(*batch, *tail), len(batch))
