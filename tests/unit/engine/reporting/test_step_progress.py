"""A run's progress, as shown in a log file."""

import io
import math

from rich.console import Console

from evenpack.engine.reporting.journal import StepProgress
from evenpack.progress import Progress


class Clock:
    """A clock that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def step_progress(clock: Clock, *, step: int = 0) -> tuple[StepProgress, io.StringIO]:
    stream = io.StringIO()
    return StepProgress(Progress(Console(file=stream), clock=clock), step=step, stop_step=100), stream


def test_a_line_shows_step_loss_learning_rate_tokens_a_second_and_time_to_go() -> None:
    clock = Clock()
    progress, stream = step_progress(clock)
    clock.now += 2.0
    progress.update(step=1, loss=2.51239, learning_rate=3e-4, tokens=90_600)
    assert stream.getvalue() == "step 1/100  loss 2.5124  lr 3.00e-04  45.3k tokens/s  3m18s to go\n"


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    clock = Clock()
    progress, stream = step_progress(clock, step=90)
    clock.now += 3.0
    progress.update(step=91, loss=2.5, learning_rate=3e-4, tokens=3000)
    assert "1.00k tokens/s  27s to go" in stream.getvalue()


def test_time_in_evaluation_lowers_no_rate() -> None:
    clock = Clock()
    progress, stream = step_progress(clock)
    for step in range(1, 11):
        clock.now += 1.0
        progress.update(step=step, loss=2.5, learning_rate=3e-4, tokens=1000)
    with progress.paused():
        clock.now += 10.0
    clock.now += 1.0
    progress.update(step=11, loss=2.5, learning_rate=3e-4, tokens=1000)
    assert "1.00k tokens/s  2m50s to go" in stream.getvalue().splitlines()[-1]


def test_a_loss_that_is_no_number_is_shown_as_one() -> None:
    progress, stream = step_progress(Clock())
    progress.update(step=1, loss=math.nan, learning_rate=0.0, tokens=0)
    assert stream.getvalue() == "step 1/100  loss nan  lr 0.00e+00  - tokens/s  - to go\n"
