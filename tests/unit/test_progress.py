"""Progress of long work as shown to people, with rates and remaining times from a given clock."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evenpack.progress import Progress, WindowRate, format_duration, format_rate


class Clock:
    """A clock that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_file(clock: Clock, **options: bool) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(Console(file=stream, width=20), clock=clock, **options), stream


def terminal(clock: Clock, *, width: int = 100) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    return Progress(console, clock=clock), stream


def pictures(text: str) -> list[str]:
    """Returns the lines that a terminal showed, without its control codes."""
    return [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", text).splitlines() if line.strip()]


def test_a_log_file_gets_the_first_state_a_line_every_ten_seconds_and_the_last() -> None:
    clock = Clock()
    progress, stream = log_file(clock)
    steps = progress.begin("step", counted=True)
    for step in (*range(1, 101), 100):
        clock.now += 0.5
        steps.update(step, 100)
    shown = [text.split()[1] for text in stream.getvalue().splitlines()]
    assert shown == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]


def test_a_line_shows_position_facts_rate_and_time_to_go_and_is_never_folded() -> None:
    clock = Clock()
    progress, stream = log_file(clock)
    reading = progress.begin("[wiki]: reading", unit="bytes")
    clock.now += 2.0
    reading.update(1_000_000, 4_000_000, counts={"documents": 5, "tokens": 45_300}, facts=("no [bold] words",))
    assert stream.getvalue() == (
        "[wiki]: reading  25 %  5 documents  45.3k tokens  no [bold] words  500k bytes/s  6s to go\n"
    )


def test_the_start_of_processes_is_in_no_rate() -> None:
    """Half a minute until the first of 100 results is no half minute for each of the others."""
    clock = Clock()
    progress, stream = log_file(clock)
    piece = progress.begin("simulating", unit="sequences", starts_processes=True)
    for done in (1, 11):
        clock.now += 30.0
        piece.update(done, 100, amount=done * 300)
    assert stream.getvalue().splitlines() == [
        "simulating  1 %  - sequences/s  - to go",
        "simulating  11 %  100 sequences/s  4m27s to go",
    ]


def test_what_was_done_before_counts_for_no_rate() -> None:
    clock = Clock()
    progress, stream = log_file(clock)
    steps = progress.begin("step", done=90, unit="steps", counted=True, elapsed_seconds=1.0)
    clock.now += 2.0
    steps.update(91, 100)
    assert "0 steps/s  27s to go" in stream.getvalue()


def test_time_in_a_pause_lowers_no_rate_but_counts_for_the_time_to_go() -> None:
    clock = Clock()
    progress, stream = log_file(clock)
    steps = progress.begin("step", unit="tokens", counted=True)
    for step in range(1, 11):
        clock.now += 1.0
        steps.update(step, 100, amount=1000 * step)
    with progress.paused():
        clock.now += 10.0
    clock.now += 1.0
    steps.update(11, 100, amount=11_000)
    # 89 steps at one a second; 11 of the 21 seconds so far were steps: 89 x 21 / 11.
    assert "1.00k tokens/s  2m50s to go" in stream.getvalue().splitlines()[-1]


def test_a_terminal_has_a_bar_for_each_piece_and_the_same_facts() -> None:
    clock = Clock()
    progress, stream = terminal(clock)
    with progress:
        wiki, code = (progress.begin(f"[{name}]: reading", unit="bytes") for name in ("wiki", "code"))
        for piece in (wiki, code):
            clock.now += 1.0
            piece.update(500, 1000, facts=("7 documents",))
            piece.update(1000, 1000, facts=("9 documents",))
    shown = pictures(stream.getvalue())
    assert len(shown) > 4
    assert re.fullmatch(r"\[wiki\]: reading  100 % ━+ 9 documents  1.00k bytes/s  0s to go", shown[-2])
    assert re.fullmatch(r"\[code\]: reading  100 % ━+ 9 documents  500 bytes/s  0s to go", shown[-1])


def test_a_terminal_is_drawn_a_few_times_a_second_at_most_and_no_picture_is_wider() -> None:
    clock = Clock()
    progress, stream = terminal(clock, width=30)
    steps = progress.begin("step", unit="tokens", counted=True)
    for step in range(1, 101):
        clock.now += 0.01
        steps.update(step, 1000, amount=step, facts=("a fact of many words",))
    shown = pictures(stream.getvalue())
    assert 5 <= len(shown) <= 7
    assert max(map(len, shown)) <= 30


def test_output_in_a_pause_starts_on_its_own_line_and_bars_continue_below() -> None:
    clock = Clock()
    progress, stream = terminal(clock)
    with progress:
        steps = progress.begin("step", counted=True)
        clock.now += 1.0
        steps.update(1, 100)
        with progress.paused():
            assert stream.getvalue().rsplit("\x1b[?25h")[0].endswith("\n")
            stream.write("validation loss 3.1\n")
        clock.now += 1.0
        steps.update(2, 100)
    text = stream.getvalue()
    assert text.index("step 1/100") < text.index("validation loss 3.1\n") < text.index("step 2/100")
    assert not re.search(r"validation loss 3.1\n\x1b\[1A", text)


def test_a_terminal_that_cannot_write_over_a_line_gets_lines() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, _environ={"TERM": "dumb"})
    progress = Progress(console, clock=Clock())
    progress.begin("step", counted=True).update(1, 100)
    progress.begin("nothing").update(0, 0)
    assert stream.getvalue() == "step 1/100  - to go\nnothing  100 %  0s to go\n"


def test_a_silent_rank_shows_nothing() -> None:
    progress, stream = log_file(Clock(), silent=True)
    progress.begin("step").update(1, 1)
    progress.note("done")
    assert stream.getvalue() == ""


class TestWindowRate:
    def test_what_lies_before_the_window_is_forgotten(self):
        rate = WindowRate(window_seconds=10.0)
        for second in range(100):
            rate.add(float(second), second if second < 50 else 50 + 7 * (second - 50))
        assert rate.per_second() == 7.0

    @given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 1_000_000)), min_size=1, max_size=50))
    def test_it_lies_between_the_slowest_and_the_fastest_interval(self, intervals: list[tuple[float, int]]):
        rate = WindowRate(window_seconds=30.0)
        now, total = 0.0, 0
        rate.add(now, total)
        assert rate.per_second() is None
        for seconds, amount in intervals:
            now, total = now + seconds, total + amount
            rate.add(now, total)
        found = rate.per_second()
        assert found is not None
        rates = [amount / seconds for seconds, amount in intervals]
        assert min(rates) * 0.999 - 0.001 <= found <= max(rates) * 1.001 + 0.001


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(None, "-"), (0.0, "0"), (812.4, "812"), (999.6, "1.00k"), (45_300.0, "45.3k"), (3.1e12, "3100G")],
)
def test_rates_have_three_digits_and_a_unit(per_second: float | None, text: str):
    assert format_rate(per_second) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (59.6, "1m00s"), (3599.7, "1h00m"), (11_100.0, "3h05m"), (187_300.0, "2d04h")],
)
def test_durations_have_two_units(seconds: float | None, text: str):
    assert format_duration(seconds) == text
