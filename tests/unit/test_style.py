"""The code's own rules: ruff, mypy, the direction of imports, and the size of functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FUNCTION_LINES = 60


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff():
    run(sys.executable, "-m", "ruff", "check", "gemmgen", "bench", "tests")


def test_mypy():
    run(sys.executable, "-m", "mypy")


def test_imports_go_one_way():
    run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])")


@pytest.mark.parametrize("path", sorted((ROOT / "gemmgen").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_stay_small(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {lines} lines"
