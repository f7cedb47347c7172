"""One torch op per epilogue: schema, CPU, CUDA and fake implementations, and autograd.

An op is named `gemmgen::<epilogue>_<digest>`; its `.out` overload writes into given tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from gemmgen import dispatcher
from gemmgen.bind import is_writable_layout
from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import NoBackward, OperandError, UnsupportedOp
from gemmgen.evaluate import TORCH_DTYPES, evaluate
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import Axes
from gemmgen.operand_schema import OperandSchema
from gemmgen.plan import Operands
from gemmgen.problem import Extents, check_apart, check_matrices, check_operands, extents_of, result_axes, result_dtype
from gemmgen.runtime import DEFAULT, Options, PointwiseRunner, Runner

NAMESPACE = "gemmgen"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_ops: dict[str, object] = {}
_lock = threading.Lock()
MAX_ARGUMENTS = 64  # of a torch op
AUTOCAST_DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
RegisteredOp = TypeVar("RegisteredOp")
Differentiate = Callable[["EpilogueOp", tuple["Tensor | float | None", ...], "torch.dtype | None"], object]


class EpilogueOp:
    """The registered op of one epilogue. Get it with `register`."""

    def __init__(
        self, name: str, graphs: Mapping[DType, Graph], options: Options, differentiate: Differentiate | None
    ):
        self.name = name
        self._differentiate = differentiate
        self.graphs = graphs
        self.graph = graphs[DType.F32]
        self._operands = OperandSchema(self.graph.parameters, reserved={"A", "B", "out_dtype"})
        self._check_size()
        self.runner = Runner(self.graph_for, options, self.reference)
        self._define()
        packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        self.overload, self.out_overload = packet.default, packet.out

    def graph_for(self, accum: DType) -> Graph:
        return self.graphs[accum]

    def _check_size(self) -> None:
        operands, results = len(self.graph.parameters), len(self.graph.results)
        if 2 + len(self._operands.texts) + results > MAX_ARGUMENTS:
            raise UnsupportedOp(
                f"`{self.graph.name}` has {operands} operands and {results} results: with A and B more than the "
                f"{MAX_ARGUMENTS} arguments of a torch op (a gg.Scalar is two)\n  Use several epilogues."
            )

    @property
    def schema(self) -> str:
        """The schema of the functional overload."""
        return self._schema_of(self.name)

    def _schema_of(self, name: str) -> str:
        arguments = ", ".join(["Tensor A", "Tensor B", *self._operands.texts])
        return f"{name}({arguments}, *, ScalarType? out_dtype=None) -> {returned_text(self.graph)}"

    def _define(self) -> None:
        outs = [f"Tensor(a{i}!) out{i}" for i in range(len(self.graph.results))]
        _library.define(self.schema, tags=torch.Tag.pt2_compliant_tag)
        arguments = ", ".join(["Tensor A", "Tensor B", *self._operands.texts, "*", *outs])
        _library.define(f"{self.name}.out({arguments}) -> ()", tags=torch.Tag.pt2_compliant_tag)
        _library.impl(self.name, self._cpu, "CPU")
        in_python = f"{self.name}.python" if dispatcher.is_available() else self.name
        if in_python != self.name:
            _library.define(self._schema_of(in_python), tags=torch.Tag.pt2_compliant_tag)
        _library.impl(in_python, self._cuda, "CUDA")
        _library.impl(in_python, self._autograd, "Autograd")
        self.runner.dispatched = (
            dispatcher.implement(self.name, self.graph, self._operands) if in_python != self.name else None
        )
        implement_autocast(self.name, lambda: self.overload, (0, 1))
        _library.impl(f"{self.name}.out", self._autograd_out, "Autograd")
        _library.impl(f"{self.name}.out", self._cpu_out, "CPU")
        _library.impl(f"{self.name}.out", self._cuda_out, "CUDA")
        qualified = f"{NAMESPACE}::{self.name}"
        torch.library.register_fake(qualified, self._fake, lib=_library)
        torch.library.register_fake(f"{qualified}.out", lambda *args, **kwargs: None, lib=_library)

    def flat_operands(self, operands: Operands) -> list[Tensor | float | None]:
        """The schema's arguments after A and B, from operands by name."""
        return self._operands.flat(operands)

    @property
    def operand_positions(self) -> dict[str, int]:
        """Where each operand's tensor stands among the schema's arguments after A and B."""
        return self._operands.positions()

    @property
    def argument_count(self) -> int:
        """How many arguments of the schema stand for operands."""
        return len(self._operands.texts)

    # implementations

    def _cuda(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, out_dtype: torch.dtype | None = None) -> object:
        return returned(self.runner(A, B, self._operands.named(flat), out_dtype))

    def _cpu(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, out_dtype: torch.dtype | None = None) -> object:
        return returned(self.cpu(A, B, self._operands.named(flat), out_dtype))

    def cpu(
        self, A: Tensor, B: Tensor, operands: Operands, out_dtype: torch.dtype | None
    ) -> list[Tensor]:
        """The results by torch ops, in the wider of fp32 and the inputs' dtype."""
        a, dtypes = self._checked(A, B, operands, out_dtype)
        compute = torch.float64 if a is DType.F64 else torch.float32
        with torch._C._AutoDispatchBelowADInplaceOrView():  # what is returned is no view, even if its memory was one
            results = self._evaluated(A, B, operands, dtypes, compute)
            return _owned(results, (A, B, *operands.values()))

    def reference(self, A: Tensor, B: Tensor, operands: Operands) -> list[Tensor]:
        """The results in float64, unrounded."""
        self._checked(A, B, operands, None)
        return self._evaluated(A, B, operands, [None] * len(self.graph.results), torch.float64)

    def _evaluated(
        self, A: Tensor, B: Tensor, operands: Operands, dtypes: Sequence[DType | None], compute: torch.dtype
    ) -> list[Tensor]:
        a = dtype_of(A.dtype)
        graph = self.graphs[DType.I32 if a is DType.I8 else DType.F32]
        extents = extents_of(graph.name, A, B)
        accum = _accumulated(A, B, a, compute)
        shaped = broadcastable(graph, operands, extents, compute, A.device)
        named = {result.name: dtype for result, dtype in zip(graph.results, dtypes, strict=True)}
        values = evaluate(graph, accum, shaped, named, compute)
        return [values[result.name].reshape(extents.shape(result_axes(result))) for result in graph.results]

    def _fake(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, out_dtype: torch.dtype | None = None) -> object:
        _, dtypes = self._checked(A, B, self._operands.named(flat), out_dtype)
        extents = extents_of(self.graph.name, A, B)
        results = [
            A.new_empty(extents.shape(result_axes(result)), dtype=TORCH_DTYPES[dtype])
            for result, dtype in zip(self.graph.results, dtypes, strict=True)
        ]
        return returned(results)

    def _checked(
        self, A: Tensor, B: Tensor, operands: Operands, out_dtype: torch.dtype | None
    ) -> tuple[DType, list[DType]]:
        """A's dtype and the results' dtypes, after every check that a call can fail."""
        graph = self.graph
        a, _ = check_matrices(graph.name, A, B)
        extents = extents_of(graph.name, A, B)
        check_operands(graph, operands, extents, A)
        wanted = dtype_of(out_dtype) if out_dtype is not None else None
        return a, [result_dtype(result, a, wanted) for result in graph.results]

    def _autograd(self, *args: Tensor | float | None, out_dtype: torch.dtype | None = None) -> object:
        refuse_tangents(self.graph.name, args)
        if needs_gradient(args):
            differentiate = self._differentiate or _first_derivative
            return differentiate(self, args, out_dtype)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, out_dtype=out_dtype)

    def _autograd_out(self, *args: Tensor | float | None, **outs: Tensor) -> None:
        refuse_tangents(self.graph.name, (*args, *outs.values()))
        if needs_gradient((*args, *outs.values())):
            raise NoBackward(
                f"`{self.graph.name}` with `out=` cannot be differentiated, and a tensor requires a gradient\n"
                "  Leave `out` away, or call it under torch.no_grad()."
            )
        with torch._C._AutoDispatchBelowAutograd():
            self.out_overload(*args, **outs)

    def _cuda_out(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, **outs: Tensor) -> None:
        operands, given = self._operands.named(flat), list(outs.values())
        self._check_outs(A, B, operands, given)
        writable = all(
            is_writable_layout(out, result_axes(result)) and not _overlaps(out, (A, B, *operands.values()))
            for out, result in zip(given, self.graph.results, strict=True)
        )
        if writable:
            self.runner(A, B, operands, _tile_dtype(self.graph, given), outs=given)
        else:  # written once more, through a tensor of our own
            for out, result in zip(given, self.runner(A, B, operands, _tile_dtype(self.graph, given)), strict=True):
                out.copy_(result)

    def _cpu_out(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, **outs: Tensor) -> None:
        operands, given = self._operands.named(flat), list(outs.values())
        self._check_outs(A, B, operands, given)
        results = self.cpu(A, B, operands, _tile_dtype(self.graph, given))
        for out, result in zip(given, results, strict=True):
            out.copy_(result)

    def _check_outs(self, A: Tensor, B: Tensor, operands: Operands, outs: Sequence[Tensor]) -> None:
        _, dtypes = self._checked(A, B, operands, _tile_dtype(self.graph, outs))
        extents = extents_of(self.graph.name, A, B)
        for out, result, dtype in zip(outs, self.graph.results, dtypes, strict=True):
            shape = extents.shape(result_axes(result))
            if tuple(out.shape) != shape or dtype_of(out.dtype) is not dtype or out.device != A.device:
                raise OperandError(
                    f"`{self.graph.name}`: out for result `{result.name}` is {out.dtype} {tuple(out.shape)} on "
                    f"{out.device}; the result is {TORCH_DTYPES[dtype]} {shape} on {A.device}\n"
                    "  Allocate it so, or leave `out` away."
                )
        if len(outs) > 1:
            check_apart(self.graph.name, outs, self.graph.results)


class ElementwiseOp:
    """The registered op of an elementwise graph, such as a backward. Its results' dtypes are in the graph.

    Its schema begins with `SymInt M, SymInt N, SymInt L, bool batched`, the extents of the tile.
    """

    def __init__(self, name: str, graph: Graph):
        self.name = name
        self.graph = graph
        self._operands = OperandSchema(graph.parameters, reserved={"M", "N", "L", "batched"})
        self._runner = PointwiseRunner(graph)
        arguments = ", ".join(["SymInt M", "SymInt N", "SymInt L", "bool batched", *self._operands.texts])
        schema = f"{name}({arguments}) -> {returned_text(graph)}"
        self.overload = define(schema, self._fake, CPU=self._cpu, CUDA=self._cuda, Autograd=self._autograd)

    def __call__(self, extents: Extents, operands: Operands) -> list[Tensor]:
        """The results in order, through the dispatcher."""
        flat = self._operands.flat(operands)
        results = self.overload(extents.M, extents.N, extents.L, extents.batched, *flat)
        return [results] if isinstance(results, Tensor) else list(results)

    @property
    def _dtypes(self) -> list[DType]:
        return [result.dtype or DType.F32 for result in self.graph.results]

    def _cuda(self, M: int, N: int, L: int, batched: bool, *flat: Tensor | float | None) -> object:
        operands, extents = self._operands.named(flat), Extents(M, N, 0, L, batched)
        return returned(self._runner(extents, operands, self._dtypes, _device_of(flat)))

    def _cpu(self, M: int, N: int, L: int, batched: bool, *flat: Tensor | float | None) -> object:
        operands, extents = self._operands.named(flat), Extents(M, N, 0, L, batched)
        tensors = [value for value in flat if isinstance(value, Tensor)]
        compute = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
        shaped = broadcastable(self.graph, operands, extents, compute, tensors[0].device)
        shape = torch.empty((), dtype=compute, device=tensors[0].device).expand(L, M, N)
        dtypes = {result.name: dtype for result, dtype in zip(self.graph.results, self._dtypes, strict=True)}
        with torch._C._AutoDispatchBelowADInplaceOrView():
            values = evaluate(self.graph, shape, shaped, dtypes, compute)
            results = [values[r.name].reshape(extents.shape(result_axes(r))) for r in self.graph.results]
            return returned(_owned(results, tensors))

    def _fake(self, M: int, N: int, L: int, batched: bool, *flat: Tensor | float | None) -> object:
        extents, device = Extents(M, N, 0, L, batched), _device_of(flat)
        return returned([
            torch.empty(extents.shape(result_axes(result)), dtype=TORCH_DTYPES[dtype], device=device)
            for result, dtype in zip(self.graph.results, self._dtypes, strict=True)
        ])

    def _autograd(self, *args: Tensor | float | None) -> object:
        refuse_tangents(self.graph.name, args)
        if needs_gradient(args):
            return _recorded(self.graph.name, self.overload, args, {})
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)


def register(
    graphs: Mapping[DType, Graph], options: Options = DEFAULT, differentiate: Differentiate | None = None
) -> EpilogueOp:
    """The op of an epilogue, registered with torch when it is first seen.

    An op with options of its own is an op of its own, with their digest in its name. So is one inside a backward, which
    may have the graph and the name of an epilogue.

    Args:
        differentiate: computes the results of a call that needs gradients; None refuses such a call.
    """
    graph = graphs[DType.F32]
    name = f"{graph.name}_{graph.digest}"
    if options != DEFAULT:
        name += "_" + hashlib.blake2b(repr(options).encode(), digest_size=3).hexdigest()
    if differentiate is None:
        name += "_inner"
    return registered(name, EpilogueOp, lambda: EpilogueOp(name, graphs, options, differentiate))


def register_elementwise(graph: Graph) -> ElementwiseOp:
    """The op of an elementwise graph, registered with torch when it is first seen."""
    name = f"{graph.name}_{graph.digest}_elementwise"
    return registered(name, ElementwiseOp, lambda: ElementwiseOp(name, graph))


def registered(name: str, kind: type[RegisteredOp], make: Callable[[], RegisteredOp]) -> RegisteredOp:
    """The op called `name`, made when it is first seen."""
    with _lock:
        if name not in _ops:
            _ops[name] = make()
        op = _ops[name]
    assert isinstance(op, kind)
    return op


def define(schema: str, fake: Callable[..., Any], **implementations: Callable[..., Any]) -> Any:
    """Register an op, with its implementations by dispatch key; its default overload."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for key, implementation in implementations.items():
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def implement_autocast(name: str, overload: Callable[[], Any], matrices: Collection[int]) -> None:
    """Let an op take its matrices in autocast's dtype, as torch's own products do.

    Other operands are read as they are: the epilogue is fp32 whatever they are stored in.

    Args:
        matrices: positions of the arguments to cast.
    """
    for key, device_type in AUTOCAST_DEVICES.items():

        def autocast(*args: Any, key: str = key, device_type: str = device_type, **keywords: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            cast = [_autocast_to(dtype, arg) if at in matrices else arg for at, arg in enumerate(args)]
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
                return overload()(*cast, **keywords)

        _library.impl(name, autocast, key)


def _autocast_to(dtype: torch.dtype, matrix: Tensor) -> Tensor:
    is_eligible = matrix.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return matrix.to(dtype) if is_eligible else matrix


def returned(results: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Results as an op returns them: one tensor, or a tuple."""
    return results[0] if len(results) == 1 else tuple(results)


def returned_text(graph: Graph) -> str:
    """The return type in the schema."""
    return "Tensor" if len(graph.results) == 1 else f"({', '.join(['Tensor'] * len(graph.results))})"


def needs_gradient(args: Iterable[object]) -> bool:
    """Whether autograd would have to record a call with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def refuse_tangents(name: str, args: Iterable[object]) -> None:
    """Refuses arguments of forward-mode differentiation, whose tangents would be lost.

    Raises:
        NoBackward: an argument has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args):
        raise NoBackward(
            f"`{name}` has no forward-mode derivative, and an argument has a tangent\n"
            "  gemmgen differentiates backwards. For a jvp use the torch ops that the epilogue stands for."
        )


def apply_at_one_level(function: type[_SingleLevelFunction], *args: Any) -> Any:
    """Apply an autograd function from an implementation for the Autograd key.

    `torch.func` transforms dispatch there once for each of their levels, so it is the function of a single level.
    """
    # not with the others at the top: it brings in all of functorch, which only training needs
    from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
        enable_single_level_autograd_function,
    )

    with enable_single_level_autograd_function():
        return function.apply(*args)  # type: ignore[attr-defined]


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """For the forward of such a function: its level of autograd is done, further ones of `torch.func` record it too."""
    # `Function.apply` turns both modes off, which those further levels need to see their gradients and tangents
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        yield


class _Recorded(_SingleLevelFunction):
    """A call whose results autograd may carry along, but not differentiate."""

    @staticmethod
    def forward(ctx: Any, name: str, overload: Any, keywords: dict[str, Any], *args: Any) -> Any:
        ctx.name = name
        ctx.likes = [(arg.shape, arg.dtype) if isinstance(arg, Tensor) else None for arg in args]
        with below_autograd():
            return overload(*args, **keywords)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        cotangent = next(x for x in cotangents if x is not None)
        needs = zip(ctx.needs_input_grad[3:], ctx.likes, strict=True)
        return (None, None, None, *(_second_derivative(cotangent, *like, ctx.name) if need else None
                                    for need, like in needs))  # fmt: skip


def _recorded(name: str, overload: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> object:
    return apply_at_one_level(_Recorded, name, overload, keywords, *args)


def _refused(cotangent: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    raise NoBackward(
        f"`{name}` is part of a derived backward and has no derivative itself\n"
        "  gemmgen computes first derivatives. For a second one use the torch ops that the epilogue stands for."
    )


def _refused_fake(cotangent: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    return cotangent.new_empty(shape, dtype=dtype)


def _refused_later(cotangent: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return _second_derivative(cotangent, shape, dtype, name)  # type: ignore[no-any-return]


# an op, so that torch.compile can trace a backward that nobody runs; running it raises NoBackward
_second_derivative = define(
    "second_derivative(Tensor cotangent, SymInt[] shape, ScalarType dtype, str name) -> Tensor",
    _refused_fake, CPU=_refused, CUDA=_refused, Autograd=_refused_later,
)  # fmt: skip


def _refused_batched(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _refused(*args)


torch.library.register_vmap(f"{NAMESPACE}::second_derivative", _refused_batched, lib=_library)


def depending(x: Tensor, on: Sequence[Tensor], name: str) -> Tensor:
    """A copy of `x` that autograd knows to depend on `on`, in a way that has no derivative; `name` is for the error."""
    return _depending(x, list(on), name)  # type: ignore[no-any-return]


def _depending_autograd(x: Tensor, on: list[Tensor], name: str) -> object:
    def below(x: Tensor, *on: Tensor) -> object:
        return _depending(x, list(on), name)

    refuse_tangents(name, (x, *on))
    if needs_gradient((x, *on)):
        return _recorded(name, below, (x, *on), {})
    with torch._C._AutoDispatchBelowAutograd():
        return _depending(x, on, name)


def _cloned(x: Tensor, on: list[Tensor], name: str) -> Tensor:
    return x.clone()


_depending = define(
    "depending(Tensor x, Tensor[] on, str name) -> Tensor",
    _cloned, CPU=_cloned, CUDA=_cloned, Autograd=_depending_autograd,
)  # fmt: skip


def _depending_batched(
    info: Any, in_dims: Sequence[Any], x: Tensor, on: list[Tensor], name: str
) -> tuple[Tensor, int | None]:
    return depending(x, on, name), in_dims[0]


torch.library.register_vmap(f"{NAMESPACE}::depending", _depending_batched, lib=_library)


def _first_derivative(op: EpilogueOp, args: tuple[Any, ...], out_dtype: torch.dtype | None) -> object:
    """The results of a GEMM inside a backward: autograd records that they have no derivative."""
    return _recorded(op.graph.name, op.overload, args, {"out_dtype": out_dtype})


def _device_of(args: Iterable[object]) -> torch.device:
    return next(arg.device for arg in args if isinstance(arg, Tensor))


def _accumulated(A: Tensor, B: Tensor, a: DType, compute: torch.dtype) -> Tensor:
    """`A @ B` as `[L, M, N]`; int8 gives exact int32."""
    if A.dim() == 2 and B.dim() == 2:
        A = A.unsqueeze(0)
    if a is DType.I8:  # float64 holds every int32 sum exactly, and has a fast matmul
        return torch.matmul(A.double(), B.double()).to(torch.int64).to(torch.int32)
    return torch.matmul(A.to(compute), B.to(compute))


def broadcastable(
    graph: Graph, operands: Operands, extents: Extents, compute: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The operands as tensors that broadcast against `[L, M, N]`."""
    shaped = {}
    for parameter in graph.parameters:
        value = operands[parameter.name]
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), dtype=compute, device=device)
        batch = extents.L if value.dim() > len(extents.unbatched(parameter.axes)) else 1
        if parameter.axes is Axes.SCALAR:
            batch = value.numel()
        rows = extents.M if Axes.COL in parameter.axes else 1
        columns = extents.N if Axes.ROW in parameter.axes else 1
        shaped[parameter.name] = value.reshape(batch, rows, columns)
    return shaped


def _owned(results: Sequence[Tensor], inputs: Sequence[object]) -> list[Tensor]:
    """Contiguous results that share no memory with an input or with each other, as torch asks of an op."""
    owned: list[Tensor] = []
    for result in results:
        shares = _overlaps(result, (*inputs, *owned))
        owned.append(result.clone(memory_format=torch.contiguous_format) if shares else result.contiguous())
    return owned


def _tile_dtype(graph: Graph, outs: Sequence[Tensor]) -> torch.dtype | None:
    """The `out_dtype` that tensors given as `out` imply."""
    for out, result in zip(outs, graph.results, strict=True):
        if not result.is_reduction and result.dtype is None:
            return out.dtype
    return None


def _overlaps(out: Tensor, inputs: Sequence[object]) -> bool:
    """Whether an input's storage has a byte of `out`'s. Memory that is not torch's may have several storages."""
    start, end = _span(out)
    spans = [_span(x) for x in inputs if isinstance(x, Tensor)]
    return any(start < other_end and other_start < end for other_start, other_end in spans)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the tensor's storage: its first byte, and the one behind its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
