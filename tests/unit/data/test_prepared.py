"""A prepared directory is opened for a run only if it is whole and has the run's data and fingerprint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from prepared_files import StopAfter, StoppedError, save_tokenizer, two_sources

from evenpack.data.checksums import checksum_of_json
from evenpack.data.config import DataConfig
from evenpack.data.manifest import MANIFEST, Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.errors import DataError, NotPreparedError


@pytest.fixture
def own_finished(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of the prepared directory, in another folder, that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def with_source(config: DataConfig, name: str, **changes: Any) -> DataConfig:
    """Returns the config with one source changed."""
    sources = {**config.sources, name: config.sources[name].model_copy(update=changes)}
    return config.model_copy(update={"sources": sources})


def drawn_ids(prepared: PreparedData, name: str, split: Any, seed: int) -> list[int]:
    plan = prepared.plan(name, split, seed=seed)
    return plan.draw(np.arange(plan.packs)).sequence_ids.tolist()


def fingerprint_of(config: DataConfig, directory: Path) -> str:
    """Prepares the data, and returns its fingerprint."""
    prepare(config, directory)
    return PreparedData.open(directory, config).fingerprint(1)


@pytest.mark.parametrize("batching", ["packs", "sequences"])
def test_an_order_by_length_has_the_same_packs_from_short_to_long(
    corpus: Path, finished: Path, batching: Literal["packs", "sequences"]
) -> None:
    shuffled = two_sources(corpus)
    by_length = shuffled.model_copy(update={"order": "by_length"})
    longest, packs_of = {}, {}
    for config in (shuffled, by_length):
        prepared = PreparedData.open(finished, config)
        plan = prepared.plan("wiki", "train", seed=1, batching=batching)
        drawn = plan.draw(np.arange(2 * plan.packs))
        longest[config.order] = drawn.lengths[drawn.offsets[:-1]]
        first_epoch = drawn.sequence_ids[: drawn.offsets[plan.packs]]
        np.testing.assert_array_equal(np.sort(first_epoch), np.arange(plan.sequences))
        packs_of[config.order] = sorted(map(tuple, np.split(drawn.lengths, drawn.offsets[1:-1])))
        of_validation = prepared.plan("wiki", "validation", seed=1)
        assert (np.diff(of_validation.draw(np.arange(of_validation.packs)).lengths) < 0).any()
    epochs = np.split(longest["by_length"], 2)
    assert all((np.diff(epoch) >= 0).all() for epoch in epochs)
    assert (np.diff(longest["shuffled"][: len(epochs[0])]) < 0).any()
    assert packs_of["by_length"] == packs_of["shuffled"]
    prints = {PreparedData.open(finished, config).fingerprint(1) for config in (shuffled, by_length)}
    assert len(prints) == 2


def test_the_summary_has_a_row_for_each_source_and_split(corpus: Path, finished: Path) -> None:
    rows = Manifest.read(finished).summary()
    splits = [("wiki", "train"), ("wiki", "validation"), ("code", "train"), ("code", "validation")]
    assert [(row["source"], row["split"]) for row in rows] == splits
    prepared = PreparedData.open(finished, two_sources(corpus))
    for row in rows:
        lengths = prepared.view(row["source"], row["split"]).lengths()
        packs = prepared.plan(row["source"], row["split"], seed=0).packs
        assert (row["sequences"], row["tokens"], row["packs"]) == (len(lengths), lengths.sum(), packs)
        assert row["packing_efficiency"] == pytest.approx(lengths.sum() / (packs * 128))
        assert row["packing_factor"] == pytest.approx(len(lengths) / packs)


def test_each_source_and_seed_has_its_own_order_and_validation_has_one(
    corpus: Path, own_corpus: Path, tmp_path: Path
) -> None:
    shutil.copy(own_corpus / "wiki.jsonl", own_corpus / "code.jsonl")  # equal sources: only their names differ
    config = two_sources(own_corpus)
    prepare(config, tmp_path / "data")
    prepared = PreparedData.open(tmp_path / "data", config)
    orders = {
        (name, seed): tuple(drawn_ids(prepared, name, "train", seed)) for name in ("wiki", "code") for seed in (1, 2)
    }
    assert len(set(orders.values())) == 4
    assert tuple(drawn_ids(prepared, "wiki", "train", 1)) == orders["wiki", 1]
    assert drawn_ids(prepared, "wiki", "validation", 1) == drawn_ids(prepared, "wiki", "validation", 2)


def test_a_directory_that_is_not_prepared_or_only_in_part_is_refused(
    corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    config = two_sources(corpus)
    with pytest.raises(NotPreparedError, match=r"has not been prepared: run `evenpack prepare`"):
        PreparedData.open(tmp_path / "data", config)
    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "data", progress=StopAfter(3))
    with pytest.raises(NotPreparedError, match=r"has not been prepared, or only in part: run `evenpack prepare`"):
        PreparedData.open(tmp_path / "data", config)


def test_a_file_that_is_cut_short_or_missing_is_named(corpus: Path, own_finished: Path) -> None:
    for record in Manifest.read(own_finished).files.values():
        path, kept = record.locate(own_finished), record.locate(own_finished).with_name("kept")
        shutil.copy(path, kept)
        if size := path.stat().st_size:
            os.truncate(path, size - 1)
            with pytest.raises(DataError, match=rf"{path.name} has {size - 1:,} bytes, expected {size:,}"):
                PreparedData.open(own_finished, two_sources(corpus))
        path.unlink()
        with pytest.raises(DataError, match=rf"{path.name} cannot be found"):
            PreparedData.open(own_finished, two_sources(corpus))
        kept.rename(path)


def test_a_manifest_of_another_format_is_refused(corpus: Path, own_finished: Path) -> None:
    path = own_finished / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    with pytest.raises(DataError, match="damaged or of another version of evenpack"):
        PreparedData.open(own_finished, two_sources(corpus))


def test_another_data_section_is_refused_by_key(corpus: Path, own_corpus: Path, finished: Path) -> None:
    config = two_sources(corpus)
    for changed, key in (
        (
            two_sources(corpus, validation_fraction=0.2),
            r"data\.validation_fraction: prepared with 0\.1, this run has 0\.2",
        ),
        (two_sources(own_corpus), r"data\.sources\.code\.path"),
        (with_source(config, "wiki", text_key="body"), r"data\.sources\.wiki\.text_key"),
        (two_sources(corpus, packing={"algorithm": "none"}), r"data\.packing\.algorithm"),
    ):
        with pytest.raises(DataError, match=key):
            PreparedData.open(finished, changed)


def test_weights_places_and_left_out_paths_need_no_other_preparation(
    corpus: Path, finished: Path, own_finished: Path
) -> None:
    config = two_sources(corpus)
    expected = PreparedData.open(finished, config).fingerprint(1)
    pathless = with_source(with_source(config, "wiki", path=None), "code", path=None)
    assert PreparedData.open(own_finished, pathless).fingerprint(1) == expected
    doubled = with_source(with_source(config, "wiki", weight=2), "code", weight=2)
    assert PreparedData.open(finished, doubled).fingerprint(1) == expected


def test_one_prepared_set_serves_both_losses_of_padding_by_two_fingerprints(corpus: Path, tmp_path: Path) -> None:
    recipe = {"kind": "padding", "max_sequence_length": 32, "atom": 32}
    counted, left_out = (
        two_sources(corpus, recipe={**recipe, "end_of_text_in_loss": predicted}, pack_length=32)
        for predicted in ("all", "none")
    )
    before = prepare(counted, tmp_path / "data")
    assert prepare(left_out, tmp_path / "data") == before
    prepare(left_out, tmp_path / "again")
    first, again, other = (
        PreparedData.open(tmp_path / name, config).fingerprint(1)
        for name, config in (("data", counted), ("again", counted), ("data", left_out))
    )
    assert first == again != other


def test_a_manifest_whose_splits_do_not_add_up_is_refused(own_finished: Path) -> None:
    path = own_finished / MANIFEST
    content = json.loads(path.read_text())
    del content["checksum"]
    content["sources"]["wiki"]["documents"] += 1
    path.write_text(json.dumps(content | {"checksum": checksum_of_json(content)}))
    with pytest.raises(DataError, match=r"the token file has \d+ documents, the splits account for \d+"):
        Manifest.read(own_finished)


def test_the_fingerprint_follows_what_decides_the_order(
    corpus: Path, own_corpus: Path, finished: Path, tmp_path: Path
) -> None:
    config = two_sources(corpus)
    prepared = PreparedData.open(finished, config)
    turned = config.model_copy(update={"sources": dict(reversed(config.sources.items()))})
    fingerprints = [
        prepared.fingerprint(1),
        prepared.fingerprint(2),
        prepared.fingerprint(1, "sequences"),
        PreparedData.open(finished, with_source(config, "code", weight=2)).fingerprint(1),
        PreparedData.open(finished, turned).fingerprint(1),
    ]
    concat = {"kind": "concat", "max_sequence_length": 64}
    for name, changes in {
        "pack length": {"pack_length": 64},
        "packing": {"packing": {"algorithm": "none"}},
        "recipe": {"recipe": concat},
        "isolation": {"recipe": {**concat, "isolate_documents": False}},
        "tokenizer": {"tokenizer": {"kind": "train", "vocabulary_size": 330}},
    }.items():
        fingerprints.append(fingerprint_of(two_sources(corpus, **changes), tmp_path / name))
    lines = (own_corpus / "code.jsonl").read_text().splitlines(keepends=True)
    for name, others in {"shorter": lines[1:], "of the same sizes": lines[::-1]}.items():
        (own_corpus / "code.jsonl").write_text("".join(others))
        fingerprints.append(fingerprint_of(two_sources(own_corpus), tmp_path / name))
    assert len(set(fingerprints)) == len(fingerprints) == 12


def test_the_fingerprint_does_not_follow_times_and_places_of_files(
    corpus: Path, own_corpus: Path, tmp_path: Path
) -> None:
    fingerprints = []
    for number, folder in enumerate((corpus, own_corpus)):
        for path in own_corpus.iterdir():
            path.touch()
        config = two_sources(folder, tokenizer=save_tokenizer(tmp_path / f"tokenizer{number}"))
        fingerprints.append(fingerprint_of(config, tmp_path / f"data{number}"))
    assert fingerprints[0] == fingerprints[1]


def test_a_path_is_the_same_from_wherever_it_is_given(
    corpus: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = PreparedData.open(finished, two_sources(corpus)).fingerprint(1)
    monkeypatch.chdir(corpus)
    relative = two_sources(Path())
    assert not relative.sources["wiki"].path.is_absolute()
    assert PreparedData.open(finished, relative).fingerprint(1) == expected
