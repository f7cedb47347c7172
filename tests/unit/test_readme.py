"""README.md: its example runs as printed, its generated sections are up to date, its names exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import readme, report, sections
from gemmgen import settings
from gemmgen.__main__ import cache, main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_runs_as_printed(tmp_path):
    (example,) = blocks("python")
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 12
    path = tmp_path / "example.py"
    path.write_text(example)
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([384, 1024])\ntorch.Size([384])\nepilogue scaled_bias_gelu(")


def test_generated_sections_are_up_to_date():
    assert readme.filled(TEXT) == TEXT, "run `make readme`"


def test_a_lost_section_is_an_error():
    with pytest.raises(ValueError, match="operations"):
        readme.filled(TEXT.replace("<!-- operations -->", ""))


@pytest.mark.parametrize("variable", [variable.name for variable in settings.ENVIRONMENT])
def test_every_environment_variable_is_listed(variable):
    assert f"| `{variable}` |" in TEXT


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_is_listed(command):
    assert f"gemmgen {command}" in TEXT


def test_the_cache_commands_are_listed():
    assert "gemmgen cache " + " | ".join(sorted(cache.commands, key=["ls", "clear", "verify"].index)) in TEXT


@pytest.mark.parametrize("target", re.findall(r"make (\w+)", TEXT))
def test_make_targets_exist(target):
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_without_results_nothing_is_claimed(tmp_path):
    assert readme.results(tmp_path) == "No results yet."


def test_result_files_are_shown(tmp_path, monkeypatch):
    for name, rung in (("epilogue-1", "bare"), ("epilogue-2", "quack"), ("llama-a", "bare"), ("llama-b", "eager"),
                       ("llama-c", "quack")):  # fmt: skip
        row = {"suite": name[:-2], "case": name, "M": 1, "N": 1, "K": 1, "rung": rung}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr(report, "conditions", lambda rows: "a GPU")
    tables = {suite: lambda rows, suite=suite: f"{suite} table of {len(rows)}" for suite in ("epilogue", "llama")}
    monkeypatch.setattr(sections, "SHORT", tables)
    unit = "Median GPU time in microseconds, L2 cold"
    assert readme.results(tmp_path).split("\n\n") == [
        f"`epilogue-1.jsonl`: {unit}. a GPU.",
        "epilogue table of 1",
        f"`epilogue-2.jsonl`: {unit}. a GPU.",
        "epilogue table of 1",
        "`llama-a.jsonl`, `llama-b.jsonl`: Median GPU times, L2 cold. a GPU.",
        "llama table of 2",
        "`llama-c.jsonl`: Median GPU times, L2 cold. a GPU.",
        "llama table of 1",
    ]
