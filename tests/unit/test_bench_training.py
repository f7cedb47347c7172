"""The training suite's parts that need no GPU."""

import json

import pytest
import torch

from bench import suite_training as suite
from bench import training_pass
from bench.training_cases import CASES, RUNGS, Size, draw_inputs
from bench.training_check import errors_of, verdict
from gemmgen.ir import REDUCTIONS, Axes
from gemmgen.timing import Timing

SMALL = Size(8, 16, 24)


@pytest.mark.parametrize("name", CASES)
def test_layers_step_on_the_cpu_and_gemmgens_gradients_are_right(name):
    inputs = draw_inputs(CASES[name], SMALL, "cpu")
    layers = {rung: RUNGS[rung](CASES[name], inputs) for rung in ("gemmgen", "eager")}
    found = errors_of(layers, CASES[name], inputs)
    assert list(found["gemmgen"]) == ["result", *inputs.named] and verdict(found["gemmgen"], found["eager"]) is None
    before = inputs.named["weight"].clone()
    layers["gemmgen"].step()
    assert not torch.equal(inputs.named["weight"], before) and inputs.named["weight"].grad is None


@pytest.mark.parametrize("name, backward", [("linear_gelu_tanh", 2), ("mlp_gelu_tanh", 4)])
def test_the_bare_products_are_those_of_the_layer(name, backward):
    inputs = draw_inputs(CASES[name], SMALL, "cpu")
    layer = RUNGS["bare"](CASES[name], inputs)
    _, products = layer.forward_backward()
    shapes = {tuple(product.shape) for product in products}
    assert len(products) == backward and not layer.is_whole
    assert shapes >= {tuple(inputs.named[leaf].shape) for leaf in ("x", "weight")}


def test_an_error_above_twice_eagers_is_named():
    assert "bias is 3.00e-03" in verdict({"x": 1e-3, "bias": 3e-3}, {"x": 1e-3, "bias": 1e-3})
    assert verdict({"x": float("nan")}, {"x": 1e-3}) is not None


def test_rungs_that_cannot_run_have_a_reason_and_rows_are_json():
    timing = Timing.of([100.0, 110.0])
    timings = {"forward": Timing.of([30.0]), "forward_backward": timing, "step": timing}
    whole = suite.Entry("eager", error=1e-3, saved_bytes=2**20, peak_bytes=2**22, timings=timings)
    case = CASES["mlp_gelu_tanh"]
    entries = [whole, suite._prepared(case, "liger", draw_inputs(case, SMALL, "cpu"))]
    rows = [row for entry in entries for row in suite._rows_of(case, SMALL, entry)]
    assert [row["phase"] for row in rows[:4]] == ["forward", "backward", "forward_backward", "step"]
    assert rows[1]["median_us"] == 75.0 and "Liger" in rows[-1]["reason"]
    assert json.loads(json.dumps(rows)) == rows
    assert suite.table_of("title", rows).row_count == 2
    lines = suite.markdown_table(rows).splitlines()
    assert lines[0] == "| case | tokens | hidden | inner | eager |" and lines[2].endswith("| 8 | 16 | 24 | 105 |")


def test_the_pass_moves_the_tiles_that_its_bandwidth_counts():
    graph = training_pass.backward_graph()
    tiles = [p for p in graph.parameters if p.axes is Axes.TILE] + [
        r for r in graph.results if r.node.op not in REDUCTIONS
    ]
    assert len(tiles) == training_pass.TILES and len(graph.parameters) == 2
