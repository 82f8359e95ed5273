"""Signatures are checked while tests run: shapes and types of parameters and results."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from evenpack.kernels.attention import packed_attention
from evenpack.step_counts import StepCounts
from evenpack.testing import run_ranks, write_run_file


def attend(keys: int) -> torch.Tensor:
    """Computes attention with one head; there may be other numbers of `keys` than queries."""
    q, k = torch.ones(4, 1, 8), torch.ones(keys, 1, 8)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    return packed_attention(q, k, k, lengths, 4, causal=True, backend="sdpa")


def test_axes_of_one_name_have_one_size_in_a_call() -> None:
    assert attend(4).shape == (4, 1, 8)
    with pytest.raises(BeartypeCallHintViolation, match="parameter k="):
        attend(5)


@pytest.mark.parametrize("value", [1.5, "1", Fraction(1)])
def test_fields_of_dataclasses_have_their_types(value: Any) -> None:
    with pytest.raises(BeartypeCallHintViolation, match="parameter tokens="):
        StepCounts(packs=1, sequences=1, tokens=value, targets=1)


def test_parameters_of_functions_have_their_types(tmp_path: Path) -> None:
    with pytest.raises(BeartypeCallHintViolation, match="parameter path="):
        write_run_file(str(tmp_path / "run.yaml"), {})  # type: ignore[arg-type]
    with pytest.raises(BeartypeCallHintViolation, match="parameter ranks="):
        run_ranks(attend, "2")  # type: ignore[arg-type]
