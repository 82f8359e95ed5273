"""What `prepare` tells while it works; who calls it decides how that looks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

_BYTES_PER_TOKEN = 4
"""2 for a small vocabulary: an estimate must not be too low."""
_BYTES_PER_DOCUMENT = 64
"""Length, hash, index, view and plan, roughly."""


Stage = Literal["tokenizer", "tokens", "pairs", "shards", "shuffle", "verification"]
"""Reading for the training of a tokenizer, tokenising, making pairs of sentences, taking finished ones from shards,
shuffling sequences on a grid, or comparing files with checksums."""


@dataclass(frozen=True, kw_only=True)
class PrepareState:
    """Where `prepare` is with one source."""

    stage: Stage
    source: str
    documents: int
    """Done so far, by earlier calls too. While pairs are made or taken from shards: pairs; while files are verified:
    0."""
    tokens: int
    """0 while a tokenizer is trained or files are verified."""
    bytes_read: int
    """Of the source's files; while pairs are made, of the tokens that all passes go over; while a prepared set is
    verified, of its files."""
    bytes_resumed: int
    """The part of `bytes_read` that an earlier call had done."""
    total_bytes: int
    elapsed_seconds: float
    """Since this call began with this source."""


@runtime_checkable
class Progress(Protocol):
    """Receives the state several times a second; called by the thread that called `prepare`."""

    def update(self, state: PrepareState) -> None:
        """A batch is done."""

    def note(self, message: str) -> None:
        """Something to be said once, in a line."""


class NoProgress:
    """Says nothing."""

    def update(self, state: PrepareState) -> None:
        """Says nothing."""

    def note(self, message: str) -> None:
        """Says nothing."""


class Meter:
    """Passes progress on and estimates from it how much the disk still has to take."""

    def __init__(self, progress: Progress, total_bytes: Mapping[str, int]) -> None:
        """`total_bytes`: what is to be read of each source."""
        self._progress = progress
        self._total_bytes = dict(total_bytes)
        self._latest: dict[str, PrepareState] = {}
        self._shuffle: PrepareState | None = None
        self._pairs: PrepareState | None = None
        """Of the source whose pairs are being made."""

    def update(self, state: PrepareState) -> None:
        if state.stage in ("tokens", "shards"):
            self._latest[state.source] = state
        self._pairs = state if state.stage == "pairs" else None
        self._shuffle = state if state.stage == "shuffle" else None
        self._progress.update(state)

    def note(self, message: str) -> None:
        self._progress.note(message)

    def needed_bytes(self) -> int | None:
        """What is still to be written, if it goes on as before; None before anything was.

        While pairs are made, or sequences shuffled, it is what this source's still take: of what comes after them
        nothing is known.
        """
        if self._shuffle is not None:  # each byte that is read is written once, with a length, an id and an index
            return (self._shuffle.total_bytes - self._shuffle.bytes_read) * 9 // 8
        states = list(self._latest.values()) if self._pairs is None else [self._pairs]
        total = sum(self._total_bytes.values()) if self._pairs is None else self._pairs.total_bytes
        read = sum(state.bytes_read for state in states)
        if not read:
            return None
        written = sum(_BYTES_PER_TOKEN * state.tokens + _BYTES_PER_DOCUMENT * state.documents for state in states)
        return written * (total - read) // read


@dataclass(frozen=True, kw_only=True)
class SourceReporter:
    """Turns the counts of one source into progress."""

    progress: Progress
    source: str
    stage: Stage
    total_bytes: int
    start_seconds: float

    @classmethod
    def begin(cls, progress: Progress, source: str, stage: Stage, total_bytes: int) -> "SourceReporter":
        """A reporter whose clock starts now."""
        return cls(
            progress=progress,
            source=source,
            stage=stage,
            total_bytes=total_bytes,
            start_seconds=time.monotonic(),
        )

    def report(self, *, documents: int, tokens: int, bytes_read: int, bytes_resumed: int) -> None:
        self.progress.update(
            PrepareState(
                stage=self.stage,
                source=self.source,
                documents=documents,
                tokens=tokens,
                bytes_read=bytes_read,
                bytes_resumed=bytes_resumed,
                total_bytes=self.total_bytes,
                elapsed_seconds=time.monotonic() - self.start_seconds,
            )
        )
