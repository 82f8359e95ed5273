"""`evenpack report`: reads runs, compares them, draws them, writes the page."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType

from evenpack.console import Report, pairs, percent, table, text
from evenpack.errors import ConfigError
from evenpack.progress import format_rate
from evenpack.studies.plotting import require_matplotlib
from evenpack.studies.report.comparison import Comparison, compare
from evenpack.studies.report.figures import draw_figures, quartiles
from evenpack.studies.report.page import write_page
from evenpack.studies.report.reading import Course, ReportedRun, read_runs
from evenpack.units import counted
from evenpack.version import VERSION

PAGE = "report.html"

_LAST_SHARE = 0.02
"""Share of the steps, at the end, over which the last training loss is a mean."""


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
    write_page(page, rows, comparison, figures, origin=f"Written by evenpack {VERSION} at {now}.")
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


def _shown(rows: Sequence[dict[str, str]], comparison: Comparison) -> list[RenderableType]:
    shown: list[RenderableType] = [pairs(row, title=row["run"]) for row in rows]
    if comparison.settings:
        labels = [row["run"] for row in rows]
        lines = [
            dict(zip(["key", *labels], [key, *values], strict=True)) for key, values in comparison.settings.items()
        ]
        shown.append(table(lines, title="Settings that differ"))
    return [*shown, *(text(note) for note in comparison.notes)]


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
