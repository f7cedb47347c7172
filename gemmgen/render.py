"""From a `Graph` to the CUDA text of its functors: straight-line code, one function per result.

A functor takes `accum` and one argument per `Slot`, never a user's name, so operands may be called anything.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmgen import templates
from gemmgen.dtypes import DType
from gemmgen.ir.graph import Graph
from gemmgen.ir.node import COMPARISONS, REDUCTIONS, Node, Op, topological
from gemmgen.peephole import with_fewer_instructions
from gemmgen.signature import Kind

# (exact to fp32, fast): the fast form serves graphs whose tiles are all stored in bf16 or narrower
EXPRESSIONS: dict[Op, tuple[str, str]] = {
    Op.NEG: ("-{0}", "-{0}"),
    Op.ABS: ("fabsf({0})", "fabsf({0})"),
    Op.EXP: ("expf({0})", "gg::exp_approx({0})"),
    Op.EXP2: ("exp2f({0})", "gg::exp2_approx({0})"),
    Op.LOG: ("logf({0})", "logf({0})"),
    Op.LOG1P: ("log1pf({0})", "log1pf({0})"),
    Op.SQRT: ("sqrtf({0})", "gg::sqrt_approx({0})"),
    Op.RSQRT: ("rsqrtf({0})", "rsqrtf({0})"),
    Op.TANH: ("tanhf({0})", "gg::tanh_approx({0})"),
    Op.SIGMOID: ("gg::sigmoid({0})", "gg::sigmoid_approx({0})"),
    Op.ERF: ("erff({0})", "erff({0})"),
    Op.SIN: ("sinf({0})", "sinf({0})"),
    Op.COS: ("cosf({0})", "cosf({0})"),
    Op.RELU: ("gg::maximum({0}, 0.f)", "gg::maximum({0}, 0.f)"),
    Op.SOFTPLUS: ("gg::softplus({0})", "gg::softplus_approx({0})"),
    Op.ADD: ("{0} + {1}", "{0} + {1}"),
    Op.SUB: ("{0} - {1}", "{0} - {1}"),
    Op.MUL: ("{0} * {1}", "{0} * {1}"),
    Op.DIV: ("{0} / {1}", "gg::div_approx({0}, {1})"),
    Op.POW: ("powf({0}, {1})", "powf({0}, {1})"),
    Op.MINIMUM: ("gg::minimum({0}, {1})", "gg::minimum({0}, {1})"),
    Op.MAXIMUM: ("gg::maximum({0}, {1})", "gg::maximum({0}, {1})"),
    Op.LT: ("{0} < {1}", "{0} < {1}"),
    Op.LE: ("{0} <= {1}", "{0} <= {1}"),
    Op.GT: ("{0} > {1}", "{0} > {1}"),
    Op.GE: ("{0} >= {1}", "{0} >= {1}"),
    Op.EQ: ("{0} == {1}", "{0} == {1}"),
    Op.NE: ("{0} != {1}", "{0} != {1}"),
    Op.WHERE: ("{0} ? {1} : {2}", "{0} ? {1} : {2}"),
}

ROUNDING: dict[DType, str] = {
    DType.BF16: "gg::round_bf16({0})",
    DType.F16: "gg::round_f16({0})",
    DType.E4M3: "gg::round_e4m3({0})",
    DType.E5M2: "gg::round_e5m2({0})",
    DType.I8: "gg::round_i8({0})",
    DType.I32: "gg::round_i32({0})",
}


@dataclass(frozen=True)
class Slot:
    """One functor argument after `accum`: an operand by name, or an index (no name)."""

    kind: Kind
    name: str | None = None


@dataclass(frozen=True)
class Functor:
    """One result as C++: the statements, the returned expression, and its type."""

    returns: str
    statements: tuple[str, ...]
    value: str


def slots_of(graph: Graph, kinds: Mapping[str, Kind]) -> tuple[Slot, ...]:
    """The functor arguments of `graph`: the operands it uses, in declared order, then the indices."""
    operands = tuple(Slot(kinds[p.name], p.name) for p in graph.loads())
    ops = {node.op for node in graph.nodes()}
    indices = ((Op.ROW_INDEX, Kind.ROW_INDEX), (Op.COL_INDEX, Kind.COL_INDEX))
    return operands + tuple(Slot(kind) for op, kind in indices if op in ops)


def render_functors(
    graph: Graph, slots: Sequence[Slot], dtypes: Sequence[DType], *, linkage: str = 'extern "C" __device__'
) -> str:
    """The CUDA text that defines `gemmgen_functor_<i>` for each result.

    Args:
        dtypes: the stored dtype of each result; decides the return type and whether approximations are allowed.
        linkage: what stands before each function.
    """
    graph = with_fewer_instructions(graph)
    fast = uses_approximations(graph, dtypes)
    integer_accum = graph.accum is DType.I32
    functors = [_functor(result.node, dtype, slots, fast) for result, dtype in zip(graph.results, dtypes, strict=True)]
    parameters = ["int accum" if integer_accum else "float accum"]
    parameters += [f"{'int' if slot.name is None else 'float'} in{i}" for i, slot in enumerate(slots)]
    return templates.render(
        "functor.cu.jinja", name=graph.name, functors=functors, parameters=", ".join(parameters), linkage=linkage
    )


def uses_approximations(graph: Graph, dtypes: Sequence[DType]) -> bool:
    """Whether every tile is stored with at most bf16's 8 significant bits, which hide errors of 2^-11.

    One answer for the whole graph, so that results share their common subexpressions.
    """
    tiles = [d for result, d in zip(graph.results, dtypes, strict=True) if not result.is_reduction]
    return bool(tiles) and all(d in (DType.BF16, DType.E4M3, DType.E5M2, DType.I8) for d in tiles)


def _functor(root: Node, dtype: DType, slots: Sequence[Slot], fast: bool) -> Functor:
    root = root.args[0] if root.op in REDUCTIONS else root
    names = dict(_arguments(root, slots))
    statements = []
    for node in topological([root]):
        if node not in names:
            names[node] = f"v{len(names)}"
            statements.append(f"{_c_type(node)} const {names[node]} = {_expression(node, names, fast)};")
    value, is_integer = names[root], _c_type(root) == "int"
    if dtype is DType.I32:
        return Functor("int", tuple(statements), value if is_integer else f"gg::to_i32({value})")
    if root.dtype is DType.BOOL:
        value = f"({value} ? 1.f : 0.f)"
    return Functor("float", tuple(statements), f"static_cast<float>({value})" if is_integer else value)


def _arguments(root: Node, slots: Sequence[Slot]) -> list[tuple[Node, str]]:
    operands = {slot.name: f"in{i}" for i, slot in enumerate(slots) if slot.name is not None}
    indices = {slot.kind: f"in{i}" for i, slot in enumerate(slots) if slot.name is None}
    named = []
    for node in topological([root]):
        if node.op is Op.ACCUM:
            named.append((node, "accum"))
        elif node.op is Op.LOAD:
            named.append((node, operands[str(node.attr)]))
        elif node.op is Op.ROW_INDEX:
            named.append((node, indices[Kind.ROW_INDEX]))
        elif node.op is Op.COL_INDEX:
            named.append((node, indices[Kind.COL_INDEX]))
    return named


def _c_type(node: Node) -> str:
    if node.op in (Op.ROW_INDEX, Op.COL_INDEX) or (node.op is Op.ACCUM and node.dtype is DType.I32):
        return "int"
    return "bool" if node.dtype is DType.BOOL else "float"


def _expression(node: Node, names: Mapping[Node, str], fast: bool) -> str:
    arguments = [names[arg] for arg in node.args]
    if node.op is Op.CONST:
        assert isinstance(node.attr, float)
        return literal(node.attr)
    if node.op is Op.CAST:
        return _cast(node, arguments[0])
    if node.op is Op.CLAMP:
        return _clamp(node, arguments[0])
    if node.op in COMPARISONS and any(_c_type(arg) == "int" for arg in node.args):
        arguments = [_integer(arg, name) for arg, name in zip(node.args, arguments, strict=True)]
    return EXPRESSIONS[node.op][fast].format(*arguments)


def _integer(node: Node, name: str) -> str:
    return str(int(node.attr)) if node.op is Op.CONST and isinstance(node.attr, float) else name


def _cast(node: Node, argument: str) -> str:
    (source,) = node.args
    if _c_type(source) == "int":
        argument = f"static_cast<float>({argument})"
    elif _c_type(source) == "bool":
        argument = f"({argument} ? 1.f : 0.f)"
    assert isinstance(node.attr, DType)
    return ROUNDING.get(node.attr, "{0}").format(argument)


def _clamp(node: Node, argument: str) -> str:
    assert isinstance(node.attr, tuple)
    low, high = node.attr
    if low is not None:
        argument = f"gg::maximum({argument}, {literal(low)})"
    return argument if high is None else f"gg::minimum({argument}, {literal(high)})"


def literal(value: float) -> str:
    """`value` rounded to fp32, as a C++ literal."""
    if math.isnan(value):
        return "__uint_as_float(0x7fc00000u)"
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if math.isinf(rounded):
        return f"__uint_as_float({'0xff800000u' if rounded < 0 else '0x7f800000u'})"
    return f"{float(rounded)!r}f"
