"""Runs are trained once, in order; what fails or is stopped is told apart, and the rest goes on."""

import json
import logging
from pathlib import Path

import pytest
from study_files import FakeMachine, end_jobs, write_study

from evenpack.errors import EXIT_STOPPED, ConfigError
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import expand, steps_done
from evenpack.studies.runs.runner import EndedRun, describe_state, recorded
from evenpack.studies.runs.study_file import load_study

FIRST = "first/unpacked/seed_7"
ALL = [FIRST, *(f"second/{arm}/seed_{seed}" for seed in (1, 2) for arm in ("unpacked", "packed"))]


def train(path: Path, machine: FakeMachine, *overrides: str) -> dict[str, EndedRun]:
    study, run_overrides = load_study(path, EquivalenceConfig, overrides)
    return end_jobs(expand(study, run_overrides), machine)


def states(ended: dict[str, EndedRun]) -> list[str]:
    return [one.state for one in ended.values()]


def test_data_are_prepared_once_and_runs_trained_in_order(tmp_path: Path) -> None:
    machine = FakeMachine()
    assert states(train(write_study(tmp_path), machine)) == ["finished"] * 5
    assert [call.command for call in machine.calls] == ["prepare", *["train"] * 5]
    assert [call.run for call in machine.calls[1:]] == ALL
    assert {call.at_once for call in machine.calls} == {1}


def test_places_are_used_at_once_but_no_run_begins_before_its_start_has_finished(tmp_path: Path) -> None:
    machine = FakeMachine(place_count=3)
    assert states(train(write_study(tmp_path), machine)) == ["finished"] * 5
    assert [call.at_once for call in machine.calls] == [1, 1, 1, 2, 3, 1]


def test_a_finished_study_starts_nothing(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    train(path, FakeMachine())
    machine = FakeMachine()
    assert states(train(path, machine)) == ["finished"] * 5
    assert machine.calls == []


def test_a_stopped_study_resumes_with_what_is_left(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    stopped = FakeMachine(stops_after=4, codes={"second/packed/seed_1": EXIT_STOPPED})
    assert states(train(path, stopped)) == ["finished"] * 2 + ["unfinished"] * 3
    machine = FakeMachine()
    assert states(train(path, machine)) == ["finished"] * 5
    assert [call.run for call in machine.calls] == ALL[2:]


def test_a_run_that_fails_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    failed = train(path, FakeMachine(codes={"second/unpacked/seed_1": 1}))
    assert states(failed) == ["finished", "failed", "finished", "finished", "finished"]
    message = failed["second/unpacked/seed_1"].message
    assert message.startswith("there is no such\nthing (all of it in ")
    study, _ = load_study(path, EquivalenceConfig, ())
    assert [one.message for one in recorded(expand(study))] == [one.message for one in failed.values()]
    machine = FakeMachine()
    assert states(train(path, machine)) == ["finished"] * 5
    assert [call.run for call in machine.calls] == ["second/unpacked/seed_1"]


def test_runs_whose_start_has_failed_fail_with_it(tmp_path: Path) -> None:
    machine = FakeMachine(codes={FIRST: 2})
    ended = train(write_study(tmp_path), machine)
    assert states(ended) == ["failed"] * 5
    assert ended[ALL[1]].message == f"run {FIRST}, with whose weights it begins, has failed"
    assert [call.command for call in machine.calls] == ["prepare", "train"]


def test_data_that_cannot_be_prepared_fail_their_runs(tmp_path: Path) -> None:
    machine = FakeMachine(codes={"prepare": 2})
    ended = train(write_study(tmp_path), machine)
    assert states(ended) == ["failed"] * 5
    assert ended[FIRST].message.startswith("its data could not be prepared: there is no such\nthing")
    assert [call.command for call in machine.calls] == ["prepare"]


def test_a_run_finished_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    train(path, FakeMachine())
    with pytest.raises(ConfigError, match=r"seed_7 was trained with training\.steps 6, and .* now has 3"):
        train(path, FakeMachine(), "phases.first.settings={training.steps: 3}")


def test_a_study_that_was_moved_has_still_finished(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    train(path, FakeMachine())
    (tmp_path / "study").rename(tmp_path / "elsewhere")
    machine = FakeMachine()
    assert states(train(path, machine, f"study.output_dir={tmp_path}/elsewhere")) == ["finished"] * 5
    assert machine.calls == []


def test_a_study_whose_corpus_is_another_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    train(study, FakeMachine(), "data.sources={text: {kind: jsonl, path: wiki.jsonl}}")
    with pytest.raises(ConfigError, match=r"was trained with data\.sources\.text\.path wiki\.jsonl, and"):
        train(study, FakeMachine(), "data.sources={text: {kind: jsonl, path: elsewhere/wiki.jsonl}}")


def test_the_state_of_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    study, _ = load_study(path, EquivalenceConfig, ())
    run = expand(study)[0]
    assert describe_state(run) == "to do"
    run.output_dir.mkdir(parents=True)
    log = run.output_dir / "metrics.jsonl"
    lines = [json.dumps({"step": step, "filler": "x" * 6000}) for step in (1, 2, 3)]
    log.write_text("\n".join([*lines, '{"step": 4']))
    assert steps_done(run.output_dir) == 3, "a torn line tells of no step"
    assert describe_state(run) == "step 3"


def test_a_result_that_cannot_be_read_is_named_and_the_run_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_study(tmp_path)
    train(path, FakeMachine())
    results = [tmp_path / "study" / key / "result.json" for key in ALL[:3]]
    older = json.loads(results[0].read_text())
    del older["checksum"]
    results[0].write_text(json.dumps(older))
    results[1].write_text(results[1].read_text().replace('"seed": 1', '"seed": 9'))
    results[2].write_text("{")
    study, _ = load_study(path, EquivalenceConfig, ())
    with caplog.at_level(logging.WARNING, logger="evenpack"):
        found = recorded(expand(study))
    assert [one.state for one in found] == ["unfinished"] * 3 + ["finished"] * 2
    assert [message.partition(" is damaged")[0] for message in caplog.messages] == list(map(str, results))
    machine = FakeMachine()
    assert states(train(path, machine)) == ["finished"] * 5
    assert [call.run for call in machine.calls] == ALL[:3]
