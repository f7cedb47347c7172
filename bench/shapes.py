"""The problem sizes that are measured, in named groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """D is `[M, N]`; the weight is `[N, K]`."""

    M: int
    N: int
    K: int

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def is_small(self) -> bool:
        """Whether launch latency is a fair part of a call, so that it is measured through a CUDA graph.

        Calls of up to 256 rows are timed one behind the other by gemmgen's tuner too.
        """
        return self.M <= 256 or self.flops < 10**10

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K}"


LLAMA_NK = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (4096, 1024),
)  # Llama-3-8B: qkv, o, up+gate, down; a short K
LLAMA_M = (1, 16, 128, 512, 2048, 8192)

SHAPES: dict[str, tuple[Shape, ...]] = {
    "headline": (Shape(4096, 4096, 4096), Shape(8192, 14336, 4096), Shape(8192, 4096, 1024), Shape(2048, 6144, 4096)),
    "odd": (Shape(1000, 1003, 777),),
    "llama": tuple(Shape(m, n, k) for n, k in LLAMA_NK for m in LLAMA_M),
}


def select(groups: Iterable[str], ms: Iterable[int] = ()) -> list[Shape]:
    """The shapes of `groups` (`all` for every group), each once, in order; only those with M in `ms` if it is given.

    Raises:
        ValueError: a group has another name than those of `SHAPES`.
    """
    names = list(groups)
    if unknown := [name for name in names if name not in SHAPES and name != "all"]:
        raise ValueError(f"no shapes called {', '.join(unknown)}; there are {', '.join(SHAPES)} and all")
    chosen = list(SHAPES) if "all" in names else names
    shapes = dict.fromkeys(shape for name in chosen for shape in SHAPES[name])
    wanted = set(ms)
    return [shape for shape in shapes if not wanted or shape.M in wanted]


def group_of(shape: Shape) -> str:
    """The first group that holds `shape`."""
    return next((name for name, shapes in SHAPES.items() if shape in shapes), "other")
