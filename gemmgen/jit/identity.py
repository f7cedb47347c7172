"""What identifies a cache entry: digests of the texts, headers, flags and arch that a compiled file depends on.

The versions of the tools are not in these keys: the cache keeps entries of several tool versions under one key.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from gemmgen.arch import Arch
from gemmgen.jit.cache import digest
from gemmgen.jit.compile import CUBIN_FLAGS, FUNCTOR_FLAGS, LAUNCHER_FLAGS, LTOIR_FLAGS, NVCC_FLAGS
from gemmgen.jit.link import LINK_FLAGS
from gemmgen.jit.load import ABI_VERSION
from gemmgen.jit.toolchain import template_include_dir
from gemmgen.source import KernelSource


def skeleton_key(source: KernelSource) -> str:
    """Digest of all that the two halves of a skeleton depend on, but for the versions of the tools."""
    flags = (*NVCC_FLAGS, *LTOIR_FLAGS, *LAUNCHER_FLAGS)
    return digest("skeleton", str(ABI_VERSION), *flags, source.arch.target, *_with_headers(source.skeleton))


def kernel_key(source: KernelSource) -> str:
    """Digest of all that a linked kernel depends on, but for the versions of the tools."""
    flags = (*FUNCTOR_FLAGS, *LINK_FLAGS)
    return digest("kernel", skeleton_key(source), *flags, *_with_headers(source.functor))


def module_key(text: str, arch: Arch) -> str:
    """Digest of all that an NVRTC-only cubin depends on, but for the version of NVRTC."""
    return digest("module", *CUBIN_FLAGS, arch.target, *_with_headers(text))


def inputs_key(source: KernelSource) -> str:
    """Digest of what the texts of `source` are made from: its inputs, and the code and templates that render them."""
    return digest("inputs", _generator(), source.name, source.inputs)


# what decides a rendered text or the flags it is compiled with
_GENERATORS = ("ir/*.py", "lower/*.py", "jit/*.py", "arch.py", "config.py", "dtypes.py", "peephole.py", "pipeline.py",
               "render.py", "signature.py", "simplify.py", "source.py", "templates.py")  # fmt: skip


@functools.lru_cache(maxsize=1)
def _generator() -> str:
    package, templates = Path(__file__).parents[1], template_include_dir().parent
    files = [path for pattern in _GENERATORS for path in package.glob(pattern)]
    files += [path for path in templates.rglob("*") if path.is_file()]
    return digest(*(part for path in sorted(files) for part in (path.name, path.read_bytes())))


def _with_headers(text: str) -> list[str]:
    """`text` and every header of gemmgen that it includes, directly or not; one of them is the ABI."""
    seen: dict[str, str] = {}
    waiting = re.findall(r'#\s*include\s*[<"](gemmgen/[^>"]+)[>"]', text)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen[name], includes = _header(name)
            waiting += includes
    return [text, *(part for name in sorted(seen) for part in (name, seen[name]))]


@functools.lru_cache(maxsize=256)
def _header(name: str) -> tuple[str, tuple[str, ...]]:
    """Content of our header `name`, and the names of those that it includes in turn."""
    try:
        content = (template_include_dir() / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return "", ()  # the compiler will say so, with the line that includes it
    folder = name.rpartition("/")[0]
    found = re.findall(r'#\s*include\s*(?:<(gemmgen/[^>]+)>|"([^"]+)")', content)
    return content, tuple(full or (own if own.startswith("gemmgen/") else f"{folder}/{own}") for full, own in found)
