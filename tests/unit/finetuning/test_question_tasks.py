"""SQuAD: reading it, windows over contexts, and the way from outputs to answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning_tasks import squad_content, write_vocabulary

from evenpack.data.tokenizers.loading import tokenizer_of_weights
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError
from evenpack.finetuning.config import FinetuneDataSection
from evenpack.finetuning.squad import (
    Question,
    Windows,
    best_answers,
    normalised,
    read_questions,
    score_answers,
    windows_of,
    word_f1,
)

OPTIONS = FinetuneDataSection(task="squad", max_sequence_length=24, max_question_length=4, window_stride=8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of_weights(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


@pytest.fixture
def questions(tmp_path: Path) -> list[Question]:
    (tmp_path / "train.json").write_text(json.dumps(squad_content(20)))
    return read_questions(tmp_path / "train.json")


def test_windows_cover_the_context_and_label_the_answer_where_they_hold_it(
    questions: list[Question], tokenizer: Tokenizer
) -> None:
    windows = windows_of(questions, tokenizer, OPTIONS)
    sequences = windows.sequences
    assert len(windows.offsets) > len(questions)
    assert sequences.lengths().max() <= 24
    for number, question in enumerate(questions):
        own = np.flatnonzero(windows.questions == number)
        covered = {int(first) for index in own for first in windows.offsets[index][:, 0]}
        assert covered == set(tokenizer.encode_texts([question.context])[0].offsets[:, 0].tolist())
        answered = [answer_of(windows, index, question) for index in own if sequences.labels[index].any()]
        assert answered
        assert {text.lower() for text in answered} == {"in town"}


def answer_of(windows: Windows, index: int, question: Question) -> str:
    first, last = windows.sequences.labels[index] - windows.context_starts[index]
    return question.context[windows.offsets[index][first, 0] : windows.offsets[index][last, 1]]


def test_certain_outputs_give_the_answer_in_its_own_letters(questions: list[Question], tokenizer: Tokenizer) -> None:
    windows = windows_of(questions, tokenizer, OPTIONS)
    outputs = [np.zeros((length, 2), dtype=np.float32) for length in windows.sequences.lengths()]
    for output, (first, last) in zip(outputs, windows.sequences.labels, strict=True):
        output[first, 0] = output[last, 1] = 5.0 if first else -5.0
    given = best_answers(outputs, windows, questions, max_answer_length=5)
    assert given == [question.answers[0] for question in questions]
    assert score_answers(given, questions).values == {"f1": 1.0, "exact_match": 1.0}


def test_an_answer_neither_ends_before_it_begins_nor_is_too_long(tokenizer: Tokenizer) -> None:
    question = Question(text="where ?", context="the cat sat on a mat", answers=("the",), answer_start=0)
    windows = windows_of([question], tokenizer, OPTIONS)
    output = np.zeros((int(windows.sequences.lengths()[0]), 2))
    start = windows.context_starts[0]
    output[start + 1, 0], output[start, 1], output[start + 5, 1], output[start + 2, 1] = 9.0, 9.0, 8.0, 1.0
    assert best_answers([output], windows, [question], max_answer_length=3) == ["cat sat"]
    assert best_answers([output], windows, [question], max_answer_length=4) == ["cat sat"], "the other has 5 tokens"
    assert best_answers([output], windows, [question], max_answer_length=5) == ["cat sat on a mat"]


@pytest.mark.parametrize(
    ("given", "right", "f1"),
    [
        ("The Norman dynasty.", "norman dynasty", 1.0),
        ("a big red house", "red house", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("red red", "red house", 0.5),
        ("house", "mouse", 0.0),
        ("", "mouse", 0.0),
    ],
)
def test_f1_over_words_is_that_of_the_official_script(given: str, right: str, f1: float) -> None:
    assert word_f1(given, right) == pytest.approx(f1)


def test_answers_are_compared_in_the_official_form() -> None:
    assert normalised("  The U.S.A.,  an  Island\ta theory ") == "usa island theory"


def test_the_most_similar_right_answer_counts() -> None:
    question = Question(text="?", context="", answers=("in the town", "town hall"), answer_start=0)
    other = Question(text="?", context="", answers=("mat",), answer_start=0)
    assert score_answers(["The town hall!", "cat"], [question, other]).values == {"f1": 0.5, "exact_match": 0.5}
    assert score_answers(["hall", "mat"], [question, other]).values == pytest.approx(
        {"f1": (2 / 3 + 1) / 2, "exact_match": 0.5}
    )


def test_a_long_question_is_cut(questions: list[Question], tokenizer: Tokenizer) -> None:
    short = OPTIONS.model_copy(update={"max_question_length": 1})
    windows = windows_of(questions, tokenizer, short)
    assert set(windows.context_starts.tolist()) == {3}


def wrong_start(qas: dict[str, Any]) -> None:
    qas["answers"][0]["answer_start"] += 1


def other_text(qas: dict[str, Any]) -> None:
    qas["answers"].append({"text": "on the moon", "answer_start": 0})


PLACE = r"train\.json, data\[0\]\.paragraphs\[2\]\.qas\[0\]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_start, PLACE + r" \(id q2\)\.answers\[0\]: the answer .* is not in its context at character"),
        (other_text, PLACE + r" \(id q2\)\.answers\[1\]: the answer 'on the moon' is not in its context"),
        (lambda qas: qas["answers"][0].update(answer_start="3"), r"answer_start must be a whole number .* found '3'"),
        (lambda qas: qas["answers"][0].update(answer_start=-1), r"answer_start must be a whole number .* found -1"),
        (lambda qas: qas.update(answers=[]), r"\(id q2\): expected one answer or more, found none"),
        (lambda qas: qas.update(question=" "), r"expected a text 'question', found ' '"),
        (lambda qas: qas.pop("id"), PLACE + r": expected a text 'id', found None"),
    ],
)
def test_a_wrong_question_is_refused_with_its_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = squad_content(4)
    change(content["data"][0]["paragraphs"][2]["qas"][0])
    (tmp_path / "train.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_questions(tmp_path / "train.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not readable JSON"),
        ("[]", "expected an object with a list 'data'"),
        ('{"data": []}', "holds no question"),
        ('{"data": [{"paragraphs": 3}]}', r"data\[0\]: expected an object with a list 'paragraphs'"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_questions(tmp_path / "train.json")
