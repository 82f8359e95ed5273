"""The outcome of a training run becomes a value, tables and messages, and its ranks print to a stream."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenpack.engine.config import RunSection
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError
from evenpack.launcher import training
from evenpack.launcher.processes.start import Devices, LaunchPlan
from evenpack.launcher.processes.supervise import LaunchResult
from evenpack.launcher.training import TrainingResult, describe_result, run_training

FAILED = LaunchResult(state="failed", exit_code=2, message="rank 1 on host ended", error="no space")


def checked(folder: Path) -> ResolvedRun:
    """Returns a run of which a training that fails reads only the section `run`."""
    run = object.__new__(ResolvedRun)
    vars(run)["config"] = SimpleNamespace(run=RunSection(name="a", output_dir=folder))
    return run


def outcome(result: LaunchResult, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainingResult, object]:
    """Runs a training with the given outcome; returns the result, and the stream of its ranks."""
    streams = []

    def supervise(*_: object, output: object, **__: object) -> LaunchResult:
        streams.append(output)
        return result

    monkeypatch.setattr(training, "supervise", supervise)
    devices = Devices(kind="cpu", ranks=1, options=(), choice="1 rank on the CPU")
    launch = LaunchPlan(command=("deepspeed",), environment={}, devices=devices, hostfile=None, extra=())
    found = run_training(launch, checked(folder))
    return found, streams[0]


def test_a_failure_keeps_its_error_and_its_message_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = outcome(FAILED, tmp_path, monkeypatch)
    assert (found.state, found.error, found.exit_code, found.report) == ("failed", "no space", 2, None)
    value, shown = describe_result("a", found)
    assert value == {"state": "failed", "message": "rank 1 on host ended", "output_dir": tmp_path}
    assert shown == []
    assert "error: rank 1 on host ended" in capsys.readouterr().err


def test_machines_of_a_hostfile_are_reached_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    devices = Devices(kind="hosts", ranks=2, options=(), choice="2 ranks on 2 machines", spans_machines=True)
    launch = LaunchPlan(command=("deepspeed",), environment={}, devices=devices, hostfile=tmp_path / "hosts", extra=())
    with pytest.raises(ConfigError, match="pdsh, which is not installed"):
        run_training(launch, checked(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_ranks_print_to_standard_error_also_where_a_notebook_has_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert outcome(FAILED, tmp_path, monkeypatch)[1] is file
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert outcome(FAILED, tmp_path, monkeypatch)[1] is sys.__stderr__
