"""The metrics file survives kills and resumes."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from evenpack.console import save_json
from evenpack.engine.reporting.metrics import MetricsLog, read_metrics
from evenpack.errors import RunError


def write_steps(path: Path, steps: range) -> None:
    with MetricsLog(path) as log:
        for step in steps:
            log.append({"step": step, "loss": 1.0 / step})
            if step % 2 == 0:
                log.append({"step": step, "validation": {"wiki": {"loss": 2.0}}})


def truncate_log(path: Path, *, step: int) -> int:
    """Resumes a log after a step; returns the number of lines that it has lost."""
    before = path.read_bytes() if path.exists() else b""
    MetricsLog.resume(path, step=step).close()
    return len(before.splitlines()) - len(path.read_bytes().splitlines())


class TestMetricsLog:
    def test_a_line_can_be_read_by_others_as_soon_as_it_is_appended(self, tmp_path: Path):
        with MetricsLog(tmp_path / "run" / "metrics.jsonl") as log:
            log.append({"step": 1, "loss": 0.5})
            assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
            with pytest.raises(ValueError, match="integer 'step'"):
                log.append({"loss": 1.0})

    def test_a_loss_that_is_not_finite_stays_valid_json(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        with MetricsLog(path) as log:
            log.append({"step": 1, "loss": math.nan, "validation": {"wiki": [math.inf, 1.0]}})
        assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
            "step": 1,
            "loss": None,
            "validation": {"wiki": [None, 1.0]},
        }

    def test_a_full_disk_is_named_once_and_closing_does_not_hide_it(self):
        with pytest.raises(RunError, match=r"/dev/full.*No space left"), MetricsLog(Path("/dev/full")) as log:
            log.append({"step": 1})

    def test_what_a_disk_says_only_at_the_end_is_an_error_too_but_hides_no_other(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"

        def opened() -> MetricsLog:
            log = MetricsLog(path)
            descriptors = {int(link.name): link.readlink() for link in Path("/dev/fd/").iterdir() if link.is_file()}
            os.close(next(number for number, target in descriptors.items() if target == path))  # now closing fails
            return log

        with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: "), opened():
            pass
        with pytest.raises(ZeroDivisionError), opened():
            raise ZeroDivisionError

    def test_a_commit_puts_every_line_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = tmp_path / "metrics.jsonl"
        flushed: list[bytes] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(Path(f"/dev/fd/{descriptor}").read_bytes()))
        with MetricsLog(path) as log:
            log.append({"step": 1})
            assert flushed == []
            log.commit()
        assert flushed == [b'{"step": 1}\n']

    @pytest.mark.parametrize("what", ["the file", "the folder", "the file, replaced"])
    def test_a_log_removed_during_the_run_is_an_error_before_the_next_checkpoint(self, tmp_path: Path, what: str):
        path = tmp_path / "run" / "metrics.jsonl"
        with MetricsLog(path) as log:
            log.append({"step": 1})
            log.commit()
            if what == "the folder":
                shutil.rmtree(path.parent)
            else:
                path.unlink()
            if what == "the file, replaced":
                path.write_text("")
            with pytest.raises(RunError, match=r"metrics\.jsonl was removed or replaced while the run was writing it"):
                log.commit()


class TestCutBack:
    def test_only_records_up_to_the_step_remain_validation_included(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 7))
        assert truncate_log(path, step=4) == 3
        found = [(record["step"], "validation" in record) for record in read_metrics(path)]
        assert found == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]

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
            assert truncate_log(path, step=3) == 1
            assert path.read_bytes() == whole[:start_of_last]

    def test_an_unreadable_line_in_between_goes_with_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2, "lo\n[3]\n{"loss": 1}\n{"step": 4}\n')
        assert truncate_log(path, step=9) == 3
        assert path.read_text() == '{"step": 1}\n{"step": 4}\n'
        assert "line 2" in caplog.text

    def test_what_an_earlier_start_still_writes_goes_into_a_file_that_does_not_count(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 4))
        before = path.read_bytes()
        with MetricsLog(path) as stale:
            assert truncate_log(path, step=3) == 0
            stale.append({"step": 4})
            with pytest.raises(RunError, match="removed or replaced"):
                stale.commit()
        assert path.read_bytes() == before

    def test_a_kill_while_cutting_leaves_the_log_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 7))
        before = path.read_bytes()

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            truncate_log(path, step=2)
        assert path.read_bytes() == before

    def test_a_run_without_a_checkpoint_starts_a_new_log_and_keeps_the_earlier_ones(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ):
        path = tmp_path / "metrics.jsonl"
        for last in (3, 5):
            write_steps(path, range(1, last + 1))
            MetricsLog.resume(path, step=0).close()
            assert path.read_bytes() == b""
        assert [read_metrics(tmp_path / f"metrics.kept_{n}.jsonl")[-1]["step"] for n in (1, 2)] == [3, 5]
        assert "begins after step 0" in caplog.messages[0]
        assert "is kept as metrics.kept_2.jsonl" in caplog.messages[1]

    def test_a_new_run_has_nothing_to_keep(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        for text in (None, "", '{"step": 1, "torn'):
            if text is not None:
                (tmp_path / "metrics.jsonl").write_text(text)
            MetricsLog.resume(tmp_path / "metrics.jsonl", step=0).close()
            assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
            assert (tmp_path / "metrics.jsonl").read_bytes() == b""
        assert not caplog.records

    @pytest.mark.parametrize(
        ("written", "step", "lacking"),
        [([range(1, 4), range(6, 13)], 10, 2), ([], 7, 7), ([range(1, 9)], 5, None)],
        ids=["a gap", "gone", "whole"],
    )
    def test_steps_that_a_log_lacks_are_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, written: list[range], step: int, lacking: int | None
    ):
        path = tmp_path / "metrics.jsonl"
        for steps in written:
            write_steps(path, steps)
        MetricsLog.resume(path, step=step).close()
        assert [names.name for names in tmp_path.iterdir()] == ["metrics.jsonl"]
        expected = [one for steps in written for one in steps if one <= step]
        assert sorted({record["step"] for record in read_metrics(path)}) == expected
        assert len(caplog.records) == (lacking is not None)
        assert lacking is None or f"lacks {lacking} steps" in caplog.text


def test_a_summary_is_valid_json_whatever_it_holds(tmp_path: Path):
    save_json({"loss": math.inf, "steps": 3, "name": "ä"}, tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "steps": 3, "name": "ä"}
