"""Logs become device hours by cause and by rank, slow ranks by host and device, and reasons where they cannot."""

import json
from pathlib import Path
from typing import Any

import pytest
import run_records
from run_records import run_record

from evenpack.engine.reporting.definitions import find_metric, values_of
from evenpack.engine.reporting.run_record import RUN_RECORD, Place, StartRecord
from evenpack.errors import DataError
from evenpack.studies.waits import WaitsOfRun, explain_waits, read_waits, waits_tables

RANKS, EVERY = 4, 50
CONFIG: dict[str, Any] = {
    "run": {"name": "watched"},
    "training": {"layout": "packed", "batching": "packs", "assignment": None},
    "deepspeed": {"zero_stage": 1},
}
CAUSES = {"plan": 0.03, "machine": 0.12, "noise": 0.05, "loader": 0.1}
"""Seconds of each step, of the mean rank."""


def place(rank: int, model: str = "H100") -> Place:
    return Place(host=f"node{rank // 2}", device=f"cuda:{rank % 2}", model=model)


def start(steps_done: int = 0, models: tuple[str, ...] = ("H100",) * RANKS) -> StartRecord:
    places = tuple(place(rank, model) for rank, model in enumerate(models))
    return run_records.start(steps_done=steps_done, ranks=len(models), device=models[0], places=places)


def record(step: int, *, ranks: int = RANKS, is_split: bool = True) -> dict[str, Any]:
    """Returns a step of 2 s: 1 s of passes, 0.3 s of waits, 0.7 s of the rest."""
    waits = {f"wait_{cause}_seconds": seconds for cause, seconds in CAUSES.items()} | {"slow_ranks": 0}
    return {
        "step": step,
        "loss": 2.0,
        "tokens": 100,
        "slots": 100,
        "world_size": ranks,
        "step_seconds": 2.0,
        "loader_seconds": 0.06,
        "compute_seconds_mean": 1.0,
        "compute_seconds_max": 1.2,
        **(waits if is_split else {}),
    }


def lists(slow: dict[int, int], by: float = 0.2, *, kind: str = "compute", split: int = EVERY) -> dict[str, Any]:
    """Returns the values by rank of a record, with the steps since which ranks are slow."""
    none = [None] * RANKS
    other = "loader" if kind == "compute" else "compute"
    return {
        "steps": split,
        "split_steps": split,
        "cost": [9.0, 11.0, 10.0, 10.0],
        **{f"wait_{cause}_seconds": [36.0 * seconds] * RANKS for cause, seconds in CAUSES.items()},
        "waited_for_seconds": [0.0, 0.0, 0.0, 72.0],
        "slowness": [0.0, 0.0, -0.01, 0.15],
        f"{kind}_slow_since": [slow.get(rank) for rank in range(RANKS)],
        f"{kind}_slow_by": [by if rank in slow else None for rank in range(RANKS)],
        f"{other}_slow_since": none,
        f"{other}_slow_by": none,
        "compute_least_slowdown": [0.05, 0.06, 0.05, 0.05],
        "loader_least_slowdown": [0.05] * RANKS,
    }


def write(
    folder: Path,
    records: list[dict[str, Any]],
    *,
    starts: tuple[StartRecord, ...] | None = (start(),),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    if starts is not None:
        (folder / RUN_RECORD).write_text(run_record(*starts, config=CONFIG).model_dump_json())
    return folder


def watched(steps: dict[int, dict[str, Any]], *, last: int = 300) -> list[dict[str, Any]]:
    """Returns the records of a run, those of some steps with values by rank."""
    records = [record(step, is_split=step > 30) for step in range(1, last + 1)]
    for step, values in steps.items():
        records[step - 1]["ranks"] = values
    return records


def parts_of(found: WaitsOfRun) -> dict[str, float]:
    return {part.name: part.device_hours * 3600.0 / RANKS for part in found.parts}


def test_the_time_of_all_devices_is_split_without_a_rest(tmp_path: Path) -> None:
    found = read_waits(write(tmp_path, watched({100: lists({})}, last=130)))
    assert (found.run, found.ranks, found.steps, found.split_steps) == ("watched", RANKS, 130, 100)
    assert parts_of(found) == pytest.approx(
        {
            "forward and backward": 130.0,
            **{cause: 100 * seconds for cause, seconds in CAUSES.items()},
            "not split": 30 * (0.2 + 0.06),
            "all-reduce, update and records": 130 * 2.0 - 130 - 30 - 30 * 0.26,
        }
    )
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)


def test_each_rank_has_its_place_its_work_and_whom_the_others_waited_for(tmp_path: Path) -> None:
    found = read_waits(write(tmp_path, watched({100: lists({}), 150: lists({})})))
    last = found.by_rank[3]
    assert (last.host, last.device) == ("node1", "cuda:1, H100")
    assert last.waited_for_hours == pytest.approx(2 * 72.0 / 3600.0)
    assert found.by_rank[1].cost_over_mean == pytest.approx(1.1)
    assert last.hours == pytest.approx({cause: 2 * seconds / 100 for cause, seconds in CAUSES.items()})
    assert sum(last.hours.values()) == pytest.approx(2 * sum(CAUSES.values()) / 100)


def test_slow_ranks_are_named_from_when_to_when_and_by_how_much(tmp_path: Path) -> None:
    steps = {
        150: lists({}),
        172: lists({3: 160}, 0.1),
        200: lists({3: 160}, 0.2),
        230: lists({3: 160, 0: 210}, 0.3),
        250: lists({0: 210}, 0.4),
        300: lists({0: 210}, 0.5),
    }
    found = read_waits(write(tmp_path, watched(steps)))
    one, other = found.episodes
    assert (one.rank, one.host, one.since, one.named, one.ended) == (3, "node1", 160, 172, 250)
    assert (other.rank, other.since, other.named, other.ended) == (0, 210, 230, None)
    assert (one.slow_by, other.slow_by) == (0.3, 0.5)


def test_a_rank_that_waits_for_its_batches_is_named_in_that_kind(tmp_path: Path) -> None:
    steps = {150: lists({2: 140}, kind="loader"), 200: lists({}, kind="loader")}
    (one,) = read_waits(write(tmp_path, watched(steps))).episodes
    assert (one.kind, one.ended) == ("loader", 200)


def test_a_rank_that_was_slow_before_a_restart_is_named_with_the_host_it_had_then(tmp_path: Path) -> None:
    steps = {150: lists({2: 140}), 260: lists({2: 240})}
    moved = tuple(place(rank).model_copy(update={"host": "node9"}) for rank in range(RANKS))
    starts = (start(), start(150).model_copy(update={"places": moved}))
    found = read_waits(write(tmp_path, watched(steps), starts=starts))
    assert [(one.host, one.named) for one in found.episodes] == [("node1", 150), ("node9", 260)]
    assert found.by_rank[2].host == "node9"
    assert found.by_rank[2].device == "cuda:0, H100"


def test_a_log_alone_is_explained_without_hosts(tmp_path: Path) -> None:
    run = write(tmp_path / "run", watched({100: lists({3: 90})}), starts=None)
    found = read_waits(run)
    assert [(row.rank, row.host) for row in found.by_rank] == [(rank, None) for rank in range(RANKS)]
    assert found.episodes[0].host is None


def test_steps_without_times_of_ranks_are_left_out(tmp_path: Path) -> None:
    records = watched({100: lists({})})
    for one in records[:20]:
        del one["compute_seconds_mean"], one["compute_seconds_max"]
    found = read_waits(write(tmp_path, records))
    assert (found.steps, found.split_steps) == (280, 270)
    assert sum(parts_of(found).values()) == pytest.approx(2.0 * 280)


def test_without_values_of_ranks_or_places_the_rest_is_shown_and_said(tmp_path: Path) -> None:
    bare = start().model_copy(update={"places": ()})
    found = read_waits(write(tmp_path, watched({}), starts=(bare,)))
    assert (found.by_rank, found.episodes) == ((), ())
    assert "training.log_rank_times_every_steps is null" in found.notes[0]
    assert parts_of(found)["plan"] == pytest.approx(270 * CAUSES["plan"])


@pytest.mark.parametrize("steps", [0, 1])
def test_a_log_without_waits_says_what_would_do(steps: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"none of {steps} steps has .* from step 31 of .*zero_stage 0 and 1"):
        read_waits(write(tmp_path, [record(step, is_split=False) for step in range(1, steps + 1)]))


def test_ranks_that_are_not_judged_yet_are_told_from_ranks_that_are_not_slow(tmp_path: Path) -> None:
    learning = lists({}) | {"compute_least_slowdown": [None] * RANKS}
    judged_before = {250: lists({}), 300: learning}  # and started again since
    for name, steps, words in (("learning", {100: learning}, "judged yet"), ("judged", judged_before, "6.0% longer")):
        (said,) = [
            str(one) for one in waits_tables(read_waits(write(tmp_path / name, watched(steps)))) if "No" in str(one)
        ]
        assert words in said


def test_tables_of_ranks_name_the_number_of_ranks_that_they_are_of(tmp_path: Path) -> None:
    before = [record(step, ranks=2) for step in range(1, 101)]
    found = read_waits(write(tmp_path, [*before, *watched({100: lists({})})[30:]]))
    (note,) = found.notes
    assert "tables of ranks are of the last, 4" in note


def test_a_directory_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl: give the output_dir"):
        read_waits(tmp_path)


def test_the_command_shows_tables(tmp_path: Path) -> None:
    report = explain_waits(write(tmp_path / "run", watched({150: lists({}), 200: lists({3: 180})})))
    parts, slow, ranks = report.shown
    assert [parts.row_count, slow.row_count, ranks.row_count] == [7, 1, RANKS]
    assert report.value.episodes[0].rank == 3


def test_every_value_that_is_read_is_a_metric() -> None:
    whole = record(1) | {"ranks": lists({})}
    assert {find_metric(path).name for path, _ in values_of(whole)}
