"""The contract on every path: fused sm90, batched, both split-K, swapped, the sm80 fallback, split, pointwise, CPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gemmgen as gg
from tests.gpu.test_fused import CUDA, assert_exact, cluster_split, kitchen, matrices, operands_of, swapped
from tests.gpu.test_ways import split
from tests.oracle import integers, listed

gpu = pytest.mark.gpu(sm=90)


@dataclass(frozen=True)
class Path:
    """A way to run a GEMM, and a problem that takes it."""

    M: int
    N: int
    K: int
    lead: tuple[int, ...] = ()
    config: gg.GemmConfig | None = None
    is_split: bool = False
    device: str = CUDA

    def gemm(self, fn: gg.Epilogue) -> gg.Gemm:
        return gg.Gemm(fn, config=self.config)

    def call(self, op: gg.Gemm, A: Tensor, B: Tensor, out_dtype: torch.dtype | None = None, **operands: Tensor | float):
        if self.is_split and self.device != "cpu":
            return split(op, A, B, operands, out_dtype)
        return op(A, B, out_dtype=out_dtype, **operands)

    def zeros(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """Matrices whose accumulator is 0."""
        A = torch.zeros(*self.lead, self.M, self.K, dtype=dtype, device=self.device)
        return A, torch.zeros(*self.lead, self.N, self.K, dtype=dtype, device=self.device).mT

    def problem(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, dict[str, Tensor | float]]:
        """Whole numbers for `kitchen`."""
        A, B = matrices(self.M, self.N, self.K, "nt", dtype, lead=self.lead, device=self.device)
        return A, B, operands_of(self.M, self.N, dtype=dtype, lead=self.lead, device=self.device)


SM90 = gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative")
STREAM_K = gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative", scheduler="stream_k", split_k=2)
PATHS = {
    "cpu": Path(40, 72, 16, device="cpu"),
    "fused": Path(200, 272, 72, config=SM90),
    "batched": Path(136, 272, 72, lead=(3,), config=SM90),
    "split-k": Path(200, 272, 264, config=STREAM_K),
    "swapped": Path(17, 272, 264, config=swapped((64, 16, 128))),
    "cluster-split": Path(17, 272, 264, config=cluster_split((64, 16, 128), 2)),
    "cluster-shares": Path(77, 272, 264, config=cluster_split((64, 32, 128), 2)),
    "fallback": Path(77, 131, 45),
    "split": Path(200, 272, 72, is_split=True),
    "pointwise": Path(200, 272, 0),
}
every_path = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if name == "cpu" else gpu, id=name) for name, path in PATHS.items()]
)
with_a_product = pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[] if name == "cpu" else gpu, id=name) for name, p in PATHS.items() if p.K]
)


@gpu
def test_the_paths_are_what_they_are_called():
    def plan_of(path: Path):
        op, (A, B, operands) = path.gemm(kitchen), path.problem()
        return op._op.runner.plan(A, B, op._named(operands))

    found = {name: plan_of(path) for name, path in PATHS.items() if name not in ("cpu", "split")}
    assert {name: plan.way for name, plan in found.items()} == {
        **dict.fromkeys(set(PATHS) - {"cpu", "split", "pointwise"}, "fused"),
        "pointwise": "pointwise",
    }
    assert found["fallback"].config.family == "sm80" and found["fused"].config == SM90
    assert found["split-k"].config.split_k == 2 and found["swapped"].config.swapped


# Numerics. One epilogue of many functions, chosen by a Col, so that each path compiles one kernel for all.

FUNCTIONS = (
    lambda x: x, gg.gelu, gg.gelu_tanh, gg.silu, gg.sigmoid, gg.mish, gg.softplus, gg.quick_gelu, gg.tanh,
    lambda x: gg.log1p(gg.abs(x)), gg.hardswish, gg.erf,
)  # fmt: skip
IDENTITY, GELU, GELU_TANH, SOFTPLUS, LOG1P = 0, 1, 2, 6, 9
POINTS = [0.0, -0.0, 1e-40, 1e-30, 1e-8, -1e-8, 1e-4, -1e-4, 15.0, -15.0, 40.0, -40.0, 88.0, -88.0, 1e4, -1e4, 1e30,
          -1e30, 3e38, -3e38]  # fmt: skip


@gg.epilogue
def zoo(accum, row: gg.Row, which: gg.Col):
    value = accum + row
    result = value
    for i, function in enumerate(FUNCTIONS):
        result = gg.where(which == i, function(value), result)
    return result


def zoo_call(path: Path, row: Tensor | None = None):
    """A, B, operands: which function row m computes is m modulo their number; the points are along N."""
    A, B = path.zeros()
    points = torch.cat([torch.tensor(POINTS), torch.linspace(-7, 7, path.N - len(POINTS))])
    row = points if row is None else row
    which = torch.arange(path.M).remainder(len(FUNCTIONS)).float()
    return A, B, {"row": row.to(path.device), "which": which.to(path.device)}


def rows_of(result: Tensor, function: int) -> Tensor:
    return result[..., function :: len(FUNCTIONS), :]


@with_a_product
def test_the_accumulator_is_not_rounded_before_the_epilogue(path):
    op, (A, B) = path.gemm(zoo), path.zeros()
    A[..., 0], A[..., 1] = 256, 1  # 257 is no bf16
    B[..., :2, :] = 1
    _, _, operands = zoo_call(path, row=torch.full((path.N,), -256.0))
    assert (rows_of(path.call(op, A, B, **operands), IDENTITY) == 1).all()


@every_path
def test_the_two_gelus_are_never_mixed_up(path):
    op, (A, B, operands) = path.gemm(zoo), zoo_call(path)
    result = path.call(op, A, B, out_dtype=torch.float32, **operands)
    x = operands["row"].double()
    for function, form, other in ((GELU, "none", "tanh"), (GELU_TANH, "tanh", "none")):
        mine = rows_of(result, function).double()[..., 20:]
        right = (mine - torch.nn.functional.gelu(x, approximate=form)[20:]).abs().max()
        wrong = (mine - torch.nn.functional.gelu(x, approximate=other)[20:]).abs().max()
        assert right < 2e-6 < 2e-4 < wrong


@every_path
def test_activations_of_finite_values_are_finite(path):
    op, (A, B, operands) = path.gemm(zoo), zoo_call(path)
    result = path.call(op, A, B, **operands)
    assert result.dtype == torch.bfloat16
    assert result.isfinite().all()


@every_path
def test_functions_are_accurate_at_both_ends(path):
    op, (A, B, operands) = path.gemm(zoo), zoo_call(path)
    result = path.call(op, A, B, out_dtype=torch.float32, **operands)
    x = operands["row"].double()
    for function, want in ((SOFTPLUS, torch.logaddexp(x, torch.zeros_like(x))), (LOG1P, x.abs().log1p())):
        mine = rows_of(result, function).double()
        error = (mine - want).abs() / want.clamp(min=1e-37)  # below that fp32 is denormal
        assert error.max() < 2e-6, f"at {x[error.flatten(0, -2).amax(0).argmax()]}: {error.max():.1e}"


@pytest.mark.parametrize("path", [
    pytest.param(PATHS[name], marks=[] if name == "cpu" else gpu, id=name) for name in ("cpu", "fused", "fallback")
])  # fmt: skip
def test_slopes_at_finite_values_are_finite(path):
    op, (A, B, operands) = path.gemm(zoo), zoo_call(path)
    leaves = [A.requires_grad_(), operands["row"].requires_grad_()]
    results = op(A, B, **operands)
    gradients = torch.autograd.grad(results, leaves, torch.ones_like(results))
    assert all(gradient.isfinite().all() for gradient in gradients)


@gg.epilogue
def propagating(accum, tile: gg.Tile):
    value = accum + tile
    return {
        "relu": gg.relu(value),
        "clamp": gg.clamp(value, -1, 1),
        "maximum": gg.maximum(gg.minimum(value, 3), -3),
        "largest": gg.amax(value, over="N"),
        "extreme": gg.max(value, over="M"),
    }


@every_path
def test_nan_and_inf_pass_in_vector_lanes_and_tails(path):
    op, (A, B) = path.gemm(propagating), path.zeros()
    tile = integers(*path.lead, path.M, path.N).to(torch.bfloat16)
    flat = tile.view(-1)
    # every lane, and not every row and column
    flat[::1009], flat[5::1013], flat[7::1019] = float("nan"), float("inf"), float("-inf")
    tile[..., -1, -1] = tile[..., 0, -1] = tile[..., -1, 0] = float("nan")  # and the last of the tails
    tile = tile.to(path.device)
    results = path.call(op, A, B, tile=tile)
    value = tile.cpu().float()
    want = {
        "relu": torch.relu(value), "clamp": value.clamp(-1, 1),
        "maximum": value.minimum(torch.tensor(3.0)).maximum(torch.tensor(-3.0)),
        "largest": value.amax(-1), "extreme": value.max(-2).values,
    }  # fmt: skip
    for name, result in results.items():
        torch.testing.assert_close(result.cpu().float(), want[name], rtol=0, atol=0, equal_nan=True, msg=name)


@gg.epilogue
def eight_bits(accum, col: gg.Col):
    value = accum * col
    return value.to(torch.float8_e4m3fn), value.to(torch.float8_e5m2), value.to(torch.int8)


@with_a_product
def test_8_bit_results_saturate_and_fp8_keeps_nan(path):
    op, (A, B) = path.gemm(eight_bits), path.zeros()
    A[..., 0], B[..., 0, :] = 1, 1
    special = [float("inf"), float("-inf"), float("nan")]
    col = torch.tensor([1e9, -1e9, *special, 0.5, 1.5, 2.5, -0.5, 448, 464, 57344, 1e5])
    col = col.repeat(path.M)[: path.M].to(path.device)
    e4m3, e5m2, int8 = path.call(op, A, B, col=col)
    x = col.cpu().unsqueeze(-1).expand(path.M, path.N)
    for got, bound in ((e4m3, 448.0), (e5m2, 57344.0)):
        assert torch.equal(got.cpu().float().isnan(), x.isnan().expand(got.shape))
        want = x.clamp(-bound, bound).to(got.dtype).float().nan_to_num(nan=7.0)
        assert torch.equal(got.cpu().float().nan_to_num(nan=7.0), want.expand(got.shape))
    want = x.nan_to_num(nan=0.0).clamp(-128, 127).round().to(torch.int8)
    assert torch.equal(int8.cpu(), want.expand(int8.shape))


@with_a_product
def test_row_and_col_are_never_mixed_up_at_m_equal_n(path):
    square = Path(path.N, path.N, path.K, path.lead, path.config, path.is_split, path.device)
    op, (A, B, operands) = path.gemm(kitchen), square.problem()
    assert_exact(op, A, B, operands, path.call(op, A, B, torch.float32, **operands))


@gg.epilogue
def ignoring(accum, row: gg.Row, which: gg.Col, tile: gg.Tile, other: gg.Row):
    return accum + row - which


@every_path
def test_operands_that_the_graph_does_not_use_are_never_read(path):
    op, (A, B, operands) = path.gemm(ignoring), path.problem()
    row, which = operands["row"].float(), operands["col"].float()
    poison = {"tile": torch.full((path.M, path.N), float("nan"), device=path.device, dtype=torch.bfloat16),
              "other": torch.full((path.N + 1,), float("nan"), device=path.device)[1:]}  # fmt: skip
    result = path.call(op, A, B, row=row, which=which, **poison)
    want = A.double() @ B.double() + row.double().unsqueeze(-2) - which.double().unsqueeze(-1)
    assert torch.equal(result.double(), want)


# Layouts


def embedded(x: Tensor, before: int, behind: int) -> tuple[Tensor, Tensor]:
    """A copy of `x` inside NaN: `before` elements in front of each row, `behind` after it. The view and its memory."""
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    shape = *rows.shape[:-1], before + rows.shape[-1] + behind
    memory = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    view = memory[..., before : before + rows.shape[-1]]
    view.copy_(rows)
    return (view if x.dim() > 1 else view[0]), memory


PADDINGS = {"aligned": (8, 8), "misaligned": (1, 2)}
LEADS = [(), (3,)]


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param(CUDA, marks=gpu, id="cuda")])
@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("which", ["A", "B", "row", "col", "tile", "out", "all"])
def test_padding_is_neither_read_nor_written(which, padding, lead, device):
    path = Path(200, 136, 72, lead, device=device)
    op, (A, B, operands) = gg.Gemm(kitchen), path.problem()
    op(A, B, **operands)  # the kernel for aligned operands is there
    tensors = {"A": A, "B": B.mT, **operands}
    for name in list(tensors):
        if which in (name, "all") and name != "alpha":
            tensors[name], _ = embedded(tensors[name], *PADDINGS[padding])
    A, B, operands = tensors.pop("A"), tensors.pop("B").mT, tensors
    if which not in ("out", "all"):
        assert_exact(op, A, B, operands, op(A, B, **operands))
        return
    like = op(A, B, **operands)
    outs = {name: embedded(torch.full_like(x, float("nan")), *PADDINGS[padding]) for name, x in like.items()}
    op(A, B, out={name: view for name, (view, _) in outs.items()}, **operands)
    assert_exact(op, A, B, operands, {name: view for name, (view, _) in outs.items()})
    for view, memory in outs.values():
        view.fill_(float("nan"))
        assert memory.isnan().all()


def layouts(M: int, N: int, K: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B whose memory is anything but a matrix of their own."""

    def drawn(*shape: int) -> Tensor:
        return integers(*shape, dtype=torch.bfloat16, device=device)

    A, B = drawn(M, K), drawn(K, N)
    return {
        "A slides by 8": (drawn(8 * M + K).as_strided((M, K), (8, 1)), B),
        "A slides by 1": (drawn(M + K).as_strided((M, K), (1, 1)), B),
        "B slides by 8": (A, drawn(8 * K + N).as_strided((K, N), (8, 1))),
        "A is one row": (drawn(K).expand(M, K), B),
        "A is one column": (drawn(M, 1).expand(M, K), B),
        "B is one element": (A, drawn(1, 1).expand(K, N)),
        "A of every second column": (drawn(M, 2 * K)[:, ::2], B),
        "A of every second row": (drawn(2 * M, K)[::2], B),
        "B in the middle": (A, drawn(K + 2, N + 3)[1 : K + 1, 2 : N + 2]),
        "A is channels last": (drawn(1, K, 10, M // 10).to(memory_format=torch.channels_last).flatten(2)[0].t(), B),
        "A and B are one": (A[: min(M, N)], A[: min(M, N)].t()),
    }


DEVICES = pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param(CUDA, marks=gpu, id="cuda")])


@DEVICES
@pytest.mark.parametrize("name", layouts(20, 8, 8, "cpu"))
def test_matrices_of_any_memory(name, device):
    A, B = layouts(200, 136, 72, device)[name]
    op, operands = gg.Gemm(kitchen), operands_of(A.shape[0], B.shape[1], dtype=torch.bfloat16, device=device)
    assert_exact(op, A, B, operands, op(A, B, **operands))


@DEVICES
def test_batches_that_overlap_or_are_one(device):
    op, (M, N, K) = gg.Gemm(kitchen), (136, 272, 72)
    memory = integers(M + 16, K, dtype=torch.bfloat16, device=device)
    _, B, operands = Path(M, N, K, (3,), device=device).problem()
    for A in (memory.as_strided((3, M, K), (8 * K, K, 1)), memory[:M].expand(3, M, K)):
        assert_exact(op, A, B, operands, op(A, B, **operands))
    one = {name: x[:1].expand_as(x) if isinstance(x, Tensor) else x for name, x in operands.items()}
    assert_exact(op, A, B[:1].expand_as(B), one, op(A, B[:1].expand_as(B), **one))


@DEVICES
@pytest.mark.parametrize("target", ["A", "B", "tile", "row"])
def test_out_may_be_an_input(target, device):
    op, (A, B, operands) = gg.Gemm(kitchen), Path(136, 136, 136, device=device).problem()
    want = op(A, B, **operands)
    out = {name: torch.empty_like(x) for name, x in want.items()}
    if target == "row":
        operands["row"] = operands["row"].float()
        out["sums"] = operands["row"]
    else:
        out["masked"] = {"A": A, "B": B.mT, "tile": operands["tile"]}[target]
    op(A, B, out=out, **operands)
    assert all(torch.equal(out[name], want[name]) for name in want)


# Sizes


@gg.epilogue
def shifted(accum, row: gg.Row):
    return gg.relu(accum + row)


@gpu
@pytest.mark.parametrize("kind", ["fused", "fallback", "split"])
def test_more_elements_than_an_int32_counts(kind):
    M, N, K = 2**16 + 8, 2**15 + (1 if kind == "fallback" else 8), 8
    A, B = matrices(M, N, K, "nt", torch.bfloat16)
    row = integers(N, dtype=torch.bfloat16, device=CUDA)
    op = gg.Gemm(shifted, config=SM90 if kind == "fused" else None)
    result = split(op, A, B, {"row": row}) if kind == "split" else op(A, B, row=row)
    for rows in (slice(0, 300), slice(2**31 // N - 100, 2**31 // N + 100), slice(M - 300, M)):
        assert torch.equal(result[rows], torch.relu(A[rows] @ B + row))


@gpu
def test_gradients_of_more_elements_than_an_int32_counts():
    M, N, K = 2**16 + 8, 2**15 + 8, 8
    A, B = (x.requires_grad_() for x in matrices(M, N, K, "nt", torch.bfloat16))
    row = integers(N, device=CUDA).requires_grad_()
    result = gg.Gemm(shifted, config=SM90)(A, B, row=row)
    result.backward(torch.ones((), dtype=torch.bfloat16, device=CUDA).expand_as(result))
    rows = slice(M - 300, M)
    passed = (A[rows].detach() @ B.detach() + row.detach() > 0).double()
    # torch's own product, which may add the parts of a long K in bf16
    torch.testing.assert_close(A.grad[rows].double(), passed @ B.detach().double().t(), rtol=2e-2, atol=2)
    count = torch.zeros(N, device=CUDA)
    for part in A.detach().split(2**13):
        count += (part @ B.detach() + row.detach() > 0).sum(0)
    assert torch.equal(row.grad, count)


@gpu
@pytest.mark.parametrize("kind", ["fused", "fallback", "split"])
@pytest.mark.parametrize("which", ["A", "B", "tile", "D"])
def test_batch_strides_beyond_an_int32(which, kind):
    M, N, K = (136, 272, 72) if kind != "fallback" else (33, 45, 21)
    path = Path(M, N, K, (2,), is_split=kind == "split")
    op, (A, B, operands) = gg.Gemm(kitchen), path.problem()
    far = 2**31 + 64

    def spread(x: Tensor) -> Tensor:
        memory = torch.empty(far + x.shape[1] * x.shape[2], dtype=x.dtype, device=CUDA)
        return memory.as_strided(x.shape, (far, x.shape[2], 1)).copy_(x)

    if which == "D":
        if kind == "split":
            pytest.skip("split computes into its own results")
        out = {name: torch.empty_like(x) for name, x in op(A, B, **operands).items()}
        out["D"] = spread(out["D"])
        assert_exact(op, A, B, operands, op(A, B, out=out, **operands))
        return
    A = spread(A) if which == "A" else A
    B = spread(B.mT).mT if which == "B" else B
    operands |= {"tile": spread(operands["tile"])} if which == "tile" else {}
    assert_exact(op, A, B, operands, path.call(op, A, B, **operands))


@gpu
@pytest.mark.parametrize("kind", ["fused", "fallback", "split"])
def test_more_batches_than_a_grid_has(kind):
    M, N, K = (8, 16, 8) if kind != "fallback" else (3, 5, 7)
    path = Path(M, N, K, (65_535 + 700,), config=SM90 if kind == "fused" else None, is_split=kind == "split")
    op, (A, B, operands) = path.gemm(kitchen), path.problem()
    assert_exact(op, A, B, operands, path.call(op, A, B, **operands))


@gpu
@pytest.mark.parametrize("M, N, K", [e for e in itertools.product((0, 1, 3), repeat=3) if min(e) < 3], ids=str)
def test_extents_of_0_and_1_forward_and_backward(M, N, K):
    path = Path(M, N, K)
    op, (A, B, operands) = gg.Gemm(kitchen), path.problem()
    assert_exact(op, A, B, operands, op(A, B, **operands))
    leaves = {name: x.requires_grad_() for name, x in (("A", A), ("B", B), *operands.items()) if isinstance(x, Tensor)}
    results = op(A, B, **operands)
    cotangents = [integers(*x.shape, dtype=x.dtype, device=CUDA) for x in results.values()]
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), cotangents, materialize_grads=True)
    cpu = {name: x.detach().cpu().requires_grad_() for name, x in leaves.items()}
    theirs = op(cpu["A"], cpu["B"], **{name: cpu.get(name, x) for name, x in operands.items()})
    wanted = torch.autograd.grad(
        list(theirs.values()), list(cpu.values()), [x.cpu() for x in cotangents], materialize_grads=True
    )
    for name, mine, want in zip(leaves, gradients, wanted, strict=True):
        assert torch.equal(mine.cpu(), want), name  # whole numbers


# Repetition, streams, graphs


def dirty_memory() -> None:
    """Fill what the allocator will hand out next with NaN."""
    blocks = [torch.full((2**n,), float("nan"), device=CUDA) for n in range(8, 24) for _ in range(3)]
    del blocks


def run_all(path: Path, op: gg.Gemm, A: Tensor, B: Tensor, operands: Mapping[str, Tensor | float]) -> list[Tensor]:
    """The results and, where the path has a backward, the gradients."""
    if path.is_split or (path.config is not None and path.config.split_k > 1):
        return listed(path.call(op, A, B, **operands))
    leaves = [x.detach().requires_grad_() for x in (A, B, operands["row"], operands["col"], operands["tile"])]
    named = dict(operands) | dict(zip(("row", "col", "tile"), leaves[2:], strict=True))
    results = listed(op(leaves[0], leaves[1], **named))
    return [*results, *torch.autograd.grad([x.float().sum() for x in results], leaves)]


@pytest.mark.parametrize("path", [pytest.param(p, marks=gpu, id=name) for name, p in PATHS.items() if name != "cpu"])
def test_the_same_bits_every_time_whatever_memory_holds(path):
    op, (A, B, operands) = path.gemm(kitchen), path.problem()
    A, operands["tile"] = torch.randn_like(A), torch.randn_like(operands["tile"])
    first = run_all(path, op, A, B, operands)
    for _ in range(4):
        dirty_memory()
        for one, two in zip(first, run_all(path, op, A, B, operands), strict=True):
            assert torch.equal(one.nan_to_num(nan=7.0), two.nan_to_num(nan=7.0))


@pytest.mark.parametrize("path", [pytest.param(p, marks=gpu, id=name) for name, p in PATHS.items() if name != "cpu"])
def test_two_streams_at_once(path):
    op, problems = path.gemm(kitchen), [path.problem() for _ in range(2)]
    for A, B, operands in problems:
        path.call(op, A, B, **operands)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in problems], [[], []]
    for _ in range(30):
        for stream, (A, B, operands), results in zip(streams, problems, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(path.call(op, A, B, **operands))
    torch.cuda.synchronize()
    for (A, B, operands), results in zip(problems, found, strict=True):
        for each in results[:: len(results) - 1]:
            assert_exact(op, A, B, operands, each)
        assert all(torch.equal(x, y) for one in results for x, y in zip(listed(one), listed(results[0]), strict=True))


@pytest.mark.parametrize("path", [pytest.param(p, marks=gpu, id=name) for name, p in PATHS.items() if name != "cpu"])
def test_a_graph_replays_with_new_inputs(path):
    op, (A, B, operands) = path.gemm(kitchen), path.problem()
    path.call(op, A, B, **operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = path.call(op, A, B, **operands)
    for _ in range(3):
        for x in (A, operands["tile"], operands["row"], operands["col"]):
            x.copy_(integers(*x.shape, dtype=x.dtype, device=CUDA))
        for result in listed(results):
            result.fill_(float("nan"))
        dirty_memory()
        graph.replay()
        assert_exact(op, A, B, operands, results)


SQUARE = 272
SM90_PATHS = {name: path for name, path in PATHS.items() if path.config is not None and not path.lead}


@gg.epilogue
def step(accum, row: gg.Row, col: gg.Col, tile: gg.Tile, scalar: gg.Scalar):
    return gg.sin(accum * 0.125 + row + col + tile) + scalar


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("path", [pytest.param(p, marks=gpu, id=name) for name, p in SM90_PATHS.items()])
def test_a_kernel_that_starts_early_reads_what_the_one_ahead_has_written(path, buffers, is_graphed):
    """Every operand is what the call before wrote; of two buffers, a call overwrites what the one before has read."""
    op = path.gemm(step)
    first = torch.rand(SQUARE, SQUARE, device=CUDA).to(torch.bfloat16)

    def arguments(x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | float]]:
        return x, x.mT, {"row": x[0], "col": x[1], "tile": x, "scalar": x[0, 0]}

    def steps(between: Callable[[], None] = lambda: None) -> list[Tensor]:
        ring = [first.clone(), *(torch.full_like(first, torch.nan) for _ in range(buffers - 1))]
        torch.cuda._sleep(20_000_000)  # all are in the queue before the first runs
        for i in range(24):
            A, B, operands = arguments(ring[i % buffers])
            op(A, B, out=ring[(i + 1) % buffers], **operands)
            between()
        return ring

    A, B, operands = arguments(first)
    plan = op._op.runner.plan(A, B, op._named(operands), outs=[torch.empty_like(first)])
    assert not plan.copies_matrices and not any(load.copied for load in plan.loads), "kernels of torch are in between"
    one_by_one = steps(torch.cuda.synchronize)
    assert not torch.equal(one_by_one[0], one_by_one[1])
    found = steps()
    if is_graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = steps()
        graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, one_by_one, strict=True))


@gpu
def test_a_captured_kernel_waits_for_another_stream_too():
    """The second call comes behind the first, a kernel that lets it start early, and behind work of another stream."""
    op = PATHS["fused"].gemm(step)
    x = torch.rand(SQUARE, SQUARE, device=CUDA).to(torch.bfloat16)
    others = {"row": x[0], "col": x[1], "tile": x, "scalar": x[0, 0]}
    want, A, other = op(x, x.mT, **others), torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(2_000_000)
            A.copy_(x)
        op(x, x.mT, **others)
        torch.cuda.current_stream().wait_stream(other)
        found = op(A, x.mT, **others)
    graph.replay()
    assert torch.equal(found, want)


CAPTURED_FIRST = """
import sys, torch
import tests.gpu.test_contract as contract
path = contract.PATHS[sys.argv[1]]
op, (A, B, operands) = path.gemm(contract.kitchen), path.problem()
torch.mm(A[0] if A.dim() == 3 else A, B[0] if B.dim() == 3 else B)  # torch's own libraries are there
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    results = path.call(op, A, B, **operands)
for _ in range(2):
    A.copy_(contract.integers(*A.shape, dtype=A.dtype, device="cuda"))
    graph.replay()
    contract.assert_exact(op, A, B, operands, results)
"""


def run_program(text: str, *args: str, **environment: str) -> str:
    command = [sys.executable, "-c", text, *args]
    whole = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=whole, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in PATHS if name != "cpu"])
def test_the_first_use_may_be_captured(name):
    run_program(CAPTURED_FIRST, name)


OTHER_DEVICE = """
import torch
import tests.gpu.test_contract as contract
op, path = contract.gg.Gemm(contract.kitchen), contract.Path(200, 136, 72, device="cuda:1")
A, B, operands = path.problem()
assert torch.cuda.current_device() == 0
contract.assert_exact(op, A, B, operands, op(A, B, **operands))
leaf = A.requires_grad_()
sum(x.float().sum() for x in op(leaf, B, **operands).values()).backward()
assert leaf.grad.device.index == 1 and torch.cuda.current_device() == 0
here = contract.Path(200, 136, 72).problem()
contract.assert_exact(op, *here, op(here[0], here[1], **here[2]))
try:
    op(here[0], B, **operands)
except contract.gg.OperandError as error:
    assert "cuda:1" in str(error)
else:
    raise SystemExit("operands of two devices were taken")
"""
USE = """
import tests.gpu.test_contract as contract
op, (A, B, operands) = contract.gg.Gemm(contract.kitchen), contract.Path(200, 136, 72).problem()
contract.assert_exact(op, A, B, operands, op(A, B, **operands))
"""


@gpu
def test_first_use_on_another_device_than_the_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_program(OTHER_DEVICE)


@gpu
def test_any_visible_device_is_used():
    run_program(USE, CUDA_VISIBLE_DEVICES=str(torch.cuda.device_count() - 1))


# Failures, processes, threads


FAILED_LAUNCH = """
import tests.gpu.test_contract as contract
op, (A, B, operands) = contract.gg.Gemm(contract.kitchen, config=contract.SM90), contract.PATHS["fused"].problem()
op(A, B, **operands)
kernel = op._op.runner.plan(A, B, op._named(operands)).kernel
handle, kernel._handle = kernel._handle, None
try:
    op(A, B, **operands)
except contract.gg.LaunchError as error:
    assert f"`{kernel.name}` was not launched" in str(error) and "M=200, N=272, K=72" in str(error), error
else:
    raise SystemExit("nothing was raised")
kernel._handle = handle
contract.assert_exact(op, A, B, operands, op(A, B, **operands))
"""


@gpu
def test_a_failed_launch_names_the_kernel_and_leaves_the_process_usable():
    run_program(FAILED_LAUNCH, GEMMGEN_DISPATCHER="0")  # C++ keeps a handle of its own


@DEVICES
def test_threads_share_an_op(device):
    op, path = gg.Gemm(kitchen), Path(200, 136, 72, device=device)
    A, B, operands = path.problem()
    want, faults = listed(op(A, B, **operands)), []

    def work() -> None:
        for _ in range(20):
            got = listed(op(A, B, **operands))
            faults.extend(1 for x, y in zip(got, want, strict=True) if not torch.equal(x, y))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


FORKED = """
import os, sys, torch
import tests.gpu.test_contract as contract
device = sys.argv[1]
torch.set_num_threads(1)  # libgomp's threads do not survive a fork
op, (A, B, operands) = contract.gg.Gemm(contract.kitchen), contract.Path(200, 136, 72, device=device).problem()
op(A, B, **operands)
child = os.fork()
if child == 0:
    try:
        contract.assert_exact(op, A, B, operands, op(A, B, **operands))
    except RuntimeError as error:  # LaunchError is one too
        os._exit(3 if "fork" in str(error) or "initialization" in str(error) else 4)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if device == "cpu" else 3)
contract.assert_exact(op, A, B, operands, op(A, B, **operands))
"""


@DEVICES
def test_fork_after_use_works_on_the_cpu_and_is_refused_with_cuda(device):
    run_program(FORKED, device)


SPAWNED = """
import multiprocessing, sys
import tests.gpu.test_contract as contract
def work(op, device):
    A, B, operands = contract.Path(200, 136, 72, device=device).problem()
    contract.assert_exact(op, A, B, operands, op(A, B, **operands))
if __name__ == "__main__":
    op, device = contract.gg.Gemm(contract.kitchen), sys.argv[1]
    work(op, device)
    processes = [multiprocessing.get_context("spawn").Process(target=work, args=(op, device)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
"""


@DEVICES
def test_an_op_goes_to_spawned_processes(device, tmp_path):
    (tmp_path / "spawned.py").write_text(SPAWNED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "spawned.py"), device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
