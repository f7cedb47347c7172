"""Settings: what each environment variable means, and that a wrong one is named."""

from pathlib import Path

import pytest

from gemmgen.errors import GemmgenError
from gemmgen.settings import ENVIRONMENT, Settings, settings


def test_an_empty_environment_gives_the_defaults():
    assert settings({}) == Settings()


def test_every_variable_reaches_its_field():
    env = {
        "GEMMGEN_CACHE_DIR": "/somewhere/with space é",
        "GEMMGEN_CACHE_MAX_GB": "0.5",
        "GEMMGEN_COMPILE": "0",
        "GEMMGEN_DISPATCHER": "0",
        "GEMMGEN_BUILD_JOBS": "3",
        "GEMMGEN_NVCC": "/opt/nvcc",
        "GEMMGEN_CXX": "g++-13",
        "CUDA_HOME": "/opt/cuda",
    }

    assert settings(env) == Settings(
        cache_dir=Path("/somewhere/with space é"),
        cache_max_bytes=500_000_000,
        compile_allowed=False,
        dispatcher=False,
        build_jobs=3,
        nvcc="/opt/nvcc",
        host_compiler="g++-13",
        cuda_home="/opt/cuda",
    )
    assert {variable.name for variable in ENVIRONMENT} == set(env)


def test_the_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("GEMMGEN_COMPILE", "off")
    assert not settings().compile_allowed
    monkeypatch.setenv("GEMMGEN_COMPILE", "1")
    assert settings().compile_allowed


def test_our_own_names_win_over_the_general_ones():
    env = {"GEMMGEN_CXX": "a", "NVCC_CCBIN": "b", "CUDA_HOME": "c", "CUDA_PATH": "d"}
    assert (settings(env).host_compiler, settings(env).cuda_home) == ("a", "c")
    general = settings({"NVCC_CCBIN": "b", "CUDA_PATH": "d"})
    assert (general.host_compiler, general.cuda_home) == ("b", "d")


@pytest.mark.parametrize(
    "name, value",
    [
        ("GEMMGEN_COMPILE", "maybe"),
        ("GEMMGEN_CACHE_MAX_GB", "big"),
        ("GEMMGEN_CACHE_MAX_GB", "-1"),
        ("GEMMGEN_CACHE_MAX_GB", "inf"),
        ("GEMMGEN_CACHE_MAX_GB", "nan"),
        ("GEMMGEN_BUILD_JOBS", "0"),
        ("GEMMGEN_BUILD_JOBS", "1.5"),
    ],
)
def test_a_value_without_meaning_is_an_error_that_names_it(name, value):
    with pytest.raises(GemmgenError, match=f"{name}='{value}'"):
        settings({name: value})
