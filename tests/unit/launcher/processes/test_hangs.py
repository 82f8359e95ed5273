"""Which rank a run without progress waits for, from heartbeats at times that the test sets."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rank_places import place_of

from evenpack.engine.activity import Activity
from evenpack.launcher.processes.hangs import Hang, HangFinder, HangMonitor
from evenpack.launcher.processes.heartbeat import Beat, Heartbeat, beat_seconds, read_beat, stack_file
from evenpack.launcher.processes.ranks import RankFolder, RankPlace, RankStatus

BEAT = Beat(
    run_id="now",
    rank=0,
    host=socket.gethostname(),
    pid=os.getpid(),
    count=1,
    moves=5,
    step=7,
    activity="summing over the ranks",
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

    def be(self, rank: int, activity: Activity, *, step: int = 7) -> None:
        beat = self.beats[rank]
        self.beats[rank] = replace(beat, activity=activity, step=step, moves=beat.moves + 1)

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
    assert not hang.answers


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


class WatchedRank:
    """One rank and the monitor of its heartbeats, with a time-out of 100 s by a clock that the test sets."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = RankFolder(tmp_path, "now")
        self.folder.path.mkdir(parents=True)
        self.heartbeat = Heartbeat(self.folder.path, run_id="now", rank=0, timeout_seconds=100.0)
        self.said: list[str] = []
        self.now = 0.0
        self.monitor = HangMonitor(
            self.folder, range(1), timeout_seconds=100.0, warn=self.said.append, clock=lambda: self.now
        )

    def wait(self, seconds: float, *, beats: bool = True) -> None:
        """Lets time pass, in which the rank begins nothing; every 5 s it beats, if it does, and is looked at."""
        for _ in range(round(seconds / 5.0)):
            if beats:
                self.heartbeat._due = 0.0
                self.heartbeat.keep_up()
            self.monitor.check()
            self.now += 5.0

    @property
    def told(self) -> list[str]:
        """What was said, without the details."""
        return [line.split(":")[0] for line in self.said]


def test_the_monitor_warns_once_and_then_records_the_failure(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.heartbeat.enter("evaluating", 12)
    stack = stack_file(rank.folder.path, 0)
    stack.write_text("there")
    rank.wait(125.0)
    (warning,) = rank.said
    assert warning.startswith(f"no progress for 55 s: rank 0 on {socket.gethostname()} (step 12, evaluating). The run ")
    assert "ends after 100 s of it (run.hang_timeout_seconds)" in warning
    assert warning.endswith(f"where it waits: {stack}")
    failure = rank.folder.read_failure()
    assert failure is not None
    assert failure.describe() == (
        f"rank 0 on {socket.gethostname()} failed: no progress for 105 s (step 12, evaluating)"
    )


def test_the_monitor_says_when_the_run_goes_on_and_warns_again(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.wait(75.0)
    rank.heartbeat.enter("waiting for a batch", 1)
    rank.wait(80.0)
    assert rank.told == ["no progress for 55 s", "the run goes on", "no progress for 55 s"]
    assert rank.folder.read_failure() is None


def test_a_rank_that_wakes_too_late_does_not_go_on(tmp_path: Path) -> None:
    rank = WatchedRank(tmp_path)
    rank.wait(125.0)
    rank.heartbeat.enter("waiting for a batch", 1)
    rank.wait(25.0)
    assert rank.told == ["no progress for 55 s"]
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
    heartbeat = Heartbeat(tmp_path, run_id="now", rank=3, timeout_seconds=4.0)
    heartbeat.enter("saving a checkpoint", 12345)
    heartbeat.keep_up()
    first = read_beat(tmp_path, 3, run_id="now")
    assert first is not None
    assert (first.rank, first.step, first.activity, first.count) == (3, 12345, "saving a checkpoint", 1)
    assert (first.host, first.pid) == (socket.gethostname(), os.getpid())
    heartbeat.enter("waiting for a batch", 1)  # a shorter text in the same place
    heartbeat._due = 0.0
    heartbeat.keep_up()
    second = read_beat(tmp_path, 3, run_id="now")
    assert second is not None
    assert (second.step, second.count, second.moves) == (1, 2, 2)
    assert read_beat(tmp_path, 3, run_id="earlier") is None
    assert read_beat(tmp_path, 4, run_id="now") is None


def test_a_rank_without_progress_writes_where_its_main_thread_is(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, run_id="now", rank=0, timeout_seconds=100.0)
    heartbeat.keep_up()
    assert not stack_file(tmp_path, 0).exists()
    heartbeat._moment = replace(heartbeat._moment, since=heartbeat._moment.since - 41.0)
    heartbeat._due = 0.0
    heartbeat.keep_up()
    assert "test_a_rank_without_progress_writes_where_its_main_thread_is" in stack_file(tmp_path, 0).read_text()
    heartbeat.enter("updating weights", 1)
    heartbeat._due = 0.0
    heartbeat.keep_up()
    assert not stack_file(tmp_path, 0).exists()  # a stack from before would mislead in the next hang


def test_nobody_watches_without_a_time_out(tmp_path: Path) -> None:
    Heartbeat(tmp_path, run_id="now", rank=0, timeout_seconds=None).keep_up()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("timeout", "every"), [(2.0, 0.2), (100.0, 5.0), (900.0, 30.0)])
def test_heartbeats_are_as_frequent_as_the_time_out_needs(timeout: float, every: float) -> None:
    assert beat_seconds(timeout) == every


def test_a_rank_that_sees_only_its_machine_leaves_it_to_others_to_name_the_one_of_another_machine(
    tmp_path: Path,
) -> None:
    clock = [0.0]
    folder = RankFolder(tmp_path, "now")
    folder.path.mkdir()
    places = [place_of(rank, ranks=4, each=2) for rank in (1, 0)]
    said: list[str] = []
    near, far = (
        HangMonitor.of_rank(place, folder, timeout_seconds=100.0, warn=said.append, clock=lambda: clock[0])
        for place in places
    )
    heartbeats = [Heartbeat(folder.path, run_id="now", rank=rank, timeout_seconds=100.0) for rank in range(4)]
    for rank, heartbeat in enumerate(heartbeats):
        heartbeat.enter("computing gradients" if rank == 3 else "reducing gradients", 8)

    def pass_seconds(seconds: int, *monitors: HangMonitor) -> None:
        for _ in range(seconds):
            clock[0] += 1.0
            for heartbeat in heartbeats:
                heartbeat._due = 0.0
                heartbeat.keep_up()
            for watch in monitors:
                watch.check()

    pass_seconds(3, near)  # it has seen the last change before the others
    pass_seconds(115, near, far)
    failure = folder.read_failure()
    assert failure is not None
    assert failure.rank == 3
    folder._failure_file.unlink()
    pass_seconds(10, near)  # those that watch all have not said anything
    assert folder.read_failure() is not None
