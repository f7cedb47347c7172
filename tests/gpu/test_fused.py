"""The fused kernels against the float64 reference: dtypes, layouts, shapes, operand kinds, reductions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gemmgen as gg
from tests.oracle import assert_close, integers, listed, uniform

pytestmark = pytest.mark.gpu(sm=90)
CUDA = "cuda"


@gg.epilogue
def kitchen(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, alpha: gg.Scalar):
    value = gg.relu(accum * alpha + row) - col + tile
    masked = gg.where(gg.col_index() <= gg.row_index() + 3, value, -value)
    return {"D": value, "masked": masked, "sums": gg.sum(value, over="M"), "peaks": gg.max(masked, over="N")}


@gg.epilogue
def totals(accum, row: gg.Row):
    value = accum + row
    return gg.sum(value, over="MN"), gg.sum(value, over="N"), gg.min(value, over="M"), gg.amax(value, over="MN")


@gg.epilogue
def every_output(accum, col: gg.Col):
    value = accum * col
    return (value.to(torch.float32), value.to(torch.bfloat16), value.to(torch.float16), value.to(torch.float8_e4m3fn),
            value.to(torch.float8_e5m2), value.to(torch.int8), value.to(torch.int32))


def operands_of(M: int, N: int, make=integers, dtype=torch.float32, lead: tuple[int, ...] = (), device: str = ""):
    on = {"dtype": dtype, "device": device or CUDA}
    return {"row": make(*lead, N, **on), "col": make(*lead, M, **on), "tile": make(*lead, M, N, **on), "alpha": 2.0}


def matrices(M: int, N: int, K: int, layout: str, dtype, make=integers, lead: tuple[int, ...] = (), device: str = ""):
    """A and B; a letter of `layout` is "n" for row-major, "t" for column-major."""

    def one(rows: int, columns: int, order: str) -> Tensor:
        if order == "n":
            return make(*lead, rows, columns, dtype=dtype, device=device or CUDA)
        return make(*lead, columns, rows, dtype=dtype, device=device or CUDA).mT

    A, B = one(M, K, layout[0]), one(K, N, layout[1])
    return A, B


def assert_exact(op: gg.Gemm, A: Tensor, B: Tensor, operands, results) -> None:
    for name, got, want in zip(op._result_names, listed(results), listed(op.reference(A, B, **operands)), strict=True):
        assert torch.equal(got.double(), want.to(got.dtype).double()), f"result {name} differs: {_first(got, want)}"


def _first(got: Tensor, want: Tensor) -> str:
    wrong = (got.double() != want.to(got.dtype).double()).nonzero()
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {got.numel()} elements, first at {at}: {got[at].item()} instead of {want[at].item()}"


SHAPES = [
    pytest.param(128, 256, 64, id="one-tile"),
    pytest.param(200, 136, 72, id="ragged"),
    pytest.param(192, 192, 64, id="square-so-row-is-not-col"),
    pytest.param(77, 131, 45, id="odd"),
    pytest.param(1, 264, 136, id="one-row"),
    pytest.param(130, 1, 33, id="one-column"),
    pytest.param(70, 66, 1, id="k-of-1"),
]
LAYOUTS = ["nt", "nn", "tt", "tn"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_bf16_is_exact_on_integers(M, N, K, layout):
    op = gg.Gemm(kitchen)
    A, B = matrices(M, N, K, layout, torch.bfloat16)
    operands = operands_of(M, N, dtype=torch.bfloat16)
    assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("M, N, K", SHAPES[:4])
def test_other_inputs_are_exact_on_integers(M, N, K, dtype):
    op = gg.Gemm(kitchen)
    A, B = matrices(M, N, K, "nt", dtype)
    operands = operands_of(M, N)
    assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_8_bit_inputs_of_any_layout(layout, dtype):
    op = gg.Gemm(kitchen)
    A, B = matrices(160, 144, 96, layout, dtype)
    operands = operands_of(160, 144)
    assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("M, N, K", SHAPES[1:4])
def test_fp32_is_exact_on_integers(M, N, K, layout, precision):
    op = gg.Gemm(kitchen)
    A, B = matrices(M, N, K, layout, torch.float32)
    operands = operands_of(M, N)
    assert_exact(op, A, B, operands, op(A, B, **operands))


@pytest.mark.parametrize("lead", [(1,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("M, N, K", [(136, 264, 72), (33, 45, 21)], ids=["aligned", "odd"])
def test_batches_are_exact_on_integers(M, N, K, layout, lead):
    op = gg.Gemm(kitchen)
    A, B = matrices(M, N, K, layout, torch.bfloat16, lead=lead)
    operands = operands_of(M, N, lead=lead, dtype=torch.bfloat16)
    assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))
    shared = operands_of(M, N, dtype=torch.bfloat16)
    assert_exact(op, A, B[(0,) * len(lead)], shared, op(A, B[(0,) * len(lead)], out_dtype=torch.float32, **shared))


@pytest.mark.parametrize("M, N, K", [(300, 520, 136), (65, 77, 40), (1, 8, 8)], ids=str)
def test_reductions_are_finished_and_exact(M, N, K):
    op = gg.Gemm(totals)
    A, B = matrices(M, N, K, "nt", torch.bfloat16)
    operands = {"row": integers(N, dtype=torch.bfloat16, device=CUDA)}
    first = op(A, B, **operands)
    assert_exact(op, A, B, operands, first)
    assert all(torch.equal(x, y) for x, y in zip(first, op(A, B, **operands), strict=True))


@pytest.mark.parametrize("M, N", [(144, 272), (51, 37)], ids=["aligned", "odd"])
def test_every_output_dtype_rounds_as_the_contract_says(M, N):
    op = gg.Gemm(every_output)
    A, B = matrices(M, N, 64, "nt", torch.bfloat16)  # whole numbers: one rounding, that of the scale, before the store
    col = torch.logspace(-4, 6, M, device=CUDA)
    col[::7] *= -1
    col[3], col[4] = float("inf"), float("nan")
    for got, want in zip(op(A, B, col=col), op(A.cpu(), B.cpu(), col=col.cpu()), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.cpu().double().nan_to_num(nan=12345.0), want.double().nan_to_num(nan=12345.0)), got.dtype


def test_int8_accumulators_are_stored_exactly():
    @gg.epilogue
    def identity(accum):
        return accum.to(torch.int32)

    op = gg.Gemm(identity)
    for M, N, K in ((128, 256, 2048), (50, 70, 333)):
        A, B = uniform(M, K, dtype=torch.int8, device=CUDA), uniform(N, K, dtype=torch.int8, device=CUDA).t()
        assert torch.equal(op(A, B), (A.double() @ B.double()).to(torch.int32))


SMOOTH = [gg.library.bias_gelu, gg.library.bias_gelu_tanh, gg.library.bias_silu]


@pytest.mark.parametrize("epilogue", SMOOTH, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("M, N, K", [(256, 512, 256), (1000, 1003, 777)], ids=["aligned", "odd"])
def test_activations_are_as_accurate_as_torch(M, N, K, dtype, epilogue):
    op = gg.Gemm(epilogue)
    A, B = matrices(M, N, K, "nt", dtype, make=uniform)
    operands = {"bias": uniform(N, dtype=dtype, device=CUDA)}
    assert_close(op, A, B, operands, op(A, B, **operands))


CONFIGS = [
    gg.GemmConfig("sm90", (128, 256, 64), (2, 1), "cooperative", swizzle=8, raster="N"),
    gg.GemmConfig("sm90", (256, 128, 64), (1, 2), "cooperative", swizzle=4, raster="M"),
    gg.GemmConfig("sm90", (256, 192, 64), (1, 2), "cooperative", (128, 64)),
    gg.GemmConfig("sm90", (128, 192, 64), (2, 1), "pingpong", (64, 64)),
    gg.GemmConfig("sm90", (64, 128, 64), (1, 1), "pingpong"),
    gg.GemmConfig("sm90", (128, 224, 64), (2, 1), "cooperative"),
    gg.GemmConfig("sm90", (256, 160, 64), (1, 2), "cooperative", (128, 32)),
    gg.GemmConfig("sm90", (128, 160, 64), (2, 1), "pingpong", (64, 32)),
    gg.GemmConfig("sm90", (128, 80, 64), (1, 2), "cooperative"),
    gg.GemmConfig("sm90", (128, 48, 64), (1, 2), "cooperative"),
    gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=2),
    gg.GemmConfig("sm80", (128, 128, 32), kernel_schedule="multistage", stages=4, warp_shape=(64, 64, 32)),
    gg.GemmConfig("sm80", (128, 64, 32), kernel_schedule="multistage", stages=4, warp_shape=(64, 32, 32),
                  scheduler="stream_k", split_k=3),
]


@gg.epilogue
def scaled_with_sums(accum, row: gg.Row, alpha: gg.Scalar):
    value = gg.relu(accum * alpha + row)
    return {"D": value, "sums": gg.sum(value, over="M")}


@gg.epilogue
def scaled(accum, row: gg.Row, alpha: gg.Scalar):
    return gg.relu(accum * alpha + row)


# in the clusters of some config: a tile of few rows beside a whole one, and beside one that lies beyond; the same of N
EDGES = ((264, 520, 200), (200, 456, 136), (392, 1000, 72), (129, 136, 1032))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
def test_every_config_is_exact_on_integers(config):
    # a wide epilogue tile leaves no registers for a reduction
    op = gg.Gemm(scaled if config.epilogue_tile else scaled_with_sums, config=config)
    for M, N, K in ((1024, 768, 512), *EDGES):
        A, B = matrices(M, N, K, "nt", torch.bfloat16)
        operands = {"row": integers(N, dtype=torch.bfloat16, device=CUDA), "alpha": 2.0}
        assert_exact(op, A, B, operands, op(A, B, **operands))


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)], ids=str)
def test_edges_of_matrices_without_k_contiguous_are_exact_on_integers(cluster):
    op = gg.Gemm(scaled_with_sums, config=gg.GemmConfig("sm90", (128, 128, 64), cluster, "cooperative"))
    for rows, N, K in EDGES:
        M = rows // 8 * 8  # as TMA needs where M is contiguous
        A, B = matrices(M, N, K, "tn", torch.bfloat16)
        operands = {"row": integers(N, dtype=torch.bfloat16, device=CUDA), "alpha": 2.0}
        assert_exact(op, A, B, operands, op(A, B, **operands))


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "batch"])
def test_what_is_loaded_in_the_place_of_rows_beyond_stays_out_of_the_results(lead):
    """The first rows of A and columns of B, which are loaded there, have no finite element."""
    op = gg.Gemm(scaled, config=gg.GemmConfig("sm90", (128, 192, 64), (2, 1), "pingpong", (64, 64)))
    for M, N, K in EDGES:
        A, B = matrices(M, N, K, "nt", torch.bfloat16, lead=lead)
        A[..., :32, :], B[..., :32] = float("nan"), float("inf")
        operands = {"row": integers(*lead, N, dtype=torch.bfloat16, device=CUDA), "alpha": 2.0}
        out = torch.full((*lead, M, N), float("nan"), device=CUDA, dtype=torch.bfloat16)
        op(A, B, out=out, **operands)
        want = op.reference(A, B, **operands)
        assert torch.equal(out[..., 32:, 32:].double(), want[..., 32:, 32:].to(out.dtype).double())
        assert not out[..., :32, :].isfinite().any()


ORDERS = [(raster, swizzle) for raster in ("heuristic", "M", "N") for swizzle in (1, 2, 4, 8)]


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_every_tile_is_computed_in_any_order(cluster):
    """Tiles that fill no whole group, in several rounds of all SMs and in less than one."""
    for M, N, *lead in ((64 * 29, 32 * 43), (64 * 3, 32 * 7, 5), (40, 32 * 77), (64 * 90, 24), (8, 8, 3)):
        A, B = matrices(M, N, 64, "nt", torch.bfloat16, lead=lead)
        row = integers(*lead, N, dtype=torch.bfloat16, device=CUDA)
        for raster, swizzle in ORDERS:
            config = gg.GemmConfig("sm90", (64, 32, 64), cluster, "pingpong", raster=raster, swizzle=swizzle)
            op = gg.Gemm(scaled, config=config)
            out = torch.full((*lead, M, N), float("nan"), device=CUDA, dtype=torch.bfloat16)
            op(A, B, row=row, alpha=2.0, out=out)
            assert_exact(op, A, B, {"row": row, "alpha": 2.0}, out)


@gg.epilogue
def all_vectors(accum, row: gg.Row, col: gg.Col, alpha: gg.Scalar, beta: gg.Scalar):
    value = gg.relu(accum * alpha + row) - col * beta
    return gg.where(gg.col_index() <= gg.row_index() + 3, value, -value)


@gg.epilogue
def all_vectors_and_totals(accum, row: gg.Row, col: gg.Col, alpha: gg.Scalar, beta: gg.Scalar):
    value = gg.relu(accum * alpha + row) - col * beta
    sums = {"sums": gg.sum(value, over="M"), "peaks": gg.max(value, over="N"), "total": gg.sum(value, over="MN")}
    return {"D": value} | sums


def vectors_of(M: int, N: int, dtype, lead: tuple[int, ...]):
    made = operands_of(M, N, dtype=dtype, lead=lead)
    return {"row": made["row"], "col": made["col"], "alpha": 2.0, "beta": torch.tensor(3.0, device=CUDA)}


VECTOR_CONFIGS = [
    gg.GemmConfig("sm90", (128, 128, 64), (2, 1), "cooperative"),
    gg.GemmConfig("sm90", (128, 48, 64), (1, 2), "cooperative"),
    gg.GemmConfig("sm90", (64, 192, 64), (1, 1), "pingpong"),
    gg.GemmConfig("sm90", (192, 64, 64), (1, 2), "pingpong", (64, 64)),
    gg.GemmConfig("sm90", (64, 64, 64), (1, 1), "single", scheduler="cluster_split", split_k=2),
    gg.GemmConfig("sm90", (64, 160, 64), (1, 1), "single", scheduler="cluster_split", split_k=2),
    gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("config", VECTOR_CONFIGS, ids=lambda c: c.label)
def test_vectors_and_numbers_reach_every_tile(config, dtype):
    """Where D is the only tile: each warp stores its own part of D, and vectors come ahead of a tile's end."""
    vectors = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    op = gg.Gemm(all_vectors, config=config)
    for M, N, K, lead in ((1000, 1360, 72, ()), (130, 80, 136, (3,)), (8, 4096, 64, ()), (4096, 16, 64, ())):
        A, B = matrices(M, N, K, "nt", torch.bfloat16, lead=lead)
        operands = vectors_of(M, N, vectors, lead)
        out = torch.full((*lead, M, N), float("nan"), device=CUDA).to(dtype)
        op(A, B, out=out, **operands)
        assert_exact(op, A, B, operands, out)


@pytest.mark.parametrize("config", [VECTOR_CONFIGS[0], VECTOR_CONFIGS[2], VECTOR_CONFIGS[-1]], ids=lambda c: c.label)
def test_reductions_beside_one_tile_are_exact(config):
    op = gg.Gemm(all_vectors_and_totals, config=config)
    for M, N, K, lead in ((1000, 1360, 72, ()), (130, 72, 520, (3,))):
        A, B = matrices(M, N, K, "nt", torch.bfloat16, lead=lead)
        operands = vectors_of(M, N, torch.bfloat16, lead)
        assert_exact(op, A, B, operands, op(A, B, **operands))


def swapped(tile: tuple[int, int, int], schedule: str = "pingpong", **fields) -> gg.GemmConfig:
    return gg.GemmConfig("sm90", tile, kernel_schedule=schedule, swapped=True, **fields)


def cluster_split(tile: tuple[int, int, int], split_k: int, **fields) -> gg.GemmConfig:
    return swapped(tile, "single", scheduler="cluster_split", split_k=split_k, **fields)


FEW_ROWS_CONFIGS = [
    swapped((64, 8, 128)),
    swapped((64, 16, 256)),
    swapped((64, 64, 64)),
    swapped((64, 16, 128), cluster_shape=(4, 1), swizzle=2, raster="N"),
    swapped((128, 16, 128), "cooperative"),
    swapped((128, 16, 128), "cooperative", scheduler="stream_k"),
    swapped((128, 16, 128), "cooperative", scheduler="stream_k", split_k=3),
    cluster_split((64, 16, 128), 1, stages=5),
    cluster_split((64, 16, 128), 2),
    cluster_split((64, 16, 128), 4),
    cluster_split((64, 8, 128), 8),
    cluster_split((64, 32, 128), 2),
    cluster_split((64, 128, 128), 4),
    cluster_split((128, 32, 128), 2),
    gg.GemmConfig("sm90", (64, 64, 128), kernel_schedule="single", scheduler="cluster_split", split_k=4),
    gg.GemmConfig("sm90", (64, 160, 64), kernel_schedule="single", scheduler="cluster_split", split_k=2),
]
# N is no multiple of a tile; of K, some slices get more than others, and some nothing
FEW_ROWS_SHAPES = [(1, 264, 1000), (3, 1032, 136), (17, 72, 264), (100, 520, 1032)]


DTYPES_OF_KITCHEN = {"sums": torch.float32, "peaks": torch.float32}


@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("config", FEW_ROWS_CONFIGS, ids=lambda c: f"{c.label}-{c.split_k}")
def test_few_rows_are_exact_on_integers(config, lead):
    op = gg.Gemm(kitchen, config=config)
    for M, N, K in FEW_ROWS_SHAPES:
        A, B = matrices(M, N, K, "nt", torch.bfloat16, lead=lead)
        operands = operands_of(M, N, dtype=torch.bfloat16, lead=lead)
        padded = torch.full((*lead, M, N + 8), float("nan"), device=CUDA, dtype=torch.bfloat16)
        shapes = {"masked": (*lead, M, N), "sums": (*lead, N), "peaks": (*lead, M)}
        outs = {"D": padded[..., :N]} | {
            name: torch.full(shape, float("nan"), device=CUDA, dtype=DTYPES_OF_KITCHEN.get(name, torch.bfloat16))
            for name, shape in shapes.items()
        }
        op(A, B, out=outs, **operands)
        assert_exact(op, A, B, operands, outs)
        assert padded[..., N:].isnan().all()


@pytest.mark.parametrize("tile, split_k", [((64, 16, 128), 2), ((64, 64, 128), 4)], ids=["one-finishes", "shares"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_few_rows_of_other_inputs_are_exact_on_integers(dtype, tile, split_k):
    op = gg.Gemm(kitchen, config=cluster_split(tile, split_k))
    for M, N, K in ((1, 264, 1040), (19, 136, 272)):
        A, B = matrices(M, N, K, "nt", dtype)
        operands = operands_of(M, N)
        assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))


EXACT_FP8_CONFIGS = [
    gg.GemmConfig("sm90", (128, 128, 128), (1, 2), "cooperative"),
    gg.GemmConfig("sm90", (128, 192, 128), (2, 1), "cooperative"),
    gg.GemmConfig("sm90", (128, 192, 64), (1, 1), "cooperative"),
    gg.GemmConfig("sm90", (128, 256, 128), (2, 1), "cooperative"),
    gg.GemmConfig("sm90", (256, 128, 128), (1, 2), "cooperative"),
    gg.GemmConfig("sm90", (128, 256, 128), (2, 1), "cooperative", scheduler="stream_k"),
    gg.GemmConfig("sm90", (128, 128, 128), (1, 1), "cooperative", scheduler="stream_k", split_k=3),
    gg.GemmConfig("sm90", (64, 112, 128), (1, 1), "pingpong"),
    gg.GemmConfig("sm90", (64, 128, 32), (1, 1), "pingpong"),
    gg.GemmConfig("sm90", (64, 256, 128), (1, 2), "pingpong"),
    gg.GemmConfig("sm90", (128, 128, 128), (2, 1), "pingpong"),
    swapped((64, 8, 128)),
    swapped((64, 128, 128)),
    cluster_split((64, 16, 128), 4),
    cluster_split((64, 64, 128), 2),
    cluster_split((64, 96, 128), 2),
    gg.GemmConfig("sm90", (64, 128, 128), (1, 1), "single", scheduler="cluster_split", split_k=2),
]


# every count of k tiles that the mainloop's unrolled loop may end at, and a last one that K does not fill
@pytest.mark.parametrize("config", EXACT_FP8_CONFIGS, ids=lambda c: f"{c.label}-{c.split_k}")
def test_fp8_is_exact_on_integers_for_any_number_of_k_tiles(config):
    is_wide = config.tile_shape[0] * config.tile_shape[1] > 128 * 192
    wide_stream_k = is_wide and config.scheduler == "stream_k"  # no registers for all of `kitchen`
    op = gg.Gemm(scaled if wide_stream_k else kitchen, config=config)
    # fp32 tiles leave no room beside the widest stages
    operands = operands_of(264, 528, dtype=torch.bfloat16 if is_wide else torch.float32)
    for K in (16, 128, 144, 384, 512, 528, 640, 768, 1040):
        A, B = matrices(264, 528, K, "nt", torch.float8_e4m3fn)
        given = {name: operands[name] for name in ("row", "alpha")} if wide_stream_k else operands
        assert_exact(op, A, B, given, op(A, B, out_dtype=torch.float32, **given))


@pytest.mark.parametrize("config", EXACT_FP8_CONFIGS, ids=lambda c: f"{c.label}-{c.split_k}")
def test_mixed_fp8_is_exact_over_a_long_k(config):
    op = gg.Gemm(scaled, config=config)
    A, B = (x.float().abs() for x in matrices(384, 1040, 40016, "nt", torch.float8_e4m3fn))
    A, B = A.to(torch.float8_e5m2), B.to(torch.float8_e4m3fn)  # sums of 16 bits, more than the tensor core has
    operands = {"row": integers(1040, device=CUDA), "alpha": 1.0}
    assert_exact(op, A, B, operands, op(A, B, out_dtype=torch.float32, **operands))


@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_few_rows_of_any_layout_are_exact_on_integers(layout):
    op = gg.Gemm(kitchen, config=swapped((64, 8, 128)))
    for M, N, K in ((8, 264, 200), (24, 136, 328)):
        A, B = matrices(M, N, K, layout, torch.bfloat16)
        operands = operands_of(M, N, dtype=torch.bfloat16)
        assert_exact(op, A, B, operands, op(A, B, **operands))


def test_clusters_give_the_same_bits_each_time():
    op = gg.Gemm(gg.library.bias_gelu_tanh, config=cluster_split((64, 16, 128), 4))
    A, B = matrices(16, 4096, 4096, "nt", torch.bfloat16, make=uniform)
    operands = {"bias": uniform(4096, dtype=torch.bfloat16, device=CUDA)}
    first = op(A, B, **operands)
    assert_close(op, A, B, operands, first)
    assert all(torch.equal(first, op(A, B, **operands)) for _ in range(20))
