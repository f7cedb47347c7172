"""Faults that a reader of the documentation ran into, each with the call that showed it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.autograd import forward_ad

import gemmgen as gg
from gemmgen.__main__ import main
from gemmgen.errors import GemmgenError, NoBackward, OperandError, ShapeMismatch, TraceError
from gemmgen.jit.cache import Cache
from gemmgen.settings import settings

A, B, BIAS = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)


@gg.epilogue
def bias_gelu(accum: gg.Value, bias: gg.Row) -> gg.Value:
    return gg.gelu(accum + bias)


@gg.epilogue
def residual_bias(accum: gg.Value, bias: gg.Row, residual: gg.Tile) -> gg.Value:
    return accum + bias + residual


OP = gg.Gemm(bias_gelu)


class Doubled:
    """A callable object that has an attribute of a name that `Epilogue` uses itself."""

    def __init__(self) -> None:
        self.fn = gg.relu

    def __call__(self, accum: gg.Value) -> gg.Value:
        return 2 * self.fn(accum)


def test_an_attribute_of_a_callable_object_is_not_taken_for_it() -> None:
    torch.testing.assert_close(gg.Gemm(gg.epilogue(Doubled()))(A, B), 2 * torch.relu(A @ B))


def test_an_epilogue_is_pickled_by_reference() -> None:
    assert pickle.loads(pickle.dumps(bias_gelu)) is bias_gelu
    assert copy.deepcopy(bias_gelu) is bias_gelu
    nameless = gg.epilogue(Doubled())
    assert copy.deepcopy(nameless) is nameless
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(nameless)


def test_a_chain_says_what_it_was_given() -> None:
    with pytest.raises(OperandError, match="Epilogue"):
        gg.chain(bias_gelu, OP)  # type: ignore[arg-type]
    both = gg.chain(OP, OP)
    for arguments in ((None, B.t(), B), (A, None, B), (A, B.t(), 3)):
        with pytest.raises(OperandError, match="chain"):
            both.linear(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch):
        both.linear(torch.ones(()), B.t(), B)


# Constants


@pytest.mark.parametrize(
    "number", ["3", b"3", 10**400, torch.ones((), requires_grad=True), torch.ones((), device="meta")]
)
def test_what_is_no_constant_is_refused(number: object) -> None:
    with pytest.raises(TraceError):
        gg.Gemm(gg.epilogue(lambda accum: accum + number))
    with pytest.raises(TraceError):
        gg.Gemm(gg.epilogue(lambda accum: gg.clamp(accum, number)))  # type: ignore[arg-type]


def test_the_slope_of_leaky_relu_may_be_an_operand() -> None:
    def prelu(accum: gg.Value, slope: gg.Row) -> gg.Value:
        return gg.leaky_relu(accum, slope)

    leaves = [x.clone().requires_grad_() for x in (A, B, BIAS)]
    ours = gg.Gemm(gg.epilogue(prelu))(*leaves[:2], slope=leaves[2])
    assert isinstance(ours, Tensor)
    accum = leaves[0] @ leaves[1]
    theirs = torch.where(accum > 0, accum, accum * leaves[2])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


@pytest.mark.parametrize("annotation", ["gg.Rwo", "[N] row"])
def test_a_string_annotation_without_a_meaning_is_refused(annotation: str) -> None:
    def epilogue(accum: gg.Value, bias: object) -> gg.Value:
        return accum

    epilogue.__annotations__ = {"bias": annotation}
    with pytest.raises(TraceError, match="not annotated"):
        gg.Gemm(gg.epilogue(epilogue))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_a_result_that_no_kernel_stores_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TraceError, match="no kernel stores"):
        gg.Gemm(gg.epilogue(lambda accum: (accum > 0).to(dtype)))


# Shapes


def test_out_with_other_batch_dimensions_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="batch"):
        OP(A.expand(2, 6, 3, 4), B, bias=BIAS, out=torch.empty(6, 2, 3, 5))


@pytest.mark.parametrize(("M", "N", "K"), [(3, 5, 0), (3, 0, 4), (0, 5, 4), (0, 0, 0)])
def test_no_extent_of_0_confuses_the_batch(M: int, N: int, K: int) -> None:
    op = gg.Gemm(residual_bias)
    x, weight = torch.randn(2, 7, M, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    bias, residual = torch.randn(N, requires_grad=True), torch.randn(2, 7, M, N, requires_grad=True)
    wanted = torch.nn.functional.linear(x, weight, bias) + residual
    chained = gg.chain(op, OP)
    square = torch.randn(N, N)
    for ours in (
        op(x, weight.t(), bias=bias, residual=residual),
        op(x[0], weight.t(), bias=bias, residual=residual[0]),
        gg.linear(x, weight, op, bias=bias, residual=residual),
    ):
        torch.testing.assert_close(ours, wanted if ours.dim() == 4 else wanted[0])
        gradients = torch.autograd.grad(ours.sum(), (x, weight, bias, residual))
        assert [g.shape for g in gradients] == [x.shape, weight.shape, bias.shape, residual.shape]
    both = chained.linear(x, weight, square, first={"bias": bias, "residual": residual}, second={"bias": bias})
    assert both.shape == wanted.shape  # type: ignore[union-attr]
    out = torch.empty(2, 7, M, N)
    op(x.detach(), weight.detach().t(), bias=bias.detach(), residual=residual.detach(), out=out)
    torch.testing.assert_close(out, wanted.detach())


# Autograd


@pytest.mark.parametrize("form", ["linear", "batched", "matrix"])
def test_results_may_be_modified_in_place(form: str) -> None:
    def run(*leaves: Tensor) -> Tensor:
        x, bias = leaves
        if form == "linear":
            return gg.linear(x, B.t(), OP, bias=bias)  # type: ignore[return-value]
        return OP(x if form == "batched" else x[0], B, bias=bias)  # type: ignore[return-value]

    leaves = [A.expand(2, 3, 4).clone().requires_grad_(), BIAS.clone().requires_grad_()]
    theirs = torch.nn.functional.gelu((leaves[0] if form != "matrix" else leaves[0][0]) @ B + leaves[1]) * 2
    ours = run(*leaves)
    ours.mul_(2)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


def test_results_made_without_autograd_may_be_modified_under_it() -> None:
    with torch.no_grad():
        result = OP(A, B, bias=BIAS)
    assert isinstance(result, Tensor)
    more = torch.ones(3, 5, requires_grad=True)
    result += more
    torch.testing.assert_close(torch.autograd.grad(result.sum(), more)[0], torch.ones(3, 5))


def _total(A: Tensor) -> Tensor:
    return OP(A, B, bias=BIAS).sum()  # type: ignore[union-attr]


def _chained(A: Tensor) -> Tensor:
    return gg.chain(OP, OP)(A, B, torch.ones(5, 5), first={"bias": BIAS}, second={"bias": BIAS}).sum()  # type: ignore[union-attr]


@pytest.mark.parametrize("fn", [_total, _chained])
def test_forward_mode_never_loses_a_tangent(fn) -> None:  # type: ignore[no-untyped-def]
    ones = torch.ones_like(A)
    with pytest.raises(NoBackward):
        torch.func.jvp(fn, (A,), (ones,))
    with pytest.raises(NoBackward):
        torch.func.jvp(torch.func.grad(fn), (A,), (ones,))
    with pytest.raises(NoBackward):
        torch.func.hessian(fn)(A)
    with forward_ad.dual_level(), pytest.raises(NoBackward):
        fn(forward_ad.make_dual(A, ones))


def test_forward_mode_never_loses_the_tangent_of_a_cotangent() -> None:
    def pulled_back(cotangent: Tensor) -> Tensor:
        _, pull = torch.func.vjp(lambda A: OP(A, B, bias=BIAS), A)
        return pull(cotangent)[0]  # type: ignore[no-any-return]

    cotangent = torch.randn(3, 5)
    with pytest.raises(NoBackward):
        torch.func.jvp(pulled_back, (cotangent,), (cotangent,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_per_sample() -> None:
    def wanted(A: Tensor) -> Tensor:
        return torch.nn.functional.gelu(A @ B + BIAS).sum()

    samples = torch.randn(4, 3, 4)
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(_total))(samples), torch.vmap(torch.func.grad(wanted))(samples)
    )


# Command line and environment


def test_a_file_that_exits_is_reported(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "leaves.py"
    file.write_text("raise SystemExit(3)\n", encoding="utf-8")
    result = CliRunner().invoke(main, ["explain", f"{file}:fn"])
    assert result.exit_code == 1 and "SystemExit" in result.output


def test_an_extent_beyond_32_bits_is_refused() -> None:
    result = CliRunner().invoke(
        main, ["explain", "library:bias", "--arch", "sm90", "--shape", "99999999999999999999,4,4"]
    )
    assert result.exit_code == 1 and "2^31" in result.output


def test_a_cache_folder_of_an_unknown_user_is_an_error_of_ours() -> None:
    with pytest.raises(GemmgenError, match="GEMMGEN_CACHE_DIR"):
        settings({"GEMMGEN_CACHE_DIR": "~no-such-user-here/cache"})


def test_out_whose_rows_overlap_is_refused():
    op = gg.Gemm(gg.library.bias)
    out = torch.zeros(14).as_strided((3, 5), (2, 1))
    with pytest.raises(gg.OperandError, match="share memory"):
        op(torch.randn(3, 4), torch.randn(4, 5), bias=torch.ones(5), out=out)


def test_one_tensor_for_two_results_is_refused():
    @gg.epilogue
    def two(accum):
        return accum, accum + 1

    out = torch.zeros(3, 5)
    with pytest.raises(gg.OperandError, match="two results"):
        gg.Gemm(two)(torch.randn(3, 4), torch.randn(4, 5), out=(out, out))


def test_clearing_the_cache_forgets_measured_times(tmp_path):
    cache = Cache(tmp_path)
    cache.tuned_dir.mkdir()
    (cache.tuned_dir / "entry.json").write_text("{}")
    cache.clear()
    assert not cache.tuned_dir.exists()
