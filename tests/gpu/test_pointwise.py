"""The elementwise kernels against the float64 evaluation: dtypes, shapes, batches, layouts, reductions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gemmgen as gg
from gemmgen import pipeline
from gemmgen.evaluate import TORCH_DTYPES, evaluate
from gemmgen.ir import Graph
from gemmgen.ops import broadcastable, register_elementwise
from gemmgen.problem import Extents, result_axes
from tests.oracle import FLOOR, errors, integers, uniform

pytestmark = pytest.mark.gpu(sm=80)
CUDA = "cuda"


@gg.epilogue
def everything(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, other: gg.Tile, alpha: gg.Scalar):
    value = gg.relu(tile * alpha + row) - col + other
    masked = gg.where(gg.col_index() <= gg.row_index() + 3, value, -value)
    sums = {f"sum_{over}": gg.sum(masked, over=over) for over in ("M", "N", "MN")}
    return {"value": value, "masked": masked.to(torch.bfloat16), **sums}


@gg.epilogue
def extremes(accum, tile: gg.Tile):
    return {
        f"{name}_{over}": reduce(tile, over=over)
        for name, reduce in (("max", gg.max), ("min", gg.min), ("amax", gg.amax))
        for over in ("M", "N")
    }


@gg.epilogue
def whole(accum, tile: gg.Tile):
    return {"max": gg.max(tile, over="MN"), "min": gg.min(tile, over="MN"), "sum": gg.sum(tile, over="MN")}


@gg.epilogue
def to_floats(accum, tile: gg.Tile):
    return tile.to(torch.float32), (tile * 2).to(torch.bfloat16), (tile * 4).to(torch.float16)


@gg.epilogue
def to_bytes(accum, tile: gg.Tile):
    return tile.to(torch.float8_e4m3fn), tile.to(torch.float8_e5m2), tile.to(torch.int8), tile.to(torch.int32)


@gg.epilogue
def smooth(accum, tile: gg.Tile, bias: gg.Row):
    value = gg.gelu_tanh(tile + bias) * gg.sigmoid(tile) + gg.erf(tile) + gg.softplus(tile)
    return {"D": value, "over_M": gg.sum(value, over="M"), "over_N": gg.sum(value, over="N")}


def computed(epilogue: gg.Epilogue, extents: Extents, operands: dict[str, Tensor | float]) -> list[Tensor]:
    return register_elementwise(_graph(epilogue))(extents, operands)


def _graph(epilogue: gg.Epilogue) -> Graph:
    return pipeline.graph_of(epilogue)


def expected(
    epilogue: gg.Epilogue, extents: Extents, operands: dict[str, Tensor | float], compute: torch.dtype = torch.float64
) -> list[Tensor]:
    """The evaluation in `compute`, rounded as the graph says; unrounded where it says nothing."""
    graph = _graph(epilogue)
    shaped = broadcastable(graph, operands, extents, compute, torch.device(CUDA))
    accum = torch.zeros((), dtype=compute, device=CUDA).expand(extents.L, extents.M, extents.N)
    values = evaluate(graph, accum, shaped, {r.name: r.dtype for r in graph.results}, compute)
    return [values[r.name].reshape(extents.shape(result_axes(r))) for r in graph.results]


def assert_exact(epilogue: gg.Epilogue, extents: Extents, operands: dict[str, Tensor | float]) -> None:
    graph = _graph(epilogue)
    found, wanted = computed(epilogue, extents, operands), expected(epilogue, extents, operands)
    results = zip(graph.results, found, wanted, strict=True)
    for result, got, want in results:
        assert got.shape == want.shape and got.dtype == TORCH_DTYPES.get(result.dtype, torch.float32)
        same = torch.nan_to_num(got.double(), 7.5, 1e9, -1e9) == torch.nan_to_num(want.double(), 7.5, 1e9, -1e9)
        assert same.all(), f"{result.name}: {(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0]}"


def operands_of(extents: Extents, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | float]:
    lead = (extents.L,) if extents.batched else ()
    shapes = {"row": (extents.N,), "col": (extents.M,), "tile": (extents.M, extents.N), "other": (extents.M, extents.N)}
    tensors = {name: integers(*lead, *shape, dtype=dtype, device=CUDA) for name, shape in shapes.items()}
    return {**tensors, "alpha": 2.0}


def extents_of(M: int, N: int, L: int | None = None) -> Extents:
    return Extents(M, N, 0, 1 if L is None else L, L is not None)


SHAPES = [(1, 1), (1, 7), (7, 1), (33, 65), (64, 256), (65, 257), (63, 8), (200, 136), (3, 1000), (1000, 3)]


@pytest.mark.parametrize("M, N", SHAPES, ids=str)
def test_shapes(M, N):
    extents = extents_of(M, N)
    assert_exact(everything, extents, operands_of(extents))


@pytest.mark.parametrize("M, N", [(1, 1), (65, 257), (200, 136)], ids=str)
def test_maxima_and_minima(M, N):
    extents = extents_of(M, N)
    tile = uniform(M, N, device=CUDA)
    assert_exact(extremes, extents, {"tile": tile})
    tile = integers(M, N, device=CUDA)
    assert_exact(whole, extents, {"tile": tile})
    tile[M // 2, N // 2] = float("nan")
    assert_exact(extremes, extents, {"tile": tile})
    tile.fill_(float("-inf"))
    assert_exact(extremes, extents, {"tile": tile})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
                                   torch.int8, torch.int32], ids=str)  # fmt: skip
@pytest.mark.parametrize("M, N", [(66, 264), (5, 33)], ids=str)
def test_every_dtype_in_and_out(dtype, M, N):
    extents = extents_of(M, N)
    tile = integers(M, N, device=CUDA, high=8).to(dtype)
    assert_exact(to_floats, extents, {"tile": tile})
    assert_exact(to_bytes, extents, {"tile": tile})


def test_bytes_saturate_and_keep_nan():
    special = [float("inf"), float("-inf"), float("nan")]
    values = torch.tensor([1e9, -1e9, *special, 0.5, 1.5, 2.5, -0.5, 448, 464, 57344, 1e5])
    assert_exact(to_bytes, extents_of(1, len(values)), {"tile": values.to(CUDA)[None]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_dtypes_of_every_operand(dtype):
    extents = extents_of(70, 136)
    assert_exact(everything, extents, operands_of(extents, dtype))


@pytest.mark.parametrize("L", [1, 3])
def test_batches(L):
    extents = extents_of(37, 72, L)
    operands = operands_of(extents)
    assert_exact(everything, extents, operands)
    shared = {"row": operands["row"][0], "col": operands["col"][0], "tile": operands["tile"][0]}
    scalars = torch.arange(1.0, L + 1, device=CUDA)
    assert_exact(everything, extents, {**operands, **shared, "alpha": scalars})
    assert_exact(everything, extents, {**operands, "alpha": torch.tensor(3.0, device=CUDA)})


def test_more_batches_than_a_grid_has():
    extents = extents_of(2, 3, 65_535 + 700)
    assert_exact(everything, extents, operands_of(extents))


def test_expanded_operands():
    extents = extents_of(70, 136)
    operands = operands_of(extents)
    tiles = {
        "rows": operands["row"].expand(70, 136),
        "columns": operands["col"][:, None].expand(70, 136),
        "one": integers(1, 1, device=CUDA).expand(70, 136),
    }
    for tile in tiles.values():
        assert_exact(everything, extents, {**operands, "tile": tile})
    assert_exact(everything, extents, {**operands, "row": operands["row"][:1].expand(136)})


def test_strided_and_misaligned_operands():
    extents = extents_of(70, 136)
    operands = operands_of(extents, torch.bfloat16)
    padded = integers(70, 300, dtype=torch.bfloat16, device=CUDA)
    tiles = [padded[:, 1:137], padded[:, ::2][:, :136], integers(136, 70, dtype=torch.bfloat16, device=CUDA).t(),
             padded.flatten()[1 : 1 + 70 * 136].view(70, 136)]  # fmt: skip
    for tile in tiles:
        assert_exact(everything, extents, {**operands, "tile": tile})
    vectors = {"row": padded.flatten()[1 : 1 + 2 * 136 : 2], "col": padded.flatten()[3 : 3 + 70]}
    assert_exact(everything, extents, {**operands, **vectors})


@pytest.mark.parametrize("M, N, L", [(0, 8, None), (8, 0, None), (0, 0, None), (4, 8, 0)], ids=str)
def test_empty_tiles(M, N, L):
    extents = Extents(M, N, 0, 1 if L is None else L, L is not None)
    assert_exact(everything, extents, operands_of(extents))
    lead = () if L is None else (L,)
    assert_exact(extremes, extents, {"tile": torch.empty(*lead, M, N, device=CUDA)})


@pytest.mark.parametrize("M, N", [(1000, 1032), (8192, 512), (77, 131)], ids=str)
def test_error_is_that_of_torch_in_fp32(M, N):
    extents = extents_of(M, N)
    operands = {"tile": uniform(M, N, device=CUDA) * 4, "bias": uniform(N, device=CUDA)}
    want, own = expected(smooth, extents, operands), expected(smooth, extents, operands, torch.float32)
    for got, reference, torchs in zip(computed(smooth, extents, operands), want, own, strict=True):
        for ours, theirs in zip(errors(got, reference), errors(torchs, reference), strict=True):
            assert ours <= 2 * theirs + 4 * FLOOR


def test_sums_are_the_same_bits_every_time():
    extents = extents_of(4096, 1032)
    operands = {"tile": uniform(4096, 1032, device=CUDA), "bias": uniform(1032, device=CUDA)}
    first = computed(smooth, extents, operands)
    for _ in range(3):
        assert all(torch.equal(one, two) for one, two in zip(first, computed(smooth, extents, operands), strict=True))


def test_more_elements_than_an_int32_counts():
    M, N = 2**16 + 1, 2**15 + 8  # bytes in, nothing but sums out
    tile = torch.ones(M, N, dtype=torch.int8, device=CUDA)
    tile[-1, -1] = 3
    total = computed(whole, extents_of(M, N), {"tile": tile})
    assert total[0].item() == 3 and total[1].item() == 1
    assert abs(total[2].item() - (M * N + 2)) <= 1e-6 * M * N
