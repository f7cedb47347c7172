"""The suite `jit`: how long a user waits for a kernel. Each figure comes from new processes; no GPU is needed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench import report
from bench.environment import REPOSITORY
from bench.results import ResultFile, Row
from bench.settings import Settings
from gemmgen.arch import arch_of_capability

ARCH_WITHOUT_GPU = "sm90"
WARM = ("import", "find", "first_call")
REPEATS = 5
COLD_BUILDS = 3
ON_A_GPU = (*["background_first_call"] * 3, "tune")

MEANINGS = {
    "import": "import gemmgen, torch imported already",
    "cold_skeleton": "first kernel, empty cache: nvcc, NVRTC and the link",
    "new_epilogue": "new epilogue on a known skeleton: NVRTC and the link",
    "find_in_cache": "`op.build` of a kernel built before, in a new process; it starts CUDA where there is a GPU",
    "load": "declare, find the kernel in the cache, load it, answer, in a process that has started CUDA",
    "first_call": "import gemmgen, declare, find the kernel, load it, answer: all of a process that has started CUDA",
    "background_first_call": "first answer of `compile=\"background\"`, with an epilogue that is not in the cache",
    "tune": "tuning a new epilogue over 16 configs whose skeletons are known: links, checks, measurements",
}


def run(settings: Settings, console: Console) -> int:
    """Measure, print and write; 1 when a build failed."""
    arch = _arch()
    try:
        with tempfile.TemporaryDirectory() as cache:
            samples = collect_warm(arch) if settings.quick else collect(arch, Path(cache))
            rows = [_row(metric, taken) for metric, taken in samples.items()]
    except subprocess.CalledProcessError as error:
        console.print(f"failed: {error}\n{error.stderr}", markup=False)
        return 1
    results = ResultFile(settings.out, "jit", {**settings.environment, "arch": arch, "cores": os.cpu_count()})
    results.add(rows)
    console.print(table_of(arch, rows))
    if not torch.cuda.is_available():
        console.print("Needs a GPU: load, first_call, background_first_call, tune.")
    console.print(f"written: {results.path}")
    return 0


def collect(arch: str, cache: Path) -> dict[str, list[float]]:
    """Seconds by metric. `cache` is an empty folder: in it each cold build has its own, and the warm ones the last."""
    samples: dict[str, list[float]] = {}
    folders = [cache / str(index) for index in range(COLD_BUILDS)]
    for folder in folders:
        _collect(["cold"], arch, folder, samples)
    return _collect([*WARM * REPEATS, *ON_A_GPU], arch, folders[-1], samples)


def collect_warm(arch: str) -> dict[str, list[float]]:
    """The seconds of warm processes alone, with the user's own cache, where the kernel is built if it is missing."""
    _in_new_process("find", arch, None)
    return _collect([*WARM * REPEATS, *ON_A_GPU], arch, None, {})


def _collect(
    whats: Sequence[str], arch: str, cache: Path | None, samples: dict[str, list[float]]
) -> dict[str, list[float]]:
    """`samples` with those of `whats` added."""
    for what in whats:
        for metric, taken in _in_new_process(what, arch, cache).items():
            samples.setdefault(metric, []).extend(taken)
    return samples


def _in_new_process(what: str, arch: str, cache: Path | None) -> Mapping[str, list[float]]:
    command = [sys.executable, "-m", "bench.jit_child", what, arch]
    environment = dict(os.environ) if cache is None else {**os.environ, "GEMMGEN_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _arch() -> str:
    if not torch.cuda.is_available():
        return ARCH_WITHOUT_GPU
    return arch_of_capability(torch.cuda.get_device_capability(), torch.cuda.get_device_name()).name


def _row(metric: str, samples: list[float]) -> Row:
    median_s = round(statistics.median(samples), 4)
    return {
        "metric": metric,
        "median_s": median_s,
        "min_s": round(min(samples), 4),
        "max_s": round(max(samples), 4),
        "n": len(samples),
    }


def table_of(arch: str, rows: list[Row]) -> Table:
    table = Table(title=f"building kernels for {arch} on {os.cpu_count()} cores", title_justify="left")
    for column in ("metric", "median s", "min", "max", "n", "what"):
        table.add_column(column, justify="left" if column in ("metric", "what") else "right")
    for row in rows:
        numbers = (f"{row[key]:.3f}" for key in ("median_s", "min_s", "max_s"))
        table.add_row(row["metric"], *numbers, str(row["n"]), MEANINGS[row["metric"]])
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as the README shows them."""
    lines = [[MEANINGS[row["metric"]], f"{row['median_s']:.3f}", f"{row['max_s']:.3f}"] for row in rows]
    return report.table(["", "median s", "largest s"], lines)
