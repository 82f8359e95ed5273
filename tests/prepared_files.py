"""Small corpora and the run sections to prepare them, for tests."""

import json
import random
from pathlib import Path
from typing import Any

from evenpack.data.data_config import DataConfig
from evenpack.data.progress import PrepareState


class Recorder:
    """Keeps what `prepare` tells."""

    def __init__(self) -> None:
        self.states: list[PrepareState] = []
        self.notes: list[str] = []

    def update(self, state: PrepareState) -> None:
        self.states.append(state)

    def note(self, message: str) -> None:
        self.notes.append(message)


def sentences(count: int, *, seed: int) -> list[str]:
    """Different texts of 3 to 120 words."""
    source = random.Random(seed)
    words = [f"{first}{rest}" for first in "bcdfgklmnprst" for rest in ("ad", "oven", "illow", "ate", "unk")]
    return [" ".join(source.choices(words, k=source.randint(3, 120))) + f" {seed}.{n}" for n in range(count)]


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


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, by its relative name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
