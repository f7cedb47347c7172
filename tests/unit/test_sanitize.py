"""`make sanitize`: the smoke set passes, and what the tools say becomes the log and the exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests import sanitize, smoke

FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3"; exit 0; fi
echo "========= COMPUTE-SANITIZER"
case "$2" in
  racecheck) echo "========= RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)" ;;
  *) echo "========= ERROR SUMMARY: {errors} errors" ;;
esac
"""


def test_the_smoke_set_is_right():
    assert {name: fault for name, check in smoke.checks().items() if (fault := check())} == {}
    assert set(smoke.WITH_TORCHS_PRODUCTS) >= {name for name in smoke.checks() if name.endswith("backward")}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    assert sanitize.main() == 0
    assert "no GPU here" in capsys.readouterr().out


@pytest.mark.parametrize("errors, hazards, status", [(0, 0, 0), (3, 0, 1), (0, 2, 1)])
def test_the_log_and_the_exit_status_are_what_the_tools_say(monkeypatch, tmp_path, errors, hazards, status):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE.format(errors=errors, hazards=hazards))
    fake.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sanitize, "describe", lambda: dict.fromkeys(("device", "driver", "torch", "commit"), "x"))
    monkeypatch.setattr(sanitize, "sanitizer", lambda: fake)
    monkeypatch.setattr(sanitize, "PROGRAM", (sys.executable, "-c", "pass"))
    monkeypatch.setattr(sys, "argv", ["sanitize", "--out", str(tmp_path / "log.txt")])
    assert sanitize.main() == status
    log = (tmp_path / "log.txt").read_text()
    assert "Version 2025.3" in log and f"ERROR SUMMARY: {errors} errors" in log
    assert log.count("$ compute-sanitizer --tool") == 6 and log.count("--without-products") == 3
    assert ("NOT CLEAN" in log) == bool(status)


def test_a_missing_tool_names_the_mend(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    assert sanitize.main() == 1
    assert "CUDA_HOME" in capsys.readouterr().out


def test_the_tool_is_found_in_a_toolkit(monkeypatch, tmp_path):
    tool = tmp_path / "bin/compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(Path("/nonexistent")))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.sanitizer() == tool
