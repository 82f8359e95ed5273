"""The campaign notices what it looks for: its judgement, its damage, and how campaigns are added up."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from evenpack.files import write_text
from faults.at_rest import ACTIONS, damage_a_file, kind_of
from faults.campaign import Campaign, State, next_of
from faults.life import End, Life
from faults.report import add_campaign
from faults.running import (
    A_FILE_DELETED,
    LONG_COMPILATION,
    NAN,
    OTHER_FILE,
    SLOW_DISK,
    SPOILS,
    freeze_ranks,
    write_spoil,
)
from faults.spoiled_worker import SLOW_CALLS, slow_the_disk, spoiled_arguments
from faults.subject import (
    CASES,
    HANG_TIMEOUT_SECONDS,
    START_TIMEOUT_SECONDS,
    Case,
    Result,
    SubjectRun,
    listed,
    paths_below,
    write_run,
)
from faults.traces import Traces, left_behind, mapped_names
from faults.tried import BrokenError, MissedError, Tried, require_clear, require_said, require_saved

SUPERVISED, UNDER_TORCHRUN = CASES[0], CASES[4]
TRACEBACK = 'Traceback (most recent call last):\n  File "x", line 1\nValueError: y\n'
UNBORN = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 122, in spawn_main
    exitcode = _main(fd, parent_sentinel)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 130, in _main
    preparation_data = reduction.pickle.load(from_parent)
                       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
EOFError: Ran out of input
"""
"""A process whose parent was killed as it started it."""
OF_SHARED_MEMORY = """\
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 138, in _serve
    with self._listener.accept() as conn:
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
    chunk = read(handle, remaining)
ConnectionResetError: [Errno 104] Connection reset by peer
"""
OF_TORCHRUN = """\
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
evenpack.launcher.worker FAILED
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.api.SignalException: Process 5 got signal: 15
"""
OF_DEEPSPEED = """\
Traceback (most recent call last):
  File "/bin/deepspeed", line 6, in <module>
    main()
  File "/lib/python3.11/site-packages/deepspeed/launcher/runner.py", line 634, in main
    result.wait()
  File "/lib/python3.11/subprocess.py", line 1264, in wait
    return self._wait(timeout=timeout)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^
KeyboardInterrupt
"""


def end(**changes: object) -> End:
    values = {"exit_code": 1, "seconds": 3.0, "said": "error: rank 1 failed", "orphans": ()} | changes
    return End(**values)  # type: ignore[arg-type]


def test_a_clear_end_is_accepted() -> None:
    require_clear(end(), SUPERVISED, silent=False)
    require_clear(end(said=""), SUPERVISED, silent=True)
    require_clear(end(exit_code=0), SUPERVISED, silent=False, may_return_0=True)
    require_clear(end(said=f"error: no\n{OF_TORCHRUN}"), UNDER_TORCHRUN, silent=False)
    require_clear(end(said=f"asked to stop\n{OF_DEEPSPEED}saved"), SUPERVISED, silent=False)
    require_clear(end(said=f"error: no\nException ignored in: <f>\n{TRACEBACK}"), SUPERVISED, silent=False)
    require_clear(end(said=f"error: no\n{UNBORN}{UNBORN}"), SUPERVISED, silent=False)
    require_clear(end(said=f"{OF_SHARED_MEMORY}{OF_TORCHRUN}"), UNDER_TORCHRUN, silent=False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"orphans": ("12 python",)}, "lived on"),
        ({"exit_code": 0}, "ended with 0"),
        ({"said": " \n"}, "said nothing"),
        ({"said": f"error: no\n{TRACEBACK}"}, "a traceback"),
        ({"said": f"error: no\n{TRACEBACK}{UNBORN}"}, "a traceback"),
        ({"said": f"error: no\n{TRACEBACK}{OF_TORCHRUN}"}, "a traceback"),
        ({"said": f"error: no\n{OF_DEEPSPEED}{TRACEBACK}"}, "a traceback"),
        ({"said": f"error: no\n{OF_SHARED_MEMORY}{TRACEBACK}"}, "a traceback"),
        ({"said": f"error: no\n[rank1]: {TRACEBACK}"}, "a traceback"),
        ({"said": f"error: no\n{TRACEBACK.replace('ValueError: y', 'EOFError: Ran out of input')}"}, "a traceback"),
    ],
)
def test_an_end_that_is_not_clear_is_a_broken_promise(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BrokenError, match=problem):
        require_clear(end(**changes), SUPERVISED, silent=False)


@pytest.mark.parametrize(("exit_code", "saved"), [(1, 20), (75, 10), (75, None)])
def test_a_run_that_was_asked_to_stop_must_have_saved(tmp_path: Path, exit_code: int, saved: int | None) -> None:
    run = SubjectRun(folder=tmp_path, case=SUPERVISED)
    tried = Tried(name="SIGTERM", where="training, step 14", detail="", outcome="ended clearly")
    (run.checkpoints / f"step_{20:06d}").mkdir(parents=True)
    require_saved(run, tried, exit_code=75, step=14)
    (run.checkpoints / f"step_{20:06d}").rmdir()
    if saved is not None:
        (run.checkpoints / f"step_{saved:06d}").mkdir()
    with pytest.raises(BrokenError, match="asked to stop at step 14"):
        require_saved(run, tried, exit_code=exit_code, step=14)
    assert tried.outcome == "lost"


def test_results_differ_by_weights_and_by_steps_that_are_compared() -> None:
    steps = {1: ("a", 2.0, 5), 2: ("b", 1.0, 5)}
    reference = Result(weights="w", steps=steps)
    assert Result(weights="w", steps=dict(steps)).equals(reference, after=0)
    assert not Result(weights="v", steps=steps).equals(reference, after=2)
    assert not Result(weights="w", steps=steps | {2: ("c", 1.0, 5)}).equals(reference, after=1)
    assert not Result(weights="w", steps={2: steps[2]}).equals(reference, after=0)
    assert Result(weights="w", steps={2: steps[2]}).equals(reference, after=1)


@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_damage_changes_a_file(tmp_path: Path, action: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    ACTIONS[action](path, Random(1))
    assert not path.exists() or path.read_bytes() != bytes(range(200))


def test_damage_is_repaired_from_a_copy(tmp_path: Path) -> None:
    run = SubjectRun(folder=tmp_path, case=SUPERVISED)
    run.data_dir.mkdir()
    (run.data_dir / "tokens.bin").write_bytes(b"tokens" * 50)
    damaged = damage_a_file(run, Random(2))
    assert damaged is not None
    assert damaged.is_data
    assert not damaged.path.exists() or damaged.path.read_bytes() != b"tokens" * 50
    damaged.repair()
    assert damaged.path.read_bytes() == b"tokens" * 50


def test_files_of_one_kind_differ_by_numbers() -> None:
    assert kind_of(Path("zero_pp_rank_0_mp_rank_00.pt")) == kind_of(Path("zero_pp_rank_1_mp_rank_00.pt"))
    assert kind_of(Path("failure_0123456789abcdef01.json")) == "failure_ID.json"


def test_campaigns_add_up(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    about = {"date": "2026-01-01", "commit": "abc", "hardware": "none", "command": "c", "minutes": 1.0, "seed": 1}
    kill = Tried(name="SIGKILL to a rank", where="", detail="", outcome="ended clearly", seconds=4.0)
    slow = Tried(name="a slow rank", where="", detail="", outcome="went on")
    file = Tried(name="truncated: mp_rank_N_model_states.pt", where="", detail="", outcome="went on")
    resumed = Tried(name="interrupted, deleted: tokens.idx", where="", detail="", outcome="went on")
    add_campaign(path, about, [kill, slow, resumed])
    lost = Tried(name="SIGKILL to a rank", where="somewhere", detail="rank 1", outcome="lost", seconds=9.0)
    campaigns = add_campaign(path, about, [lost, file])
    assert json.loads(path.read_text())["campaigns"] == campaigns
    assert campaigns[1]["lost"] == [{"name": "SIGKILL to a rank", "where": "somewhere", "detail": "rank 1"}]
    text = path.with_suffix(".md").read_text()
    assert "5 faults in 2 campaigns: 4 survived, 1 lost." in text
    assert "| SIGKILL to a rank | 2 | 0 | 1 | 1 | 9.0 |" in text
    assert "| before a start: checkpoint truncated | 1 | 1 | 0 | 0 |  |" in text
    assert "| before a `prepare` that resumes: a file deleted | 1 | 1 | 0 | 0 |  |" in text


def test_campaigns_that_are_not_added_up_stay_listed(tmp_path: Path) -> None:
    path = tmp_path / "campaigns.json"
    mended = {"date": "2026-11-23", "commit": "d", "seed": 2, "faults": 7, "lost": 1, "why": "a traceback (mended)"}
    path.write_text(json.dumps({"campaigns": [], "not_added_up": [mended]}))
    about = {"date": "2026-11-24", "commit": "c", "hardware": "h", "command": "x", "minutes": 1.0, "seed": 1}
    add_campaign(path, about, [Tried(name="a slow rank", where="", detail="", outcome="went on")])
    assert json.loads(path.read_text())["not_added_up"] == [mended]
    text = path.with_suffix(".md").read_text()
    assert "1 fault in 1 campaign: 1 survived, 0 lost." in text
    assert "| 2026-11-23 | `d` | 2 | 7 | 1 | a traceback (mended) |" in text


def test_what_moves_while_a_folder_is_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run renames the folder of a checkpoint when it is complete, between two looks at it."""
    (tmp_path / "checkpoints" / ".step_000060.partial" / "deep").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    scandir = os.scandir

    def moves_after(path: Any = ".") -> Any:
        found = scandir(path)
        if str(path).endswith("checkpoints"):
            shutil.rmtree(tmp_path / "checkpoints" / ".step_000060.partial")
        return found

    monkeypatch.setattr(os, "scandir", moves_after)
    assert tmp_path / "metrics.jsonl" in paths_below(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert listed(tmp_path / "checkpoints", ".step_*") == []


LEAVES_SOMETHING = """
import multiprocessing, socket, tempfile, time
from multiprocessing import resource_tracker
kept = multiprocessing.get_context("spawn").Lock()
resource_tracker.unregister(kept._semlock.name, "semaphore")
listening = socket.create_server(("127.0.0.1", 0))
tempfile.mkdtemp(prefix="pymp-")
tempfile.mkdtemp(prefix="torchelastic_")
print(kept._semlock.name.replace("/", "sem."), listening.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_what_a_process_leaves_is_named(tmp_path: Path) -> None:
    before = Traces.now(tmp_path, [], set())
    with (tmp_path.parent / f"{tmp_path.name}_said").open("w+") as said_by:
        command, environment = [sys.executable, "-c", LEAVES_SOMETHING], {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(command, env=environment, stdout=said_by)
        while not (words := (tmp_path.parent / f"{tmp_path.name}_said").read_text().split()):
            assert process.poll() is None
            time.sleep(0.05)
    name, port = words
    try:
        processes = [psutil.Process(process.pid)]
        assert name in mapped_names(processes)
        while_it_lives = Traces.now(tmp_path, processes, {name})
        assert name not in while_it_lives.shared
        said = "; ".join(while_it_lives.beyond(before))
        assert re.search(rf"ports 127\.0\.0\.1:{port}; temporary pymp-\w+; processes {process.pid} ", said), said
        process.kill()
        process.wait()
        left = left_behind(before, lambda: Traces.now(tmp_path, [], {name}), seconds=0.0)
        assert [one.partition("pymp-")[0] for one in left] == [f"shared {name}", "temporary "]
        assert left_behind(before, lambda: Traces.now(tmp_path, [], {name}), but="pymp-", seconds=0.0) == left[:1]
    finally:
        process.kill()
        Path("/dev/shm", name).unlink()


@pytest.mark.parametrize("name", SPOILS)
def test_a_fault_from_the_start_is_written_for_its_rank(name: str, tmp_path: Path) -> None:
    run = SubjectRun(folder=tmp_path, case=SUPERVISED)
    write_run(tmp_path, tmp_path / "topics.jsonl")
    said = set()
    for seed in range(20):
        spoil = write_spoil(run, Random(seed), after=50, name=name)
        wanted = json.loads((tmp_path / "spoil.json").read_text())
        said.add(spoil.says)
        arguments = [spoiled_arguments([str(run.run_file), "a=b"], wanted, rank=rank) for rank in (0, 1)]
        others = [str(tmp_path / "other.yaml"), "a=b"]
        same = [str(run.run_file), "a=b"]
        assert arguments == (
            [same, same] if name != OTHER_FILE else [same, others] if wanted["rank"] else [others, same]
        )
        assert name != OTHER_FILE or (tmp_path / "other.yaml").exists() == (spoil.says != "does not exist")
        assert name != NAN or 50 < wanted["step"] < 75
        if name == LONG_COMPILATION:
            assert HANG_TIMEOUT_SECONDS < wanted["seconds"] < START_TIMEOUT_SECONDS
            assert 51 < wanted["step"] < 54, "the campaign waits for four steps more"
    assert said == {NAN: {"bad_steps"}, SLOW_DISK: {None}, LONG_COMPILATION: {None}}.get(
        name, {"run.output_dir", "run.seed", "does not exist"}
    )


def test_a_slow_disk_slows_flushes_and_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in SLOW_CALLS:
        monkeypatch.setattr(os, call, getattr(os, call))  # so that it is put back
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    slow_the_disk(0.3)
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert slept == [0.3] * 3, "the file, its name, and the folder"


class FakeLife:
    """Two ranks with a child each."""

    def __init__(self, run: SubjectRun, step: int) -> None:
        self.run = run
        self._step = step
        script = "import subprocess; subprocess.run(['sleep', '600'])"
        self.processes = [psutil.Popen([sys.executable, "-c", script]) for _ in range(2)]
        while not all(process.children() for process in self.processes):
            time.sleep(0.02)
        self.families = [[process, *process.children()] for process in self.processes]

    def step(self) -> int:
        return self._step

    def ranks(self) -> list[psutil.Process]:
        return list(self.processes)

    def wait_until_frozen(self, *ranks: int) -> None:
        """Waits until these ranks and their children are stopped, and no others; signals take a moment."""
        wanted = [[rank in ranks] * 2 for rank in range(2)]
        deadline = time.monotonic() + 300.0
        while wanted != [[one.status() == psutil.STATUS_STOPPED for one in family] for family in self.families]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(("case", "numbers"), [(SUPERVISED, {1, 2}), (UNDER_TORCHRUN, {1})])
def test_frozen_ranks_are_stopped_with_their_children_and_must_be_named(
    tmp_path: Path, case: Case, numbers: set[int]
) -> None:
    """All ranks only where `evenpack train` watches."""
    life = FakeLife(SubjectRun(folder=tmp_path, case=case), step=3)
    found = set()
    try:
        for seed in range(8):
            injected = freeze_ranks(cast(Life, life), Random(seed))
            chosen = [int(number) for number in re.findall(r"\d", injected.detail.partition("]")[0])]
            life.wait_until_frozen(*chosen)
            found.add(len(chosen))
            require_said(end(said=f"rank {chosen[-1]} on node1 failed: no progress for 33 s"), injected.says)
            with pytest.raises(BrokenError, match="does not say"):
                require_said(end(said="rank 2 on node1 failed: no progress for 33 s"), injected.says)
            for process in (one for family in life.families for one in family):
                process.resume()
            life.wait_until_frozen()
        life._step = 0
        with pytest.raises(MissedError):
            freeze_ranks(cast(Life, life), Random(0))
    finally:
        for process in (one for family in life.families for one in family):
            process.kill()
        psutil.wait_procs(life.processes)
    assert found == numbers


class StandIn(Campaign):
    """A campaign that starts nothing."""

    def __init__(self) -> None:
        self._random = Random(1)
        self._say = lambda _text: None


def test_a_plan_is_followed_and_decides_which_start_is_spoilt(tmp_path: Path) -> None:
    run = SubjectRun(folder=tmp_path, case=SUPERVISED)
    write_run(tmp_path, tmp_path / "topics.jsonl")
    state = State(run=run, most_lives=3, plan=["SIGKILL to a rank", SLOW_DISK])
    assert (StandIn()._prepare_faults(state), next_of(state)) == ((None, None), "SIGKILL to a rank")
    state.add("SIGKILL to a rank", "training", "rank 0")
    damaged, spoil = StandIn()._prepare_faults(state)
    assert (damaged, next_of(state)) == (None, None)
    assert spoil is not None
    assert spoil.name == SLOW_DISK
    assert run.spoiled().case.stack == "deepspeed", "whose exit codes are then expected"
    assert "faults.spoiled_worker" in run.spoiled().command(spoiled=True)
    state.add(SLOW_DISK, "from the start", "")
    assert (StandIn()._prepare_faults(state), next_of(state)) == ((None, None), None)


@pytest.mark.parametrize("detail", [".writer", "run.json"])
def test_a_run_that_misses_a_deleted_file_at_its_next_save_has_ended_clearly(tmp_path: Path, detail: str) -> None:
    said = "error: /out/.writer cannot be read: No such file or directory; put it back"
    run = SimpleNamespace(case=SUPERVISED)
    life = SimpleNamespace(
        is_on=lambda: False,
        wait_for_end=lambda seconds: End(exit_code=2, seconds=1.0, said=said, orphans=()),
        step=lambda: 9,
        run=run,
    )
    state = State(run=cast(Any, run), most_lives=1)
    tried = state.add(A_FILE_DELETED, "starting", detail)
    campaign, told = object.__new__(Campaign), []
    campaign._say = told.append
    if detail == ".writer":
        assert not campaign._reaches_its_end(state, cast(Any, life))
        assert tried.outcome == "ended clearly"
        assert len(told) == 1
    else:  # that was another file
        with pytest.raises(BrokenError, match="although nothing disturbed it"):
            campaign._reaches_its_end(state, cast(Any, life))
