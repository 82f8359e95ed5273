"""The end of a log for MLPerf, and what a run that resumes keeps of it."""

import json
import logging
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_steps import start_of, step_of

from evenpack.engine.evaluate import SourceEvaluation
from evenpack.engine.parts.mlperf_log import PREFIX, MlperfLog, mlperf_logger, parse_events, truncate_log


def event(key: str, samples: int | None = None) -> str:
    metadata = None if samples is None else {"samples_count": samples}
    return f"{PREFIX}{json.dumps({'key': key, 'value': None, 'time_ms': 1, 'metadata': metadata})}\n"


def test_a_run_that_resumes_keeps_the_events_up_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    before = ["init_start", "run_start"]
    at = ["block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    lines = [*(event(key) for key in before), event("block_start", 0), *(event(key, 20) for key in at)]
    ended = [event(key, 20) for key in ("train_samples", "eval_samples", "run_stop")]
    for later in ([], [event("block_start", 20)], [event("block_start", 20), event("block_stop", 30), *ended]):
        path.write_text("".join([*lines, *later]))
        is_open = truncate_log(path, samples=20)
        kept = [one["key"] for _, one in parse_events(path, path.read_text().splitlines())]
        assert kept == [*before, "block_start", *at, *["block_start"][: len(later)]]
        assert is_open == bool(later)


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
    events = {one["key"]: one for _, one in parse_events(path, path.read_text().splitlines())}
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
    keys = [event["key"] for _, event in parse_events(path, path.read_text().splitlines())]
    evaluation = ["eval_start", "eval_stop"]
    assert keys == ["block_stop", *evaluation, *evaluation, "block_start", "block_stop", *evaluation]
