"""The element types that gemmgen knows, with their names in CUTLASS and CUDA C++. No torch here."""

from __future__ import annotations

import enum

from gemmgen.errors import UnsupportedOp


class DType(enum.Enum):
    """An element type. `text` is the name in the printed IR, `cutlass` the C++ type in templates."""

    F64 = ("f64", 64, "double")
    F32 = ("f32", 32, "float")
    BF16 = ("bf16", 16, "cutlass::bfloat16_t")
    F16 = ("f16", 16, "cutlass::half_t")
    E4M3 = ("e4m3", 8, "cutlass::float_e4m3_t")
    E5M2 = ("e5m2", 8, "cutlass::float_e5m2_t")
    I8 = ("i8", 8, "int8_t")
    I32 = ("i32", 32, "int32_t")
    BOOL = ("bool", 8, "bool")

    def __init__(self, text: str, bits: int, cutlass: str):
        self.text = text
        self.bits = bits
        self.cutlass = cutlass

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_integer(self) -> bool:
        return self in (DType.I8, DType.I32)

    @property
    def is_float(self) -> bool:
        return self not in (DType.I8, DType.I32, DType.BOOL)

    def __repr__(self) -> str:
        return self.text


TORCH_NAMES: dict[str, DType] = {
    "torch.float64": DType.F64,
    "torch.float32": DType.F32,
    "torch.bfloat16": DType.BF16,
    "torch.float16": DType.F16,
    "torch.float8_e4m3fn": DType.E4M3,
    "torch.float8_e5m2": DType.E5M2,
    "torch.int8": DType.I8,
    "torch.int32": DType.I32,
    "torch.bool": DType.BOOL,
}


def dtype_of(dtype: object) -> DType:
    """The `DType` that a `torch.dtype` (or a `DType`) means.

    Raises:
        UnsupportedOp: gemmgen has no such element type.
    """
    if isinstance(dtype, DType):
        return dtype
    try:
        return TORCH_NAMES[str(dtype)]
    except KeyError:
        raise UnsupportedOp(
            f"gemmgen has no element type for {dtype}\n  It knows {', '.join(TORCH_NAMES)}. Cast the tensor first."
        ) from None
