"""Defines corpus parts whose reader dies or sleeps, for tests of workers; a worker can import them."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from evenpack.data.sources.corpus import Corpus, CorpusPart, Document
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DyingPart:
    """A part that kills its process in the middle, the first time that it is read."""

    part: CorpusPart
    deaths: Path
    """A file that has a byte afterwards."""

    @property
    def total_bytes(self) -> int:
        return self.part.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        documents = self.part.documents(start)
        yield from islice(documents, 20)
        with self.deaths.open("ab") as file:
            if not file.tell():
                file.write(b".")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        yield from documents


@dataclass(frozen=True, kw_only=True)
class _SameDocuments:
    """A corpus with the documents of another one."""

    corpus: Corpus

    @property
    def total_bytes(self) -> int:
        return self.corpus.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        return self.corpus.documents(start)


@dataclass(frozen=True, kw_only=True)
class DyingCorpus(_SameDocuments):
    """A corpus with one part, number `part`, whose reader dies."""

    part: int
    deaths: Path

    def parts(self, target_bytes: int) -> tuple[CorpusPart, ...]:
        parts = list(self.corpus.parts(target_bytes))
        parts[self.part] = DyingPart(part=parts[self.part], deaths=self.deaths)
        return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class SleepingPart:
    """A part with an error that waits for the others, which sleep longer than any test."""

    number: int
    woken: Path
    total_bytes: int = 100

    def documents(self, start: int = 0) -> Iterator[Document]:
        asleep = self.woken.with_name("asleep")
        if self.number:
            asleep.touch()
            time.sleep(100)
            self.woken.touch()
        while not asleep.exists():
            time.sleep(0.01)
        raise DataError(f"threads of Rust: {os.environ['RAYON_NUM_THREADS']}")
        yield


@dataclass(frozen=True, kw_only=True)
class SleepingCorpus(_SameDocuments):
    """A corpus of two such parts."""

    woken: Path

    def parts(self, target_bytes: int) -> tuple[CorpusPart, ...]:
        return tuple(SleepingPart(number=number, woken=self.woken) for number in range(2))
