"""Result files as sections of markdown, one table function a suite: in short for the README, or in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import llama_report, longtail, report, suite_host, suite_jit, suite_training
from bench.results import Row
from bench.rungs import RUNGS

Tables = Mapping[str, Callable[[Sequence[Row]], str]]

_ONE_TABLE: Tables = {
    "jit": suite_jit.markdown_table,
    "training": suite_training.markdown_table,
    "host": suite_host.markdown_table,
    "longtail": longtail.markdown_table,
}
SHORT: Tables = {"epilogue": report.short, "llama": llama_report.short, **_ONE_TABLE}
FULL: Tables = {"epilogue": report.full, "llama": llama_report.full, **_ONE_TABLE}

IN_PARTS = ("llama",)  # suites whose files are parts of one run

UNITS = {
    "jit": "Median seconds",
    "host": "Median host time",
    "llama": "Median GPU times, L2 cold",
    "longtail": "Time of a replay of requests, whose activations stay in memory",
}


def of(files: Mapping[Path, Sequence[Row]], tables: Tables) -> list[str]:
    """A section for each file that has rows; the parts of a run share one, but for those beside other projects."""
    groups: dict[str, dict[Path, Sequence[Row]]] = {}
    for path, rows in files.items():
        if rows:
            suite = rows[0]["suite"]
            is_part = suite in IN_PARTS and not any(RUNGS[row["rung"]].is_peer for row in rows)
            groups.setdefault(suite if is_part else str(path), {})[path] = rows
    return [_section(group, tables) for group in groups.values()]


def _section(files: Mapping[Path, Sequence[Row]], tables: Tables) -> str:
    rows = [row for rows in files.values() for row in rows]
    suite = rows[0]["suite"]
    if suite in IN_PARTS:
        rows = report.newest(rows)
    unit = UNITS.get(suite, "Median GPU time in microseconds, L2 cold")
    copied = sorted({(row["commit"], row["source"]) for row in rows if "source" in row})
    source = "".join(f" Lines at {commit} are those of the {where}, to its digits." for commit, where in copied)
    names = ", ".join(f"`{path.name}`" for path in files)
    return f"{names}: {unit}. {report.conditions(rows)}.{source}\n\n{tables[suite](rows)}"
