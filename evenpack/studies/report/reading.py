"""Output directories of runs -> what a report draws of each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.engine.reporting.save_cost import save_totals
from evenpack.errors import ConfigError, DataError
from evenpack.files import read_json_object

SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Course:
    """Holds a run step by step; missing values are NaN."""

    steps: Int64[np.ndarray, " n"]
    tokens: Float64[np.ndarray, " n"]
    """Number of real tokens so far."""
    slots: Float64[np.ndarray, " n"]
    """Number of slots so far, padding included."""
    seconds: Float64[np.ndarray, " n"]
    """Time in steps so far; evaluation and saving are left out."""
    loss: Float64[np.ndarray, " n"]
    """Loss in nats/token; of masked tokens alone, where there are next sentences too."""
    tokens_per_second: Float64[np.ndarray, " n"]
    padding_share: Float64[np.ndarray, " n"]
    loader_share: Float64[np.ndarray, " n"]
    """Share of the step's time that a rank waited for its batches, on average."""
    straggler_share: Float64[np.ndarray, " n"]
    """Share of the slowest rank's forward and backward passes that the average rank is idle."""
    validation: Mapping[str, tuple[Int64[np.ndarray, " m"], Float64[np.ndarray, " m"]]]
    """Places in the arrays above and losses in nats/token, for each source."""


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """Holds a run as a report shows it."""

    label: str
    """Name of the run, or the end of its path where names are not recorded or not different."""
    output_dir: Path
    record: RunRecord | None
    """What run.json holds; None for a run of a version that wrote none."""
    state: str
    has_two_losses: bool
    """Whether it learns next sentences beside tokens."""
    unread_lines: int
    """Number of lines in its log that are broken or not written to their end."""
    missing_steps: int
    """Number of steps before the last that the log lacks."""
    saves: Mapping[str, Any]
    """What saving has cost, as in the summary, or by the log alone while there is no summary of its last step."""
    course: Course

    @property
    def tokens_per_step(self) -> float:
        """Returns the mean number of real tokens of a step; skipped steps, which have none, are left out."""
        steps = np.count_nonzero(np.diff(self.course.tokens, prepend=0.0))
        return float(self.course.tokens[-1]) / steps if steps else 0.0


def read_runs(output_dirs: Sequence[Path], *, is_held: Callable[[Path], bool]) -> tuple[ReportedRun, ...]:
    """Reads what the runs have logged, also while they are on.

    Args:
        is_held: whether a run is writing into a directory now.

    Raises: ConfigError for a run that is named twice; DataError for a directory without a log, a broken run.json, or if
    no run has a step.
    """
    places = [path.resolve() for path in output_dirs]
    for place, path in zip(places, output_dirs, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{path} is named twice: name each run once")
    records = [read_run_record(path) for path in output_dirs]
    names = [record.config["run"]["name"] for record in records if record is not None]
    labels = names if len(set(names)) == len(places) else _ends_of(places)
    runs = tuple(
        _read_run(path, label, record, is_running=is_held(path))
        for path, label, record in zip(output_dirs, labels, records, strict=True)
    )
    if not any(len(run.course.steps) for run in runs):
        raise DataError(
            f"no step yet in {', '.join(str(run.output_dir / METRICS) for run in runs)}: there is nothing to report "
            "before a run has done its first step"
        )
    return runs


def _read_run(output_dir: Path, label: str, record: RunRecord | None, *, is_running: bool) -> ReportedRun:
    path = output_dir / METRICS
    if not path.is_file():
        raise DataError(
            f"{output_dir} holds no {METRICS}: give the output_dir of a run that was started, or its run file"
        )
    records = read_metrics(path)
    summary = _summary(output_dir, records)
    with path.open("rb") as file:
        unread = sum(1 for _ in file) - len(records)
    return ReportedRun(
        label=label,
        output_dir=output_dir,
        record=record,
        state=_state(summary, records, is_running=is_running),
        has_two_losses=any("token_loss" in record for record in records),
        unread_lines=unread,
        missing_steps=records[-1]["step"] - len({record["step"] for record in records}) if records else 0,
        saves=(summary or {}).get("checkpoints") or save_totals(records, ()),
        course=course_of(records),
    )


def _summary(output_dir: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the summary of the run's last step; None if there is none, or only that of an earlier start."""
    summary = read_json_object(output_dir / SUMMARY) if records else None
    return summary if summary is not None and summary.get("step") == records[-1]["step"] else None


def _ends_of(places: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ."""
    for depth in range(1, 1 + max(len(place.parts) for place in places)):
        labels = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError("places that differ have names that differ")


def _state(summary: Mapping[str, Any] | None, records: Sequence[Mapping[str, Any]], *, is_running: bool) -> str:
    if is_running:
        return "running"
    if not records:
        return "no step yet"
    if summary is None:
        return "ended without a summary"
    steps, target = summary.get("steps"), summary.get("target")
    is_reached = isinstance(target, dict) and bool(target.get("reached"))
    is_short = isinstance(steps, int) and records[-1]["step"] < steps and not is_reached
    return "stopped" if is_short else str(summary.get("state"))


def course_of(records: Sequence[Mapping[str, Any]]) -> Course:
    """Returns the course of a run from the records of its metrics.jsonl."""
    validation: dict[str, list[tuple[int, float]]] = {}
    for index, record in enumerate(records):
        for source, values in (record.get("validation") or {}).items():
            if values is not None and values.get("loss") is not None:
                validation.setdefault(source, []).append((index, values["loss"]))
    step_seconds = _column(records, "step_seconds")
    slowest = _column(records, "compute_seconds_max")
    tokens, slots = _column(records, "tokens"), _column(records, "slots")
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = {
            "padding_share": 1.0 - tokens / slots,
            "loader_share": _column(records, "loader_seconds") / step_seconds,
            "straggler_share": 1.0 - _column(records, "compute_seconds_mean") / slowest,
        }
    return Course(
        steps=np.array([record["step"] for record in records], dtype=np.int64),
        tokens=np.nancumsum(tokens),
        slots=np.nancumsum(slots),
        seconds=np.nancumsum(step_seconds),
        loss=np.array([_number(record, "token_loss", "loss") for record in records], dtype=np.float64),
        tokens_per_second=_column(records, "tokens_per_second"),
        validation={
            source: (
                np.array([index for index, _ in points], dtype=np.int64),
                np.array([loss for _, loss in points], dtype=np.float64),
            )
            for source, points in validation.items()
        },
        **{name: np.where(np.isfinite(share), share, np.nan) for name, share in shares.items()},
    )


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Float64[np.ndarray, " n"]:
    return np.array([_number(record, name) for record in records], dtype=np.float64)


def _number(record: Mapping[str, Any], *names: str) -> float:
    """Returns the value of the first of the names that the record has a number for."""
    return next((float(record[name]) for name in names if record.get(name) is not None), math.nan)
