"""`Gemm` and `linear` on the CPU: results, shapes, dtypes, names, torch.compile, and every bad input by its message."""

from __future__ import annotations

import keyword
import traceback
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmgen as gg
from gemmgen import ops
from gemmgen.dtypes import DType
from gemmgen.evaluate import evaluate, round_to
from gemmgen.ir import Graph
from gemmgen.ir.node import Axes
from tests.oracle import assert_close, errors, integers, uniform
from tests.strategies import epilogues

M, N, K = 6, 10, 8
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@gg.epilogue
def kitchen(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, alpha: gg.Scalar):
    value = accum * alpha + row - col + tile
    return {"D": gg.relu(value), "sums": gg.sum(value, over="M"), "peaks": gg.max(value, over="N")}


@gg.epilogue
def identity(accum):
    return accum


@gg.epilogue
def pair(accum):
    return accum, -accum


KITCHEN = gg.Gemm(kitchen)
PLAIN = gg.Gemm(identity)


def matrices(*batch: int, m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.float32):
    return integers(*batch, m, k, dtype=dtype), integers(*batch, k, n, dtype=dtype)


def operands_of(*batch: int, m: int = M, n: int = N) -> dict[str, torch.Tensor | float]:
    shapes = {"row": (*batch, n), "col": (*batch, m), "tile": (*batch, m, n)}
    return {name: integers(*shape) for name, shape in shapes.items()} | {"alpha": 2.0}


def expected_of(A, B, row, col, tile, alpha):
    value = torch.matmul(A.double(), B.double()) * alpha + row.unsqueeze(-2) - col.unsqueeze(-1) + tile
    return {"D": value.relu(), "sums": value.sum(-2), "peaks": value.amax(-1)}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape and torch.equal(got[name].double(), want[name].double()), name


# Results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_results_are_exact_on_integers(dtype):
    A, B = matrices(dtype=dtype)
    got = KITCHEN(A, B, **operands_of() | {"alpha": 1.0})
    assert got["D"].dtype == dtype
    assert got["sums"].dtype == got["peaks"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (1,), (2, 1, 2)], ids=str)
def test_batches(batch):
    A, B = matrices(*batch)
    operands = operands_of(*batch)
    assert_equal(KITCHEN(A, B, **operands), expected_of(A, B, **operands))
    assert_equal(KITCHEN.reference(A, B, **operands), expected_of(A, B, **operands))


@pytest.mark.parametrize(
    "a, b",
    [((), (3,)), ((3,), ()), ((1,), (3,)), ((3,), (1,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((2, 3), ()), ((1, 1), ())],
    ids=str,
)
def test_batches_broadcast_as_matmuls(a, b):
    A, B = integers(*a, M, K), integers(*b, K, N)
    got = PLAIN(A, B)
    assert got.shape == torch.matmul(A, B).shape and torch.equal(got, torch.matmul(A, B))


def test_unbatched_operands_are_shared_by_the_batch():
    A, B = matrices(3)
    operands = operands_of()
    assert_equal(KITCHEN(A, B, **operands), expected_of(A, B, **operands))


@pytest.mark.parametrize("batch", [(3,), (2, 3)], ids=str)
def test_a_scalar_per_batch(batch):
    A, B = matrices(*batch)
    alpha = integers(*batch)

    @gg.epilogue
    def scaled(accum, alpha: gg.Scalar):
        return accum * alpha

    assert torch.equal(gg.Gemm(scaled)(A, B, alpha=alpha), torch.matmul(A, B) * alpha[..., None, None])


SCALARS = [2, 2.0, True, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor([2.0])]


@pytest.mark.parametrize("alpha", SCALARS, ids=repr)
def test_scalars_are_numbers_or_tensors(alpha):
    A, B = matrices()
    operands = operands_of() | {"alpha": alpha}
    assert_equal(KITCHEN(A, B, **operands), expected_of(A, B, **operands | {"alpha": float(alpha)}))


def test_matrices_and_operands_of_any_strides():
    A, B = integers(K, M).t(), integers(2 * K, 2 * N)[::2, ::2]
    operands = {
        "row": integers(1).expand(N),
        "col": integers(2 * M)[::2],
        "tile": integers(N).expand(M, N),
        "alpha": integers(1),
    }
    got = KITCHEN(A, B, **operands)
    assert_equal(got, expected_of(A, B, **operands))
    assert all(result.is_contiguous() for result in got.values())


def test_operands_broadcast_along_the_batch():
    A, B = matrices(2, 3)
    operands = operands_of(3) | {"col": integers(2, 1, M), "alpha": np.float32(2)}
    assert_equal(KITCHEN(A, B, **operands), expected_of(A, B, **operands | {"alpha": 2.0}))


def test_a_result_that_is_an_operand_is_a_copy():
    @gg.epilogue
    def passed(accum, tile: gg.Tile):
        return {"D": accum, "same": tile}

    A, B = matrices()
    tile = integers(M, N)
    same = gg.Gemm(passed)(A, B, tile=tile)["same"]
    assert torch.equal(same, tile) and same.data_ptr() != tile.data_ptr()


def test_containers():
    A, B = matrices()
    assert isinstance(PLAIN(A, B), torch.Tensor)
    first, second = gg.Gemm(pair)(A, B)
    assert torch.equal(first, -second)
    assert list(KITCHEN(A, B, **operands_of())) == ["D", "sums", "peaks"]


@pytest.mark.parametrize("m, n, k, l", [(0, N, K, 2), (M, 0, K, 2), (M, N, 0, 2), (M, N, K, 0), (0, 0, 0, 0)], ids=str)
def test_empty_problems(m, n, k, l):  # noqa: E741
    for batch in ((), (l,)):
        A, B = matrices(*batch, m=m, n=n, k=k)
        operands = operands_of(*batch, m=m, n=n)
        got = KITCHEN(A, B, **operands)
        value = torch.matmul(A, B) * 2 + operands["row"].unsqueeze(-2) - operands["col"].unsqueeze(-1)
        value += operands["tile"]
        assert torch.equal(got["D"], value.relu())
        assert torch.equal(got["sums"], value.sum(-2))
        peaks = value.amax(-1) if n else torch.full((*batch, m), float("-inf"))
        assert torch.equal(got["peaks"], peaks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_out_dtype_is_for_tiles_without_a_cast(dtype):
    @gg.epilogue
    def mixed(accum):
        return {"D": accum, "half": accum.to(torch.float16), "sum": gg.sum(accum, over="MN")}

    got = gg.Gemm(mixed)(*matrices(), out_dtype=dtype)
    assert [got[name].dtype for name in ("D", "half", "sum")] == [dtype, torch.float16, torch.float32]
    assert got["sum"].shape == ()


def test_rounding_happens_once_at_the_end():
    @gg.epilogue
    def biased(accum, bias: gg.Row):
        return accum + bias

    A, B = torch.ones(1, 1).mul(257).bfloat16().float(), torch.ones(1, 1)
    A = torch.cat([torch.full((1, 1), 256.0), torch.ones(1, 1)], 1).bfloat16()
    B = torch.ones(2, 1).bfloat16()
    assert gg.Gemm(biased)(A, B, bias=torch.full((1,), -256.0)).item() == 1.0


def test_int8_is_exact_and_dequantised():
    A, B = uniform(M, 4096, dtype=torch.int8), uniform(4096, N, dtype=torch.int8)
    exact = A.long() @ B.long()
    assert torch.equal(PLAIN(A, B, out_dtype=torch.int32), exact.int())
    assert PLAIN(A, B).dtype == torch.bfloat16
    op = gg.Gemm(gg.library.int8_dequant_bias)
    scales = {"scale_a": torch.rand(M), "scale_b": torch.rand(N), "bias": torch.randn(N)}
    got = op(A, B, **scales)
    want = exact.double() * scales["scale_a"].double()[:, None] * scales["scale_b"].double() + scales["bias"].double()
    assert got.dtype == torch.bfloat16 and errors(got, want)[0] < 2**-8
    assert_close(op, A, B, scales, got)


@pytest.mark.parametrize("a, b", [(a, b) for a in FP8 for b in FP8], ids=str)
def test_fp8(a, b):
    A, B = uniform(M, K, dtype=a), uniform(K, N, dtype=b)
    got = PLAIN(A, B, out_dtype=torch.float32)
    assert torch.allclose(got.double(), A.double() @ B.double(), rtol=1e-6)
    assert PLAIN(A, B).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype, limit", [(FP8[0], 448.0), (FP8[1], 57344.0), (torch.int8, 127)], ids=str)
def test_eight_bit_results_saturate(dtype, limit):
    A = torch.tensor([[1e6], [-1e6], [float("inf")], [0.0]])
    got = PLAIN(A, torch.ones(1, 1), out_dtype=dtype).double().flatten().tolist()
    assert got == [limit, -limit - (dtype == torch.int8), limit, 0.0]


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_nan_stays_nan_in_fp8(dtype):
    assert PLAIN(torch.full((1, 1), float("nan")), torch.ones(1, 1), out_dtype=dtype).float().isnan().all()


def test_float64_is_computed_in_float64():
    A, B = torch.rand(M, K, dtype=torch.float64), torch.rand(K, N, dtype=torch.float64)
    op = gg.Gemm(gg.library.bias_gelu)
    bias = torch.rand(N, dtype=torch.float64)
    got = op(A, B, bias=bias)
    assert torch.allclose(got, F.gelu(A @ B + bias), rtol=1e-14) and got.dtype == torch.float64


def test_an_operand_that_is_not_used_is_not_read():
    @gg.epilogue
    def deaf(accum, bias: gg.Row):
        return accum

    A, B = matrices()
    assert torch.equal(gg.Gemm(deaf)(A, B, bias=torch.full((N,), float("nan"))), A @ B)


def test_row_and_column_are_not_confused_when_square():
    A, B = matrices(m=K, n=K)
    operands = operands_of(m=K, n=K)
    assert_equal(KITCHEN(A, B, **operands), expected_of(A, B, **operands))


# Names


NAMES = ["A", "B", "C", "D", "accum2", "int", "self", "class_", "float", "Tensor", "t", "nan", "out0", "args", "L", "x",
         "_private", "__dunder__", "größe", "β", "arch", "config", "name", "s_value", "template", "inf"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_operands_may_have_any_name(name):
    scope: dict[str, object] = {"gg": gg}
    exec(f"def named(accum, {name}: gg.Row, s: gg.Scalar): return accum * s + {name}", scope)
    op = gg.Gemm(gg.epilogue(scope["named"]))
    A, B = matrices()
    row = integers(N)
    assert torch.equal(op(A, B, **{name: row, "s": 2.0}), A @ B * 2 + row)
    out = torch.empty(M, N)
    assert op(A, B, out=out, **{name: row, "s": 2.0}) is out


identifiers = st.from_regex(r"\A[^\W\d]\w{0,8}\Z").filter(
    lambda name: name.isidentifier() and not keyword.iskeyword(name) and name not in ("accum", "out", "out_dtype")
)


@settings(max_examples=40)
@given(st.lists(identifiers, min_size=1, max_size=4, unique_by=lambda name: unicodedata.normalize("NFKC", name)))
def test_operands_may_have_any_names(names):
    scope: dict[str, object] = {"gg": gg}
    kinds = ["gg.Row", "gg.Scalar"]
    parameters = ", ".join(f"{name}: {kinds[i % 2]}" for i, name in enumerate(names))
    exec(f"def named(accum, {parameters}): return {' + '.join(['accum', *names])}", scope)
    op = gg.Gemm(gg.epilogue(scope["named"]))
    operands = {p.name: integers(N) if i % 2 == 0 else 3.0 for i, p in enumerate(op._op.graph.parameters)}
    A, B = matrices()
    assert torch.equal(op(A, B, **operands), A @ B + sum(operands.values()))


@pytest.mark.parametrize("name", ["<lambda>", "größe", "int", "_private", "2x", "out", "default", "Tensor"])
def test_epilogues_may_have_any_name(name):
    def doubled(accum):
        return accum * 2

    doubled.__name__ = name
    A, B = matrices()
    op = gg.Gemm(gg.epilogue(doubled))
    assert torch.equal(op(A, B), A @ B * 2)
    assert torch.equal(op(A, B, out=torch.empty(M, N)), A @ B * 2)
    assert "gemmgen_functor_0" in op.source(A, B, arch="sm80")


def test_callables_that_are_no_functions():
    class Scaled:
        def __call__(self, accum, bias: gg.Row):
            return accum * 2 + bias

        def method(self, accum, bias: gg.Row):
            return accum * 3 + bias

    A, B = matrices()
    bias = integers(N)
    assert torch.equal(gg.Gemm(gg.epilogue(Scaled()))(A, B, bias=bias), A @ B * 2 + bias)
    assert torch.equal(gg.Gemm(gg.epilogue(Scaled().method))(A, B, bias=bias), A @ B * 3 + bias)


def many(operands: int, results: int) -> gg.Gemm:
    names = [f"r{i}" for i in range(operands)]
    scope: dict[str, object] = {"gg": gg}
    parameters = ", ".join(f"{name}: gg.Row" for name in names)
    exec(f"def many(accum, {parameters}): return {', '.join(names[:results])}", scope)
    return gg.Gemm(gg.epilogue(scope["many"]))


def test_dozens_of_operands_and_results():
    A, B = matrices()
    operands = {f"r{i}": integers(N) for i in range(32)}
    results = many(32, 30)(A, B, **operands)
    assert all(torch.equal(result, operands[f"r{i}"].expand(M, N)) for i, result in enumerate(results))
    with pytest.raises(gg.UnsupportedOp, match="has 40 operands and 30 results"):
        many(40, 30)


def test_results_share_no_memory():
    @gg.epilogue
    def thrice(accum):
        return accum, accum, accum + 0

    results = gg.Gemm(thrice)(*matrices())
    assert len({result.data_ptr() for result in results}) == 3


# out=


def test_out_is_written_and_returned():
    A, B = matrices()
    operands = operands_of()
    out = {"D": torch.empty(M, N), "sums": torch.empty(N), "peaks": torch.empty(M)}
    got = KITCHEN(A, B, out=out, **operands)
    assert all(got[name] is out[name] for name in out)
    assert_equal(got, expected_of(A, B, **operands))


def test_out_may_have_any_strides_and_overlap_an_operand():
    A, B = matrices()
    operands = operands_of()
    want = expected_of(A, B, **operands)
    tile = operands["tile"]
    out = {"D": tile, "sums": torch.empty(2 * N)[::2], "peaks": torch.empty(M)}
    assert_equal(KITCHEN(A, B, out=out, **operands), want)
    turned = torch.empty(N, M).t()
    assert torch.equal(PLAIN(A, B, out=turned), A @ B)


def test_out_of_many_batches():
    A, B = matrices(2, 3)
    out = torch.empty(3, 2, M, N).transpose(0, 1)  # its batches cannot be viewed as one
    assert PLAIN(A, B, out=out) is out
    assert torch.equal(out, A @ B)


def test_the_dtype_of_out_is_that_of_the_result():
    A, B = matrices()
    out = PLAIN(A, B, out=torch.empty(M, N, dtype=torch.bfloat16))
    assert torch.equal(out, (A @ B).bfloat16())


def test_out_as_a_sequence():
    A, B = matrices()
    outs = [torch.empty(M, N), torch.empty(M, N)]
    first, second = gg.Gemm(pair)(A, B, out=outs)
    assert first is outs[0] and second is outs[1] and torch.equal(first, -second)


# linear


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0, 3), (2, 3, 2)], ids=str)
def test_linear_has_the_shapes_of_torchs(lead):
    x, weight, bias = integers(*lead, K), integers(N, K), integers(N)
    got = gg.linear(x, weight, gg.Gemm(gg.library.bias), bias=bias)
    want = F.linear(x, weight, bias)
    assert got.shape == want.shape and torch.equal(got, want)


@pytest.mark.parametrize("is_flat", [False, True], ids=["with-lead", "flat"])
def test_linear_takes_operands_with_leading_dimensions_or_flat(is_flat):
    x, weight = integers(2, 3, K), integers(N, K)
    operands = {"row": integers(N), "col": integers(2, 3), "tile": integers(2, 3, N), "alpha": 2.0}
    want = expected_of(x, weight.t(), **operands)
    if is_flat:
        operands |= {"col": operands["col"].flatten(), "tile": operands["tile"].flatten(0, 1)}
    got = gg.linear(x, weight, KITCHEN, **operands)
    assert torch.equal(got["D"], want["D"].float()) and torch.equal(got["peaks"], want["peaks"].float())
    assert torch.equal(got["sums"], want["sums"].sum(0).float()) and got["sums"].shape == (N,)


# torch


def test_opcheck():
    A, B = matrices()
    for alpha in (2.0, torch.tensor(2.0)):
        flat = KITCHEN._op.flat_operands(operands_of() | {"alpha": alpha})
        torch.library.opcheck(KITCHEN._op.overload, (A, B, *flat), {})
        torch.library.opcheck(KITCHEN._op.overload, (A, B, *flat), {"out_dtype": torch.bfloat16})


@pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
def test_compiled_without_graph_breaks(is_dynamic):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=is_dynamic, backend=counter)
    def double(A, B, row, col, tile):
        results = KITCHEN(A, B, row=row, col=col, tile=tile, alpha=2.0, out_dtype=torch.float32)
        return {name: 2 * value for name, value in results.items()}

    for m in (6, 9, 14) if is_dynamic else (6,):
        A, B = matrices(m=m)
        operands = operands_of(m=m)
        alpha = operands.pop("alpha")
        got = double(A, B, **operands)
        want = expected_of(A, B, **operands, alpha=alpha)
        assert_equal(got, {name: 2 * value for name, value in want.items()})
    assert counter.frame_count == 1


@pytest.mark.parametrize("call", ["linear", "batched"])
def test_compiled_with_leading_dimensions(call):
    torch._dynamo.reset()
    op, weight, bias = gg.Gemm(gg.library.bias_relu), integers(N, K), integers(N)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x):
        if call == "linear":
            return gg.linear(x, weight, op, bias=bias)
        return op(x.unsqueeze(1), weight.t(), bias=bias).squeeze(1)

    for tokens in (4, 7, 12):
        x = integers(2, tokens, K)
        assert torch.equal(layer(x), F.relu(F.linear(x, weight, bias)))


def test_meta_tensors_give_meta_results():
    A, B = (matrix.to("meta") for matrix in matrices(3))
    operands = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in operands_of(3).items()}
    got = KITCHEN(A, B, **operands)
    assert [tuple(got[name].shape) for name in ("D", "sums", "peaks")] == [(3, M, N), (3, N), (3, M)]
    assert all(value.is_meta for value in got.values())


def test_equal_epilogues_share_an_op():
    assert gg.Gemm(identity)._op is PLAIN._op


def tf32_by_precision():
    torch.set_float32_matmul_precision("high")


def tf32_by_switch():
    torch.backends.cuda.matmul.allow_tf32 = True


def tf32_by_backend():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.fixture
def precision():
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")
@pytest.mark.parametrize("allow", [tf32_by_precision, tf32_by_switch, tf32_by_backend])
def test_fp32_uses_tf32_where_torch_may(precision, allow):
    A, B = matrices(m=256, n=256, k=256)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert "OpClassSimt" in PLAIN.source(A, B, arch="sm80")
    allow()
    assert "OpClassTensorOp" in PLAIN.source(A, B, arch="sm80")


def test_explain_names_the_op_and_source_has_both_texts():
    A, B = (matrix.to("meta") for matrix in matrices(2, 3, m=256, n=256, k=256, dtype=torch.bfloat16))
    assert f"op gemmgen::{PLAIN._op.name}" in PLAIN.explain()
    assert "(M, N, K, L) = (256, 256, 256, 6)" in PLAIN.explain(A, B, arch="sm90")
    source = PLAIN.source(A, B, arch="sm90")
    assert "gemmgen_functor_0" in source and "cutlass" in source


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_explain_says_that_8_bit_matrices_are_laid_out_anew(dtype):
    by_rows, by_columns = (torch.empty(256, 256, dtype=dtype, device="meta") for _ in range(2))
    by_columns = by_columns.t()
    copied = "after one transposing copy"
    for A, B, count in ((by_rows, by_columns, 0), (by_rows, by_rows, 1), (by_columns, by_rows, 2)):
        assert PLAIN.explain(A, B, arch="sm90").count(copied) == count
    wide = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    assert copied not in PLAIN.explain(wide.t(), wide, arch="sm90")


@pytest.mark.parametrize("m, n, k", [(0, 8, 8), (8, 8, 0)], ids=str)
def test_explain_of_empty_problems(m, n, k):
    text = PLAIN.explain(*matrices(m=m, n=n, k=k, dtype=torch.bfloat16), arch="sm90")
    assert "nothing is launched" in text or "K is 0" in text


# Bad input


def bad(error, message, **changes):
    """(error, message, what differs from a good call)"""
    return pytest.param(error, message, changes, id=message)


def sparse(x):
    return x.to_sparse()


BAD_CALLS = [
    bad(gg.OperandError, "missing: row", without="row"),
    bad(gg.OperandError, "unknown: bias", bias=1.0),
    bad(gg.OperandError, "It is declared as kitchen(accum, row, col, tile, alpha)", without="col"),
    bad(gg.OperandError, "operand `row` is of type float\n  Give a tensor for the declared gg.Row", row=1.0),
    bad(gg.OperandError, "operand `row` is None", row=None),
    bad(gg.OperandError, "operand `tile` is of type list", tile=[[1.0]]),
    bad(gg.OperandError, "operand `row` is of type ndarray", row=np.ones(N)),
    bad(gg.OperandError, "operand `alpha` is of type str", alpha="2"),
    bad(gg.OperandError, "operand `alpha` is None\n  A gg.Scalar is a number or a one-element tensor", alpha=None),
    bad(gg.OperandError, "operand `alpha` is of type complex", alpha=2j),
    bad(gg.OperandError, "operand `tile` is a torch.sparse_coo tensor", tile=sparse(torch.ones(M, N))),
    bad(gg.OperandError, "operand `row` is on meta, A on cpu\n  Move them to one", row=torch.ones(N, device="meta")),
    bad(gg.OperandError, "operand `alpha` is on meta", alpha=torch.ones((), device="meta")),
    bad(gg.UnsupportedOp, "operand `row`: gemmgen has no element type for torch.int64", row=torch.arange(N)),
    bad(gg.UnsupportedOp, "operand `col`: gemmgen has no element type for torch.complex64", col=torch.ones(M).cfloat()),
    bad(gg.ShapeMismatch, "declared gg.Row, it must be (10,)", row=torch.ones(N + 1)),
    bad(gg.ShapeMismatch, "This is one value per row of D: annotate it gg.Col", row=torch.ones(M)),
    bad(gg.ShapeMismatch, "This is one value per column of D: annotate it gg.Row", col=torch.ones(N)),
    bad(gg.ShapeMismatch, "Drop the axis of extent 1 with .squeeze()", col=torch.ones(M, 1)),
    bad(gg.ShapeMismatch, "operand `tile` has shape (10, 6)", tile=torch.ones(N, M)),
    bad(gg.ShapeMismatch, "operand `alpha` has shape (2,); declared gg.Scalar", alpha=torch.ones(2)),
    bad(gg.ShapeMismatch, "operand `row` has shape (3, 10)", row=torch.ones(3, N)),
    bad(gg.ShapeMismatch, "(M, N, K, L) = (6, 10, 8, 1)", tile=torch.ones(M, 1)),
    bad(gg.OperandError, "A is of type list", A=[[1.0]]),
    bad(gg.OperandError, "B is None", B=None),
    bad(gg.OperandError, "A is a torch.sparse_coo tensor\n  Give a dense one", A=sparse(torch.ones(M, K))),
    bad(gg.OperandError, "B is on meta, A on cpu", B=torch.ones(K, N, device="meta")),
    bad(gg.ShapeMismatch, "both need at least 2 dimensions", A=torch.ones(K)),
    bad(gg.ShapeMismatch, "A is () and B is (8, 10)", A=torch.ones(())),
    bad(gg.ShapeMismatch, "K is 9 in A and 8 in B", A=torch.ones(M, K + 1)),
    bad(gg.ShapeMismatch, "Did you mean B.t()? (nn.Linear weights are [N, K]: use gg.linear.)", B=torch.ones(N, K)),
    bad(gg.ShapeMismatch, "batch dimensions (2,) of A and (3,) of B do not broadcast",
        A=torch.ones(2, M, K), B=torch.ones(3, K, N)),
    bad(gg.OperandError, "A is torch.float32 and B is torch.float16", B=torch.ones(K, N).half()),
    bad(gg.OperandError, "A is torch.int8 and B is torch.float32", A=torch.ones(M, K, dtype=torch.int8)),
    bad(gg.OperandError, "A is torch.float32 and B is torch.float8_e4m3fn", B=torch.ones(K, N).to(FP8[0])),
    bad(gg.UnsupportedOp, "A is i32, for which there is no mainloop", A=torch.ones(M, K).int()),
    bad(gg.UnsupportedOp, "A: gemmgen has no element type for torch.int64", A=torch.ones(M, K).long()),
    bad(gg.UnsupportedOp, "B is bool, for which there is no mainloop", B=torch.ones(K, N).bool()),
    bad(gg.OperandError, "out_dtype is 'bf16'\n  It may be torch.float32", out_dtype="bf16"),
    bad(gg.OperandError, "out_dtype is torch.int64", out_dtype=torch.int64),
    bad(gg.OperandError, "out_dtype is torch.float64", out_dtype=torch.float64),
    bad(gg.OperandError, "`out` is of type Tensor, but the results are D, sums, peaks\n  Give a dict",
        out=torch.ones(1)),
    bad(gg.OperandError, "`out` is of type dict", out={"D": torch.ones(M, N)}),
    bad(gg.OperandError, "`out` is of type int", out=3),
    bad(gg.OperandError, "out for result `D` is of type int", out=[1, 2, 3]),
    bad(gg.OperandError, "out for result `sums` is torch.float32 (6,) on cpu; the result is torch.float32 (10,) on cpu",
        out=[torch.ones(M, N), torch.ones(M), torch.ones(M)]),
    bad(gg.OperandError, "out for result `peaks` is torch.bfloat16",
        out=[torch.ones(M, N), torch.ones(N), torch.ones(M).bfloat16()]),
    bad(gg.OperandError, "out for result `D`: its dtype is torch.int64",
        out=[torch.ones(M, N).long(), torch.ones(N), torch.ones(M)]),
    bad(gg.OperandError, "out for result `D` is on meta, A on cpu",
        out=[torch.ones(M, N, device="meta"), torch.ones(N), torch.ones(M)]),
    bad(gg.OperandError, "out for result `D` has elements that share memory",
        out=[torch.ones(N).expand(M, N), torch.ones(N), torch.ones(M)]),
    bad(gg.OperandError, "got `out` and `out_dtype`",
        out=[torch.ones(M, N), torch.ones(N), torch.ones(M)], out_dtype=torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("error, message, changes", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(error, message, changes):
    A, B = matrices()
    operands = operands_of()
    keywords = operands | changes
    left_out = keywords.pop("without", None)
    keywords.pop(left_out, None)
    outs = changes.get("out")
    before = [x.clone() for x in outs] if isinstance(outs, list) and isinstance(outs[0], torch.Tensor) else []
    with pytest.raises(error) as caught:
        KITCHEN(keywords.pop("A", A), keywords.pop("B", B), **keywords)
    assert isinstance(caught.value, gg.GemmgenError)
    assert message in str(caught.value) and "`kitchen`" in str(caught.value)
    assert all(x.is_meta or torch.equal(x, outs[i]) for i, x in enumerate(before))
    assert_equal(KITCHEN(A, B, **operands), expected_of(A, B, **operands))


@pytest.mark.parametrize("batch", [(6,), (2,), (3, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", ["row", "alpha"])
def test_a_batch_that_does_not_broadcast_is_refused(batch, name):
    A, B = matrices(2, 3)
    operands = operands_of() | {name: torch.ones(*batch, N) if name == "row" else torch.ones(batch)}
    with pytest.raises(gg.ShapeMismatch, match=rf"operand `{name}` has shape .* does not broadcast to \(2, 3\)"):
        KITCHEN(A, B, **operands)


@pytest.mark.parametrize(
    "change", [{"row": None}, {"row": 1.0}, {"alpha": "2"}, {"row": torch.ones(N).to_sparse()}, {"unknown": 1}], ids=str
)
def test_an_error_is_printed_once_and_without_torchs(change):
    A, B = matrices()
    with pytest.raises(gg.OperandError) as caught:
        KITCHEN(A, B, **operands_of() | change)
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("method", ["reference", "explain", "source", "build"])
def test_other_methods_refuse_the_same(method):
    A, B = matrices()
    keywords = {} if method == "reference" else {"arch": "sm90"}
    with pytest.raises(gg.OperandError, match="operand `row` is None"):
        getattr(KITCHEN, method)(A, B, **operands_of() | {"row": None}, **keywords)
    with pytest.raises(gg.ShapeMismatch, match=r"it must be \(10,\)"):
        getattr(KITCHEN, method)(A, B, **operands_of() | {"row": torch.ones(3)}, **keywords)


@pytest.mark.parametrize("method", ["explain", "source", "build"])
def test_the_arch_must_be_known(method, monkeypatch):
    A, B = matrices(dtype=torch.bfloat16)
    with pytest.raises(gg.UnsupportedArch, match="unknown arch 'sm70'; gemmgen knows sm80"):
        getattr(PLAIN, method)(A, B, arch="sm70")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gg.UnsupportedArch, match=r"no GPU here .*\n  Name one"):
        getattr(PLAIN, method)(A, B)


@pytest.mark.parametrize(
    "A, B, message",
    [
        (torch.ones(8, 8).double(), torch.ones(8, 8).double(), "no tensor mainloop multiplies f64 by f64"),
        (torch.ones(8, 8).to(FP8[0]), torch.ones(8, 8).to(FP8[0]), "sm80 has no fp8 tensor cores"),
    ],
    ids=["float64", "fp8-before-sm89"],
)
def test_what_an_arch_cannot_run_is_refused_with_the_reason(A, B, message):
    with pytest.raises(gg.GemmgenError, match=message):
        PLAIN.source(A, B, arch="sm80")


@pytest.mark.parametrize("method", ["explain", "source", "build"])
def test_a_config_that_is_illegal_is_refused_with_the_reason(method):
    A = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    for config, reason in (
        (gg.GemmConfig("sm90", (64, 256, 64), (2, 1), "cooperative"), "cooperative takes multiples of 128"),
        (gg.GemmConfig("sm75", (64, 256, 64)), "unknown family 'sm75'"),
    ):
        with pytest.raises(gg.IllegalConfig, match=reason):
            getattr(gg.Gemm(identity, config=config), method)(A, A, arch="sm90")


def test_options_of_gemm_are_checked():
    with pytest.raises(gg.TraceError, match=r"declared with @gg\.epilogue, not function"):
        gg.Gemm(lambda accum: accum)
    with pytest.raises(gg.OperandError, match="save is 'all'\n  It may be"):
        gg.Gemm(identity, save="all")
    with pytest.raises(gg.OperandError, match="config is 'fast'"):
        gg.Gemm(identity, config="fast")
    with pytest.raises(gg.OperandError, match="mainloop is 3"):
        gg.Gemm(identity, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.ones(K), torch.ones(K, N)), "weight (8, 10)\n  x is [..., K] and weight [N, K]"),
        ((torch.ones(()), torch.ones(N, K)), "x is () and weight"),
        ((torch.ones(M, K), torch.ones(1, N, K)), "weight (1, 10, 8)"),
        ((np.ones((M, K)), torch.ones(N, K)), "linear: x is of type ndarray"),
        ((torch.ones(M, K), None), "linear: weight is None"),
    ],
    ids=["transposed", "scalar", "3-D", "numpy", "none"],
)
def test_linear_refuses(arguments, message):
    with pytest.raises(gg.GemmgenError) as caught:
        gg.linear(*arguments, PLAIN)
    assert message in str(caught.value)
    with pytest.raises(gg.OperandError, match="the third argument is of type Epilogue"):
        gg.linear(*matrices(), identity)


def test_out_cannot_be_differentiated():
    A, B = matrices()
    with pytest.raises(gg.NoBackward, match="`identity` with `out=`"):
        PLAIN(A.requires_grad_(), B, out=torch.empty(M, N))
    with torch.no_grad():
        PLAIN(A, B, out=torch.empty(M, N))


# Random epilogues


def registered(graph: Graph) -> ops.EpilogueOp:
    """An op of its own: one without a backward."""
    graph = replace(graph, name="random_on_the_cpu")
    return ops.register({DType.F32: graph, DType.I32: graph})


def shaped(axes: Axes, batch: int, m: int, n: int) -> tuple[int, ...]:
    """The shape in which torch broadcasts an operand of these axes."""
    return (batch, m if Axes.COL in axes else 1, n if Axes.ROW in axes else 1)


@settings(max_examples=60)
@given(epilogues(max_ops=8), st.integers(0, 2**31), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
       st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)))  # fmt: skip
def test_random_epilogues_agree_with_the_reference_and_with_torch(graph, seed, dtype, extents):
    L, m, n, k = extents
    torch.manual_seed(seed)
    A, B = uniform(L, m, k, dtype=dtype), uniform(L, k, n, dtype=dtype)
    wide = {p.name: uniform(*shaped(p.axes, L, m, n), dtype=dtype) for p in graph.parameters}
    plain = {"scalar": (L,), "row": (L, n), "col": (L, m), "tile": (L, m, n)}
    operands = {name: value.reshape(plain[name]) for name, value in wide.items()}
    op = registered(graph)
    got = op.cpu(A, B, operands, None)
    reference = op.reference(A, B, operands)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    accum = torch.matmul(A.to(compute), B.to(compute))
    direct = evaluate(graph, accum, wide, {r.name: r.dtype for r in graph.results}, compute)
    for result, mine, want in zip(graph.results, got, reference, strict=True):
        assert mine.shape == want.shape and want.dtype == torch.float64
        rounded = direct[result.name].reshape(want.shape).to(mine.dtype)
        assert torch.equal(mine.nan_to_num(7).double(), rounded.nan_to_num(7).double())
        if dtype == torch.float64:  # the same arithmetic, so that only the last rounding differs
            wanted = round_to(want, result.dtype) if result.dtype else want
            assert torch.equal(mine.nan_to_num(7).double(), wanted.nan_to_num(7).double())
