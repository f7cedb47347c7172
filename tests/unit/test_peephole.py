"""Cheaper arithmetic for a kernel: fewer instructions, the same bits, and gradients that know nothing of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import gemmgen as gg
from gemmgen.dtypes import DType
from gemmgen.evaluate import evaluate
from gemmgen.ir import Axes, Graph, Op
from gemmgen.peephole import with_fewer_instructions
from gemmgen.pipeline import graph_of

M, N = 64, 48


def bias_gelu(accum, bias: gg.Row):
    return gg.gelu(accum + bias)


def bias_gelu_tanh(accum, bias: gg.Row):
    return gg.gelu_tanh(accum + bias)


def scaled_gelu_tanh(accum, scale_a: gg.Col, scale_b: gg.Row, bias: gg.Row):
    return gg.gelu_tanh(accum * scale_a * scale_b + bias)


def quarter(accum, bias: gg.Row):
    return 0.25 * (accum + bias)


def minus_half(accum, bias: gg.Row):
    return -0.5 * (accum + bias)


def double(accum, bias: gg.Row):
    return 2 * (accum + bias)


def half_of_a_product(accum, gate: gg.Tile, bias: gg.Row):
    return 0.5 * (accum * gate + bias)


def half_step(accum, bias: gg.Row, residual: gg.Tile):
    return residual + 0.5 * (accum + bias)


def two_vectors(accum, bias: gg.Row, shift: gg.Col):
    return 0.5 * (accum + bias + shift)


def negative_bound(accum):
    return gg.tanh(accum * (0.1 + 0.1 * gg.clamp(accum * accum, None, -1.0)))


def third(accum, bias: gg.Row):
    return (accum + bias) / 3


def shared_sum(accum, bias: gg.Row):
    z = accum + bias
    return 0.5 * z + gg.relu(z)


def two_tiles(accum, tile: gg.Tile):
    return 0.5 * (accum + tile)


def loose_bound(accum, bias: gg.Row):
    x = accum + bias
    return gg.tanh(x * (0.1 + 0.1 * gg.clamp(x * x, None, 4.0)))


#            epilogue: operations on whole tiles before and after
FUNCTIONS = {
    bias_gelu: (5, 4),
    bias_gelu_tanh: (8, 6),
    scaled_gelu_tanh: (9, 8),
    quarter: (2, 1),
    minus_half: (2, 2),
    double: (2, 2),
    half_of_a_product: (2, 2),
    half_step: (2, 2),
    two_vectors: (3, 2),
    third: (2, 2),
    shared_sum: (3, 3),
    two_tiles: (2, 2),
    loose_bound: (6, 6),
    negative_bound: (5, 5),
}


def tile_operations(graph: Graph) -> int:
    """Of one element; a product that only feeds a sum is part of its multiply-add."""
    nodes = [node for node in graph.nodes() if node.axes is Axes.TILE and node.op not in (Op.ACCUM, Op.LOAD)]
    uses = Counter(arg for node in graph.nodes() for arg in node.args)
    fused = [n for n in nodes if n.op is Op.ADD and any(a.op is Op.MUL and a in nodes and uses[a] == 1 for a in n.args)]
    return len(nodes) - len(fused)


def results_of(graph: Graph, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    accum = torch.empty(1, M, N).uniform_(-scale, scale, generator=generator)
    accum[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 7.0])[:, None]
    shapes = {Axes.ROW: (1, 1, N), Axes.COL: (1, M, 1), Axes.TILE: (1, M, N)}
    operands = {p.name: torch.rand(shapes[p.axes], generator=generator) + 0.5 for p in graph.parameters}
    for operand in operands.values():
        operand.view(-1)[:4] = torch.tensor([-7.0, 0.0, -0.0, 1.0])  # sums that are zero
    return evaluate(graph, accum, operands, dict.fromkeys(r.name for r in graph.results), torch.float32)[
        graph.results[0].name
    ]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e6])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_no_bit_changes(function, scale):
    graph = graph_of(gg.epilogue(function), DType.F32)
    before, after = results_of(graph, scale), results_of(with_fewer_instructions(graph), scale)
    assert torch.equal(before.nan_to_num(nan=-123.0).view(torch.int32), after.nan_to_num(nan=-123.0).view(torch.int32))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_operations_of_an_element(function):
    graph = graph_of(gg.epilogue(function), DType.F32)
    assert (tile_operations(graph), tile_operations(with_fewer_instructions(graph))) == FUNCTIONS[function]


def test_gradients_keep_the_bound_of_the_square():
    op = gg.Gemm(gg.epilogue(bias_gelu_tanh))
    A = torch.full((1, 8), 1e30, requires_grad=True)
    B, bias = torch.eye(8), torch.zeros(8)
    op(A, B, bias=bias).sum().backward()
    assert torch.equal(A.grad, torch.ones(1, 8))
