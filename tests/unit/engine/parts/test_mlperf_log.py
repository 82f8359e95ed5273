"""The blocks of a log for MLPerf, and its end."""

import json
import logging
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_steps import start_of, step_of

from evenpack.engine.evaluate import SourceEvaluation
from evenpack.engine.parts.mlperf_log import MlperfLog, mlperf_logger


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.split(":::MLLOG ", 1)[1]) for line in path.read_text().splitlines()]


def test_the_clock_stops_with_the_last_step_and_not_with_the_verification_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlperf_logging")
    evaluation = SourceEvaluation(loss=1.0, accuracy=0.75, others={}, targets=8, sequences=7, packs=2)
    path = tmp_path / "mlperf.log"
    with closing(logging.FileHandler(path)) as file:
        log = MlperfLog(start_of(), started=0.0)
        log._logger = mlperf_logger(file)
        step = step_of(
            6,
            update=1,
            is_left_out=False,
            batches=SimpleNamespace(counts=SimpleNamespace(sequences=5)),
            evaluations={"text": evaluation},
            _samples_before=25,
            _training=SimpleNamespace(planned_steps=9, target_accuracy=0.7),
        )
        monkeypatch.setattr(time, "time", lambda: 1234.5678)
        for hook in (log.after_step, log.evaluating, log.evaluated):
            hook(step)
        monkeypatch.setattr(time, "time", lambda: 1300.0)
        log.saving(step)
    events = {one["key"]: one for one in _events(path)}
    assert events["run_stop"]["time_ms"] == 1_234_567
    assert events["run_stop"]["metadata"]["status"] == "success"
    assert (events["train_samples"]["value"], events["eval_samples"]["value"]) == (30, 7)


def test_a_block_whose_steps_are_all_skipped_has_neither_a_start_nor_an_end(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_logging")
    path = tmp_path / "mlperf.log"
    trained = {"update": 1, "batches": SimpleNamespace(counts=SimpleNamespace(sequences=5))}
    with closing(logging.FileHandler(path)) as file:
        log = MlperfLog(start_of(), started=0.0)
        log._logger = mlperf_logger(file)
        for number, values in ((4, trained), (8, {"update": None}), (12, trained)):
            step = step_of(number, is_left_out=False, evaluations=None, _samples_before=0, **values)
            for hook in (log.after_step, log.evaluating, log.evaluated):
                hook(step)
    keys = [event["key"] for event in _events(path)]
    evaluation = ["eval_start", "eval_stop"]
    assert keys == ["block_stop", *evaluation, *evaluation, "block_start", "block_stop", *evaluation]
