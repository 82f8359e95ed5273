"""The outcome of a training run becomes a value, tables and messages, and its ranks print to a stream."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_files import changed, prepared, run_config, run_values, text_sources, write_run_file
from tiny_run import train_state

from evenpack import console
from evenpack.engine.checkpoints.files import CHECKPOINTS, checkpoint_name, write_manifest
from evenpack.engine.config import RunConfig, RunSection
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import CheckpointError, ConfigError
from evenpack.files import write_json
from evenpack.launcher import training
from evenpack.launcher.processes.start import Devices, LaunchPlan
from evenpack.launcher.processes.supervise import LaunchResult
from evenpack.launcher.training import (
    TrainingResult,
    check_training,
    describe_result,
    report_table,
    report_training,
    run_training,
)

FAILED = LaunchResult(state="failed", exit_code=2, message="rank 1 on host ended", error="no space")


def small_run(folder: Path) -> RunConfig:
    """Prepares a run over a hundred lines: the built-in corpus takes five seconds."""
    lines = [f"some words of line {number} " * (1 + number % 5) for number in range(100)]
    return prepared(run_config(run_values("gpt2", folder, data={"sources": text_sources(folder, {"lines": lines})})))


def checked(folder: Path) -> ResolvedRun:
    """Returns a run of which only the section `run` and the layout are read."""
    run = object.__new__(ResolvedRun)
    vars(run)["config"] = SimpleNamespace(run=RunSection(name="a", output_dir=folder))
    vars(run)["shape"] = SimpleNamespace(layout="padded")
    return run


def outcome(result: LaunchResult, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainingResult, object]:
    """Runs a training with the given outcome; returns the result, and the stream of its ranks."""
    streams = []

    def supervise(*_: object, output: object, **__: object) -> LaunchResult:
        streams.append(output)
        return result

    monkeypatch.setattr(training, "supervise", supervise)
    devices = Devices(kind="cuda", ranks=1, options=(), choice="1 of 1")
    launch = LaunchPlan(command=("deepspeed",), environment={}, devices=devices)
    found = run_training(launch, checked(folder))
    return found, streams[0]


def test_a_failure_keeps_its_error_and_its_message_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = outcome(FAILED, tmp_path, monkeypatch)
    assert (found.state, found.error, found.exit_code, found.report) == ("failed", "no space", 2, None)
    reported = describe_result("a", found)
    assert reported.value == {"state": "failed", "message": "rank 1 on host ended", "output_dir": tmp_path}
    assert (reported.shown, reported.exit_code) == ([], 2)
    assert "error: rank 1 on host ended" in capsys.readouterr().err


def test_machines_of_a_hostfile_are_reached_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    devices = Devices(kind="hosts", ranks=2, options=(), choice="2 ranks on 2 machines", machines=("a", "b"))
    launch = LaunchPlan(command=("deepspeed",), environment={}, devices=devices)
    with pytest.raises(ConfigError, match="pdsh, which is not installed"):
        run_training(launch, checked(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_resume_that_ranks_would_refuse_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_run(tmp_path)
    run = check_training(config, ranks=1)
    path = tmp_path / "out" / CHECKPOINTS / checkpoint_name(2)
    path.mkdir(parents=True)
    write_manifest(path, train_state(run, step=2), [])
    started: list[LaunchPlan] = []

    def supervise(launch: LaunchPlan, *_: object, **__: object) -> LaunchResult:
        started.append(launch)
        return FAILED

    monkeypatch.setattr(training, "supervise", supervise)
    devices = Devices(kind="cuda", ranks=1, options=(), choice="1 of 1")
    launch = LaunchPlan(command=("deepspeed",), environment={}, devices=devices)
    for sections, refusal in (
        ({"run": {"seed": 7}}, "run.seed: .* -> 7"),
        ({"training": {"packs_per_step": 32}}, "to start again"),
        ({"optimizer": {"weight_decay": 0.3}}, None),
        ({}, None),
    ):
        other = check_training(changed(config, **sections), ranks=1)
        started.clear()
        caplog.clear()
        if refusal is None:
            run_training(launch, other)
            assert (started, caplog.messages) == ([launch], [])  # rank 0 tells what has changed
        else:
            with pytest.raises(CheckpointError, match=refusal):
                run_training(launch, other)
            assert started == []


def test_a_run_that_has_no_checkpoint_is_said_without_torch(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    write_run_file(tmp_path / "run.yaml", config.model_dump(mode="json"))
    calls = {
        ("evaluate", "run.yaml"): "there is no checkpoint in",
        ("export", "run.yaml", "exported"): "there is no checkpoint in",
        ("report", "nowhere"): "nowhere holds no metrics.jsonl",
    }
    code = (
        "import sys; from evenpack.launcher.cli.app import main\n"
        f"for sys.argv in {[['evenpack', *words] for words in calls]}:\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "2 False\n" * len(calls), done.stderr
    for message in calls.values():
        assert message in done.stderr


def test_ranks_print_to_standard_error_also_where_a_notebook_has_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert outcome(FAILED, tmp_path, monkeypatch)[1] is file
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert outcome(FAILED, tmp_path, monkeypatch)[1] is sys.__stderr__


REPORT = {
    "step": 7,
    "padding_share": 0.02,
    "ranks": 2,
    "tokens_per_second": 1000.0,
    "first_loss": 10.0,
    "last_loss": 5.0,
    "target": None,
    "validation": {"wiki": {"loss": 4.5}},
}


def shown(capsys: pytest.CaptureFixture[str], **values: Any) -> dict[str, str]:
    """Returns the rows of a run's table."""
    console.print_apart([report_table(REPORT | values, title="tried: finished")])
    lines = capsys.readouterr().out.splitlines()[1:]
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in lines)}


def test_a_validation_loss_that_is_not_finite_is_told_from_one_of_nothing_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = {"wiki": {"loss": 4.5}, "books": {"loss": None}, "code": None}
    write_json(tmp_path / "summary.json", REPORT | {"last_loss": None, "validation": validation})
    report = report_training(checked(tmp_path))
    assert report is not None
    assert list(shown(capsys, **report).items())[-4:] == [
        ("last loss", "not finite"),
        ("validation loss, wiki", "4.5000"),
        ("validation loss, books", "not finite"),
        ("validation loss, code", "nothing held out"),
    ]
