"""Many calls from processes and threads at once: every k-th result is checked, and memory must stay flat.

    python -m tests.load [--minutes 10] [--calls 200000] [--processes 4] [--threads 2] [--out FILE]

Ends at the first of both limits, writes a summary as JSON, and exits with 1 on a wrong result or a leak. Shapes are
aligned and ragged, M from 1 to 2048; calls run fused, on the sm80 fallback and split, one in eight with its backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import resource
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gemmgen as gg
from bench.environment import REPOSITORY, describe
from gemmgen.device import target_of
from gemmgen.plan import Plan, run
from gemmgen.runtime import bind_call
from gemmgen.ways import SPLIT
from tests.oracle import integers

SM90 = gg.GemmConfig("sm90", (128, 128, 64), (1, 1), "cooperative")
SM80 = gg.GemmConfig("sm80", (64, 64, 32), kernel_schedule="multistage", stages=2, warp_shape=(32, 32, 32))
ROWS = {"cuda": (1, 16, 77, 128, 500, 2048), "cpu": (1, 16, 77)}
ALIGNED, RAGGED = (256, 512), (45, 131)  # K, N
BACKWARD_EACH, SAMPLES = 8, 100
# what a process may grow by from the second tenth of its samples to the last: allocators keep what they once needed
HOST_SLACK_BYTES, DEVICE_SLACK_BYTES = 24 << 20, 64 << 20


@gg.epilogue
def shifted(accum: gg.Value, row: gg.Row) -> gg.Value:
    return gg.relu(accum + row)


@dataclass
class Case:
    """One problem on one path, its inputs made once; whole numbers, so that results are exact."""

    path: str
    M: int
    K: int
    N: int
    device: str
    inputs: tuple[Tensor, Tensor, Tensor] = field(init=False)
    plan: Plan | None = None

    def __post_init__(self) -> None:
        config = {"fused": SM90, "fallback": SM80}.get(self.path)
        self.op = gg.Gemm(shifted, config=config)
        drawn = {"dtype": torch.bfloat16, "device": self.device}
        weight = integers(self.N, self.K, **drawn)
        self.inputs = integers(self.M, self.K, **drawn), weight.t(), integers(self.N, device=self.device)
        if self.path == "split" and self.device != "cpu":
            A, B, row = self.inputs
            binding = bind_call(self.op._op.graph_for, A, B, {"row": row}, None)
            self.plan = SPLIT.plan(binding, target_of(A.device))

    def forward(self) -> Tensor:
        A, B, row = self.inputs
        if self.plan is not None:
            return run(self.plan, (A, B), {"row": row}, A.device)[0]
        return self.op(A, B, row=row)  # type: ignore[return-value]

    def backward(self) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        result = self.op(leaves[0], leaves[1], row=leaves[2])
        assert isinstance(result, Tensor)
        return list(torch.autograd.grad(result, leaves, torch.ones_like(result)))

    def is_right(self, results: list[Tensor]) -> bool:
        """Whether they are the result, or the gradients, that torch computes in float64."""
        A, B, row = (x.double() for x in self.inputs)
        value = A @ B + row
        if len(results) == 1:
            return torch.equal(results[0], value.relu().to(torch.bfloat16))
        mask = (value > 0).double()
        wants = mask @ B.mT, A.mT @ mask, mask.sum(0)
        # torch's own bf16 products may sum in parts
        return all((got.double() - want).norm() <= 1e-2 * want.norm() for got, want in zip(results, wants, strict=True))


@dataclass
class Tally:
    """What a process did. Memory in bytes, one sample each hundredth of the calls."""

    calls: int = 0
    backwards: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)


def cases(device: str) -> list[Case]:
    kind = torch.device(device).type
    problems = {"fused": ALIGNED, "split": ALIGNED, "fallback": RAGGED} if kind == "cuda" else {"cpu": RAGGED}
    return [Case(path, M, *problems[path], device) for path, M in itertools.product(problems, ROWS[kind])]


def _host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _device_bytes() -> int:
    """In use on the device by all processes, code and contexts included."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def work(seed: int, threads: int, calls: int, seconds: float, check_each: int, device: str) -> Tally:
    """One process: `calls` calls shared by its threads, or as many as `seconds` allow."""
    torch.set_num_threads(1)
    tally, lock, ticket = Tally(), threading.Lock(), itertools.count()
    prepared = [cases(device) for _ in range(threads)]
    for case in itertools.chain(*prepared):  # build and load everything: that is no leak
        case.forward()
        if case.plan is None:
            case.backward()
    sample_each, deadline = max(1, calls // SAMPLES), time.monotonic() + seconds

    def sample() -> None:
        tally.host.append(_host_bytes())
        tally.device.append(_device_bytes())

    def one(choose: random.Random, own: list[Case], number: int) -> None:
        case = choose.choice(own)
        is_backward = number % BACKWARD_EACH == 0 and case.plan is None
        results = case.backward() if is_backward else [case.forward()]
        right = case.is_right(results) if number % check_each == 0 else True
        with lock:
            tally.calls += 1
            tally.backwards += is_backward
            tally.checked += number % check_each == 0
            if not right:
                tally.wrong.append(f"call {number}: {case.path} {case.M} x {case.N} x {case.K}")
            if number % sample_each == 0:
                sample()

    def thread(index: int) -> None:
        choose, own = random.Random(100 * seed + index), prepared[index]
        try:
            while (number := next(ticket)) < calls and time.monotonic() < deadline:
                one(choose, own, number)
        except Exception as error:
            with lock:
                tally.wrong.append(f"{type(error).__name__}: {error}")

    def on_stream(index: int) -> None:
        if not torch.cuda.is_available():
            thread(index)
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            thread(index)
            torch.cuda.current_stream().synchronize()

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    running = [threading.Thread(target=on_stream, args=(index,)) for index in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return tally


def growth(samples: list[int]) -> int:
    """Median of the last tenth of the samples less that of the second: in the first, caches and pools fill."""
    tenth = max(1, len(samples) // 10)
    if len(samples) < 3 * tenth:
        return 0
    return int(statistics.median(samples[-tenth:]) - statistics.median(samples[tenth : 2 * tenth]))


def summary(tallies: list[Tally], seconds: float) -> dict[str, Any]:
    """The page that is written."""
    host, device = [growth(tally.host) for tally in tallies], [growth(tally.device) for tally in tallies]
    wrong = [each for tally in tallies for each in tally.wrong]
    calls = sum(tally.calls for tally in tallies)
    leaks = max(host) > HOST_SLACK_BYTES or max(device) > DEVICE_SLACK_BYTES
    return {
        **describe(),
        "processes": len(tallies),
        "calls": calls,
        "backwards": sum(tally.backwards for tally in tallies),
        "checked": sum(tally.checked for tally in tallies),
        "seconds": round(seconds, 1),
        "calls_per_second": round(calls / seconds),
        "wrong": wrong[:20],
        "host_bytes_grown": host,
        "host_bytes": [statistics.median(tally.host) if tally.host else 0 for tally in tallies],
        "device_bytes_grown": device,
        "device_bytes": [statistics.median(tally.device) if tally.device else 0 for tally in tallies],
        "verdict": "wrong" if wrong else "leak" if leaks else "clean",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-each", type=int, default=97, help="check one result in so many calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    share, limit = options.calls // options.processes, 60 * options.minutes
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        arguments = [
            (seed, options.threads, share, limit, options.check_each, options.device)
            for seed in range(options.processes)
        ]
        tallies = pool.starmap(work, arguments, chunksize=1)
    page = summary(tallies, time.perf_counter() - started)
    out = options.out or REPOSITORY / f"bench/results/load-{options.device}.json"
    out.write_text(json.dumps(page, indent=2) + "\n")
    print(json.dumps(page, indent=2), f"written to {out}", sep="\n")
    return 0 if page["verdict"] == "clean" else 1


if __name__ == "__main__":
    sys.exit(main())
