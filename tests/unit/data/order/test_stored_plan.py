"""Strategies and sorted sequences are stored as files, from lengths that are never all in memory; rows keep theirs."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sources import ListView

from evenpack.data.order.config import PackingConfig
from evenpack.data.order.stored_plan import SequentialPlan, open_plan, store_plan
from evenpack.data.packing import LengthHistogram, Packing, pack
from evenpack.data.sequences import TokenAccounting
from evenpack.errors import DataError

LONGEST = 40


class CountedView(ListView):
    """A view of a million sequences of pseudo-random lengths, which are computed on demand."""

    @property
    def count(self) -> int:
        return 1_000_003

    @property
    def accounting(self) -> TokenAccounting:
        """Returns an empty accounting: a check of types reads it, which must not take memory."""
        return ListView(sequences=[], max_sequence_length=LONGEST).accounting

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        ids = np.arange(start, self.count if stop is None else stop, dtype=np.int32)
        ids *= 7919
        ids %= 1009
        ids %= LONGEST
        ids += 1
        return ids


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> CountedView:
    monkeypatch.setattr("evenpack.data.sequences.view._CHUNK_SEQUENCES", 1 << 13)
    return CountedView(sequences=[[1]], max_sequence_length=LONGEST)


def test_a_stored_plan_holds_every_sequence_by_its_length(view: CountedView, tmp_path: Path) -> None:
    packing = store_plan(tmp_path, view, PackingConfig(), pack_length=64)
    lengths = view.lengths()
    assert packing.histogram.counts.tolist() == np.bincount(lengths, minlength=LONGEST + 1)[1:].tolist()
    ids = np.load(tmp_path / "sorted_sequences.npy")
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.argsort(lengths, kind="stable"))
    plan = open_plan(tmp_path, key=1)
    assert (plan.packs, plan.sequences) == (packing.packs, view.count)
    drawn = plan.draw(np.arange(1000))
    np.testing.assert_array_equal(drawn.lengths, lengths[drawn.sequence_ids])


@pytest.mark.parametrize("name", ["packing.json", "histogram.npy", "sorted_sequences.npy"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]"])
def test_a_damaged_file_is_named(view: CountedView, tmp_path: Path, name: str, content: bytes | None) -> None:
    small = ListView(sequences=[[1, 2], [3]], max_sequence_length=LONGEST)
    store_plan(tmp_path, small, PackingConfig(), pack_length=64)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is missing or damaged"):
        open_plan(tmp_path, key=1)


def test_storing_a_plan_takes_memory_for_a_chunk_not_for_all_lengths(view: CountedView, tmp_path: Path) -> None:
    store_plan(tmp_path, view, PackingConfig(), pack_length=64)
    tracemalloc.start()
    try:
        store_plan(tmp_path, view, PackingConfig(), pack_length=64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / "sorted_sequences.npy").stat().st_size


def packing_of(lengths: list[int], *, pack_length: int = 8) -> Packing:
    return pack(LengthHistogram.from_lengths(lengths, longest=pack_length), pack_length=pack_length)


@pytest.mark.parametrize("lengths", [[8, 8, 8], [8, 8, 3], [8], [3], [8, 8, 8, 8, 1]])
def test_each_epoch_takes_every_row_once_and_in_order(lengths: list[int]) -> None:
    plan = SequentialPlan(packing_of(lengths))
    drawn = plan.draw(np.arange(2 * len(lengths)))

    assert drawn.sequence_ids.tolist() == [*range(len(lengths))] * 2
    assert drawn.lengths.tolist() == lengths * 2
    assert np.diff(drawn.offsets).tolist() == [1] * (2 * len(lengths))


@pytest.mark.parametrize("lengths", [[8, 5, 3], [8, 3, 3], [5, 5], [5, 3]])
def test_sequences_that_are_no_rows_are_refused(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="at most one that is shorter"):
        SequentialPlan(packing_of(lengths))


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        SequentialPlan(packing_of([8])).draw(np.array([-1]))
