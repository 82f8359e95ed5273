"""Corpora of files: pieces of files, read one after the other, and parts that consist of such pieces."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from evenpack.data.sources.corpus import Document


@runtime_checkable
class Piece(Protocol):
    """A file, or a range of one that can be read without the earlier content. It can be pickled."""

    @property
    def name(self) -> str:
        """Name of the file, with the range if it is not all of it."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the file that are read for this piece."""

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        """Yields the piece's documents from number `start` on; `bytes_before` are counted into `Document.bytes_read`.

        Returns: how many documents are still to be skipped, if the piece has fewer than `start`.
        Raises: DataError with file and line or row.
        """

    def divided(self, target_bytes: int) -> Iterable["Piece"]:
        """Returns pieces with the same documents in the same order, of `target_bytes` if the file allows it."""


@dataclass(frozen=True, kw_only=True)
class LabelledPiece:
    """A piece whose documents are all for validation, or all for training."""

    piece: Piece
    is_held_out: bool

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def total_bytes(self) -> int:
        return self.piece.total_bytes

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        documents = self.piece.read(start, bytes_before)
        while True:
            try:
                document = next(documents)
            except StopIteration as end:
                return int(end.value)
            yield document._replace(is_held_out=self.is_held_out)

    def divided(self, target_bytes: int) -> Iterator["LabelledPiece"]:
        return (replace(self, piece=piece) for piece in self.piece.divided(target_bytes))


@dataclass(frozen=True, kw_only=True)
class JoinedPieces:
    """Consecutive pieces: a part of a corpus."""

    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        first, last = self.pieces[0], self.pieces[-1]
        return first.name if first is last else f"{first.name} to {last.name}"

    @property
    def total_bytes(self) -> int:
        return sum(piece.total_bytes for piece in self.pieces)

    def documents(self, start: int = 0) -> Iterator[Document]:
        bytes_before = 0
        for piece in self.pieces:
            start = yield from piece.read(start, bytes_before)
            bytes_before += piece.total_bytes


class FileCorpus(JoinedPieces):
    """The documents of files."""

    def parts(self, target_bytes: int) -> tuple[JoinedPieces, ...]:
        """Returns the parts. Raises: ValueError if `target_bytes` is not positive; DataError for an invalid file."""
        if target_bytes < 1:
            raise ValueError(f"parts of {target_bytes} bytes: expected at least 1")
        pieces = (piece for whole in self.pieces for piece in whole.divided(target_bytes))
        return tuple(JoinedPieces(pieces=joined) for joined in _joined(pieces, target_bytes))


def _joined(pieces: Iterable[Piece], target_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Yields neighbours together, as long as they have at most `target_bytes`."""
    gathered: list[Piece] = []
    gathered_bytes = 0
    for piece in pieces:
        if gathered and gathered_bytes + piece.total_bytes > target_bytes:
            yield tuple(gathered)
            gathered, gathered_bytes = [], 0
        gathered.append(piece)
        gathered_bytes += piece.total_bytes
    if gathered:
        yield tuple(gathered)
