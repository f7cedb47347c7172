"""Random epilogues x shapes x strides x dtypes x values, forward and backward, against the float64 reference.

    python -m tests.fuzz --minutes 5 [--seed 0] [--device cuda] [--jobs 16]

A failure is printed as a program of at most 15 lines that shows it, and the run goes on; the exit status says whether
there was one. On a GPU examples run split (a kernel takes NVRTC 0.1 s), on the sm80 fallback, with their backward, and
on sm90 (a link takes 1 to 3 s). A new combination of dtypes, layouts and operands costs a compilation there, of 5 s and
of 40 s: `--skeletons` bounds how many of them are drawn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import gemmgen as gg
from tests.oracle import errors, listed

# continuous and bounded, so that float64 can be compared: `{0}` is a value
UNARY = ("gg.tanh({0})", "gg.sigmoid({0})", "gg.silu({0})", "gg.gelu({0})", "gg.gelu_tanh({0})", "gg.quick_gelu({0})",
         "gg.mish({0})", "gg.softplus({0})", "gg.erf({0})", "gg.sin({0})", "gg.cos({0})", "gg.relu({0})",
         "gg.leaky_relu({0}, 0.2)", "gg.hardswish({0})", "gg.relu_squared(gg.clamp({0}, -3, 3))", "gg.abs({0})",
         "gg.exp(gg.minimum({0}, 2))", "gg.exp2(gg.clamp({0}, -4, 3))", "gg.log(gg.abs({0}) + 0.5)",
         "gg.log1p(gg.abs({0}))", "gg.sqrt(gg.abs({0}) + 0.1)", "gg.rsqrt(gg.abs({0}) + 0.5)", "-{0}",
         "gg.clamp({0}, -1.5, 2)", "gg.clamp({0}, 0.25)", "gg.tanh({0}) ** 3")  # fmt: skip
BINARY = ("{0} + {1}", "{0} - {1}", "gg.tanh({0}) * {1}", "{0} / (gg.abs({1}) + 1)", "gg.minimum({0}, {1})",
          "gg.maximum({0}, {1})", "gg.where({0} > {1}, {0}, {1})",
          "gg.where(gg.col_index() <= gg.row_index() + 2, {0}, {1})")  # fmt: skip
KINKS = ("clamp", "relu", "abs", "minimum", "maximum", "where", "hardswish")
OPERANDS = {"row": "gg.Row", "col": "gg.Col", "tile": "gg.Tile", "scalar": "gg.Scalar"}
EXTENTS = (1, 2, 7, 8, 16, 31, 45, 64, 72, 96, 130, 136)
ODD, ALIGNED = (7, 31, 45, 77, 131), (8, 16, 64, 72, 96, 136, 264)  # one alignment each, and so one skeleton
REDUCED = ("gg.sum({0}, over='M')", "gg.sum({0}, over='N')", "gg.sum({0}, over='MN')", "gg.amax({0}, over='N')",
           "gg.max({0}, over='M')", "gg.min({0}, over='N')")  # fmt: skip
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38, -3e38)


@dataclass(frozen=True)
class Path:
    """A way to run examples.

    Attributes:
        imports, call, config: text of the program: what `call` needs, the call, and `Gemm`'s config.
        extents: those to draw from.
        skeletons: as many combinations of what decides a skeleton at most.
        is_loose: whether strides and alignments may vary from example to example.
    """

    imports: str = "import torch, gemmgen as gg"
    call: str = "op(A, B, **operands)"
    config: str = ""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    extents: tuple[int, ...] = EXTENTS
    skeletons: int = 1 << 30
    is_loose: bool = True
    has_backward: bool = True


SM90 = 'gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative")'
SM80 = 'gg.GemmConfig("sm80", (64, 64, 32), kernel_schedule="multistage", stages=2, warp_shape=(32, 32, 32))'
SIXTEEN_BITS = ("bfloat16", "float16")
ON_CPU = {Path(dtypes=("bfloat16", "float16", "float32", "float64")): 1.0}
WITH_SPLIT = "import torch, gemmgen as gg; from tests.gpu.test_ways import split"
SPLIT = Path(WITH_SPLIT, "split(op, A, B, operands)", has_backward=False)
ON_CUDA = {  # and how often
    SPLIT: 0.5,
    Path(config=SM80, dtypes=SIXTEEN_BITS, extents=ODD, is_loose=False): 0.35,
    Path(config=SM90, dtypes=SIXTEEN_BITS, extents=ALIGNED, skeletons=4, is_loose=False, has_backward=False): 0.15,
}


@dataclass(frozen=True)
class Example:
    """Text that makes `op`, `A`, `B` and `operands`."""

    epilogue: str
    inputs: str
    is_special: bool
    is_differentiable: bool
    path: Path = field(default_factory=Path)

    @property
    def program(self) -> str:
        config = f", config={self.path.config}" if self.path.config else ""
        call = f"print({self.path.call}, op.reference(A, B, **operands), sep='\\n')"
        return f"{self.path.imports}\n{self.epilogue}\nop = gg.Gemm(f{config})\n{self.inputs}\n{call}"


def example(choose: random.Random, device: str, skeletons: int) -> Example:
    paths = ON_CPU if device == "cpu" else ON_CUDA
    (path,) = choose.choices(list(paths), list(paths.values()))
    kinds = random.Random(choose.randrange(min(skeletons, path.skeletons)))  # what decides the skeleton
    names = sorted(kinds.sample(sorted(OPERANDS), kinds.randint(1, 3)))
    dtype = kinds.choice(path.dtypes)
    layout = kinds.choice(["nn", "nt", "tn", "tt"])
    reduced = kinds.choice([None, *REDUCED])
    M, N, K = (choose.choice(path.extents) for _ in range(3))
    is_special = choose.random() < 0.2
    inputs = _inputs(choose, choose if path.is_loose else kinds, names, (M, N, K), dtype, layout, device, is_special)
    epilogue = _epilogue(choose, names, reduced)
    # a saved value that is rounded to 16 bits may fall on the other side of a kink than float64's, as in eager torch
    is_smooth = dtype in ("float32", "float64") or not any(word in epilogue for word in KINKS)
    return Example(epilogue, inputs, is_special, is_smooth and not is_special and path.has_backward, path)


def _epilogue(choose: random.Random, names: list[str], reduced: str | None) -> str:
    values, lines = ["accum", *names], []
    for i in range(choose.randint(1, 4)):
        form = choose.choice(choose.choice((UNARY, BINARY)))
        lines.append(f"    v{i} = " + form.format(choose.choice(values[-3:]), choose.choice(values)))
        values.append(f"v{i}")
    total = " + ".join([values[-1], *(f"0.5 * {name}" for name in names), "0.1 * accum"])
    returned = "d" if reduced is None else f"{{'D': d, 'reduced': {reduced.format('d')}}}"
    head = ", ".join(["accum", *(f"{name}: {OPERANDS[name]}" for name in names)])
    return "\n".join(["@gg.epilogue", f"def f({head}):", *lines, f"    d = {total}", f"    return {returned}"])


def _inputs(
    choose: random.Random, strides: random.Random, names: list[str], extents: tuple[int, int, int], dtype: str,
    layout: str, device: str, is_special: bool,
) -> str:  # fmt: skip
    M, N, K = extents
    shapes = {"row": (N,), "col": (M,), "tile": (M, N), "scalar": ()}

    def drawn(*shape: int) -> str:
        return f"(torch.rand({shape}, generator=g, device='{device}') * 2 - 1).to(torch.{dtype})"

    def matrix(rows: int, columns: int, order: str) -> str:
        if order == "t":
            return f"{drawn(columns, rows)}.t()"
        if strides is choose and choose.random() < 0.3:  # padded rows, and a start that is not aligned
            return f"{drawn(rows, columns + 3)}[:, 1:{columns + 1}]"
        return drawn(rows, columns)

    def operand(name: str) -> str:
        if is_special and name == "tile":
            values = ", ".join(f"float('{choose.choice(SPECIAL)}')" for _ in range(8))
            repeated = f"torch.tensor([{values}], device='{device}').repeat({M * N})[:{M * N}]"
            return f"{repeated}.view({M}, {N}).to(torch.{dtype})"
        if name == "tile" and strides.random() < 0.3:
            return strides.choice([f"{drawn(N)}.expand({M}, {N})", f"{drawn(N, M)}.t()"])
        return drawn(*shapes[name])

    lines = [f"g = torch.Generator('{device}').manual_seed({choose.randrange(1 << 30)})",
             f"A, B = {matrix(M, K, layout[0])}, {matrix(K, N, layout[1])}"]  # fmt: skip
    pairs = ", ".join(f"'{name}': {operand(name)}" for name in names)
    return "\n".join([*lines, f"operands = {{{pairs}}}"])


def fault(example: Example) -> str | None:
    """What is wrong with the example's results or gradients, or None."""
    scope: dict[str, object] = {}
    exec(compile(example.program.rpartition("\n")[0], "<fuzz>", "exec"), scope)
    op, A, B, operands = (scope[name] for name in ("op", "A", "B", "operands"))
    try:
        got = listed(eval(example.path.call, scope))
        return _forward_fault(op, got, A, B, operands, example.is_special) or (
            _backward_fault(op, A, B, operands) if example.is_differentiable else None
        )
    except Exception as error:
        if isinstance(error, gg.CompileError) and "spills" in str(error) and example.path.config:
            return None  # as promised: this config is refused, and a Gemm without one takes the next
        return f"{type(error).__name__}: {error}"


def _forward_fault(
    op: gg.Gemm, got: list[Tensor], A: Tensor, B: Tensor, operands: dict[str, Tensor], is_special: bool
) -> str | None:
    if is_special:  # what fp32 overflows to, float64 does not: the CPU implementation is the measure
        want = listed(op(A.cpu(), B.cpu(), **{name: value.cpu() for name, value in operands.items()}))
        differs = [not torch.equal(g.cpu().isnan(), w.isnan()) for g, w in zip(got, want, strict=True)]
        return "NaN differ from the CPU implementation" if any(differs) else None
    return _compared(got, listed(op.reference(A, B, **operands)), _limit(A.dtype), "result")


def _backward_fault(op: gg.Gemm, A: Tensor, B: Tensor, operands: dict[str, Tensor]) -> str | None:
    leaves = [t.detach().clone().requires_grad_() for t in (A, B, *operands.values())]
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def gradients(call: Callable[..., object], given: list[Tensor]) -> list[Tensor]:
        results = listed(call(given[0], given[1], **dict(zip(operands, given[2:], strict=True))))
        return list(torch.autograd.grad(results[0].double().sum(), given))

    return _compared(gradients(op, leaves), gradients(op.reference, wide), 8 * _limit(A.dtype), "gradient")


def _limit(dtype: torch.dtype) -> float:
    """A loose bound on the relative error in the Frobenius norm: wrong formulas are far beyond it."""
    return {torch.float64: 1e-9, torch.float32: 2e-3}.get(dtype, 2e-2)  # fp32 may run as tf32


def _compared(got: list[Tensor], want: list[Tensor], limit: float, what: str) -> str | None:
    for i, (mine, reference) in enumerate(zip(got, want, strict=True)):
        error, _ = errors(mine, reference)
        if error > limit and (mine.double() - reference.double()).norm() > limit:
            return f"{what} {i} is off by {error:.1e}, more than {limit:.0e}"
    return None


def search(seed: str, device: str, skeletons: int, seconds: float) -> tuple[int, int]:
    """Draw examples for so long; how many there were, and how many have a fault. Prints those."""
    choose, deadline, count, faults = random.Random(seed), time.monotonic() + seconds, 0, 0
    while time.monotonic() < deadline:
        drawn = example(choose, device, skeletons)
        count += 1
        if reason := fault(drawn):
            faults += 1
            print(f"# {reason}\n{drawn.program}\n", flush=True)
    return count, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--skeletons", type=int, default=24, help="combinations of dtypes, layouts and operands")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that draw examples")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.jobs, torch.set_num_threads, (1,)) as pool:
        shared = options.device, options.skeletons, 60 * options.minutes
        found = pool.starmap(search, [(f"{options.seed} {job}", *shared) for job in range(options.jobs)], chunksize=1)
    count, faults = (sum(column) for column in zip(*found, strict=True))
    print(f"{count} examples on {options.device} in {options.jobs} processes, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
