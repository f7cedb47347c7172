"""The suites `longtail` and `llama` without a GPU: the requests, the replay in turns, the figures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench import llama, longtail
from bench.longtail import LAYER, Gemm, Inputs, Served, break_even, replay, representatives, requests, rows_of
from bench.problem import Problem
from bench.settings import Settings
from gemmgen.tuned import bucket_of


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


def test_llama_covers_every_layer_case_and_m(tmp_path):
    everything = list(llama.problems(Settings((), (), (), tmp_path)))
    assert len(everything) == len(set(everything)) == 11 * 8 * 4
    assert {p.shape.M for p in everything} == {1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
    few = list(llama.problems(Settings((), (), (), tmp_path, ms=(16,))))
    assert few and {p.shape.M for p in few} == {16}
    assert all(isinstance(p, Problem) for p in few)


@pytest.mark.parametrize("case", llama.LLAMA_CASES, ids=str)
def test_every_case_of_llama_has_its_epilogue(case):
    from bench import gemmgen_api

    assert gemmgen_api.gemm(case)
