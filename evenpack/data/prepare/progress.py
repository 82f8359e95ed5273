"""The progress of `prepare` with each source, and the disk space that it still needs."""

from typing import Literal

from evenpack.progress import Piece, Progress

_BYTES_PER_TOKEN = 4
"""Bytes per token, 2 for a small vocabulary: an estimate must not be too low."""
_BYTES_PER_DOCUMENT = 64
"""Bytes per document: length, hash, index, view and plan, roughly."""

Stage = Literal["tokenizer", "tokens", "pairs", "shards", "shuffle"]
"""Stages: reading for the training of a tokenizer, tokenising, making pairs of sentences, importing finished ones
from shards, or shuffling sequences on a grid."""

STAGE_NAMES: dict[Stage, str] = {
    "tokenizer": "reading for the tokenizer",
    "tokens": "tokenising",
    "pairs": "making pairs",
    "shards": "reading shards",
    "shuffle": "shuffling",
}
"""What is shown of each stage."""

_THINGS: dict[Stage, str] = {"pairs": "pairs", "shards": "pairs", "shuffle": "sequences"}
"""What a stage counts, if not documents."""


class SourceProgress:
    """One stage of one source; its time begins when it is made, and it is shown from its first report."""

    def __init__(self, progress: Progress, source: str, stage: Stage, total_bytes: int) -> None:
        """Takes the bytes to read: of the source's files; while pairs are made, of the tokens of all passes."""
        self.source = source
        self.stage = stage
        self.total_bytes = total_bytes
        self.documents = self.tokens = self.bytes_read = 0
        self._progress = progress
        self._began = progress.clock()
        self._piece: Piece | None = None

    def report(self, *, documents: int, tokens: int, bytes_read: int, bytes_resumed: int) -> None:
        """Shows what is done so far, including earlier calls.

        Args:
            documents: documents, pairs or sequences, by the stage.
            tokens: 0 while a tokenizer is trained.
            bytes_resumed: the part of `bytes_read` that an earlier call had done.
        """
        self.documents, self.tokens, self.bytes_read = documents, tokens, bytes_read
        if self._piece is None:
            self._piece = self._progress.begin(
                f"{self.source}: {STAGE_NAMES[self.stage]}",
                done=bytes_resumed,
                unit="bytes",
                elapsed_seconds=self._progress.clock() - self._began,
            )
        counts = {_THINGS.get(self.stage, "documents"): documents}
        if tokens:
            counts["tokens"] = tokens
        self._piece.update(bytes_read, self.total_bytes, counts=counts)

    def note(self, message: str) -> None:
        """Shows a message once."""
        self._progress.note(message)


class PrepareProgress:
    """The stages of all sources in one call of `prepare`."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        """Takes the bytes to read of all sources."""
        self._progress = progress
        self._total_bytes = total_bytes
        self._stages: list[SourceProgress] = []

    def begin(self, source: str, stage: Stage, total_bytes: int) -> SourceProgress:
        """Begins a stage of a source."""
        begun = SourceProgress(self._progress, source, stage, total_bytes)
        self._stages.append(begun)
        return begun

    def note(self, message: str) -> None:
        """Shows a message once."""
        self._progress.note(message)

    def needed_bytes(self) -> int | None:
        """Returns the bytes still to be written, extrapolated; None before anything was written.

        While pairs are made, or sequences shuffled, it covers only those of this source: later stages are unknown.
        """
        begun = [stage for stage in self._stages if stage.bytes_read]
        if begun and begun[-1].stage == "shuffle":  # each byte is written once, with a length, an id and an index
            return (begun[-1].total_bytes - begun[-1].bytes_read) * 9 // 8
        if begun and begun[-1].stage == "pairs":
            counted, total = begun[-1:], begun[-1].total_bytes
        else:
            counted = [stage for stage in begun if stage.stage in ("tokens", "shards")]
            total = self._total_bytes
        read = sum(stage.bytes_read for stage in counted)
        if not read:
            return None
        written = sum(_BYTES_PER_TOKEN * stage.tokens + _BYTES_PER_DOCUMENT * stage.documents for stage in counted)
        return written * (total - read) // read
