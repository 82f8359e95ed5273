"""Fine-tunings follow the runs of a study: their number, their start, and errors in advance."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from finetuning_tasks import write_sentences
from run_files import pair_run_values, run_values, write_run_file
from study_files import FakeMachine, end_jobs, write_study

from evenpack.config import load_run_file
from evenpack.data.checksums import checksum_of_json
from evenpack.errors import ConfigError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import FinetuneRun, Job, StudyRun, expand, expand_finetunings, require_tasks
from evenpack.studies.runs.runner import RESULT, EndedRun, describe_state
from evenpack.studies.runs.study_file import load_study

PAIRS = [f"second/{arm}/seed_{seed}" for seed in (1, 2) for arm in ("unpacked", "packed")]


def write_tuned_study(folder: Path, **finetune: Any) -> Path:
    """Writes a study over a BERT whose runs are fine-tuned for SST-2 with two seeds."""
    (folder / "tuning.yaml").write_text(
        "run: {name: sst2, output_dir: elsewhere}\n"
        "data: {task: sst2, max_sequence_length: 48}\n"
        "training: {sequences_per_step: 8}\n"
    )
    section = {"base": "tuning.yaml", "folder": str(write_sentences(folder / "SST-2", training=4, evaluation=4))}
    path = write_study(folder, finetune={"feeling": {**section, "seeds": [5, 6], **finetune}})
    write_run_file(folder / "base.yaml", pair_run_values("bert", folder, data={"prepared_dir": None}))
    return path


def finetunings_of(path: Path, *overrides: str) -> tuple[FinetuneRun, ...]:
    study, run_overrides = load_study(path, EquivalenceConfig, overrides)
    return expand_finetunings(study.finetune, last_phase(expand(study, run_overrides)))


def last_phase(runs: Sequence[StudyRun]) -> list[StudyRun]:
    return [run for run in runs if run.phase == "second"]


def train(path: Path, machine: FakeMachine) -> dict[str, EndedRun]:
    """Runs and what follows them, as a study does both."""
    study, run_overrides = load_study(path, EquivalenceConfig, ())
    runs = expand(study, run_overrides)
    finetunings = expand_finetunings(study.finetune, last_phase(runs))
    ended = end_jobs(runs, machine)
    return ended | end_jobs(finetunings, machine, earlier=tuple(ended.values()))


def test_every_run_of_the_last_phase_is_fine_tuned_in_its_own_folder(tmp_path: Path) -> None:
    found = finetunings_of(write_tuned_study(tmp_path, settings={"training.epochs": 7}))
    assert [one.key for one in found] == [f"{key}/finetune/feeling" for key in PAIRS]
    one = found[0]
    assert isinstance(one, Job)
    assert isinstance(one.pretraining, Job)
    assert one.output_dir == tmp_path / "study" / one.key
    assert one.config.training.initialize_from == one.pretraining.output_dir
    assert one.config.training.epochs == 7
    assert one.config.run.seeds == (5, 6)
    assert one.config.data.task_folder == tmp_path / "SST-2"
    assert load_run_file(one.run_file, FinetuneConfig, one.overrides) == one.config


def test_overrides_for_the_runs_leave_fine_tuning_alone_and_it_can_be_left_out(tmp_path: Path) -> None:
    path = write_tuned_study(tmp_path)
    assert [one.config.training.epochs for one in finetunings_of(path, "training.steps=9")] == [3] * 4
    assert finetunings_of(path, "finetune={}") == ()
    assert finetunings_of(path, "finetune.feeling.seeds=[1]")[0].config.run.seeds == (1,)


def test_fine_tuning_follows_its_run_and_is_not_repeated(tmp_path: Path) -> None:
    path, machine = write_tuned_study(tmp_path), FakeMachine(place_count=2)
    ended = train(path, machine)
    assert {one.state for one in ended.values()} == {"finished"}
    assert [call.command for call in machine.calls] == ["prepare", *["train"] * 5, *["finetune"] * 4]
    assert [call.run for call in machine.calls[6:]] == [f"{key}/finetune/feeling" for key in PAIRS]
    assert [call.at_once for call in machine.calls[6:]] == [1, 2, 1, 2]
    again = FakeMachine()
    assert {one.state for one in train(path, again).values()} == {"finished"}
    assert again.calls == []
    assert [describe_state(one) for one in finetunings_of(path)] == ["finished"] * 4


def test_fine_tuning_of_a_run_that_failed_fails_with_it_and_the_others_continue(tmp_path: Path) -> None:
    codes = {PAIRS[1]: 1, f"{PAIRS[2]}/finetune/feeling": 2}
    ended = train(write_tuned_study(tmp_path), FakeMachine(codes=codes))
    assert [ended[f"{key}/finetune/feeling"].state for key in PAIRS] == ["finished", "failed", "failed", "finished"]
    messages = [ended[f"{key}/finetune/feeling"].message for key in PAIRS[1:3]]
    assert messages[0] == f"run {PAIRS[1]}, with whose weights it begins, has failed"
    assert messages[1].startswith("there is no such\nthing")


def test_a_study_that_is_stopped_resumes_with_the_fine_tunings_that_are_left(tmp_path: Path) -> None:
    path = write_tuned_study(tmp_path)
    stopped = train(path, FakeMachine(stops_after=3))
    assert {ended.state for key, ended in stopped.items() if "finetune" in key} == {"unfinished"}
    stopped = train(path, FakeMachine(stops_after=5, codes={f"{PAIRS[1]}/finetune/feeling": -15}))
    assert [stopped[f"{key}/finetune/feeling"].state for key in PAIRS] == ["finished", *["unfinished"] * 3]
    assert stopped[f"{PAIRS[1]}/finetune/feeling"].message == "stopped at seed 0"
    machine = FakeMachine()
    assert {one.state for one in train(path, machine).values()} == {"finished"}
    assert [call.run for call in machine.calls] == [f"{key}/finetune/feeling" for key in PAIRS[1:]]


def test_a_fine_tuning_finished_with_other_settings_is_refused_but_files_may_move(tmp_path: Path) -> None:
    path = write_tuned_study(tmp_path)
    train(path, FakeMachine())
    moved = finetunings_of(path, f"finetune.feeling.folder={tmp_path}/elsewhere")
    assert [describe_state(one) for one in moved] == ["finished"] * 4
    result = moved[0].output_dir / RESULT
    values = json.loads(result.read_text())
    del values["config"]["training"]["dropout"]
    content = {key: value for key, value in values.items() if key != "checksum"}
    result.write_text(json.dumps(content | {"checksum": checksum_of_json(content)}))
    assert describe_state(moved[0]) == "finished", "a key that is newer than the result"
    with pytest.raises(ConfigError, match=r"finetune/feeling was trained with training\.epochs 3, and .* now has 4"):
        describe_state(finetunings_of(path, "finetune.feeling.settings={training.epochs: 4}")[0])


@pytest.mark.parametrize("change", [("finished", "finishe`"), ("epochs", "epochr")])
def test_a_result_in_which_one_bit_has_changed_is_none(tmp_path: Path, change: tuple[str, str]) -> None:
    """The command is given again then, and finds what it has done."""
    path = write_tuned_study(tmp_path)
    train(path, FakeMachine())
    (first, *others) = finetunings_of(path)
    result = first.output_dir / RESULT
    result.write_text(result.read_text().replace(*change, 1))
    assert describe_state(first) != "finished"
    assert [describe_state(one) for one in others] == ["finished"] * 3
    assert {one.state for one in train(path, FakeMachine()).values()} == {"finished"}


@pytest.mark.parametrize("key", ["run.seeds", "training.initialize_from"])
def test_what_a_study_gives_each_fine_tuning_itself_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"finetune\.feeling\.settings: {key} is set by the study itself"):
        finetunings_of(write_tuned_study(tmp_path, settings={key: 1}))


def test_what_fine_tuning_would_miss_is_named_before_the_first_run(tmp_path: Path) -> None:
    path = write_tuned_study(tmp_path)
    require_tasks(finetunings_of(path))
    with pytest.raises(ConfigError, match=r"data.max_sequence_length is 64, and run .*seed_1 trains 48 positions"):
        require_tasks(finetunings_of(path, "finetune.feeling.settings={data.max_sequence_length: 64}"))
    (tmp_path / "SST-2" / "dev.tsv").unlink()
    with pytest.raises(ConfigError, match=r"has no dev\.tsv, a file of SST-2: give finetune\.feeling\.folder=FOLDER"):
        require_tasks(finetunings_of(path))
    write_sentences(tmp_path / "SST-2", training=4, evaluation=4)
    write_run_file(tmp_path / "base.yaml", run_values("gpt2", tmp_path, data={"prepared_dir": None}))
    with pytest.raises(ConfigError, match="of family 'gpt2', whose tokens see only earlier tokens"):
        require_tasks(finetunings_of(path))
