"""Why ranks waited, for `evenpack waits`: metrics.jsonl and run.json -> device hours by cause and rank, slow ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from evenpack.console import Report, text
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.engine.reporting.metrics import METRICS, named_if_damaged, read_metrics, trained_steps
from evenpack.engine.reporting.rank_waits import FIT_STEPS, LEARNING_STEPS, WARM_UP_STEPS, Kind
from evenpack.engine.reporting.run_record import StartRecord, read_run_record
from evenpack.errors import DataError
from evenpack.studies.columns import Column, table_of

HOUR = 3600.0
_KINDS: tuple[Kind, ...] = ("compute", "loader")
_TIMES = ("world_size", "step_seconds", "compute_seconds_mean", "compute_seconds_max", "loader_seconds")
"""Values without which it is not known where the time of a step went."""


@dataclass(frozen=True, kw_only=True)
class PartOfTime:
    """One part of the time of all devices in training steps."""

    name: str
    device_hours: float
    share: float
    """Share of the devices' time in the steps."""


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """What one rank did and waited, over the steps whose waits are split, of the last number of ranks."""

    rank: int
    host: str | None
    device: str | None
    cost_over_mean: float
    """Planned cost of its work, over the mean rank's."""
    hours: Mapping[str, float]
    """Hours that it waited, by cause."""
    waited_for_hours: float
    """Device hours that all others waited for it."""
    slowness: float
    """By how much more than the mean rank it needed for the same work, at the end."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A time in which a rank was slow."""

    rank: int
    host: str | None
    device: str | None
    kind: Kind
    since: int
    """The step in which it began, as estimated."""
    named: int
    """The step whose record names it first."""
    slow_by: float
    """By how much more than the others it took, as a share of their compute; by the last record of it."""
    ended: int | None
    """The step whose record no longer names it: it has recovered, or the run has started again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitsOfRun:
    """The waits of a run."""

    run: str
    output_dir: Path
    ranks: int
    steps: int
    """Steps that are logged with the times of ranks."""
    split_steps: int
    parts: tuple[PartOfTime, ...]
    """All of the time in steps: computing, the waits by cause, and the rest."""
    by_rank: tuple[RankRow, ...]
    episodes: tuple[Episode, ...]
    least_slowdown: float | None
    """Smallest slowdown of passes that is named on each rank, when it was last known; None before ranks are judged."""
    notes: tuple[str, ...]


def read_waits(output_dir: Path) -> WaitsOfRun:
    """Reads the waits of a run, also while it is on.

    Raises: DataError for a directory without a log, a damaged record, or a log without waits that are split, saying
    what would do.
    """
    path = require_log(output_dir)
    record = read_run_record(output_dir)
    records = trained_steps(read_metrics(path))
    split = [one for one in records if one.get("wait_plan_seconds") is not None]
    if not split:
        raise DataError(
            f"{path}: none of {len(records)} steps has its waits by cause, which are known of several ranks, from step "
            f"{WARM_UP_STEPS + FIT_STEPS + 1} of a start on, and at deepspeed.zero_stage 0 and 1: at 2 and 3 each "
            "backward pass waits for the other ranks within"
        )
    with named_if_damaged(path):
        ranks = int(split[-1]["world_size"])
        starts = () if record is None else record.starts
        gathered = [one for one in split if _lists_waits_of(one.get("ranks") or {}, ranks)]
        by_rank = _by_rank(gathered, starts, ranks)
        least_slowdowns = [one["ranks"]["compute_least_slowdown"] for one in gathered]
        timed = [one for one in records if all(one.get(name) is not None for name in _TIMES)]
        return WaitsOfRun(
            run=output_dir.name if record is None else str(record.config["run"]["name"]),
            output_dir=output_dir,
            ranks=ranks,
            steps=len(timed),
            split_steps=len(split),
            parts=_parts(timed),
            by_rank=by_rank,
            episodes=_episodes(gathered, starts, ranks),
            least_slowdown=next((max(each) for each in reversed(least_slowdowns) if None not in each), None),
            notes=tuple(_notes(split, by_rank)),
        )


def require_log(output_dir: Path) -> Path:
    """Returns the path of a run's log, which may be empty yet. Raises: DataError if there is none."""
    path = output_dir / METRICS
    if not path.is_file():
        raise DataError(
            f"{output_dir} holds no {METRICS}: give the output_dir of a run that was started, or its run file"
        )
    return path


def _place(starts: Sequence[StartRecord], rank: int, *, ranks: int, step: int) -> dict[str, str | None]:
    """Returns the host and the device of a rank in a step."""
    known = (one.places[rank] for one in reversed(starts) if len(one.places) == ranks and one.steps_done < step)
    place = next(known, None)
    if place is None:
        return {"host": None, "device": None}
    return {"host": place.host, "device": f"{place.device}, {place.model}"}


def _lists_waits_of(values: Mapping[str, Any], ranks: int) -> bool:
    """Whether the values by rank of a record have those of waits, for so many ranks."""
    return bool(values.get("split_steps")) and len(values["waited_for_seconds"]) == ranks


def _parts(records: Sequence[Mapping[str, Any]]) -> tuple[PartOfTime, ...]:
    """Returns the device hours of each part, which add up to the time of all devices in the steps."""
    hours = dict.fromkeys(("forward and backward", *WAIT_CAUSES, "not split", "all-reduce, update and records"), 0.0)
    for one in records:
        per_second = one["world_size"] / HOUR
        compute = one["compute_seconds_mean"]
        if one.get("wait_plan_seconds") is None:
            waits = {"not split": one["compute_seconds_max"] - compute + one["loader_seconds"]}
        else:
            waits = {cause: one[f"wait_{cause}_seconds"] for cause in WAIT_CAUSES}
        rest = one["step_seconds"] - compute - sum(waits.values())
        for name, seconds in {"forward and backward": compute, **waits, "all-reduce, update and records": rest}.items():
            hours[name] += per_second * seconds
    total = sum(hours.values())
    return tuple(PartOfTime(name=name, device_hours=each, share=each / total) for name, each in hours.items())


def _by_rank(gathered: Sequence[Mapping[str, Any]], starts: Sequence[StartRecord], ranks: int) -> tuple[RankRow, ...]:
    if not gathered:
        return ()

    def summed(name: str) -> Any:
        return np.array([one["ranks"][name] for one in gathered], dtype=np.float64).sum(axis=0)

    cost, waited_for = summed("cost"), summed("waited_for_seconds")
    seconds = {cause: summed(f"wait_{cause}_seconds") for cause in WAIT_CAUSES}
    slowness = gathered[-1]["ranks"]["slowness"]
    return tuple(
        RankRow(
            rank=rank,
            **_place(starts, rank, ranks=ranks, step=gathered[-1]["step"]),
            cost_over_mean=float(cost[rank] / cost.mean()) if cost.any() else 1.0,
            hours={cause: float(values[rank]) / HOUR for cause, values in seconds.items()},
            waited_for_hours=float(waited_for[rank]) / HOUR,
            slowness=slowness[rank],
        )
        for rank in range(ranks)
    )


def _episodes(gathered: Sequence[Mapping[str, Any]], starts: Sequence[StartRecord], ranks: int) -> tuple[Episode, ...]:
    """Returns the times in which ranks were slow, in the order in which they were named."""
    found = []
    for kind, rank in product(_KINDS, range(ranks)):
        by_since = groupby(gathered, lambda one: one["ranks"][f"{kind}_slow_since"][rank])  # noqa: B023  # used here
        stretches = [(since, [*records]) for since, records in by_since]
        for (since, records), (_, following) in zip(stretches, [*stretches[1:], (None, [])], strict=False):
            if since is None:
                continue
            named, last = records[0]["step"], records[-1]
            found.append(
                Episode(
                    rank=rank,
                    **_place(starts, rank, ranks=ranks, step=named),
                    kind=kind,
                    since=since,
                    named=named,
                    slow_by=last["ranks"][f"{kind}_slow_by"][rank],
                    ended=following[0]["step"] if following else None,
                )
            )
    return tuple(sorted(found, key=lambda one: one.named))


def _notes(split: Sequence[Mapping[str, Any]], by_rank: Sequence[RankRow]) -> Iterator[str]:
    if len({one["world_size"] for one in split}) > 1:
        yield f"The run had other numbers of ranks before: tables of ranks are of the last, {split[-1]['world_size']}."
    if not by_rank:
        yield (
            "No values of single ranks are logged (training.log_rank_times_every_steps is null, or its first record is "
            "still to come): which of them were slow is not known."
        )


MOST_RANKS = 32
"""Ranks that the table shows; of more, those for which the others waited longest."""

_PARTS = (
    Column("time in steps", "name"),
    Column("device hours", "device_hours", ",.4g"),
    Column("share", form=".2%"),
)
_OF_RANK = (
    Column("rank"),
    Column("host", missing="not recorded"),
    Column("cost / mean", "cost_over_mean", ".4f"),
    *(Column(f"{cause}, h", f"hours.{cause}", ",.4g") for cause in WAIT_CAUSES),
    Column("waited for, h", "waited_for_hours", ",.4g"),
    Column("slower by", "slowness", "+.1%"),
)
_OF_EPISODE = (
    Column("rank"),
    Column("host", missing="not recorded"),
    Column("device", missing="not recorded"),
    Column("slow in", lambda one: {"compute": "its passes", "loader": "its batches"}[one.kind]),
    Column("since step", "since", ",d"),
    Column("named at", "named", ",d"),
    Column("slower by", "slow_by", "+.1%"),
    Column("until", "ended", ",d", missing="the end"),
)


def explain_waits(output_dir: Path) -> Report:
    """Returns the waits of a run. Raises: as `read_waits`."""
    found = read_waits(output_dir)
    return Report(value=found, shown=waits_tables(found))


def waits_tables(found: WaitsOfRun) -> list[RenderableType]:
    """Returns the parts of the time, the slow ranks, each rank and the notes."""
    title = f"{found.run}: {found.ranks} ranks, {found.steps:,} steps, {found.split_steps:,} split by cause"
    shown: list[RenderableType] = [table_of(found.parts, _PARTS, title=title)]
    if found.episodes:
        shown.append(table_of(found.episodes, _OF_EPISODE, title="Ranks that were slow"))
    elif found.least_slowdown is not None:
        shown.append(
            text(f"No rank was slow: passes that take {found.least_slowdown:.1%} longer or more would be named.")
        )
    elif found.by_rank:
        learned = f"each first learns how it varies, from {LEARNING_STEPS} steps that are split"
        shown.append(text(f"No rank has been judged yet: {learned}."))
    if found.by_rank:
        most = sorted(found.by_rank, key=lambda row: row.waited_for_hours, reverse=True)[:MOST_RANKS]
        count = len(found.by_rank)
        of = "Each rank" if count <= MOST_RANKS else f"The {MOST_RANKS} of {count:,} ranks most waited for"
        title = f"{of}: hours that it waited by cause, and that all others waited for it"
        shown.append(table_of(sorted(most, key=lambda row: row.rank), _OF_RANK, title=title))
    return [*shown, *map(text, found.notes)]
