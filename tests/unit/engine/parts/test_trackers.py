"""Trackers that are missing, cannot be opened, or fail during a run."""

import importlib.util
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_logs import record, run_with_log

from evenpack.engine.config import MetricsSection, WandbSection
from evenpack.engine.parts import trackers
from evenpack.engine.parts.trackers import Trackers
from evenpack.engine.resolving.requirements import require_trackers
from evenpack.errors import ConfigError

BOTH = MetricsSection(csv=True, tensorboard=True)


class Kept:
    """Keeps what it is given, and fails where it is told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.closed: bool | None = None
        self._fails_at = fails_at

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        if step == self._fails_at:
            raise OSError("no space left")
        self.steps.append(step)

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None:
        self.closed = failed


def opening(monkeypatch: pytest.MonkeyPatch, **kept: Any) -> None:
    monkeypatch.setattr(trackers, "_OPENERS", {name: lambda value, run, one=one: one for name, one in kept.items()})


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find(name))


def test_a_tracker_that_fails_is_warned_of_once_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Kept(fails_at=3), Kept()
    opening(monkeypatch, tensorboard=broken, csv=whole)
    found = Trackers(run_with_log(tmp_path, metrics=BOTH))
    with found.opened():
        for step in range(1, 7):
            found.write(record(step))
    assert whole.steps == [1, 2, 3, 4, 5, 6]
    assert whole.closed is False
    assert broken.steps == [1, 2]
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("metrics.tensorboard failed (OSError: no space left) and gets no further steps")


def test_trackers_are_notified_that_the_run_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    opening(monkeypatch, csv=kept)
    with pytest.raises(KeyError), Trackers(run_with_log(tmp_path, metrics=BOTH)).opened():
        raise KeyError
    assert kept.closed is True


def test_only_what_the_run_file_names_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    opening(monkeypatch, csv=kept)
    found = Trackers(run_with_log(tmp_path, metrics=MetricsSection()))
    with found.opened():
        found.write(record(1))
    assert kept.steps == []
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_a_tracker_that_cannot_be_opened_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: object, run: object) -> Kept:
        raise OSError("read-only")

    kept = Kept()
    monkeypatch.setattr(trackers, "_OPENERS", {"csv": lambda value, run: kept, "tensorboard": refuse})
    with (
        pytest.raises(ConfigError, match=r"metrics.tensorboard cannot be opened \(OSError: read-only\)"),
        Trackers(run_with_log(tmp_path, metrics=BOTH)).opened(),
    ):
        raise AssertionError("the run does not begin")
    assert kept.closed is True, "those that are open are closed"


def test_packages_that_are_missing_are_all_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "tensorboard", "wandb")
    section = MetricsSection(csv=True, tensorboard=True, wandb=WandbSection())
    with pytest.raises(ConfigError) as caught:
        require_trackers(section)
    message = str(caught.value)
    assert (
        "metrics.tensorboard: the package tensorboard is not installed: pip install 'evenpack[tensorboard]'" in message
    )
    assert "metrics.wandb: the package wandb is not installed: pip install 'evenpack[wandb]'" in message
    require_trackers(MetricsSection(csv=True))


def test_nobody_logged_in_is_named_and_offline_needs_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    class LoginError(Exception):
        """Imitates W&B's error."""

    def login(**options: object) -> bool:
        assert options == {"prompt": False, "verify": False}, "asks nobody"
        if key is None:
            return False
        raise LoginError("API key must have 40+ characters")

    fake = SimpleNamespace(
        login=login, errors=SimpleNamespace(Error=LoginError), __spec__=importlib.util.find_spec("csv")
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    key = None
    section = MetricsSection(wandb=WandbSection())
    with pytest.raises(ConfigError, match="nobody is logged in to Weights & Biases: run `wandb login`"):
        require_trackers(section)
    key = "short"
    with pytest.raises(ConfigError, match=r"is invalid \(API key must have 40\+ characters\)"):
        require_trackers(section)
    require_trackers(MetricsSection(wandb=WandbSection(mode="offline")))
