"""The metrics file survives kills and resumes."""

import json
import math
from pathlib import Path

import pytest

from evenpack.engine.reporting.metrics import (
    MetricsLog,
    cut_back,
    read_metrics,
    write_summary,
)
from evenpack.errors import RunError


def write_steps(path: Path, steps: range) -> None:
    with MetricsLog(path) as log:
        for step in steps:
            log.append({"step": step, "loss": 1.0 / step})
            if step % 2 == 0:
                log.append({"step": step, "validation": {"wiki": {"loss": 2.0}}})


class TestMetricsLog:
    def test_a_line_can_be_read_by_others_as_soon_as_it_is_appended(self, tmp_path: Path):
        log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
        log.append({"step": 1, "loss": 0.5})
        assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
        log.close()

    def test_a_loss_that_is_not_finite_stays_valid_json(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        with MetricsLog(path) as log:
            log.append({"step": 1, "loss": math.nan, "validation": {"wiki": [math.inf, 1.0]}})
        assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
            "step": 1,
            "loss": None,
            "validation": {"wiki": [None, 1.0]},
        }

    def test_a_64_bit_hash_keeps_every_bit(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        with MetricsLog(path) as log:
            log.append({"step": 1, "order_hash": 2**64 - 1})
        assert read_metrics(path)[0]["order_hash"] == 2**64 - 1

    def test_a_record_without_a_step_is_refused(self, tmp_path: Path):
        with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(ValueError, match="integer 'step'"):
            log.append({"loss": 1.0})

    def test_a_full_disk_is_named(self):
        log = MetricsLog(Path("/dev/full"))
        with pytest.raises(RunError, match=r"/dev/full.*No space left"):
            log.append({"step": 1})
        with pytest.raises(OSError, match="No space left"):
            log.close()


class TestCutBack:
    def test_only_records_up_to_the_step_remain_validation_included(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 7))
        assert cut_back(path, step=4) == 3
        assert [(record["step"], "validation" in record) for record in read_metrics(path)] == [
            (1, False),
            (2, False),
            (2, True),
            (3, False),
            (4, False),
            (4, True),
        ]

    def test_a_log_cut_back_and_continued_equals_one_never_interrupted(self, tmp_path: Path):
        write_steps(tmp_path / "whole.jsonl", range(1, 9))
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 7))
        MetricsLog.resume(path, step=3).close()
        write_steps(path, range(4, 9))
        assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    def test_wherever_a_kill_tears_the_last_line_it_goes(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 4))
        whole = path.read_bytes()
        start_of_last = whole[:-1].rindex(b"\n") + 1
        for end in range(start_of_last + 1, len(whole)):
            path.write_bytes(whole[:end])
            assert [record["step"] for record in read_metrics(path)] == [1, 2, 2]
            assert cut_back(path, step=3) == 1
            assert path.read_bytes() == whole[:start_of_last]

    def test_an_unreadable_line_in_between_goes_with_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2, "lo\n[3]\n{"loss": 1}\n{"step": 4}\n')
        assert cut_back(path, step=9) == 3
        assert path.read_text() == '{"step": 1}\n{"step": 4}\n'
        assert "line 2" in caplog.text

    def test_nothing_to_cut_leaves_the_file_untouched(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 4))
        before = path.stat()
        assert cut_back(path, step=3) == 0
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def test_a_kill_while_cutting_leaves_the_log_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 7))
        before = path.read_bytes()

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            cut_back(path, step=2)
        assert path.read_bytes() == before

    def test_a_run_without_a_checkpoint_starts_its_log_anew(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 4))
        MetricsLog.resume(path, step=0).close()
        assert path.read_bytes() == b""
        assert cut_back(tmp_path / "none.jsonl", step=3) == 0


def test_a_summary_is_valid_json_whatever_it_holds(tmp_path: Path):
    write_summary(tmp_path / "summary.json", {"loss": math.inf, "steps": 3, "name": "ä"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "steps": 3, "name": "ä"}
