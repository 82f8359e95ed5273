"""The campaign notices what it looks for: its judgement, its damage, and how campaigns are added up."""

import json
from pathlib import Path
from random import Random

import pytest

from faults.at_rest import ACTIONS, damage_a_file, kind_of
from faults.life import End
from faults.report import add_campaign
from faults.subject import CASES, Result, SubjectRun
from faults.tried import BrokenError, Tried, require_clear, require_saved

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
