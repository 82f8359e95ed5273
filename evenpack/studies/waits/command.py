"""The work of `evenpack waits`."""

from pathlib import Path

from evenpack.console import Report, text
from evenpack.studies.plotting import require_plot
from evenpack.studies.waits.accounting import read_waits
from evenpack.studies.waits.presentation import plot_waits, waits_tables


def explain_waits(output_dir: Path, *, replay: Path | None, plot: Path | None) -> Report:
    """Returns the waits of a run. Raises: as `read_waits`; ConfigError for a plot that cannot be drawn."""
    require_plot(plot)
    found, course = read_waits(output_dir, replay=replay)
    shown = waits_tables(found)
    if plot is not None:
        plot_waits(found, course, plot)
        shown.append(text(f"Wrote {plot}"))
    return Report(value=found, shown=shown)
