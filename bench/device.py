"""`Device`: what measuring needs of the machine, as one value, so that a test can put the CPU in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gemmgen.timing import Call, ColdL2Recorder, Recorder, WallRecorder, graphed


@dataclass(frozen=True)
class Device:
    """Where problems run.

    Attributes:
        torch_name: for torch's `device=`.
        l2_bytes: what inputs must overflow to be cold.
        gpu_recorder: makes what takes the GPU time of a call, L2 cold; a new one for each problem, since each spins
            as long as the slowest host that it has met.
        wall_recorder: host and GPU time of a call.
        capture: a call as one graph launch; raises RuntimeError where it cannot be captured.
        synchronize, release_memory: wait for the device; give cached memory back.
    """

    torch_name: str
    l2_bytes: int
    gpu_recorder: Callable[[], Recorder]
    wall_recorder: Recorder
    capture: Callable[[Call], Call]
    synchronize: Callable[[], None]
    release_memory: Callable[[], None]


def current_gpu() -> Device:
    """torch's current GPU."""
    synchronize = torch.cuda.synchronize
    return Device(
        torch_name="cuda",
        l2_bytes=torch.cuda.get_device_properties().L2_cache_size,
        gpu_recorder=ColdL2Recorder,
        wall_recorder=WallRecorder(synchronize),
        capture=graphed,
        synchronize=synchronize,
        release_memory=torch.cuda.empty_cache,
    )
