"""`evenpack report`: runs beside each other, as far as their numbers may be compared, in tables and a figure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from rich.console import RenderableType

from evenpack.console import Report, pairs, percent, table, text
from evenpack.differences import as_text, flatten
from evenpack.engine.reporting.metrics import METRICS, named_if_damaged, read_metrics
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.errors import ConfigError, DataError
from evenpack.files import require_folder
from evenpack.losses import NEXT_SENTENCE
from evenpack.models.families import find_family, known_families
from evenpack.progress import format_rate
from evenpack.studies.plotting import (
    COLOURS,
    THIN_AND_BOLD,
    figure_as_png,
    line_style,
    require_matplotlib,
    smooth,
    write_footer,
    write_title,
)
from evenpack.studies.provenance import provenance_of_runs
from evenpack.studies.waits import require_log

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
    predicts_masked_tokens: bool
    """Whether it learns masked tokens, and not next ones: as its family does, or where that is not known, if it learns
    next sentences too."""
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


def read_runs(output_dirs: Sequence[Path]) -> tuple[ReportedRun, ...]:
    """Reads what the runs have logged, also while they are on.

    Raises: ConfigError for a run that is named twice; DataError for a directory without a log, a damaged record, a
    broken run.json, or if no run has a step.
    """
    places = [path.resolve() for path in output_dirs]
    for place, path in zip(places, output_dirs, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{path} is named twice: name each run once")
    records = [read_run_record(path) for path in output_dirs]
    names = [record.config["run"]["name"] for record in records if record is not None]
    ends = (["/".join(place.parts[-depth:]) for place in places] for depth in count(1))
    labels = next(each for each in chain([names], ends) if len(set(each)) == len(places))
    runs = tuple(
        _read_run(path, label, record) for path, label, record in zip(output_dirs, labels, records, strict=True)
    )
    if not any(len(run.course.steps) for run in runs):
        raise DataError(
            f"no step yet in {', '.join(str(run.output_dir / METRICS) for run in runs)}: there is nothing to report "
            "before a run has done its first step"
        )
    return runs


def course_of(records: Sequence[dict[str, Any]]) -> Course:
    """Returns the course of a run from the records of its metrics.jsonl."""

    def column(*names: str) -> Float64[np.ndarray, " n"]:
        """Returns of each record the value of the first of the names that it has a number for."""
        found = [next((one[name] for name in names if one.get(name) is not None), math.nan) for one in records]
        return np.array(found, dtype=np.float64)

    points: dict[str, list[tuple[int, float]]] = {}
    for index, record in enumerate(records):
        for source, values in (record.get("validation") or {}).items():
            if values is not None and values.get("loss") is not None:
                points.setdefault(source, []).append((index, values["loss"]))
    return Course(
        steps=np.array([record["step"] for record in records], dtype=np.int64),
        tokens=np.nancumsum(column("tokens")),
        slots=np.nancumsum(column("slots")),
        seconds=np.nancumsum(column("step_seconds")),
        loss=column("token_loss", "loss"),
        tokens_per_second=column("tokens_per_second"),
        validation={
            source: (np.array([index for index, _ in some]), np.array([loss for _, loss in some], dtype=np.float64))
            for source, some in points.items()
        },
    )


def compare(runs: Sequence[ReportedRun]) -> Comparison:
    """Compares runs, in the order given."""
    notes, of_data = _notes_of_starts(runs), _notes_of_data(runs)
    sizes = {run.label: run.tokens_per_step for run in runs if run.tokens_per_step}
    if of_data:
        notes += [*of_data, "Curves are drawn against tokens and time, and not against steps."]
    elif sizes and max(sizes.values()) > (1 + _ALIKE) * min(sizes.values()):
        amounts = ", ".join(f"{label} {size:,.0f}" for label, size in sizes.items())
        notes.append(
            f"The steps hold other numbers of tokens: {amounts} on average. Against steps the runs have seen other "
            "amounts."
        )
    if len({run.predicts_masked_tokens for run in runs}) > 1:
        notes.append("The losses are of masked tokens in some runs and of next tokens in others: they do not compare.")
    return Comparison(notes=tuple(notes), settings=different_settings(runs), shares_steps=not of_data)


def different_settings(runs: Sequence[ReportedRun]) -> dict[str, tuple[str, ...]]:
    """Returns the settings that differ, by key; none if fewer than two runs have recorded theirs."""
    flat = [{} if run.record is None else flatten(run.record.config) for run in runs]
    found = {}
    for key in dict.fromkeys(key for settings in flat for key in settings if not key.startswith(_NOT_COMPARED)):
        shown = [as_text(one[key]) if key in one else "-" if one else "not recorded" for one in flat]
        if len({*shown} - {"not recorded"}) > 1:
            found[key] = tuple(shown)
    return found


def _read_run(output_dir: Path, label: str, record: RunRecord | None) -> ReportedRun:
    records = read_metrics(require_log(output_dir))
    with named_if_damaged(output_dir / METRICS):
        course = course_of(records)
    kind = None if record is None else record.config.get("model", {}).get("kind")
    return ReportedRun(
        label=label,
        output_dir=output_dir,
        record=record,
        predicts_masked_tokens=find_family(kind).objective == "masked_tokens"
        if kind in known_families()
        else any(NEXT_SENTENCE.metric in one for one in records),
        course=course,
    )


def _notes_of_starts(runs: Sequence[ReportedRun]) -> list[str]:
    notes = []
    for run in runs:
        if not len(run.course.steps):
            notes.append(f"{run.label} has no step yet and is not drawn.")
        parent = None if run.record is None else run.record.config["run"].get("parent")
        if isinstance(parent, dict):
            notes.append(
                f"{run.label} begins after step {parent['step']} of {parent['run']}: so do its tokens and time."
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


FIGURE = "report.png"

_FIRST_WIDTH, _NEXT_WIDTH, _LEAST_WIDTH = 3.8, 1.2, 1.4
"""Points of the first run's line, by how much the next is narrower, and the least."""
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_PANELS_IN_LINE = 3
_PANEL_INCHES = (5.6, 4.0)
_MANY = 10_000
"""Largest value from which on an axis counts in k, M or G."""
_LAST_SHARE = 0.02
"""Share of the steps, at the end, over which the last training loss is a mean."""

Values = Float64[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of the small multiples: a quantity of every run that has it."""

    title: str
    x: str
    y: str
    lines: Sequence[tuple[Values, Values] | None]
    """The places and heights of each run; None if it has none."""
    is_of_steps: bool = True
    """Whether it is drawn as single steps and their running mean, and not as points."""


def make_report(output_dirs: Sequence[Path], folder: Path) -> Report:
    """Writes the figure into `folder`.

    Raises: ConfigError without matplotlib, for a run that is named twice or a folder that cannot be one; DataError; see
    `read_runs`.
    """
    require_matplotlib()
    runs = read_runs(output_dirs)
    require_folder(folder, option="--output")
    comparison = compare(runs)
    figure = folder / FIGURE
    plot_runs([run for run in runs if len(run.course.steps)], comparison, figure)
    rows = [row_of(run, _sources(runs)) for run in runs]
    shown: list[RenderableType] = [*(pairs(row, title=row["run"]) for row in rows)]
    if comparison.settings:
        heads = ["key", *(row["run"] for row in rows)]
        lines = [dict(zip(heads, [key, *values], strict=True)) for key, values in comparison.settings.items()]
        shown.append(table(lines, title="Settings that differ"))
    shown += [text(note) for note in comparison.notes]
    value = {"runs": rows, "notes": comparison.notes, "settings": comparison.settings, "figure": figure}
    return Report(value=value, shown=[*shown, text(f"Wrote {figure}")])


def panels_of(runs: Sequence[ReportedRun], comparison: Comparison) -> Iterator[Panel]:
    """Yields training loss against steps (over the same data alone), tokens and time; validation; throughput."""
    kinds = {run.predicts_masked_tokens for run in runs}
    loss = "next-token or masked-token loss" if len(kinds) > 1 else "masked-token loss" if kinds == {True} else "loss"
    courses = [run.course for run in runs]
    longest = max(float(course.seconds[-1]) for course in courses)
    unit, seconds = next(one for one in _TIME_UNITS if longest >= 2 * one[1] or one[1] == 1.0)
    axes = {
        "steps": ("step (optimizer updates)", [course.steps.astype(np.float64) for course in courses]),
        "tokens": ("tokens trained on", [course.tokens for course in courses]),
        "time": (f"time in training steps ({unit})", [course.seconds / seconds for course in courses]),
    }
    if not comparison.shares_steps:
        del axes["steps"]
    for name, (label, places) in axes.items():
        lines = [(at, course.loss) for at, course in zip(places, courses, strict=True)]
        yield Panel(title=f"Training loss against {name}", x=label, y=f"training {loss} (nats/token)", lines=lines)
    for source in _sources(runs):
        found = [course.validation.get(source) for course in courses]
        points = [one and (course.tokens[one[0]], one[1]) for one, course in zip(found, courses, strict=True)]
        y = f"held-out {loss} (nats/token)"
        yield Panel(title=f"Validation on {source}", x=axes["tokens"][0], y=y, lines=points, is_of_steps=False)
    label, places = next(iter(axes.values()))
    rates = [(at, course.tokens_per_second) for at, course in zip(places, courses, strict=True)]
    yield Panel(title="Throughput", x=label, y="tokens/s (real tokens, all ranks)", lines=rates)


def plot_runs(runs: Sequence[ReportedRun], comparison: Comparison, path: Path) -> None:
    """Draws each panel of the runs; a colour is a run, thin lines are single steps, bold ones running means.

    Raises: ConfigError without matplotlib.
    """
    from matplotlib.ticker import EngFormatter

    panels = list(panels_of(runs, comparison))
    columns = min(len(panels), _PANELS_IN_LINE)
    lines = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    draws_single_steps = len(runs) <= len(COLOURS)
    with figure_as_png(path, width=width * columns, height=height * lines) as figure:
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(lines, columns, number)
            for index, (run, line) in enumerate(zip(runs, panel.lines, strict=True)):
                if line is None:
                    continue
                # The first lines are wider, so that equal curves on top do not hide them.
                style = {**line_style(index), "linewidth": max(_LEAST_WIDTH, _FIRST_WIDTH - _NEXT_WIDTH * index)}
                if panel.is_of_steps and draws_single_steps:
                    axes.plot(*line, color=style["color"], linewidth=0.6, alpha=0.25)
                mark = None if panel.is_of_steps and len(line[0]) > 1 else "o"
                heights = smooth(line[1]) if panel.is_of_steps else line[1]
                axes.plot(line[0], heights, marker=mark, markersize=4, label=run.label, **style)
            if panel.title == "Throughput":
                axes.set_ylim(bottom=0.0)
            for axis in (axes.xaxis, axes.yaxis):
                if max(map(abs, axis.get_view_interval())) >= _MANY:
                    axis.set_major_formatter(EngFormatter(sep=""))  # 20k
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
            write_title(axes, panel.title)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
        origins = [provenance_of_runs(run.label, [run.record]) for run in runs]
        write_footer(figure, [*origins, *[THIN_AND_BOLD] * draws_single_steps])


def row_of(run: ReportedRun, sources: Sequence[str]) -> dict[str, str]:
    """Returns a run in words, for tables, with the same keys for each run of a report."""
    course = run.course
    start = run.record.starts[-1] if run.record is not None else None
    has_steps = len(course.steps) > 0
    rates = course.tokens_per_second[np.isfinite(course.tokens_per_second)]
    low, median, high = map(format_rate, np.quantile(rates, (0.25, 0.5, 0.75)) if len(rates) else [math.nan] * 3)
    slots = course.slots[-1] if has_steps else 0
    last = course.loss[-max(1, round(_LAST_SHARE * len(course.loss))) :]
    known = last[np.isfinite(last)]
    validation = {source: course.validation[source][1][-1] for source in sources if source in course.validation}
    return {
        "run": run.label,
        "steps": f"{course.steps[-1]:,}" if has_steps else "-",
        "tokens": f"{course.tokens[-1]:,.0f}" if has_steps else "-",
        "time in training steps": f"{course.seconds[-1] / 60:,.2f} minutes" if has_steps else "-",
        "training loss at the end": (f"{known.mean():.4f}" if len(known) else "-")
        + (" (masked tokens)" if run.predicts_masked_tokens else ""),
        **{f"validation on {one}": f"{validation[one]:.4f}" if one in validation else "-" for one in sources},
        "tokens/s of the median step (middle half)": f"{median} ({low} to {high})",
        "padding share of all steps": percent(1 - course.tokens[-1] / slots) if slots else "-",
        "ranks": f"{start.ranks} x {start.device}" if start else "not recorded",
        "commit": (start.commit or "no checkout") if start else "not recorded",
        "versions": f"evenpack {start.evenpack}, torch {start.torch}" if start else "not recorded",
        "directory": str(run.output_dir),
    }


def _sources(runs: Sequence[ReportedRun]) -> list[str]:
    return list(dict.fromkeys(source for run in runs for source in run.course.validation))
