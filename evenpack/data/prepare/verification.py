"""Compares the files of a prepared set with the checksums of its manifest, and its sources with their earlier state.

All files are read, or the part of one rank. Work is divided into chunks, which several threads or ranks read in
parallel, so that one large file is no slower than many.
"""

import os
import threading
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenpack.data.checksums import CHUNK_BYTES, ChunkReader, Damage, find_damage, find_wrong_size
from evenpack.data.config import DataConfig
from evenpack.data.manifest import FileRecord, Manifest, refuse_changed_inputs, remedy
from evenpack.data.mapped_pages import memory_bytes
from evenpack.data.sources.kinds import source_inputs
from evenpack.data.tokenizers.loading import tokenizer_inputs
from evenpack.data.tokens.file import read_index
from evenpack.errors import DataError, EvenpackError, NotPreparedError
from evenpack.progress import Progress
from evenpack.worker_pool import map_in_order

_MOST_THREADS = 8
_EXPLANATION_SECONDS = 20.0
"""Seconds for which files are read to explain an error, the smallest first: less than a run has to end."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of reading files."""

    bytes: int
    elapsed_seconds: float
    damages: tuple[Damage, ...]
    """Damages, one for each damaged file, with the start of its damage."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / max(self.elapsed_seconds, 1e-9)


class FileChunk(NamedTuple):
    """One chunk of a file."""

    path: Path
    record: FileRecord
    chunk: int

    @property
    def bytes(self) -> int:
        return min(CHUNK_BYTES, self.record.content.bytes - self.chunk * CHUNK_BYTES)


class Verifier:
    """The files of one prepared directory."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, as they were written."""
        return sum(record.content.bytes for record in self._manifest.files.values())

    def verify_all(self, progress: Progress) -> Verified:
        """Reads all files with several threads, one for each processor and at most eight."""
        threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        damages = self.find_wrong_sizes()
        local, pieces, started, done = threading.local(), self._pieces(damages), time.monotonic(), 0
        shown = progress.begin(f"{self._directory}: verifying", unit="bytes")

        def verify(piece: FileChunk) -> tuple[FileChunk, Damage | None]:
            if not hasattr(local, "reader"):
                local.reader = ChunkReader()
            return piece, self._find_damage(piece, local.reader)

        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as executor:
            for piece, damage in map_in_order(verify, iter(pieces), executor, threads=threads):
                done += piece.bytes
                if damage is not None:
                    damages.setdefault(piece.path, damage)
                shown.update(done, self.total_bytes)
        return Verified(bytes=done, elapsed_seconds=time.monotonic() - started, damages=tuple(damages.values()))

    def verify_share(
        self,
        share: int,
        shares: int,
        *,
        is_cancelled: Callable[[], bool],
        on_read: Callable[[int], None] = lambda _: None,
    ) -> Verified:
        """Reads one of `shares` parts of about the same number of chunks, in the calling thread.

        A set that takes more than half of the machine's memory is not left in the page cache, which the loader needs;
        it ends early if `is_cancelled`. `on_read` is called with the bytes read so far.
        """
        wrong = self.find_wrong_sizes()
        pieces = self._pieces(wrong)
        mine = pieces[len(pieces) * share // shares : len(pieces) * (share + 1) // shares]
        return self._verify(mine, wrong if share == 0 else {}, is_cancelled=is_cancelled, on_read=on_read)

    def verify_smallest(self, *, seconds: float) -> Verified:
        """Reads as many files as it can in that time, in the calling thread, the smallest first."""
        deadline = time.monotonic() + seconds
        wrong = self.find_wrong_sizes()
        pieces = sorted(self._pieces(wrong), key=lambda piece: piece.record.content.bytes)
        return self._verify(pieces, wrong, is_cancelled=lambda: time.monotonic() > deadline)

    def _verify(
        self,
        pieces: list[FileChunk],
        damages: dict[Path, Damage],
        *,
        is_cancelled: Callable[[], bool],
        on_read: Callable[[int], None] = lambda _: None,
    ) -> Verified:
        """Adds the damage of these pieces to `damages`."""
        started, done = time.monotonic(), 0
        reader = ChunkReader(leave_cached=self.total_bytes <= memory_bytes() // 2)
        for piece in pieces:
            if is_cancelled():
                break
            damage = self._find_damage(piece, reader)
            if damage is not None:
                damages.setdefault(piece.path, damage)
            done += piece.bytes
            on_read(done)
        return Verified(bytes=done, elapsed_seconds=time.monotonic() - started, damages=tuple(damages.values()))

    def _pieces(self, wrong: Container[Path]) -> list[FileChunk]:
        """Returns every chunk of every file but those of a wrong size."""
        return [
            FileChunk(path, record, chunk)
            for path, record in self._files()
            if path not in wrong
            for chunk in range(len(record.content.chunks))
        ]

    def find_wrong_sizes(self) -> dict[Path, Damage]:
        """Returns the files that are missing, cut short or too long."""
        found = {path: find_wrong_size(path, record.content) for path, record in self._files()}
        return {path: damage for path, damage in found.items() if damage is not None}

    def refuse(self, damages: tuple[Damage, ...], *, seen: str = "") -> None:
        """Reports damage. Raises: DataError that names the damaged files, the start of the damage, and the remedy."""
        if damages:
            lines = [f"  {damage.describe()}" for damage in damages]
            raise DataError("\n".join([f"{self._directory} is damaged{seen}:", *lines, self.remedy(damages)]))

    def remedy(self, damages: tuple[Damage, ...]) -> str:
        """Returns the remedy for these damages."""
        damaged = {damage.path for damage in damages}
        return remedy(self._directory, [path for path, record in self._files() if record.is_shared and path in damaged])

    def _files(self) -> Iterator[tuple[Path, FileRecord]]:
        return ((record.locate(self._directory), record) for record in self._manifest.files.values())

    def _find_damage(self, piece: FileChunk, reader: ChunkReader) -> Damage | None:
        damage = find_damage(piece.path, piece.record.content, reader, chunk=piece.chunk)
        if damage is None or damage.first_bad_byte is None or piece.path.suffix != ".bin":
            return damage
        return self._with_impossible_token(damage, damage.first_bad_byte)

    def _with_impossible_token(self, damage: Damage, place: tuple[int, int]) -> Damage:
        """Adds a token outside the vocabulary in the damaged chunk, if there is one."""
        try:
            dtype = read_index(damage.path.with_suffix("")).dtype
        except DataError:
            return damage  # the index is damaged as well, and reported itself
        count = (place[1] + 1 - place[0]) // dtype.itemsize
        tokens = np.fromfile(damage.path, dtype=dtype, count=count, offset=place[0]).astype(np.int64)
        vocabulary_size = self._manifest.tokenizer.vocabulary_size
        (outside,) = np.nonzero((tokens < 0) | (tokens >= vocabulary_size))
        if not len(outside):
            return damage
        byte = place[0] + int(outside[0]) * dtype.itemsize
        problem = (
            f"{damage.problem} (token {tokens[outside[0]]:,} at byte {byte:,} is outside the vocabulary of "
            f"{vocabulary_size:,})"
        )
        return Damage(path=damage.path, problem=problem, first_bad_byte=(place[0], byte + dtype.itemsize - 1))


@contextmanager
def explained_damage(directory: Path) -> Iterator[None]:
    """Verifies a prepared directory when the block ends with an error that damaged files can lead to.

    Raises: DataError instead of that error if a file is damaged.
    """
    try:
        yield
    except Exception as error:
        damage = damage_behind(error, directory)
        if damage is None:
            raise
        raise damage from error


def damage_behind(error: Exception, directory: Path) -> DataError | None:
    """Returns the damage of a prepared directory, which is read if the error is one that damaged files can lead to.

    These are all errors without an explanation except RuntimeError, which torch raises for lost connections and
    devices.
    """
    if isinstance(error, EvenpackError | RuntimeError):
        return None
    try:
        verifier = Verifier(directory, Manifest.read(directory))
        verifier.refuse(verifier.verify_smallest(seconds=_EXPLANATION_SECONDS).damages)
    except NotPreparedError:
        return None  # it was for a while, and has been removed
    except DataError as damage:
        return damage
    return None


def refuse_changed_sources(config: DataConfig, manifest: Manifest, directory: Path) -> None:
    """Compares sizes and times of the files from which `directory` was made; missing files are not reported.

    Raises: DataError naming the first file that has changed.
    """
    finders = [(manifest.tokenizer.inputs, partial(tokenizer_inputs, config.tokenizer))]
    for name, source in config.sources.items():
        finders.append((manifest.sources[name].inputs, partial(source_inputs, name, source)))
    for before, find in finders:
        try:
            now = find()
        except DataError:
            continue
        refuse_changed_inputs(before, now, directory)
