"""Forecasts of the slowest rank beside what was measured, by number of ranks."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.forecast.bands import NORMAL_95
from evenpack.studies.forecast.forecast import METHODS, ForecastStudy, FormForecast
from evenpack.studies.forecast.real_run import RealRun, form_of_run
from evenpack.studies.origins import origin_of_runs
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title

_WIDTH_INCHES = 13.0
_ROW_INCHES = 4.6
_LINE_CHARACTERS = 165
_TOP = 0.88
"""Upper end of the axes, as a fraction of the figure's height."""
_TITLE_INCHES = 0.45
_REAL: dict[str, Any] = {
    "color": "#111111",
    "marker": "D",
    "markersize": 9,
    "markerfacecolor": "#facc15",
    "markeredgewidth": 1.6,
    "linestyle": "none",
    "zorder": 6,
}
_MEASURED: dict[str, Any] = {
    "color": INK,
    "marker": "o",
    "markersize": 7,
    "linestyle": "none",
    "capsize": 4,
    "zorder": 5,
}


def plot_forecast(study: ForecastStudy, path: Path, *, real: RealRun | None, warnings: Sequence[str]) -> None:
    """Draws a row for each layout: seconds of the slowest rank on the left, slowest over mean rank on the right.

    Raises: ConfigError without matplotlib.
    """
    forms = study.forms
    with figure_as_png(path, width=_WIDTH_INCHES, height=_ROW_INCHES * len(forms)) as figure:
        grid = {"wspace": 0.22, "hspace": 0.45, "left": 0.07, "right": 1.0, "bottom": 0.14 / len(forms), "top": _TOP}
        rows = figure.subplots(len(forms), 2, squeeze=False, gridspec_kw=grid)
        for (seconds, waiting), form in zip(rows, forms, strict=True):
            _draw(seconds, form, is_relative=False)
            seconds.axhline(form.one_rank_seconds, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="_one rank")
            seconds.set_ylabel("slowest rank of a step (s)")
            write_title(seconds, _finding(form))
            _draw(waiting, form, is_relative=True)
            if real is not None and form_of_run(real) in (None, form.form):
                waiting.plot([real.logged.ranks], [real.logged.wait], label=_real_label(real), **_REAL)
            waiting.set_ylabel("slowest / mean rank (1: no waiting)")
            write_title(waiting, f"{form.form}: how long ranks wait")
        figure.legend(
            handles=_handles(study, list(rows[:, 1])),
            loc="lower left",
            bbox_to_anchor=(0.02, _TOP + _TITLE_INCHES / figure.get_figheight()),
            frameon=False,
            fontsize=9.5,
        )
        lines = [*_caption(study, warnings), *_origins(study, real)]
        write_footer(figure, [part for line in lines for part in textwrap.wrap(line, _LINE_CHARACTERS)])


def _draw(axes: Any, form: FormForecast, *, is_relative: bool) -> None:
    """Draws forecasts with their bands, and what was measured; relative to the mean rank or in seconds."""
    for method, colour in zip(METHODS, COLOURS, strict=False):
        rows = [row for row in form.rows if method in row.forecasts]
        if not rows:
            continue
        ranks = [row.ranks for row in rows]
        scales = [1.0 / row.mean_forecasts[method] if is_relative else 1.0 for row in rows]
        reaches = [row.intervals.get(method) for row in rows]
        axes.fill_between(
            ranks,
            [scale * reach.low if reach else np.nan for scale, reach in zip(scales, reaches, strict=True)],
            [scale * reach.high if reach else np.nan for scale, reach in zip(scales, reaches, strict=True)],
            color=colour,
            alpha=0.14,
            linewidth=0,
        )
        values = [scale * row.forecasts[method] for scale, row in zip(scales, rows, strict=True)]
        axes.plot(ranks, values, color=colour, linewidth=1.8, linestyle="--", marker="s", markersize=5, label=method)
    scales = [row.measured_wait / row.measured_seconds if is_relative else 1.0 for row in form.rows]
    axes.errorbar(
        [row.ranks for row in form.rows],
        [row.measured_seconds * scale for row, scale in zip(form.rows, scales, strict=True)],
        yerr=[NORMAL_95 * row.standard_error * scale for row, scale in zip(form.rows, scales, strict=True)],
        label="measured",
        **_MEASURED,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.ranks for row in form.rows], [f"{row.ranks:,}" for row in form.rows])
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_xlabel("ranks (logarithmic)")


def _handles(study: ForecastStudy, panels: Sequence[Any]) -> list[Any]:
    """Returns a handle for each kind of line and point, with what it is called."""
    drawn = [pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in drawn}
    options = study.options
    for method in (method for method in METHODS if method in handles):
        handles[method].set_label(
            f"ESTIMATED by {method} from {options.fit_steps} steps of one rank; band: 95 % of its sampling error"
        )
    handles["measured"].set_label(
        f"MEASURED: {options.steps} steps of the ranks, in turn on one device; bar: 95 %. Dotted: the mean of one rank"
    )
    return list(handles.values())


def _real_label(real: RealRun) -> str:
    return f"MEASURED: real run {real.label}, {real.logged.steps} steps on {real.logged.ranks} ranks at once"


def _finding(form: FormForecast) -> str:
    errors = [100 * error for row in form.rows for error in row.errors.values()]
    return f"{form.form}: forecasts are {min(errors):+.1f} to {max(errors):+.1f} % off"


def _caption(study: ForecastStudy, warnings: Sequence[str]) -> list[str]:
    origin = study.measured_on
    return [
        f"{origin.model}, {origin.layers} layers of {origin.hidden_size}, {origin.precision}; {study.rows_per_rank} "
        f"rows per rank and step; {study.options.clock} clock. Forward and backward passes, without all-reduce and "
        "optimizer.",
        *(f"WARNING: {warning}." for warning in warnings),
    ]


def _origins(study: ForecastStudy, real: RealRun | None) -> list[str]:
    origin = study.measured_on
    commit = "no checkout" if origin.commit is None else f"commit {origin.commit}"
    own = f"{study.run}: data {study.data}; evenpack {origin.evenpack}, {commit}; 1 x {origin.device}"
    return [own, *([] if real is None else [f"Real run {origin_of_runs(real.label, [real.record])}"])]
