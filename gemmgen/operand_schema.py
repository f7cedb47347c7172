"""Operands in torch's schema language: legal argument names, and Scalars that are a tensor or a number.

A Scalar operand `s` is two arguments, `Tensor? s` and `float s_value`, so that both are read at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gemmgen.errors import OperandError
from gemmgen.ir.graph import Parameter
from gemmgen.ir.node import Axes

# names that Python allows and torch's schema language reads as something else
_SCHEMA_WORDS = frozenset(
    (
        "int", "float", "bool", "str", "complex", "Tensor", "Scalar", "ScalarType", "Device", "Layout", "MemoryFormat",
        "Generator", "Storage", "Stream", "Dimname", "QScheme", "AnyEnumType", "SymInt", "t", "None", "True", "False",
        "inf", "nan", "self", "from", "import", "in", "is", "and", "or", "not", "if", "else", "for", "while", "def",
        "return", "class", "lambda", "pass", "break", "continue", "global",
    )
)


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a schema; `value_name` is the number beside it, for a Scalar."""

    parameter: Parameter
    name: str
    value_name: str | None


class OperandSchema:
    """The part of an op's schema that stands for the operands of an epilogue."""

    def __init__(self, parameters: Sequence[Parameter], reserved: Collection[str]):
        taken = set(reserved)
        self.arguments = tuple(_argument(parameter, taken) for parameter in parameters)

    @property
    def texts(self) -> list[str]:
        """The arguments as text, such as `Tensor bias`."""
        texts = []
        for argument in self.arguments:
            if argument.value_name is None:
                texts.append(f"Tensor {argument.name}")
            else:
                texts += [f"Tensor? {argument.name}", f"float {argument.value_name}"]
        return texts

    def flat(self, operands: Mapping[str, Tensor | float]) -> list[Tensor | float | None]:
        """Operands by name as positional arguments."""
        flat: list[Tensor | float | None] = []
        for argument in self.arguments:
            value = operands[argument.parameter.name]
            if argument.value_name is None:
                flat.append(value)
            elif isinstance(value, Tensor):
                flat += [value, 0.0]
            else:
                flat += [None, _number(argument.parameter.name, value)]
        return flat

    def named(self, flat: Sequence[Tensor | float | None]) -> dict[str, Tensor | float]:
        """Positional arguments as operands by name; the inverse of `flat`."""
        operands: dict[str, Tensor | float] = {}
        values = iter(flat)
        for argument in self.arguments:
            value = next(values)
            if argument.value_name is not None:
                number = next(values)
                value = number if value is None else value
            assert value is not None
            operands[argument.parameter.name] = value
        return operands

    def positions(self) -> dict[str, int]:
        """Where the tensor of each operand stands among the flat arguments."""
        positions, at = {}, 0
        for argument in self.arguments:
            positions[argument.parameter.name] = at
            at += 1 if argument.value_name is None else 2
        return positions

    def positions_along_m(self) -> list[int]:
        """Where the operands stand whose last axes begin with M."""
        positions = self.positions()
        return [
            positions[argument.parameter.name]
            for argument in self.arguments
            if argument.parameter.axes in (Axes.COL, Axes.TILE)
        ]


def _number(name: str, value: object) -> float:
    if not hasattr(value, "__float__"):  # `float` would read text too
        raise OperandError(
            f"operand `{name}` is of type {type(value).__name__}\n  A gg.Scalar is a number or a one-element tensor."
        )
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise OperandError(f"operand `{name}`: {error}\n  A gg.Scalar is a number or a one-element tensor.") from None


def _argument(parameter: Parameter, taken: set[str]) -> Argument:
    name = _free(parameter.name, taken)
    is_scalar = parameter.axes is Axes.SCALAR
    return Argument(parameter, name, _free(f"{name}_value", taken) if is_scalar else None)


def _free(wanted: str, taken: set[str]) -> str:
    """`wanted` as an unused argument name that torch's schema parser takes."""
    name = wanted if wanted.isascii() else "operand_" + wanted.encode().hex()
    if name in _SCHEMA_WORDS or name.startswith("_"):
        name = f"operand_{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name
