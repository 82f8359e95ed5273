"""`data.shuffle`: the prepared files, the effect of changes, and data that cannot be shuffled so."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prepared_files import contents, recorded, two_sources
from pydantic import ValidationError

from evenpack.data.order.blocked_plan import BlockedPlan
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.data.sequences.view import SequenceView
from evenpack.data.shuffle import shuffle
from evenpack.errors import DataError

GRID = {"kind": "grid", "rows": 2, "columns": 3, "block_tokens": 2000}


class StoppedRowError(Exception):
    """Ends a shuffle between its rows."""


@pytest.fixture(scope="module")
def shuffled(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shuffled") / "data"
    prepare(two_sources(corpus, shuffle=GRID), directory)
    return directory


def sequences_of(view: SequenceView) -> Counter[tuple[int, ...]]:
    tokens, ends = view.read(np.arange(view.count)).tokens, np.cumsum(view.lengths())
    return Counter(tuple(tokens[a:b].tolist()) for a, b in pairwise([0, *ends.tolist()]))


def test_training_has_the_same_sequences_in_blocks_and_validation_is_as_it_was(
    corpus: Path, finished: Path, shuffled: Path
) -> None:
    plain = PreparedData.open(finished, two_sources(corpus))
    grid = PreparedData.open(shuffled, two_sources(corpus, shuffle=GRID))
    for name in ("wiki", "code"):
        view = grid.view(name, "train")
        assert isinstance(view, ShuffledView)
        assert sequences_of(view) == sequences_of(plain.view(name, "train"))
        plan = grid.plan(name, "train", seed=3)
        assert isinstance(plan, BlockedPlan)
        assert plan.blocks.count > 2
        positions = np.arange(10)
        np.testing.assert_array_equal(
            grid.plan(name, "validation", seed=3).draw(positions).sequence_ids,
            plain.plan(name, "validation", seed=3).draw(positions).sequence_ids,
        )
    orders = [grid.view(name, "train").source_ids[:50].tolist() for name in ("wiki", "code")]
    assert orders[0] != orders[1], "each source has an order of its own"


def test_fingerprints_distinguish_shuffles(corpus: Path, finished: Path, shuffled: Path) -> None:
    plain = PreparedData.open(finished, two_sources(corpus))
    grid = PreparedData.open(shuffled, two_sources(corpus, shuffle=GRID))
    assert grid.fingerprint(1) != plain.fingerprint(1)
    with pytest.raises(DataError, match=r"shuffle\.seed: prepared with 42, this run has 7"):
        PreparedData.open(shuffled, two_sources(corpus, shuffle={**GRID, "seed": 7}))
    with pytest.raises(DataError, match="shuffle"):
        PreparedData.open(shuffled, two_sources(corpus))


def test_every_file_of_a_shuffle_is_verified(shuffled: Path, corpus: Path) -> None:
    manifest = PreparedData.open(shuffled, two_sources(corpus, shuffle=GRID)).manifest
    for name in ("shuffled.bin", "shuffled.idx", "shuffled_sequence_ids.npy", "train/blocks.json"):
        assert f"sources/wiki/{name}" in manifest.files
    assert not list(shuffled.rglob("shuffle_columns"))


def test_a_call_that_was_interrupted_between_the_passes_ends_up_with_the_same_files(
    corpus: Path, shuffled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, directory = two_sources(corpus, shuffle=GRID), tmp_path / "data"
    append_row = shuffle.append_row

    def stop_at_the_second_row(*arguments: object) -> int:
        if arguments[-1] == 1:
            raise StoppedRowError
        return append_row(*arguments)

    monkeypatch.setattr(shuffle, "append_row", stop_at_the_second_row)
    with pytest.raises(StoppedRowError):
        prepare(config, directory)
    assert list(directory.rglob("columns.idx")), "the columns are there"
    monkeypatch.setattr(shuffle, "append_row", append_row)
    recorder = recorded(config, directory)
    first = next(state for state in recorder.states if state.stage == "shuffle")
    assert first.source == "wiki"
    assert first.documents > 0, "no column was written again"
    assert contents(directory) == contents(shuffled)


@pytest.mark.parametrize("finished_one", [False, True])
def test_a_shuffle_that_is_given_up_leaves_nothing_behind(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, finished_one: bool
) -> None:
    directory, append_row = tmp_path / "data", shuffle.append_row

    def stop(*arguments: object) -> int:
        if arguments[-1] == 1 and (not finished_one or list(directory.rglob("wiki/shuffled.idx"))):
            raise StoppedRowError
        return append_row(*arguments)

    monkeypatch.setattr(shuffle, "append_row", stop)
    with pytest.raises(StoppedRowError):
        prepare(two_sources(corpus, shuffle=GRID), directory)
    assert bool(list(directory.rglob("wiki/shuffled.idx"))) == finished_one
    prepare(two_sources(corpus), directory)
    assert contents(directory) == contents(finished)


@pytest.mark.parametrize("kind", ["permutation", "grid", "blocks"])
def test_a_source_that_leaves_no_sequence_is_refused_whatever_the_shuffle(
    corpus: Path, tmp_path: Path, kind: str
) -> None:
    recipe = {"kind": "documents", "max_sequence_length": 64, "minimum_document_length": 100_000}
    with pytest.raises(DataError, match="leaves no sequence to train on"):
        prepare(two_sources(corpus, shuffle=kind, recipe=recipe), tmp_path / "data")


def test_blocks_alone_leave_the_files_and_their_order(corpus: Path, tmp_path: Path, finished: Path) -> None:
    config = two_sources(corpus, shuffle={"kind": "blocks", "block_tokens": 2000})
    prepare(config, tmp_path / "data")
    assert not list(tmp_path.rglob("shuffled*"))
    prepared = PreparedData.open(tmp_path / "data", config)
    plan = prepared.plan("wiki", "train", seed=1)
    assert isinstance(plan, BlockedPlan)
    drawn = plan.draw(np.arange(plan.packs))
    blocks = np.searchsorted(plan.blocks.first_sequences, drawn.sequence_ids, side="right")
    assert (np.diff(blocks) >= 0).all()
    assert sequences_of(prepared.view("wiki", "train")) == sequences_of(
        PreparedData.open(finished, two_sources(corpus)).view("wiki", "train")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "by_length"}, "order by_length sorts the whole source by length: leave out shuffle grid"),
        (
            {"recipe": {"kind": "concat", "max_sequence_length": 128, "atom": 128}},
            "recipe concat with an atom keeps the order of its rows: leave out shuffle grid",
        ),
        (
            {"recipe": {"kind": "concat", "max_sequence_length": 128}},
            "take recipe documents, or concat with isolate_documents: false, found concat",
        ),
    ],
)
def test_what_cannot_be_shuffled_so_is_refused(corpus: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        two_sources(corpus, **{"shuffle": "grid", **changes})


def test_a_limit_below_what_the_program_takes_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path
) -> None:
    config = two_sources(corpus, shuffle={"kind": "grid", "memory": "100MiB"})
    with pytest.raises(DataError, match=r"set data.shuffle.memory to 0\.\d+ GiB or more"):
        prepare(config, tmp_path / "data")
    assert not list(tmp_path.rglob("shuffled*"))
