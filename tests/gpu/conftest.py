"""What every GPU test needs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _kernels_compiled_anew() -> Iterator[None]:
    """Forgets what a test compiled: all of them together want flex attention in more forms than torch keeps (8)."""
    yield
    torch._dynamo.reset()
