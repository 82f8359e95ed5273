"""Step logs in both formats, the steps that are cut, and errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import DataError
from evenpack.studies.imbalance.measurement import StepLog, read_step_log


def _steady(steps: int) -> list[float]:
    return np.random.default_rng(5).normal(380.0, 10.0, steps).round(3).tolist()


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def _mlperf_line(step: int, rate: object) -> str:
    return f"0: {{'training_steps': {6 * step}, 'step_loss': 4.2, 'seq/s': {rate}, 'global_steps': {step}}}"


def _logged(path: Path, rates: list[float]) -> Path:
    return _written(path / "rates.txt", [_mlperf_line(step, rate) for step, rate in enumerate(rates)])


def _accounted(log: StepLog) -> int:
    return len(log.rates) + sum(log.cuts.values())


def test_metrics_are_read_and_other_records_are_no_steps(tmp_path: Path) -> None:
    rates = _steady(80)
    lines = [
        json.dumps({"step": step, "sequences": 256, "step_seconds": 256 / rate, "tokens": 9})
        for step, rate in enumerate(rates, start=1)
    ]
    lines.insert(40, json.dumps({"step": 40, "validation": {"loss": 3.0}}))
    assert read_step_log(_written(tmp_path / "silent.jsonl", lines)).devices is None
    ranks = {"steps": 80, "compute_seconds": [1.0, 1.1, 1.2]}
    lines[50] = json.dumps(json.loads(lines[50]) | {"ranks": ranks})
    lines.append('{"step": 81, "sequ')
    log = read_step_log(_written(tmp_path / "metrics.jsonl", lines))
    assert "metrics.jsonl" in log.format
    assert log.steps_read == 80
    assert log.rates == pytest.approx(rates[10:])
    assert log.devices == 3


def test_mlperf_lines_are_read_with_any_prefix(tmp_path: Path) -> None:
    rates = _steady(80)
    event = ':::MLLOG {"key": "tracked_stats", "value": {"seq/s": 99.0}, "metadata": {"step": 7}}'
    noise = ["0: parsed args:", "0: {'global_steps': 335, 'eval_loss': 4.1}", event]
    tail = "0: {'e2e_time': 10718.2, 'training_sequences_per_second': 374.15, 'raw_train_time': 10701.7}"
    lines = [*noise, *(_mlperf_line(step, rate) for step, rate in enumerate(rates)), tail]
    log = read_step_log(_written(tmp_path / "result_0.txt", lines))
    assert "'seq/s'" in log.format
    assert log.rates == pytest.approx(rates[10:])
    assert any("1 :::MLLOG" in warning for warning in log.warnings)


def test_mlperf_events_alone_are_read_too(tmp_path: Path) -> None:
    rates = _steady(70)
    lines = [f':::MLLOG {{"key": "tracked_stats", "value": {{"seq/s": {rate}}}}}' for rate in rates]
    log = read_step_log(_written(tmp_path / "log", lines))
    assert log.rates == pytest.approx(rates[10:])
    assert log.warnings == ()


def test_lines_that_are_means_of_steps_are_refused(tmp_path: Path) -> None:
    single = [_mlperf_line(step, rate) for step, rate in enumerate(_steady(80))]
    assert read_step_log(_written(tmp_path / "single", single)).warnings == ()
    every_fourth = [_mlperf_line(4 * step, rate) for step, rate in enumerate(_steady(80))]
    with pytest.raises(DataError, match=r"mean of 4 steps \(log_freq above 1\).*no maximum.*log every step"):
        read_step_log(_written(tmp_path / "log", every_fourth))


def test_warm_up_ends_where_the_rate_comes_near_its_median(tmp_path: Path) -> None:
    climbing = np.linspace(100.0, 350.0, 30).tolist()
    log = read_step_log(_logged(tmp_path, climbing + _steady(200)))
    ((reason, steps),) = log.cuts.items()
    assert steps == 30
    assert "not yet come within a spread" in reason
    assert _accounted(log) == log.steps_read == 230


def test_dips_are_cut_and_said(tmp_path: Path) -> None:
    rates = _steady(200)
    rates[50] = 35.0
    rates[120:123] = [250.0, 200.0, 300.0]
    rates[150] = 900.0
    log = read_step_log(_logged(tmp_path, rates))
    (_, warm_up), (reason, dips) = log.cuts.items()
    assert (warm_up, dips) == (10, 4)
    assert "5 spreads" in reason
    assert 900.0 in log.rates
    assert log.rates.min() > 330.0
    assert _accounted(log) == log.steps_read == 200
    assert log.warnings == ()


def test_stragglers_of_a_law_are_no_dips(tmp_path: Path) -> None:
    gumbel = np.random.default_rng(0).gumbel(1.6, 0.13, 20_000)
    log = read_step_log(_logged(tmp_path, gumbel.tolist()))
    assert sum(log.cuts.values()) == 10


def test_many_dips_are_warned_of(tmp_path: Path) -> None:
    rates = _steady(400)
    rates[100:400:12] = [100.0] * 25
    (warning,) = read_step_log(_logged(tmp_path, rates)).warnings
    assert "25 of 400" in warning


def test_fewer_than_fifty_steady_steps_are_refused(tmp_path: Path) -> None:
    assert len(read_step_log(_logged(tmp_path, _steady(60))).rates) == 50
    with pytest.raises(DataError, match=r"rates.txt: 49 of 59 steps are left"):
        read_step_log(_logged(tmp_path, _steady(59)))


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "{'eval_loss': 3}\n"])
def test_a_log_without_a_usable_line_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"log.txt: no line with a rate.*log_freq"):
        read_step_log(path)


@pytest.mark.parametrize("bad", ["0.0", "nan", "fast"])
def test_rates_that_cannot_be_are_named_with_their_line(tmp_path: Path, bad: str) -> None:
    lines = [_mlperf_line(step, rate) for step, rate in enumerate(_steady(80))]
    lines[40] = _mlperf_line(40, bad)
    with pytest.raises(DataError, match=rf"log, line 41: 'seq/s' must be a finite number above 0, got '{bad}'"):
        read_step_log(_written(tmp_path / "log", lines))


@pytest.mark.parametrize(("field", "bad"), [("sequences", 0), ("step_seconds", None), ("step_seconds", -1.0)])
def test_metrics_that_cannot_be_are_named_with_their_line(tmp_path: Path, field: str, bad: object) -> None:
    records = [{"step": step, "sequences": 8, "step_seconds": 0.5} for step in range(80)]
    records[20] |= {field: bad}
    path = _written(tmp_path / "metrics.jsonl", [json.dumps(record) for record in records])
    with pytest.raises(DataError, match=rf"metrics.jsonl, line 21: {field} must be"):
        read_step_log(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing.* cannot be read: No such file"):
        read_step_log(tmp_path / "missing")
