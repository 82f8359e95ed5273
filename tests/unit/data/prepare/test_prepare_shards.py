"""`prepare` from HDF5 shards: splits, the evaluation set, interruptions, and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import Recorder, contents, data_config, interrupt, recorded
from pydantic import ValidationError
from shard_files import MASK_SLOTS, SLOTS, VOCABULARY_SIZE, Row, random_rows, write_fixed, write_variable

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, Split
from evenpack.data.sequences import MaskedPairsView
from evenpack.data.shards import reading
from evenpack.data.shards.reading import MaskedSequences
from evenpack.data.tokens import writer as token_writer
from evenpack.errors import DataError

TRAINING, EVALUATION = random_rows(60, seed=1), random_rows(9, seed=2)


def config_of(path: Path, **changes: Any) -> DataConfig:
    source = {"kind": "hdf5", "path": path, **changes.pop("source", {})}
    values = {
        "validation_fraction": 0.25,
        "tokenizer": {"kind": "external", "vocabulary_size": VOCABULARY_SIZE, "end_of_text_id": 3},
        "recipe": {"kind": "masked_pairs", "max_sequence_length": SLOTS, "max_predictions": MASK_SLOTS},
        "pack_length": 48,
    }
    return data_config({"mlperf": source}, **{**values, **changes})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_fixed(tmp_path / "in/a.hdf5", TRAINING[:25])
    write_fixed(tmp_path / "in/b.hdf5", TRAINING[25:])
    return tmp_path / "in"


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    """Writes an evaluation set in another layout than the training shards, as in MLPerf."""
    return write_variable(tmp_path / "eval.hdf5", EVALUATION)


def sequences_of(directory: Path, config: DataConfig, split: Split) -> MaskedSequences:
    view = PreparedData.open(directory, config).view("mlperf", split)
    assert isinstance(view, MaskedPairsView)
    return MaskedSequences.of_view(view, 0, view.count)


def tokens(rows: list[Row]) -> list[int]:
    return [token for row in rows for token in row.tokens]


def test_the_evaluation_set_is_validation_and_all_else_is_trained_on(
    shards: Path, evaluation: Path, tmp_path: Path
) -> None:
    config = config_of(shards, source={"validation_path": evaluation})
    recorder = Recorder()
    manifest = prepare(config, tmp_path / "data", progress=recorder)
    for split, rows in (("train", TRAINING), ("validation", EVALUATION)):
        found = sequences_of(tmp_path / "data", config, split)  # type: ignore[arg-type]
        assert found.tokens.tolist() == tokens(rows)
        assert found.masks.labels.tolist() == [label for row in rows for label in row.originals]
        assert found.first_segment_lengths.tolist() == [row.first_length for row in rows]
    record = manifest.sources["mlperf"]
    assert (record.documents, record.tokens) == (69, len(tokens(TRAINING + EVALUATION)))
    assert [Path(file.path).name for file in record.inputs] == ["a.hdf5", "b.hdf5", "eval.hdf5"]
    last = recorder.states[-1]
    assert (last.stage, last.bytes_read) == ("shards", last.total_bytes)
    assert not recorder.notes
    assert Manifest.read(tmp_path / "data").files.keys() == manifest.files.keys()
    assert prepare(config, tmp_path / "data") == manifest


def test_without_an_evaluation_set_rows_are_held_out_by_their_unmasked_tokens(shards: Path, tmp_path: Path) -> None:
    config = config_of(shards)
    prepare(config, tmp_path / "data")
    train, validation = (sequences_of(tmp_path / "data", config, split) for split in ("train", "validation"))
    assert len(validation.lengths) > 3
    identities = np.concatenate([train.identities(), validation.identities()])
    assert len(identities) == len(TRAINING)
    none = config_of(shards, validation_fraction=0.0)
    prepare(none, tmp_path / "none")
    assert sequences_of(tmp_path / "none", none, "train").tokens.tolist() == tokens(TRAINING)
    assert np.array_equal(np.sort(sequences_of(tmp_path / "none", none, "train").identities()), np.sort(identities))
    with pytest.raises(DataError, match="leaves no sequence to train on: all 60 are held out"):
        prepare(config_of(shards, validation_fraction=0.9999999), tmp_path / "all")


@pytest.mark.parametrize("reports", [2, 9])
def test_an_interrupted_call_resumes_where_it_was(
    shards: Path, evaluation: Path, tmp_path: Path, reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(token_writer, "COMMIT_SECONDS", 0.0)
    config = config_of(shards, source={"validation_path": evaluation})
    prepare(config, tmp_path / "whole")
    interrupt(config, tmp_path / "data", reports, stage="shards")
    again = Recorder()
    prepare(config, tmp_path / "data", progress=again)
    assert again.states[0].bytes_resumed > 0
    assert len(again.states) == 2 + 5 + 7 - reports
    left_out = ("manifest.json", "journal.json")
    whole, found = (
        {name: content for name, content in contents(directory).items() if not name.endswith(left_out)}
        for directory in (tmp_path / "whole", tmp_path / "data")
    )
    assert found == whole


def test_an_interrupted_call_is_not_gone_on_with_from_other_shards(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_writer, "COMMIT_SECONDS", 0.0)
    interrupt(config_of(shards), tmp_path / "data", 2, stage="shards")
    recipe = {"kind": "masked_pairs", "max_sequence_length": SLOTS, "max_predictions": 5}
    with pytest.raises(DataError, match=r"data\.recipe\.max_predictions: prepared with 4, this run has 5"):
        prepare(config_of(shards, recipe=recipe), tmp_path / "data")
    write_fixed(shards / "c.hdf5", EVALUATION)
    with pytest.raises(DataError, match=r"c\.hdf5 has changed since"):
        prepare(config_of(shards), tmp_path / "data")


def test_a_training_row_of_the_evaluation_set_is_named_and_nothing_is_left(shards: Path, tmp_path: Path) -> None:
    evaluation = write_variable(tmp_path / "eval.hdf5", [*EVALUATION[:4], TRAINING[28].unmasked()])
    config = config_of(shards, source={"validation_path": evaluation})
    with pytest.raises(DataError) as caught:
        prepare(config, tmp_path / "data")
    assert str(caught.value).startswith(
        f"{shards / 'b.hdf5'}, row 3 (from 0): the evaluation set has the same tokens at {evaluation}, row 4 (from 0);"
    )
    assert "data.sources.mlperf.allow_validation_overlap=true" in str(caught.value)
    assert not (tmp_path / "data").exists()

    allowed = config_of(shards, source={"validation_path": evaluation, "allow_validation_overlap": True})
    recorder = recorded(allowed, tmp_path / "data")
    assert sequences_of(tmp_path / "data", allowed, "train").tokens.tolist() == tokens(TRAINING)
    assert [note for note in recorder.notes if "1 training rows are in the evaluation set too" in note]


def test_a_bad_row_in_the_last_shard_leaves_nothing(shards: Path, evaluation: Path, tmp_path: Path) -> None:
    bad = replace(TRAINING[0], tokens=[VOCABULARY_SIZE, *TRAINING[0].tokens[1:]])
    path = write_fixed(shards / "c.hdf5", [*EVALUATION[:2], bad])
    for source in ({}, {"validation_path": evaluation, "allow_validation_overlap": True}):
        with pytest.raises(DataError) as caught:
            prepare(config_of(shards, source=source), tmp_path / "data")
        assert str(caught.value).startswith(f"{path}, row 2 (from 0): input_ids has token id {VOCABULARY_SIZE}")
        assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recipe": {"kind": "documents", "max_sequence_length": SLOTS}}, "hdf5 sources and the recipe masked_pairs"),
        (
            {"tokenizer": {"kind": "train_word_pieces"}},
            "the tokenizer of kind train_word_pieces: .* hdf5 sources take bert, hub or external",
        ),
        ({"pack_length": SLOTS - 1}, "no pack could hold the longest sequence"),
        ({"source": {"kind": "jsonl"}}, "hdf5 sources and the recipe masked_pairs go together"),
    ],
)
def test_sections_that_do_not_go_together_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        config_of(Path("in"), **changes)
