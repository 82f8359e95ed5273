"""Which rank a run without progress waits for, from heartbeats at times that the test sets."""

import ctypes
import faulthandler
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rank_places import place_of
from run_files import run_config, run_values

from evenpack.engine.activity import START, Activity, Doing
from evenpack.launcher.processes.hangs import Hang, HangLimits, HangMonitor, Heartbeat, beat_seconds
from evenpack.launcher.processes.ranks import RankFolder, RankStatus

CLUSTER_LIMITS = HangLimits(step_seconds=1e6, start_seconds=1e6)
"""Of a run that is not ended; ranks of it write every two seconds."""


def folder_of(tmp_path: Path) -> RankFolder:
    folder = RankFolder(tmp_path, "now")
    folder.path.mkdir(exist_ok=True)
    return folder


def starting(rank: int, ranks: int = 1) -> RankStatus:
    return RankStatus.starting("now", place_of(rank, ranks=ranks, each=ranks))


class Cluster:
    """Ranks in step 7 that write every two seconds, and are read as often."""

    def __init__(self, tmp_path: Path, size: int) -> None:
        tmp_path.mkdir(exist_ok=True)
        self.folder = folder_of(tmp_path)
        self.doings = [Doing() for _ in range(size)]
        self.now = 0.0
        self.ranks = {}
        for rank, doing in enumerate(self.doings):
            doing.end_black_box(START)
            doing.enter("summing over the ranks", 7)
            status = starting(rank, size)
            self.folder.write_status(status)
            self.ranks[rank] = self.heart(status, doing)
        self.monitor = HangMonitor(self.folder, size, limits=CLUSTER_LIMITS, clock=lambda: self.now)

    def heart(self, status: RankStatus, doing: Doing) -> Heartbeat:
        return Heartbeat(self.folder, status, limits=CLUSTER_LIMITS, doing=doing, clock=lambda: self.now)

    def go_on(self, seconds: int, *, silent: tuple[int, ...] = (), moving: tuple[int, ...] = ()) -> None:
        """Lets time pass in looks of two seconds; `silent` ranks do not write, `moving` ranks make progress."""
        for _ in range(0, seconds, 2):
            self.now += 2.0
            for rank, heartbeat in self.ranks.items():
                if rank in moving:
                    self.doings[rank].tick()
                if rank not in silent:
                    heartbeat.keep_up()
            self.monitor.check()

    def be(self, rank: int, activity: Activity, *, step: int = 7, black_box: str | None = None) -> None:
        self.doings[rank].enter(activity, step)
        self.doings[rank]._black_boxes = [black_box] if black_box else []

    def take_away(self, rank: int) -> None:
        """Makes a rank one that has never started."""
        del self.ranks[rank]
        self.folder.status_file(rank).unlink()

    def hang(self) -> Hang:
        found = self.monitor.hang(self.now)
        assert found is not None
        return found


@pytest.fixture(autouse=True)
def no_stacks() -> Iterator[None]:
    yield
    faulthandler.cancel_dump_traceback_later()


def test_a_rank_whose_heartbeat_has_stopped_is_to_blame(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4)
    cluster.go_on(6)
    cluster.be(3, "computing gradients")  # behind the others, but only because it is on the way
    cluster.go_on(30, silent=(2,))
    hang = cluster.hang()
    assert (hang.rank, hang.host) == (2, socket.gethostname())
    assert hang.seconds == 28.0, "since rank 3 was last seen to begin something"
    assert hang.message.startswith("step 7, summing over the ranks; it does not answer: process ")


def test_a_machine_of_which_no_rank_answers_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4)
    for rank in (2, 3):
        cluster.ranks[rank].status = replace(cluster.ranks[rank].status, host="node2")
    cluster.go_on(6)
    cluster.go_on(30, silent=(2, 3))
    assert (cluster.hang().rank, cluster.hang().host) == (2, "node2")
    assert "none of the ranks 2 to 3 of its machine answers: the machine is down or not" in cluster.hang().message


def test_the_rank_that_is_behind_is_to_blame_if_all_answer(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3)
    cluster.be(0, "waiting for a batch", step=8)
    cluster.be(1, "evaluating")
    cluster.go_on(10)
    assert (cluster.hang().rank, cluster.hang().message) == (
        2,
        "step 7, summing over the ranks; 2 of 3 ranks are further and wait for it",
    )


def test_the_limit_of_the_start_holds_while_any_rank_is_in_a_black_box_or_has_not_started(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "1", 3)
    cluster.be(1, "computing gradients", black_box="compiling")
    cluster.go_on(10)
    assert cluster.hang().in_black_box
    assert cluster.hang().message.startswith("step 7, computing gradients (compiling); 2 of 3 ranks are further")
    cluster.be(0, "computing gradients")
    cluster.go_on(2)
    assert cluster.hang().rank == 1, "of two in one place it is the one that compiles"
    cluster.be(1, "computing gradients")
    cluster.go_on(10)
    assert not cluster.hang().in_black_box
    absent = Cluster(tmp_path / "2", 3)
    absent.take_away(1)
    absent.go_on(10)
    assert absent.hang().in_black_box


@pytest.mark.parametrize(("black_box", "steps_behind", "limit_of_the_start"), [
    (START, 0, False),
    (START, 7, False),
    ("compiling", 0, True),
    ("compiling", 1, True),
    ("compiling", 2, False),
])  # fmt: skip
def test_a_black_box_that_a_silent_rank_must_have_left_does_not_count(
    tmp_path: Path, black_box: str, steps_behind: int, limit_of_the_start: bool
) -> None:
    """Its heartbeat is from up to two seconds before it stopped."""
    cluster = Cluster(tmp_path, 3)
    cluster.be(1, "computing gradients", step=7 - steps_behind, black_box=black_box)
    cluster.go_on(2)
    cluster.go_on(14, silent=(1,))
    assert cluster.hang().rank == 1
    assert cluster.hang().in_black_box is limit_of_the_start


def test_the_start_counts_while_every_rank_is_in_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.be(0, "starting", step=0, black_box=START)
    cluster.be(1, "waiting for a batch", step=1001, black_box=START)
    cluster.go_on(8)
    assert cluster.hang().in_black_box


def test_progress_of_any_rank_that_answers_is_progress(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3)
    cluster.go_on(20, moving=(1,))
    assert cluster.hang().seconds == 0.0
    cluster.go_on(6)
    assert cluster.hang().seconds == 6.0


def test_a_rank_that_never_started_is_to_blame_once_another_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3)
    assert cluster.monitor.hang(100.0) is None
    cluster.take_away(1)
    cluster.go_on(10)
    assert (cluster.hang().rank, cluster.hang().message) == (1, "it has not started")
    assert cluster.hang().seconds == 8.0


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3)
    cluster.go_on(4)
    cluster.go_on(30, silent=(0,))
    assert cluster.hang().rank == 0
    cluster.ranks[0].end("finished", exit_code=0, step=3)
    cluster.go_on(2)
    assert "so are all others" in cluster.hang().message
    for rank in (1, 2):
        cluster.ranks[rank].end("finished", exit_code=0, step=3)
    cluster.go_on(2)
    assert cluster.monitor.hang(cluster.now) is None


def test_a_rank_that_never_started_is_still_awaited_when_all_others_have_ended(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.take_away(1)
    cluster.go_on(2)
    cluster.ranks[0].end("finished", exit_code=0, step=3)
    cluster.go_on(10)
    assert (cluster.hang().rank, cluster.hang().seconds) == (1, 8.0)


def test_time_in_which_the_machine_slept_does_not_count(tmp_path: Path) -> None:
    """As after `docker unpause`: all heartbeats look old, all ranks have done nothing, and none hangs."""
    cluster = Cluster(tmp_path, 2)
    cluster.go_on(4)
    cluster.now += 1000.0
    cluster.go_on(2)
    assert cluster.hang().seconds < 10.0
    cluster.go_on(300, moving=(0, 1))
    cluster.now += 1000.0
    cluster.go_on(2)
    assert cluster.hang().seconds < 10.0, "nor in a run that has gone on for long"


def test_time_in_which_the_reader_alone_slept_does_not_count(tmp_path: Path) -> None:
    """As after Ctrl-Z and `fg` of `evenpack train`."""
    cluster = Cluster(tmp_path, 2)
    cluster.go_on(4)
    monitor, cluster.monitor = cluster.monitor, HangMonitor(cluster.folder, 2, limits=LIMITS, clock=lambda: 0.0)
    cluster.go_on(1000, moving=(0, 1))
    cluster.monitor = monitor
    cluster.go_on(2)
    assert cluster.hang().seconds < 10.0
    assert cluster.hang().message.endswith("so are all others"), "and each is taken for one that answers"


def test_a_reader_that_is_late_at_every_look_sees_a_hang_all_the_same(tmp_path: Path) -> None:
    """As where the files of many ranks are on a slow disk."""
    cluster = Cluster(tmp_path, 2)
    for _ in range(20):
        cluster.now += 18.0
        cluster.go_on(2)
    assert cluster.hang().seconds == 360.0, "its clock goes on from the second look"
    cluster.now += 1000.0
    cluster.go_on(2)
    assert cluster.hang().seconds == 0.0, "a pause is one all the same"


def test_the_limit_of_the_start_is_never_less_than_that_of_a_step(tmp_path: Path) -> None:
    """Who gives steps an hour has the first of them in the start, too."""

    def limits(**run: float | None) -> HangLimits | None:
        return HangLimits.of(run_config(run_values("llama", tmp_path, run=run)).run)

    assert limits() == HangLimits(step_seconds=900.0, start_seconds=1800.0)
    assert limits(hang_timeout_seconds=3600.0) == HangLimits(step_seconds=3600.0, start_seconds=3600.0)
    assert limits(hang_timeout_seconds=None) is None


LIMITS = HangLimits(step_seconds=100.0, start_seconds=400.0)


class WatchedRank:
    """One rank and the monitor of its heartbeats, after the start, by a clock that the test sets."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = folder_of(tmp_path)
        self.now = 0.0
        self.doing = Doing()
        self.doing.end_black_box(START)
        self.folder.write_status(starting(0))
        self.heartbeat = Heartbeat(self.folder, starting(0), limits=LIMITS, doing=self.doing, clock=lambda: self.now)
        self.monitor = HangMonitor(self.folder, 1, limits=LIMITS, clock=lambda: self.now)

    def wait(self, seconds: float, *, beats: bool = True) -> None:
        """Lets time pass, in which the rank begins nothing; each second it beats, if it does, and is looked at."""
        for _ in range(round(seconds)):
            if beats:
                self.heartbeat.keep_up()
            self.monitor.check()
            self.now += 1.0


def test_the_monitor_records_the_failure_with_the_place_of_the_stacks(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.doing.enter("evaluating", 12)
    stack = rank.folder.stack_file(0)
    rank.wait(10.0)
    stack.write_text("there")
    rank.wait(90.0)
    assert rank.folder.read_failure() is None
    rank.wait(10.0)
    failure = rank.folder.read_failure()
    assert failure is not None
    assert failure.describe() == (
        f"rank 0 on {socket.gethostname()} failed: no progress for 102 s (step 12, evaluating), which "
        f"run.hang_timeout_seconds limits to 100 s; where it waits: {stack}"
    )


def test_a_black_box_has_a_limit_of_its_own_and_a_tick_begins_it_again(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.doing.enter("computing gradients", 12)
    rank.doing.begin_black_box("compiling")
    rank.wait(195.0)
    rank.doing.tick()
    rank.wait(390.0)
    assert rank.folder.read_failure() is None
    rank.wait(20.0)
    failure = rank.folder.read_failure()
    assert failure is not None
    assert "(step 12, computing gradients (compiling)), which run.start_timeout_seconds limits to 400 s" in str(
        failure.error
    )


def test_the_end_of_a_black_box_leaves_the_limit_of_a_step(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.doing.begin_black_box("compiling")
    rank.wait(195.0)
    rank.doing.end_black_box("compiling")
    rank.wait(95.0)
    assert rank.folder.read_failure() is None
    rank.wait(15.0)
    assert rank.folder.read_failure() is not None


def test_a_rank_with_a_final_status_does_not_hang(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.heartbeat.keep_up()
    assert rank.heartbeat.end("finished", exit_code=0, step=3).state == "finished"
    assert rank.heartbeat.end("failed", exit_code=1, error="too late").state == "finished"
    rank.wait(250.0)
    status = rank.folder.read_status(0)
    assert status is not None
    assert (status.state, status.step, status.beats) == ("finished", 3, 1), "no heartbeat follows"
    assert rank.folder.read_failure() is None


def test_a_heartbeat_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    doing, now = Doing(), [0.0]
    heartbeat = Heartbeat(folder, starting(3, 4), limits=None, doing=doing, clock=lambda: now[0])
    folder.write_status(heartbeat.status)
    doing.enter("saving a checkpoint", 12345)
    heartbeat.keep_up()
    first = folder.read_status(3)
    assert first == heartbeat.status
    assert (first.rank, first.place, first.beats) == (3, (12345, "saving a checkpoint"), 1)
    assert (first.black_box, first.still_seconds) == (START, 0.0)
    now[0] = 4.0
    heartbeat.keep_up()
    second = folder.read_status(3)
    assert second is not None
    assert (second.beats, second.still_seconds) == (2, 4.0)
    doing.enter("waiting for a batch", 1)  # a shorter text in the same place
    now[0] = 6.0
    heartbeat.keep_up()
    third = folder.read_status(3)
    assert third is not None
    assert (third.place, third.beats, third.still_seconds) == ((1, "waiting for a batch"), 3, 0.0)
    now[0] = 6.5
    heartbeat.keep_up()
    assert folder.read_status(3) == third, "none is due"
    doing.end_black_box(START)
    heartbeat.keep_up()
    fourth = folder.read_status(3)
    assert fourth is not None
    assert (fourth.black_box, fourth.beats) == (None, 4), "all ranks may freeze before the next one is due"
    doing.begin_black_box("compiling")
    heartbeat.keep_up()
    fifth = folder.read_status(3)
    assert fifth is not None
    assert (fifth.black_box, fifth.beats) == ("compiling", 5)
    assert RankFolder(tmp_path, "earlier").read_status(3) is None
    assert folder.read_status(4) is None


class JustMoving(Doing):
    """The main thread leaves the start just before the guard reads that."""

    @property
    def black_box(self) -> str | None:
        self.end_black_box(START)
        return super().black_box


def test_a_rank_that_leaves_the_start_as_the_guard_looks_has_just_moved(tmp_path: Path) -> None:
    """Else the limit of a step would hold for the time that the start has taken."""
    folder = folder_of(tmp_path)
    doing, now = Doing(), [0.0]
    heartbeat = Heartbeat(folder, starting(0), limits=None, doing=doing, clock=lambda: now[0])
    folder.write_status(heartbeat.status)
    heartbeat.keep_up()
    now[0] = 8.0
    doing.__class__ = JustMoving
    heartbeat.keep_up()
    assert (heartbeat.status.black_box, heartbeat.status.still_seconds) == (None, 0.0)


def test_a_rank_of_an_earlier_run_writes_nothing_into_the_file_of_a_later_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    heartbeat = Heartbeat(folder, starting(0), limits=None, clock=map(float, range(0, 90, 10)).__next__)
    folder.write_status(heartbeat.status)
    heartbeat.keep_up()
    later = RankFolder(tmp_path, "later")
    later.write_status(replace(starting(0), run_id="later"))
    text = folder.status_file(0).read_bytes()
    heartbeat.keep_up()
    heartbeat.end("failed", exit_code=1, error="x")
    assert folder.status_file(0).read_bytes() == text
    folder.status_file(0).unlink()
    heartbeat.status = replace(heartbeat.status, state="running")
    heartbeat.keep_up()
    assert folder.read_status(0) is not None, "one that was deleted under the run is made again"


def hold_the_lock_of_python(seconds: int) -> None:
    """Waits in C, without letting any other thread of this process run."""
    ctypes.PyDLL(None).sleep(seconds)


def test_a_rank_without_progress_writes_its_stacks_also_from_c(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    doing = Doing()
    limits = HangLimits(step_seconds=600.0, start_seconds=5.0)
    heartbeat = Heartbeat(folder, starting(0), limits=limits, doing=doing, clock=map(float, range(9)).__next__)
    folder.write_status(heartbeat.status)
    heartbeat.keep_up()
    assert folder.stack_file(0).read_text() == ""
    hold_the_lock_of_python(4)  # the stacks are due after two seconds
    assert "in hold_the_lock_of_python" in folder.stack_file(0).read_text()
    doing.end_black_box(START)
    heartbeat.keep_up()
    assert folder.stack_file(0).read_text() == "", "a stack from before would mislead in the next hang"
    faulthandler.cancel_dump_traceback_later()


def test_a_run_that_may_hang_beats_but_writes_no_stacks(tmp_path: Path) -> None:
    """A lost connection is judged by heartbeats, too."""
    folder = folder_of(tmp_path)
    folder.write_status(starting(0))
    Heartbeat(folder, starting(0), limits=None).keep_up()
    assert [path.name for path in folder.path.iterdir()] == ["rank_0.json"]


@pytest.mark.parametrize(("timeout", "every"), [(2.0, 0.2), (20.0, 1.0), (900.0, 2.0), (None, 2.0)])
def test_heartbeats_come_every_few_seconds_or_as_often_as_a_short_limit_needs(
    timeout: float | None, every: float
) -> None:
    limits = None if timeout is None else HangLimits(step_seconds=timeout, start_seconds=1800.0)
    assert beat_seconds(limits) == every


def test_the_first_rank_that_answers_judges(tmp_path: Path) -> None:
    """A machine that freezes with rank 0 on it is named by any rank that is left, after the same time."""
    cluster = Cluster(tmp_path, 4)
    limits = HangLimits(step_seconds=100.0, start_seconds=400.0)
    cluster.monitor = HangMonitor(cluster.folder, 4, limits=limits, rank=2, clock=lambda: cluster.now)
    cluster.go_on(200)
    assert cluster.folder.read_failure() is None, "rank 0 judges"
    cluster.go_on(50, moving=(0, 1, 2, 3))
    cluster.go_on(100, silent=(0, 1))
    assert cluster.folder.read_failure() is None
    cluster.go_on(6, silent=(0, 1))
    failure = cluster.folder.read_failure()
    assert failure is not None
    assert failure.rank == 0
    assert "no progress for 102 s" in str(failure.error)
