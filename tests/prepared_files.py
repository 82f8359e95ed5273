"""Provides small corpora and the run sections to prepare them, for tests."""

import json
import random
from pathlib import Path
from typing import Any

from evenpack.data.config import DataConfig
from evenpack.data.prepare.progress import PrepareState, Stage
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.tokenizers.config import TrainedTokenizer
from evenpack.data.tokenizers.loading import train_tokenizer


class Recorder:
    """Keeps the progress reports of `prepare`."""

    def __init__(self) -> None:
        self.states: list[PrepareState] = []
        self.notes: list[str] = []

    def update(self, state: PrepareState) -> None:
        self.states.append(state)

    def note(self, message: str) -> None:
        self.notes.append(message)


class StoppedError(Exception):
    """Ends a call from within its progress."""


class StopAfter(Recorder):
    """Interrupts `prepare` at the n-th report of a stage."""

    def __init__(self, reports: int, *, stage: Stage = "tokens") -> None:
        super().__init__()
        self.left = reports
        self.stage = stage

    def update(self, state: PrepareState) -> None:
        super().update(state)
        self.left -= state.stage == self.stage
        if self.left == 0:
            raise StoppedError


def sentences(count: int, *, seed: int) -> list[str]:
    """Returns different texts of 3 to 120 words."""
    source = random.Random(seed)
    words = [f"{first}{rest}" for first in "bcdfgklmnprst" for rest in ("ad", "oven", "illow", "ate", "unk")]
    return [" ".join(source.choices(words, k=source.randint(3, 120))) + f" {seed}.{n}" for n in range(count)]


def sentence_documents(count: int, *, seed: int) -> list[str]:
    """Returns texts of 1 to 12 sentences, in paragraphs; hardly any two sentences are equal."""
    source = random.Random(seed)
    words = [f"{first}{rest}" for first in "bcdfgklmnprst" for rest in ("ad", "oven", "illow", "ate", "unk")]

    def sentence() -> str:
        return " ".join(source.choices(words, k=source.randint(2, 20))).capitalize() + source.choice([". ", ".\n\n"])

    return ["".join(sentence() for _ in range(source.randint(1, 12))) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def data_config(sources: dict[str, Any], **changes: Any) -> DataConfig:
    """A trained tokenizer, short documents split, a tenth held out; `changes` replace whole keys of the section."""
    values = {
        "sources": sources,
        "validation_fraction": 0.1,
        "tokenizer": {"kind": "train", "vocabulary_size": 320},
        "recipe": {"kind": "documents", "max_sequence_length": 64},
        "pack_length": 128,
    }
    return DataConfig.model_validate({**values, **changes})


def two_sources(corpus: Path, **changes: Any) -> DataConfig:
    """Returns the files of the fixture `corpus`, or a copy of them."""
    return data_config(
        {name: {"kind": "jsonl", "path": corpus / f"{name}.jsonl"} for name in ("wiki", "code")}, **changes
    )


def save_tokenizer(folder: Path, *, seed: int = 9) -> dict[str, str]:
    """Trains a small tokenizer and saves it as a folder; returns the section that names it."""
    train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), sentences(50, seed=seed)).save(folder)
    return {"kind": "hub", "name": str(folder)}


def texts_of(config: DataConfig, name: str) -> list[str]:
    """Returns the documents of a source."""
    return [document.text for document in open_corpus(name, config.sources[name]).documents()]


def contents(directory: Path) -> dict[str, bytes]:
    """Returns every file below `directory`, by its relative name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
