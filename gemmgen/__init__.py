"""gemmgen: declare what happens to a GEMM's accumulator in Python; get one fused CUDA kernel as a torch op."""

from gemmgen import library, nn
from gemmgen.chain import Chain, chain
from gemmgen.config import GemmConfig
from gemmgen.dsl import (
    Col,
    Epilogue,
    Row,
    Scalar,
    Tile,
    Value,
    abs,
    amax,
    clamp,
    col_index,
    cos,
    epilogue,
    erf,
    exp,
    exp2,
    gelu,
    gelu_tanh,
    hardswish,
    leaky_relu,
    log,
    log1p,
    max,
    maximum,
    min,
    minimum,
    mish,
    quick_gelu,
    relu,
    relu_squared,
    row_index,
    rsqrt,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    sum,
    tanh,
    where,
)
from gemmgen.errors import (
    CacheError,
    CompileError,
    CompileForbidden,
    GemmgenError,
    IllegalConfig,
    LaunchError,
    NoBackward,
    OperandError,
    ShapeMismatch,
    ToolchainError,
    TraceError,
    UnfitKernel,
    UnsupportedArch,
    UnsupportedOp,
    VerifyError,
)
from gemmgen.gemm import Gemm, linear
from gemmgen.mainloop import Dense

__version__ = "0.1.0"

__all__ = [
    "CacheError", "Chain", "Col", "CompileError", "CompileForbidden", "Dense", "Epilogue", "Gemm", "GemmConfig",
    "GemmgenError", "IllegalConfig", "LaunchError", "NoBackward", "OperandError", "Row", "Scalar", "ShapeMismatch",
    "Tile", "ToolchainError", "TraceError", "UnfitKernel", "UnsupportedArch", "UnsupportedOp", "Value", "VerifyError",
    "abs", "amax", "chain", "clamp", "col_index", "cos", "epilogue", "erf", "exp", "exp2", "gelu", "gelu_tanh",
    "hardswish", "leaky_relu", "library", "linear", "log", "log1p", "max", "maximum", "min", "minimum", "mish", "nn",
    "quick_gelu", "relu", "relu_squared", "row_index", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "sum",
    "tanh", "where",
]
