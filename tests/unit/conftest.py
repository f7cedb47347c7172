"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def tf32() -> Iterator[None]:
    """fp32 products may use tf32, as the fused kernels of a fake device do."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)
