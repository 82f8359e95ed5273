"""GLUE's own files: every task of the table is read, and errors name file and line."""

import logging
from pathlib import Path

import pytest

from evenpack.data.tasks.glue import GLUE_TASKS, find_glue_task, read_task_rows, training_file
from evenpack.errors import ConfigError, DataError

OFFICIAL_COLUMNS = {
    "sst2": "sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label",
    "qnli": "index question sentence label",
    "rte": "index sentence1 sentence2 label",
    "wnli": "index sentence1 sentence2 label",
}


def official_columns(name: str) -> tuple[str, ...]:
    if name not in OFFICIAL_COLUMNS:
        return GLUE_TASKS[name].columns or ()
    columns = OFFICIAL_COLUMNS[name]
    return tuple(columns.split("|" if "|" in columns else None))


def write_task(directory: Path, name: str, lines: list[str], *, file_name: str = "train.tsv") -> Path:
    """Writes a file of a task, below its header row if it has one."""
    task = GLUE_TASKS[name]
    header = [] if task.columns else ["\t".join(official_columns(name))]
    path = directory / task.folder / file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in [*header, *lines]).encode())
    return path


def read(path: Path, name: str) -> list[tuple[tuple[str, ...], str]]:
    return [(row.texts, row.label) for row in read_task_rows(path, GLUE_TASKS[name])]


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_every_task_finds_its_texts_and_its_label_among_the_official_columns(name: str, tmp_path: Path) -> None:
    task, columns = GLUE_TASKS[name], official_columns(name)
    for file_name in (task.training_file, *task.validation_files):
        lines = ["\t".join(f"{column} of {row}" for column in columns) for row in "ab"]
        rows = list(read_task_rows(write_task(tmp_path, name, lines, file_name=file_name), task))
        assert [row.texts for row in rows] == [tuple(f"{text} of {row}" for text in task.texts) for row in "ab"]
        assert [row.label for row in rows] == [f"{task.label} of {row}" for row in "ab"]
    first = 1 if task.columns else 2
    file = tmp_path / task.folder / file_name
    assert [row.where for row in rows] == [f"{file}, line {line}" for line in (first, first + 1)]


def test_quotes_and_carriage_returns_are_no_part_of_the_format(tmp_path: Path) -> None:
    path = write_task(tmp_path, "rte", ['0\t"a\tb"\tentailment\r', "1\tc \td\tnot_entailment"])
    assert read(path, "rte") == [(('"a', 'b"'), "entailment"), (("c ", "d"), "not_entailment")]


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = write_task(tmp_path, "mrpc", ["1\t7\t8\ta\tb"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path, "mrpc") == [(("a", "b"), "1")]


def test_empty_lines_are_no_rows_but_have_numbers(tmp_path: Path) -> None:
    path = write_task(tmp_path, "rte", ["", "0\ta\tb\tentailment", "\r", "1\tc\td\tnot_entailment", ""])
    rows = list(read_task_rows(path, GLUE_TASKS["rte"]))
    assert [row.texts for row in rows] == [("a", "b"), ("c", "d")]
    assert [row.where for row in rows] == [f"{path}, line 3", f"{path}, line 5"]


def test_a_row_of_another_number_of_columns_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = write_task(tmp_path, "rte", ["0\ta\tb\tentailment", "1\tcut off\tb"])
    message = (
        r"line 3: expected 4 columns between tabs \(index, sentence1, sentence2, label\), found 3, the first .* '1'"
    )
    with pytest.raises(DataError, match=message):
        read(path, "rte")
    path = write_task(tmp_path, "cola", ["gj04\t1\t\tone", " "])
    with pytest.raises(DataError, match=r"CoLA/train.tsv, line 2: expected 4 columns .*, found 1, the first .* ' '"):
        read(path, "cola")
    path = write_task(tmp_path, "cola", ["gj04\t1\t\tone\tor two"])
    with pytest.raises(DataError, match=r"CoLA/train.tsv, line 1: expected 4 columns .*, found 5"):
        read(path, "cola")


def test_cut_rows_of_qqp_alone_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_task(tmp_path, "qqp", ["0\t1\t2\ta\tb\t1", "3\t4\t5\tcut off", "6\t7\t8\tc\td\t0"])
    with caplog.at_level(logging.WARNING):
        assert read(path, "qqp") == [(("a", "b"), "1"), (("c", "d"), "0")]
    assert [record.getMessage() for record in caplog.records] == [f"{path}: left out 1 rows that end too early"]
    assert [name for name, task in GLUE_TASKS.items() if task.has_cut_rows] == ["qqp"]
    path = write_task(tmp_path, "qqp", ["0\t1\t2\ta\tb\tand more\t1"])
    with pytest.raises(DataError, match=r"QQP/train.tsv, line 2: expected 6 columns .*, found 7"):
        read(path, "qqp")


def test_a_header_without_the_columns_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("index\tsentence_1\tsentence2\tlabel\n")
    message = r"train.tsv, line 1: expected a header row with a column 'sentence1', found index, sentence_1, sentence2"
    with pytest.raises(DataError, match=message):
        read(path, "rte")
    path.write_text("")
    with pytest.raises(DataError, match=r"train.tsv is empty: expected a header row that names the columns"):
        read(path, "rte")


def test_text_that_is_not_utf_8_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(b"sentence\tlabel\ngood\t1\nb\xffd\t0\n")
    with pytest.raises(DataError, match=r"train.tsv, line 3: invalid UTF-8: byte 0xff"):
        read(path, "sst2")


def test_a_missing_file_is_named_by_the_path_that_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/SST-2/train.tsv is not there: give the folder that holds"):
        training_file(tmp_path, GLUE_TASKS["sst2"])


def test_an_unknown_task_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'sst-2' is not a task of GLUE; did you mean 'sst2'\? known: cola, mnli"):
        find_glue_task("sst-2")
