"""`prepare` with static masks: the contents of the columns, what they depend on, and errors."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_sources import pair_run
from prepared_files import contents, interrupt, pairs_config, recorded, sentence_documents, write_jsonl
from run_files import changed
from step_shapes import step_shape
from tokenizer_folders import Folder, byte_pairs

from evenpack.data.batches.objectives import StoredMasks
from evenpack.data.config import DataConfig
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepare import pairs as prepare_pairs
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, Split, packed_sources
from evenpack.data.recipes import MaskingConfig
from evenpack.data.sequences import MaskedPairsView, SentencePairsView
from evenpack.data.sequences.masking import masked_count
from evenpack.data.tokens import writer as token_writer
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.cost_weights import operation_weights
from evenpack.engine.resolving.objective import build_objective
from evenpack.engine.resolving.resolve import resolve
from evenpack.errors import ConfigError, DataError
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, StepCounts

LONGEST = 48
MASKS: dict[str, Any] = {"share": 0.2, "max_predictions": 6}
COLUMNS = ("mask_offsets", "mask_positions", "mask_labels", "most_masks")


def config_of(corpus: Path, masks: dict[str, Any] | None, **changes: Any) -> DataConfig:
    return pairs_config(corpus, recipe={"static_masks": masks, **changes.pop("recipe", {})}, **changes)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "wiki.jsonl", ["", *sentence_documents(200, seed=1)])


@pytest.fixture(scope="module")
def plain(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "data"
    prepare(config_of(text_file, None), directory)
    return directory


@pytest.fixture(scope="module")
def masked(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares pairs with masks; tests must not change them."""
    directory = tmp_path_factory.mktemp("masked") / "data"
    prepare(config_of(text_file, MASKS), directory)
    return directory


def view_of(directory: Path, config: DataConfig, split: Split = "train", source: str = "wiki") -> MaskedPairsView:
    view = PreparedData.open(directory, config).view(source, split)
    assert isinstance(view, MaskedPairsView)
    return view


def places_in_file(view: MaskedPairsView) -> np.ndarray:
    """Returns the positions of all masks among all tokens of the pairs."""
    starts = np.cumsum(view.lengths(), dtype=np.int64) - view.lengths()
    return np.repeat(starts, np.diff(view.mask_offsets)) + view.mask_positions


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("settings", [MASKS, {**MASKS, "whole_words": True, "mask_share": 0.5, "random_share": 0.3}])
def test_labels_put_back_make_the_pairs_without_masks(
    plain: Path, text_file: Path, tmp_path: Path, split: Split, settings: dict[str, Any]
) -> None:
    config = config_of(text_file, settings)
    prepare(config, tmp_path)
    view, original = view_of(tmp_path, config, split), PreparedData.open(plain, config_of(text_file, None))
    before = original.view("wiki", split)
    assert isinstance(before, SentencePairsView)
    assert not isinstance(before, MaskedPairsView)
    everything = np.arange(view.count)
    tokens, places = view.read(everything).tokens, places_in_file(view)
    expected = before.read(everything).tokens
    assert (tokens != expected).sum() > 100
    restored = tokens.copy()
    restored[places] = view.mask_labels
    np.testing.assert_array_equal(restored, expected)
    assert (np.diff(places) > 0).all()
    vocabulary = original.tokenizer.masking_vocabulary()
    assert not vocabulary.special[view.mask_labels].any()
    masking = MaskingConfig(**settings)
    counts = masked_count(view.lengths().astype(np.int64), masking)
    np.testing.assert_array_equal(np.diff(view.mask_offsets), counts)
    assert counts.max() == 6
    if split == "train":
        share = (tokens[places] == vocabulary.mask_id).mean()
        assert share == pytest.approx(masking.mask_share, abs=0.05)
        kept = (tokens[places] == view.mask_labels).mean()
        assert kept == pytest.approx(1 - masking.mask_share - masking.random_share, abs=0.05)
    for name in ("first_segment_lengths", "next_sentence_labels"):
        np.testing.assert_array_equal(getattr(view, name), getattr(before, name))


def test_most_masks_are_those_of_the_pairs(masked: Path, text_file: Path) -> None:
    view = view_of(masked, config_of(text_file, MASKS))
    counts, lengths = np.diff(view.mask_offsets), view.lengths()
    for length in range(LONGEST + 1):
        assert view.most_masks[length] == counts[lengths == length].max(initial=0)
    assert len(set(view.most_masks.tolist())) > 3


def test_each_duplicate_and_each_source_has_masks_of_its_own(text_file: Path, tmp_path: Path) -> None:
    """Documents of two sentences give the same pair in each pass; two sources of one text give the same pairs."""
    sources = {name: {"kind": "jsonl", "path": text_file} for name in ("wiki", "again")}
    recipe = {"short_target_probability": 0.0, "random_next_probability": 0.0}
    config = config_of(text_file, MASKS, sources=sources, recipe=recipe)
    prepare(config, tmp_path)
    first, second = (view_of(tmp_path, config, source=source) for source in sources)
    np.testing.assert_array_equal(first.lengths(), second.lengths())
    assert (first.mask_positions != second.mask_positions).mean() > 0.5
    masks_of_pairs: dict[bytes, list[bytes]] = {}
    for number in range(first.count):
        tokens, (begin, end) = first.read(np.array([number])).tokens.copy(), first.mask_offsets[number : number + 2]
        places = first.mask_positions[begin:end]
        tokens[places] = first.mask_labels[begin:end]
        if len(places) > 3:
            masks_of_pairs.setdefault(tokens.tobytes(), []).append(places.tobytes())
    twins = [masks for masks in masks_of_pairs.values() if len(masks) > 1]
    assert len(twins) > 10
    assert np.mean([len(set(masks)) == len(masks) for masks in twins]) > 0.9


@pytest.mark.parametrize("before", [MASKS, None, {**MASKS, "share": 0.1}])
def test_interrupted_masks_are_continued_and_those_of_other_settings_are_not(
    masked: Path, text_file: Path, tmp_path: Path, before: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 100)  # none of these shows
    monkeypatch.setattr(prepare_pairs, "_CHUNK_PAIRS", 13)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setattr(token_writer, "COMMIT_SECONDS", 0.0)
    interrupt(config_of(text_file, before), tmp_path / "data", 5, stage="pairs")
    recorder = recorded(config_of(text_file, MASKS), tmp_path / "data")
    first = next(state for state in recorder.states if state.stage == "pairs")
    assert (first.bytes_resumed > 0) == (before == MASKS)
    assert contents(tmp_path / "data") == contents(masked)


def test_without_validation_there_are_no_masks_for_it(text_file: Path, tmp_path: Path) -> None:
    config = config_of(text_file, MASKS, validation_fraction=0.0)
    prepare(config, tmp_path)
    view = view_of(tmp_path, config, "validation")
    assert view.mask_offsets.tolist() == [0]
    assert view.count == len(view.mask_labels) == 0


def test_the_fingerprint_and_the_manifest_cover_the_masks(masked: Path, plain: Path, text_file: Path) -> None:
    prepared = PreparedData.open(masked, config_of(text_file, MASKS))
    assert prepared.fingerprint(1) != PreparedData.open(plain, config_of(text_file, None)).fingerprint(1)
    names = {f"sources/wiki/{split}/{name}.npy" for split in ("train", "validation") for name in COLUMNS}
    assert names <= prepared.manifest.files.keys()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares two sources in unequal shares with stored masks."""
    recipe = {"kind": "sentence_pairs", "max_sequence_length": LONGEST, "duplication_factor": 2, "static_masks": MASKS}
    config = pair_run(tmp_path_factory.mktemp("pairs"), data={"recipe": recipe})
    prepare(config.data, config.prepared_dir)
    return config


def test_a_run_reads_the_stored_masks(run: RunConfig) -> None:
    prepared = PreparedData.open(run.prepared_dir, run.data)
    assert resolve(run, prepared).objective == StoredMasks(
        vocabulary_size=prepared.vocabulary_size, masked_token=MASKED_TOKEN, next_sentence=NEXT_SENTENCE
    )
    drawn = changed(run, data={"recipe": {**run.data.recipe.model_dump(), "static_masks": None}})
    unpadded = {"training": {"layout": "unpadded"}}
    drawn_again = PreparedData(prepared.directory, drawn.data, prepared.manifest)
    weights = [
        resolve(changed(one, **unpadded), data).shape.cost_weights
        for one, data in ((run, prepared), (drawn, drawn_again))
    ]
    assert weights[0] != weights[1]
    views = [view_of(run.prepared_dir, run.data, source=name) for name in prepared.source_names]
    share = sum(len(view.mask_labels) for view in views) / sum(view.token_file.tokens for view in views)
    as_stored = changed(drawn, **unpadded, masking={"share": share})
    assert weights[0] == operation_weights(as_stored, drawn_again)
    with pytest.raises(ConfigError, match=r"data\.recipe\.static_masks they are drawn once: leave\n? *masking out"):
        changed(run, masking={"share": 0.2})


def test_expected_denominators_are_the_mean_of_the_stored_counts(run: RunConfig) -> None:
    """The mean is over a step of whole epochs of both sources, drawn two to one."""
    run = changed(run, model={"loss_balancing": "expected"})
    prepared = PreparedData.open(run.prepared_dir, run.data)
    sources = packed_sources(prepared, "train", seed=run.run.seed)
    packs = 3 * int(np.lcm(sources[0].plan.packs, sources[1].plan.packs))
    shape, objective = step_shape(items_per_step=packs), resolve(run, prepared).objective
    planner = StepPlanner(sources, prepared.weights, shape=shape, ranks=1, objective=objective)
    counts = planner.plan(0).counts
    run = changed(run, training={"packs_per_step": packs, "packs_per_micro_batch": packs})
    denominators = resolve(run, prepared).denominators
    assert denominators(counts) == denominators(StepCounts(packs=1, sequences=2, tokens=3, targets=1))
    assert denominators(counts)["masked_token"] == pytest.approx(counts.targets, rel=1e-12)
    assert denominators(counts)["next_sentence"] == pytest.approx(counts.sequences, rel=1e-12)
    both = resolve(changed(run, model={"mlm_reduction": "sequence"}), prepared).denominators(counts)
    assert both["masked_token"] == both["next_sentence"] == denominators(counts)["next_sentence"]


def test_whole_words_of_a_vocabulary_that_marks_none_are_refused(run: RunConfig, tmp_path: Path) -> None:
    """As ModernBERT's: byte-level BPE with BERT's special tokens."""
    text_file = write_jsonl(tmp_path / "few.jsonl", sentence_documents(20, seed=1))
    backend = byte_pairs(special=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
    folder = Folder(backend=lambda: backend, config={}).write(tmp_path / "bytes")
    tokenizer = {"kind": "bert", "path": folder}
    refused = pytest.raises(DataError, match=r"a WordPiece vocabulary marks with ##, and none of these .* entries")
    with refused:
        prepare(config_of(text_file, {**MASKS, "whole_words": True}, tokenizer=tokenizer), tmp_path / "stored")
    drawn = config_of(text_file, None, tokenizer=tokenizer)
    prepare(drawn, tmp_path / "drawn")
    prepared = PreparedData.open(tmp_path / "drawn", drawn)
    config = changed(run, data=drawn.model_dump())
    build_objective(config, prepared)
    with refused:
        build_objective(changed(config, masking={"whole_words": True}), prepared)
