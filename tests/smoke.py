"""One small call on each path, forward and backward, checked: what `make sanitize` runs under compute-sanitizer.

    python -m tests.smoke [--products | --without-products] [--filled] [--cpu-products]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

import gemmgen as gg
from tests.gpu.test_contract import PATHS, Path
from tests.gpu.test_fused import kitchen
from tests.oracle import integers, listed

EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)


def paths() -> dict[str, Path]:
    """Those that can run here."""
    has_gpu = torch.cuda.is_available()
    return {name: path for name, path in PATHS.items() if (name != "cpu") == has_gpu}


def _on(operands: Mapping[str, Tensor | float], device: str) -> dict[str, Tensor | float]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in operands.items()}


def _fault(op: gg.Gemm, A: Tensor, B: Tensor, operands: Mapping[str, Tensor | float], results: object) -> str:
    """What differs from the float64 answer, computed on the CPU so that no other kernel runs; else nothing."""
    wants = listed(op.reference(A.cpu(), B.cpu(), **_on(operands, "cpu")))
    pairs = zip(op._result_names, map(torch.Tensor.cpu, listed(results)), wants, strict=True)
    return ", ".join(name for name, got, want in pairs if not torch.equal(got, want.to(got.dtype)))


def _forward(path: Path, is_filled: bool) -> str:
    op, (A, B, operands) = path.gemm(kitchen), path.problem()
    if is_filled and not path.is_split:
        return _fault(op, A, B, operands, op(A, B, out=_filled(op, A, B, operands), **operands))
    with _allocations(is_filled):
        return _fault(op, A, B, operands, path.call(op, A, B, **operands))


def _filled(op: gg.Gemm, A: Tensor, B: Tensor, operands: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Results for the call to write, NaN until then."""
    shapes = op(A.to("meta"), B.to("meta"), **_on(operands, "meta"))
    assert isinstance(shapes, dict)
    return {name: torch.full_like(x, torch.nan, device=A.device) for name, x in shapes.items()}


@contextlib.contextmanager
def _allocations(is_filled: bool) -> Iterator[None]:
    """Where `is_filled`, what torch allocates is NaN until it is written."""
    torch.use_deterministic_algorithms(is_filled, warn_only=True)  # by default that fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _eight_bits(dtype: torch.dtype, is_filled: bool) -> str:
    path = Path(200, 136, 72, device="cuda" if torch.cuda.is_available() else "cpu")
    op, (A, B, operands) = path.gemm(kitchen), path.problem(torch.float32)
    A, B = A.to(dtype), B.mT.to(dtype).mT
    with _allocations(is_filled):
        return _fault(op, A, B, operands, path.call(op, A, B, torch.float32, **operands))


def _backward(path: Path, is_filled: bool) -> str:
    op, (A, B, operands) = path.gemm(kitchen), path.problem()
    cotangent = integers(*path.lead, path.M, path.N, dtype=torch.bfloat16, device=path.device)

    def gradients(given: Mapping[str, Tensor | float], cotangent: Tensor) -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in given.items() if isinstance(x, Tensor)}
        named = {**given, **leaves}
        results = op(named.pop("A"), named.pop("B"), **named)  # type: ignore[arg-type]
        assert isinstance(results, dict)
        return list(torch.autograd.grad(results["D"], list(leaves.values()), cotangent))

    given = {"A": A, "B": B, **operands}
    with _allocations(is_filled):
        pairs = zip(gradients(given, cotangent), gradients(_on(given, "cpu"), cotangent.cpu()), strict=True)
        return ", ".join(f"gradient {i}" for i, (got, want) in enumerate(pairs) if not torch.equal(got.cpu(), want))


WITH_TORCHS_PRODUCTS = ("split", "fused backward", "fallback backward", "cpu backward")
WITHOUT_TMA = ("cpu", "fallback", "pointwise")  # paths whose kernels, and torch's, store as threads do


def checks(is_filled: bool = False) -> dict[str, Callable[[], str]]:
    """By name: runs a call, and says what of its results is wrong, or nothing.

    Args:
        is_filled: what TMA writes is NaN before, and nothing else.
    """
    found: dict[str, Callable[[], str]] = {}
    for name, path in paths().items():
        fills = is_filled and name not in WITHOUT_TMA
        found[name] = functools.partial(_forward, path, fills)
        if name in ("cpu", "fused", "fallback"):
            found[f"{name} backward"] = functools.partial(_backward, path, fills)
    eight_bits = {str(dtype): functools.partial(_eight_bits, dtype, is_filled) for dtype in EIGHT_BIT}
    return found | eight_bits


def torch_multiplies_on_the_cpu() -> torch.library.Library:
    """Products of torch without a kernel of cuBLAS, as long as what is returned lives."""
    library = torch.library.Library("aten", "IMPL")

    def product(A: Tensor, B: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor) -> Tensor:
        return out.copy_((A.cpu().double() @ B.cpu().double()).to(out.dtype))

    for name in ("mm.out", "mm.dtype_out", "bmm.out", "bmm.dtype_out"):
        library.impl(name, product, "CUDA")
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    products = parser.add_mutually_exclusive_group()
    products.add_argument("--without-products", action="store_true", help="leave out calls that torch multiplies in")
    products.add_argument("--products", action="store_true", help="these calls alone")
    parser.add_argument("--filled", action="store_true", help="what TMA writes is NaN before")
    parser.add_argument("--cpu-products", action="store_true", help="torch multiplies without cuBLAS")
    options = parser.parse_args()
    if options.cpu_products:
        os.environ["GEMMGEN_DISPATCHER"] = "0"  # it calls products that return their result
        library = torch_multiplies_on_the_cpu()  # noqa: F841  is kept alive
    count = 0
    for name, check in checks(options.filled).items():
        has_product = name in WITH_TORCHS_PRODUCTS
        if (options.products and not has_product) or (options.without_products and has_product):
            continue
        fault = check()
        print(f"{name}: {fault + ' differ' if fault else 'right'}", flush=True)
        count += bool(fault)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
