"""A plain Triton matmul with each case's epilogue fused: grouped tile order, fp32 (int32) accumulation, autotuned.

Importing this needs Triton. The kernel reads A row-major and B as the transposed view of an `[N, K]` weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_M = 8


@triton.jit
def _gelu_tanh(x):
    # tanh(u) = 2 sigmoid(2u) - 1
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _row_vector(pointer, cols, N):
    return tl.load(pointer + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _col_vector(pointer, rows, M):
    return tl.load(pointer + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Tiles in groups of GROUP rows, down each column of a group first, so that L2 is shared."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP * tiles_n)
    first_m = group * GROUP
    rows_in_group = min(tiles_m - first_m, GROUP)
    within = pid % (GROUP * tiles_n)
    return first_m + within % rows_in_group, within // rows_in_group


@triton.jit
def _matmul_kernel(
    A, B, D, bias, scale_a, scale_b, residual, sums, M, N, K, stride_am, stride_bn,
    EPILOGUE: tl.constexpr, ACCUM: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows and columns past the end wrap around: they are computed and never stored.
    a_tile = A + (rows % M)[:, None] * stride_am + ks[None, :]
    b_tile = B + (cols % N)[None, :] * stride_bn + ks[:, None]
    accum = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUM)
    for k in range(tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_tile)
            b = tl.load(b_tile)
        else:
            left = K - k * BLOCK_K
            a = tl.load(a_tile, mask=ks[None, :] < left, other=0.0)
            b = tl.load(b_tile, mask=ks[:, None] < left, other=0.0)
        accum = tl.dot(a, b, accum, out_dtype=ACCUM)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    place = rows[:, None] * N + cols[None, :]
    x = accum.to(tl.float32)
    if EPILOGUE == "bias_gelu_tanh":
        x = _gelu_tanh(x + _row_vector(bias, cols, N))
    elif EPILOGUE == "bias_silu":
        x = x + _row_vector(bias, cols, N)
        x = x * tl.sigmoid(x)
    elif EPILOGUE == "scale_bias_gelu_residual":
        x = _gelu(x * _row_vector(scale_b, cols, N) + _row_vector(bias, cols, N))
        x += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    elif EPILOGUE == "int8_dequant_bias":
        x = x * _col_vector(scale_a, rows, M) * _row_vector(scale_b, cols, N) + _row_vector(bias, cols, N)
    elif EPILOGUE == "fp8_dequant_bias_gelu_tanh":
        x = x * _col_vector(scale_a, rows, M) * _row_vector(scale_b, cols, N) + _row_vector(bias, cols, N)
        x = _gelu_tanh(x)
    else:
        tl.static_assert(EPILOGUE == "bias_relu_column_sums")
        x = tl.maximum(x + _row_vector(bias, cols, N), 0.0)
        tl.atomic_add(sums + cols, tl.sum(tl.where(inside, x, 0.0), axis=0), mask=cols < N)
    tl.store(D + place, x.to(D.dtype.element_ty), mask=inside)


# (BLOCK_M, BLOCK_N, BLOCK_K in bytes, warps, stages); few, because each is compiled for each case
_WIDE = (
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (64, 256, 128, 4, 4),
    (64, 128, 128, 4, 4),
)
_NARROW = ((16, 64, 256, 4, 5), (16, 128, 256, 4, 4), (32, 64, 256, 4, 4), (64, 64, 128, 4, 5))


def _configs(element_bytes: int) -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k_bytes // element_bytes}, warps, stages)
        for m, n, k_bytes, warps, stages in (*_WIDE, *_NARROW)
    ]


def _fitting(configs: list[triton.Config], arguments: dict, **_: object) -> list[triton.Config]:
    """Narrow tiles where M is small, wide ones elsewhere."""
    narrow = arguments["M"] <= 64
    return [
        config for config in configs if (config.kwargs["BLOCK_N"] == 64 or config.kwargs["BLOCK_M"] == 16) == narrow
    ]


def _short_bench(call: Callable[[], object], quantiles: tuple[float, ...]) -> object:
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def _tuned(element_bytes: int) -> Callable[..., object]:
    even_k = triton.heuristics({"EVEN_K": lambda arguments: arguments["K"] % arguments["BLOCK_K"] == 0})
    return triton.autotune(
        _configs(element_bytes),
        key=["M", "N", "K", "EPILOGUE"],
        reset_to_zero=["sums"],
        prune_configs_by={"early_config_prune": _fitting},
        do_bench=_short_bench,
    )(even_k(_matmul_kernel))


_TUNED = {1: _tuned(1), 2: _tuned(2)}


def fused(case: str) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[[], str]]:
    """The rung's function for `case`, and what tells, after a call, which config the autotuner chose."""
    has_sums = case == "bias_relu_column_sums"
    chosen: list[str] = []

    def run(A: Tensor, B: Tensor, **operands: Tensor) -> tuple[Tensor, ...]:
        (M, K), N = A.shape, B.shape[1]
        D = torch.empty((M, N), dtype=torch.bfloat16, device=A.device)
        sums = torch.zeros(N, device=A.device) if has_sums else torch.empty(1, device=A.device)
        kernel = _TUNED[A.element_size()]
        kernel[lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)](
            A, B, D, operands["bias"], operands.get("scale_a", A), operands.get("scale_b", operands.get("scale", A)),
            operands.get("residual", A), sums, M, N, K, A.stride(0), B.stride(1),
            EPILOGUE=case, ACCUM=tl.int32 if A.dtype is torch.int8 else tl.float32, GROUP=GROUP_M,
        )  # fmt: skip
        chosen[:] = [str(kernel.best_config)]
        return (D, sums) if has_sums else (D,)

    return run, lambda: chosen[0]
