"""Two passes over a grid give the same sequences in random order, after any interruption."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import contents, flip
from token_files import make_documents, write

from evenpack.data.recipes import DocumentsRecipe
from evenpack.data.sequences.documents import DocumentsView, build_documents
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, ShuffledView
from evenpack.data.shuffle import shuffle as shuffle_module
from evenpack.data.shuffle.grid import BYTES_PER_SEQUENCE, Grid, equal_parts
from evenpack.data.shuffle.shuffle import GridShuffler
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import column_path
from evenpack.errors import DataError, RunError

VOCABULARY = 5000
GRID = Grid(rows=3, columns=4, seed=7)


class StoppedShuffleError(Exception):
    """Ends a shuffle from within its progress."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle_module, "_CHUNK_TOKENS", 300)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> DocumentsView:
    """Returns a view of all documents but each ninth, in pieces of at most 16 tokens."""
    documents = make_documents(400, vocabulary_size=VOCABULARY)
    token_file = write(tmp_path_factory.mktemp("tokens") / "tokens", documents, vocabulary_size=VOCABULARY)
    recipe = DocumentsRecipe(kind="documents", max_sequence_length=16)
    return build_documents(recipe, token_file, np.flatnonzero(np.arange(400) % 9 > 0))


def shuffler(view: DocumentsView, folder: Path, *, grid: Grid = GRID, stop_after: int = 10**9) -> GridShuffler:
    left = stop_after

    def told(sequences: int, bytes_read: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise StoppedShuffleError

    folder.mkdir(exist_ok=True)
    origin = {"seed": grid.seed, "rows": grid.rows, "columns": grid.columns}
    return GridShuffler(
        view=view, grid=grid, folder=folder, vocabulary_size=VOCABULARY, origin=origin, report_progress=told
    )


def opened(view: DocumentsView, folder: Path) -> ShuffledView:
    return ShuffledView(view, TokenFile(folder / SHUFFLED))


def as_lists(tokens: np.ndarray, lengths: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(tokens[a:b].tolist()) for a, b in pairwise(np.concatenate([[0], np.cumsum(lengths)]).tolist())]


def all_sequences(view: DocumentsView | ShuffledView) -> list[tuple[int, ...]]:
    return as_lists(view.read(np.arange(view.count)).tokens, view.lengths())


def test_a_missing_column_is_named(view: DocumentsView, tmp_path: Path) -> None:
    shuffler(view, tmp_path).run()
    column = column_path(tmp_path / SHUFFLED, SOURCE_IDS)
    column.unlink()
    with pytest.raises(DataError, match=re.escape(str(column))):
        opened(view, tmp_path)


def test_every_sequence_comes_once_whole_and_with_its_id(view: DocumentsView, tmp_path: Path) -> None:
    shuffler(view, tmp_path).run()
    found = opened(view, tmp_path)
    before, after = all_sequences(view), all_sequences(found)
    assert Counter(after) == Counter(before)
    assert sorted(found.source_ids.tolist()) == list(range(view.count))
    assert after == [before[one] for one in found.source_ids.tolist()]
    assert found.accounting == view.accounting
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shuffled.bin", "shuffled.idx", "shuffled.journal.json", "shuffled_sequence_ids.npy",
    ]  # fmt: skip


def test_each_row_holds_equal_shares_of_all_columns_from_all_over_them(view: DocumentsView, tmp_path: Path) -> None:
    shuffler(view, tmp_path).run()
    ids = opened(view, tmp_path).source_ids.astype(np.int64)
    bounds = np.array(column_bounds(view))
    places = np.searchsorted(bounds, ids, side="right") - 1
    for row in np.array_split(np.arange(view.count), GRID.rows):
        counts = np.bincount(places[row], minlength=GRID.columns)
        assert counts.max() - counts.min() <= 6
        for column in range(GRID.columns):
            within = (ids[row][places[row] == column] - bounds[column]) / np.diff(bounds)[column]
            assert abs(within.mean() - 0.5) < 0.16, "a shard is from all over its column (4 deviations)"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(view: DocumentsView, tmp_path: Path) -> None:
    for name, grid in (("a", GRID), ("b", GRID), ("c", Grid(rows=3, columns=4, seed=8))):
        shuffler(view, tmp_path / name, grid=grid).run()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["shuffled.bin"] != contents(tmp_path / "c")["shuffled.bin"]


def test_what_was_interrupted_anywhere_is_resumed_to_the_same_bytes(view: DocumentsView, tmp_path: Path) -> None:
    shuffler(view, tmp_path / "whole").run()
    interruptions = 0
    while interruptions < 100:
        try:
            shuffler(view, tmp_path / "interrupted", stop_after=9).run()
            break
        except StoppedShuffleError:
            interruptions += 1
            assert not (tmp_path / "interrupted" / "shuffled.idx").exists()
    assert 3 < interruptions < 20
    assert contents(tmp_path / "interrupted") == contents(tmp_path / "whole")


def test_another_origin_begins_again(view: DocumentsView, tmp_path: Path) -> None:
    other = Grid(rows=2, columns=5, seed=1)
    with pytest.raises(StoppedShuffleError):
        shuffler(view, tmp_path / "changed", stop_after=16).run()
    shuffler(view, tmp_path / "changed", grid=other).run()
    shuffler(view, tmp_path / "fresh", grid=other).run()
    assert contents(tmp_path / "changed") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["columns.bin", "columns.idx", "shuffled_sequence_ids.npy"])
def test_damage_between_the_passes_is_found_and_named(view: DocumentsView, tmp_path: Path, name: str) -> None:
    with pytest.raises(StoppedShuffleError):  # as the first row has been told
        shuffler(view, tmp_path, stop_after=reports_of_columns(view) + 1).run()
    path = tmp_path / "shuffle_columns" / name
    flip(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{name} is not as it was written.* prepare again"):
        shuffler(view, tmp_path).run()
    path.unlink()
    with pytest.raises(DataError, match=rf"{name} cannot be found.* prepare again"):
        shuffler(view, tmp_path).run()


def column_bounds(view: DocumentsView) -> list[int]:
    """Returns the first sequence of each column; columns take equal memory."""
    sizes = view.lengths().astype(np.int64) * 2 + BYTES_PER_SEQUENCE
    return equal_parts([sizes], total=int(sizes.sum()), parts=GRID.columns)


def reports_of_columns(view: DocumentsView) -> int:
    """Returns how often the first pass reports its progress."""
    bounds = column_bounds(view)
    return sum(len(list(shuffle_module.chunks(view.lengths(a, b)))) for a, b in pairwise(bounds))


def test_sequences_that_changed_between_reading_and_writing_are_detected(
    view: DocumentsView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = shuffle_module.Sequences.reordered

    def faulty(self: shuffle_module.Sequences, order: np.ndarray) -> object:
        for chunk in original(self, order):
            chunk.tokens[0] ^= 1
            yield chunk

    monkeypatch.setattr(shuffle_module.Sequences, "reordered", faulty)
    with pytest.raises(RunError, match=r"hashes sum to [0-9a-f]{16} and written others"):
        shuffler(view, tmp_path).run()
    assert not (tmp_path / "shuffled.idx").exists()


def test_columns_are_equal_in_memory_where_short_sequences_lie_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokens alone, the short half of this corpus would be one column."""
    documents = [np.full(100, 7)] * 40 + [np.array([1, 2])] * 2000
    token_file = write(tmp_path / "tokens", documents, vocabulary_size=VOCABULARY)
    recipe = DocumentsRecipe(kind="documents", max_sequence_length=128)
    skewed = build_documents(recipe, token_file, np.arange(len(documents)))
    held = []
    load = GridShuffler._load_column

    def measured(self: GridShuffler, first: int, stop: int, *arguments: Any, **named: Any) -> Any:
        loaded, content = load(self, first, stop, *arguments, **named)
        held.append(loaded.tokens.nbytes + BYTES_PER_SEQUENCE * (stop - first))
        return loaded, content

    monkeypatch.setattr(GridShuffler, "_load_column", measured)
    shuffler(skewed, tmp_path / "out").run()
    assert len(held) == GRID.columns
    assert max(held) < 1.05 * sum(held) / GRID.columns
