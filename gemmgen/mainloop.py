"""Mainloops: what makes the accumulator. `Dense` is the first of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    """`accum = A @ B`, batched or not."""
