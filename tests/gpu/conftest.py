"""What every GPU test needs."""

import os
from collections.abc import Iterator

import pytest
import torch

# Each of several test processes would start a pool of compilers for its few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def _kernels_compiled_anew() -> Iterator[None]:
    """Forgets what a test compiled: all of them together want flex attention in more forms than torch keeps (8)."""
    yield
    torch._dynamo.reset()
