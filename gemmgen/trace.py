"""From an epilogue function to a `Graph`: the function runs once on proxies."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Mapping

from gemmgen import dsl
from gemmgen.dtypes import DType
from gemmgen.errors import GemmgenError, TraceError
from gemmgen.ir import build
from gemmgen.ir.graph import Graph, Location, Parameter, Result
from gemmgen.ir.node import Axes, Op
from gemmgen.ir.verify import verified

KINDS: dict[str, Axes] = {kind.__name__: kind.axes for kind in (dsl.Row, dsl.Col, dsl.Tile, dsl.Scalar)}
RESERVED = frozenset({"out", "out_dtype"})  # keywords of `Gemm.__call__`
UNSTORED = frozenset({DType.F64, DType.BOOL})


def trace(epilogue: dsl.Epilogue, accum: DType = DType.F32) -> Graph:
    """The verified graph of `epilogue`.

    Args:
        accum: F32, or I32 for int8 inputs.

    Raises:
        TraceError: the signature, the body or what it returns is not an epilogue.
        VerifyError: the traced graph breaks a rule of the IR.
    """
    parameters = parameters_of(epilogue)
    accumulator = dsl.Value(build.accum(accum))
    loads = {p.name: dsl.Value(build.load(p.name, p.axes)) for p in parameters}
    locations = {value.node: _declaration(epilogue) for value in (accumulator, *loads.values())}
    token = dsl.current_locations.set(locations)
    try:
        returned = epilogue.fn(accumulator, **loads)
    except GemmgenError as error:
        raise type(error)(f"{error}\n  while tracing epilogue `{epilogue.name}`") from None
    finally:
        dsl.current_locations.reset(token)
    container, values = _unpacked(epilogue.name, returned)
    results = tuple(_result(epilogue.name, name, value) for name, value in values.items())
    return verified(Graph(_identifier(epilogue.name), accum, parameters, results, container, locations))


def _identifier(name: str) -> str:
    """`name` as torch and file systems take it, such as `lambda` for a lambda."""
    return re.sub(r"\W|^(?=\d)", "_", name.strip("<>"), flags=re.ASCII)


def _declaration(epilogue: dsl.Epilogue) -> Location:
    """The first line of the function, decorators included: where its parameters come from."""
    code = getattr(inspect.unwrap(epilogue.fn), "__code__", None)
    if code is None:  # a callable object or a partial
        return Location("<unknown>", 0, repr(epilogue.fn))
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return Location(code.co_filename, code.co_firstlineno, line)


def parameters_of(epilogue: dsl.Epilogue) -> tuple[Parameter, ...]:
    """The operands that the function declares after `accum`.

    Raises:
        TraceError: a parameter has no kind, is variadic, positional-only or has a reserved name.
    """
    declared = list(_signature(epilogue).parameters.values())
    if not declared:
        raise TraceError(f"epilogue `{epilogue.name}` has no parameter\n  Its first parameter stands for accum.")
    return tuple(Parameter(p.name, _axes(epilogue.name, p)) for p in declared[1:])


def _signature(epilogue: dsl.Epilogue) -> inspect.Signature:
    try:
        return inspect.signature(epilogue.fn, eval_str=True)
    except Exception:  # string annotations whose names are local to another function, or mean nothing
        return inspect.signature(epilogue.fn)


def _axes(epilogue: str, parameter: inspect.Parameter) -> Axes:
    where = f"parameter `{parameter.name}` of epilogue `{epilogue}`"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TraceError(f"{where} is {parameter.kind.description}\n  Operands are passed by name: declare each one.")
    if parameter.name in RESERVED:
        raise TraceError(f"{where} has a name that `Gemm` uses itself ({', '.join(sorted(RESERVED))})\n  Rename it.")
    annotation = parameter.annotation
    name = annotation.rpartition(".")[2] if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if name not in KINDS:
        raise TraceError(
            f"{where} is not annotated with its kind\n"
            f"  Write `{parameter.name}: gg.Row` ([N]), `gg.Col` ([M]), `gg.Tile` ([M, N]) or `gg.Scalar`."
        )
    return KINDS[name]


def _unpacked(epilogue: str, returned: object) -> tuple[str, Mapping[str, object]]:
    if isinstance(returned, Mapping):
        container, values = "dict", dict(returned)
    elif isinstance(returned, (tuple, list)):
        container, values = "tuple", {f"out{i}": value for i, value in enumerate(returned)}
    else:
        container, values = "single", {"D": returned}
    if not values:
        raise TraceError(f"epilogue `{epilogue}` returns nothing\n  Return a value, a tuple or a dict of values.")
    for name in values:
        if not (isinstance(name, str) and name.isidentifier()):
            raise TraceError(f"epilogue `{epilogue}` returns a value under the name {name!r}\n  Use an identifier.")
    return container, values


def _result(epilogue: str, name: str, value: object) -> Result:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = dsl.Value(build.const(value))
    if not isinstance(value, dsl.Value):
        raise TraceError(
            f"epilogue `{epilogue}` returns {type(value).__name__} as {name!r}\n"
            "  Return values computed from `accum` and the operands."
        )
    node = value.node
    if node.op is Op.CAST and node.attr in UNSTORED:
        raise TraceError(
            f"epilogue `{epilogue}` returns {name!r} as {node.attr!r}, which no kernel stores\n"
            "  Cast to another dtype: conditions to torch.int8. Float64 results come of float64 matrices, uncast."
        )
    if node.op is Op.CAST and isinstance(node.attr, DType):  # the last cast is the result's dtype: one rounding
        return Result(name, node.args[0], node.attr)
    return Result(name, node)
