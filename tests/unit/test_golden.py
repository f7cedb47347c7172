"""The printed IR and the rendered CUDA against files: a change of either is seen in review. `make golden` rewrites."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gemmgen as gg
from gemmgen import pipeline
from gemmgen.arch import ARCHS
from gemmgen.config import GemmConfig
from gemmgen.dsl import Epilogue
from gemmgen.dtypes import DType
from gemmgen.ir.text import to_text
from gemmgen.runtime import bind_call
from gemmgen.templates import templates_dir

M, N, K = 512, 768, 256
SM90 = GemmConfig("sm90", (128, 128, 64), (1, 2), "pingpong")
SWAPPED = GemmConfig("sm90", (64, 16, 128), (1, 1), "single", scheduler="cluster_split", split_k=2, swapped=True)
SM80 = GemmConfig("sm80", (128, 128, 32), kernel_schedule="multistage", stages=4, warp_shape=(64, 64, 32), swizzle=4)


@gg.epilogue
def every_kind(accum, bias: gg.Row, scale: gg.Col, residual: gg.Tile, alpha: gg.Scalar):
    preact = accum * scale * alpha + bias
    masked = gg.where(gg.row_index() >= gg.col_index(), gg.gelu(preact), -1.5) + residual
    return {"D": masked, "preact": preact.to(torch.float16), "sums": gg.sum(masked, over="M")}


@gg.epilogue
def quantised(accum, scale: gg.Row):
    return gg.clamp(accum * scale, -100, 100).to(torch.int8)


EPILOGUES = {epilogue.name: epilogue for epilogue in (every_kind, quantised, gg.library.bias_gelu_tanh)}


def bound(epilogue: Epilogue, dtype: torch.dtype = torch.bfloat16):
    """A call on row-major A and column-major B, bound from metadata."""
    op = gg.Gemm(epilogue)._op
    shapes = {p.name: {"[N]": (N,), "[M]": (M,), "[M,N]": (M, N)}.get(p.axes.text) for p in op.graph.parameters}
    operands = {
        name: torch.empty(shape, dtype=torch.float32, device="meta") if shape else 2.0
        for name, shape in shapes.items()
    }
    A = torch.empty(M, K, dtype=dtype, device="meta")
    B = torch.empty(N, K, dtype=dtype, device="meta").t()
    return bind_call(op.graph_for, A, B, operands, None)


def without_headers(text: str) -> str:
    """Rendered text without the device functions that every functor carries, which are files themselves."""
    for name in ("math.cuh", "elements.cuh"):
        text = text.replace((templates_dir() / name).read_text().rstrip("\n"), f"// {name}")
    return text


@pytest.mark.parametrize("accum", [DType.F32, DType.I32], ids=repr)
def test_ir(golden, accum):
    texts = [to_text(pipeline.graph_of(epilogue, accum)) for epilogue in EPILOGUES.values()]
    golden(f"ir_{accum.text}.txt", "\n\n".join(texts) + "\n")


@pytest.mark.parametrize("name", EPILOGUES)
def test_functors(golden, name):
    source = pipeline.kernel_source(bound(EPILOGUES[name]), SM90, ARCHS["sm90"])
    golden(f"functor_{name}.cu", without_headers(source.functor))


def test_pointwise(golden):
    golden("pointwise_every_kind.cu", without_headers(pipeline.pointwise_source(bound(every_kind), 4)))


@pytest.mark.parametrize("name", ["every_kind", "bias_gelu_tanh"])
@pytest.mark.parametrize("config", [SM90, SM80], ids=lambda config: config.family)
def test_skeletons(golden, name, config):
    source = pipeline.kernel_source(bound(EPILOGUES[name]), config, ARCHS["sm90"])
    golden(f"skeleton_{config.family}_{name}.cu", source.skeleton)


def test_swapped_skeleton(golden):
    source = pipeline.kernel_source(bound(every_kind), SWAPPED, ARCHS["sm90"])
    golden("skeleton_sm90_swapped_every_kind.cu", source.skeleton)


@pytest.mark.parametrize("rows, split_k, share", [(64, 2, 32), (64, 4, 16), (32, 2, 16), (32, 4, 32), (16, 2, 16)])
def test_ctas_that_split_k_share_columns_that_are_enough(rows, split_k, share):
    config = replace(SWAPPED, tile_shape=(64, rows, 128), split_k=split_k)
    skeleton = pipeline.kernel_source(bound(every_kind), config, ARCHS["sm90"]).skeleton
    assert (f"ShareShape = cute::Shape<cute::Int<64>, cute::Int<{share}>" in skeleton) == (share < rows)
    of_a_cta = "ShareShape" if share < rows else "TileShape"
    assert f"SwappedEpilogueShape<{of_a_cta}," in skeleton
    # sums over M are over the columns of the swapped problem: as many partials as CTAs have a share of them
    assert f"ceil_div(x->m, {share})" in skeleton


def test_rendering_twice_gives_the_same_text():
    first, second = (pipeline.kernel_source(bound(every_kind), SM90, ARCHS["sm90"]) for _ in range(2))
    assert (first.skeleton, first.functor, first.inputs) == (second.skeleton, second.functor, second.inputs)


def test_operand_names_are_not_in_the_cuda():
    source = pipeline.kernel_source(bound(every_kind), SM90, ARCHS["sm90"])
    assert not any(name in source.skeleton for name in ("bias", "residual", "alpha"))
    assert "residual" not in source.functor
