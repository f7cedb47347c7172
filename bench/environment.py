"""What a figure depends on beside the code: device, driver, versions, commit."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import gemmgen

REPOSITORY = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"


def describe(commit: str | None = None) -> dict[str, str]:
    """Name and version of everything that a result line records.

    Args:
        commit: where there is no git to ask; else GEMMGEN_COMMIT.
    """
    known = commit or os.environ.get("GEMMGEN_COMMIT")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _version_of("triton"),
        "cutlass": _version_of("nvidia-cutlass"),
        "gemmgen": gemmgen.__version__,
        "commit": known or _output_of("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"),
    }


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or UNKNOWN
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return UNKNOWN
