"""Trackers that are missing, cannot be opened, or fail during a run."""

import importlib.util
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
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed: bool | None = None

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        self.steps.append(step)

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None:
        self.closed = failed


def opening(monkeypatch: pytest.MonkeyPatch, **kept: Any) -> None:
    monkeypatch.setattr(trackers, "_OPENERS", {name: lambda value, run, one=one: one for name, one in kept.items()})


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
    missing, find = ("tensorboard", "wandb"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    with pytest.raises(ConfigError) as caught:
        require_trackers(MetricsSection(csv=True, tensorboard=True, wandb=WandbSection()))
    for name in missing:
        assert f"metrics.{name}: " in str(caught.value)
        assert f"pip install 'evenpack[{name}]'" in str(caught.value)
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
