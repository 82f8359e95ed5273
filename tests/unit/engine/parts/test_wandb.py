"""Runs of Weights & Biases that are written offline, read back from their files."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from run_logs import record, run_with_log
from wandb.proto import wandb_internal_pb2

from evenpack.engine.config import WandbSection
from evenpack.engine.parts.trackers import WandbRun
from evenpack.engine.reporting.definitions import scalars

OFFLINE = WandbSection(mode="offline", project="packing")

_BLOCK = 1 << 15
_HEAD = 7
_LAST_PARTS = (1, 4)


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """Reads W&B's file, a log like LevelDB's: blocks of parts with a checksum, a length and a kind each."""
    data, at, whole = path.read_bytes(), _HEAD, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in _LAST_PARTS:
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def finished(folder: Path) -> list[list[Any]]:
    """Returns the records of each start, in the order of their files, once W&B's own process has written them."""
    deadline = time.monotonic() + 60
    while True:
        found = [list(records(path)) for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb"))]
        if all(any(one.HasField("exit") for one in start) for start in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def logged(start: list[Any]) -> list[tuple[int, float]]:
    """Returns step and loss."""
    found = []
    for one in start:
        if one.HasField("history"):
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
            found.append((int(values["_step"]), values["training/loss"]))
    return found


def known_id(folder: Path) -> str:
    return str(json.loads((folder / "wandb_run.json").read_text())["id"])


@pytest.mark.slow
def test_a_run_resumes_under_its_id(tmp_path: Path) -> None:
    first = WandbRun(OFFLINE, run_with_log(tmp_path))
    for step in range(1, 5):
        first.write(step, scalars(record(step)))
    first.close(failed=True)
    before = known_id(tmp_path)
    time.sleep(1.1)  # W&B names a start by the second
    again = WandbRun(OFFLINE, run_with_log(tmp_path, steps=range(1, 5)))
    for step in range(5, 7):
        again.write(step, {"training/loss": 0.5})
    again.close(failed=False)
    starts = finished(tmp_path)
    assert [logged(start) for start in starts] == [[(1, 10.0), (2, 5.0), (3, 10 / 3), (4, 2.5)], [(5, 0.5), (6, 0.5)]]
    runs = [one.run for start in starts for one in start if one.HasField("run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(before, "packing", "tried")}
    assert [one.exit.exit_code for start in starts for one in start if one.HasField("exit")] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("ended_at_step", [9, None])
def test_a_run_that_went_back_or_was_killed_is_a_new_one_with_all_its_steps(
    tmp_path: Path, ended_at_step: int | None
) -> None:
    (tmp_path / "wandb_run.json").write_text(json.dumps({"id": "ofbefore", "ended_at_step": ended_at_step}))
    again = WandbRun(OFFLINE, run_with_log(tmp_path, steps=[1, 2]))
    again.write(3, {"training/loss": 0.5})
    again.close(failed=False)
    (start,) = finished(tmp_path)
    assert logged(start) == [(1, 10.0), (2, 5.0), (3, 0.5)]
    assert known_id(tmp_path) != "ofbefore"


def test_online_the_server_says_which_steps_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill the server may lack some steps before the checkpoint, or have some after it."""
    for has_steps, expected in ((3, [4, 5, 6, 7]), (6, [7])):
        server = Server(has_steps)
        monkeypatch.setattr(wandb, "init", server.init)
        (tmp_path / "wandb_run.json").write_text('{"id": "ofbefore", "ended_at_step": null}')
        online = WandbRun(WandbSection(project="packing"), run_with_log(tmp_path, steps=range(1, 6)))
        for step in (6, 7):
            online.write(step, {"training/loss": 0.5})
        online.close(failed=False)
        assert server.asked == ("ofbefore", "allow", "online")
        assert server.steps == expected
        assert json.loads((tmp_path / "wandb_run.json").read_text())["ended_at_step"] == 7


def test_a_step_that_could_not_be_logged_is_not_among_those_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that resumes after this step would believe that W&B has it."""

    def refuse(values: object, *, step: int) -> None:
        raise OSError("no space left")

    server = Server(0)
    monkeypatch.setattr(wandb, "init", server.init)
    found = WandbRun(WandbSection(project="packing"), run_with_log(tmp_path))
    found.write(1, {"training/loss": 0.5})
    monkeypatch.setattr(server, "log", refuse)
    with pytest.raises(OSError, match="no space"):
        found.write(2, {"training/loss": 0.5})
    found.close(failed=False)
    assert json.loads((tmp_path / "wandb_run.json").read_text())["ended_at_step"] == 1


class Server:
    """A server of W&B that has steps of a run with this id."""

    id, project, url = "ofbefore", "packing", "https://wandb.example/run"

    def __init__(self, has_steps: int) -> None:
        self.step = has_steps + 1
        self.steps: list[int] = []
        self.asked: tuple[str, str, str] | None = None

    def init(self, *, id: str, resume: str, mode: str, **details: object) -> "Server":  # noqa: A002 - W&B's name
        self.asked = (id, resume, mode)
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.steps.append(step)

    def finish(self, *, exit_code: int) -> None:
        assert exit_code == 0
