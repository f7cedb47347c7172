"""The suite `longtail` without a GPU: the requests, the replay in turns, the figures."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

import gemmgen as gg
from bench import longtail
from bench.longtail import LAYER, Gemm, Inputs, Served, break_even, replay, representatives, requests, rows_of
from gemmgen.tuned import bucket_of
from gemmgen.ways import SPLIT, Fused


def test_all_requests_are_there_in_a_shuffled_order():
    lengths = requests()
    assert len(lengths) == 28185
    assert max(lengths) == 14050 <= longtail.MAX_M
    assert lengths == requests()
    assert lengths != requests(seed=1)
    assert sorted(lengths) == sorted(requests(seed=1))
    assert lengths != sorted(lengths)


def test_one_representative_for_each_bucket():
    lengths = [1, 2, 3, 1000, 1001, 1024, 1025]
    assert representatives(lengths) == [2, 1001, 1025]
    assert len(representatives(requests())) == len({bucket_of(M) for M in requests()}) <= 22


def test_rungs_serve_the_same_requests_in_turns():
    lengths, seen = list(range(100)), {"a": [], "b": []}
    served = {name: Served() for name in seen}

    def timed(call):
        call()
        return 2.0

    replay({name: seen[name].append for name in seen}, served, lengths, float("inf"), timed)
    assert seen["a"] == seen["b"] == lengths
    assert served["a"].gpu_ms == 2.0 * 3


def test_the_budget_ends_the_replay():
    served = {"a": Served()}
    replay({"a": lambda M: None}, served, list(range(100)), -1.0, lambda call: 1.0)
    assert served["a"].gpu_ms == 0.0


def test_a_request_makes_every_call_of_the_layer_once():
    layer = [Gemm("one", 8, 4, "bias", F.linear),
             Gemm("two", 8, 4, "bias_silu_residual", longtail._linear_silu_residual, has_residual=True)]  # fmt: skip
    inputs = Inputs(16, device="cpu", layer=layer)
    for gemm in layer:
        x, weight, operands = inputs.of(gemm, 5)
        assert gemm.eager(x, weight, **operands).shape == (5, 8)
    assert x.data_ptr() == inputs.x[4].data_ptr()


def test_gemmgen_and_torch_agree_on_what_the_layer_computes():
    ops = longtail._gemmgen()
    generator = torch.Generator().manual_seed(0)
    for gemm in LAYER:
        x, weight, bias, residual = (
            torch.randn(*shape, generator=generator) for shape in ((5, 16), (24, 16), (24,), (5, 24))
        )
        operands = {"bias": bias} | ({"residual": residual} if gemm.has_residual else {})
        got = longtail._gemmgen_functions(ops)[gemm.name](x, weight, **operands)
        torch.testing.assert_close(got, gemm.eager(x, weight, **operands))


def row(rung: str, ms: float, **more: float) -> dict[str, object]:
    return {"rung": rung, "ms_per_request": ms, **more}


def test_break_even():
    ours = row("gemmgen", 0.5, prepare_s=2.0)
    assert "pay after 20000 requests" in break_even([ours, row("eager", 0.6), row("x", 0.9)])
    assert "never pay: eager is faster" in break_even([row("gemmgen", 0.7, prepare_s=2.0), row("eager", 0.6)])


def test_rows_of_what_was_served():
    served = {"gemmgen": Served(10.0, 4, [1.0, 5.0, 9000.0]), "eager": Served(20.0, 4, [1.0])}
    first, second = rows_of(served, {"kernels": 3, "prepare_s": 1.0})
    assert first["ms_per_request"] == 2.5
    assert first["worst_call_ms"] == 9.0
    assert first["kernels"] == 3
    assert "kernels" not in second


def replayed(**ours):
    served = {"gemmgen": Served(10.0, 4, [1.0, 5.0, 9000.0]), "eager": Served(20.0, 4, [1.0])}
    served["compiled"] = Served(8.0, 4, [2.0])
    prepared = {"kernels": 3, "kernels_built": 20, "tuned": 12, "tune_s": 4.0, "prepare_s": 5.0, **ours}
    return rows_of(served, prepared)


def test_the_table_of_the_readme():
    text, table, verdict = longtail.markdown_table(replayed()).split("\n\n")

    assert "of 4 of 28185 real requests" in text
    assert table.splitlines()[2:] == [
        "| gemmgen | 4 | 0.01 | 1.000 | 2.500 | 5.0 | 8820.1 | 9.00 | 3 | 20 | 4.0 | 5.0 |",
        "| eager | 4 | 0.02 | 0.500 | 5.000 | 1.0 | 1.0 | 0.00 | - | - | - | - |",
        "| compiled | 4 | 0.01 | 1.250 | 2.000 | 2.0 | 2.0 | 0.00 | - | - | - | - |",
    ]
    assert verdict == "5.0 s of building and measuring never pay: compiled is faster by 0.5000 ms for each request."


def test_a_run_of_gemmgen_alone_has_a_table():
    assert longtail.markdown_table(replayed()[:1]).endswith("No other rung was served.")


def test_kernels_that_differ_in_their_raster_alone_are_one():
    config = gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "pingpong")
    configs = (config, replace(config, raster="N"), replace(config, tile_shape=(64, 128, 64)))
    kernels = longtail._kernels_in(LAYER[0], [*map(Fused, configs), SPLIT])

    assert len(kernels) == 2 and {epilogue for epilogue, _ in kernels} == {"bias"}
