"""Which rank a run without progress waits for, from heartbeats at times that the test sets."""

import ctypes
import faulthandler
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rank_places import place_of

from evenpack.engine.activity import START, Activity, Doing
from evenpack.launcher.processes.hangs import (
    Beat,
    Hang,
    HangFinder,
    HangLimits,
    HangMonitor,
    Heartbeat,
    beat_seconds,
    read_beat,
)
from evenpack.launcher.processes.ranks import RankFolder, RankPlace, RankStatus
from evenpack.testing import run_config, run_values

BEAT = Beat(
    run_id="now",
    rank=0,
    host=socket.gethostname(),
    pid=os.getpid(),
    count=1,
    moves=5,
    step=7,
    activity="summing over the ranks",
    black_box=None,
)


class Cluster:
    """Ranks that beat once a second and are read as often."""

    def __init__(self, size: int) -> None:
        self.beats = {rank: replace(BEAT, rank=rank) for rank in range(size)}
        self.finder = HangFinder(range(size), beat_every=1.0, now=0.0)
        self.now = 0.0

    def go_on(self, seconds: int, *, silent: tuple[int, ...] = (), moving: tuple[int, ...] = ()) -> None:
        """Lets time pass; `silent` ranks do not beat, `moving` ranks make progress."""
        for _ in range(seconds):
            self.now += 1.0
            for rank, beat in self.beats.items():
                if rank not in silent:
                    moves = beat.moves + (rank in moving)
                    self.beats[rank] = replace(beat, count=beat.count + 1, moves=moves)
            self.finder.observe(self.beats.values(), now=self.now)

    def be(self, rank: int, activity: Activity, *, step: int = 7, black_box: str | None = None) -> None:
        beat = self.beats[rank]
        self.beats[rank] = replace(beat, activity=activity, step=step, black_box=black_box, moves=beat.moves + 1)

    def hang(self, *ended: int) -> Hang:
        found = self.finder.hang(ended=ended, now=self.now)
        assert found is not None
        return found


def test_a_rank_whose_heartbeat_has_stopped_is_to_blame() -> None:
    cluster = Cluster(4)
    cluster.go_on(5)
    cluster.be(3, "computing gradients")  # behind the others, but only because it is on the way
    cluster.go_on(30, silent=(2,))
    hang = cluster.hang()
    assert (hang.rank, hang.host) == (2, BEAT.host)
    assert hang.seconds == pytest.approx(29.0)  # since rank 3 was last seen to begin something
    assert hang.message.startswith("step 7, summing over the ranks; it does not answer: process ")


def test_a_machine_of_which_no_rank_answers_is_named() -> None:
    cluster = Cluster(4)
    cluster.beats |= {rank: replace(cluster.beats[rank], host="node2") for rank in (2, 3)}
    cluster.go_on(5)
    cluster.go_on(30, silent=(2, 3))
    assert (cluster.hang().rank, cluster.hang().host) == (2, "node2")
    assert "none of the ranks 2 to 3 of its machine answers: the machine is down or not" in cluster.hang().message


def test_the_rank_that_is_behind_is_to_blame_if_all_answer() -> None:
    cluster = Cluster(3)
    cluster.be(0, "waiting for a batch", step=8)
    cluster.be(1, "evaluating")
    cluster.go_on(10)
    assert (cluster.hang().rank, cluster.hang().message) == (
        2,
        "step 7, summing over the ranks; 2 of 3 ranks are further and wait for it",
    )


def test_the_limit_of_the_start_holds_while_any_rank_is_in_a_black_box_or_has_not_started() -> None:
    cluster = Cluster(3)
    cluster.be(1, "computing gradients", black_box="compiling")
    cluster.go_on(10)
    assert cluster.hang().in_black_box
    assert cluster.hang().message.startswith("step 7, computing gradients (compiling); 2 of 3 ranks are further")
    cluster.be(0, "computing gradients")
    cluster.go_on(1)
    assert cluster.hang().rank == 1, "of two in one place it is the one that compiles"
    cluster.be(1, "computing gradients")
    cluster.go_on(10)
    assert not cluster.hang().in_black_box
    absent = Cluster(3)
    del absent.beats[1]
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
    black_box: str, steps_behind: int, limit_of_the_start: bool
) -> None:
    """Its heartbeat is from up to two seconds before it stopped."""
    cluster = Cluster(3)
    cluster.be(1, "computing gradients", step=7 - steps_behind, black_box=black_box)
    cluster.go_on(8, silent=(1,))
    assert cluster.hang().rank == 1
    assert cluster.hang().in_black_box is limit_of_the_start


def test_the_start_counts_while_every_rank_is_in_it() -> None:
    cluster = Cluster(2)
    cluster.be(0, "starting", step=0, black_box=START)
    cluster.be(1, "waiting for a batch", step=1001, black_box=START)
    cluster.go_on(8)
    assert cluster.hang().in_black_box


def test_ranks_that_all_wait_in_one_place_say_so() -> None:
    cluster = Cluster(3)
    cluster.go_on(10)
    assert cluster.hang().message == "step 7, summing over the ranks; and so are all others"
    alone = Cluster(1)
    alone.go_on(10)
    assert alone.hang().message == "step 7, summing over the ranks"


def test_progress_of_any_rank_is_progress() -> None:
    cluster = Cluster(3)
    cluster.go_on(20, moving=(1,))
    assert cluster.hang().seconds == 0.0
    cluster.go_on(5)
    assert cluster.hang().seconds == 5.0


def test_a_rank_that_never_started_is_to_blame_once_another_has() -> None:
    cluster = Cluster(3)
    assert cluster.finder.hang(ended=(), now=100.0) is None
    del cluster.beats[1]
    cluster.go_on(10)
    assert (cluster.hang().rank, cluster.hang().message) == (1, "it has not started")
    assert cluster.hang().seconds == 9.0


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    cluster = Cluster(3)
    cluster.go_on(3)
    cluster.go_on(30, silent=(0,))
    assert cluster.hang().rank == 0
    assert "so are all others" in cluster.hang(0).message
    assert cluster.finder.hang(ended=(0, 1, 2), now=cluster.now) is None


def test_a_rank_that_never_started_is_still_awaited_when_all_others_have_ended() -> None:
    cluster = Cluster(2)
    del cluster.beats[1]
    cluster.go_on(10)
    assert (cluster.hang(0).rank, cluster.hang(0).seconds) == (1, 9.0)


def test_time_in_which_the_reader_slept_does_not_count() -> None:
    """As after `docker unpause`, or Ctrl-Z and `fg`: all heartbeats look old and none is."""
    cluster = Cluster(2)
    cluster.go_on(3)
    cluster.now += 1000.0
    cluster.go_on(1, moving=())
    assert cluster.hang().seconds < 10.0
    cluster.go_on(300, moving=(0, 1))
    cluster.now += 1000.0
    cluster.go_on(1)
    assert cluster.hang().seconds < 10.0, "nor in a run that has gone on for long"


def test_a_reader_that_is_late_at_every_look_sees_a_hang_all_the_same() -> None:
    """As where the files of many ranks are on a slow disk."""
    cluster = Cluster(2)
    for _ in range(20):
        cluster.now += 19.0
        cluster.go_on(1)
    assert cluster.hang().seconds == 18 * 20.0, "its clock goes on from the second look"
    cluster.now += 1000.0
    cluster.go_on(1)
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
        self.folder = RankFolder(tmp_path, "now")
        self.folder.path.mkdir(parents=True)
        self.said: list[str] = []
        self.now = 0.0
        self.doing = Doing()
        self.doing.end_black_box(START)
        self.heartbeat = Heartbeat(
            self.folder,
            rank=0,
            limits=LIMITS,
            doing=self.doing,
            clock=lambda: self.now,
        )
        self.monitor = HangMonitor(self.folder, range(1), limits=LIMITS, warn=self.said.append, clock=lambda: self.now)

    def wait(self, seconds: float, *, beats: bool = True) -> None:
        """Lets time pass, in which the rank begins nothing; each second it beats, if it does, and is looked at."""
        for _ in range(round(seconds)):
            if beats:
                self.heartbeat.keep_up()
            self.monitor.check()
            self.now += 1.0

    @property
    def told(self) -> list[str]:
        """What was said, without the details."""
        return [line.split(":")[0] for line in self.said]


def test_the_monitor_warns_once_and_then_records_the_failure(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.doing.enter("evaluating", 12)
    stack = rank.folder.stack_file(0)
    rank.wait(10.0)
    stack.write_text("there")
    rank.wait(115.0)
    (warning,) = rank.said
    assert warning.startswith(f"no progress for 52 s: rank 0 on {socket.gethostname()} (step 12, evaluating). The run ")
    assert "ends after 100 s of it (run.hang_timeout_seconds)" in warning
    assert warning.endswith(f"where it waits: {stack}")
    failure = rank.folder.read_failure()
    assert failure is not None
    assert failure.describe() == (
        f"rank 0 on {socket.gethostname()} failed: no progress for 102 s (step 12, evaluating)"
    )


def test_a_black_box_has_a_limit_of_its_own_and_a_tick_begins_it_again(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.doing.enter("computing gradients", 12)
    rank.doing.begin_black_box("compiling")
    rank.wait(195.0)
    assert rank.said == []
    rank.doing.tick()
    rank.wait(350.0)
    (warning,) = rank.said
    assert (
        "(step 12, computing gradients (compiling)). The run ends after 400 s of it (run.start_timeout_sec" in warning
    )
    assert rank.folder.read_failure() is None
    rank.wait(60.0)
    assert rank.folder.read_failure() is not None


def test_the_end_of_a_black_box_leaves_the_limit_of_a_step(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.doing.begin_black_box("compiling")
    rank.wait(195.0)
    rank.doing.end_black_box("compiling")
    rank.wait(95.0)
    assert rank.folder.read_failure() is None
    rank.wait(15.0)
    assert rank.folder.read_failure() is not None


def test_the_monitor_says_when_the_run_goes_on_and_warns_again(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.wait(75.0)
    rank.doing.enter("waiting for a batch", 1)
    rank.wait(80.0)
    assert rank.told == ["no progress for 52 s", "the run goes on", "no progress for 52 s"]
    assert rank.folder.read_failure() is None


def test_a_rank_that_wakes_too_late_does_not_go_on(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.wait(125.0)
    rank.doing.enter("waiting for a batch", 1)
    rank.wait(25.0)
    assert rank.told == ["no progress for 52 s"]
    assert rank.folder.read_failure() is not None


def test_a_rank_with_a_final_status_does_not_hang(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.heartbeat.keep_up()
    status = RankStatus.starting("now", RankPlace.of_environment({}))
    rank.folder.write_status(status.ended("finished", exit_code=0, step=3))
    rank.wait(250.0, beats=False)
    assert rank.said == []
    assert rank.folder.read_failure() is None


def test_a_heartbeat_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RankFolder(tmp_path, "now")
    folder.path.mkdir()
    doing = Doing()
    heartbeat = Heartbeat(folder, rank=3, limits=None, doing=doing)
    doing.enter("saving a checkpoint", 12345)
    heartbeat.keep_up()
    first = read_beat(folder, 3)
    assert first is not None
    assert (first.rank, first.step, first.activity, first.count) == (3, 12345, "saving a checkpoint", 1)
    assert (first.host, first.pid) == (socket.gethostname(), os.getpid())
    doing.enter("waiting for a batch", 1)  # a shorter text in the same place
    heartbeat._due = 0.0
    heartbeat.keep_up()
    second = read_beat(folder, 3)
    assert second is not None
    assert (second.step, second.count, second.moves) == (1, 2, 2)
    assert first.black_box == START
    assert read_beat(RankFolder(tmp_path, "earlier"), 3) is None
    assert read_beat(folder, 4) is None


def hold_the_lock_of_python(seconds: int) -> None:
    """Waits in C, without letting any other thread of this process run."""
    ctypes.PyDLL(None).sleep(seconds)


def test_a_rank_without_progress_writes_its_stacks_also_from_c(tmp_path: Path) -> None:
    folder = RankFolder(tmp_path, "now")
    folder.path.mkdir()
    doing = Doing()
    limits = HangLimits(step_seconds=600.0, start_seconds=5.0)
    heartbeat = Heartbeat(folder, rank=0, limits=limits, doing=doing, clock=iter(range(9)).__next__)
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
    folder = RankFolder(tmp_path, "now")
    folder.path.mkdir()
    Heartbeat(folder, rank=0, limits=None).keep_up()
    assert [path.name for path in folder.path.iterdir()] == ["heartbeat_0"]


@pytest.mark.parametrize(("timeout", "every"), [(2.0, 0.2), (20.0, 1.0), (900.0, 2.0), (None, 2.0)])
def test_heartbeats_come_every_few_seconds_or_as_often_as_a_short_limit_needs(
    timeout: float | None, every: float
) -> None:
    limits = None if timeout is None else HangLimits(step_seconds=timeout, start_seconds=1800.0)
    assert beat_seconds(limits) == every


def test_a_rank_that_sees_only_its_machine_leaves_the_judgement_to_others(tmp_path: Path) -> None:
    """Rank 1 sees ranks 0 to 1 and 5 of 6, which wait for rank 3 of another machine."""
    clock = [0.0]
    folder = RankFolder(tmp_path, "now")
    folder.path.mkdir()
    near, far = (
        HangMonitor.of_rank(
            place_of(rank, ranks=6, each=2), folder, limits=LIMITS, warn=lambda _: None, clock=lambda: clock[0]
        )
        for rank in (1, 0)
    )
    doings = [Doing() for _ in range(6)]
    heartbeats = [
        Heartbeat(folder, rank=rank, limits=LIMITS, doing=doing, clock=lambda: clock[0])
        for rank, doing in enumerate(doings)
    ]
    for rank, doing in enumerate(doings):
        doing.end_black_box(START)
        doing.enter("computing gradients" if rank == 3 else "reducing gradients", 8)

    def pass_seconds(seconds: int, *monitors: HangMonitor, moving: bool = False, silent: tuple[int, ...] = ()) -> None:
        for _ in range(seconds):
            clock[0] += 1.0
            if moving:
                doings[3].enter("computing gradients", 8)
            for rank, heartbeat in enumerate(heartbeats):
                if rank not in silent:
                    heartbeat.keep_up()
            for watch in monitors:
                watch.check()

    pass_seconds(300, near, far, moving=True)
    assert folder.read_failure() is None, "a rank that nobody near sees has moved"
    pass_seconds(300, near)
    assert folder.read_failure() is None, "those that see all have not judged yet"
    pass_seconds(10, near, far)
    failure = folder.read_failure()
    assert failure is None
    pass_seconds(110, near, far)
    failure = folder.read_failure()
    assert failure is not None
    assert failure.rank == 3
    folder._failure_file.unlink()
    pass_seconds(60, near, silent=(0, 5))  # nobody who sees all can judge
    failure = folder.read_failure()
    assert failure is not None
    assert failure.rank == 0
