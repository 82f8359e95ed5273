"""Lists of lengths in the forms that users have."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import ConfigError, DataError, EvenpackError
from evenpack.studies.lengths import reading
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.reading import read_histogram

LENGTHS = [3, 1, 3, 7, 2, 3]
COUNTS = [1, 1, 3, 0, 0, 0, 1]


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def test_every_format_gives_the_same_histogram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS, dtype=np.uint16))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"3 1\n3\n\n7 2 3")))
    sources = [
        str(tmp_path / "lengths.npy"),
        write(tmp_path / "lengths.txt", "3 1 3\n7\n2 3\n"),
        write(tmp_path / "list.json", json.dumps(COUNTS)),
        write(tmp_path / "dict.json", json.dumps({"7": 1, "3": 3, "1": 1, "2": 1})),
        "-",
    ]
    for source in sources:
        assert read_histogram(source).counts.tolist() == COUNTS, source


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("separator", [" ", "\n", "\r\n", "\t \v\f"])
def test_words_are_whole_wherever_the_parts_of_a_text_end(
    separator: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_TEXT_BYTES", size)
    (tmp_path / "lengths.txt").write_bytes(separator.join(["", "13", "2", "007", "2", "1"]).encode())
    assert np.flatnonzero(read_histogram(str(tmp_path / "lengths.txt")).counts).tolist() == [0, 1, 6, 12]
    (tmp_path / "wrong.txt").write_bytes(separator.join(["13", "2", "4", "0", "1"]).encode())
    with pytest.raises(DataError, match=r"wrong\.txt, index 3: a length must be 1 or more, found 0"):
        read_histogram(str(tmp_path / "wrong.txt"))
    (tmp_path / "word.txt").write_bytes(separator.join(["13", "2", "4x", "5", "1"]).encode())
    line = 1 + 2 * separator.count("\n")
    with pytest.raises(DataError, match=f"word.txt, line {line}: expected whole numbers, found '4x'"):
        read_histogram(str(tmp_path / "word.txt"))


def test_numbers_may_be_the_counts_of_a_histogram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TEXT_BYTES", 4)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 1 3\n0 0\n0 1")))
    np.save(tmp_path / "counts.npy", np.array(COUNTS, dtype=np.uint32))
    options = SubjectOptions(histogram=True)
    for source in (str(tmp_path / "counts.npy"), write(tmp_path / "counts.txt", "1 1 3\n0 0\n0 1\n"), "-"):
        assert read_histogram(source, options).counts.tolist() == COUNTS, source
    with pytest.raises(EvenpackError, match="length 2 has -4"):
        read_histogram(write(tmp_path / "negative.txt", "1 -4"), options)
    with pytest.raises(EvenpackError, match="histogram is empty"):
        read_histogram(write(tmp_path / "empty.txt", ""), options)
    monkeypatch.setattr(reading, "MOST_SLOTS", 6)
    for source in (str(tmp_path / "counts.npy"), str(tmp_path / "counts.txt")):
        with pytest.raises(DataError, match="holds more than 6 numbers: too many for a histogram"):
            read_histogram(source, options)


@pytest.mark.parametrize("source", ["wikipedia_512", "some.json", "some.parquet", "some.csv", "some.jsonl"])
def test_only_numbers_can_be_called_a_histogram(source: str) -> None:
    with pytest.raises(ConfigError, match=f"--histogram does not apply to {source}"):
        read_histogram(source, SubjectOptions(histogram=True))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("lengths.npy", SubjectOptions(column="n")),
        ("lengths.txt", SubjectOptions(tokenizer="bert")),
        ("-", SubjectOptions(column="n")),
        ("some.json", SubjectOptions(column="n")),
        ("some.parquet", SubjectOptions(name="test")),
        ("wikipedia_512", SubjectOptions(tokenizer="bert")),
    ],
)
def test_an_option_that_does_not_concern_the_input_is_refused(source: str, options: SubjectOptions) -> None:
    with pytest.raises(ConfigError, match=f"does not apply to {source}, which is"):
        read_histogram(source, options)


def test_one_of_several_histograms_is_chosen_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "both.json", json.dumps({"short": [4, 0], "long": {"9": 2}}))
    assert read_histogram(source, SubjectOptions(name="short")).tokens == 4
    assert read_histogram(source, SubjectOptions(name="long")).tokens == 18
    with pytest.raises(DataError, match="choose one with --name; known: short, long"):
        read_histogram(source)
    with pytest.raises(DataError, match="did you mean 'short'"):
        read_histogram(source, SubjectOptions(name="shirt"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "99999999999999999999\n", "line 1: expected whole numbers"),
        ("a.txt", f"{1 << 40}\n", "index 0: a length must be 16777216 or less, found 1099511627776"),
        ("a.txt", "3\n\x00\x01\n", r"line 2: expected whole numbers, found '\\x00\\x01'"),
        ("a.txt", "", "histogram is empty"),
        ("a.json", "[1, 2", "is not JSON"),
        ("a.json", '"text"', "expected counts by length"),
        ("a.json", "[-1]", "at 1: .*found -1"),
        ("a.npy", "no array", "is not an .npy file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(EvenpackError, match=message):
        read_histogram(write(tmp_path / name, content))


def test_a_missing_file_a_matrix_and_a_needless_name_are_errors(tmp_path: Path) -> None:
    np.save(tmp_path / "matrix.npy", np.ones((2, 2), dtype=np.int64))
    np.save(tmp_path / "floats.npy", np.ones(2))
    with pytest.raises(DataError, match="No such file"):
        read_histogram(str(tmp_path / "nothing.txt"))
    with pytest.raises(DataError, match=r"is a folder: .*Dataset.to_parquet"):
        read_histogram(str(tmp_path), SubjectOptions(column="n"))
    with pytest.raises(DataError, match=r"found int64 of shape \(2, 2\)"):
        read_histogram(str(tmp_path / "matrix.npy"))
    with pytest.raises(DataError, match="found float64"):
        read_histogram(str(tmp_path / "floats.npy"))
    with pytest.raises(ConfigError, match=r"--name does not apply to lengths\.txt"):
        read_histogram("lengths.txt", SubjectOptions(name="short"))
    with pytest.raises(DataError, match="is a single histogram"):
        read_histogram(write(tmp_path / "one.json", "[1]"), SubjectOptions(name="short"))


MOST = 9223372036854775807

WRONG_JSON = {
    "a fraction": ("[1, 2.5, 3]", "at 2: .*found 2.5"),
    "true by length": ('{"5": true}', "at 5: .*found true"),
    "beyond int64": ("[1, 99999999999999999999]", "at 2: .*found 99999999999999999999"),
    "more digits than are read": (f"[{'9' * 5000}]", "is not JSON"),
    "too many tokens": (f"[1, {MOST}]", r"up to 2\*\*62 tokens"),
    "a negative count": ('{"7": -1}', "at 7: .*found -1"),
    "length 0": ('{"3": 1, "0": 4}', 'at .*found "0"'),
    "a length twice": ('{"3": 4, "3": 5}', '"3" occurs twice in one object, with 4 and 5'),
    "a length in two ways": ('{"3": 4, "03": 5}', "a length occurs twice"),
    "no counts at all": ("[0, 0]", "the histogram is empty"),
    "a name without counts": ('{"a": [4], "b": 5}', r", b: expected counts by length .*, found 5"),
    "too deep": ("[" * 100_000, "nested too deep"),
}


@pytest.mark.parametrize("case", WRONG_JSON)
def test_what_is_no_histogram_in_json_is_named_with_its_place(case: str, tmp_path: Path) -> None:
    content, message = WRONG_JSON[case]
    with pytest.raises(DataError, match=f"a.json.*{message}"):
        read_histogram(write(tmp_path / "a.json", content))


def test_the_chosen_of_several_histograms_is_named_where_it_is_wrong(tmp_path: Path) -> None:
    source = write(tmp_path / "both.json", '{"right": [4, 1], "wrong": {"3": 1, "5": 0.5}, "empty": []}')
    assert read_histogram(source, SubjectOptions(name="right")).tokens == 6
    with pytest.raises(DataError, match=r"both.json, wrong: .*at 5: .*found 0.5"):
        read_histogram(source, SubjectOptions(name="wrong"))
    with pytest.raises(DataError, match=r"both\.json, empty: expected counts by length"):
        read_histogram(source, SubjectOptions(name="empty"))


WRONG_ARRAYS = {
    "zero": (np.array([3, 2, 0], np.uint16), False, "index 2: a length must be 1 or more, found 0"),
    "beyond int64": (np.array([1, 1 << 63], np.uint64), False, "index 1: a length must be 16777216 or less"),
    "no length": (np.zeros(0, np.int64), False, "holds no sequence"),
    "a count beyond int64": (
        np.array([3, 1 << 63], np.uint64),
        True,
        f"a count of sequences must be {MOST} or less; length 2 has {MOST + 1}",
    ),
    "no count": (np.array([0, 0]), True, "the histogram is empty"),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
def test_a_wrong_number_of_an_array_is_named_with_file_and_place(case: str, tmp_path: Path) -> None:
    array, are_counts, message = WRONG_ARRAYS[case]
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=f"a.npy.*{message}"):
        read_histogram(str(tmp_path / "a.npy"), SubjectOptions(histogram=are_counts))


def test_a_long_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_ARRAY_NUMBERS", 7)
    lengths = np.arange(1, 101)
    np.save(tmp_path / "a.npy", lengths)
    assert read_histogram(str(tmp_path / "a.npy")).counts.tolist() == [1] * 100
    lengths[65] = 0
    np.save(tmp_path / "a.npy", lengths)
    with pytest.raises(DataError, match=r"a\.npy, index 65: a length must be 1 or more, found 0"):
        read_histogram(str(tmp_path / "a.npy"))


def test_an_archive_of_arrays_is_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", lengths=np.array(LENGTHS))
    for options in (SubjectOptions(), SubjectOptions(histogram=True)):
        with pytest.raises(DataError, match=r"a\.npz may hold several arrays .*: save the lengths alone"):
            read_histogram(str(tmp_path / "a.npz"), options)
