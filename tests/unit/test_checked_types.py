"""Signatures are checked while tests run, in ranks too: shapes and types of parameters and results."""

import multiprocessing
import signal
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from checked_types import FIRST_CALLS, ONE_IN, checked
from forked_ranks import run_ranks
from jaxtyping import Float

from evenpack.engine.world.distributed import World
from evenpack.files import write_text
from evenpack.kernels.attention import packed_attention
from evenpack.kernels.segments import Segments
from evenpack.losses import StepCounts
from evenpack.units import counted
from evenpack.worker_pool import worker_pool


def attend(keys: int) -> torch.Tensor:
    """Computes attention with one head; there may be other numbers of `keys` than queries."""
    q, k = torch.ones(4, 1, 8), torch.ones(keys, 1, 8)
    segments = Segments(cu_seqlens=torch.tensor([0, 4], dtype=torch.int32), max_sequence_length=4, causal=True)
    return packed_attention(q, k, k, segments, backend="sdpa")


@checked
def paired(one: Float[torch.Tensor, " n"], other: Float[torch.Tensor, " n"]) -> Float[torch.Tensor, " n"]:
    """Accepts what a signature alone refuses."""
    return one


def pair(size: int) -> torch.Tensor:
    return paired(torch.ones(4), torch.ones(size))


def counts(tokens: Any) -> StepCounts:
    return StepCounts(packs=1, sequences=1, tokens=tokens, targets=1)


def refusals(world: World) -> tuple[str, str]:
    """Returns the messages of a wrong type and a wrong shape on a rank."""
    with pytest.raises(BeartypeCallHintViolation) as wrong_type:
        counts("1")
    with pytest.raises(BeartypeCallHintViolation) as wrong_shape:
        attend(5)
    return str(wrong_type.value), str(wrong_shape.value)


def test_axes_of_one_name_have_one_size_in_a_call() -> None:
    assert attend(4).shape == (4, 1, 8)
    with pytest.raises(BeartypeCallHintViolation, match="parameter k="):
        attend(5)


@pytest.mark.parametrize("value", [1.5, "1", Fraction(1)])
def test_fields_of_dataclasses_have_their_types(value: Any) -> None:
    with pytest.raises(BeartypeCallHintViolation, match="parameter tokens="):
        counts(value)


def test_parameters_of_functions_have_their_types(tmp_path: Path) -> None:
    with pytest.raises(BeartypeCallHintViolation, match="parameter path="):
        write_text(str(tmp_path / "run.yaml"), "")  # type: ignore[arg-type]
    with pytest.raises(BeartypeCallHintViolation, match="parameter number="):
        counted("2", "rank")  # type: ignore[arg-type]


@pytest.mark.parametrize("earlier", [0, FIRST_CALLS - 1, FIRST_CALLS, 100])
def test_each_of_the_first_calls_is_checked_and_a_later_one_in_sixteen(earlier: int) -> None:
    for right, wrong in ((lambda: counts(1), lambda: counts(1.5)), (lambda: pair(4), lambda: pair(5))):
        for _ in range(earlier):
            right()
        with pytest.raises(BeartypeCallHintViolation):  # noqa: PT012 - which of them is what is told apart
            for _ in range(1 if earlier < FIRST_CALLS else ONE_IN):
                wrong()


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_test_has_first_calls_of_its_own(turn: str) -> None:
    with pytest.raises(BeartypeCallHintViolation):
        counts(turn)
    for _ in range(FIRST_CALLS):
        counts(1)


@pytest.fixture
def after_a_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts a pool of workers as the first thing that forks in this process, and another process beside it."""
    monkeypatch.setattr(forked_ranks, "_context", [])
    forked_ranks.end_fork_server()
    with worker_pool(1) as pool:
        assert pool.submit(abs, -1).result() == 1
    forked = multiprocessing.get_context("fork").Process(target=signal.pause)
    forked.start()  # it holds what this process has open, as loaders of PyTorch do
    yield
    forked.kill()
    forked.join()


@pytest.mark.slow
@pytest.mark.usefixtures("after_a_pool")
def test_ranks_check_as_well() -> None:
    for wrong_type, wrong_shape in run_ranks(refusals, 2):
        assert "parameter tokens=" in wrong_type
        assert "parameter k=" in wrong_shape
