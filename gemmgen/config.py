"""`GemmConfig`: how to compute a problem. Frozen, printable, hashable; every field has a CUTLASS meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace

CLUSTER_SPLIT = "cluster_split"


@dataclass(frozen=True)
class GemmConfig:
    """One choice of kernel.

    Attributes:
        family: the template family: "sm90", "sm80" or "sm100".
        tile_shape: CTA tile (m, n, k) in elements.
        cluster_shape: CTAs per cluster (m, n); (1, 1) outside sm90 and sm100.
        kernel_schedule: "cooperative", "pingpong" or "single" (sm90), "multistage" (sm80), "auto" (sm100).
        epilogue_tile: sub-tile (m, n) that the epilogue walks; None: what suits the epilogue (sm90).
        stages: shared-memory buffers of the mainloop; None takes as many as fit (sm90, sm100).
        warp_shape: warp tile (m, n, k); sm80 only.
        scheduler: "persistent" or "stream_k"; sm80 uses "stream_k" for split-K. "cluster_split" (sm90, "single"): a
            cluster of `split_k` CTAs shares a tile and adds its sums through distributed shared memory. Of a tile of 64
            rows each finishes its share of the columns, if a multiple of 16, and `epilogue_tile` is of a share.
        swizzle: clusters across that are walked together in the order of tiles (1, 2, 4, 8, 16). Run-time value.
        raster: tile order: "heuristic", "M" or "N". Run-time value.
        split_k: slices of K, 1 for none. Run-time value, except for "cluster_split".
        swapped: compute D^T = B^T A^T, for few rows: tile_shape, cluster_shape, epilogue_tile and raster are those of
            the swapped problem, whose M runs over the columns of D and whose N runs over its rows. sm90 only.
    """

    family: str
    tile_shape: tuple[int, int, int]
    cluster_shape: tuple[int, int] = (1, 1)
    kernel_schedule: str = "cooperative"
    epilogue_tile: tuple[int, int] | None = None
    stages: int | None = None
    warp_shape: tuple[int, int, int] | None = None
    scheduler: str = "persistent"
    swizzle: int = 1
    raster: str = "heuristic"
    split_k: int = 1
    swapped: bool = False

    def compiled(self) -> GemmConfig:
        """This config with the run-time values at their defaults: what a skeleton is compiled for."""
        split_k = self.split_k if self.scheduler == CLUSTER_SPLIT else 1
        return replace(self.unordered(), split_k=split_k)

    def unordered(self) -> GemmConfig:
        """This config with the order of its tiles at its default: the same for all orders of one kernel."""
        return replace(self, swizzle=1, raster="heuristic")

    @property
    def label(self) -> str:
        """A short readable name, such as `sm90_128x256x64_2x1_cooperative_e64x64`."""
        parts = [self.family, "x".join(map(str, self.tile_shape)), "x".join(map(str, self.cluster_shape))]
        parts.append(self.kernel_schedule)
        if self.epilogue_tile:
            parts.append("e" + "x".join(map(str, self.epilogue_tile)))
        if self.stages:
            parts.append(f"s{self.stages}")
        if self.scheduler == CLUSTER_SPLIT:
            parts.append(f"{self.scheduler}{self.split_k}")
        elif self.scheduler != "persistent":
            parts.append(self.scheduler)
        if self.swapped:
            parts.append("swapped")
        return "_".join(parts)
