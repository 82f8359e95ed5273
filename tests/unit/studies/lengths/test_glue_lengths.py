"""Shipped lengths of GLUE's tasks give the published table, and others are read from local files."""

import dataclasses
from pathlib import Path

import pytest
from wordpiece import write_vocabulary

from evenpack.errors import ConfigError, DataError
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.reading import read_histogram
from evenpack.studies.lengths.subject import find_subject
from evenpack.studies.packing.study import PackerChoice, study_packing


def write_file(folder: Path, lines: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.tsv").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def glue_dir(tmp_path: Path) -> str:
    write_file(tmp_path / "glue" / "CoLA", ["gj04\t1\t\tthe cats sat.", "gj04\t0\t*\tit", "gj04\t1\t\ton the mat"])
    write_file(tmp_path / "glue" / "RTE", ["index\tsentence1\tsentence2\tlabel", "0\tit sat\tthe cat sat\tentailment"])
    return str(tmp_path / "glue")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return write_vocabulary(tmp_path / "bert")


TABLE_6 = {
    ("cola", 1): (34, 8_551, 1_094_528, 997_669, 8.849, 1.000),
    ("cola", 13): (29, 913, 116_864, 20_005, 82.882, 9.366),
    ("sst2", 1): (64, 67_349, 8_620_672, 7_723_633, 10.406, 1.000),
    ("sst2", 15): (64, 7_691, 984_448, 87_409, 91.121, 8.757),
    ("rte", 1): (112, 2_490, 318_720, 152_980, 52.002, 1.000),
    ("rte", 4): (108, 1_330, 170_240, 4_500, 97.357, 1.872),
    ("wnli", 1): (72, 635, 81_280, 57_741, 28.960, 1.000),
    ("wnli", 6): (63, 192, 24_576, 1_037, 95.780, 3.307),
}
"""By task and depth: strategies, packs, slots, slots of padding, efficiency in percent, packing factor."""


@pytest.mark.parametrize(("task", "depth"), TABLE_6)
def test_the_lengths_that_come_along_give_table_6_to_the_digit(task: str, depth: int) -> None:
    subject = find_subject(f"glue:{task}", [], SubjectOptions())
    (row,) = study_packing(
        subject.histogram,
        pack_length=subject.pack_length,
        depths=(1 if depth == 1 else None,),
        choices=(PackerChoice(algorithm="shortest_pack_first"),),
    )
    assert row.depth == depth
    slots = row.packs * row.pack_length
    rounded = (round(100 * row.efficiency, 3), round(row.packing_factor, 3))
    assert (row.strategies, row.packs, slots, row.padding, *rounded) == TABLE_6[task, depth]


def test_a_task_is_packed_at_128_and_cut_there_by_default() -> None:
    subject = find_subject("glue:rte", [], SubjectOptions())
    assert (subject.pack_length, subject.histogram.longest) == (128, 128)
    assert subject.long_sequences() == {"policy": "truncate", "sequences": 304, "tokens_lost": 9_054}
    whole = find_subject("glue:rte", [], SubjectOptions(pack_length=384))
    assert (whole.pack_length, whole.histogram.longest, whole.fitted.long_sequences) == (384, 289, 0)
    assert whole.histogram.tokens == subject.histogram.tokens + 9_054


def test_local_files_are_measured_with_their_special_tokens(glue_dir: str, tokenizer: str) -> None:
    options = SubjectOptions(glue_dir=glue_dir, tokenizer=tokenizer)
    assert read_histogram("glue:cola", options).counts.tolist() == [0, 0, 1, 0, 1, 0, 1]
    assert read_histogram("glue:rte", options).counts.tolist() == [0] * 7 + [1]  # [CLS] 2 [SEP] 3 [SEP]
    subject = find_subject("glue:cola", [], SubjectOptions(**dataclasses.asdict(options)))
    assert (subject.pack_length, subject.histogram.sequences) == (128, 3)


def test_a_broken_row_and_a_missing_file_are_named(glue_dir: str, tokenizer: str) -> None:
    options = SubjectOptions(glue_dir=glue_dir, tokenizer=tokenizer)
    write_file(Path(glue_dir) / "CoLA", ["gj04\t1\t\tit", "gj04\t1"])
    with pytest.raises(DataError, match=r"CoLA/train.tsv, line 2: expected 4 columns"):
        read_histogram("glue:cola", options)
    with pytest.raises(DataError, match=rf"{glue_dir}/MNLI/train.tsv is not there"):
        read_histogram("glue:mnli", options)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("glue:cola", {}, r"texts \(sentence\): they need --glue-dir .* Those of glue:cola, glue:sst2,"),
        ("glue:colla", {"tokenizer": "t"}, r"'colla' is not a task of GLUE; did you mean 'cola'\?"),
        ("glue:cola", {"tokenizer": "t", "column": "label"}, "--column does not apply to glue:cola, .*--glue-dir"),
        ("wikipedia_512", {}, "--glue-dir does not apply to wikipedia_512"),
    ],
)
def test_an_option_that_does_not_go_with_a_task_is_refused(
    source: str, options: dict[str, str], message: str, glue_dir: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_histogram(source, SubjectOptions(glue_dir=glue_dir, **options))  # type: ignore[arg-type]


def test_lengths_that_come_along_take_no_option_of_other_inputs() -> None:
    with pytest.raises(ConfigError, match="--name does not apply to glue:cola, which is a published histogram"):
        read_histogram("glue:cola", SubjectOptions(name="short"))
    with pytest.raises(ConfigError, match=r"glue:mrpc are the lengths of its texts \(#1 String, #2 String\)"):
        read_histogram("glue:mrpc")
