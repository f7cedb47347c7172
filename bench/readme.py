"""The sections of README.md that tables and result files say: `python -m bench.readme` writes them in place."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench import sections
from bench.environment import REPOSITORY
from bench.results import read
from gemmgen import choose
from gemmgen.arch import ARCHS, Arch
from gemmgen.dtypes import DType
from gemmgen.ir.node import REDUCTIONS, Op
from gemmgen.render import EXPRESSIONS
from gemmgen.settings import ENVIRONMENT
from gemmgen.signature import Input, Kind, Matrix, Output, Reduce, Signature

README = REPOSITORY / "README.md"
RESULTS = REPOSITORY / "bench/results"
ALIGNED = {DType.F32: 4, DType.BF16: 8, DType.F16: 8, DType.E4M3: 16, DType.E5M2: 16, DType.I8: 16}
IN_EVERY_FUNCTOR = (*EXPRESSIONS, Op.CLAMP, Op.CAST, Op.ROW_INDEX, Op.COL_INDEX)

D = Output(Kind.TILE, DType.BF16)


def _signature(
    a: DType = DType.BF16,
    b: DType | None = None,
    math: str = "tensor",
    inputs: Sequence[Input] = (),
    outputs: Sequence[Output] = (D,),
    k_major: tuple[bool, bool] = (True, True),
) -> Signature:
    b = b or a
    return Signature(
        a=Matrix(a, k_major[0], ALIGNED[a]),
        b=Matrix(b, k_major[1], ALIGNED[b]),
        accum=DType.I32 if a is DType.I8 else DType.F32,
        math=math,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tile_alignment=16,
    )


def _inputs(*kinds: Kind) -> tuple[Input, ...]:
    return tuple(Input(kind, DType.BF16) for kind in kinds)


def _reductions(kind: Kind) -> tuple[Output, ...]:
    return (D, *(Output(kind, DType.F32, reduce) for reduce in Reduce))


_MISALIGNED = replace(_signature(), a=Matrix(DType.BF16, True, 1))

# what a kernel is asked for -> a signature that asks for it
FEATURES: dict[str, Signature] = {
    "bf16 x bf16": _signature(DType.BF16),
    "fp16 x fp16": _signature(DType.F16),
    "fp32 x fp32 in tf32": _signature(DType.F32, math="tf32"),
    "fp32 x fp32 exact": _signature(DType.F32, math="simt"),
    "fp8 x fp8 (e4m3, e5m2, mixed)": _signature(DType.E4M3, DType.E5M2),
    "int8 x int8": _signature(DType.I8),
    "A and B with M and N contiguous": _signature(k_major=(False, False)),
    "A or B that TMA cannot take": _MISALIGNED,
    "`Row`, `Col`, `Scalar` operands": _signature(inputs=_inputs(Kind.ROW, Kind.COL, Kind.SCALAR)),
    "`row_index`, `col_index`": _signature(inputs=(Input(Kind.ROW_INDEX, DType.I32), Input(Kind.COL_INDEX, DType.I32))),
    "one `Tile` operand": _signature(inputs=_inputs(Kind.TILE)),
    "several `Tile` operands": _signature(inputs=_inputs(Kind.TILE, Kind.TILE)),
    "several results": _signature(outputs=(D, Output(Kind.TILE, DType.F32))),
    "8-bit results": _signature(outputs=(Output(Kind.TILE, DType.E4M3), Output(Kind.TILE, DType.I8))),
    "`sum`, `max`, `min`, `amax` over M": _signature(outputs=_reductions(Kind.ROW)),
    "`sum`, `max`, `min`, `amax` over N": _signature(outputs=_reductions(Kind.COL)),
}


def family_of(signature: Signature, arch: Arch) -> str | None:
    """The first template family of `arch` with a legal config for `signature`."""
    for family in arch.families:
        legal = (choose.REJECT[family](signature, c, arch) for c in choose.candidates(signature, arch, family))
        if any(reason is None for reason in legal):
            return family
    return None


def operations() -> str:
    """What each arch fuses, and with which templates, asked of the rule tables."""
    lines = [_row(["", *ARCHS]), _row(["---"] * (len(ARCHS) + 1))]
    for feature, signature in FEATURES.items():
        lines.append(_row([feature, *(family_of(signature, arch) or "-" for arch in ARCHS.values())]))
    names = ", ".join(f"`{op.value}`" for op in IN_EVERY_FUNCTOR)
    reductions = ", ".join(f"`{op.value}`" for op in sorted(REDUCTIONS, key=lambda op: op.value))
    return "\n".join(
        [
            f"Elementwise ops of the IR, which every arch fuses alike: {names}.\n",
            f"Reductions over M, N or both: {reductions}.\n",
            "A cell names the templates that fuse it, `-` nothing that does.\n",
            *lines,
        ]
    )


def environment() -> str:
    """The environment variables."""
    lines = [_row(["variable", "default", "meaning"]), _row(["---"] * 3)]
    return "\n".join([*lines, *(_row([f"`{v.name}`", v.default, v.meaning]) for v in ENVIRONMENT)])


def results(folder: Path = RESULTS) -> str:
    """Each result file of `folder` in short; files of the suite `llama` are parts of one run."""
    files = {path: read(path) for path in sorted(folder.glob("*.jsonl"))}
    return "\n\n".join(sections.of(files, sections.SHORT)) or "No results yet."


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


SECTIONS: dict[str, Callable[[], str]] = {"operations": operations, "environment": environment, "results": results}


def filled(text: str) -> str:
    """`text` with every generated section written anew; one stands between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: a section is missing.
    """
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        match = pattern.search(text)
        if match is None:
            raise ValueError(f"no section {name!r}")
        text = f"{text[: match.start()]}{match[1]}{section()}\n{match[2]}{text[match.end() :]}"
    return text


def main() -> int:
    README.write_text(filled(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
