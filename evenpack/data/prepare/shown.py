"""Shows the progress of `prepare`."""

import time
from collections.abc import Callable

from rich.console import Console

from evenpack.data.prepare.progress import PrepareState
from evenpack.progress import Piece, Progress, format_rate

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


class PrepareProgress:
    """A piece of work for each source and stage. A context manager."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = Progress(console, interval_seconds=_LINE_SECONDS, clock=clock)
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
