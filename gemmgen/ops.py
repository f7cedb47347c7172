"""One torch op per epilogue: schema, CPU, CUDA and fake implementations, and autograd.

An op is named `gemmgen::<epilogue>_<digest>`. A Scalar operand `s` is two arguments, `Tensor? s` and `float s_value`,
so that a number and a tensor are both read at run time. `.out` writes into given tensors.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmgen.bind import is_writable_layout
from gemmgen.config import GemmConfig
from gemmgen.dtypes import DType, dtype_of
from gemmgen.errors import NoBackward, OperandError
from gemmgen.evaluate import TORCH_DTYPES, evaluate
from gemmgen.ir.graph import Graph, Parameter
from gemmgen.ir.node import Axes
from gemmgen.problem import Extents, check_matrices, check_operands, extents_of, result_axes, result_dtype
from gemmgen.runtime import Operands, Runner

NAMESPACE = "gemmgen"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_ops: dict[str, EpilogueOp] = {}
_lock = threading.Lock()
_RESERVED = frozenset({"A", "B", "out_dtype", "self"})


@dataclass(frozen=True)
class Argument:
    """One tensor argument of the schema; `value_name` is the number beside it, for a Scalar."""

    parameter: Parameter
    name: str
    value_name: str | None


class EpilogueOp:
    """The registered op of one epilogue. Get it with `register`."""

    def __init__(self, name: str, graphs: Mapping[DType, Graph], config: GemmConfig | None):
        self.name = name
        self.graphs = graphs
        self.graph = graphs[DType.F32]
        self.arguments = _arguments(self.graph)
        self.runner = Runner(self.graph_for, config)
        self._define()
        packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        self.overload, self.out_overload = packet.default, packet.out

    def graph_for(self, accum: DType) -> Graph:
        return self.graphs[accum]

    @property
    def schema(self) -> str:
        """The schema of the functional overload."""
        results = ["Tensor"] * len(self.graph.results)
        returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return f"{self.name}({', '.join(self._schema_arguments())}, *, ScalarType? out_dtype=None) -> {returned}"

    def _schema_arguments(self) -> list[str]:
        texts = ["Tensor A", "Tensor B"]
        for argument in self.arguments:
            if argument.value_name is None:
                texts.append(f"Tensor {argument.name}")
            else:
                texts += [f"Tensor? {argument.name}", f"float {argument.value_name}"]
        return texts

    def _define(self) -> None:
        outs = [f"Tensor({chr(97 + i)}!) out{i}" for i in range(len(self.graph.results))]
        _library.define(self.schema, tags=torch.Tag.pt2_compliant_tag)
        _library.define(
            f"{self.name}.out({', '.join(self._schema_arguments())}, *, {', '.join(outs)}) -> ()",
            tags=torch.Tag.pt2_compliant_tag,
        )
        _library.impl(self.name, self._cpu, "CPU")
        _library.impl(self.name, self._cuda, "CUDA")
        _library.impl(self.name, self._autograd, "Autograd")
        _library.impl(f"{self.name}.out", self._cpu_out, "CPU")
        _library.impl(f"{self.name}.out", self._cuda_out, "CUDA")
        qualified = f"{NAMESPACE}::{self.name}"
        torch.library.register_fake(qualified, self._fake, lib=_library)
        torch.library.register_fake(f"{qualified}.out", lambda *args, **kwargs: None, lib=_library)

    def flat_operands(self, operands: Operands) -> list[Tensor | float | None]:
        """The schema's arguments after A and B, from operands by name."""
        flat: list[Tensor | float | None] = []
        for argument in self.arguments:
            value = operands[argument.parameter.name]
            if argument.value_name is None:
                flat.append(value)
            elif isinstance(value, Tensor):
                flat += [value, 0.0]
            else:
                flat += [None, float(value)]
        return flat

    def _named(self, flat: Sequence[Tensor | float | None]) -> dict[str, Tensor | float]:
        operands, position = {}, 0
        for argument in self.arguments:
            value = flat[position]
            if argument.value_name is not None:
                position += 1
                value = flat[position] if value is None else value
            position += 1
            assert value is not None
            operands[argument.parameter.name] = value
        return operands

    def _returned(self, results: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        return results[0] if len(results) == 1 else tuple(results)

    # implementations

    def _cuda(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, out_dtype: torch.dtype | None = None) -> object:
        return self._returned(self.runner(A, B, self._named(flat), out_dtype))

    def _cpu(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, out_dtype: torch.dtype | None = None) -> object:
        return self._returned(self.cpu(A, B, self._named(flat), out_dtype))

    def cpu(
        self, A: Tensor, B: Tensor, operands: Operands, out_dtype: torch.dtype | None
    ) -> list[Tensor]:
        """The results by torch ops, in the wider of fp32 and the inputs' dtype."""
        a, dtypes = self._checked(A, B, operands, out_dtype)
        compute = torch.float64 if a is DType.F64 else torch.float32
        results = self._evaluated(A, B, operands, dtypes, compute)
        return [_owned(result, A, B, operands) for result in results]

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
        _, dtypes = self._checked(A, B, self._named(flat), out_dtype)
        extents = extents_of(self.graph.name, A, B)
        results = [
            A.new_empty(extents.shape(result_axes(result)), dtype=TORCH_DTYPES[dtype])
            for result, dtype in zip(self.graph.results, dtypes, strict=True)
        ]
        return self._returned(results)

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
        asked = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        if torch.is_grad_enabled() and asked:
            raise NoBackward(
                f"`{self.graph.name}` has no backward yet, and an input requires a gradient\n"
                "  Call it under torch.no_grad(), or detach the inputs."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, out_dtype=out_dtype)

    def _cuda_out(self, A: Tensor, B: Tensor, *flat: Tensor | float | None, **outs: Tensor) -> None:
        operands, given = self._named(flat), list(outs.values())
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
        operands, given = self._named(flat), list(outs.values())
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


def register(graphs: Mapping[DType, Graph], config: GemmConfig | None = None) -> EpilogueOp:
    """The op of an epilogue, registered with torch when it is first seen.

    An op with a fixed `config` is an op of its own, with the config's digest in its name.
    """
    graph = graphs[DType.F32]
    name = f"{graph.name}_{graph.digest}"
    if config is not None:
        name += "_" + hashlib.blake2b(repr(config).encode(), digest_size=3).hexdigest()
    with _lock:
        if name not in _ops:
            _ops[name] = EpilogueOp(name, graphs, config)
        return _ops[name]


def _arguments(graph: Graph) -> tuple[Argument, ...]:
    taken = set(_RESERVED)
    arguments = []
    for parameter in graph.parameters:
        name = _free(parameter.name, taken)
        value_name = _free(f"{name}_value", taken) if parameter.axes is Axes.SCALAR else None
        arguments.append(Argument(parameter, name, value_name))
    return tuple(arguments)


# words of torch's schema language that cannot name an argument
_SCHEMA_WORDS = frozenset({"int", "float", "bool", "str", "Tensor", "Scalar", "ScalarType", "None", "True", "False",
                           "complex", "Device", "Layout", "MemoryFormat", "Generator", "Storage", "Stream",
                           "from", "import", "in", "is", "and", "or", "not", "if", "else", "for", "while", "def",
                           "return", "class", "lambda", "pass", "break", "continue", "global", "inf", "nan"})


def _free(wanted: str, taken: set[str]) -> str:
    """`wanted` as an unused argument name; torch's schemas take ASCII names that are no keyword."""
    name = wanted if wanted.isascii() else "operand_" + wanted.encode("unicode_escape").hex()
    if name in _SCHEMA_WORDS or name.startswith("_"):
        name = f"operand{'' if name.startswith('_') else '_'}{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


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


def _owned(result: Tensor, A: Tensor, B: Tensor, operands: Operands) -> Tensor:
    """A contiguous result that shares no memory with an input, as torch asks of an op."""
    inputs = [A, B, *(value for value in operands.values() if isinstance(value, Tensor))]
    shares = any(result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in inputs if x.numel())
    return result.clone(memory_format=torch.contiguous_format) if shares else result.contiguous()


def _tile_dtype(graph: Graph, outs: Sequence[Tensor]) -> torch.dtype | None:
    """The `out_dtype` that tensors given as `out` imply."""
    for out, result in zip(outs, graph.results, strict=True):
        if not result.is_reduction and result.dtype is None:
            return out.dtype
    return None


def _overlaps(out: Tensor, inputs: Sequence[Tensor | float]) -> bool:
    storage = out.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in inputs)
