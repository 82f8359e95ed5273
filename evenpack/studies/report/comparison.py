"""Output directories of runs -> what a report draws of each, how the runs differ, and which numbers may be compared."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.differences import as_text, flatten
from evenpack.engine.parts.metrics_writer import SUMMARY
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.errors import ConfigError, DataError
from evenpack.files import read_kept
from evenpack.losses import NEXT_SENTENCE
from evenpack.models.families import find_family, known_families
from evenpack.studies.waits.accounting import require_log

_NOT_COMPARED = ("run.name", "run.output_dir", "data.prepared_dir", "data.tokens_dir", "metrics.")
"""Settings that change nothing of what a run computes."""

_ALIKE = 0.01
"""Relative difference of tokens per step up to which steps hold as much as each other."""


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
    validation: Mapping[str, tuple[Int64[np.ndarray, " m"], Float64[np.ndarray, " m"]]]
    """Places in the arrays above and losses in nats/token, for each source."""


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """Holds a run as a report shows it."""

    label: str
    """Name of the run, or the end of its path where names are not recorded or not different."""
    output_dir: Path
    record: RunRecord | None
    """What run.json holds; None if there is none."""
    state: str
    predicts_masked_tokens: bool
    """Whether it learns masked tokens, and not next ones."""
    unread_lines: int
    """Number of lines in its log that are broken or not written to their end."""
    missing_steps: int
    """Number of steps before the last that the log lacks."""
    course: Course

    @property
    def tokens_per_step(self) -> float:
        """Returns the mean number of real tokens of a step; skipped steps, which have none, are left out."""
        steps = np.count_nonzero(np.diff(self.course.tokens, prepend=0.0))
        return float(self.course.tokens[-1]) / steps if steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds the notes on the runs of a report."""

    notes: tuple[str, ...]
    """Sentences for people."""
    settings: Mapping[str, tuple[str, ...]]
    """Keys of the run file whose values differ, with each run's value."""
    shares_steps: bool
    """Whether all have steps over the same data, so that they may be drawn against them."""


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


def course_of(records: Sequence[dict[str, Any]]) -> Course:
    """Returns the course of a run from the records of its metrics.jsonl."""
    points: dict[str, list[tuple[int, float]]] = {}
    for index, record in enumerate(records):
        for source, values in (record.get("validation") or {}).items():
            if values is not None and values.get("loss") is not None:
                points.setdefault(source, []).append((index, values["loss"]))
    return Course(
        steps=np.array([record["step"] for record in records], dtype=np.int64),
        tokens=np.nancumsum(_column(records, "tokens")),
        slots=np.nancumsum(_column(records, "slots")),
        seconds=np.nancumsum(_column(records, "step_seconds")),
        loss=np.array([_number(record, "token_loss", "loss") for record in records], dtype=np.float64),
        tokens_per_second=_column(records, "tokens_per_second"),
        validation={
            source: (np.array([index for index, _ in some]), np.array([loss for _, loss in some], dtype=np.float64))
            for source, some in points.items()
        },
    )


def compare(runs: Sequence[ReportedRun]) -> Comparison:
    """Compares runs, in the order given."""
    notes = _notes_of_logs(runs)
    data_notes = _notes_of_data(runs)
    if data_notes:
        notes += [*data_notes, "Curves are drawn against tokens and time, and not against steps."]
    else:
        notes += _notes_of_steps(runs)
    if len({run.predicts_masked_tokens for run in runs}) > 1:
        notes.append("The losses are of masked tokens in some runs and of next tokens in others: they do not compare.")
    return Comparison(notes=tuple(notes), settings=different_settings(runs), shares_steps=not data_notes)


def different_settings(runs: Sequence[ReportedRun]) -> dict[str, tuple[str, ...]]:
    """Returns the settings that differ, by key; none if fewer than two runs have recorded theirs."""
    flat = [None if run.record is None else _settings(run.record.config) for run in runs]
    known = [settings for settings in flat if settings is not None]
    keys = dict.fromkeys(key for settings in known for key in settings)
    return {
        key: tuple("not recorded" if settings is None else settings.get(key, "-") for settings in flat)
        for key in keys
        if not key.startswith(_NOT_COMPARED) and len({settings.get(key, "-") for settings in known}) > 1
    }


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: as_text(value) for key, value in flatten(config).items()}


def _read_run(output_dir: Path, label: str, record: RunRecord | None, *, is_running: bool) -> ReportedRun:
    path = require_log(output_dir)
    records = read_metrics(path)
    with path.open("rb") as file:
        unread = sum(1 for _ in file) - len(records)
    return ReportedRun(
        label=label,
        output_dir=output_dir,
        record=record,
        state=_state(output_dir, records, is_running=is_running),
        predicts_masked_tokens=_predicts_masked_tokens(record, records),
        unread_lines=unread,
        missing_steps=records[-1]["step"] - len({record["step"] for record in records}) if records else 0,
        course=course_of(records),
    )


def _predicts_masked_tokens(record: RunRecord | None, records: Sequence[Mapping[str, Any]]) -> bool:
    """Returns the objective of the recorded model; where it is not known, masked tokens beside next sentences alone."""
    kind = None if record is None else record.config.get("model", {}).get("kind")
    if kind in known_families():
        return find_family(kind).objective == "masked_tokens"
    return any(NEXT_SENTENCE.metric in one for one in records)


def _ends_of(places: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ."""
    ends = (["/".join(place.parts[-depth:]) for place in places] for depth in count(1))
    return next(labels for labels in ends if len(set(labels)) == len(labels))


def _state(output_dir: Path, records: Sequence[Mapping[str, Any]], *, is_running: bool) -> str:
    """Returns the state by the summary, which counts if it is of the last step and not of an earlier start."""
    if is_running:
        return "running"
    if not records:
        return "no step yet"
    summary = read_kept(output_dir / SUMMARY) or {}
    last, steps, target = records[-1]["step"], summary.get("steps"), summary.get("target")
    if summary.get("step") != last:
        return "ended without a summary"
    is_reached = isinstance(target, dict) and bool(target.get("reached"))
    return "stopped" if isinstance(steps, int) and last < steps and not is_reached else str(summary.get("state"))


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Float64[np.ndarray, " n"]:
    return np.array([_number(record, name) for record in records], dtype=np.float64)


def _number(record: Mapping[str, Any], *names: str) -> float:
    """Returns the value of the first of the names that the record has a number for."""
    return next((float(record[name]) for name in names if record.get(name) is not None), math.nan)


def _notes_of_logs(runs: Sequence[ReportedRun]) -> list[str]:
    notes = []
    for run in runs:
        if not len(run.course.steps):
            notes.append(f"{run.label} has no step yet and is not drawn.")
        if run.unread_lines:
            lines = "1 line is" if run.unread_lines == 1 else f"{run.unread_lines} lines are"
            notes.append(f"{run.label}: {lines} broken in metrics.jsonl, and left out.")
        if run.missing_steps:
            notes.append(
                f"{run.label}: metrics.jsonl lacks {run.missing_steps} steps; its tokens and time are of the others."
            )
        for start in run.record.starts[1:] if run.record is not None else ():
            notes.append(f"{run.label} went on after step {start.steps_done} on {start.ranks} x {start.device}.")
    return notes


def _notes_of_data(runs: Sequence[ReportedRun]) -> list[str]:
    """Says why steps, or losses, of one run are not comparable with another's."""
    unknown = [run.label for run in runs if run.record is None]
    if len(runs) > 1 and unknown:
        return [f"Whether {', '.join(unknown)} had the same data is not recorded (there is no run.json)."]
    known = [run.record.data for run in runs if run.record is not None]
    lengths = ", ".join(f"{run.label} {data.pack_length}" for run, data in zip(runs, known, strict=False))
    notes = {
        "tokenizer": "The tokenizers differ: a token is not the same amount of text, and losses do not compare.",
        "pack_length": f"The pack lengths differ: {lengths}.",
        "fingerprint": "The runs had other data: other documents, recipe, packing or mixture.",
    }
    return [note for name, note in notes.items() if len({getattr(data, name) for data in known}) > 1]


def _notes_of_steps(runs: Sequence[ReportedRun]) -> list[str]:
    """Says where a step is another amount of the same data."""
    sizes = {run.label: run.tokens_per_step for run in runs if run.tokens_per_step}
    if not sizes or max(sizes.values()) <= (1 + _ALIKE) * min(sizes.values()):
        return []
    amounts = ", ".join(f"{label} {size:,.0f}" for label, size in sizes.items())
    return [
        f"The steps hold other numbers of tokens: {amounts} on average. Against steps the runs have seen other amounts."
    ]
