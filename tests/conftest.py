"""Marks that depend on the machine, and settings that every test shares."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gemmgen.errors import ToolchainError
from gemmgen.jit.toolchain import toolchain

settings.register_profile("gemmgen", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gemmgen")


GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it")


def _capability() -> int | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = _capability()
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is None:
            continue
        wanted = mark.kwargs.get("sm", 80)
        if here is None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU of sm{wanted} or newer; there is none here"))
        elif here < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs sm{wanted}, this GPU is sm{here}"))


@functools.lru_cache(maxsize=1)
def _toolchain_fault() -> str:
    try:
        toolchain()
    except ToolchainError as error:
        return " ".join(str(error).split())
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compile") and _toolchain_fault():
        pytest.skip(f"no usable compilers: {_toolchain_fault()}")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests never read or fill the user's own cache, unless a cache is named."""
    if "GEMMGEN_CACHE_DIR" not in os.environ:
        os.environ["GEMMGEN_CACHE_DIR"] = str(tmp_path_factory.getbasetemp().parent / "gemmgen-cache")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with the file of that name, or rewrites it under `--update-golden`."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: run `make golden`"
        assert text == path.read_text(), f"{path.name} differs: look at the change, then run `make golden`"

    return check
