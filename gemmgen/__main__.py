"""The command line: `gemmgen build | explain | tune | bench | doctor | dispatcher | cache ls, clear, verify`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmgen.errors import GemmgenError

if TYPE_CHECKING:
    from gemmgen.cli_problem import Problem
    from gemmgen.gemm import Gemm
    from gemmgen.jit.build import BuiltKernel
    from gemmgen.jit.cache import Cache


class Commands(click.Group):
    """A group whose commands print gemmgen's own errors as messages, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except GemmgenError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fused GEMM epilogues from Python functions."""


@main.command()
def doctor() -> None:
    """Check GPU, driver, torch, compilers and cache; exit 1 if something must be mended."""
    from rich.console import Console
    from rich.table import Column, Table

    from gemmgen.doctor import diagnose

    findings = diagnose()
    table = Table("topic", "", Column("found", overflow="fold"))
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    topics: dict[str, list[str]] = {}  # of each mend; one fault may show under several topics
    for finding in findings:
        table.add_row(finding.topic, f"[{styles[finding.status]}]{finding.status}[/]", _plain(finding.text))
        if finding.mend:
            topics.setdefault(finding.mend, []).append(finding.topic)
    Console().print(table)
    for mend, seen in topics.items():  # below the table, where no cell breaks a command that is to be copied
        click.echo(f"{', '.join(seen)}: {mend}")
    if any(finding.status == "fail" for finding in findings):
        sys.exit(1)


@main.command("dispatcher")
def build_dispatcher() -> None:
    """Build the C++ dispatcher for this torch, for processes to come."""
    from gemmgen import dispatcher

    click.echo(f"built: {dispatcher.build().path}")


@main.group()
def cache() -> None:
    """The folder of compiled kernels."""


@cache.command("ls")
def cache_ls() -> None:
    """List the entries, the most recently used first."""
    from rich.console import Console
    from rich.table import Column, Table

    from gemmgen.jit.cache import INPUTS

    store = _cache()
    entries = sorted((e for e in store.entries() if e.kind != INPUTS), key=lambda entry: entry.used, reverse=True)
    table = Table("kind", Column("name", overflow="fold"), "arch", "MB", "used", "nvcc", "key")
    for entry in entries:
        facts = entry.facts
        table.add_row(
            entry.kind,
            _plain(str(facts.get("name", "?"))),
            str(facts.get("arch", "")),
            f"{entry.size_bytes / 1e6:.2f}",
            _ago(time.time() - entry.used),
            facts.get("tools", {}).get("nvcc", ""),
            entry.path.parent.name[:12],
        )
    console = Console()
    console.print(table)
    total = sum(entry.size_bytes for entry in entries)
    console.print(f"{len(entries)} entries, {total / 1e6:.1f} MB in {store.root}", highlight=False, soft_wrap=True)


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cache_clear(yes: bool) -> None:
    """Remove every entry."""
    store = _cache()
    if not yes:
        click.confirm(f"Remove every compiled kernel in {store.root}?", abort=True)
    count, size_bytes = store.clear()
    click.echo(f"removed {count} entries, {size_bytes / 1e6:.1f} MB")


@cache.command("verify")
def cache_verify() -> None:
    """Check the digest of every file; exit 1 if an entry is damaged. Such entries are rebuilt when needed."""
    store = _cache()
    faults = store.verify()
    for path, fault in faults:
        click.echo(f"{path}: {fault}")
    click.echo(f"{len(store.entries()) - len(faults)} entries are good, {len(faults)} are not, in {store.root}")
    if faults:
        sys.exit(1)


_PROBLEM_OPTIONS = (
    click.argument("target", metavar="FILE.py:NAME"),
    click.option("--arch", help="Such as sm90a; by default the GPU's."),
    click.option("--shape", "--shapes", "shapes", multiple=True, metavar="M,N,K[,L]",
                 help="May be given several times."),
    click.option("--dtype", default="bf16", show_default=True, help="Of A and B: f32, f16, bf16, e4m3, e5m2, i8."),
    click.option("--layout", type=click.Choice(["nn", "nt", "tn", "tt"]), default="nt", show_default=True,
                 help="n: rows contiguous, t: columns contiguous. A first; nt is x @ weight.t()."),
    click.option("--operand", "operands", multiple=True, metavar="NAME=DTYPE", help="Else A's dtype, f32 at 8 bits."),
    click.option("--out-dtype", help="Of results that the function does not cast itself."),
)  # fmt: skip


def _takes_a_problem(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_PROBLEM_OPTIONS):
        command = option(command)
    return command


@main.command()
@_takes_a_problem
def build(target: str, arch: str | None, shapes: tuple[str, ...], **options: Any) -> None:
    """Compile kernels into the cache, ahead of time; needs no GPU.

    FILE.py is run to find NAME in it. `library:NAME` is a ready-made epilogue.

    Without --shape: the kernel of 4096,4096,4096.
    """
    from gemmgen.jit.cache import is_private

    for op, problem in _problems(target, shapes or ("4096,4096,4096",), options):
        started = time.perf_counter()
        built = op.build(problem.A, problem.B, arch=arch, out_dtype=problem.out_dtype, **problem.operands)
        if is_private(built.cubin):
            raise click.ClickException(
                f"the cache folder {_cache().root} cannot be written, and the kernel is lost with this process\n"
                "  Make it writable, or set GEMMGEN_CACHE_DIR to a folder that is."
            )
        click.echo(_built_text(built, time.perf_counter() - started))


@main.command()
@_takes_a_problem
@click.option("--backward", is_flag=True, help="The plan of the backward instead.")
def explain(target: str, arch: str | None, shapes: tuple[str, ...], backward: bool, **options: Any) -> None:
    """Say what an epilogue is and, for each --shape, which kernel runs and why."""
    from gemmgen.cli_problem import gemm_named

    if not shapes:
        click.echo(gemm_named(target).explain(backward=backward))
        return
    for op, problem in _problems(target, shapes, options):
        matrices, out_dtype = (problem.A, problem.B), problem.out_dtype
        click.echo(op.explain(*matrices, arch=arch, out_dtype=out_dtype, backward=backward, **problem.operands))


@main.command()
@_takes_a_problem
@click.option("--rounds", default=25, show_default=True, help="Samples of each kernel that is left at the end.")
def tune(target: str, arch: str | None, shapes: tuple[str, ...], rounds: int, **options: Any) -> None:
    """Measure the kernels that an epilogue can run as, for each --shape, and keep the times. Needs a GPU.

    A shape serves its whole bucket of M: up to the next power of two, or one and a half of one.
    """
    from gemmgen.cli_problem import on_gpu

    if arch is not None:
        raise click.UsageError("tune measures on the GPU that is here: leave --arch away")
    for op, problem in _problems(target, shapes or ("4096,4096,4096",), options):
        drawn = on_gpu(problem)
        started = time.perf_counter()
        entry = op.tune(drawn.A, drawn.B, rounds=rounds, out_dtype=drawn.out_dtype, **drawn.operands)
        click.echo(f"{tuple(drawn.A.shape)} x {tuple(drawn.B.shape)}, {time.perf_counter() - started:.1f} s: {entry}")


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """The same as `python -m bench`: gemmgen beside every other way to compute the same. In an editable install."""
    checkout = Path(__file__).resolve().parents[1]
    spec = importlib.util.find_spec("bench")
    if spec is None or Path(spec.origin or "").parent.parent != checkout:
        raise click.ClickException(
            "gemmgen is installed without its benchmarks\n  In a checkout, run `python -m bench` or `make bench`."
        )
    importlib.import_module("bench.__main__").main(list(arguments), prog_name="gemmgen bench")


def _problems(target: str, shapes: tuple[str, ...], options: dict[str, Any]) -> Iterator[tuple[Gemm, Problem]]:
    from gemmgen.cli_problem import gemm_named, parsed_operands, parsed_shape, problem

    op, operand_dtypes = gemm_named(target), parsed_operands(options.pop("operands"))
    for extents in [parsed_shape(shape) for shape in shapes]:
        yield op, problem(op, extents, operand_dtypes=operand_dtypes, **options)


def _built_text(built: BuiltKernel, seconds: float) -> str:
    size_kb = built.cubin.stat().st_size / 1e3
    return (
        f"{built.name} for {built.arch}: {size_kb:.0f} KB, {built.registers} registers, "
        f"{built.stack_bytes} B of stack, ready after {seconds:.1f} s\n  {built.cubin}"
    )


def _cache() -> Cache:
    from gemmgen.jit.cache import cache_of
    from gemmgen.settings import settings

    return cache_of(settings())


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "now"


if __name__ == "__main__":
    main(prog_name="gemmgen")
