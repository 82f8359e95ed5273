"""A report reads runs that are finished, in progress, or damaged."""

import json
import logging
import math
from pathlib import Path

import pytest
from written_runs import record, write_run

from evenpack.errors import ConfigError, DataError
from evenpack.studies.report import ReportedRun, compare, read_runs


def read(*folders: Path) -> tuple[ReportedRun, ...]:
    return read_runs(folders)


def test_a_course_adds_up_tokens_and_time(tmp_path: Path) -> None:
    (run,) = read(write_run(tmp_path / "one", steps=20))
    course = run.course
    assert (run.label, run.predicts_masked_tokens) == ("one", False)
    assert course.steps.tolist() == list(range(1, 21))
    assert (course.tokens[-1], course.slots[-1], course.seconds[-1]) == (2000, 2500, 40)
    places, losses = course.validation["wiki"]
    assert places.tolist() == [4, 9, 14, 19]
    assert losses == pytest.approx([5.5, 5.0, 4.5, 4.0])
    assert list(course.validation) == ["wiki"], "code holds nothing out"


def test_the_loss_of_masked_tokens_is_taken_without_next_sentences(tmp_path: Path) -> None:
    (run,) = read(write_run(tmp_path / "bert", token_loss=5.5, next_sentence_loss=1.0))
    assert run.predicts_masked_tokens
    assert set(run.course.loss.tolist()) == {5.5}


def test_a_skipped_step_counts_no_tokens_and_has_no_loss(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", steps=3)
    skipped = {"step": 4, "loss": None, "tokens": 0, "slots": 0, "skipped": {"packs": 2}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(skipped) + "\n" + json.dumps(record(5)) + "\n")
    (run,) = read(folder)
    assert run.course.tokens.tolist() == [100, 200, 300, 300, 400]
    assert math.isnan(run.course.loss[3])
    assert run.course.slots.tolist() == [125, 250, 375, 375, 500]


def test_a_broken_line_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_run(tmp_path / "one")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:5], "{broken\n", *lines[6:], '{"step": 21, "lo']))
    with caplog.at_level(logging.WARNING, logger="evenpack"):
        (run,) = read(folder)
    assert run.course.steps.tolist() == [step for step in range(1, 21) if step != 6]
    assert "metrics.jsonl, line 6 is not a record" in caplog.text


def test_a_fork_begins_after_its_parent(tmp_path: Path) -> None:
    settings = {"run": {"name": "fork", "parent": {"run": "runs/trunk", "step": 5}}}
    folder = write_run(tmp_path / "fork", config=settings)
    log = folder / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[5:]))
    (run,) = read(folder)
    assert compare([run]).notes == ("fork begins after step 5 of runs/trunk: so do its tokens and time.",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_loss", "x"),
        ("tokens", 10**400),
        ("step", 10**30),
        ("validation", [1]),
        ("validation", {"wiki": {"loss": "low"}}),
    ],
)
def test_a_log_with_a_value_of_another_type_is_named(tmp_path: Path, key: str, value: object) -> None:
    folder = write_run(tmp_path / "one")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[4] = json.dumps(record(5) | {key: value}) + "\n"
    (folder / "metrics.jsonl").write_text("".join(lines))
    with pytest.raises(DataError, match=r"a record in .*one/metrics\.jsonl is damaged \(.*mend or remove its line"):
        read(folder)


def test_a_value_may_be_null_or_of_a_name_that_is_no_metric(tmp_path: Path) -> None:
    """Versions before and after this one have other names."""
    folder = write_run(tmp_path / "one", later={"name": "x"}, loss=None, validation={"wiki": None}, checkpoint=None)
    (run,) = read(folder)
    assert len(run.course.steps) == 20


def test_runs_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / place / "out") for place in ("a", "b")]
    assert [run.label for run in read(*folders)] == ["a/out", "b/out"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    with pytest.raises(DataError, match=r"nothing holds no metrics.jsonl: give the output_dir of a run"):
        read(one, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is named twice: name each run once"):
        read(one, tmp_path / "other" / ".." / "one")
    empty = write_run(tmp_path / "empty", steps=0)
    with pytest.raises(DataError, match=r"no step yet in .*empty/metrics.jsonl: there is nothing to report"):
        read(empty)
    assert len(read(one, empty)[1].course.steps) == 0, "beside another it is only not drawn"
    (one / "run.json").write_text('{"config": {"run": {"name": "one"}}}')
    with pytest.raises(DataError, match=r"one/run.json is not in the form that `evenpack train` writes \(data\)"):
        read(one)
