"""Every layout gives the same sequences, and each error names its file and row."""

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from shard_files import (
    CLS,
    MASK_SLOTS,
    SEP,
    SLOTS,
    VOCABULARY_SIZE,
    Row,
    fixed_arrays,
    packed_lists,
    random_rows,
    variable_lists,
    write_arrays,
    write_fixed,
    write_packed,
    write_variable,
)

from evenpack.data.recipes import MaskedPairsRecipe
from evenpack.data.shards import reading
from evenpack.data.shards.reading import MaskedSequences, ShardSet, check_limits, read_slices
from evenpack.data.tokenizers.special_tokens import PairTokens
from evenpack.errors import ConfigError, DataError

ROWS = random_rows(50, seed=1)


def pair_tokens(classification_id: int, separator_id: int) -> PairTokens:
    return PairTokens(classification_id=classification_id, separator_id=separator_id, mask_id=4)


RECIPE = MaskedPairsRecipe(kind="masked_pairs", max_sequence_length=SLOTS, max_predictions=MASK_SLOTS)
LIMITS = {"recipe": RECIPE, "vocabulary_size": VOCABULARY_SIZE, "pair_tokens": pair_tokens(CLS, SEP)}


def as_rows(sequences: MaskedSequences) -> list[Row]:
    """Converts what was read to the form in which it was written."""
    tokens = np.split(sequences.tokens, sequences.ends[:-1])
    bounds = np.cumsum(sequences.masks.counts)[:-1]
    return [
        Row(
            tokens=tokens[index].tolist(),
            first_length=int(sequences.first_segment_lengths[index]),
            label=int(sequences.next_sentence_labels[index]),
            places=places.tolist(),
            originals=labels.tolist(),
        )
        for index, (places, labels) in enumerate(
            zip(np.split(sequences.masks.places, bounds), np.split(sequences.masks.labels, bounds), strict=True)
        )
    ]


def read(files: tuple[Path, ...], start: int = 0, limits: dict[str, Any] | None = None) -> list[Row]:
    rows = []
    for part in read_slices(ShardSet.open(files), start):
        if limits is not None:
            check_limits(part, **limits)
        rows += as_rows(part.sequences)
    return rows


def refusal(*files: Path, limits: dict[str, Any] | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read(files, limits=limits)
    return str(caught.value)


def write_all(folder: Path, layout: str) -> tuple[Path, ...]:
    """Writes two shards of the layout; packed ones have one to three pairs per row."""
    parts = (ROWS[:20], ROWS[20:])
    if layout == "packed":
        packs = ([part[:1], part[1:3], *(part[at : at + 3] for at in range(3, len(part), 3))] for part in parts)
        return tuple(write_packed(folder / f"{n}.hdf5", list(part)) for n, part in enumerate(packs))
    write = write_fixed if layout == "fixed" else write_variable
    return tuple(write(folder / f"{n}.hdf5", part) for n, part in enumerate(parts))


@pytest.mark.parametrize("layout", ["fixed", "variable", "packed"])
@pytest.mark.parametrize("at_once", [7, 10_000])
def test_each_layout_gives_the_same_pairs_whatever_is_read_at_once(
    layout: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROWS_AT_ONCE", at_once)
    files = write_all(tmp_path, layout)
    shards = ShardSet.open(files)
    assert shards.layout == layout
    assert read(files, limits=LIMITS) == ROWS
    parts = list(read_slices(shards))
    assert (len(parts) > 2) == (at_once == 7)
    assert parts[-1].rows_read == shards.rows
    assert parts[-1].bytes_read == shards.total_bytes


def test_reading_begins_at_any_row_without_touching_those_before(tmp_path: Path) -> None:
    files = write_all(tmp_path, "fixed")
    for start in (1, 19, 20, 33, 50):
        assert read(files, start) == ROWS[start:]
    files[0].write_bytes(files[0].read_bytes()[:6000])
    with pytest.raises(DataError, match=r"0\.hdf5 is not readable as HDF5"):
        read(files, 20)  # its header is looked at all the same


def test_no_more_rows_than_requested_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROWS_AT_ONCE", 8)
    asked: list[int] = []
    own = h5py.Dataset.__getitem__

    def record(dataset: h5py.Dataset, rows: Any) -> Any:
        asked.append(rows.stop - rows.start)
        return own(dataset, rows)

    path = write_arrays(tmp_path / "a.hdf5", fixed_arrays(ROWS), chunk_rows=12)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", record)
    assert read((path,)) == ROWS
    assert set(asked) == {12, 2}  # whole chunks, or they would be decompressed twice


def test_identities_are_those_of_the_tokens_before_masking(tmp_path: Path) -> None:
    unmasked = [row.unmasked() for row in ROWS]
    assert unmasked != ROWS
    sequences = [
        next(read_slices(ShardSet.open((write_fixed(tmp_path / f"{n}.hdf5", rows),)))).sequences
        for n, rows in enumerate((ROWS, unmasked))
    ]
    assert np.array_equal(sequences[0].identities(), sequences[1].identities())
    assert np.array_equal(sequences[0].restored_tokens(), sequences[1].tokens)
    assert len(np.unique(sequences[0].identities())) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "place", "value", "problem"),
    [
        ("input_mask", 1, 0, "input_mask is not ones followed by zeros"),
        ("input_mask", slice(None), 0, "it holds no token"),
        ("segment_ids", 0, 1, "segment_ids is not zeros followed by ones"),
        ("next_sentence_labels", None, 2, "next_sentence_labels is 2, expected 0 or 1"),
        ("masked_lm_positions", slice(None), [1, 2, 3, SLOTS - 1], f"masked_lm_positions has {SLOTS - 1}"),
        ("masked_lm_positions", slice(None), [-1, 2, 3, 0], "masked_lm_positions has -1"),
        ("masked_lm_positions", slice(None), [1, 0, 3, 0], "a position after its padding"),
        ("masked_lm_positions", slice(None), [3, 1, 0, 0], "masked_lm_positions does not ascend"),
    ],
)
def test_a_row_that_is_no_masked_pair_is_named(name: str, place: Any, value: Any, problem: str, tmp_path: Path) -> None:
    rows = [row for row in ROWS if 10 < len(row.tokens) < SLOTS - 1][:10]
    arrays = fixed_arrays(rows)
    arrays[name][7 if place is None else (7, place)] = value
    path = write_arrays(tmp_path / "bad.hdf5", arrays)
    good = write_fixed(tmp_path / "a.hdf5", ROWS)
    assert read((good,)) == ROWS
    message = refusal(good, path)
    assert message.startswith(f"{path}, row 7 (from 0): ")
    assert problem in message


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recipe": RECIPE.model_copy(update={"max_sequence_length": SLOTS - 4})}, f"length is {SLOTS - 4}"),
        ({"recipe": RECIPE.model_copy(update={"max_predictions": 2})}, "data.recipe.max_predictions is 2"),
        ({"vocabulary_size": 60}, "and the vocabulary has 60 entries"),
        ({"pair_tokens": pair_tokens(1, SEP)}, "begins with [CLS], which is 1"),
        ({"pair_tokens": pair_tokens(CLS, 9)}, "ends with [SEP], which is 9"),
    ],
)
def test_a_row_beyond_the_limits_of_the_run_is_named(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_variable(tmp_path / "a.hdf5", ROWS)
    assert read((path,), limits=LIMITS) == ROWS
    message = refusal(path, limits=LIMITS | changes)
    assert message.startswith(f"{path}, row ")
    assert problem in message


def test_a_label_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    arrays = fixed_arrays(ROWS)
    row = next(index for index, row in enumerate(ROWS) if row.places)
    arrays["masked_lm_ids"][row, 0] = VOCABULARY_SIZE
    path = write_arrays(tmp_path / "a.hdf5", arrays)
    assert refusal(path, limits=LIMITS).startswith(
        f"{path}, row {row} (from 0): masked_lm_ids has token id {VOCABULARY_SIZE}"
    )


@pytest.mark.parametrize("name", ["segment_ids", "masked_lm_ids"])
def test_variable_rows_of_unequal_length_are_named(name: str, tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.places][:5]
    lists = variable_lists(rows)[name]
    lists[3] = lists[3][:-1]
    path = write_variable(tmp_path / "a.hdf5", rows, **{name: lists})
    assert refusal(path).startswith(f"{path}, row 3 (from 0): {name} is not as long as ")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("packed_input_len", [-1, 50], "packed_input_len has a value below 1"),
        ("packed_masked_lm_len", [-1, 1], "packed_masked_lm_len has a value below 0"),
        ("packed_input_len", [5, 5], "is not as long as packed_input_len says"),
        ("packed_masked_lm_len", [100, 1], "is not as long as packed_masked_lm_len says"),
        ("next_sentence_labels", [1], "has not one value for each packed_input_len"),
    ],
)
def test_packed_rows_that_do_not_add_up_are_named(name: str, value: list[int], problem: str, tmp_path: Path) -> None:
    packs = [ROWS[:3], ROWS[3:5], ROWS[5:6]]
    lists = packed_lists(packs)[name]
    lists[1] = value
    path = write_packed(tmp_path / "a.hdf5", packs, **{name: lists})
    message = refusal(path)
    assert message.startswith(f"{path}, row 1 (from 0): ")
    assert problem in message


def test_a_position_right_behind_the_last_token_is_named(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.places][:3]
    places = [row.places for row in rows]
    places[2] = [*places[2][:-1], len(rows[2].tokens)]
    path = write_variable(tmp_path / "a.hdf5", rows, masked_lm_positions=places)
    assert refusal(path).startswith(f"{path}, row 2 (from 0): masked_lm_positions has {len(rows[2].tokens)}, ")


def test_a_position_in_the_neighbour_of_a_packed_row_is_named(tmp_path: Path) -> None:
    packs = [[row for row in ROWS if row.places][:2]]
    lists = packed_lists(packs)["masked_lm_positions"]
    lists[0][0] = len(packs[0][0].tokens) + 1
    path = write_packed(tmp_path / "a.hdf5", packs, masked_lm_positions=lists)
    assert refusal(path).startswith(f"{path}, row 0 (from 0), sequence 0: masked_lm_positions has ")


def test_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    first = write_fixed(tmp_path / "a.hdf5", ROWS)
    wide = fixed_arrays(ROWS)
    wide["masked_lm_positions"] = np.pad(wide["masked_lm_positions"], ((0, 0), (0, 3)))
    wide["masked_lm_ids"] = np.pad(wide["masked_lm_ids"], ((0, 0), (0, 3)))
    other = write_arrays(tmp_path / "b.hdf5", wide)
    assert read((other,)) == ROWS
    expected = f"{other} disagrees with {first}: it is of layout fixed with rows of {SLOTS} slots and {MASK_SLOTS + 3}"
    assert refusal(first, other).startswith(expected)
    assert "it is of layout variable, and the first" in refusal(first, write_variable(tmp_path / "c.hdf5", ROWS))


def test_what_is_no_shard_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.hdf5"
    text.write_text("no HDF5")
    assert refusal(text).startswith(f"{text} is not readable as HDF5")
    arrays = fixed_arrays(ROWS)
    fewer = {name: array for name, array in arrays.items() if name != "input_mask"}
    assert "lacks the dataset input_mask" in refusal(write_arrays(tmp_path / "b.hdf5", fewer))
    shorter = arrays | {"segment_ids": arrays["segment_ids"][:-1]}
    assert "segment_ids has the shape (49, 24)" in refusal(write_arrays(tmp_path / "c.hdf5", shorter))
    narrower = arrays | {"segment_ids": arrays["segment_ids"][:, :-1]}
    assert "segment_ids has the shape (50, 23)" in refusal(write_arrays(tmp_path / "d.hdf5", narrower))
    reals = arrays | {"input_ids": arrays["input_ids"].astype("f4")}
    assert "input_ids must hold integers, found float32" in refusal(write_arrays(tmp_path / "e.hdf5", reals))
    foreign = arrays | {"next_sentence_positions": arrays["masked_lm_ids"]}
    assert "packed by another system" in refusal(write_arrays(tmp_path / "f.hdf5", foreign))
    empty = {name: array[:0] for name, array in arrays.items()}
    assert "hold no row" in refusal(write_arrays(tmp_path / "g.hdf5", empty))


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_fixed(tmp_path / "a.hdf5", ROWS)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"pip install evenpack\[mlperf\]"):
        ShardSet.open((path,))
