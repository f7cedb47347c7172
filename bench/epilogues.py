"""The gemmgen epilogue of each case, by the name of the case."""

import gemmgen as gg


@gg.epilogue
def bias_gelu_tanh(accum, bias: gg.Row):
    return gg.gelu_tanh(accum + bias)


@gg.epilogue
def bias_silu(accum, bias: gg.Row):
    return gg.silu(accum + bias)


@gg.epilogue
def scale_bias_gelu_residual(accum, scale: gg.Row, bias: gg.Row, residual: gg.Tile):
    return gg.gelu(accum * scale + bias) + residual


@gg.epilogue
def int8_dequant_bias(accum, scale_a: gg.Col, scale_b: gg.Row, bias: gg.Row):
    return accum * scale_a * scale_b + bias


@gg.epilogue
def fp8_dequant_bias_gelu_tanh(accum, scale_a: gg.Col, scale_b: gg.Row, bias: gg.Row):
    return gg.gelu_tanh(accum * scale_a * scale_b + bias)


@gg.epilogue
def bias_relu_column_sums(accum, bias: gg.Row):
    activated = gg.relu(accum + bias)
    return activated, gg.sum(activated, over="M")


EPILOGUES = {
    epilogue.name: epilogue
    for epilogue in (
        bias_gelu_tanh,
        bias_silu,
        scale_bias_gelu_residual,
        int8_dequant_bias,
        fp8_dequant_bias_gelu_tanh,
        bias_relu_column_sums,
    )
}
