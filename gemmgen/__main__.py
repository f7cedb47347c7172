"""The command line: `gemmgen doctor`, `gemmgen cache ls | clear | verify`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from gemmgen.errors import GemmgenError

if TYPE_CHECKING:
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
    from rich.table import Table

    from gemmgen.doctor import diagnose

    findings = diagnose()
    table = Table("topic", "", "found", "what to do")
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in findings:
        table.add_row(
            finding.topic,
            f"[{styles[finding.status]}]{finding.status}[/]",
            _plain(finding.text),
            _plain(finding.mend),
        )
    Console().print(table)
    if any(finding.status == "fail" for finding in findings):
        sys.exit(1)


@main.group()
def cache() -> None:
    """The folder of compiled kernels."""


@cache.command("ls")
def cache_ls() -> None:
    """List the entries, the most recently used first."""
    from rich.console import Console
    from rich.table import Table

    store = _cache()
    entries = sorted(store.entries(), key=lambda entry: entry.used, reverse=True)
    table = Table("kind", "name", "arch", "MB", "used", "nvcc", "key")
    for entry in entries:
        facts = entry.facts
        table.add_row(
            entry.kind.removesuffix("s"),
            _plain(str(facts.get("name", "?"))),
            str(facts.get("arch", "?")),
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


# `build`, `explain` and `bench` go here


def _cache() -> Cache:
    from gemmgen.jit.cache import Cache, cache_root
    from gemmgen.settings import settings

    current = settings()
    return Cache(cache_root(current), current.cache_max_bytes)


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
