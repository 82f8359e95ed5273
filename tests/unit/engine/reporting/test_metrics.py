"""The metrics file survives kills and resumes; rates and times to go are computed from a clock that is handed in."""

import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpack.engine.reporting.metrics import (
    MetricsLog,
    ProgressLine,
    WindowRate,
    cut_back,
    format_duration,
    format_rate,
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

        with pytest.raises(RunError, match=r"cannot write to .*metrics\.jsonl"), opened():
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
    def test_a_log_that_was_removed_under_the_run_is_an_error_before_the_next_checkpoint(
        self, tmp_path: Path, what: str
    ):
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

    def test_a_run_without_a_checkpoint_starts_a_new_log_and_keeps_the_earlier_ones(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ):
        path = tmp_path / "metrics.jsonl"
        for last in (3, 5):
            write_steps(path, range(1, last + 1))
            MetricsLog.resume(path, step=0).close()
            assert path.read_bytes() == b""
        assert [read_metrics(tmp_path / f"metrics.kept_{n}.jsonl")[-1]["step"] for n in (1, 2)] == [3, 5]
        assert "there is no checkpoint" in caplog.messages[0]
        assert "tells of steps up to 5: it is kept as metrics.kept_2.jsonl" in caplog.messages[1]

    def test_a_new_run_has_nothing_to_keep(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        for text in (None, "", '{"step": 1, "torn'):
            if text is not None:
                (tmp_path / "metrics.jsonl").write_text(text)
            MetricsLog.resume(tmp_path / "metrics.jsonl", step=0).close()
            assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
            assert (tmp_path / "metrics.jsonl").read_bytes() == b""
        assert not caplog.records

    def test_steps_that_a_log_lacks_are_told_and_what_would_be_cut_away_is_kept(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ):
        path = tmp_path / "metrics.jsonl"
        write_steps(path, range(1, 4))
        write_steps(path, range(6, 13))
        before = path.read_bytes()
        MetricsLog.resume(path, step=10).close()
        (message,) = caplog.messages
        assert "does not tell of 2 of the 10 steps before the checkpoint, the first of them step 4" in message
        assert "kept as metrics.kept_1.jsonl" in message
        assert (tmp_path / "metrics.kept_1.jsonl").read_bytes() == before
        assert sorted({record["step"] for record in read_metrics(path)}) == [1, 2, 3, 6, 7, 8, 9, 10]
        MetricsLog.resume(path, step=10).close()  # nothing is cut away now, so nothing needs to be kept
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_log_that_is_gone_is_told_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        MetricsLog.resume(tmp_path / "metrics.jsonl", step=7).close()
        assert "does not tell of 7 of the 7 steps" in caplog.text

    def test_a_whole_log_is_resumed_without_a_word(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        write_steps(tmp_path / "metrics.jsonl", range(1, 9))
        MetricsLog.resume(tmp_path / "metrics.jsonl", step=5).close()
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
        assert not caplog.records

    def test_without_a_log_there_is_nothing_to_cut(self, tmp_path: Path):
        assert cut_back(tmp_path / "none.jsonl", step=3) == 0


def test_a_summary_is_valid_json_whatever_it_holds(tmp_path: Path):
    write_summary(tmp_path / "summary.json", {"loss": math.inf, "steps": 3, "name": "ä"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "steps": 3, "name": "ä"}


class TestWindowRate:
    def test_a_steady_flow_has_its_rate_at_once(self):
        rate = WindowRate(window_seconds=10.0)
        rate.add(100.0, 0)
        assert rate.per_second() is None
        rate.add(102.0, 50)
        assert rate.per_second() == 25.0

    def test_what_lies_before_the_window_is_forgotten(self):
        rate = WindowRate(window_seconds=10.0)
        for second in range(100):
            rate.add(float(second), second if second < 50 else 50 + 7 * (second - 50))
        assert rate.per_second() == 7.0

    def test_an_interval_longer_than_the_window_still_has_a_rate(self):
        rate = WindowRate(window_seconds=1.0)
        for index in range(5):
            rate.add(60.0 * index, 120 * index)
        assert rate.per_second() == 2.0

    @given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 1_000_000)), min_size=1, max_size=50))
    def test_it_lies_between_the_slowest_and_the_fastest_interval(self, intervals: list[tuple[float, int]]):
        rate = WindowRate(window_seconds=30.0)
        now, total = 0.0, 0
        rate.add(now, total)
        for seconds, amount in intervals:
            now, total = now + seconds, total + amount
            rate.add(now, total)
        found = rate.per_second()
        assert found is not None
        rates = [amount / seconds for seconds, amount in intervals]
        assert min(rates) * 0.999 - 0.001 <= found <= max(rates) * 1.001 + 0.001


class Clock:
    """A clock that stands until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(stream: io.StringIO, clock: Clock, *, step: int = 0, stop_step: int = 100) -> ProgressLine:
    return ProgressLine(stream, step=step, stop_step=stop_step, clock=clock)


class TestProgressLine:
    def test_a_log_file_gets_the_first_step_then_a_line_every_ten_seconds_then_the_last(self):
        stream, clock = io.StringIO(), Clock()
        line = progress(stream, clock)
        for step in range(1, 101):
            clock.now += 0.5
            line.update(step=step, loss=2.5, learning_rate=3e-4, tokens=1000)
        shown = [text.split()[1] for text in stream.getvalue().splitlines()]
        assert shown == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]

    def test_a_line_shows_step_loss_learning_rate_tokens_a_second_and_time_to_go(self):
        stream, clock = io.StringIO(), Clock()
        line = progress(stream, clock)
        clock.now += 2.0
        line.update(step=1, loss=2.51239, learning_rate=3e-4, tokens=90_600)
        assert stream.getvalue() == "step 1/100  loss 2.5124  lr 3.00e-04  45.3k tokens/s  3m18s to go\n"

    def test_a_terminal_line_is_written_over_and_ended_at_the_last_step(self):
        stream, clock = Terminal(), Clock()
        line = progress(stream, clock, stop_step=2)
        for step in (1, 2):
            clock.now += 1.0
            line.update(step=step, loss=2.5, learning_rate=3e-4, tokens=1000)
        text = stream.getvalue()
        assert text.count("\r") == text.count("\x1b[K") == 2
        assert text.count("\n") == 1
        assert text.endswith("\x1b[K\n")

    def test_a_narrow_terminal_does_not_wrap(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("COLUMNS", "30")
        stream, clock = Terminal(), Clock()
        line = progress(stream, clock)
        clock.now += 1.0
        line.update(step=1, loss=2.5, learning_rate=3e-4, tokens=1000)
        assert len(stream.getvalue().strip("\r").removesuffix("\x1b[K")) == 29

    def test_a_resumed_run_counts_only_its_own_steps(self):
        stream, clock = io.StringIO(), Clock()
        line = progress(stream, clock, step=90)
        clock.now += 3.0
        line.update(step=91, loss=2.5, learning_rate=3e-4, tokens=3000)
        assert "1.00k tokens/s  27s to go" in stream.getvalue()

    def test_time_in_evaluation_lowers_no_rate_but_counts_for_the_time_to_go(self):
        stream, clock = io.StringIO(), Clock()
        line = progress(stream, clock)
        for step in range(1, 11):
            clock.now += 1.0
            line.update(step=step, loss=2.5, learning_rate=3e-4, tokens=1000)
        with line.paused():
            clock.now += 10.0
        clock.now += 1.0
        line.update(step=11, loss=2.5, learning_rate=3e-4, tokens=1000)
        # 89 steps at one a second; 11 of the 21 seconds so far were steps: 89 x 21 / 11.
        assert "1.00k tokens/s  2m50s to go" in stream.getvalue().splitlines()[-1]

    def test_what_is_printed_in_a_pause_starts_on_a_line_of_its_own(self):
        stream, clock = Terminal(), Clock()
        line = progress(stream, clock)
        clock.now += 1.0
        line.update(step=1, loss=2.5, learning_rate=3e-4, tokens=1000)
        with line.paused():
            stream.write("validation loss 3.1\n")
        line.finish()
        assert "\x1b[K\nvalidation loss 3.1\n" in stream.getvalue()
        assert stream.getvalue().endswith("3.1\n")

    def test_a_clock_that_stands_still_breaks_nothing(self):
        stream = io.StringIO()
        progress(stream, Clock()).update(step=1, loss=math.nan, learning_rate=0.0, tokens=0)
        assert stream.getvalue() == "step 1/100  loss nan  lr 0.00e+00  - tokens/s  - to go\n"


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (None, "-"),
        (math.inf, "-"),
        (0.0, "0"),
        (812.4, "812"),
        (999.6, "1.00k"),
        (9_996.0, "10.0k"),
        (45_300.0, "45.3k"),
        (99_960.0, "100k"),
        (1_204_000.0, "1.20M"),
        (3.1e12, "3100G"),
    ],
)
def test_rates_have_three_digits_and_a_unit(per_second: float | None, text: str):
    assert format_rate(per_second) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599.7, "1h00m"),
        (11_100.0, "3h05m"),
        (187_300.0, "2d04h"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str):
    assert format_duration(seconds) == text
