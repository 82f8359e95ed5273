"""`evenpack report`: reads runs, compares them, draws them beside each other, and writes a self-contained HTML page."""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import Console, RenderableType

from evenpack.console import Report, pairs, percent, table, text
from evenpack.files import require_folder, write_text
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
from evenpack.studies.report.comparison import Comparison, ReportedRun, compare, read_runs

PAGE, FIGURE = "report.html", "report.png"

_FIRST_WIDTH, _NEXT_WIDTH, _LEAST_WIDTH = 3.8, 1.2, 1.4
"""Points of the first run's line, by how much the next is narrower, and the least."""
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_PANELS_IN_LINE = 3
_PANEL_INCHES = (5.6, 4.0)
_MANY = 10_000
"""Largest value from which on an axis counts in k, M or G."""
_LAST_SHARE = 0.02
"""Share of the steps, at the end, over which the last training loss is a mean."""
_PAGE_COLUMNS = 160
"""Characters in a line of the page."""

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


def make_report(output_dirs: Sequence[Path], folder: Path, *, is_held: Callable[[Path], bool]) -> Report:
    """Writes the figure and the page into `folder`.

    Raises: ConfigError without matplotlib, for a run that is named twice or a folder that cannot be one; DataError; see
    `read_runs`.
    """
    require_matplotlib()
    runs = read_runs(output_dirs, is_held=is_held)
    require_folder(folder, option="--output")
    comparison = compare(runs)
    page, figure = folder / PAGE, folder / FIGURE
    plot_runs([run for run in runs if len(run.course.steps)], comparison, figure)
    rows = [row_of(run, _sources(runs)) for run in runs]
    shown: list[RenderableType] = [*(pairs(row, title=row["run"]) for row in rows)]
    if comparison.settings:
        heads = ["key", *(row["run"] for row in rows)]
        lines = [dict(zip(heads, [key, *values], strict=True)) for key, values in comparison.settings.items()]
        shown.append(table(lines, title="Settings that differ"))
    shown += [text(note) for note in comparison.notes]
    _write_page(page, f"Report of {', '.join(row['run'] for row in rows)}", shown, figure)
    settings, notes = comparison.settings, comparison.notes
    value = {"runs": rows, "notes": notes, "settings": settings, "page": page, "figure": figure}
    return Report(value=value, shown=[*shown, text(f"Wrote {page} and {figure.name}")])


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
    panels = list(panels_of(runs, comparison))
    columns = min(len(panels), _PANELS_IN_LINE)
    lines = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    with figure_as_png(path, width=width * columns, height=height * lines) as figure:
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, panel, runs)
        for axes in grid[len(panels) :]:
            axes.remove()
        handles = [axes for axes in figure.axes[0].get_lines() if not axes.get_label().startswith("_")]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False)
        origins = [provenance_of_runs(run.label, [run.record]) for run in runs]
        write_footer(figure, [*origins, THIN_AND_BOLD] if _draws_single_steps(runs) else origins)


def _draw(axes: Any, panel: Panel, runs: Sequence[ReportedRun]) -> None:
    from matplotlib.ticker import EngFormatter

    for index, (run, line) in enumerate(zip(runs, panel.lines, strict=True)):
        if line is None:
            continue
        x, y = line
        # The first lines are wider, so that equal curves on top do not hide them.
        style = {**line_style(index), "linewidth": max(_LEAST_WIDTH, _FIRST_WIDTH - _NEXT_WIDTH * index)}
        if panel.is_of_steps and _draws_single_steps(runs):
            axes.plot(x, y, color=style["color"], linewidth=0.6, alpha=0.25)
        has_marks = not panel.is_of_steps or len(x) == 1
        heights = smooth(y) if panel.is_of_steps else y
        axes.plot(x, heights, marker="o" if has_marks else None, markersize=4, label=run.label, **style)
    if panel.title == "Throughput":
        axes.set_ylim(bottom=0.0)
    for axis in (axes.xaxis, axes.yaxis):
        if max(map(abs, axis.get_view_interval())) >= _MANY:
            axis.set_major_formatter(EngFormatter(sep=""))  # 20k
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    write_title(axes, panel.title)


def _draws_single_steps(runs: Sequence[ReportedRun]) -> bool:
    """Whether there are few enough runs for it."""
    return len(runs) <= len(COLOURS)


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
        "state": run.state,
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


def _write_page(path: Path, title: str, shown: Sequence[RenderableType], figure: Path) -> None:
    """Writes a page of the tables and notes, with the figure inside."""
    console = Console(record=True, width=_PAGE_COLUMNS, file=StringIO())
    for one in shown:
        console.print(one)
    picture = base64.b64encode(figure.read_bytes()).decode()
    image = f'<img alt="losses and throughput" style="max-width: 100%" src="data:image/png;base64,{picture}">'
    page = console.export_html(inline_styles=True)
    page = page.replace("<head>", f"<head><title>{escape(title)}</title>").replace("</body>", f"{image}\n</body>")
    write_text(path, page)
