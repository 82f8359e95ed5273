"""Provides small corpora and the run sections to prepare them, for tests."""

import io
import json
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from tokenizer_folders import whole_words

from evenpack.data.config import DataConfig
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.progress import STAGE_NAMES, Stage
from evenpack.data.prepare.workers import Workers
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.tokenizers.config import TrainedTokenizer
from evenpack.data.tokenizers.loading import train_tokenizer
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.progress import Amount, Piece, Progress

_STAGES = {name: stage for stage, name in STAGE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class ShownState:
    """One update of a stage of a source, or of a verification, in numbers."""

    stage: Stage | Literal["verification"]
    source: str
    documents: int
    """Documents, pairs or sequences, by the stage; 0 in a verification."""
    tokens: int
    bytes_read: int
    bytes_resumed: int
    total_bytes: int


class Recorder(Progress):
    """Keeps what `prepare` shows, and prints nothing."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()), silent=True)
        self.states: list[ShownState] = []
        self.notes: list[str] = []

    def begin(
        self,
        name: str,
        *,
        done: Amount = 0,
        unit: str = "",
        counted: bool = False,
        elapsed_seconds: float = 0.0,
        starts_processes: bool = False,
    ) -> Piece:
        return RecordedPiece(self, name, done=done, unit=unit, counted=counted, elapsed_seconds=elapsed_seconds)

    def update(self, state: ShownState) -> None:
        self.states.append(state)

    def note(self, message: str) -> None:
        self.notes.append(message)


class RecordedPiece(Piece):
    """Hands each update to its recorder."""

    def __init__(
        self, recorder: Recorder, name: str, *, done: Amount, unit: str, counted: bool, elapsed_seconds: float
    ) -> None:
        super().__init__(recorder, name, done=done, unit=unit, counted=counted, elapsed_seconds=elapsed_seconds)
        self._recorder = recorder
        self._resumed = int(done)
        self._source, _, self._shown_stage = name.rpartition(": ")

    def update(
        self,
        done: Amount,
        total: Amount,
        *,
        amount: Amount | None = None,
        counts: Mapping[str, int] | None = None,
        facts: Sequence[str] = (),
    ) -> None:
        counted = dict(counts or {})
        tokens = counted.pop("tokens", 0)
        state = ShownState(
            stage="verification" if self._shown_stage == "verifying" else _STAGES[self._shown_stage],
            source=self._source,
            documents=sum(counted.values()),
            tokens=tokens,
            bytes_read=int(done),
            bytes_resumed=self._resumed,
            total_bytes=int(total),
        )
        self._recorder.update(state)


class StoppedError(Exception):
    """Ends a call from within its progress."""


class StopAfter(Recorder):
    """Interrupts `prepare` at the n-th report of a stage."""

    def __init__(self, reports: int, *, stage: Stage = "tokens") -> None:
        super().__init__()
        self.left = reports
        self.stage = stage

    def update(self, state: ShownState) -> None:
        super().update(state)
        self.left -= state.stage == self.stage
        if self.left == 0:
            raise StoppedError


def interrupt(config: DataConfig, directory: Path, reports: int, *, stage: Stage = "tokens") -> None:
    """Prepares up to the n-th report of a stage."""
    progress = StopAfter(reports, stage=stage)
    with suppress(StoppedError):
        prepare(config, directory, progress=progress)
    assert progress.left == 0, "it has not come so far"


def recorded(config: DataConfig, directory: Path, *, workers: Workers | None = None) -> Recorder:
    """Prepares to the end; returns what was shown."""
    recorder = Recorder()
    prepare(config, directory, progress=recorder, workers=workers)
    return recorder


_KILLED = """
import os, signal, sys
from pathlib import Path
from evenpack.data.config import DataConfig
from evenpack.data.prepare import pairs, tokenising
from evenpack.data.prepare.prepare import prepare
from evenpack.data.tokens import writer

left = int(sys.argv[3])
flush = os.fsync
def kill_at(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)

os.fsync = kill_at
tokenising.BATCH_TEXT_BYTES, pairs.BLOCK_SENTENCES, writer.COMMIT_SECONDS = 10_000, 400, 0.0
prepare(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def killed_at_flush(flushes: int, config: DataConfig, directory: Path) -> bool:
    """Prepares in a process that is killed before that flush of a file; returns whether it came so far."""
    arguments = [config.model_dump_json(), str(directory), str(flushes)]
    status = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


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


def pairs_config(corpus: Path, **changes: Any) -> DataConfig:
    """Returns sentence pairs of one jsonl file; `changes` replace keys of the recipe, and other keys as a whole."""
    recipe = {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 3, "seed": 5}
    values = {
        "sources": {"wiki": {"kind": "jsonl", "path": corpus}},
        "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 150},
        "pack_length": 64,
        **changes,
        "recipe": recipe | changes.get("recipe", {}),
    }
    return data_config(**values)


def save_tokenizer(folder: Path, *, seed: int = 9) -> dict[str, str]:
    """Trains a small tokenizer and saves it as a folder; returns the section that names it."""
    train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), sentences(50, seed=seed)).save(folder)
    return {"kind": "hub", "name": str(folder)}


def save_words(folder: Path, end: str = "<end>") -> dict[str, str]:
    """Saves a vocabulary of one word; returns the section that names it."""
    Tokenizer(whole_words("[UNK]", "cat", end), end_of_text=end, unknown="[UNK]").save(folder)
    return {"kind": "hub", "name": str(folder)}


def texts_of(config: DataConfig, name: str) -> list[str]:
    """Returns the documents of a source."""
    return [document.text for document in open_corpus(name, config.sources[name]).documents()]


def command_with_parts(part_bytes: int) -> list[str]:
    """Returns the command `evenpack` of a process that divides sources into parts of so many bytes."""
    return [sys.executable, str(Path(__file__).with_name("small_parts.py")), str(part_bytes)]


def flip(path: Path, byte: int = -1) -> None:
    """Changes one bit of a file and nothing else."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def contents(directory: Path) -> dict[str, bytes]:
    """Returns every file below `directory`, by its relative name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
