"""The progress of `prepare` with each source."""

from typing import Literal

from evenpack.progress import Piece, Progress

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
        self._stage = stage
        self._total_bytes = total_bytes
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
        if self._piece is None:
            self._piece = self._progress.begin(
                f"{self.source}: {STAGE_NAMES[self._stage]}",
                done=bytes_resumed,
                unit="bytes",
                elapsed_seconds=self._progress.clock() - self._began,
            )
        counts = {_THINGS.get(self._stage, "documents"): documents}
        if tokens:
            counts["tokens"] = tokens
        self._piece.update(bytes_read, self._total_bytes, counts=counts)
