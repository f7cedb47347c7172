"""Ready-made epilogues, each a few lines; read them as examples."""

from __future__ import annotations

from gemmgen import dsl as gg
from gemmgen.dsl import Col, Row, Tile, Value, epilogue


@epilogue
def bias(accum: Value, bias: Row) -> Value:
    return accum + bias


@epilogue
def bias_relu(accum: Value, bias: Row) -> Value:
    return gg.relu(accum + bias)


@epilogue
def bias_gelu(accum: Value, bias: Row) -> Value:
    return gg.gelu(accum + bias)


@epilogue
def bias_gelu_tanh(accum: Value, bias: Row) -> Value:
    return gg.gelu_tanh(accum + bias)


@epilogue
def bias_silu(accum: Value, bias: Row) -> Value:
    return gg.silu(accum + bias)


@epilogue
def bias_silu_residual(accum: Value, bias: Row, residual: Tile) -> Value:
    return gg.silu(accum + bias) + residual


@epilogue
def scale_bias_gelu_residual(accum: Value, scale: Row, bias: Row, residual: Tile) -> Value:
    return gg.gelu(accum * scale + bias) + residual


@epilogue
def int8_dequant_bias(accum: Value, scale_a: Col, scale_b: Row, bias: Row) -> Value:
    return accum * scale_a * scale_b + bias


@epilogue
def fp8_dequant_bias_gelu_tanh(accum: Value, scale_a: Col, scale_b: Row, bias: Row) -> Value:
    return gg.gelu_tanh(accum * scale_a * scale_b + bias)


@epilogue
def bias_relu_column_sums(accum: Value, bias: Row) -> dict[str, Value]:
    activated = gg.relu(accum + bias)
    return {"D": activated, "column_sums": gg.sum(activated, over="M")}
