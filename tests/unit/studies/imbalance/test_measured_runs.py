"""`study imbalance RUN.yaml`: what is taken from the run, and its steps beside those of a baseline run."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import evenpack
from logged_runs import CPU, log_run
from run_files import changed, write_run_file
from studied_runs import studied

from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.studies.imbalance import study as study_module
from evenpack.studies.imbalance.command import ImbalanceCommand
from evenpack.studies.imbalance.measurement import read_logged_run, read_step_log, require_comparable
from evenpack.studies.imbalance.simulation import Simulation
from evenpack.studies.imbalance.step_cost import SHIPPED
from evenpack.studies.imbalance.study import run_study
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.subject import find_subject

pytestmark = pytest.mark.usefixtures("simulated_once")


def test_step_ranks_and_model_are_those_of_the_run(packed: RunConfig) -> None:
    """Eight packs a step, four a micro-batch: two micro-batches on one rank, one on two."""
    log_run(packed, ranks=1)
    study = studied(packed, "deepspeed.zero_stage=1")
    options = study.simulation.options
    assert (options.packs, options.accumulation, options.zero_stage) == (4, 2, 1)
    assert options.batch == round(4 * study.simulation.packing_factor)
    assert "gpt2 tiny" in study.simulation.cost.origin
    log_run(packed, ranks=2)
    assert studied(packed).simulation.options.accumulation == 1


def test_an_option_takes_the_place_of_what_the_run_says(packed: RunConfig) -> None:
    log_run(packed, ranks=1)
    study = studied(packed, batch=3, accumulation=5, zero_stage=2, cost_model="gpt2_xl_estimate")
    options = study.simulation.options
    assert (options.batch, options.accumulation, options.zero_stage) == (3, 5, 2)
    assert study.simulation.packs_per_micro_batch == max(1, round(3 / study.simulation.packing_factor))
    assert study.simulation.cost.name == "gpt2_xl_estimate"
    assert studied(packed, packs=7).simulation.options.packs == 7


def test_the_ranks_of_a_run_are_simulated_unless_devices_are_named(
    packed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_run(packed, ranks=3)
    simulated, simulate = [], study_module.simulate

    def noted(*lengths: Any, **given: Any) -> Simulation:
        simulated.append(given["devices"])
        return simulate(*lengths, **given)

    monkeypatch.setattr(study_module, "simulate", noted)
    studied(packed, devices=None, accumulation=1)
    studied(packed, devices="1,4", accumulation=1)
    assert simulated == [(1, 2, 3, *(1 << power for power in range(2, 12))), (1, 4)]


def test_the_cost_model_of_the_run_is_used(packed: RunConfig) -> None:
    with_model = changed(packed, training={"cost_model": SHIPPED / "gpt2_xl_width_cpu.json"})
    cost = studied(with_model).simulation.cost
    assert (cost.name, cost.estimated) == ("gpt2_xl_width_cpu", False)


def test_a_run_that_has_not_trained_says_so(packed: RunConfig, padded: RunConfig) -> None:
    study = studied(packed)
    assert study.measured is None
    assert study.step is not None
    assert (study.step.ranks, study.step.accumulation, study.simulation.options.accumulation) == (None, None, 1)
    (note,) = study.notes
    assert f"there is no {packed.run.output_dir / 'metrics.jsonl'}; train it first" in note
    with pytest.raises(ConfigError, match="train it first"):
        studied(packed, baseline_run=log_run(padded))


def test_a_run_is_compared_with_its_baseline(packed: RunConfig, padded: RunConfig) -> None:
    """Equal jitter on both sides: twice as fast in every step."""
    log_run(packed, seconds=0.5)
    log_run(padded, seconds=1.0)
    path = write_run_file(padded.run.output_dir.with_suffix(".yaml"), padded.model_dump(mode="json"))
    for baseline in (padded.run.output_dir, path):
        measured = studied(packed, baseline_run=baseline).measured
        assert measured is not None
        assert measured.speed_up == pytest.approx(2.0)
        reach = measured.speed_up_interval
        assert reach is not None
        assert 1.97 < reach.low < 2.0 < reach.high < 2.03
        assert measured.run.wait_share == pytest.approx(0.1)
        assert measured.is_over_padding
        assert (measured.run.ranks, measured.run.device, measured.run.commit) == (2, CPU, "abc123")
    assert studied(packed, baseline_run=padded.run.output_dir).simulation.options.batch == 8  # of the baseline


def test_without_a_baseline_rates_and_waiting_are_shown(packed: RunConfig) -> None:
    log_run(packed)
    study = studied(packed)
    assert study.measured is not None
    assert study.measured.speed_up is None
    assert study.measured.run.sequences_per_second == pytest.approx(32.0, rel=0.01)
    assert any("its ranks are not independent draws" in note for note in study.notes)


def test_a_log_of_padded_steps_is_a_baseline(packed: RunConfig, tmp_path: Path) -> None:
    log_run(packed)
    (tmp_path / "padded.txt").write_text("'seq/s': 16\n" * 80)
    given = studied(packed, baseline_run=tmp_path / "padded.txt").measured
    assert given is not None
    assert given.is_over_padding
    assert given.speed_up == pytest.approx(2.0, rel=0.01)
    unknown, taken = given.warnings[-2:]
    assert "no run.json beside the log of padded.txt" in unknown
    assert "the layout of the baseline padded.txt is not recorded: its steps are TAKEN as padded" in taken


def test_the_devices_that_an_option_gives_to_a_log_are_compared_with_those_of_the_baseline(
    packed: RunConfig, padded: RunConfig, tmp_path: Path
) -> None:
    log = tmp_path / "packed.txt"
    log.write_text("'seq/s': 32\n" * 80)
    given: dict[str, Any] = {"log": [log], "baseline_run": log_run(padded, ranks=4)}
    measured = studied(packed, log_devices=4, **given).measured
    assert measured is not None
    assert measured.speed_up == pytest.approx(1.0, rel=0.01)
    with pytest.raises(ConfigError, match=r"packed.txt ran on 8 ranks .* and its baseline padded on 4"):
        studied(packed, **given)


def test_a_log_of_other_settings_or_over_other_data_is_left_out_by_name(packed: RunConfig, padded: RunConfig) -> None:
    log_run(packed)
    study = studied(packed, "training.packs_per_step=16")
    assert study.measured is None
    assert study.simulation.options.accumulation == 2  # on the ranks that it had
    (note,) = study.notes
    assert "other settings (there and here: training.packs_per_step 8 and 16)" in note
    with pytest.raises(ConfigError, match="other settings"):
        studied(packed, "training.packs_per_step=16", baseline_run=log_run(padded))

    record_file = packed.run.output_dir / "run.json"
    record = json.loads(record_file.read_text())
    record["data"]["fingerprint"] = "other"
    record_file.write_text(json.dumps(record))
    (note,) = studied(packed).notes
    assert "is of a run over other data than" in note


def test_a_baseline_on_other_devices_of_another_model_or_over_other_data_is_refused(
    packed: RunConfig, padded: RunConfig
) -> None:
    log_run(packed)
    with pytest.raises(ConfigError, match="packed ran on 2 ranks and its baseline padded on 4"):
        studied(packed, baseline_run=log_run(padded, ranks=4))
    with pytest.raises(ConfigError, match=r"was measured on CPU .* and its baseline padded on NVIDIA H100"):
        studied(packed, baseline_run=log_run(padded, device="NVIDIA H100"))
    deeper = changed(padded, model={"layers": 3})
    with pytest.raises(ConfigError, match=r"another model than packed .*model.layers .* and 3"):
        studied(packed, baseline_run=log_run(deeper))
    output_dir = log_run(padded)
    record = json.loads((output_dir / "run.json").read_text())
    record["data"] |= {"fingerprint": "other", "pack_length": 128}
    (output_dir / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"other data than packed .*pack_length 64 and 128"):
        studied(packed, baseline_run=output_dir)


def test_other_differences_of_a_baseline_are_warnings(packed: RunConfig, padded: RunConfig, tmp_path: Path) -> None:
    run = read_logged_run(log_run(packed) / "metrics.jsonl")
    same = log_run(padded) / "metrics.jsonl"
    assert require_comparable(run, read_logged_run(same), ranks=2) == []
    bare = tmp_path / "bare" / "metrics.jsonl"
    bare.parent.mkdir()
    bare.write_bytes(same.read_bytes())
    other = log_run(changed(padded, deepspeed={"zero_stage": 1}), commit="def456", sequences=32)
    settings, commit, step = require_comparable(run, read_logged_run(other / "metrics.jsonl"), ranks=2)
    assert "deepspeed.zero_stage 0 and 1" in settings
    assert "abc123 and def456" in commit
    assert "a step of packed holds 16 sequences on average and one of its baseline 32" in step
    (warning,) = require_comparable(run, read_logged_run(bare), ranks=2)
    assert "no run.json beside the log of metrics.jsonl" in warning


def test_a_key_newer_than_a_record_has_its_default_there(packed: RunConfig, padded: RunConfig) -> None:
    run, path = log_run(packed) / "metrics.jsonl", log_run(padded) / "run.json"
    record = json.loads(path.read_text())
    del record["config"]["model"]["dropout"], record["config"]["attention"]["backend"]
    path.write_text(json.dumps(record))
    baseline = read_logged_run(path.with_name("metrics.jsonl"))
    default = RunConfig.model_validate(record["config"]).model.dropout
    log_run(changed(packed, model={"dropout": default}))
    assert require_comparable(read_logged_run(run), baseline, ranks=2) == []
    log_run(changed(packed, model={"dropout": 0.5}))
    with pytest.raises(ConfigError, match=rf"model.dropout 0.5 and {default}"):
        require_comparable(read_logged_run(run), baseline, ranks=2)


def test_a_baseline_that_is_no_padding_is_not_drawn_as_one(packed: RunConfig, padded: RunConfig) -> None:
    log_run(packed)
    unpadded = changed(padded, training={"layout": "unpadded", "assignment": "arrival"})
    measured = studied(packed, baseline_run=log_run(unpadded, seconds=1.0)).measured
    assert measured is not None
    assert measured.speed_up == pytest.approx(2.0)
    assert not measured.is_over_padding
    assert any("the baseline is unpadded sequences, assigned by arrival" in one for one in measured.warnings)


def test_a_log_without_ranks_has_those_of_the_run(packed: RunConfig) -> None:
    path = log_run(packed, ranks=4) / "metrics.jsonl"
    rates = [{"step": step, "sequences": 16, "step_seconds": 0.5} for step in range(1, 81)]
    path.write_text("".join(json.dumps(rate) + "\n" for rate in rates))
    assert read_logged_run(path).ranks == 4
    (path.parent / "run.json").unlink()
    assert read_logged_run(path).ranks is None


def test_steps_on_other_ranks_are_cut(packed: RunConfig, tmp_path: Path) -> None:
    """A run that went on with another number of ranks: the rates of the two do not mix."""
    first = (log_run(packed, ranks=1, seconds=1.0) / "metrics.jsonl").read_text()
    second = (log_run(packed, ranks=2, seconds=0.5) / "metrics.jsonl").read_text()
    path = tmp_path / "both" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(first + second)
    log = read_step_log(path)
    assert log.devices == 2
    assert log.sequences_per_second == pytest.approx(32.0, rel=0.01)
    assert log.cuts == {"warm-up": 10, "other ranks: the last steps are of 2": 80}


def test_the_command_line_takes_a_run_and_its_baseline(packed: RunConfig, padded: RunConfig) -> None:
    log_run(packed)
    run_file = write_run_file(packed.run.output_dir.with_suffix(".yaml"), packed.model_dump(mode="json"))
    options = ("--baseline-run", log_run(padded, seconds=1.0), "--devices", "1,2", "--steps", "30")
    code, out, _ = evenpack("study", "imbalance", run_file, *options)
    assert code == 0
    assert "2.000 (95 %: " in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"baseline_run": Path("nowhere")}, "--baseline-run nowhere: there is no nowhere/metrics.jsonl"),
        ({"baseline_run": Path("nowhere.yaml")}, "nowhere.yaml"),
        ({"regime_steps": 500}, "--regime-steps is an option for a log"),
        ({"log_devices": 2}, "--log-devices is an option for a log"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_study(ImbalanceCommand(**given), lambda: find_subject("squad_1_1_384", [], SubjectOptions()))
