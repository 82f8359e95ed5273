"""`prepare` shows its progress."""

import io

from rich.console import Console

from evenpack import console
from evenpack.data.prepare.progress import PrepareProgress, PrepareState, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def state(bytes_read: int, *, source: str = "wiki") -> PrepareState:
    return PrepareState(
        stage="tokens",
        source=source,
        documents=bytes_read // 1000,
        tokens=bytes_read // 4,
        bytes_read=bytes_read,
        bytes_resumed=0,
        total_bytes=4_000_000,
        elapsed_seconds=0.0,
    )


def test_progress_is_a_line_every_few_seconds_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with PrepareProgress(Console(file=stream, width=160), clock=clock) as progress:
        for seconds in range(12):
            clock.now = float(seconds)
            progress.update(state(100_000 * seconds))
        progress.update(state(4_000_000))
        progress.note("done with [wiki]")
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == ["0 %", "12 %", "25 %", "100 %"]
    assert lines[1] == "wiki: tokenising  12 %  500 documents  125k tokens  100k bytes/s  35s to go"
    assert lines[-1] == "done with [wiki]"


def test_progress_is_a_bar_for_each_source_on_a_terminal() -> None:
    stream = io.StringIO()
    with PrepareProgress(Console(file=stream, width=100, force_terminal=True)) as progress:
        progress.update(state(1_000_000))
        progress.update(state(4_000_000))
        progress.update(state(2_000_000, source="code"))
    last = stream.getvalue()
    assert "wiki: tokenising" in last
    assert "code: tokenising" in last
    assert "100 %" in last


def test_progress_is_what_prepare_takes() -> None:
    assert isinstance(PrepareProgress(console.messages()), Progress)
