"""The waits of a run as tables, and as a figure by cause over the steps and by rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType

from evenpack.console import pairs, percent, text
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.engine.reporting.rank_waits import LEARNING_STEPS
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.studies.columns import Column, table_of
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.provenance import provenance_of_runs
from evenpack.studies.waits.accounting import Episode, RankRow, WaitCourse, WaitsOfRun

MOST_RANKS = 32
"""Ranks that tables and figures show; of more, those for which the others waited longest."""

NAME = Column("time in steps", "name")
HOURS = Column("device hours", "device_hours", ",.4g")
SHARE = Column("share", "share", ".2%")
RANK = Column("rank")
WAITED_FOR = Column("waited for, h", "waited_for_hours", ",.4g", axis="device hours that the others waited for it")
_OF_RANK = (
    RANK,
    Column("host", missing="not recorded"),
    Column("cost / mean", "cost_over_mean", ".4f"),
    *(Column(f"{cause}, h", f"hours.{cause}", ",.4g") for cause in WAIT_CAUSES),
    WAITED_FOR,
    Column("slower by", "slowness", "+.1%"),
)
_OF_EPISODE = (
    RANK,
    Column("host", missing="not recorded"),
    Column("device", missing="not recorded"),
    Column("slow in", lambda one: {"compute": "its passes", "loader": "its batches"}[one.kind]),
    Column("since step", "since", ",d"),
    Column("named at", "named", ",d"),
    Column("slower by", "slow_by", "+.1%"),
    Column("until", lambda one: None if one.ended is None else f"{one.ended:,} ({one.end})", missing="the end"),
)

COLOUR_OF = dict(zip(WAIT_CAUSES, COLOURS, strict=False))
_MOST_BINS = 120


def waits_tables(found: WaitsOfRun) -> list[RenderableType]:
    """Returns the parts of the time, the slow ranks, each rank, the prediction and the notes."""
    shown: list[RenderableType] = [
        table_of(
            found.parts,
            (NAME, HOURS, SHARE),
            title=f"{found.run}: {found.ranks} ranks, {found.steps:,} steps, {found.split_steps:,} split by cause",
        ),
        _slow_ranks(found.episodes, found.least_slowdown),
    ]
    if found.by_rank:
        shown.append(table_of(chosen_ranks(found.by_rank), _OF_RANK, title=_title_of_ranks(found.by_rank)))
    if found.prediction is not None:
        said = found.prediction
        shown.append(
            pairs(
                {
                    "replayed on one device": f"{percent(said.wait_share)} ({said.measured_on})",
                    "measured: plan, machine and noise": percent(found.slowest_share),
                    "measured: plan alone": percent(next(one.share for one in found.parts if one.name == "plan")),
                },
                title="Share of the devices' time that they wait for the slowest pass",
            )
        )
    return [*shown, *(text(note) for note in found.notes)]


def chosen_ranks(rows: Sequence[RankRow]) -> Sequence[RankRow]:
    """Returns all ranks, or of many those for which the others waited longest, in the order of ranks."""
    most = sorted(rows, key=lambda row: row.waited_for_hours, reverse=True)[:MOST_RANKS]
    return sorted(most, key=lambda row: row.rank)


def _title_of_ranks(rows: Sequence[RankRow]) -> str:
    of = "Each rank" if len(rows) <= MOST_RANKS else f"The {MOST_RANKS} of {len(rows):,} ranks most waited for"
    return f"{of}: hours that it waited by cause, and that all others waited for it"


def _slow_ranks(episodes: Sequence[Episode], least_slowdown: float | None) -> RenderableType:
    if least_slowdown is None:
        return text(
            f"No rank has been judged yet: each first learns how it varies, from {LEARNING_STEPS} steps that are split."
        )
    if not episodes:
        return text(f"No rank was slow: slowdowns from {percent(least_slowdown)} on would be named.")
    return table_of(episodes, _OF_EPISODE, title="Ranks that were slow")


def plot_waits(found: WaitsOfRun, course: WaitCourse, path: Path) -> None:
    """Draws, by cause, the share of the time that devices wait in each step, the hours lost so far, and those by rank.

    Raises: ConfigError without matplotlib.
    """
    panels = 3 if found.by_rank else 2
    with figure_as_png(path, width=5.6 * panels, height=4.4) as figure:
        over_time, so_far, *by_rank = figure.subplots(1, panels, gridspec_kw={"wspace": 0.28})
        draw_course(over_time, course)
        write_title(over_time, "Waits in each step")
        _draw_hours(so_far, course)
        for axes in (over_time, so_far):
            _mark(axes, found.episodes, last=int(course.steps[-1]))
        if by_rank:
            _draw_ranks(by_rank[0], found)
        handles, labels = over_time.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.1, 0.98), ncols=len(labels), frameon=False)
        lines = [provenance_of_runs(found.run, [read_run_record(found.output_dir)])]
        if found.episodes:
            lines.append("Grey: a rank is named as slow, with its number.")
        write_footer(figure, lines)


def draw_course(axes: Any, course: WaitCourse) -> None:
    """Draws the waits of the mean rank by cause, one on top of another, as means over parts of the steps."""
    edges = np.unique(np.linspace(0, len(course.steps), min(_MOST_BINS, len(course.steps)) + 1).astype(int))[:-1]
    steps = np.append(course.steps[edges], course.steps[-1] + 1)
    heights = np.maximum([100 * _binned(course.shares[cause], edges) for cause in WAIT_CAUSES], 0.0)
    tops = np.cumsum(heights, axis=0)
    for cause, top, height in zip(WAIT_CAUSES, tops, heights, strict=True):
        axes.stairs(top, steps, baseline=top - height, fill=True, color=COLOUR_OF[cause], label=cause, linewidth=0)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("waiting (% of the devices' time)")
    axes.set_ylim(0.0, max(1.0, 1.15 * float(tops[-1].max())))


def _draw_hours(axes: Any, course: WaitCourse) -> None:
    """Draws the device hours that were lost up to each step: a line for each cause, because noise may sum below 0."""
    for cause in WAIT_CAUSES:
        axes.plot(course.steps, np.cumsum(course.hours[cause]), color=COLOUR_OF[cause], linewidth=2.0)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("device hours lost so far")
    lost = sum(float(hours.sum()) for hours in course.hours.values())
    write_title(axes, f"Device hours lost to each cause: {lost:,.3g} in all")


def _binned(values: Float64[np.ndarray, " n"], edges: Any) -> Float64[np.ndarray, " bins"]:
    return np.add.reduceat(values, edges) / np.diff(np.append(edges, len(values)))


def _mark(axes: Any, episodes: Sequence[Episode], *, last: int) -> None:
    """Shades the steps in which a rank was slow, and writes its number."""
    for one in episodes:
        axes.axvspan(one.since, last if one.ended is None else one.ended, color=INK, alpha=0.1, linewidth=0)
        axes.annotate(
            f"rank {one.rank}", (one.since, 1.0), xycoords=("data", "axes fraction"), fontsize=8, va="top", rotation=90
        )


def _draw_ranks(axes: Any, found: WaitsOfRun) -> None:
    rows = chosen_ranks(found.by_rank)
    places = np.arange(len(rows))
    bottom = np.zeros(len(rows))
    for cause in WAIT_CAUSES:
        hours = np.maximum([row.hours[cause] for row in rows], 0.0)
        axes.bar(places, hours, bottom=bottom, color=COLOUR_OF[cause], width=0.7)
        bottom = bottom + hours
    axes.plot(places, WAITED_FOR.numbers(rows), "o", color=INK, markersize=5)
    axes.set_xticks(places, [str(row.rank) for row in rows], fontsize=10 if len(rows) < 17 else 7)
    axes.set_xlabel(RANK.label)
    axes.set_ylabel("device hours")
    write_title(axes, "Hours that each rank waited (bars)\nand was waited for by the others (dots)")
