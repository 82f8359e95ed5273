"""Compares the files of a prepared set with the checksums of its manifest, and its sources with their earlier state.

All files are read, or some kinds of them, or the part of one rank. Work is divided into chunks, which several threads
or ranks read in parallel, so that one large file is no slower than many.
"""

import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from evenpack.data.checksums import CHUNK_BYTES, ChunkReader, Damage, find_damage, find_wrong_size
from evenpack.data.config import DataConfig
from evenpack.data.manifest import TOKENIZER_FOLDER, FileRecord, Manifest, refuse_changed_inputs, remedy
from evenpack.data.sources.files import InputFile
from evenpack.data.sources.kinds import source_inputs
from evenpack.errors import DataError, EvenpackError
from evenpack.files import explained
from evenpack.worker_pool import map_in_order

if TYPE_CHECKING:
    from evenpack.progress import Progress

_MOST_THREADS = 8
_SHOWN_BYTES = 1 << 30
"""Bytes from which on a reader shows that it verifies them: they take about a second."""
_WRITTEN_TO = "was written to since this run began (`evenpack verify` says whether it is still as it was prepared)"
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


Content = Literal["all", "lengths", "tokenizer"]
"""What is verified of a prepared set: all files; all but the tokens themselves; or the tokenizer alone."""


class FileChunk(NamedTuple):
    """One chunk of a file."""

    path: Path
    record: FileRecord
    chunk: int

    @property
    def bytes(self) -> int:
        return min(CHUNK_BYTES, self.record.content.bytes - self.chunk * CHUNK_BYTES)

    def find_damage(self, reader: ChunkReader) -> Damage | None:
        return find_damage(self.path, self.record.content, reader, chunk=self.chunk)


def _read_all(
    pieces: list[FileChunk],
    found: Iterable[Damage | None],
    damages: dict[Path, Damage],
    *,
    on_read: Callable[[int], None] = lambda _: None,
) -> Verified:
    """Takes what is `found` of each piece, of the first ones if it ends early, and adds it to `damages`."""
    started, done = time.monotonic(), 0
    for piece, damage in zip(pieces, found, strict=False):
        done += piece.bytes
        if damage is not None:
            damages.setdefault(piece.path, damage)
        on_read(done)
    return Verified(bytes=done, elapsed_seconds=time.monotonic() - started, damages=tuple(damages.values()))


class Verifier:
    """The files of one prepared directory, or the ones that hold what `content` says."""

    def __init__(self, directory: Path, manifest: Manifest, *, content: Content = "all") -> None:
        self._directory = directory
        self._manifest = manifest
        self._content = content

    @property
    def total_bytes(self) -> int:
        """Bytes of the files, as they were written."""
        return sum(record.content.bytes for _, record in self._files())

    def states(self) -> dict[Path, InputFile]:
        """Returns the state of each file. Raises: DataError if one is missing, or the system cannot say."""
        found = {}
        for path, _ in self._files():
            with explained(path, DataError, missing=True):
                found[path] = InputFile.of(path)
        return found

    def find_changes(self, before: dict[Path, InputFile]) -> tuple[Damage, ...]:
        """Compares the files' sizes and times of modification with those of a time at which they were as written."""
        found: list[Damage] = []
        for path, record in self._files():
            damage = find_wrong_size(path, record.content)
            if damage is None and InputFile.of(path) != before[path]:
                damage = Damage(path=path, problem=_WRITTEN_TO, first_bad_byte=None)
            found += [] if damage is None else [damage]
        return tuple(found)

    def verify_all(self, progress: "Progress", *, share: tuple[int, int] = (0, 1)) -> Verified:
        """Reads the files, or a share of them, with several threads, one for each processor and at most eight."""
        damages = self.find_wrong_sizes()
        pieces = self._pieces(damages, share)
        shown = progress.begin(f"{self._directory}: verifying", unit="bytes")
        total = sum(piece.bytes for piece in pieces)
        find = partial(FileChunk.find_damage, reader=ChunkReader())
        threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as executor:
            found = map_in_order(find, iter(pieces), executor, threads=threads)
            return _read_all(pieces, found, damages, on_read=lambda done: shown.update(done, total))

    def verify_share(
        self,
        share: int,
        shares: int,
        *,
        is_cancelled: Callable[[], bool],
        on_read: Callable[[int], None] = lambda _: None,
    ) -> Verified:
        """Reads one of `shares` parts of about the same number of chunks, in the calling thread.

        It ends early if `is_cancelled`. `on_read` is called with the bytes read so far.
        """
        wrong, reader = self.find_wrong_sizes(), ChunkReader()
        pieces = self._pieces(wrong, (share, shares))
        found = (piece.find_damage(reader) for piece in takewhile(lambda _: not is_cancelled(), pieces))
        return _read_all(pieces, found, wrong if share == 0 else {}, on_read=on_read)

    def verify_smallest(self, *, seconds: float) -> Verified:
        """Reads as many files as it can in that time, in the calling thread, the smallest first."""
        deadline = time.monotonic() + seconds
        wrong, reader = self.find_wrong_sizes(), ChunkReader()
        pieces = sorted(self._pieces(wrong), key=lambda piece: piece.record.content.bytes)
        found = (piece.find_damage(reader) for piece in takewhile(lambda _: time.monotonic() <= deadline, pieces))
        return _read_all(pieces, found, wrong)

    def _pieces(self, wrong: Container[Path], share: tuple[int, int] = (0, 1)) -> list[FileChunk]:
        """Returns every chunk of every file but those of a wrong size, or those of a share."""
        pieces = [
            FileChunk(path, record, chunk)
            for path, record in self._files()
            if path not in wrong
            for chunk in range(len(record.content.chunks))
        ]
        index, shares = share
        return pieces[len(pieces) * index // shares : len(pieces) * (index + 1) // shares]

    def find_wrong_sizes(self) -> dict[Path, Damage]:
        """Returns the files that are missing, cut short or too long."""
        found = {path: find_wrong_size(path, record.content) for path, record in self._files()}
        return {path: damage for path, damage in found.items() if damage is not None}

    def refuse_wrong_sizes(self) -> None:
        """Compares sizes. Raises: DataError as `refuse`."""
        self.refuse(tuple(self.find_wrong_sizes().values()))

    def refuse(self, damages: tuple[Damage, ...], *, seen: str = "") -> None:
        """Reports damage. Raises: DataError that names the damaged files, the start of the damage, and the remedy."""
        if damages:
            finding = "cannot be read" if all(damage.unreadable for damage in damages) else "is damaged"
            lines = [f"  {damage.describe()}" for damage in damages]
            raise DataError("\n".join([f"{self._directory} {finding}{seen}:", *lines, self.remedy(damages)]))

    def remedy(self, damages: tuple[Damage, ...]) -> str:
        """Returns the remedy for these damages, of which some may be files that the system cannot read."""
        damaged = {damage.path for damage in damages if damage.unreadable is None}
        if not damaged:
            return "Nothing shows that these files are damaged: keep them"
        return remedy(self._directory, [path for path, record in self._files() if record.is_shared and path in damaged])

    def _files(self) -> Iterator[tuple[Path, FileRecord]]:
        for name, record in self._manifest.files.items():
            if _holds(name, self._content):
                yield record.locate(self._directory), record


def _holds(name: str, content: Content) -> bool:
    """Returns whether a file is one of those that hold such content."""
    match content:
        case "all":
            return True
        case "lengths":
            return not name.endswith(".bin")
        case "tokenizer":
            return name.startswith(f"{TOKENIZER_FOLDER}/")


_verified: dict[tuple[Path, Content, tuple[int, int]], dict[Path, InputFile]] = {}
"""States of the files that this process has verified, which it does not read again while they are the same."""


def require_verified(
    directory: Path, manifest: Manifest, content: Content = "all", *, share: tuple[int, int] = (0, 1)
) -> None:
    """Verifies the files of a prepared directory, unless this process has done it and they have not changed since.

    `share` is the index and the number of processes that each verify a part.

    Raises: DataError that names each damaged or unreadable file.
    """
    verifier = Verifier(directory, manifest, content=content)
    before = verifier.states()
    if _verified.get((directory, content, share)) == before:
        return
    from evenpack import console  # and rich with it, which `import evenpack` does without
    from evenpack.progress import Progress

    with Progress(console.messages(), silent=verifier.total_bytes < _SHOWN_BYTES) as progress:
        verifier.refuse(verifier.verify_all(progress, share=share).damages)
    _verified[directory, content, share] = before


@contextmanager
def explained_damage(directory: Path) -> Iterator[None]:
    """Verifies a prepared directory when the block ends with an error that damaged files can lead to.

    These are all errors without an explanation except RuntimeError, which torch raises for lost connections and
    devices.

    Raises: DataError instead of that error if a file is damaged, or the directory is gone.
    """
    try:
        yield
    except (EvenpackError, RuntimeError):
        raise
    except Exception as error:
        try:
            verifier = Verifier(directory, Manifest.read(directory))
            verifier.refuse(verifier.verify_smallest(seconds=_EXPLANATION_SECONDS).damages)
        except DataError as damage:
            raise damage from error
        raise


def refuse_changed_sources(config: DataConfig, manifest: Manifest, directory: Path) -> None:
    """Compares sizes and times of the files from which `directory` was made; missing files are not reported.

    Raises: DataError naming the first file that has changed.
    """
    from evenpack.data.tokenizers.loading import tokenizer_inputs

    finders = [(manifest.tokenizer.inputs, partial(tokenizer_inputs, config.tokenizer))]
    for name, source in config.sources.items():
        finders.append((manifest.sources[name].inputs, partial(source_inputs, name, source)))
    for before, find in finders:
        try:
            now = find()
        except DataError:
            continue
        refuse_changed_inputs(before, now, directory)
