"""A run's metrics.jsonl and run.json -> the device hours that its ranks waited, and the ranks that were slow."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.data.order.step_shape import default_policy
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.engine.reporting.metrics import METRICS, read_metrics, trained_steps
from evenpack.engine.reporting.rank_waits import FIT_STEPS, WARM_UP_STEPS, Kind
from evenpack.engine.reporting.run_record import Place, RunRecord, StartRecord, read_run_record
from evenpack.errors import ConfigError, DataError
from evenpack.files import read_json

HOUR = 3600.0
_KINDS: tuple[Kind, ...] = ("compute", "loader")
_TIMES = ("world_size", "step_seconds", "compute_seconds_mean", "compute_seconds_max", "loader_seconds")
"""Values without which it is not known where the time of a step went."""
_MOST_GROUPS = 8
End = Literal["recovered", "restarted", "lasts"]


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
    """The step whose record no longer names it."""
    end: End


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the replay on one device says of such a run."""

    file: str
    measured_on: str
    wait_share: float
    """Fraction of the devices' time that the mean rank waits for the slowest, all devices being alike."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitsOfRun:
    """The waits of a run."""

    run: str
    output_dir: Path
    ranks: int
    steps: int
    split_steps: int
    parts: tuple[PartOfTime, ...]
    """All of the time in steps: computing, the waits by cause, and the rest."""
    by_rank: tuple[RankRow, ...]
    episodes: tuple[Episode, ...]
    least_slowdown: float | None
    """Smallest slowdown of any rank's compute that is named; None before it is learned."""
    prediction: Prediction | None
    notes: tuple[str, ...]

    @property
    def slowest_share(self) -> float:
        """Returns the share of time that the mean rank waited for the slowest pass, by the plan, machines and noise."""
        causes = {part.name: part.share for part in self.parts}
        return sum(causes[name] for name in WAIT_CAUSES if name != "loader")


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitCourse:
    """The steps whose waits are split, for a figure."""

    steps: Int64[np.ndarray, " n"]
    shares: Mapping[str, Float64[np.ndarray, " n"]]
    """Share of each step's time that the mean rank waited, by cause."""
    hours: Mapping[str, Float64[np.ndarray, " n"]]
    """Device hours that all ranks lost in each step, by cause."""


def read_waits(output_dir: Path, *, replay: Path | None = None) -> tuple[WaitsOfRun, WaitCourse]:
    """Reads the waits of a run, also while it is on.

    Args:
        replay: what `study imbalance --replay --save` has written of the same run.

    Raises: DataError for a directory without a log, a log without waits that are split (saying what would do), or a
    file that is no replay; ConfigError for a replay without as many devices.
    """
    path = require_log(output_dir)
    record = read_run_record(output_dir)
    records = trained_steps(read_metrics(path))
    split = split_steps(records)
    if not split:
        raise DataError(f"{path}: {_why_nothing_is_split(records, record)}")
    ranks = int(split[-1]["world_size"])
    starts = () if record is None else record.starts
    gathered = [one for one in split if _lists(one, ranks) is not None]
    by_rank = _by_rank(gathered, starts, ranks)
    timed = [one for one in records if all(one.get(name) is not None for name in _TIMES)]
    found = WaitsOfRun(
        run=output_dir.name if record is None else str(record.config["run"]["name"]),
        output_dir=output_dir,
        ranks=ranks,
        steps=len(records),
        split_steps=len(split),
        parts=_parts(timed),
        by_rank=by_rank,
        episodes=tuple(_episodes(gathered, starts, ranks)),
        least_slowdown=_least_slowdown(gathered),
        prediction=None if replay is None else _prediction(replay, record, ranks),
        notes=tuple(_notes(split, by_rank, starts, ranks, untimed=len(records) - len(timed))),
    )
    return found, wait_course(split)


def require_log(output_dir: Path) -> Path:
    """Returns the path of a run's log, which may be empty yet. Raises: DataError if there is none."""
    path = output_dir / METRICS
    if not path.is_file():
        raise DataError(
            f"{output_dir} holds no {METRICS}: give the output_dir of a run that was started, or its run file"
        )
    return path


def split_steps(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the records of the steps whose waits are split by cause."""
    return [one for one in records if one.get("wait_plan_seconds") is not None]


def wait_course(records: Sequence[Mapping[str, Any]]) -> WaitCourse:
    """Returns the waits of the steps in which they are split."""

    def values_of(name: str) -> Float64[np.ndarray, " n"]:
        return np.array([one[name] for one in records], dtype=np.float64)

    seconds, ranks = values_of("step_seconds"), values_of("world_size")
    waits = {cause: values_of(f"wait_{cause}_seconds") for cause in WAIT_CAUSES}
    return WaitCourse(
        steps=np.array([one["step"] for one in records], dtype=np.int64),
        shares={cause: values / seconds for cause, values in waits.items()},
        hours={cause: values * ranks / HOUR for cause, values in waits.items()},
    )


def _place(starts: Sequence[StartRecord], rank: int, *, ranks: int, steps: Sequence[int]) -> dict[str, str | None]:
    """Returns the host and the device of a rank in these steps; each of them, if restarts changed it."""
    ends = [*(start.first_step for start in starts[1:]), math.inf]
    places = [
        start.places[rank]
        for start, end in zip(starts, ends, strict=False)
        if len(start.places) == ranks and any(start.first_step < step <= end for step in steps)
    ]
    devices = (f"{place.device}, {place.model}" for place in places)
    return {"host": _joined(place.host for place in places), "device": _joined(devices)}


def _joined(names: Iterable[str]) -> str | None:
    return ", then ".join(name for name, _ in groupby(names)) or None


def _why_nothing_is_split(records: Sequence[Mapping[str, Any]], record: RunRecord | None) -> str:
    if not records:
        return "there is no step yet"
    sizes = {one.get("world_size") for one in records}
    if sizes == {1}:
        return "the run has one rank, which waits for nobody; `evenpack report` shows how long it waits for its batches"
    stage = None if record is None else record.config.get("deepspeed", {}).get("zero_stage")
    if stage in (2, 3):
        return (
            f"the run is at ZeRO {stage}, where each backward pass waits for the other ranks within, so that times of "
            "ranks do not say who was slow. Train some hundred steps at deepspeed.zero_stage=1 on them to see it"
        )
    first = WARM_UP_STEPS + FIT_STEPS + 1
    if len(records) < first:
        return (
            f"{len(records)} steps are logged, and waits are split from step {first} of a start on, when the cost of "
            "work is known: let it train for longer"
        )
    return (
        "its records have no times of ranks by cause: an earlier version made them, or each start had fewer "
        f"than {first} steps. Train some hundred steps again; `study imbalance` shows the wait as a whole"
    )


def _lists(record: Mapping[str, Any], ranks: int) -> Mapping[str, Any] | None:
    """Returns the values by rank of a record, if it has those of waits, for so many ranks."""
    found = record.get("ranks") or {}
    return found if found.get("split_steps") and len(found["waited_for_seconds"]) == ranks else None


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

    def summed(name: str) -> Float64[np.ndarray, " ranks"]:
        values: Float64[np.ndarray, "records ranks"] = np.array(
            [one["ranks"][name] for one in gathered], dtype=np.float64
        )
        return np.asarray(values.sum(axis=0))

    cost, waited_for = summed("cost"), summed("waited_for_seconds")
    seconds = {cause: summed(f"wait_{cause}_seconds") for cause in WAIT_CAUSES}
    slowness = gathered[-1]["ranks"]["slowness"]
    steps = [one["step"] for one in gathered]
    return tuple(
        RankRow(
            rank=rank,
            **_place(starts, rank, ranks=ranks, steps=steps),
            cost_over_mean=float(cost[rank] / cost.mean()) if cost.any() else 1.0,
            hours={cause: float(values[rank]) / HOUR for cause, values in seconds.items()},
            waited_for_hours=float(waited_for[rank]) / HOUR,
            slowness=slowness[rank],
        )
        for rank in range(ranks)
    )


def _episodes(gathered: Sequence[Mapping[str, Any]], starts: Sequence[StartRecord], ranks: int) -> Iterator[Episode]:
    """Yields the times in which ranks were slow, in the order in which they were named."""
    found: list[Episode] = []
    open_ones: dict[tuple[int, Kind], int] = {}
    for before, record in zip([None, *gathered], gathered, strict=False):
        step, lists = record["step"], record["ranks"]
        is_new_start = before is not None and any(before["step"] <= start.first_step < step for start in starts)
        for kind in _KINDS:
            for rank, since in enumerate(lists[f"{kind}_slow_since"]):
                index = open_ones.get((rank, kind))
                if index is not None and found[index].since != since:
                    end: End = "restarted" if is_new_start else "recovered"
                    found[index] = replace(found[index], ended=step, end=end)
                    del open_ones[rank, kind]
                    index = None
                if since is None:
                    continue
                if index is None:
                    open_ones[rank, kind] = index = len(found)
                    found.append(
                        Episode(
                            rank=rank,
                            **_place(starts, rank, ranks=ranks, steps=[step]),
                            kind=kind,
                            since=since,
                            named=step,
                            slow_by=0.0,
                            ended=None,
                            end="lasts",
                        )
                    )
                found[index] = replace(found[index], slow_by=lists[f"{kind}_slow_by"][rank])
    yield from found


def _least_slowdown(gathered: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the largest of the ranks' smallest slowdowns: from there on each rank is judged."""
    known = [one for one in gathered[-1]["ranks"]["compute_least_slowdown"] if one is not None] if gathered else []
    return max(known, default=None)


def _prediction(path: Path, record: RunRecord | None, ranks: int) -> Prediction:
    """Reads what a replay says of the run's layout, policy and number of ranks."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the replay {path}: {error}; give a file of --save") from error
    replayed = found.get("replay") if isinstance(found, dict) else None
    if not isinstance(replayed, dict) or not isinstance(replayed.get("rows"), list):
        raise DataError(
            f"{path} holds no replay: make one by `evenpack study imbalance RUN.yaml --replay {ranks} --save FILE.json`"
        )
    if record is None:
        raise ConfigError(f"--replay {path}: the run has no run.json, so its layout and assignment are not known")
    training = record.config["training"]
    layout = training["layout"]
    policy = training["assignment"] or default_policy(training["batching"], layout)
    rows = [row for row in replayed["rows"] if (row["layout"], row["policy"]) == (layout, policy)]
    row = next((row for row in rows if row["devices"] == ranks), None)
    if row is None:
        known = ", ".join(str(row["devices"]) for row in rows) or "no number of"
        raise ConfigError(
            f"--replay {path} has {known} devices for {layout} {policy}, and the run has {ranks}: replay with "
            f"`--replay {ranks}`"
        )
    on = replayed["measured_on"]
    return Prediction(file=path.name, measured_on=f"{on['model']}, one {on['device']}", wait_share=row["wait_share"])


def _notes(
    split: Sequence[Mapping[str, Any]],
    by_rank: Sequence[RankRow],
    starts: Sequence[StartRecord],
    ranks: int,
    *,
    untimed: int,
) -> Iterator[str]:
    if untimed:
        yield (
            f"{untimed:,} steps are logged without the times of ranks ({', '.join(_TIMES[1:])}), as by an earlier "
            "version: they are left out of the device hours."
        )
    sizes = list(dict.fromkeys(one["world_size"] for one in split))
    if len(sizes) > 1:
        yield (
            f"The run had {', '.join(map(str, sizes))} ranks, one number after another: the table by rank is of the "
            f"last {ranks}."
        )
    if not by_rank:
        yield (
            "No values of single ranks are logged (training.log_rank_times_every_steps is null, or its first record is "
            "still to come): who was waited for is not known."
        )
    unlike = [start for start in starts if start.unlike]
    if unlike:
        since = "" if unlike[-1] is starts[-1] else f", in the start from step {unlike[-1].first_step}"
        yield (
            f"The devices differ ({_kinds_of_ranks(unlike[-1].places)}{since}): each rank is compared with its own "
            "first steps, so one that is slower from the start on is not named; what the others wait for it is counted "
            "as machine. Train on devices of one kind to have them compared with one another."
        )
    if not starts or not starts[-1].places:
        why = "an earlier version started the run" if starts else "there is no run.json beside the log"
        yield f"Hosts and devices are not recorded, so ranks have numbers alone, and may be of unlike devices: {why}."


def _kinds_of_ranks(places: Sequence[Place]) -> str:
    """Returns the kinds of devices, each with its ranks; of many groups of ranks the first ones."""
    groups = [
        (model, [rank for rank, _ in group])
        for model, group in groupby(enumerate(places), lambda ranked: ranked[1].model)
    ]
    named = [
        f"{model}: rank{'s' if len(ranks) > 1 else ''} {ranks[0]}{f' to {ranks[-1]}' if len(ranks) > 1 else ''}"
        for model, ranks in groups
    ]
    return "; ".join([*named[:_MOST_GROUPS], *(["and so on"] if len(named) > _MOST_GROUPS else [])])
