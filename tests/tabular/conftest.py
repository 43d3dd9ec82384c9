"""Tests of tables run on one thread: their networks are so small that threads only wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Of PyTorch and of NumPy's BLAS; on a busy machine it takes a tenth of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)
