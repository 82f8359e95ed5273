"""The waits of a run as tables."""

from pathlib import Path

from rich.console import RenderableType

from evenpack.console import Report, percent, text
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.engine.reporting.rank_waits import LEARNING_STEPS
from evenpack.studies.columns import Column, table_of
from evenpack.studies.waits.accounting import WaitsOfRun, read_waits

MOST_RANKS = 32
"""Ranks that the table shows; of more, those for which the others waited longest."""

_PARTS = (
    Column("time in steps", "name"),
    Column("device hours", "device_hours", ",.4g"),
    Column("share", form=".2%"),
)
_OF_RANK = (
    Column("rank"),
    Column("host", missing="not recorded"),
    Column("cost / mean", "cost_over_mean", ".4f"),
    *(Column(f"{cause}, h", f"hours.{cause}", ",.4g") for cause in WAIT_CAUSES),
    Column("waited for, h", "waited_for_hours", ",.4g"),
    Column("slower by", "slowness", "+.1%"),
)
_OF_EPISODE = (
    Column("rank"),
    Column("host", missing="not recorded"),
    Column("device", missing="not recorded"),
    Column("slow in", lambda one: {"compute": "its passes", "loader": "its batches"}[one.kind]),
    Column("since step", "since", ",d"),
    Column("named at", "named", ",d"),
    Column("slower by", "slow_by", "+.1%"),
    Column("until", lambda one: None if one.ended is None else f"{one.ended:,} ({one.end})", missing="the end"),
)


def explain_waits(output_dir: Path) -> Report:
    """Returns the waits of a run. Raises: as `read_waits`."""
    found = read_waits(output_dir)
    return Report(value=found, shown=waits_tables(found))


def waits_tables(found: WaitsOfRun) -> list[RenderableType]:
    """Returns the parts of the time, the slow ranks, each rank and the notes."""
    title = f"{found.run}: {found.ranks} ranks, {found.steps:,} steps, {found.split_steps:,} split by cause"
    shown: list[RenderableType] = [table_of(found.parts, _PARTS, title=title), _slow_ranks(found)]
    if found.by_rank:
        most = sorted(found.by_rank, key=lambda row: row.waited_for_hours, reverse=True)[:MOST_RANKS]
        count = len(found.by_rank)
        of = "Each rank" if count <= MOST_RANKS else f"The {MOST_RANKS} of {count:,} ranks most waited for"
        title = f"{of}: hours that it waited by cause, and that all others waited for it"
        shown.append(table_of(sorted(most, key=lambda row: row.rank), _OF_RANK, title=title))
    return [*shown, *map(text, found.notes)]


def _slow_ranks(found: WaitsOfRun) -> RenderableType:
    if found.least_slowdown is None:
        return text(
            f"No rank has been judged yet: each first learns how it varies, from {LEARNING_STEPS} steps that are split."
        )
    if not found.episodes:
        return text(f"No rank was slow: slowdowns from {percent(found.least_slowdown)} on would be named.")
    return table_of(found.episodes, _OF_EPISODE, title="Ranks that were slow")
