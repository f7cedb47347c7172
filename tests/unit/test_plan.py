"""The modules of the pointwise kernel and of reductions: rendered and looked for once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gemmgen as gg
from gemmgen import jit, plan
from gemmgen.arch import arch_named
from gemmgen.errors import CacheError
from gemmgen.runtime import bind_call
from gemmgen.settings import settings

SM90 = arch_named("sm90")


def bound(M: int = 64, N: int = 128, residual_stride: int = 128):
    A, B = torch.zeros(M, 64, dtype=torch.bfloat16), torch.zeros(64, N, dtype=torch.bfloat16)
    residual = torch.zeros(M, residual_stride, dtype=torch.bfloat16)[:, :N]
    operands = {"bias": torch.zeros(N, dtype=torch.bfloat16), "residual": residual}
    return bind_call(gg.Gemm(gg.library.bias_silu_residual)._op.graph_for, A, B, operands, None)


def test_the_text_is_the_same_object_for_every_m_and_another_for_another_layout():
    text = plan.pointwise_text(bound())
    assert plan.pointwise_text(bound(M=65)) is text
    assert plan.pointwise_text(bound(residual_stride=129)) != text  # aligned to single elements


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache and a context that know modules by their files; what was built, in order."""
    built: list[str] = []
    monkeypatch.setattr(plan, "_modules", {})
    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path))

    def build_module(text, arch, *, name="module"):
        built.append(text)
        path = Path(settings().cache_dir) / f"{len(built)}.cubin"
        path.touch()
        return path

    def load_module(path):
        if not path.exists():
            raise CacheError(f"{path} was removed")
        return path

    monkeypatch.setattr(jit, "build_module", build_module)
    monkeypatch.setattr(jit, "load_module", load_module)
    return built


def test_a_module_is_looked_for_once(cache, monkeypatch, tmp_path):
    first = plan._module("text", SM90)
    assert plan._module("text", SM90) == first
    assert cache == ["text"]
    plan._module("other", SM90)
    plan._module("text", arch_named("sm80"))
    monkeypatch.setenv("GEMMGEN_CACHE_DIR", str(tmp_path / ".."))
    plan._module("text", SM90)
    assert cache == ["text", "other", "text", "text"]


def test_a_module_that_was_removed_is_built_again(cache):
    plan._module("text", SM90).unlink()
    assert plan._module("text", SM90).exists()
    assert cache == ["text", "text"]
