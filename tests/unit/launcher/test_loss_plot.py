"""The loss curve of a run as a figure."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from evenpack.errors import ConfigError
from evenpack.launcher.loss_plot import LossCurve, loss_curves, plot_losses

PNG = b"\x89PNG\r\n"


def curve_of(steps: Sequence[int], losses: Sequence[float], **validation: list[tuple[int, float]]) -> LossCurve:
    return LossCurve(name="loss", unit="nats/token", steps=steps, losses=losses, validation=validation)


def test_a_loss_curve_becomes_a_png(tmp_path: Path) -> None:
    steps = list(range(1, 201))
    losses = [4 + 100 / (step + 20) for step in steps]
    curve = curve_of(steps, losses, wiki=[(100, 5.0), (200, 4.6)], code=[(200, 4.5)])
    plot_losses([curve, curve], tmp_path / "new" / "loss.png", name="demo", origin="")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(PNG)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["loss.png"]


def test_a_curve_of_one_step_can_be_drawn_and_one_without_is_an_error(tmp_path: Path) -> None:
    plot_losses([curve_of([1], [3.0])], tmp_path / "loss.png", name="short", origin="")
    assert (tmp_path / "loss.png").exists()
    with pytest.raises(ConfigError, match="has no step yet"):
        plot_losses([curve_of([], [])], tmp_path / "none.png", name="empty", origin="")


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"evenpack\[plots\]"):
        plot_losses([curve_of([1], [3.0])], tmp_path / "loss.png", name="demo", origin="")
    assert list(tmp_path.iterdir()) == []


def test_training_stands_beside_the_validation_of_the_same_loss() -> None:
    held_out = {"wiki": {"loss": 6.5, "next_sentence_loss": 0.5}, "code": None}
    pairs = [
        {"step": 1, "loss": 9.0, "token_loss": 8.0, "next_sentence_loss": 1.0},
        {"step": 2, "loss": 7.5, "token_loss": 6.9, "next_sentence_loss": 0.6, "validation": held_out},
    ]
    tokens, sentences = loss_curves(pairs)
    assert (tokens.name, tokens.losses, dict(tokens.validation)) == (
        "token loss",
        [8.0, 6.9],
        {"wiki": [(2, 6.5)]},
    )
    assert (sentences.name, sentences.losses) == ("next-sentence loss", [1.0, 0.6])
    assert dict(sentences.validation) == {"wiki": [(2, 0.5)]}
    skipped = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": None, "validation": {"wiki": {"loss": 8.5}}}]
    (alone,) = loss_curves(skipped)
    assert (alone.steps, alone.losses, dict(alone.validation)) == ([1], [9.0], {"wiki": [(2, 8.5)]})
