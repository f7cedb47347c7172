"""The environment variables that gemmgen reads, all of them, and the frozen `Settings` made from them.

`ENVIRONMENT` is the one table of names, defaults and meanings; the README's list is generated from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemmgen.errors import GemmgenError


@dataclass(frozen=True)
class Variable:
    """One row of the documentation of the environment."""

    name: str
    default: str
    meaning: str


ENVIRONMENT: tuple[Variable, ...] = (
    Variable("GEMMGEN_CACHE_DIR", "the user cache folder of the platform", "Folder of compiled kernels."),
    Variable("GEMMGEN_CACHE_MAX_GB", "10", "Size in GB above which the least recently used entries are evicted."),
    Variable("GEMMGEN_COMPILE", "1", "0 forbids every compilation; a kernel that is not cached is then an error."),
    Variable("GEMMGEN_DISPATCHER", "1", "0 keeps Python in the way of every call; see `gemmgen doctor`."),
    Variable("GEMMGEN_BUILD_JOBS", "from cores and free memory", "Kernels that are compiled at the same time."),
    Variable("GEMMGEN_NVCC", "found", "Path of nvcc. Else CUDA_HOME, PATH, /usr/local/cuda, then the PyPI wheels."),
    Variable("GEMMGEN_CXX", "g++", "Host compiler that nvcc uses; NVCC_CCBIN is read when this is not set."),
    Variable("CUDA_HOME", "none", "CUDA toolkit whose bin/nvcc is used; CUDA_PATH is read when this is not set."),
)

_SWITCH = {"": True, "1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False}
_SWITCH["no"] = False


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cache_dir: folder of compiled kernels, or None for the platform's user cache folder.
        cache_max_bytes: size above which the cache evicts.
        compile_allowed: False forbids nvcc, NVRTC and nvJitLink.
        dispatcher: whether calls go through the C++ dispatcher where it is built.
        build_jobs: kernels compiled at once, or None to choose from cores and memory.
        nvcc: an explicit nvcc, or None to look for one.
        host_compiler: an explicit host compiler, or None for g++.
        cuda_home: a CUDA toolkit folder, or None.
    """

    cache_dir: Path | None = None
    cache_max_bytes: int = 10_000_000_000
    compile_allowed: bool = True
    dispatcher: bool = True
    build_jobs: int | None = None
    nvcc: str | None = None
    host_compiler: str | None = None
    cuda_home: str | None = None


def settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environment`, by default the process's own, as it is now.

    Raises:
        GemmgenError: a variable has a value with no meaning; the message names it.
    """
    env = os.environ if environment is None else environment
    cache_dir = env.get("GEMMGEN_CACHE_DIR")
    return Settings(
        cache_dir=_folder("GEMMGEN_CACHE_DIR", cache_dir) if cache_dir else None,
        cache_max_bytes=int(_number(env, "GEMMGEN_CACHE_MAX_GB", 10.0) * 1e9),
        compile_allowed=_switch(env, "GEMMGEN_COMPILE"),
        dispatcher=_switch(env, "GEMMGEN_DISPATCHER"),
        build_jobs=_jobs(env),
        nvcc=env.get("GEMMGEN_NVCC") or None,
        host_compiler=env.get("GEMMGEN_CXX") or env.get("NVCC_CCBIN") or None,
        cuda_home=env.get("CUDA_HOME") or env.get("CUDA_PATH") or None,
    )


def _folder(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # of a user that is not there
        raise GemmgenError(f"{name}={text!r} names no folder: there is no such user") from None


def _switch(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "")
    if value.lower() not in _SWITCH:
        raise GemmgenError(f"{name}={value!r} is neither on nor off: set it to 0 or 1")
    return _SWITCH[value.lower()]


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise GemmgenError(f"{name}={text!r} is not a number of 0 or more")
    return value


def _jobs(env: Mapping[str, str]) -> int | None:
    if not env.get("GEMMGEN_BUILD_JOBS"):
        return None
    jobs = _number(env, "GEMMGEN_BUILD_JOBS", 1)
    if jobs != int(jobs) or jobs < 1:
        raise GemmgenError(f"GEMMGEN_BUILD_JOBS={env['GEMMGEN_BUILD_JOBS']!r} is not a whole number of 1 or more")
    return int(jobs)
