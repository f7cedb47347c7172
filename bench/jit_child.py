"""What the suite `jit` times in a process of its own: `python -m bench.jit_child <what> <arch>` prints JSON seconds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def import_beyond_torch(arch: str) -> dict[str, list[float]]:
    """Importing gemmgen where torch is imported already."""
    import torch  # noqa: F401

    return {"import": [seconds(_import_gemmgen)]}


def _import_gemmgen() -> None:
    import gemmgen  # noqa: F401


def cold(arch: str) -> dict[str, list[float]]:
    """One kernel with an empty cache, then new epilogues with the same operands."""
    first, *others = (lambda op=op: _build(op, arch) for op in map(_op, range(len(ACTIVATIONS))))
    return {"cold_skeleton": [seconds(first)], "new_epilogue": [seconds(build) for build in others]}


def find(arch: str) -> dict[str, list[float]]:
    """Finding a kernel in the cache by its inputs, ahead of time, as `op.build` does."""
    op = _op()
    return {"find_in_cache": [seconds(lambda: _build(op, arch))]}


def first_call(arch: str) -> dict[str, list[float]]:
    """From importing gemmgen to the answer of a kernel that is in the cache, and what follows the import."""
    inputs = _inputs_on_a_started_gpu()
    import_s, load_s = seconds(_import_gemmgen), seconds(lambda: _answer(_op(), inputs))
    return {"first_call": [import_s + load_s], "load": [load_s]}


def background_first_call(arch: str) -> dict[str, list[float]]:
    """The first answer of `compile="background"`, whose fused kernel is not in the cache."""
    inputs, op = _inputs_on_a_started_gpu(), _new_op(compile="background")
    return {"background_first_call": [seconds(lambda: _answer(op, inputs))]}


def tune(arch: str) -> dict[str, list[float]]:
    """Measuring 16 configs of a new epilogue, after another has left their skeletons in the cache."""
    from bench import gemmgen_api

    inputs = _inputs_on_a_started_gpu()
    gemmgen_api.tune(_op(), inputs, most=16)
    return {"tune": [seconds(lambda op=op: gemmgen_api.tune(op, inputs, most=16)) for op in (_new_op(), _new_op())]}


def _inputs_on_a_started_gpu() -> Any:
    """Inputs, torch's own start-up being over: it is not ours."""
    import torch

    from bench.cases import CASES, draw_inputs

    inputs = draw_inputs(CASES["bias_silu"], _shape())
    torch.mm(inputs.A, inputs.B)
    torch.cuda.synchronize()
    return inputs


def _answer(op: Callable[..., object], inputs: Any) -> None:
    import torch

    inputs.bind(op)()
    torch.cuda.synchronize()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


ACTIVATIONS = ("gelu_tanh", "silu", "relu", "gelu", "quick_gelu")


def _op(index: int = 0) -> Callable[..., object]:
    """One of the ops with one `Row` operand and one output: they differ in their arithmetic alone."""
    import gemmgen as gg

    activation = getattr(gg, ACTIVATIONS[index])

    def bias_activation(accum, bias: gg.Row):  # type: ignore[no-untyped-def]
        return activation(accum + bias)

    return gg.Gemm(gg.epilogue(bias_activation))


def _new_op(**options: str) -> Callable[..., object]:
    """An op with the operands of `_op` that no cache knows."""
    import gemmgen as gg

    slope = 1 + time.time_ns() % 1_000_000 / 1e6

    def bias_leaky(accum, bias: gg.Row):  # type: ignore[no-untyped-def]
        return gg.leaky_relu(slope * accum + bias)

    return gg.Gemm(gg.epilogue(bias_leaky), **options)


def _shape() -> object:
    from bench.shapes import SHAPES

    return SHAPES["headline"][0]


def _build(op: Callable[..., object], arch: str) -> None:
    from bench import gemmgen_api
    from bench.cases import CASES, draw_inputs

    gemmgen_api.build_op(op, draw_inputs(CASES["bias_silu"], _shape(), device="meta"), arch)


MEASURES = {"import": import_beyond_torch, "cold": cold, "find": find}
ON_A_GPU = {"first_call": first_call, "background_first_call": background_first_call, "tune": tune}

if __name__ == "__main__":
    what, arch_name = sys.argv[1:]
    measure = (MEASURES | ON_A_GPU)[what]
    print(json.dumps({} if what in ON_A_GPU and not _has_gpu() else measure(arch_name)))
