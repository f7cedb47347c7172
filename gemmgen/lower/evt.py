"""The epilogue visitor tree of a skeleton: visitors in order, each with its final C++ names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Visitor:
    """One node of the tree.

    Attributes:
        alias: its name in the skeleton.
        cpp_type: what the alias stands for.
        comment: what it carries, for the reader of the skeleton.
        arguments: braced initialiser of its `Arguments`, in terms of `x`, a `gemmgen::Args`.
    """

    alias: str
    cpp_type: str
    comment: str
    arguments: str = "{}"


@dataclass(frozen=True)
class Functor:
    """An undefined device function of the skeleton, called once per element.

    Attributes:
        symbol: its name, without C++ mangling.
        alias: the struct that wraps it in the skeleton.
        value: the C++ type that it returns, "float" or "int".
        parameters: the C++ types of its parameters, the accumulator first.
        stored: the C++ element type that its value is rounded to.
    """

    symbol: str
    alias: str
    value: str
    parameters: tuple[str, ...]
    stored: str


@dataclass(frozen=True)
class Operand:
    """The C or D of the collective.

    Attributes:
        element: C++ element type, "void" where there is none.
        ptr: C++ expression of its address.
        stride: C++ initialiser of its strides (M, N, L), in elements.
    """

    element: str
    ptr: str
    stride: str


@dataclass(frozen=True)
class EvtTree:
    """What the epilogue loads, computes and stores.

    Attributes:
        c: the TILE input that the collective loads as C.
        d: the TILE output that the collective stores as D.
        d_index: which output D is, or -1.
        loads: one per input of the signature.
        functors: one per output of the signature.
        stores: one per output of the signature.
    """

    c: Operand
    d: Operand
    d_index: int
    loads: tuple[Visitor, ...]
    functors: tuple[Functor, ...]
    stores: tuple[Visitor, ...]
