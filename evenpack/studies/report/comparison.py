"""Finds the differences between runs, and which of their numbers may be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenpack.engine.reporting.run_record import DataIdentity
from evenpack.studies.report.reading import ReportedRun

_NOT_COMPARED = ("run.name", "run.output_dir", "data.prepared_dir", "data.tokens_dir", "metrics.")
"""Settings that change nothing of what a run computes."""

_ALIKE = 0.01
"""Relative difference of tokens per step up to which steps hold as much as each other."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds the notes on the runs of a report."""

    notes: tuple[str, ...]
    """Sentences for people."""
    settings: Mapping[str, tuple[str, ...]]
    """Keys of the run file whose values differ, with those of each run."""
    shares_steps: bool
    """Whether all have steps over the same data, so that they may be drawn against them."""


def compare(runs: Sequence[ReportedRun]) -> Comparison:
    """Compares runs, in the order given."""
    notes = _notes_of_logs(runs)
    data_notes = _notes_of_data(runs)
    if data_notes:
        notes += [*data_notes, "Curves are drawn against tokens and time, and not against steps."]
    else:
        notes += _notes_of_steps(runs)
    if len({run.has_two_losses for run in runs}) > 1:
        notes.append("The losses are of masked tokens in some runs and of next tokens in others: they do not compare.")
    return Comparison(notes=tuple(notes), settings=different_settings(runs), shares_steps=not data_notes)


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
            notes.append(f"{run.label} went on after step {start.first_step} on {start.ranks} x {start.device}.")
    return notes


def _notes_of_data(runs: Sequence[ReportedRun]) -> list[str]:
    """Says why a step, or a loss, of one run is not a measure for those of another."""
    unknown = [run.label for run in runs if run.record is None]
    if len(runs) > 1 and unknown:
        return [f"Whether {', '.join(unknown)} had the same data is not recorded (there is no run.json)."]
    known = [run.record.data for run in runs if run.record is not None]
    notes = []
    if _differ(known, "tokenizer"):
        notes.append("The tokenizers differ: a token is not the same amount of text, and losses do not compare.")
    if _differ(known, "pack_length"):
        lengths = ", ".join(f"{run.label} {data.pack_length}" for run, data in zip(runs, known, strict=True))
        notes.append(f"The pack lengths differ: {lengths}.")
    if _differ(known, "fingerprint"):
        notes.append("The runs had other data: other documents, recipe, packing or mixture.")
    return notes


def _notes_of_steps(runs: Sequence[ReportedRun]) -> list[str]:
    """Says where a step is another amount of the same data."""
    sizes = {run.label: run.tokens_per_step for run in runs if run.tokens_per_step}
    if not sizes or max(sizes.values()) <= (1 + _ALIKE) * min(sizes.values()):
        return []
    amounts = ", ".join(f"{label} {size:,.0f}" for label, size in sizes.items())
    return [
        f"The steps hold other numbers of tokens: {amounts} on average. Against steps the runs have seen other amounts."
    ]


def _differ(data: Sequence[DataIdentity], name: str) -> bool:
    return len({getattr(one, name) for one in data}) > 1


def different_settings(runs: Sequence[ReportedRun]) -> dict[str, tuple[str, ...]]:
    """Returns the settings that differ, by key; none if fewer than two runs have recorded theirs."""
    flat = [None if run.record is None else flattened(run.record.config) for run in runs]
    known = [settings for settings in flat if settings is not None]
    keys = dict.fromkeys(key for settings in known for key in settings)
    return {
        key: tuple("not recorded" if settings is None else settings.get(key, "-") for settings in flat)
        for key in keys
        if not key.startswith(_NOT_COMPARED) and len({settings.get(key, "-") for settings in known}) > 1
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Returns the values, as text, of the keys that begin with one of `keys` and differ between two run files.

    A key that one of them has not recorded, because an earlier version wrote it, does not count.
    """
    ours, theirs = flattened(one), flattened(other)
    return {
        key: (value, theirs[key])
        for key, value in ours.items()
        if key.startswith(keys) and key in theirs and value != theirs[key]
    }


def flattened(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Returns each single value by its dotted key, as text."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{name}.")
        else:
            found[name] = "null" if value is None else str(value)
    return found
