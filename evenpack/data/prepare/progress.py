"""The progress of `prepare`, and its display; the caller may choose another one."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from rich.console import Console

from evenpack.progress import Piece, format_rate
from evenpack.progress import Progress as Display

_BYTES_PER_TOKEN = 4
"""Bytes per token, 2 for a small vocabulary: an estimate must not be too low."""
_BYTES_PER_DOCUMENT = 64
"""Bytes per document: length, hash, index, view and plan, roughly."""
_LINE_SECONDS = 5.0
_STAGES = {
    "tokenizer": "reading for the tokenizer",
    "tokens": "tokenising",
    "pairs": "making pairs",
    "shards": "reading shards",
    "shuffle": "shuffling",
    "verification": "verifying",
}
_THINGS = {"pairs": "pairs", "shards": "pairs", "shuffle": "sequences"}


Stage = Literal["tokenizer", "tokens", "pairs", "shards", "shuffle", "verification"]
"""Stages: reading for the training of a tokenizer, tokenising, making pairs of sentences, importing finished ones
from shards, shuffling sequences on a grid, or comparing files with checksums."""


@dataclass(frozen=True, kw_only=True)
class PrepareState:
    """The progress of `prepare` with one source."""

    stage: Stage
    source: str
    documents: int
    """Documents done so far, including earlier calls. In stages of pairs: pairs; during verification: 0."""
    tokens: int
    """Tokens; 0 while a tokenizer is trained or files are verified."""
    bytes_read: int
    """Bytes of the source's files; while pairs are made, of the tokens of all passes; during verification, of the
    set's files."""
    bytes_resumed: int
    """The part of `bytes_read` that an earlier call had done."""
    total_bytes: int
    elapsed_seconds: float
    """Seconds since this call began with this source."""


@runtime_checkable
class Progress(Protocol):
    """Receives the state several times a second; called by the thread that called `prepare`."""

    def update(self, state: PrepareState) -> None:
        """Reports a finished batch."""

    def note(self, message: str) -> None:
        """Reports a message once, in a line."""


class NoProgress:
    """Shows nothing."""

    def update(self, state: PrepareState) -> None:
        """Shows nothing."""

    def note(self, message: str) -> None:
        """Shows nothing."""


class Meter:
    """Passes progress on and estimates the disk space that is still needed."""

    def __init__(self, progress: Progress, total_bytes: Mapping[str, int]) -> None:
        """Takes the `total_bytes` to be read of each source."""
        self._progress = progress
        self._total_bytes = dict(total_bytes)
        self._latest: dict[str, PrepareState] = {}
        self._last: PrepareState | None = None

    def update(self, state: PrepareState) -> None:
        if state.stage in ("tokens", "shards"):
            self._latest[state.source] = state
        self._last = state
        self._progress.update(state)

    def note(self, message: str) -> None:
        self._progress.note(message)

    def needed_bytes(self) -> int | None:
        """Returns the bytes still to be written, extrapolated; None before anything was written.

        While pairs are made, or sequences shuffled, it covers only those of this source: later stages are unknown.
        """
        last = self._last
        if last is not None and last.stage == "shuffle":  # each byte is written once, with a length, an id and an index
            return (last.total_bytes - last.bytes_read) * 9 // 8
        states, total = list(self._latest.values()), sum(self._total_bytes.values())
        if last is not None and last.stage == "pairs":
            states, total = [last], last.total_bytes
        read = sum(state.bytes_read for state in states)
        if not read:
            return None
        written = sum(_BYTES_PER_TOKEN * state.tokens + _BYTES_PER_DOCUMENT * state.documents for state in states)
        return written * (total - read) // read


@dataclass(frozen=True)
class SourceReporter:
    """Turns the counts of one source into progress; its clock starts when it is made."""

    progress: Progress
    source: str
    stage: Stage
    total_bytes: int
    start_seconds: float = field(default_factory=time.monotonic, init=False)

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


class PrepareProgress:
    """A piece of work for each source and stage. A context manager."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = Display(console, interval_seconds=_LINE_SECONDS, clock=clock)
        self._pieces: dict[tuple[str, str], Piece] = {}

    def __enter__(self) -> "PrepareProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.finish()

    def update(self, state: PrepareState) -> None:
        """Shows a finished batch."""
        key = (state.stage, state.source)
        if key not in self._pieces:
            self._pieces[key] = self._progress.begin(
                f"{state.source}: {_STAGES[state.stage]}",
                done=state.bytes_resumed,
                unit="bytes",
                elapsed_seconds=state.elapsed_seconds,
            )
        things = _THINGS.get(state.stage, "documents")
        facts = [] if state.stage == "verification" else [f"{format_rate(float(state.documents))} {things}"]
        if state.tokens:
            facts.append(f"{format_rate(float(state.tokens))} tokens")
        self._pieces[key].update(state.bytes_read, state.total_bytes, facts=facts)

    def note(self, message: str) -> None:
        """Shows a message once."""
        self._progress.note(message)
