"""Defines a corpus part whose reader dies, for tests of workers; a worker can import it."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from evenpack.data.sources.corpus import Corpus, CorpusPart, Document


@dataclass(frozen=True, kw_only=True)
class DyingPart:
    """A part that kills its process in the middle, the first time that it is read."""

    part: CorpusPart
    deaths: Path
    """A file that has the number of threads that Rust may start afterwards."""

    @property
    def total_bytes(self) -> int:
        return self.part.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        documents = self.part.documents(start)
        yield from islice(documents, 20)
        with self.deaths.open("ab") as file:
            if not file.tell():
                file.write(os.environ["RAYON_NUM_THREADS"].encode())
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        yield from documents


@dataclass(frozen=True, kw_only=True)
class DyingCorpus:
    """A corpus with one part, number `part`, whose reader dies."""

    corpus: Corpus
    part: int
    deaths: Path

    @property
    def total_bytes(self) -> int:
        return self.corpus.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        return self.corpus.documents(start)

    def parts(self, target_bytes: int) -> tuple[CorpusPart, ...]:
        parts = list(self.corpus.parts(target_bytes))
        parts[self.part] = DyingPart(part=parts[self.part], deaths=self.deaths)
        return tuple(parts)
