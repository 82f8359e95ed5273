"""`evenpack report`: reads runs, compares them, draws them, and writes a self-contained HTML page.

In the figures a colour is a run, in all of them; thin lines are single steps, bold ones running means.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType

from evenpack.console import Report, pairs, percent, table, text
from evenpack.engine.reporting.definitions import WAIT_CAUSES
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
from evenpack.studies.report.comparison import Comparison, Course, ReportedRun, compare, read_runs
from evenpack.studies.waits.presentation import draw_course
from evenpack.units import counted
from evenpack.version import VERSION

_FIRST_WIDTH, _NEXT_WIDTH, _LEAST_WIDTH = 3.8, 1.2, 1.4
"""Points of the first run's line, by how much the next is narrower, and the least."""
_LEAST_SPAN = 1.0
"""Percent that an axis of shares shows at least."""
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_PANEL_INCHES = 5.2
_GAP_INCHES = 0.9
"""Left of each panel, for its axis."""
_HEIGHT_INCHES = 4.2
_MANY = 10_000
"""Largest value from which on an axis counts in k, M or G."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Describes what curves are drawn against."""

    label: str
    title: str
    """How the axis is called in a sentence."""
    values: Callable[[Course], Float64[np.ndarray, " n"]]


STEPS = Axis(label="step (optimizer updates)", title="steps", values=lambda course: course.steps.astype(np.float64))
TOKENS = Axis(label="tokens trained on", title="tokens", values=lambda course: course.tokens)


def time_axis(runs: Sequence[ReportedRun]) -> Axis:
    """Returns the axis of time, in the unit that suits the longest run."""
    longest = max((float(run.course.seconds[-1]) for run in runs if len(run.course.steps)), default=0.0)
    unit, seconds = next((unit, least) for unit, least in _TIME_UNITS if longest >= 2 * least or least == 1.0)
    return Axis(label=f"time in training steps ({unit})", title="time", values=lambda course: course.seconds / seconds)


def plot_figures(runs: Sequence[ReportedRun], comparison: Comparison, folder: Path) -> dict[str, Path]:
    """Writes a PNG for each figure that the runs have something for; by their names.

    Raises: ConfigError without matplotlib.
    """
    drawn = [run for run in runs if len(run.course.steps)]
    figures: dict[str, Callable[[Sequence[ReportedRun], Comparison, Path], None]] = {
        "loss": plot_losses,
        "validation": plot_validation,
        "throughput": plot_throughput,
        "padding": plot_padding,
        "waits": plot_waits,
    }
    if not any(run.course.validation for run in drawn):
        del figures["validation"]
    paths = {name: folder / f"{name}.png" for name in figures}
    for name, draw in figures.items():
        draw(drawn, comparison, paths[name])
    return paths


def plot_losses(runs: Sequence[ReportedRun], comparison: Comparison, path: Path) -> None:
    """Draws the training loss against steps (over the same data alone), tokens and time."""
    axes_of_x = [*([STEPS] if comparison.shares_steps else []), TOKENS, time_axis(runs)]
    label = f"training {_loss_of(runs)} (nats/token)"
    with _panels(path, len(axes_of_x)) as (figure, panels):
        for panel, axis in zip(panels, axes_of_x, strict=True):
            _draw_steps(panel, runs, axis, lambda course: course.loss)
            _finish(panel, axis.label, label, f"Training loss against {axis.title}")
        _legend(figure, runs)


def plot_validation(runs: Sequence[ReportedRun], comparison: Comparison, path: Path) -> None:
    """Draws the held-out loss, with a panel for each source."""
    sources = list(dict.fromkeys(source for run in runs for source in run.course.validation))
    with _panels(path, len(sources)) as (figure, panels):
        for panel, source in zip(panels, sources, strict=True):
            for index, run in enumerate(runs):
                if source in run.course.validation:
                    places, losses = run.course.validation[source]
                    panel.plot(run.course.tokens[places], losses, marker="o", markersize=4, **_style(index))
            label = f"held-out {_loss_of(runs)} (nats/token)"
            _finish(panel, TOKENS.label, label, f"Validation on {source}")
        _legend(figure, runs, has_single_steps=False)


def plot_throughput(runs: Sequence[ReportedRun], comparison: Comparison, path: Path) -> None:
    """Draws tokens/s of the steps, and the median of each run with the middle half of its steps."""
    axis = _first_axis(comparison)
    with _panels(path, 2) as (figure, (courses, medians)):
        _draw_steps(courses, runs, axis, lambda course: course.tokens_per_second)
        _finish(courses, axis.label, "tokens/s (real tokens, all ranks)", "Throughput of single steps")
        courses.set_ylim(bottom=0.0)
        for index, run in enumerate(runs):
            low, median, high = quartiles(run.course.tokens_per_second)
            reach = [[median - low], [high - median]]
            medians.errorbar([index], [median], yerr=reach, fmt="o", capsize=5, color=_style(index)["color"])
            medians.annotate(f"{median:,.4g}", (index, median), xytext=(9, 0), textcoords="offset points", va="center")
        medians.set_xticks(range(len(runs)), [run.label for run in runs], rotation=15 if len(runs) > 2 else 0)
        medians.set_xlim(-0.6, len(runs) - 0.2)
        _finish(medians, "", "tokens/s", "Median step and middle half of the steps")
        medians.set_ylim(bottom=0.0)
        _legend(figure, runs)


def plot_padding(runs: Sequence[ReportedRun], comparison: Comparison, path: Path) -> None:
    """Draws the share of the slots of each step that hold no real token."""
    axis = _first_axis(comparison)
    with _panels(path, 1) as (figure, (panel,)):
        _draw_steps(panel, runs, axis, lambda course: 100 * course.padding_share)
        _finish(panel, axis.label, "padding (% of the slots computed)", "Padding")
        _show_from_zero(panel)
        _legend(figure, runs)


def plot_waits(runs: Sequence[ReportedRun], comparison: Comparison, path: Path) -> None:
    """Draws the shares of time that ranks wait for batches and for the slowest rank; of a single run also by cause."""
    axis = _first_axis(comparison)
    waits = runs[0].course.waits if len(runs) == 1 else None
    with _panels(path, 2 if waits is None else 3) as (figure, (loaders, stragglers, *causes)):
        _draw_steps(loaders, runs, axis, lambda course: 100 * course.loader_share)
        _finish(loaders, axis.label, "% of the step's time", "Waiting for batches")
        _draw_steps(stragglers, runs, axis, lambda course: 100 * course.straggler_share)
        label = "% of the slowest rank's compute time"
        _finish(stragglers, axis.label, label, "Waiting for the slowest rank")
        for panel in (loaders, stragglers):
            _show_from_zero(panel)
        if waits is not None:
            draw_course(causes[0], waits)
            write_title(causes[0], "Waiting by cause")
            causes[0].legend(frameon=False, fontsize=8, ncols=2)
        _legend(figure, runs)


def quartiles(values: Float64[np.ndarray, " n"]) -> tuple[float, float, float]:
    """Returns the first quartile, the median and the third quartile of what is a number; NaN without any."""
    known = values[np.isfinite(values)]
    if not len(known):
        return (float("nan"),) * 3
    low, median, high = np.quantile(known, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


@contextmanager
def _panels(path: Path, count: int) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yields a figure that becomes a PNG, and its panels side by side."""
    width = (_GAP_INCHES + _PANEL_INCHES) * count
    with figure_as_png(path, width=width, height=_HEIGHT_INCHES) as figure:
        grid = {"wspace": _GAP_INCHES / _PANEL_INCHES, "left": _GAP_INCHES / width, "right": 1.0}
        yield figure, list(figure.subplots(1, count, squeeze=False, gridspec_kw=grid)[0])


def _loss_of(runs: Sequence[ReportedRun]) -> str:
    """Names the runs' losses for an axis."""
    kinds = {run.predicts_masked_tokens for run in runs}
    return "next-token or masked-token loss" if len(kinds) > 1 else "masked-token loss" if kinds == {True} else "loss"


def _first_axis(comparison: Comparison) -> Axis:
    return STEPS if comparison.shares_steps else TOKENS


def _draw_steps(
    axes: Any, runs: Sequence[ReportedRun], axis: Axis, of: Callable[[Course], Float64[np.ndarray, " n"]]
) -> None:
    """Draws the running mean of each run, and of few runs the single steps too."""
    for index, run in enumerate(runs):
        x, y = axis.values(run.course), of(run.course)
        style = _style(index)
        if _draws_single_steps(runs):
            axes.plot(x, y, color=style["color"], linewidth=0.6, alpha=0.25)
        axes.plot(x, smooth(y), marker="o" if len(x) == 1 else None, **style)


def _style(index: int) -> dict[str, Any]:
    """Returns colour and line of a run; the first ones are wider, so that equal curves on top do not hide them."""
    return {
        **line_style(index),
        "linewidth": max(_LEAST_WIDTH, _FIRST_WIDTH - _NEXT_WIDTH * index),
    }


def _finish(axes: Any, x_label: str, y_label: str, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    for axis in (axes.xaxis, axes.yaxis) if x_label else (axes.yaxis,):
        if max(map(abs, axis.get_view_interval())) >= _MANY:
            axis.set_major_formatter(EngFormatter(sep=""))  # 20k
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    write_title(axes, title)


def _show_from_zero(axes: Any) -> None:
    """Sets the range of an axis of percent, so that shares of nearly nothing look like that."""
    axes.set_ylim(0.0, max(axes.get_ylim()[1], _LEAST_SPAN))


def _legend(figure: Any, runs: Sequence[ReportedRun], *, has_single_steps: bool = True) -> None:
    """Draws a legend for all panels, and writes below them where the runs come from."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=run.label, **_style(index)) for index, run in enumerate(runs)]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.02, 0.98), ncols=4, frameon=False)
    origins = [provenance_of_runs(run.label, [run.record]) for run in runs]
    write_footer(figure, [*origins, THIN_AND_BOLD] if has_single_steps and _draws_single_steps(runs) else origins)


def _draws_single_steps(runs: Sequence[ReportedRun]) -> bool:
    """Whether there are few enough runs for it."""
    return len(runs) <= len(COLOURS)


PAGE = "report.html"

_LAST_SHARE = 0.02
"""Share of the steps, at the end, over which the last training loss is a mean."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } img { max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.3rem 1.1rem 0.3rem 0; border-bottom: 1px solid #e4e7eb; vertical-align: top; }
th { font-weight: 600; }
.note { background: #fff8e6; border-left: 3px solid #e8a800; padding: 0.4rem 0.8rem; margin: 0.4rem 0; }
"""

_SHOWN_SIZE = 0.6
"""Scale at which figures are shown: their letters are as large as the page's, and sharp on dense screens."""
_WIDTH_IN_PNG = slice(16, 20)
"""Bytes of a PNG file that hold its width in pixels."""

FIGURE_TEXTS = {
    "loss": "Training loss. Thin: single steps; bold: mean over about a fiftieth of the run.",
    "validation": "Loss on the held-out documents of each source.",
    "throughput": "Real tokens per second over all ranks, evaluation and saving left out.",
    "padding": "Share of the computed slots that hold no real token.",
    "waits": "What the ranks wait for: batches, and the slowest rank of each step.",
}
"""The text above each figure."""


def make_report(output_dirs: Sequence[Path], folder: Path, *, is_held: Callable[[Path], bool]) -> Report:
    """Writes the figures and the page into `folder`.

    Raises: ConfigError without matplotlib, for a run that is named twice or a folder that cannot be one; DataError; see
    `read_runs`.
    """
    require_matplotlib()
    runs = read_runs(output_dirs, is_held=is_held)
    require_folder(folder, option="--output")
    comparison = compare(runs)
    figures = plot_figures(runs, comparison, folder)
    sources = list(dict.fromkeys(source for run in runs for source in run.course.validation))
    has_causes = any(run.course.waits is not None for run in runs)
    rows = [row_of(run, sources, has_causes=has_causes) for run in runs]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    page = folder / PAGE
    _write_page(page, rows, comparison, figures, origin=f"Written by evenpack {VERSION} at {now}.")
    return Report(
        value={
            "runs": rows,
            "notes": comparison.notes,
            "settings": comparison.settings,
            "page": page,
            "figures": figures,
        },
        shown=[
            *_shown(rows, comparison),
            text(f"Wrote {page} and {', '.join(path.name for path in figures.values())}"),
        ],
    )


def row_of(run: ReportedRun, sources: Sequence[str], *, has_causes: bool = False) -> dict[str, str]:
    """Returns a run in words, for tables, with the same keys for each run of a report.

    `has_causes`: whether the waits of any of its runs are split by cause.
    """
    course = run.course
    start = run.record.starts[-1] if run.record is not None else None
    has_steps = len(course.steps) > 0
    low, median, high = map(format_rate, quartiles(course.tokens_per_second))
    slots = course.slots[-1] if has_steps else 0
    losses = course.loss[-max(1, round(_LAST_SHARE * len(course.loss))) :]
    return {
        "run": run.label,
        "state": run.state,
        "steps": f"{course.steps[-1]:,}" if has_steps else "-",
        "tokens": f"{course.tokens[-1]:,.0f}" if has_steps else "-",
        "time in training steps": f"{course.seconds[-1] / 60:,.2f} minutes" if has_steps else "-",
        "training loss at the end": _loss(_mean(losses)) + (" (masked tokens)" if run.predicts_masked_tokens else ""),
        **{f"validation on {source}": _loss(_last_validation(course, source)) for source in sources},
        "tokens/s of the median step (middle half)": f"{median} ({low} to {high})",
        "padding share of all steps": percent(1 - course.tokens[-1] / course.slots[-1]) if slots else "-",
        "waiting for batches in the median step": _share(course.loader_share),
        "waiting for the slowest rank in the median step": _share(course.straggler_share),
        **({f"waiting by {' / '.join(WAIT_CAUSES)}": _by_cause(course)} if has_causes else {}),
        "standing still for checkpoints": _pauses(run.saves) if has_steps else "-",
        "ranks": f"{start.ranks} x {start.device}" if start else "not recorded",
        "commit": (start.commit or "no checkout") if start else "not recorded",
        "versions": f"evenpack {start.evenpack}, torch {start.torch}" if start else "not recorded",
        "last start": start.date if start else "not recorded",
        "directory": str(run.output_dir),
    }


def _write_page(
    path: Path,
    rows: Sequence[Mapping[str, str]],
    comparison: Comparison,
    figures: Mapping[str, Path],
    *,
    origin: str,
) -> None:
    """Writes the page with its figures inside.

    Args:
        rows: one for each run, all with the same keys; the first is its name.
        origin: by what, and when, the page was made.
    """
    labels = [next(iter(row.values())) for row in rows]
    title = f"Report of {' and '.join(labels) if len(labels) < 4 else f'{len(labels)} runs'}"
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f'<p class="note">{escape(note)}</p>' for note in comparison.notes]
    heads = list(rows[0])[1:]
    body += ["<h2>Runs</h2>", _html_table(["", *labels], [[head, *(row[head] for row in rows)] for head in heads])]
    if len(rows) > 1:
        body.append("<h2>Settings that differ</h2>")
        lines = [[key, *values] for key, values in comparison.settings.items()]
        body.append(_html_table(["key", *labels], lines) if lines else "<p>None that are recorded.</p>")
    for name, figure in figures.items():
        png = figure.read_bytes()
        width = round(_SHOWN_SIZE * int.from_bytes(png[_WIDTH_IN_PNG]))
        picture = base64.b64encode(png).decode()
        body += [
            f"<h2>{escape(name.capitalize())}</h2>",
            f"<p>{escape(FIGURE_TEXTS[name])}</p>",
            f'<img alt="{escape(FIGURE_TEXTS[name])}" width="{width}" src="data:image/png;base64,{picture}">',
        ]
    body.append(f"<p>{escape(origin)}</p>")
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    write_text(
        path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def _shown(rows: Sequence[dict[str, str]], comparison: Comparison) -> list[RenderableType]:
    shown: list[RenderableType] = [pairs(row, title=row["run"]) for row in rows]
    if comparison.settings:
        labels = [row["run"] for row in rows]
        lines = [
            dict(zip(["key", *labels], [key, *values], strict=True)) for key, values in comparison.settings.items()
        ]
        shown.append(table(lines, title="Settings that differ"))
    return [*shown, *(text(note) for note in comparison.notes)]


def _last_validation(course: Course, source: str) -> float:
    return float(course.validation[source][1][-1]) if source in course.validation else math.nan


def _mean(values: Float64[np.ndarray, " n"]) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "-"


def _pauses(saves: Mapping[str, Any]) -> str:
    """Returns the sum of the pauses, and its share of the time with them."""
    pauses = saves["pause_seconds"]
    share = f" ({percent(saves['pause_share'])} of the time)" if pauses else ""
    return f"{pauses:,.2f} s in {counted(saves['saved'] + saves['failed'], 'save')}{share}"


def _by_cause(course: Course) -> str:
    """Returns the share of the steps' time that the mean rank waited for each cause."""
    if course.waits is None:
        return "-"
    return " / ".join(percent(float(shares.mean())) for shares in course.waits.shares.values())


def _share(shares: Float64[np.ndarray, " n"]) -> str:
    """Returns the share in the median step."""
    _, median, _ = quartiles(shares)
    return percent(median) if math.isfinite(median) else "-"


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
