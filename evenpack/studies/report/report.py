"""`evenpack report`: reads runs, compares them, draws them, and writes a self-contained HTML page."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType

from evenpack.console import Report, pairs, percent, table, text
from evenpack.errors import ConfigError
from evenpack.files import write_text
from evenpack.progress import format_rate
from evenpack.studies.plotting import require_matplotlib
from evenpack.studies.report.comparison import Comparison, Course, ReportedRun, compare, read_runs
from evenpack.studies.report.figures import draw_figures, quartiles
from evenpack.units import counted
from evenpack.version import VERSION

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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder} is not a folder: {error.strerror}; name another one") from error
    comparison = compare(runs)
    figures = draw_figures(runs, comparison, folder)
    sources = list(dict.fromkeys(source for run in runs for source in run.course.validation))
    rows = [row_of(run, sources) for run in runs]
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


def row_of(run: ReportedRun, sources: Sequence[str]) -> dict[str, str]:
    """Returns a run in words, for tables, with the same keys for each run of a report."""
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
        "training loss at the end": _loss(_mean(losses)) + (" (masked tokens)" if run.has_two_losses else ""),
        **{f"validation on {source}": _loss(_last_validation(course, source)) for source in sources},
        "tokens/s of the median step (middle half)": f"{median} ({low} to {high})",
        "padding share of all steps": percent(1 - course.tokens[-1] / course.slots[-1]) if slots else "-",
        "waiting for batches in the median step": _share(course.loader_share),
        "waiting for the slowest rank in the median step": _share(course.straggler_share),
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


def _share(shares: Float64[np.ndarray, " n"]) -> str:
    """Returns the share in the median step."""
    _, median, _ = quartiles(shares)
    return percent(median) if math.isfinite(median) else "-"


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
