"""What the command line says of an epilogue and a problem, as a `Gemm` and the metadata of a call."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gemmgen import library
from gemmgen.dsl import Epilogue
from gemmgen.dtypes import TORCH_NAMES, DType, dtype_of
from gemmgen.errors import GemmgenError
from gemmgen.evaluate import TORCH_DTYPES
from gemmgen.gemm import Gemm
from gemmgen.ir.graph import Parameter
from gemmgen.ir.node import Axes
from gemmgen.problem import EIGHT_BIT, Extents
from gemmgen.trace import parameters_of

LAYOUTS = ("nn", "nt", "tn", "tt")
_DTYPES = {name: dtype for dtype in DType for name in (dtype.text, dtype.name.lower())} | {
    name.removeprefix("torch."): dtype for name, dtype in TORCH_NAMES.items()
}


@dataclass(frozen=True)
class Problem:
    """The arguments of one call, without data: `op.build(A, B, out_dtype=out_dtype, **operands)`."""

    A: Tensor
    B: Tensor
    operands: Mapping[str, Any]
    out_dtype: torch.dtype | None


def gemm_named(target: str) -> Gemm:
    """The op of `FILE.py:name` (an epilogue or a `Gemm`), or of `library:name`.

    Raises:
        GemmgenError: there is no such file or name, the file fails, or the name is something else.
    """
    where, _, name = target.rpartition(":")
    if not where:
        raise GemmgenError(f"{target!r} names no epilogue\n  Write FILE.py:name or library:name.")
    module = library if where == "library" else _module(Path(where))
    value = getattr(module, name, None)
    if isinstance(value, Gemm):
        return value
    if isinstance(value, Epilogue):
        return Gemm(value)
    known = sorted(key for key, found in vars(module).items() if isinstance(found, (Epilogue, Gemm)))
    found = "has nothing" if value is None else f"has a {type(value).__name__}"
    raise GemmgenError(
        f"{where} {found} under the name {name!r}\n"
        f"  Its epilogues are: {', '.join(known) or 'none; declare one with @gg.epilogue'}."
    )


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise GemmgenError(f"there is no Python file {path}\n  Write FILE.py:name, or library:name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` would
    try:
        spec.loader.exec_module(module)
    except GemmgenError:
        raise
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}"
        raise GemmgenError(f"{path} cannot be imported: {reason}\n  at {line.filename}:{line.lineno}") from error
    return module


def parsed_shape(text: str) -> Extents:
    """`M,N,K` or `M,N,K,L` as extents; with L the problem is batched.

    Raises:
        GemmgenError: it is neither.
    """
    parts = text.split(",")
    if len(parts) not in (3, 4) or not all(part.strip().isdecimal() for part in parts):
        raise GemmgenError(f"{text!r} is no shape\n  Write M,N,K or M,N,K,L, such as 4096,4096,4096.")
    M, N, K, *L = map(int, parts)
    if max(M, N, K, *L) >= 2**31:
        raise GemmgenError(f"{text!r} has an extent of 2^31 or more\n  Kernels count in 32 bits.")
    return Extents(M, N, K, L[0] if L else 1, batched=bool(L))


def parsed_dtype(text: str) -> torch.dtype:
    """The torch dtype that `text` names, such as `bf16` or `bfloat16`.

    Raises:
        GemmgenError: none; the message lists the names.
    """
    if text not in _DTYPES:
        raise GemmgenError(f"{text!r} is no dtype\n  There are {', '.join(dict.fromkeys(_DTYPES))}.")
    return TORCH_DTYPES[_DTYPES[text]]


def parsed_operands(texts: Iterable[str]) -> dict[str, torch.dtype]:
    """`name=dtype` texts as dtypes by name.

    Raises:
        GemmgenError: one has another form.
    """
    dtypes = {}
    for text in texts:
        name, sign, dtype = text.partition("=")
        if not sign:
            raise GemmgenError(f"{text!r} says nothing of an operand\n  Write name=dtype, such as bias=f32.")
        dtypes[name] = parsed_dtype(dtype)
    return dtypes


def problem(
    op: Gemm,
    extents: Extents,
    *,
    dtype: str = "bf16",
    layout: str = "nt",
    operand_dtypes: Mapping[str, torch.dtype] | None = None,
    out_dtype: str | None = None,
) -> Problem:
    """The metadata of one call of `op`.

    Args:
        dtype: of A and B; two with a comma between where they differ.
        layout: "n" for a matrix whose rows are contiguous, "t" for one whose columns are; A first.
        operand_dtypes: others have A's dtype, fp32 where A has 8 bits; a Scalar that is not here is a number.

    Raises:
        GemmgenError: a dtype or an operand has no meaning.
    """
    a_text, _, b_text = dtype.partition(",")
    a, b = parsed_dtype(a_text), parsed_dtype(b_text or a_text)
    chosen = dict(operand_dtypes or {})
    usual = torch.float32 if dtype_of(a) in EIGHT_BIT else a
    operands = {p.name: _operand(p, extents, chosen.pop(p.name, None), usual) for p in parameters_of(op.epilogue)}
    if chosen:
        declared = ", ".join(operands) or "none"
        raise GemmgenError(f"`{op.epilogue.name}` has no operand {', '.join(chosen)}\n  It declares: {declared}.")
    batch = (extents.L,) if extents.batched else ()
    A = _matrix((*batch, extents.M, extents.K), a, layout[0] == "t")
    B = _matrix((*batch, extents.K, extents.N), b, layout[1] == "t")
    return Problem(A, B, operands, parsed_dtype(out_dtype) if out_dtype else None)


def on_gpu(problem: Problem) -> Problem:
    """The same problem with tensors on the current GPU, of the same strides, uniform in [-1, 1] (int8: its range).

    Raises:
        GemmgenError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise GemmgenError(
            "there is no GPU here to measure on\n  Tune where the kernels will run; without times, a model chooses."
        )
    operands = {name: _drawn(x) if isinstance(x, Tensor) else x for name, x in problem.operands.items()}
    return Problem(_drawn(problem.A), _drawn(problem.B), operands, problem.out_dtype)


def _drawn(like: Tensor, device: str = "cuda") -> Tensor:
    drawn = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if like.dtype.is_floating_point:
        return drawn.copy_(torch.rand(like.shape, device=device).mul_(2).sub_(1))
    return drawn.copy_(torch.randint(-128, 128, like.shape, device=device))


def _matrix(shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> Tensor:
    if is_transposed:
        return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").mT
    return torch.empty(shape, dtype=dtype, device="meta")


def _operand(parameter: Parameter, extents: Extents, dtype: torch.dtype | None, usual: torch.dtype) -> Tensor | float:
    if parameter.axes is Axes.SCALAR and dtype is None:
        return 1.0
    return torch.empty(extents.unbatched(parameter.axes), dtype=dtype or usual, device="meta")
