"""Initial weights: where they are found, which of them are loaded, and which are refused by name."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from test_checkpoint_files import SOLO, train_state
from tokenizers import normalizers, pre_tokenizers, processors

from evenpack.data.tokenizers.byte_pairs import END_OF_TEXT
from evenpack.data.tokenizers.loading import other_tokens
from evenpack.data.tokenizers.word_pieces import read_word_pieces
from evenpack.engine.checkpoints.files import CHECKPOINTS, checkpoint_name, commit_files, write_manifest
from evenpack.engine.checkpoints.initial_weights import initialize
from evenpack.engine.checkpoints.weight_sources import find_weights
from evenpack.engine.sharding import SHARDINGS
from evenpack.errors import CheckpointError
from evenpack.models.build import Model, new_model
from evenpack.models.families import config_of
from evenpack.models.huggingface import to_huggingface

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(56))]
SHAPE: dict[str, Any] = {"kind": "bert", "preset": "tiny", "hidden_size": 16, "heads": 2}


def make_model(*, seed: int = 1, vocabulary_size: int = len(WORDS), rows: int = 24, **section: Any) -> Model:
    values = SHAPE | section
    return new_model(
        config_of(values["kind"]).model_validate(values), vocabulary_size=vocabulary_size, max_positions=rows, seed=seed
    )


def write_words(folder: Path, words: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


def save_checkpoint(output_dir: Path, model: Model, step: int) -> Path:
    """Saves a checkpoint in the form of DeepSpeed and `CheckpointWriter`, without the optimizer's state."""
    path = output_dir / CHECKPOINTS / checkpoint_name(step)
    path.mkdir(parents=True)
    torch.save({"module": model.state_dict()}, path / "mp_rank_00_model_states.pt")
    config = {
        "run": {"name": "phase1", "output_dir": str(output_dir)},
        "data": {"prepared_dir": None},
        "model": model.config.model_dump(mode="json"),
    }
    state = replace(train_state(step), world_size=8, config=config)
    write_manifest(path, state, commit_files(path, ["mp_rank_00_model_states.pt"]))
    return path


@pytest.fixture
def phase1(tmp_path: Path) -> Path:
    """Returns a run with two checkpoints, of models of different seeds."""
    output_dir = tmp_path / "phase1"
    write_words(output_dir / "data" / "tokenizer", WORDS)
    save_checkpoint(output_dir, make_model(seed=100), 100)
    save_checkpoint(output_dir, make_model(seed=200), 200)
    return output_dir


def begin(model: Model, path: Path, words: list[str] = WORDS) -> None:
    initialize(model, path, tokenizer_dir=write_words(path.parent / "here", words), world=SOLO, sharding=SHARDINGS[0])


def refusal(model: Model, path: Path, words: list[str] = WORDS) -> str:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        begin(model, path, words)
    assert str(caught.value).startswith("training.initialize_from: ")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    return str(caught.value)


def assert_same_weights(model: Model, expected: Model) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("path", "step"), [("", 200), ("checkpoints/step_000100", 100)])
def test_a_runs_newest_checkpoint_or_the_one_that_is_named_fills_the_model(
    phase1: Path, caplog: pytest.LogCaptureFixture, path: str, step: int
) -> None:
    caplog.set_level(logging.INFO)
    model = make_model()
    begin(model, phase1 / path)
    assert_same_weights(model, make_model(seed=step))
    place = phase1 / CHECKPOINTS / checkpoint_name(step)
    assert caplog.messages == [f"initialised from {place} after step {step} of run 'phase1'"]


def test_a_broken_newest_checkpoint_is_passed_over_and_a_broken_named_one_refused(
    phase1: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = phase1 / CHECKPOINTS / checkpoint_name(200)
    content = bytearray((newest / "mp_rank_00_model_states.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "mp_rank_00_model_states.pt").write_bytes(content)
    model = make_model()
    begin(model, phase1)
    assert_same_weights(model, make_model(seed=100))
    assert "step_000200 is broken and skipped" in caplog.text
    assert "step_000200 is broken: mp_rank_00_model_states.pt has checksum" in refusal(model, newest)
    (newest / "manifest.json").write_text("{}")
    assert "step_000200 is broken: manifest.json is" in refusal(model, newest)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_folder_of_transformers_fills_either_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    theirs = tmp_path / "theirs"
    words = write_words(tmp_path / "words", WORDS)
    to_huggingface(make_model(seed=7, kind=kind), theirs, tokenizer_dir=words, special_token_id=0)
    model = make_model(kind=kind)
    begin(model, theirs)
    assert_same_weights(model, make_model(seed=7, kind=kind))
    assert caplog.messages == [f"initialised from {theirs} (transformers)"]


@pytest.mark.parametrize(
    ("section", "differences"),
    [
        ({"rows": 32}, ["positions.table.weight: expected shape (32, 16), found (24, 16)"]),
        (
            {"vocabulary_size": 70},
            [
                "token_embedding.weight: expected shape (70, 16), found (61, 16)",
                "masked_token_head.decoder_bias: expected shape (70,), found (61,)",
            ],
        ),
        (
            {"next_sentence": False},
            [
                "next_sentence_head.pooler.weight: unknown here, found shape (16, 16)",
                "next_sentence_head.classifier.bias: unknown here, found shape (2,)",
            ],
        ),
        ({"layers": 12}, ["blocks.2.attention.query_key_value.weight: expected shape (48, 16), missing"]),
        ({"heads": 4}, ["with heads 2, this run has model.heads 4"]),
        ({"kind": "gpt2"}, ["with kind bert, this run has model"]),
    ],
    ids=str,
)
def test_another_model_is_refused_with_what_differs(
    phase1: Path, section: dict[str, Any], differences: list[str]
) -> None:
    message = refusal(make_model(**section), phase1)
    assert all(one in message for one in differences)
    assert len(message.splitlines()) <= 27, "hundreds of differences become a few lines"


def test_as_many_other_words_are_another_vocabulary(phase1: Path) -> None:
    swapped = [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    message = refusal(make_model(), phase1, swapped)
    assert "id 59 is 'word54' in one and 'word55' in the other" in message
    assert str(phase1 / "data" / "tokenizer") in message


def write_tokenizer(folder: Path, change: Callable[[tokenizers.Tokenizer], object]) -> None:
    """Writes tokenizer.json of these words, with what is in no vocabulary changed."""
    backend = read_word_pieces(write_words(folder, [*WORDS[:-3], "the", "quick", "brown"]), lower_case=None)
    change(backend)
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda backend: setattr(backend, "normalizer", normalizers.BertNormalizer(lowercase=False)),
            r"of the text 'The' it makes \['\[UNK\]'\], and this one \['the'\]",
        ),
        (
            lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split(" ", "isolated")),
            r"of the text '--' it makes \['\[UNK\]'\], and this one \['\[UNK\]', '\[UNK\]'\]",
        ),
        (
            lambda backend: setattr(backend, "post_processor", processors.TemplateProcessing(single="$A")),
            r"it makes 'TEXT' of a text, and this one '\[CLS\] TEXT \[SEP\]'",
        ),
        (lambda backend: backend.enable_padding(length=16), None),
        (lambda backend: backend.enable_truncation(4), None),
        (lambda backend: setattr(backend, "decoder", None), None),
    ],
    ids=["lower case", "words", "template", "padding", "truncation", "decoder"],
)
def test_another_tokenizer_of_the_same_vocabulary_is_named_with_what_it_makes_of_a_text(
    phase1: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[tokenizers.Tokenizer], object],
    expected: str | None,
) -> None:
    folder = phase1 / "data" / "tokenizer"
    write_tokenizer(folder, change)
    here = phase1.parent / "here"
    write_tokenizer(here, lambda backend: None)
    initialize(make_model(), phase1, tokenizer_dir=here, world=SOLO, sharding=SHARDINGS[0])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if expected is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"another tokenizer of the same vocabulary, in {folder}, than this run's data, in {here}: " in warning
        assert re.search(expected, warning)


def test_other_merges_of_the_same_entries_are_another_tokenizer(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*letters, "ab", "bc", "abc", END_OF_TEXT])}
    for name, merges in (("one", ["a b", "b c", "ab c"]), ("other", ["b c", "a b", "ab c"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.json").write_text(json.dumps(words))
        (tmp_path / name / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    assert other_tokens(tmp_path / "one", tmp_path / "one") is None
    found = other_tokens(tmp_path / "one", tmp_path / "other")
    assert found == "of the text 'abc' it makes ['abc'], and this one ['a', 'bc']"


def test_a_vocabulary_that_cannot_be_compared_is_said_to_be_so(phase1: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (phase1 / "data" / "tokenizer" / "vocab.txt").unlink()
    begin(make_model(), phase1)
    assert f"no tokenizer in {phase1 / 'data' / 'tokenizer'} for a comparison" in caplog.messages[0]


@pytest.mark.parametrize(
    ("trained", "section", "expected"),
    [
        ({"positions": "alibi"}, {"positions": "rotary"}, "with positions alibi, this run has model.positions rotary"),
        ({"positions": "rotary"}, {"positions": "rotary", "rotary_base": 500.0}, "with rotary_base 10000.0, this run"),
        ({"kind": "llama", "norm_epsilon": 1e-6}, {"kind": "llama"}, "with norm_epsilon 1e-06, this run has model"),
    ],
)
def test_numbers_that_no_tensor_holds_are_compared_too(
    trained: dict[str, Any], section: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "earlier", make_model(**{"kind": "gpt2"} | trained), 1)
    assert expected in refusal(make_model(**{"kind": "gpt2"} | section), tmp_path / "earlier")


def test_a_path_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / CHECKPOINTS).mkdir(parents=True)
    for name, expected in (
        ("none", "does not exist"),
        ("file", "holds none of these"),
        ("empty", "holds none of these"),
        ("begun", "has no checkpoint yet"),
    ):
        assert expected in refusal(make_model(), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"expected a run's output_dir \(with checkpoints/\), one checkpoint"):
        find_weights(tmp_path / "empty")
