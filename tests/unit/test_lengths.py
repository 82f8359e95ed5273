"""Lists of lengths, as people have them."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import ConfigError, DataError, EvenpackError
from evenpack.studies.lengths import InputOptions, merge_histograms, numbers, read_histogram

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


def test_a_long_text_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_TEXT_BYTES", 64)
    values = np.random.default_rng(0).integers(1, 500, 400)
    source = write(tmp_path / "lengths.txt", "\n".join(map(str, values)))
    assert read_histogram(source).counts.tolist() == np.bincount(values)[1:].tolist()


def test_a_wrong_length_is_named_by_its_index_in_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "_TEXT_BYTES", 64)
    source = write(tmp_path / "lengths.txt", "\n".join(["12"] * 300 + ["0"] + ["12"] * 300))
    with pytest.raises(DataError, match=r"lengths.txt, index 300: a length must be .* found 0"):
        read_histogram(source)


def test_numbers_may_be_the_counts_of_a_histogram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_TEXT_BYTES", 4)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 1 3\n0 0\n0 1")))
    np.save(tmp_path / "counts.npy", np.array(COUNTS, dtype=np.uint32))
    options = InputOptions(histogram=True)
    for source in (str(tmp_path / "counts.npy"), write(tmp_path / "counts.txt", "1 1 3\n0 0\n0 1\n"), "-"):
        assert read_histogram(source, options).counts.tolist() == COUNTS, source
    with pytest.raises(EvenpackError, match="length 2 has -4"):
        read_histogram(write(tmp_path / "negative.txt", "1 -4"), options)
    with pytest.raises(EvenpackError, match="histogram is empty"):
        read_histogram(write(tmp_path / "empty.txt", ""), options)
    monkeypatch.setattr(numbers, "LONGEST", 6)
    for source in (str(tmp_path / "counts.npy"), str(tmp_path / "counts.txt")):
        with pytest.raises(DataError, match="holds more than 6 numbers: too many for a histogram"):
            read_histogram(source, options)


@pytest.mark.parametrize("source", ["wikipedia_512", "some.json", "some.parquet", "some.csv", "some.jsonl", "a:b"])
def test_only_numbers_can_be_called_a_histogram(source: str) -> None:
    with pytest.raises(ConfigError, match=f"--histogram says nothing about {source}"):
        read_histogram(source, InputOptions(histogram=True))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("lengths.npy", InputOptions(column="n")),
        ("lengths.txt", InputOptions(tokenizer="bert")),
        ("-", InputOptions(split="train")),
        ("some.json", InputOptions(column="n")),
        ("some.parquet", InputOptions(split="test")),
        ("some.parquet", InputOptions(name="short")),
        ("glue:cola", InputOptions(name="short")),
        ("wikipedia_512", InputOptions(tokenizer="bert")),
    ],
)
def test_an_option_that_says_nothing_about_the_input_is_refused(source: str, options: InputOptions) -> None:
    with pytest.raises(ConfigError, match=f"says nothing about {source}, which is"):
        read_histogram(source, options)


def test_one_of_several_histograms_is_chosen_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "both.json", json.dumps({"short": [4, 0], "long": {"9": 2}}))
    assert read_histogram(source, InputOptions(name="short")).tokens == 4
    assert read_histogram(source, InputOptions(name="long")).tokens == 18
    with pytest.raises(DataError, match="choose one with --name; known: short, long"):
        read_histogram(source)
    with pytest.raises(DataError, match="did you mean 'short'"):
        read_histogram(source, InputOptions(name="shirt"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "3 4\n5 x7 1\n", "line 2: expected whole numbers, found 'x7'"),
        ("a.txt", "3 4.5\n", "line 1: expected whole numbers, found '4.5'"),
        ("a.txt", "99999999999999999999\n", "line 1: expected whole numbers"),
        ("a.txt", "3 0 4\n", "index 1: a length must be in the range"),
        ("a.txt", "-3\n", "index 0: a length must be in the range from 1 to 16777216, found -3"),
        ("a.txt", f"{1 << 40}\n", "index 0: a length must be in the range from 1 to 16777216"),
        ("a.txt", "", "histogram is empty"),
        ("a.json", "[1, 2", "is no JSON"),
        ("a.json", "[1, 2.5]", "expected counts by length"),
        ("a.json", '"text"', "expected counts by length"),
        ("a.json", "{}", "expected counts by length"),
        ("a.json", "[-1]", "length 1 has -1"),
        ("a.json", '{"0": 3}', "a length must be from 1"),
        ("a.npy", "no array", "is no .npy file"),
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
    with pytest.raises(DataError, match=r"found int64 of shape \(2, 2\)"):
        read_histogram(str(tmp_path / "matrix.npy"))
    with pytest.raises(DataError, match="found float64"):
        read_histogram(str(tmp_path / "floats.npy"))
    with pytest.raises(ConfigError, match=r"--name says nothing about lengths\.txt"):
        read_histogram("lengths.txt", InputOptions(name="short"))
    with pytest.raises(DataError, match="is a single histogram"):
        read_histogram(write(tmp_path / "one.json", "[1]"), InputOptions(name="short"))


def test_merged_histograms_count_the_sequences_of_all(tmp_path: Path) -> None:
    one = read_histogram(write(tmp_path / "one.json", "[1, 2]"))
    other = read_histogram(write(tmp_path / "other.json", "[0, 1, 5]"))
    assert merge_histograms([one, other]).counts.tolist() == [1, 3, 5]
