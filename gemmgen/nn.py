"""Modules with fused epilogues in the place of `torch.nn.Linear`, and of two of them: same keys, same parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemmgen.chain import chain
from gemmgen.dsl import Epilogue, Value, epilogue
from gemmgen.errors import OperandError, ShapeMismatch, TraceError
from gemmgen.gemm import Gemm, Operand, Result, linear
from gemmgen.ir.node import Axes
from gemmgen.library import bias as add_bias

BIAS = "bias"


@epilogue
def unchanged(accum: Value) -> Value:
    return accum


class Linear(torch.nn.Module):
    """`epilogue(x @ weight.T, bias=bias, **operands)`, with the parameters and state_dict of `torch.nn.Linear`.

    Under autocast x and weight are cast as `F.linear`'s are; the bias and other operands are read as they are stored.

    Args:
        in_features, out_features: K and N.
        bias: whether the module has a bias; the epilogue's Row operand `bias` gets it.
        epilogue: declared with `@gg.epilogue`, or a `Gemm` with its options; None only adds the bias.
        options: as for `Gemm`, where `epilogue` is none itself.

    Raises:
        OperandError: there is a bias, and the epilogue has no Row operand called `bias`.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        epilogue: Epilogue | Gemm | None = None,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.op = _gemm(epilogue, bias, options)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        vector = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter(BIAS, vector)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls, module: torch.nn.Linear, epilogue: Epilogue | Gemm | None = None, **options: Any
    ) -> Linear:
        """The module with the parameters of `module`: shared, not copied.

        Args:
            epilogue, options: as for the class.
        """
        has_bias = module.bias is not None
        made = cls(module.in_features, module.out_features, has_bias, epilogue, device="meta", **options)
        made.weight = module.weight
        made.bias = module.bias if has_bias else None
        return made.train(module.training)

    def reset_parameters(self) -> None:
        """Draw the parameters as `torch.nn.Linear` does."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, given: Mapping[str, Operand] | None = None, /, **operands: Operand) -> Result:
        """The epilogue's results.

        Args:
            x: `[..., in_features]`.
            given: operands too, by name; for one that is called `self`.
            operands: those of the epilogue but the module's bias; see `gg.linear`.
        """
        if isinstance(x, torch.fx.Proxy):
            return _traced(self, x, () if given is None else (given,), operands)
        return linear(x, self.weight, self.op, out_dtype=None, **self.operands({**operands, **(given or {})}))

    def operands(self, operands: Mapping[str, Operand]) -> dict[str, Operand]:
        """`operands` and the module's bias."""
        if self.bias is None:
            return dict(operands)
        if BIAS in operands:
            raise OperandError("the module has a bias of its own\n  Make it with bias=False to give one in the call.")
        return {**operands, BIAS: self.bias}

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"epilogue={self.op.epilogue.name}"
        )


class MLP(torch.nn.Module):
    """Two `Linear`s, one behind the other, whose backward fuses the first epilogue's into the second's dgrad GEMM.

    The submodules `fc1` and `fc2` hold the parameters, under `nn.Linear`'s keys. They are not called: hooks on them
    do not run.

    Args:
        hidden, inner: features outside, and between the two.
        activation: the epilogue of fc1.
        epilogue: of fc2; None only adds the bias.
        bias: whether both have one.
        options: as for `Linear`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: Epilogue | Gemm,
        epilogue: Epilogue | Gemm | None = None,
        *,
        bias: bool = True,
        **options: Any,
    ):
        super().__init__()
        self._join(Linear(hidden, inner, bias, activation, **options), Linear(inner, hidden, bias, epilogue, **options))

    @classmethod
    def from_linear(
        cls,
        fc1: torch.nn.Linear,
        fc2: torch.nn.Linear,
        activation: Epilogue | Gemm,
        epilogue: Epilogue | Gemm | None = None,
        **options: Any,
    ) -> MLP:
        """The module with the parameters of `fc1` and `fc2`, shared and not copied; each may lack a bias.

        Raises:
            ShapeMismatch: `fc2` does not take what `fc1` gives.
        """
        if fc1.out_features != fc2.in_features:
            raise ShapeMismatch(
                f"fc1 gives {fc1.out_features} features and fc2 takes {fc2.in_features}\n  They have to be equal."
            )
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._join(Linear.from_linear(fc1, activation, **options), Linear.from_linear(fc2, epilogue, **options))
        return made.train(fc1.training)

    def _join(self, fc1: Linear, fc2: Linear) -> None:
        self.fc1, self.fc2 = fc1, fc2
        self.chain = chain(fc1.op, fc2.op)

    def forward(
        self, x: Tensor, *, first: Mapping[str, Operand] | None = None, second: Mapping[str, Operand] | None = None
    ) -> Result:
        """The results of fc2's epilogue.

        Args:
            x: `[..., hidden]`.
            first, second: operands of the two epilogues but the modules' biases.
        """
        if isinstance(x, torch.fx.Proxy):
            return _traced(self, x, (), {"first": first, "second": second})
        return self.chain.linear(
            x, self.fc1.weight, self.fc2.weight,
            first=self.fc1.operands(first or {}), second=self.fc2.operands(second or {}),
        )  # fmt: skip


def _gemm(epilogue: Epilogue | Gemm | None, bias: bool, options: Mapping[str, Any]) -> Gemm:
    op = epilogue if isinstance(epilogue, Gemm) else Gemm(epilogue or (add_bias if bias else unchanged), **options)
    if op is epilogue and options:
        raise OperandError(f"a Gemm has its options: {', '.join(options)} cannot be given\n  Give them to the Gemm.")
    if bias and not any(p.name == BIAS and p.axes is Axes.ROW for p in op._parameters):
        raise OperandError(
            f"epilogue `{op.epilogue.name}` has no Row operand called `{BIAS}`, and the module has a bias\n"
            "  Make the module with bias=False, or declare `bias: gg.Row`."
        )
    return op


def _traced(module: torch.nn.Module, x: torch.fx.Proxy, args: tuple[Any, ...], keywords: dict[str, Any]) -> Result:
    """The call of `module` in the graph that `torch.fx` traces: one node, as a call of torch's own modules is.

    Raises:
        TraceError: the module itself is to be traced, and there is nothing in it to see.
    """
    tracer = x.tracer
    if not isinstance(tracer, torch.fx.Tracer) or tracer.root is module:
        raise TraceError(
            f"torch.fx cannot look into `gg.nn.{type(module).__name__}`: its GEMM is one op\n"
            "  Trace a module that holds it, such as torch.nn.Sequential(module), or use torch.export."
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x, *args), keywords)  # type: ignore[no-any-return,return-value]
