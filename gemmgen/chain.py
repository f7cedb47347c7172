"""`chain`: two GEMMs, one behind the other, whose backward fuses the first epilogue's into the second's dgrad GEMM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemmgen import aot, training
from gemmgen.errors import OperandError, ShapeMismatch, TraceError
from gemmgen.gemm import Gemm, Operand, Result, folded_matrix, joined
from gemmgen.ir.graph import Parameter
from gemmgen.operand_schema import OperandSchema
from gemmgen.ops import (
    EpilogueOp,
    define,
    implement_autocast,
    needs_gradient,
    refuse_tangents,
    registered,
    returned_text,
)
from gemmgen.problem import check_out_dtype, check_tensor, check_types
from gemmgen.training import Stage

Operands = Mapping[str, Operand]


def chain(op1: Gemm, op2: Gemm) -> Chain:
    """`op2` behind `op1`: `op2(op1(A, B1), B2)`, where A of `op2` is the tile result of `op1`.

    The answers are those of the two ops. The backward is cheaper: the gradient of the tile between them never goes
    through memory, since `op2`'s dgrad GEMM computes the gradients of `op1`'s epilogue, sums for Rows included.

    Args:
        op1: its result `D`, or its only tile, is passed on; its other results are not computed.

    Raises:
        TraceError: `op1` has several tiles and none of them is called `D`.
        OperandError: one is no `Gemm`.
    """
    for op in (op1, op2):
        if not isinstance(op, Gemm):
            raise OperandError(f"chain: an argument is of type {type(op).__name__}\n  Give two gg.Gemm.")
    return Chain(op1, op2)


class Chain:
    """Two GEMMs, one behind the other. Make it with `chain`."""

    def __init__(self, op1: Gemm, op2: Gemm):
        self.op1, self.op2 = op1, op2
        stages = (Stage(_passing_on(op1), op1.save), Stage(op2._op, op2.save))
        name = f"chain_{stages[0].op.graph.name}_{stages[1].op.graph.name}"
        digest = hashlib.blake2b(" ".join(stage.op.name for stage in stages).encode(), digest_size=6).hexdigest()
        self._op = registered(f"{name}_{digest}", ChainOp, lambda: ChainOp(f"{name}_{digest}", stages))

    def __call__(
        self,
        A: Tensor,
        B1: Tensor,
        B2: Tensor,
        /,
        *,
        first: Operands | None = None,
        second: Operands | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Result:
        """Compute `op2(op1(A, B1, **first), B2, **second)`.

        Args:
            A, B1, B2: `[..., M, K]`, `[..., K, N1]` and `[..., N1, N2]`, any strides.
            first, second: the operands of `op1` and of `op2`, by name.
            out_dtype: of the tile results of `op2`.

        Returns:
            What `op2` returns.

        Raises:
            As a call of `op1` or of `op2`.
        """
        A, B1, operands1, batch = self.op1._folded(A, B1, first or {})
        check_types(self.op2._name, self.op2._parameters, A, B2, self.op2._named(second or {}))
        if out_dtype is not None:
            check_out_dtype(self.op2._name, A, out_dtype)
        _check_batch(self._op.name, B2, batch)
        operands2 = self.op2._folded_operands(second or {}, batch)
        flat = (B1, *self._op.flat(0, operands1), folded_matrix(B2, batch), *self._op.flat(1, operands2))
        return self.op2._unfolded(self._op.overload(A, *flat, out_dtype=out_dtype), batch)

    def linear(
        self,
        x: Tensor,
        weight1: Tensor,
        weight2: Tensor,
        /,
        *,
        first: Operands | None = None,
        second: Operands | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Result:
        """The chain on `nn.Linear`'s weights, by the shape rules of `gg.linear`.

        Args:
            x: `[..., K]`.
            weight1, weight2: `[N1, K]` and `[N2, N1]`.
            first, second: operands, with x's leading dimensions or flat.
        """
        check_tensor("chain: x", x, x)
        for what, weight in (("weight1", weight1), ("weight2", weight2)):
            check_tensor(f"chain: {what}", weight, x)
            if weight.dim() != 2 or x.dim() < 1:
                raise ShapeMismatch(
                    f"chain: x is {tuple(x.shape)} and {what} {tuple(weight.shape)}\n"
                    "  x is [..., K], a weight [N, K]."
                )
        lead = x.shape[:-1]
        operands1, operands2 = self.op1._flattened(first or {}, lead), self.op2._flattened(second or {}, lead)
        A = joined(x, len(lead))
        results = self(A, weight1.t(), weight2.t(), first=operands1, second=operands2, out_dtype=out_dtype)
        return self.op2._unflattened(results, lead)

    def explain(self, *, backward: bool = False) -> str:
        """The two epilogues; or the plan of the backward: what each saves, and what is fused into the dgrad GEMM.

        Raises:
            NoBackward: a result of `op2` has no derivative.
        """
        if backward:
            return training.explain_chain(self._op.stages)
        return "\n".join(aot.explain_graph(stage.op) for stage in self._op.stages)

    def __deepcopy__(self, memo: object) -> Chain:
        return self  # it never changes

    def __reduce__(self) -> tuple[object, ...]:
        return chain, (self.op1, self.op2)

    def __repr__(self) -> str:
        return f"<gemmgen chain {self.op1._name} -> {self.op2._name}>"


class ChainOp:
    """The registered op of a chain: A, then for each stage B and its operands."""

    def __init__(self, name: str, stages: tuple[Stage, Stage]):
        self.name = name
        self.stages = stages
        self._operands = [_operand_schema(stage.op, at) for at, stage in enumerate(stages, 1)]
        self._first_count = 2 + len(self._operands[0].texts)
        arguments = [f"Tensor B{at}, {', '.join(schema.texts)}" for at, schema in enumerate(self._operands, 1)]
        texts = ", ".join(["Tensor A", *(text.removesuffix(", ") for text in arguments), "*"])
        self.overload = define(
            f"{name}({texts}, ScalarType? out_dtype=None) -> {returned_text(stages[1].op.graph)}",
            self._run, CPU=self._run, CUDA=self._run, Autograd=self._autograd,
        )  # fmt: skip
        implement_autocast(name, lambda: self.overload, (0, 1, self._first_count))

    def flat(self, stage: int, operands: Mapping[str, Operand]) -> list[Tensor | float | None]:
        """The operands of a stage as arguments."""
        return self.stages[stage].op.flat_operands(operands)

    def _run(self, *args: Any, out_dtype: torch.dtype | None = None) -> object:
        first, second = (stage.op.overload for stage in self.stages)
        between = first(*args[: self._first_count])
        return second(between, *args[self._first_count :], out_dtype=out_dtype)

    def _autograd(self, *args: Any, out_dtype: torch.dtype | None = None) -> object:
        refuse_tangents(self.name, args)
        if needs_gradient(args):
            return training.differentiated(self.stages, args, out_dtype)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args, out_dtype=out_dtype)


def _check_batch(name: str, B2: Tensor, batch: tuple[int, ...]) -> None:
    if B2.dim() < 2:
        raise ShapeMismatch(f"`{name}`: B2 is {tuple(B2.shape)}\n  It needs at least 2 dimensions, [..., N1, N2].")
    lead = tuple(B2.shape[:-2])
    own = batch[len(batch) - len(lead) :]
    if len(lead) > len(batch) or any(extent not in (1, shared) for extent, shared in zip(lead, own, strict=True)):
        raise ShapeMismatch(
            f"`{name}`: B2 has batch dimensions {lead}; A and B1 give {batch}\n"
            "  B2's must broadcast to those. For others call the two ops one after the other."
        )


def _operand_schema(op: EpilogueOp, at: int) -> OperandSchema:
    parameters = [Parameter(f"{p.name}_of_{at}", p.axes) for p in op.graph.parameters]
    return OperandSchema(parameters, reserved={"A", "B1", "B2", "out_dtype"})


def _passing_on(gemm: Gemm) -> EpilogueOp:
    """The op of `gemm` with nothing but the tile that is passed on."""
    tiles = [result.name for result in gemm._op.graph.results if not result.is_reduction]
    if len(tiles) != 1 and "D" not in tiles:
        raise TraceError(
            f"chain: `{gemm._name}` returns {', '.join(tiles) or 'no tile'}\n"
            "  The first epilogue of a chain passes on its result `D`, or its only tile: name one of them `D`."
        )
    name = "D" if "D" in tiles else tiles[0]
    if len(gemm._op.graph.results) == 1:
        return gemm._op
    graphs = {
        accum: replace(
            graph, name=f"{graph.name}_{name}", results=tuple(r for r in graph.results if r.name == name),
            container="single",
        )
        for accum, graph in gemm._op.graphs.items()
    }  # fmt: skip
    return training.differentiable(graphs, gemm.options, gemm.save)
