"""What the bench can do without a GPU: compile kernels for sm90, and check the CPU implementation of each case."""

from __future__ import annotations

import time

from rich.console import Console

from bench import check
from bench.cases import Case, draw_inputs, reference
from bench.settings import Settings
from bench.shapes import SHAPES, Shape

ARCH = "sm90"
SMALL = (Shape(33, 40, 48), Shape(64, 64, 64), Shape(1, 24, 16))
KERNELS_TO_BUILD = 2


def run(settings: Settings, console: Console) -> int:
    """Build and check; 1 when a kernel does not compile or an answer is wrong."""
    console.print("No GPU here: kernels are compiled and the CPU implementation is checked, nothing is timed.")
    wrong = [failure for case in settings.cases for failure in _cpu_failures(case, console)]
    wrong += [failure for case in settings.cases[:KERNELS_TO_BUILD] if (failure := _build_failure(case, console))]
    for failure in wrong:
        console.print(f"failed: {failure}", markup=False)
    console.print(
        "Needs a GPU: the GPU times of every rung, the check of the compiled kernels' answers, "
        "torch.compile and Triton compile times.\n"
        "Run `python -m bench` on one; `python -m bench --suite jit` measures the build times here too."
    )
    return 1 if wrong else 0


def _cpu_failures(case: Case, console: Console) -> list[str]:
    failures = [f"{case} {shape} on the CPU: {reason}" for shape in SMALL if (reason := cpu_verdict(case, shape))]
    console.print(f"{case}: CPU answers {'wrong' if failures else 'agree with float64'} at {len(SMALL)} small shapes")
    return failures


def cpu_verdict(case: Case, shape: Shape) -> str | None:
    """Why gemmgen's CPU answer is wrong, or None. At most twice torch's own error is allowed, as on the GPU."""
    from bench import gemmgen_api

    inputs = draw_inputs(case, shape, device="cpu")
    expected = reference(case, inputs)
    try:
        outputs = check.run_poisoned(inputs.bind(gemmgen_api.gemm(case)))
        return check.verdict(check.errors(outputs, expected), check.torch_errors(case, inputs, expected))
    except Exception as error:  # a case that breaks is reported, the next is tried
        return f"{type(error).__name__}: {error}"


def _build_failure(case: Case, console: Console) -> str | None:
    from bench import gemmgen_api

    shape = SHAPES["headline"][0]
    started = time.perf_counter()
    try:
        gemmgen_api.build(case, shape, ARCH)
    except Exception as error:  # as above
        return f"{case} {shape} for {ARCH}: {type(error).__name__}: {error}"
    console.print(f"{case} {shape}: compiled for {ARCH} in {time.perf_counter() - started:.1f} s")
    return None
