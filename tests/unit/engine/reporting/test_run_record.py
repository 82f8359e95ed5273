"""run.json holds the starts that have led to the step at which a run resumes."""

import errno
import os
from pathlib import Path

import pytest

from evenpack.engine.reporting.run_record import DataIdentity, RunRecord, StartRecord, earlier_starts, read_run_record
from evenpack.errors import DataError, RunError


def start(steps_done: int) -> StartRecord:
    return StartRecord(
        steps_done=steps_done, ranks=1, device="CPU", commit=None, evenpack="0.1", torch="2", date="2026-11-22"
    )


def write_record(folder: Path, *steps: int) -> RunRecord:
    data = DataIdentity(fingerprint="f", tokenizer="t", vocabulary_size=9, pack_length=8, sources=("wiki",))
    record = RunRecord(config={"run": {"name": "x"}}, data=data, starts=tuple(map(start, steps)))
    (folder / "run.json").write_text(record.model_dump_json())
    return record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    assert read_run_record(tmp_path) != write_record(tmp_path, 0) == read_run_record(tmp_path)


@pytest.mark.parametrize(("steps_done", "kept"), [(0, []), (5, [0]), (6, [0, 5]), (20, [0, 5, 12])])
def test_a_start_that_went_back_takes_the_place_of_those_behind_it(
    tmp_path: Path, steps_done: int, kept: list[int]
) -> None:
    write_record(tmp_path, 0, 5, 12)
    assert [one.steps_done for one in earlier_starts(tmp_path, steps_done)] == kept


def test_a_broken_record_is_named_to_readers_and_no_obstacle_to_training(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{broken")
    with pytest.raises(DataError, match=r"run.json is not in the form that `evenpack train` writes \(the whole file\)"):
        read_run_record(tmp_path)
    assert earlier_starts(tmp_path, 5) == ()


def test_a_record_that_cannot_be_read_now_keeps_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path, 0, 5)

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RunError, match=r"run\.json cannot be read: Input/output error"):
        earlier_starts(tmp_path, 20)
    monkeypatch.undo()
    assert [one.steps_done for one in earlier_starts(tmp_path, 20)] == [0, 5]
