"""`evenpack.Loader`: one order at any division, resumed exactly, from documents of every kind."""

import copy
import errno
import filecmp
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT
from run_files import changed
from slow_cases import slow_but
from tiny_run import tiny_gpt2_run
from token_files import write

import evenpack
from evenpack.data import loader as loader_module
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.checksums import checksum_of_json
from evenpack.data.limits import MOST_STEPS
from evenpack.data.order.selection import order_hash
from evenpack.data.prepared import PreparedData
from evenpack.data.sources.files import _warn_once
from evenpack.data.tokens import own
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, ConfigError, DataError, PackingError, RunError

PACK_LENGTH = 64
DOCUMENTS = [
    np.random.default_rng(index).integers(1, 1000, size).tolist()
    for index, size in enumerate(np.random.default_rng(0).integers(2, 150, 200).tolist())
]


MASKS = evenpack.RandomMasks(mask_token=103, special_tokens=[0], vocabulary_size=30_522)


def made(documents: Any = DOCUMENTS, **settings: Any) -> evenpack.Loader:
    return evenpack.Loader(documents, **{"pack_length": PACK_LENGTH, "packs_per_step": 8, "arrays": "numpy"} | settings)


def pieces(documents: list[list[int]] = DOCUMENTS) -> list[list[int]]:
    """Returns the documents, the long ones cut, as the loader's sequences should be."""
    return [one[start : start + PACK_LENGTH] for one in documents for start in range(0, len(one), PACK_LENGTH)]


def segments(batch: Any) -> list[list[int]]:
    """Returns the tokens between boundaries, except for those of padding, which has no target and no sequence."""
    found = []
    bounds = np.asarray(batch.cu_seqlens).tolist()
    for start, stop in pairwise(bounds):
        tokens = np.asarray(batch.tokens)[start:stop].tolist()
        if any(tokens):
            found.append(tokens)
    return found


def ids(loader: evenpack.Loader, step: int) -> list[int]:
    found = np.concatenate([np.asarray(batch.sequence_ids) for batch in loader.batches_of(step)])
    return sorted(found[found >= 0].tolist())


def test_each_segment_is_a_document_or_its_piece_and_each_comes_once_in_an_epoch() -> None:
    loader = made(packs_per_step=1)
    found = [tokens for step in range(loader.packs) for batch in loader.batches_of(step) for tokens in segments(batch)]
    assert sorted(found) == sorted(pieces())


def test_a_run_that_stops_on_two_ranks_continues_on_one_and_on_four() -> None:
    unbroken = made()
    expected = [ids(unbroken, step) for step in range(9)]
    seen: list[list[int]] = []
    state: Any = None
    for ranks, steps in ((2, 3), (1, 2), (4, 4)):
        parts = [made(rank=rank, ranks=ranks, micro_batches=2) for rank in range(ranks)]
        iterators = [iter(one) for one in parts]
        if state is not None:
            for one in parts:
                one.load_state_dict(state)
        for _ in range(steps):
            batches = [next(iterator) for iterator in iterators for _ in range(2)]
            found = np.concatenate([batch.sequence_ids for batch in batches])
            seen.append(sorted(found[found >= 0].tolist()))
        states = [one.state_dict() for one in parts]
        assert states == states[:1] * ranks
        state = pickle.loads(pickle.dumps(states[0]))
    assert seen == expected
    assert state["step"] == 9


def test_a_step_counts_once_its_last_micro_batch_is_given_out() -> None:
    loader = made(micro_batches=2)
    iterator = iter(loader)
    steps = []
    for _ in range(5):
        next(iterator)
        steps.append(loader.state_dict()["step"])
    assert steps == [0, 1, 1, 2, 2]
    again = made(micro_batches=2)
    again.load_state_dict(loader.state_dict())
    assert ids(again, again.step) == ids(loader, 2)
    assert next(iter(again)).order_hash == loader.batches_of(2)[0].order_hash


@pytest.mark.parametrize("by_step", [False, True])
def test_an_iteration_does_not_go_on_where_a_state_has_moved_the_loader(by_step: bool) -> None:
    loader = made(micro_batches=2)
    state = {**loader.state_dict(), "step": 50}
    iteration: Any = loader.steps() if by_step else iter(loader)
    next(iteration)
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="and the loader is at step 50: it was moved by load_state_dict"):
        next(iteration)
    assert loader.state_dict()["step"] == 50
    first = next(iter(loader))
    assert first.order_hash == loader.batches_of(50)[0].order_hash


def test_iteration_ends_after_the_last_step() -> None:
    loader = made(steps=3, micro_batches=2)
    assert len(list(loader)) == 6
    assert [step.step for step in made(steps=3).steps()] == [0, 1, 2]
    assert list(loader) == []


def arrays_of(documents: list[list[int]]) -> evenpack.TokenArrays:
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in documents])])
    return evenpack.TokenArrays(np.concatenate(documents).astype(np.uint16), offsets)


def mapped(folder: Path, documents: list[list[int]]) -> evenpack.TokenArrays:
    one = arrays_of(documents)
    np.save(folder / "offsets.npy", one.document_offsets)
    one.read(0, one.tokens).tofile(folder / "tokens.bin")
    tokens = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
    return evenpack.TokenArrays(tokens, np.load(folder / "offsets.npy", mmap_mode="r"))


AS_ROWS = datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "text": ["x"] * len(DOCUMENTS)})
ORDER = np.random.default_rng(4).permutation(len(DOCUMENTS))
KINDS: dict[str, Callable[[Path], Any]] = {
    "lists of arrays": lambda _: [np.array(one) for one in DOCUMENTS],
    "arrays": lambda _: arrays_of(DOCUMENTS),
    "mapped arrays": lambda folder: mapped(folder, DOCUMENTS),
    "token file": lambda folder: write(folder / "tokens", [np.array(one) for one in DOCUMENTS]).prefix,
    "lists of numpy's numbers": lambda _: [list(np.array(one)) for one in DOCUMENTS],
    "tuple of tensors": lambda _: tuple(map(torch.tensor, DOCUMENTS)),
    "dataset": lambda _: AS_ROWS,
    "formatted dataset": lambda _: AS_ROWS.with_format("torch", columns=["text"]),
    "column of a formatted dataset": lambda _: AS_ROWS.with_format("torch")["input_ids"],
    "shuffled and concatenated dataset of large lists": lambda _: (
        datasets.concatenate_datasets([AS_ROWS.select(ORDER[:50]), AS_ROWS.select(ORDER[50:])])
        .cast_column("input_ids", datasets.LargeList(datasets.Value("uint16")))
        .select(np.argsort(ORDER))
    ),
    "chosen rows of a dataset": lambda _: datasets.Dataset.from_dict({"input_ids": [[7], *reversed(DOCUMENTS)]}).select(
        range(len(DOCUMENTS), 0, -1)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_the_documents_changes_nothing(kind: str, tmp_path: Path) -> None:
    loader, plain = made(KINDS[kind](tmp_path)), made()
    assert loader.fingerprint == plain.fingerprint
    for step in (0, 5, 30):
        (batch,), (expected,) = loader.batches_of(step), plain.batches_of(step)
        assert batch.tokens.tolist() == expected.tokens.tolist()
        assert batch.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
    (batch,) = pickle.loads(pickle.dumps(loader._dataset)).arrays(5), *()
    assert batch.tokens.tolist() == plain.batches_of(5)[0].tokens.tolist()


LABELS = [  # the first third of each document is a prompt, and of some all but the last token
    [
        -100 if place < len(one) / 3 or (index % 5 == 0 and place < len(one) - 1) else token
        for place, token in enumerate(one)
    ]
    for index, one in enumerate(DOCUMENTS)
]


def mapped_with_labels(folder: Path) -> evenpack.TokenArrays:
    without = mapped(folder, DOCUMENTS)
    np.concatenate(LABELS).astype(np.int16).tofile(folder / "labels.bin")
    return evenpack.TokenArrays(*without._given, labels=np.memmap(folder / "labels.bin", dtype=np.int16, mode="r"))


LABELLED_KINDS: dict[str, Callable[[Path], Any]] = {
    "lists": lambda _: evenpack.TokenArrays.of_lists(DOCUMENTS, labels=LABELS),
    "mapped arrays": mapped_with_labels,
    "dataset": lambda _: AS_ROWS.add_column("labels", LABELS),
    "formatted dataset": lambda _: AS_ROWS.add_column("labels", LABELS).with_format("torch", columns=["text"]),
}


def predicted(batch: Any) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of each sequence, and its labels, from the targets of the slots before."""
    targets, found = batch.targets["next_token"], []
    for start, stop in pairwise(np.asarray(batch.cu_seqlens).tolist()):
        tokens = batch.tokens[start:stop].tolist()
        if any(tokens):
            labels = np.where(targets.weights[start:stop] > 0, targets.labels[start:stop], -100)
            assert labels[-1] == -100
            found.append((tokens, [-100, *labels[:-1].tolist()]))
    return found


@pytest.mark.parametrize(
    ("kind", "cached"),
    [*slow_but(["lists", "mapped arrays"], ((kind, False) for kind in LABELLED_KINDS)), ("dataset", True)],
)
def test_labels_say_what_is_predicted_and_targets_are_counted_exactly(kind: str, cached: bool, tmp_path: Path) -> None:
    cache = tmp_path / "cache" if cached else None
    plain = made()
    for _ in range(1 + cached):  # at the second time from the cache
        loader = made(LABELLED_KINDS[kind](tmp_path), packs_per_step=16, ranks=2, micro_batches=2, cache=cache)
        found = []
        for step in range(-(-loader.packs // 16)):
            batches = [b for rank in (0, 1) for b in replaced(loader, rank).batches_of(step)]
            weights = sum(int(batch.targets["next_token"].weights.sum()) for batch in batches)
            assert weights == sum(batch.local_counts.targets for batch in batches) == loader.plan(step).counts.targets
            assert {batch.step_counts.targets for batch in batches} == {weights}
            found += [one for batch in batches for one in predicted(batch)]
        pairs = zip(pieces(), pieces(LABELS), strict=True)
        expected = sorted((tokens, [-100, *labels[1:]]) for tokens, labels in pairs)
        assert [one for one in sorted(found) if one in expected] == sorted(found)
        assert {tuple(tokens) for tokens, _ in found} == {tuple(tokens) for tokens, _ in expected}
    assert loader.fingerprint == made(LABELLED_KINDS["lists"](tmp_path), packs_per_step=16).fingerprint
    assert loader.fingerprint != made(packs_per_step=16).fingerprint
    assert sorted(loader.accounting) == sorted(plain.accounting)
    (batch,) = pickle.loads(pickle.dumps(replaced(loader, 0)._dataset)).arrays(0), *()
    assert predicted(batch) == predicted(replaced(loader, 0)[0])


def replaced(loader: evenpack.Loader, rank: int) -> evenpack.Loader:
    """Returns the loader of another rank."""
    other = copy.copy(loader)
    other._settings = replace(loader._settings, rank=rank)
    other.__dict__.pop("_dataset", None)
    return other


def test_other_labels_are_another_fingerprint_and_another_cache(tmp_path: Path) -> None:
    others = [[-100, *one[1:]] for one in DOCUMENTS]
    first = made(evenpack.TokenArrays.of_lists(DOCUMENTS, labels=LABELS), cache=tmp_path)
    second = made(evenpack.TokenArrays.of_lists(DOCUMENTS, labels=others), cache=tmp_path)
    assert first.plan(0).counts.targets < second.plan(0).counts.targets == made().plan(0).counts.targets
    with pytest.raises(CheckpointError, match="the state is of other data"):
        second.load_state_dict(first.state_dict())


def test_labels_that_the_sample_misses_are_not_read_with_the_targets_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "MOST_HASHED", 10)
    document = list(range(1, 601))
    given = [[-100] * prompt + document[prompt:] for prompt in (300, 500)]
    settings: dict[str, Any] = {"pack_length": 600, "packs_per_step": 1, "cache": tmp_path}
    first, other = (
        evenpack.Loader(evenpack.TokenArrays.of_lists([document], labels=[one]), **settings) for one in given
    )
    assert first.batches_of(0)[0].step_counts.targets == 300
    assert other.fingerprint == first.fingerprint
    with pytest.raises(DataError, match="labels of document 0 have changed since its packs were made"):
        other.batches_of(0)


@pytest.mark.parametrize("workers", slow_but([0], [0, 1]))
def test_a_step_in_which_nothing_is_predicted_is_refused(workers: int) -> None:
    labels = [[-100] * 4] * 7 + [[1, 2, 3, 4]]
    documents = evenpack.TokenArrays.of_lists([[1, 2, 3, 4]] * 8, labels=labels)
    loader = evenpack.Loader(documents, pack_length=4, packs_per_step=4, workers=workers)
    assert sorted(loader.plan(step).counts.targets for step in range(2)) == [0, 3]
    with pytest.raises(DataError, match="has no target: nothing is predicted in any of its 4 packs"):
        list(itertools.islice(loader, 2))


def lists(labels: list[Any]) -> evenpack.TokenArrays:
    return evenpack.TokenArrays.of_lists([[1, 2], [3, 4, 5]], labels=labels)


def rows(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5]], **columns})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lists([[-100, 2], [4, 5, -100]]), "document 1 has label 4 at token 0, which is 3: .*not shifted"),
        (lambda: lists([[1, 2]]), "labels for 1 documents, there are 2"),
        (lambda: lists([[1, 2], [3, 4]]), r"document 1 has labels of type int64 and shape \[2\], expected .* its 3"),
        (lambda: lists([[-100] * 2, [-100] * 3]), "the labels leave every token out of the loss"),
        (lambda: evenpack.TokenArrays(np.ones(3, int), np.array([0, 3]), labels=np.ones(3, np.uint16)), "signed"),
        (lambda: rows(labels=[[1, 2], [3]]), "the first of them row 1, have not as many 'labels' as 'input_ids'"),
        (lambda: rows(labels=[0, 1]), "column 'labels' must hold lists of integers, found int64"),
    ],
)
def test_labels_that_do_not_fit_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(make(), packs_per_step=1).plan(0)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("completion_mask", [[0, 1], [0, 0, 1]], "says in completion_mask what counts in the loss, and has no column"),
        ("attention_mask", [[1, 1], [1, 1, 0]], "'attention_mask' of row 1 is padded: it has zeros"),
        ("loss_weights", [[0.5, 1.0], [1.0, 0.1, 1.0]], "has weights in loss_weights, and the loader none"),
        ("weights", [0.5, 1.0], "has weights in weights, and the loader none"),
    ],
)
def test_a_dataset_whose_masks_or_weights_would_go_unnoticed_is_refused(column: str, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(rows(**{column: values}))
    assert made(rows(attention_mask=[[1, 1], [1, 1, 1]]), packs_per_step=1).packs == 1


ROWS = [DOCUMENTS[first : first + 3] for first in range(0, len(DOCUMENTS), 3)]
"""Documents that were packed before, some to a row."""


def of_each_token(value: Callable[[int, int], int]) -> list[list[int]]:
    """Returns a value for the place of each token: the document in its row, and the token in its document."""
    return [[value(index, place) for index, one in enumerate(row) for place in range(len(one))] for row in ROWS]


LENGTHS = [[len(one) for one in row] for row in ROWS]
POSITIONS = of_each_token(lambda _, place: place)
ENDS = [np.cumsum([0, *row]).tolist() for row in LENGTHS]
FROM_0, FROM_1 = (of_each_token(lambda index, _, first=first: first + index) for first in (0, 1))
NAMES: list[tuple[list[list[int]], str]] = [
    (POSITIONS, "position_ids input_pos decoder_positions targets_position document_position_ids rope_positions"),
    (FROM_0, "sequence_ids seq_idx conversation_ids"),
    (FROM_1, "segment_ids decoder_segment_ids inputs_segmentation inputs_segment_ids attention_mask document_mask"),
    (LENGTHS, "seq_lengths doc_lens length packed_seqlens pack_seq_lens seqlens_q sub_sample_lengths"),
    (ENDS, "cu_seqlens cu_seq_lens_q cu_doc_lens cumulative_len"),
    ([one[:-1] for one in ENDS], "seq_start_id"),
]
BORDERS: dict[str, dict[str, Any]] = {
    **{name: {name: values} for values, names in NAMES for name in names.split()},
    "positions of RoBERTa": {"position_ids": of_each_token(lambda _, place: place + 2)},
    "lengths and nothing": {"doc_lens": [[0, *row, 0] for row in LENGTHS]},
    "offsets of fixed size": {"cu_seqlens": [one + one[-1:] * (5 - len(one)) for one in ENDS]},
    "falling ids": {"Document_IDs": of_each_token(lambda index, _: (7 - index) * 1_000)},
    "a plain mask beside positions": {"attention_mask": of_each_token(lambda *_: 1), "position_ids": POSITIONS},
    "all together": {
        "seq_idx": FROM_0,
        "segment_ids": FROM_1,
        "cu_seqlens": ENDS,
        "position_ids": POSITIONS,
        "token_type_ids": of_each_token(lambda _, place: place % 2),
        "doc_id": [f"row {row}" for row in range(len(ROWS))],
        "length": [sum(row) for row in LENGTHS],
        "max_length_q": [max(row) for row in LENGTHS],
    },
}


@pytest.mark.parametrize("kind", slow_but(["position_ids", "attention_mask", "seq_lengths", "all together"], BORDERS))
def test_rows_that_were_packed_before_keep_their_borders(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = BORDERS[kind]
    monkeypatch.setattr("evenpack.data.tokens.borders.ROWS_AT_ONCE", 7)
    content = {"input_ids": [list(itertools.chain(*row)) for row in ROWS], **columns}
    packed = datasets.Dataset.from_dict(content)
    assert made(packed).fingerprint == made().fingerprint
    labels = [list(itertools.chain(*LABELS[first : first + 3])) for first in range(0, len(LABELS), 3)]
    loader = made(packed.add_column("labels", labels).with_format("torch"))
    expected = made(evenpack.TokenArrays.of_lists(DOCUMENTS, labels=LABELS))
    assert loader.fingerprint == expected.fingerprint
    again = pickle.loads(pickle.dumps(loader._dataset)).arrays(3)
    for batch in (*loader.batches_of(3), again):
        assert predicted(batch) == predicted(expected[3])
    if len(columns) == 1:
        assert made(packed["input_ids"]).fingerprint == made().fingerprint
    chosen = np.random.default_rng(7).permutation(len(ROWS)).tolist()
    assert made(packed.select(chosen)).fingerprint == made([one for row in chosen for one in ROWS[row]]).fingerprint


@pytest.mark.slow
def test_what_trl_packs_keeps_its_borders_or_has_none() -> None:
    pack_dataset = pytest.importorskip("trl").pack_dataset
    short = [one[:PACK_LENGTH] for one in DOCUMENTS]
    rows = datasets.Dataset.from_dict({"input_ids": short, "labels": short})
    packed = pack_dataset(rows, seq_length=PACK_LENGTH, strategy="bfd")
    assert len(packed) < len(short)
    loader = made(packed, packs_per_step=1)
    found = [tokens for step in range(loader.packs) for tokens in segments(loader[step])]
    assert sorted(found) == sorted(short)
    assert sum(loader.plan(step).counts.targets for step in range(loader.packs)) == sum(len(one) - 1 for one in short)


TOKENS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"seq_lengths": [[2, 1], [3]]}, "'seq_lengths' of row 0 has 3 tokens in its documents, the row has 4"),
        ({"doc_lens": [[4], [4, -1]]}, "'doc_lens' of row 1 holds -1"),
        ({"cu_seqlens": [[0, 4], [0, 2]]}, "'cu_seqlens' of row 1 must begin with 0 and end with 3"),
        ({"cu_seqlens": [[0, 4], []]}, "'cu_seqlens' of row 1 is empty, and the row has 3 tokens"),
        ({"doc_starts": [[0, 5], [0]]}, "'doc_starts' of row 0 holds -1"),
        ({"position_ids": [[0, 1, 5, 6], [0, 1, 2]]}, "'position_ids' of row 0 goes from 1 to 5, which neither"),
        ({"position_ids": [[0, 1, 2, 3], [0, 1]]}, "'position_ids' of row 1 has 2 values for 3 tokens"),
        ({"position_ids": [[0, 1, 2, 3], [0, None, 1]]}, "'position_ids' of row 1 holds a null"),
        ({"position_ids": [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]}, "must hold lists of integers, found list"),
        ({"attention_mask": [[1, 1, 2, 2], [1, 2, 0]]}, "'attention_mask' of row 1 is padded"),
        ({"segment_ids": [[1, 1, 2, 2], [1, 0, 2]]}, "'segment_ids' of row 1 has ids that stand for padding"),
        ({"seq_idx": [[0, 0, 1, 1], [1, 0, 2]]}, "'seq_idx' of row 1 has ids that stand for padding"),
        ({"chunk_lengths": [[1, 3], [3]]}, "column 'chunk_lengths' may say where documents of a row begin"),
        ({"rows": [list("aabb"), list("aab")]}, "column 'rows' may say where documents of a row begin"),
        ({"rows": [{"start": [0, 1]}, {"start": [0]}]}, "column 'rows' may say where documents of a row begin"),
        ({"cu_seqlens": ["", "[0, 1, 3]"]}, "column 'cu_seqlens' says where documents of a row begin"),
        ({"position_ids": [bytes(4), bytes(3)]}, "column 'position_ids' says where documents of a row begin"),
        ({"num_tokens": [3, None]}, "'num_tokens' of row 0 says 3 tokens, and the row holds 4"),
        ({"split": ["train", "test"]}, "'split' is 'test', and other rows say 'train'"),
        (
            {"seq_lengths": [[4], [1, 2]], "position_ids": [[0, 1, 2, 3], [0, 1, 0]]},
            "'seq_lengths' and 'position_ids' mark other documents in row 1, at token 1",
        ),
    ],
)
def test_borders_that_do_not_fit_are_named_with_their_column(
    columns: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": TOKENS, **columns})
    for at_once in (1, 1024):
        monkeypatch.setattr("evenpack.data.tokens.borders.ROWS_AT_ONCE", at_once)
        with pytest.raises(DataError, match=re.escape(message)):
            made(rows)
    assert made(rows.remove_columns(list(columns)), packs_per_step=1).packs == 1


def test_columns_that_mark_no_borders_are_passed_over() -> None:
    flags = [[1, 0, 1, 0], [0, 1, 0]]
    integers = "token_type_ids special_tokens_mask label_mask loss_mask prompt_mask labels"
    content: dict[str, Any] = dict.fromkeys(integers.split(), flags)
    content |= {"text": ["a", "b"], "doc_id": ["a", "b"], "position": [3, 4], "segments": [["a"], ["b"]], "id": [1, 2]}
    content |= {"offset_mapping": [[[0, 1]] * 4, [[0, 1]] * 3], "messages": [[{"role": "user"}], []]}
    content |= {"labels": TOKENS, "length": [4, None], "token_count": [9, 3], "split": ["train", "wiki"]}
    content |= {"seq_id": ["1-2", "a"], "sample_id": [b"12", b"3"], "positions": ["one of 2", ""]}
    content |= {"words": [list("aabb"), list("aa")], "none": [[], None]}
    rows = datasets.Dataset.from_dict({"input_ids": TOKENS, **content, "score": [0.5, 0.5]})
    alone = evenpack.TokenArrays.of_lists(TOKENS, labels=TOKENS)
    assert made(rows, packs_per_step=1).fingerprint == made(alone, packs_per_step=1).fingerprint


SPLIT = datasets.Dataset.from_dict({"input_ids": TOKENS})


@pytest.mark.parametrize(
    "documents",
    [
        datasets.DatasetDict(train=SPLIT, test=SPLIT),
        datasets.IterableDatasetDict(train=SPLIT.to_iterable_dataset(), test=SPLIT.to_iterable_dataset()),
        {"train": SPLIT, "test": SPLIT},
        {"train": datasets.DatasetDict(train=SPLIT)},
    ],
)
def test_splits_are_no_sources(documents: Any) -> None:
    for weights in (None, {"train": 1, "test": 1}):
        with pytest.raises(DataError, match=r"no split is named: give one, such as documents\['train'\]"):
            made(documents, weights=weights)


@pytest.mark.parametrize("names", [("train_wiki", "test"), ("wiki_train", "wiki_test"), ("corpus", "evals")])
def test_sources_that_seem_to_be_held_out_are_named(names: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    assert made(dict.fromkeys(names, SPLIT), weights=dict.fromkeys(names, 1), packs_per_step=1).packs == 2
    assert f"the sources {names[1]} are trained on, and their names say" in caplog.text


def test_a_column_of_splits_is_read_in_each_form() -> None:
    labels = datasets.Features({"split": datasets.ClassLabel(names=["train", "dev", "wiki"])})
    for chosen, is_refused in (([0, 1], True), ([0, 2], False), ([1, 1], False)):
        column = datasets.Dataset.from_dict({"split": chosen}, features=labels)
        rows = datasets.concatenate_datasets([SPLIT, column], axis=1).select([1, 0])
        if is_refused:
            with pytest.raises(DataError, match=r"'split' is '(train|dev)', and other rows say"):
                made(rows, packs_per_step=1)
        else:
            assert made(rows, packs_per_step=1).packs == 1
    lists = SPLIT.add_column("data_split", [["train"], ["test"]])
    assert made(lists, packs_per_step=1).packs == 1


@pytest.mark.parametrize("form", ["rows", "lists", "arrays"])
def test_documents_that_seem_to_be_rows_of_a_stream_are_named(form: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = np.arange(8 * 40).reshape(8, 40)
    documents: Any = stream.tolist()
    if form == "rows":
        documents = datasets.Dataset.from_dict({"input_ids": documents, "labels": documents})
    elif form == "arrays":
        documents = evenpack.TokenArrays(stream.flatten(), np.arange(0, 321, 40))
    made(documents)
    assert "source 'data': its first 8 documents have 40 tokens each. If they are rows that were cut" in caplog.text
    caplog.clear()
    made([*stream[:7].tolist(), [1, 2]])
    made(stream[:7].tolist())
    made(stream[:, :31].tolist())
    assert not caplog.text


def test_arrays_that_hide_values_are_refused() -> None:
    hidden = np.ma.MaskedArray([1, 2, 3, 4], mask=[0, 0, 1, 1])
    for documents in (
        lambda: evenpack.TokenArrays(hidden, np.array([0, 4])),
        lambda: evenpack.TokenArrays.of_lists([hidden]),
        lambda: evenpack.TokenArrays.of_lists([[1, 2, 3, 4]], labels=[hidden]),
    ):
        with pytest.raises(DataError, match="is a masked array, and what it hides would be trained on"):
            documents()


def test_columns_are_no_sources() -> None:
    with pytest.raises(DataError, match="input_ids, position_ids are columns: give one table of them"):
        made({"input_ids": TOKENS, "position_ids": TOKENS}, weights={"input_ids": 1, "position_ids": 1})
    with pytest.raises(DataError, match=r"rows make a datasets.Dataset \(from_list\)"):
        made(list(SPLIT))


def test_an_empty_document_has_empty_labels() -> None:
    documents = evenpack.TokenArrays.of_lists([[], [1, 2, 3], []], labels=[[], [-100, 2, 3], []])
    assert documents.unpredicted(np.array([0, 0, 3]), np.array([0, 3, 0])).tolist() == [True, False, False]
    assert evenpack.TokenArrays.of_lists([[]], labels=[[]]).labelled


def test_mapped_arrays_are_pickled_as_their_place(tmp_path: Path) -> None:
    many = mapped(tmp_path, DOCUMENTS * 50)
    assert len(pickle.dumps(many)) < 2000
    part = evenpack.TokenArrays(many._given[0][: len(DOCUMENTS[0])], np.array([0, len(DOCUMENTS[0])]))
    assert pickle.loads(pickle.dumps(part)).read(0, 5).tolist() == DOCUMENTS[0][:5]
    copied = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="c")
    copied[:3] = 7
    own_pages = evenpack.TokenArrays(copied, np.array([0, len(copied)]))
    own_pages.release_pages()
    assert pickle.loads(pickle.dumps(own_pages)).read(0, 4).tolist() == [7, 7, 7, DOCUMENTS[0][3]]


def test_workers_read_the_same_batches() -> None:
    loader = made(workers=2, micro_batches=2, arrays="torch", steps=4)
    plain = made(micro_batches=2, steps=4)
    for batch, expected in zip(loader, plain, strict=True):
        assert batch.tokens.tolist() == expected.tokens.tolist()
        assert batch.targets["next_token"].labels.tolist() == expected.targets["next_token"].labels.tolist()
        assert batch.order_hash == expected.order_hash
        assert loader.state_dict() == plain.state_dict()


WAYS: tuple[Callable[[evenpack.Loader], Any], ...] = (
    lambda loader: next(loader.steps()),
    lambda loader: loader.batches_of(0),
    lambda loader: loader[0],
    lambda loader: next(iter(loader)),
)


class Wrapped(torch.utils.data.IterableDataset[Any]):
    def __init__(self, loader: evenpack.Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        for read in WAYS:
            with suppress(ConfigError):
                read(self.loader)
                yield "read"
        yield from self.loader


def test_a_loader_within_workers_of_a_data_loader_is_refused() -> None:
    wrapped = Wrapped(made(arrays="torch", steps=3))
    outer = torch.utils.data.DataLoader(wrapped, batch_size=None, num_workers=1, multiprocessing_context="fork")
    found = []
    with pytest.raises(ConfigError, match=r"within a worker of torch's DataLoader: .* PackTrainer, PackSFTTrainer,"):
        found.extend(outer)
    assert found == []
    assert len(list(wrapped.loader)) == 3


def test_a_loader_is_no_dataset() -> None:
    loader: Any = made(arrays="torch", steps=3)
    with pytest.raises(ConfigError, match=r"has no length: .* PackTrainer, PackSFTTrainer, PackDataModule or Pack"):
        list(torch.utils.data.DataLoader(loader))
    assert loader
    assert len(list(loader)) == 3


FORKED = """
import os, sys
import evenpack

if __name__ == "__main__":
    loader = evenpack.Loader([[1, 2, 3, 4]] * 64, pack_length=4, packs_per_step=2, workers=1, steps=9)
    plain = evenpack.Loader([[1, 2, 3, 4]] * 64, pack_length=4, packs_per_step=2, steps=9)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except evenpack.ConfigError as error:
            print(error, flush=True)
        later = evenpack.Loader([[1, 2, 3, 4]] * 64, pack_length=4, packs_per_step=2, steps=9)
        assert len(list(later)) == 9
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    rest = list(batches)
    assert [one.order_hash for one in rest] == [one.order_hash for one in list(plain)[1:]]
"""


@pytest.mark.slow
def test_an_iteration_with_workers_does_not_go_on_in_a_fork(tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(FORKED)
    command = [sys.executable, str(tmp_path / "forked.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this iteration began before a fork, and its worker processes belong to the parent")


def test_a_killed_worker_is_explained_and_the_handler_of_the_script_stays() -> None:
    ended = []
    before = signal.signal(signal.SIGCHLD, lambda *_: ended.append("child"))
    try:
        others = set(multiprocessing.active_children())
        iterator = iter(made(workers=1, arrays="torch"))
        next(iterator)
        (worker,) = set(multiprocessing.active_children()) - others
        worker.kill()
        with pytest.raises(RunError, match=r"has died: .* take fewer of them \(.* workers of a Loader\)"):
            list(iterator)
        ended.clear()
        subprocess.run(["true"], check=True)
        assert ended
        del iterator  # torch's handler, if an earlier test has left it as `before`, would raise the death once more
        gc.collect()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_cache_opens_the_packs_without_packing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(cache=tmp_path)
    expected = ids(first, 3)
    assert first.state_dict() == made().state_dict()
    monkeypatch.setattr(loader_module, "store_plan", None)
    monkeypatch.setattr(loader_module, "pack_view", None)
    assert ids(made(cache=tmp_path), 3) == expected
    with pytest.raises(TypeError):  # other packs are packed
        ids(made(cache=tmp_path, max_sequences_per_pack=2), 3)
    assert len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) == 1


CACHED = [
    *("checksums.json", "documents.npy", "first_sequences.npy", "histogram.npy", "packing.json"),
    *("sorted_sequences.npy", "targets.npy", "view.json"),
]


def other_byte(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def other_version(content: bytes) -> bytes:
    values = json.loads(content) | {"version": 7}
    del values["checksum"]
    return json.dumps({"checksum": checksum_of_json(values), **values}).encode()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n0"),
    "first byte": lambda path: path.write_bytes(other_byte(path.read_bytes(), 0)),
    "middle byte": lambda path: path.write_bytes(other_byte(path.read_bytes(), path.stat().st_size // 2)),
    "gone": Path.unlink,
    "of another cache": lambda path: shutil.copy(path.parent.parent.parent / "other" / path.name, path),
    "swapped": lambda path: [
        path.rename(path.with_name("aside")),
        (other := path.with_name("view.json" if path.name != "view.json" else "packing.json")).rename(path),
        path.with_name("aside").rename(other),
    ],
    "another version": lambda path: path.write_bytes(other_version(path.read_bytes())),
    "unknown chunks": lambda path: path.write_text(path.read_text().replace("chunks", "pieces")),
}


def test_each_damage_of_a_cache_is_named_with_the_folder(tmp_path: Path) -> None:
    documents = evenpack.TokenArrays.of_lists(DOCUMENTS, labels=LABELS)
    settings: dict[str, Any] = {"packing": "longest_pack_first", "cache": tmp_path / "cache"}
    expected = ids(made(documents, **settings), 3)
    (folder,) = (tmp_path / "cache").iterdir()
    made(documents, **settings | {"cache": tmp_path / "others", "long_documents": "drop"}).batches_of(0)
    next((tmp_path / "others").iterdir()).rename(tmp_path / "other")
    shutil.copytree(folder, tmp_path / "whole")
    assert sorted(path.name for path in folder.iterdir()) == CACHED
    for name, (damage, change) in itertools.product(CACHED, DAMAGES.items()):
        if damage in ("another version", "unknown chunks") and name != "checksums.json":
            continue
        change(folder / name)
        if damage == "of another cache" and filecmp.cmp(folder / name, tmp_path / "whole" / name, shallow=False):
            assert name == "documents.npy", "the same in both"
            continue
        with pytest.raises(DataError, match=re.escape(str(folder))) as caught:
            pytest.fail(f"{damage} {name}: {ids(made(documents, **settings), 3)}")
        if damage == "another version":
            assert "is of version 7, expected 2; give another `cache`" in str(caught.value)
        else:
            assert f"Remove {folder}, and the next loader fills it again" in str(caught.value), (name, damage)
        with pytest.raises(DataError, match=re.escape(str(folder))):
            _ = made(documents, **settings).fingerprint
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "whole", folder)
    assert ids(made(documents, **settings), 3) == expected
    shutil.rmtree(folder)
    assert ids(made(documents, **settings), 3) == expected


def test_a_cache_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    made(cache=tmp_path).batches_of(0)
    (folder,) = tmp_path.iterdir()
    for name in ("checksums.json", "documents.npy"):
        kept = (folder / name).rename(tmp_path / "kept")
        (folder / name).symlink_to(folder / name)  # ELOOP, also for root
        with pytest.raises(DataError, match=r"cannot be read: .*symbolic links; the file may be"):
            made(cache=tmp_path).batches_of(0)
        kept.rename(folder / name)
    made(cache=tmp_path).batches_of(0)


def test_a_cache_that_cannot_be_filled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"the loader's cache cannot be filled: .*/file/.* cannot be .*Not a directory"):
        made(cache=tmp_path / "file").batches_of(0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loader_module, "store_plan", full)
    with pytest.raises(RunError, match=r"cannot be filled: .*: No space left on device; make room"):
        made(cache=tmp_path).batches_of(0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_packs_and_order_of_a_set_are_the_recorded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenpack.data.sequences.documents._CHUNK_DOCUMENTS", 100)
    monkeypatch.setattr("evenpack.data.tokens.file._FEW_DOCUMENTS", 50)
    offsets = np.append(0, np.cumsum(np.arange(1000) * 7919 % 150))
    documents = evenpack.TokenArrays(np.arange(offsets[-1], dtype=np.int32) % 997, offsets)
    for cache in (tmp_path, None):
        loader = made(documents, packing="longest_pack_first", cache=cache)
        assert loader.fingerprint == "9d62836cea0490173c4ad4efd41b7fdd"
        assert (
            sum(batch.order_hash for step in (0, 1, 500) for batch in loader.batches_of(step)) % (1 << 64)
            == 1196582563259479208
        )
    (folder,) = tmp_path.iterdir()
    found = {path.name: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in folder.iterdir()}
    assert found == {
        "checksums.json": "69ce73d6b5fa0a19",
        "documents.npy": "2e10f3c573484646",
        "first_sequences.npy": "e249a2a9683c459c",
        "histogram.npy": "7e35305203a46987",
        "packing.json": "9cc7ddb54f3e49e5",
        "sorted_sequences.npy": "ead5d95a4a952004",
        "view.json": "f0f2083fce794a92",
    }


MEASURED = """
import re, sys, tracemalloc
from pathlib import Path
import numpy as np
import evenpack
from evenpack.data import checksums
from evenpack.data.order import plan
from evenpack.data.sequences import documents, view
from evenpack.data.tokens import own

checksums.CHUNK_BYTES = 1 << 16
documents._CHUNK_DOCUMENTS = view._CHUNK_SEQUENCES = plan._RELEASE_EVERY = 1 << 14
documents._CHUNK_TOKENS = own.MOST_HASHED = 1 << 14
folder, labelled = Path(sys.argv[1]), sys.argv[2] == "labelled"
offsets = np.load(folder / "offsets.npy", mmap_mode="r")

def resident():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

def peaks(offsets, cache):
    zeros = np.memmap(folder / "zeros", dtype=np.int32, mode="r", shape=(int(offsets[-1]),))
    given = evenpack.TokenArrays(zeros, offsets, labels=zeros if labelled else None)
    loader = evenpack.Loader(given, pack_length=32, packs_per_step=4, cache=folder / cache, arrays="numpy")
    loader.data._hashes  # of a sample of fixed size, whose pages count too
    given.release_pages()
    tracemalloc.start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = resident()
    loader.fingerprint  # packs, and fills the cache
    grown = resident() - before
    loader.batches_of(0)
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return np.array([allocated, grown])

few = 1 << 15
peaks(offsets[: few + 1], "imports")
growth = (peaks(offsets, "all") - peaks(offsets[: few + 1], "few")) / (len(offsets) - 1 - few)
print(*growth)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory as Linux counts it")
@pytest.mark.parametrize(("labels", "count"), [("plain", 1 << 22), ("labelled", 1 << 19)])
def test_packing_into_a_cache_takes_memory_that_does_not_grow_with_the_documents(
    tmp_path: Path, labels: str, count: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, count)
    np.save(tmp_path / "offsets.npy", np.append(0, np.cumsum(lengths)))
    with (tmp_path / "zeros").open("wb") as file:
        file.truncate(4 * int(lengths.sum()))
    command = [sys.executable, "-c", MEASURED, str(tmp_path), labels]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    allocated, resident = map(float, found.stdout.split())
    assert allocated < 0.5  # bytes a document
    if labels == "plain":  # others are too few to count pages by
        assert resident < 2.5  # the index of ids alone has 4, the other arrays and the offsets 24


def test_another_rank_may_store_the_packs_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folders = loader_module.store_plan, list[Path]()

    def interrupted(folder: Path, *arguments: Any, **settings: Any) -> Any:
        folders.append(folder)
        if len(folders) == 1:  # the other has the same process id, as in two containers
            other.append(ids(made(cache=tmp_path), 3))
        assert folder.exists()
        return store(folder, *arguments, **settings)

    other: list[list[int]] = []
    monkeypatch.setattr(loader_module, "store_plan", interrupted)
    assert [ids(made(cache=tmp_path), 3)] == other
    assert len(set(folders)) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_sources_are_drawn_by_their_weights() -> None:
    loader = made({"a": DOCUMENTS[:100], "b": DOCUMENTS[100:]}, weights={"a": 3, "b": 1})
    for step in range(5):
        assert np.bincount(loader.plan(step).packs.sources).tolist() == [6, 2]
    assert set(loader.accounting) == {"a", "b"}


@pytest.mark.parametrize("per_segment", [0.0, 40.0])
def test_packs_cost_the_same_for_their_slots_however_many_hold_tokens(per_segment: float) -> None:
    weights = evenpack.CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=per_segment)
    one, other = (
        made(ranks=2, packing="none", cost_weights=replace(weights, per_token=per_token)) for per_token in (0.0, 1e6)
    )
    for step in range(3):
        assert ids(one, step) == ids(other, step)
        assert one.plan(step).cost(0) == other.plan(step).cost(0) == other.batches_of(step)[0].cost


def test_prepared_data_gives_the_packs_and_targets_of_its_run(tmp_path: Path) -> None:
    config = tiny_gpt2_run(tmp_path)
    recipe = {**config.data.recipe.model_dump(), "end_of_text_in_loss": "none"}
    config = changed(config, data={"recipe": recipe})
    resolved = open_run(config)
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    trained = MicroBatchDataset(resolved.prepared, resolved.pipeline_settings(alone))
    loader = evenpack.Loader(
        resolved.prepared, packs_per_step=config.training.packs_per_step, micro_batches=2, seed=config.run.seed
    )
    for index in (0, 1, 7):
        assert loader[index].order_hash == trained[index].order_hash
        assert torch.equal(loader[index].tokens, trained[index].tokens)
        found, expected = (one[index].targets["next_token"].weights for one in (loader, trained))
        assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match="prepared data has its own weights, cache, as its run file says"):
        evenpack.Loader(resolved.prepared, packs_per_step=8, weights={"one": 1}, cache=tmp_path)
    with pytest.raises(ConfigError, match="RandomMasks are for documents of your own, found prepared data"):
        evenpack.Loader(resolved.prepared, packs_per_step=8, objective=MASKS)
    with pytest.raises(ConfigError, match="the data was prepared with packs of 64, found 32"):
        evenpack.Loader(resolved.prepared, packs_per_step=8, pack_length=32)


def test_prepared_data_is_verified_before_its_first_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_gpt2_run(tmp_path)
    prepared = open_run(config).prepared
    files = [record.locate(prepared.directory) for record in prepared.manifest.files.values()]
    filled = [path for path in files if path.stat().st_size]
    assert len(filled) > 8
    for number, path in enumerate(filled):
        content = path.read_bytes()
        path.write_bytes(other_byte(content, len(content) // 2))
        opened = PreparedData.open(config.prepared_dir, config.data, verify="nothing")
        loader = evenpack.Loader(opened, packs_per_step=8, arrays="torch", workers=int(number == 0))
        read = (lambda one: next(iter(one)), lambda one: one.batches_of(3), lambda one: one.plan(0))[number % 3]
        with pytest.raises(DataError, match=f"is damaged.*\n.*{re.escape(str(path))} is not as it was written"):
            read(loader)
        path.write_bytes(content)
    unchecked = config.data.model_copy(update={"verify_in_training": False})
    caplog.set_level("INFO")
    evenpack.Loader(PreparedData.open(config.prepared_dir, unchecked, verify="later"), packs_per_step=8).plan(0)
    assert "is not verified here, only its sizes (data.verify_in_training is false)" in caplog.text
    assert evenpack.Loader(opened, packs_per_step=8).plan(0).counts.packs == 8


WITH_ANOTHER: dict[str, dict[str, Any]] = {
    "documents": {"documents": DOCUMENTS[1:]},
    "token": {"documents": [[1, *DOCUMENTS[0][1:]], *DOCUMENTS[1:]]},
    "border": {"documents": [DOCUMENTS[0] + DOCUMENTS[1][:1], DOCUMENTS[1][1:], *DOCUMENTS[2:]]},
    "pack length": {"pack_length": 32},
    "packs of a step": {"packs_per_step": 16},
    "packing": {"packing": "longest_pack_first", "max_sequences_per_pack": 2},
    "long documents": {"long_documents": "truncate"},
    "source": {"documents": {"other": DOCUMENTS}},
}


@pytest.mark.parametrize("settings", WITH_ANOTHER.values(), ids=WITH_ANOTHER)
def test_a_state_of_other_packs_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="the state is of other data"):
        made(**settings).load_state_dict(made().state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 3}, "the state is of seed 3, this loader has seed 0"),
        ({"version": 2}, "version 2, this evenpack reads 1"),
        ({"step": -1}, "the state's step must be a whole number from 0 to"),
    ],
)
def test_a_state_that_is_wrong_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        made().load_state_dict({**made().state_dict(), **change})
    with pytest.raises(CheckpointError, match="has no fingerprint, seed, step"):
        made().load_state_dict({"version": 1})


@pytest.mark.parametrize("step", [-1, MOST_STEPS + 1])
def test_places_outside_of_all_steps_are_refused(step: int) -> None:
    loader = made(micro_batches=2)
    with pytest.raises(IndexError, match=f"counted from 0, in steps up to .*; found index {2 * step}"):
        _ = loader[2 * step]
    for method in (loader.plan, loader.batches_of):
        with pytest.raises(ConfigError, match=f"step must be a whole number from 0 to .*, found {step}"):
            method(step)


def test_the_last_of_all_steps_can_be_read() -> None:
    loader = made(micro_batches=2)
    assert loader.batches_of(MOST_STEPS)[1].order_hash == loader[2 * MOST_STEPS + 1].order_hash


def test_only_what_changes_the_order_changes_the_fingerprint() -> None:
    others = made(ranks=4, rank=2, micro_batches=2, cost_weights=None, workers=0, steps=5, vocabulary_size=1000)
    assert others.fingerprint == made().fingerprint
    doubled, once = (made({"a": DOCUMENTS}, weights={"a": weight}) for weight in (2, 1))
    assert doubled.fingerprint == once.fingerprint


def test_sources_in_another_order_are_other_steps_and_have_another_fingerprint() -> None:
    parts = {"a": DOCUMENTS[:100], "b": DOCUMENTS[100:]}
    one, other = (made(dict(order), weights={"b": 1, "a": 1}) for order in (parts.items(), reversed(parts.items())))
    assert order_hash(one.plan(0).packs) != order_hash(other.plan(0).packs)
    with pytest.raises(CheckpointError, match="the state is of other data"):
        other.load_state_dict(one.state_dict())


def test_other_packs_of_the_same_algorithm_have_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(packing="cutting_stock")
    state = first.state_dict()
    found = first.data._packings["data"]
    reordered = replace(found, strategies=found.strategies[::-1], counts=found.counts[::-1])
    monkeypatch.setattr(loader_module, "pack_view", lambda *_, **__: reordered)
    another_solver = made(packing="cutting_stock")
    assert ids(another_solver, 0) != ids(first, 0)
    with pytest.raises(CheckpointError, match="the state is of other data"):
        another_solver.load_state_dict(state)


@pytest.mark.parametrize("cached", [False, True])
def test_a_worker_process_neither_packs_again_nor_verifies_the_cache(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = made(cache=tmp_path if cached else None)
    expected = ids(loader, 3)
    pickled = pickle.dumps(loader._dataset)
    for name in ("pack_view", "_verify"):
        monkeypatch.setattr(loader_module, name, None)
    found = pickle.loads(pickled).arrays(3).sequence_ids
    assert sorted(found[found >= 0].tolist()) == expected


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ranks": 3}, ConfigError, "cannot be divided equally over 3 ranks: these numbers of ranks can, 1, 2, 4, 8"),
        ({"ranks": 2, "micro_batches": 3}, ConfigError, "into 3 micro_batches: take one of 1, 2, 4"),
        ({"rank": 1}, ConfigError, "rank must be a whole number from 0 to 0, found 1"),
        ({"pack_length": None}, ConfigError, "give pack_length"),
        ({"pack_length": 1}, ConfigError, "pack_length must be a whole number from 2"),
        ({"objective": MASKS, "vocabulary_size": 50_000}, ConfigError, "is 50000, and that of RandomMasks 30522"),
        ({"workers": 1}, ConfigError, "worker processes hand over torch tensors"),
        ({"documents": {"a": [[1, 2]], "b": [[3, 4]]}}, ConfigError, r"2 sources \(a, b\) need weights"),
        ({"padding_token": 9, "vocabulary_size": 9}, ConfigError, "padding_token must be a whole number from 0 to 8"),
        ({"max_sequences_per_pack": 0}, ConfigError, "arguments of evenpack.Loader:\n  max_sequences_per_pack"),
        ({"documents": {1: [[1, 2]]}}, ConfigError, "must have strings as names, found 1"),
        ({"weights": {"a": 1}}, ConfigError, "weights must be a mapping from the sources data, found {'a': 1}"),
        ({"documents": {}}, ConfigError, "the mapping of sources is empty"),
        ({"packing": "longest_first"}, PackingError, "no packing algorithm 'longest_first'"),
        ({"documents": [[1, 2], "text"]}, DataError, "document 1 must be a list of token ids"),
        ({"documents": [[1, 2], [3, -1]]}, DataError, "document 1 holds token id -1"),
        ({"documents": [[1, 2], [1 << 70]]}, DataError, f"document 1 holds token id {1 << 70}, expected 0"),
        ({"documents": [np.array([1 << 63], dtype=np.uint64)]}, DataError, f"document 0 holds token id {1 << 63}"),
        ({"documents": [[1, 2], np.ones((2, 2), dtype=int)]}, DataError, "document 1 must be .* with one axis"),
        ({"documents": [[True, False]]}, DataError, "document 0 must be a list of token ids"),
        ({"documents": [[1], [2]]}, DataError, "source 'data' has 2 documents and no sequence"),
        ({"documents": [[1, 500]], "vocabulary_size": 500}, DataError, "token id 500, the vocabulary has 500 entries"),
        ({"documents": 5}, DataError, "expected lists of token ids.*found int"),
        ({"documents": "no/such/file"}, DataError, "does not exist"),
        ({"documents": datasets.Dataset.from_dict({"text": ["a"]})}, DataError, "has no column 'input_ids' but text"),
        ({"documents": datasets.Dataset.from_dict({"input_ids": [[1.5]]})}, DataError, "must hold lists of integers"),
        ({"documents": AS_ROWS.to_iterable_dataset()}, DataError, "is read from front to back only"),
        ({"documents": AS_ROWS.with_transform(lambda rows: rows)}, DataError, "the dataset has a transform"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**changes).batches_of(0)


def test_rows_of_null_are_empty_and_tokens_of_null_are_named() -> None:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))})

    def rows(documents: list[Any]) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"input_ids": documents}, features=features)

    found = made(rows([None, *DOCUMENTS, None]).select(range(1, len(DOCUMENTS) + 2)))
    assert ids(found, 3) == ids(made([*DOCUMENTS, []]), 3)
    holed = [*DOCUMENTS[:7], None, [5, None, 6], *DOCUMENTS[8:]]
    with pytest.raises(DataError, match="row 8 has a null in 'input_ids'"):
        _ = made(rows(holed)).fingerprint
    with pytest.raises(DataError, match="row 2 has a null in 'input_ids'"):
        own.TokenRows(rows(holed).select(range(6, 20))).gather(np.array([len(DOCUMENTS[6])]), np.array([3]))


def test_offsets_that_decrease_are_named_where_they_are_read() -> None:
    arrays = evenpack.TokenArrays(np.arange(20), np.array([0, 10, 9, 10, 20]))  # one token less, and one more
    with pytest.raises(DataError, match="document 1 begins at token 10 and ends at 9 of 20"):
        made(arrays).batches_of(0)
    with pytest.raises(DataError, match="document 0 begins at token 0 and ends at 30 of 20"):
        made(evenpack.TokenArrays(np.arange(20), np.array([0, 30, 20]))).batches_of(0)


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        (np.zeros((2, 2), dtype=np.int32), np.array([0, 2]), "tokens must be a numpy array of integers with one axis"),
        (np.zeros(2, dtype=np.int32), np.array([0, 1]), "the last the number of tokens, 2; found 0 and 1"),
        (np.zeros(2, dtype=np.int32), np.array([], dtype=np.int64), "found none"),
    ],
)
def test_arrays_that_do_not_belong_together_are_named(tokens: Any, offsets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        evenpack.TokenArrays(tokens, offsets)


def hashed(documents: list[list[int]], **settings: Any) -> str:
    return own.hash_content(evenpack.TokenArrays.of_lists(documents, **settings))


def test_of_many_tokens_a_sample_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hashed(DOCUMENTS)
    monkeypatch.setattr(own, "MOST_HASHED", 100)
    sampled = hashed(DOCUMENTS)
    assert sampled == own.hash_content(own.TokenRows(AS_ROWS))
    others = [[[1, *DOCUMENTS[0][1:]], *DOCUMENTS[1:]], DOCUMENTS[1:]]
    labelled = [hashed(DOCUMENTS, labels=labels) for labels in (LABELS, DOCUMENTS)]
    assert len({whole, sampled, *map(hashed, others), *labelled}) == 6
    monkeypatch.setattr(own, "_SAMPLED_DOCUMENTS", 3)
    unseen = [[*DOCUMENTS[:place], [1], *DOCUMENTS[place + 1 :]] for place in range(9)]
    moved = [
        [*DOCUMENTS[:at], [*DOCUMENTS[at], DOCUMENTS[at + 1][0]], DOCUMENTS[at + 1][1:], *DOCUMENTS[at + 2 :]]
        for at in range(9)
    ]
    assert len({*map(hashed, [DOCUMENTS, *unseen, *moved])}) == 1 + 9 + 9, "all borders are hashed"
    monkeypatch.setattr(own, "_DOCUMENTS_AT_ONCE", 7)
    ending = [*DOCUMENTS, [], []]
    of_rows = own.TokenRows(datasets.Dataset.from_dict({"input_ids": ending}))
    assert own.hash_content(of_rows) == hashed(ending)


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=2, max_size=40), min_size=1, max_size=30), st.integers(0, 1 << 20)
)
def test_any_step_can_be_read_at_once(documents: list[list[int]], step: int) -> None:
    loader = made(documents, pack_length=16, packs_per_step=4, ranks=2)
    for batch in loader.batches_of(step):
        assert batch.cu_seqlens[-1] == batch.slots == 32
        assert batch.local_counts.tokens == sum(map(len, segments(batch)))


WITHOUT_CHECKED_TYPES = """
import functools
import json
import numpy as np
import evenpack

documents = [list(range(1, 2 + length)) for length in range(1, 40)]
numbers = {"packs_per_step": 8, "ranks": 2, "rank": 1, "micro_batches": 2, "seed": 3, "pack_length": 64}
plain = evenpack.Loader({"a": documents}, weights={"a": 2}, arrays="numpy", **numbers)
given = {name: np.int64(value) for name, value in numbers.items()}
loader = evenpack.Loader({"a": documents}, weights={"a": np.int64(2)}, arrays="numpy", **given)
loader.load_state_dict({**plain.state_dict(), "step": np.int64(4)})
assert json.loads(json.dumps(loader.state_dict())) == {**plain.state_dict(), "step": 4}
assert loader[9].tokens.tolist() == plain[9].tokens.tolist()
masks = functools.partial(evenpack.RandomMasks, **{"mask_token": 103, "special_tokens": [0], "vocabulary_size": 30_522})


def refused(call, message):
    try:
        call()
    except evenpack.EvenpackError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)


for wrong, message in [
    ({"long_documents": "cut"}, "arguments of evenpack.Loader:\\n  long_documents"),
    ({"cost_weights": (0, 1, 0)}, "cost_weights must be evenpack.CostWeights or None, found (0, 1, 0)"),
    ({"weights": [3]}, "weights must be a mapping from the sources data, found [3]"),
    ({"cache": 5}, "cache must be the path of a folder or None, found 5"),
    ({"objective": "x"}, "objective must be evenpack.RandomMasks, an Objective or None, found 'x'"),
    ({"balances_each_micro_batch": "no"}, "balances_each_micro_batch must be True or False, found 'no'"),
    ({"steps": "3"}, "steps must be a whole number"),
]:
    refused(lambda: evenpack.Loader(documents, **{"arrays": "numpy"} | numbers | wrong), message)
for wrong, message in [
    ({"special_tokens": 5}, "special_tokens must be a list of token ids, found 5"),
    ({"mask_token": None}, "must be ids below vocabulary_size (30522), and leave others to"),
    ({"share": "all"}, "arguments of evenpack.RandomMasks:\\n  share"),
]:
    refused(lambda: evenpack.Loader(documents, objective=masks(**wrong), arrays="numpy", **numbers), message)
for index in (1.5, slice(3), True):
    refused(lambda: plain[index], f"the number of a micro-batch, a whole one, found loader[{index!r}]")
assert plain[np.int64(3)].order_hash == plain[3].order_hash
for state in (None, [1]):
    refused(lambda: plain.load_state_dict(state), f"what its `state_dict()` returned, a mapping, found {state!r}")
"""


def test_numbers_of_numpy_count_as_numbers_and_other_types_are_named() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_CHECKED_TYPES], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_a_loader_says_what_it_is_in_a_line_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "pack_view", None)
    shown = repr(made(rank=1, ranks=2, micro_batches=2).data)
    assert "200 documents" in shown
    assert "packs of 64" in shown


@pytest.mark.slow
def test_the_lines_of_the_readme_print_what_it_shows_without_torch() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    lines, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    without_torch = "import sys; sys.modules['torch'] = None\n"  # an import of it fails
    by_arrival = "evenpack.Loader(documents, micro_batches=8, cost_weights=None, **settings).batches_of(5)"
    costs = f"print([int((np.diff(batch.cu_seqlens) ** 2).sum()) for batch in {by_arrival}])"
    command = [sys.executable, "-c", without_torch + lines + costs]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(shown)
    found = [np.array(json.loads(line.removeprefix("cost "))) for line in printed.splitlines()[-2:]]
    balanced, arrival = (100 * (cost.max() / cost.mean() - 1) for cost in found)
    assert f"has {balanced:.2f} % more attention than the mean" in page
    assert f"(`cost_weights=None`) it has {arrival:.0f} %." in page


@pytest.mark.slow
def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples/loader.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    by_cost, by_arrival = re.findall(r"by \w+: ([\d.]+)", capsys.readouterr().out)
    assert 1 <= float(by_cost) < float(by_arrival)
    assert names["resumed"].step == names["state"]["step"] == 3


def test_the_documented_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loader.md").read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["state"]["step"] == names["resumed"].step == 3
    assert capsys.readouterr().out.count("tensor(") == 4 * 6
