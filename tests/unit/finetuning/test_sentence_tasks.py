"""Reading tab-separated tasks: how rows become sequences, and errors with file and line."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from finetuning_tasks import SPECIAL, WORDS, write_vocabulary

from evenpack.data.tasks.glue import GLUE_TASKS
from evenpack.data.tokenizers.loading import tokenizer_of_weights
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError
from evenpack.finetuning.sentences import read_sentences, sentence_sequences

CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of_weights(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


def written(folder: Path, *lines: str) -> Path:
    path = folder / "train.tsv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    [
        ("sst2", ["sentence\tlabel", "good\t1", "bad\t2"], r"line 3: expected a label of SST-2 \(0, 1\), found '2'"),
        ("cola", ["gj04\t\t\tThe cat."], r"line 1: expected a label of CoLA \(0, 1\), found ''"),
        ("rte", ["sentence1\tsentence2\tlabel", "a\t \tentailment"], "line 2: column 'sentence2' is empty"),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\tnan"], "line 2: expected a number in column 'score'"),
        ("sst2", ["sentence\tlabel"], r"train\.tsv has no row of data"),
    ],
)
def test_a_wrong_row_is_refused_with_file_and_line(tmp_path: Path, task: str, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_sentences(written(tmp_path, *lines), GLUE_TASKS[task])


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.tsv cannot be read: No such file .* data\.folder=FOLDER"):
        read_sentences(tmp_path / "train.tsv", GLUE_TASKS["sst2"])


def test_a_pair_becomes_two_halves_with_their_special_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = written(tmp_path, "sentence1\tsentence2\tlabel", "the cat\tit sat .\tentailment", "a\tb\tnot_entailment")
    task = GLUE_TASKS["rte"]
    found = sentence_sequences(read_sentences(path, task), task, tokenizer, max_sequence_length=20)
    assert found.token_file.read(0, 8).tolist() == [CLS, *ids("the cat"), SEP, *ids("it sat ."), SEP]
    assert found.lengths().tolist() == [8, 5]
    assert found.first_lengths.tolist() == [4, 3]
    assert found.labels.tolist() == [0, 1]
    assert found.token_file.document_offsets.tolist() == [0, 8, 13]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (3, 4, (3, 4)),
        (20, 2, (7, 2)),
        (2, 20, (2, 7)),
        (20, 20, (5, 4)),
        (9, 4, (5, 4)),
        (4, 5, (4, 5)),
        (5, 5, (5, 4)),
    ],
)
def test_what_is_too_long_loses_tokens_of_its_longer_sentence(
    tmp_path: Path, tokenizer: Tokenizer, first: int, second: int, kept: tuple[int, int]
) -> None:
    path = written(tmp_path, "sentence1\tsentence2\tlabel", f"{'a ' * first}\t{'it ' * second}\tentailment")
    task = GLUE_TASKS["rte"]
    found = sentence_sequences(read_sentences(path, task), task, tokenizer, max_sequence_length=12)
    assert found.read(np.arange(found.count)).tokens.tolist() == [
        CLS,
        *ids("a") * kept[0],
        SEP,
        *ids("it") * kept[1],
        SEP,
    ]
    alone = replace(task, texts=("sentence1",))
    cut = sentence_sequences(read_sentences(path, alone), alone, tokenizer, max_sequence_length=12)
    assert cut.lengths().tolist() == [min(first, 10) + 2]
    assert cut.labels.dtype == np.int64
