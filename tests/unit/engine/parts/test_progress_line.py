"""A run's progress, as shown in a log file."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_steps import start_of, step_of
from rich.console import Console
from run_files import pair_run_values, run_config, run_values

from evenpack import console
from evenpack.engine.evaluate import Evaluations, SourceEvaluation
from evenpack.engine.parts import progress
from evenpack.engine.parts.part import Step
from evenpack.engine.parts.progress import ProgressLine
from evenpack.progress import Progress


class Clock:
    """A clock that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """The progress of a run of 100 steps, as rank 0 shows it."""

    def __init__(self, patch: pytest.MonkeyPatch, *, done: int = 0, model: str = "gpt2") -> None:
        self.clock = Clock()
        self.stream = io.StringIO()
        patch.setattr(console, "messages", lambda: Console(file=self.stream))
        patch.setattr(progress, "Progress", lambda shown_on: Progress(shown_on, clock=self.clock))
        values = pair_run_values if model == "bert" else run_values
        config = run_config(values(model, Path("nowhere"), training={"steps": 100}))
        checkpoint = SimpleNamespace(step=done) if done else None
        self.line = ProgressLine(
            start_of(resolved=SimpleNamespace(config=config, run_file=config), checkpoint=checkpoint)
        )
        self.is_open = self.line.opened()
        self.is_open.__enter__()
        self.clock.now += 60.0  # waits for the first batch

    def step(
        self, number: int, *, seconds: float, tokens: int, evaluations: Evaluations | None = None, **values: float
    ) -> Step:
        totals = SimpleNamespace(loss=values.get("loss", 2.5), counts=SimpleNamespace(tokens=tokens))
        update, rate = SimpleNamespace(totals=totals), values.get("learning_rate", 3e-4)
        step = step_of(number, learning_rate=rate, is_left_out=False, update=update, evaluations=evaluations)
        self.line.before_step(step)
        self.clock.now += seconds
        self.line.recording(step)
        return step


def test_a_line_shows_step_loss_learning_rate_tokens_a_second_and_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch)
    shown.step(1, seconds=2.0, loss=2.51239, tokens=90_600)
    assert shown.stream.getvalue() == "step 1/100  loss 2.5124  lr 3.00e-04  45.3k tokens/s  3m18s to go\n"
    shown = Shown(monkeypatch)
    shown.step(1, seconds=0.0, loss=math.nan, learning_rate=0.0, tokens=0)
    assert shown.stream.getvalue() == "step 1/100  loss nan  lr 0.00e+00  - tokens/s  - to go\n"


@pytest.mark.parametrize(("model", "kind"), [("gpt2", "loss"), ("bert", "token loss")])
def test_an_evaluation_is_a_line_of_its_own_also_between_the_lines_of_progress(
    monkeypatch: pytest.MonkeyPatch, model: str, kind: str
) -> None:
    shown = Shown(monkeypatch, model=model)
    shown.step(1, seconds=2.0, tokens=1000)
    found = {
        name: SourceEvaluation(loss=loss, accuracy=0.5, others={}, targets=1, sequences=1, packs=1)
        for name, loss in (("wiki", 5.12812), ("web", math.inf))
    }
    shown.step(2, seconds=0.1, tokens=1000, evaluations=found)
    shown.step(3, seconds=0.1, tokens=1000, evaluations={})  # nothing is held out
    assert shown.stream.getvalue().splitlines()[1:] == [f"step 2  validation {kind}, wiki 5.1281, web inf"]


def test_a_resumed_run_counts_only_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, done=90)
    shown.step(91, seconds=3.0, tokens=3000)
    assert "1.00k tokens/s  27s to go" in shown.stream.getvalue()


@pytest.mark.parametrize("pause", ["evaluation", "save"])
def test_time_in_evaluations_and_saves_lowers_no_rate(monkeypatch: pytest.MonkeyPatch, pause: str) -> None:
    shown = Shown(monkeypatch)
    for number in range(1, 11):
        step = shown.step(number, seconds=1.0, tokens=1000)
    begin, end = {
        "evaluation": (shown.line.evaluating, shown.line.evaluated),
        "save": (shown.line.saving, shown.line.saved),
    }[pause]
    begin(step)
    shown.clock.now += 10.0
    end(step)
    shown.step(11, seconds=1.0, tokens=1000)
    assert "1.00k tokens/s  2m50s to go" in shown.stream.getvalue().splitlines()[-1]
