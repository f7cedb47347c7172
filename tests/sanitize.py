"""compute-sanitizer over `tests.smoke`: memcheck, racecheck, initcheck. `make sanitize` runs it.

    python -m tests.sanitize [--out bench/results/sanitize-DEVICE.txt]

The exit status is 0 if every tool finds nothing, and where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from bench.environment import REPOSITORY, describe

OURS = ["--kernel-regex", "kns=gemmgen"]  # the names of our kernels begin so; torch's are not ours to check
TOOLS = {
    "memcheck": [*OURS, "--leak-check", "no"],
    "racecheck": [*OURS, "--racecheck-report", "all"],
    "initcheck": [],  # has to see what torch's kernels write
}
# initcheck does not see what TMA writes, and would report whoever reads it: such results are NaN before, which the
# comparisons of the smoke set would find. All else that a kernel reads, partial sums and workspaces too, is checked.
# racecheck ends at cuBLAS's kernels with an internal error, filtered or not.
ARGUMENTS = {"initcheck": ["--filled"], "racecheck": ["--cpu-products"]}
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY|Target application|not supported", re.IGNORECASE)
CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")
PROGRAM = (sys.executable, "-m", "tests.smoke")
# apart: one has its result where the other, which loads cuBLAS, is cut off
PARTS = ("--without-products", "--products")
PYTHONPATH = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # each tensor its own allocation: memcheck sees an access beyond it
    "CUDA_LAUNCH_BLOCKING": "1",  # a fault surfaces at the launch that made it
    "PYTHONPATH": PYTHONPATH,
}


def sanitizer() -> Path | None:
    """compute-sanitizer on PATH or in a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME", ""), *map(str, sorted(Path("/usr/local").glob("cuda*"), reverse=True))]
    folders = [f"{home}/{part}" for home in homes for part in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    return Path(found) if found else None


def run(command: Sequence[str], label: str = "") -> tuple[int, str, float]:
    """Exit status, output, seconds. With a `label` each line is printed when it comes: a tool takes minutes."""
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if label:
                sys.stdout.write(f"{time.perf_counter() - started:5.0f} s {label}: {line.rstrip()}\n")  # whole lines
                sys.stdout.flush()
    return process.returncode, "".join(lines), time.perf_counter() - started


def report(tool: Path, names: Sequence[str], out: Path) -> bool:
    """Write the log, each result when it is there, and whether everything is clean."""
    version = run([str(tool), "--version"])[1].strip().splitlines()
    facts = describe()
    head = f"{facts['device']}, driver {facts['driver']}, torch {facts['torch']}, gemmgen {facts['commit']}"
    out.write_text("\n".join([head, *(line for line in version if "ersion" in line)]) + "\n")
    is_clean = True
    with ThreadPoolExecutor(len(names) * len(PARTS)) as pool:  # each runs for minutes, and mostly on the CPU
        runs = [pool.submit(_result, tool, name, part) for name in names for part in PARTS]
        for done in as_completed(runs):
            text, clean = done.result()
            is_clean &= clean
            print(text, flush=True)
            with out.open("a") as log:
                log.write(f"\n{text}\n")
    return is_clean


def _result(tool: Path, name: str, part: str) -> tuple[str, bool]:
    """What one tool says of one part of the smoke set, and whether that is clean."""
    arguments = ["--tool", name, *TOOLS[name]]
    program = [*PROGRAM, part, *ARGUMENTS.get(name, [])]
    status, output, seconds = run([str(tool), *arguments, *program], label=f"{name} {part}")
    found = [line.strip() for line in output.splitlines() if SUMMARY.search(line)]
    clean = status == 0 and any(CLEAN.search(line) for line in found)
    printed = " ".join([tool.name, *arguments, "python", *program[1:]])
    lines = [f"$ {printed}", *found, f"{'clean' if clean else 'NOT CLEAN'}, exit status {status}, {seconds:.0f} s"]
    return "\n".join(lines if clean else [*lines, "", *output.splitlines()[:200]]), clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing to sanitize")
        return 0
    tool = sanitizer()
    if tool is None:
        print("compute-sanitizer is neither on PATH nor in a toolkit\n  Install it with CUDA, or set CUDA_HOME.")
        return 1
    status, output, _ = run(PROGRAM)  # builds what is missing, and must be right before anything is measured
    if status != 0:
        print(output)
        return 1
    device = re.sub(r"\W+", "-", torch.cuda.get_device_name().lower())
    out = options.out or REPOSITORY / f"bench/results/sanitize-{device}.txt"
    is_clean = report(tool, options.tools, out)
    print(f"written to {out}")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
