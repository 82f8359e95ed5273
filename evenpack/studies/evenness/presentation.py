"""`evenpack study evenness` as a table and a figure: costs of packs, and how long devices wait."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from evenpack.studies.columns import Column, table_of
from evenpack.studies.evenness.study import EvennessRow, PackCosts, ToleranceRow
from evenpack.studies.plotting import (
    COLOURS,
    INK,
    draw_series,
    figure_as_png,
    label_ends,
    logarithmic_counts,
    write_footer,
    write_title,
)

_COLUMNS = (
    Column("model"),
    Column("devices", form=","),
    Column("packs are", "packs_are"),
    Column("packs", form=","),
    Column("attention", "attention_share", ".1%"),
    Column("deviation", form=".2%"),
    Column("most / mean", "most", ".3f"),
    Column("waiting", form=".2%"),
    Column("TFLOP / pack", "pack_flops", ",.3f", scale=1e-12),
    Column("waiting, TFLOP / pack", "waiting_flops", ",.3f", scale=1e-12),
    Column("time", form=".3f"),
)
_OF_TOLERANCE = (
    Column("model"),
    Column("devices", form=","),
    Column("met by", "met_by"),
    Column("full packs wait", "full", ".2%"),
    Column("at least", "least", ".2%"),
    Column("missed by", lambda row: row.missed_by or None, ".2%", missing="-"),
    Column("or: devices", "fewer_devices", ","),
    Column("packs each, by arrival", "packs_by_arrival", missing="more than 64"),
    Column("packs each, planned", "packs_planned", missing="more than 64"),
    Column("sequences up to", "cut_at", ",", missing="no length"),
)
_LINES = {
    "full": ("full packs", "-"),
    "even": ("even packs", "-"),
    "least": ("least possible (bound)", ":"),
    "planned": ("full packs, planned by cost", "-"),
}
_DEVICES = Column("devices")
_WAITING = Column("waiting", axis="waiting for the slowest\n(% of the devices' time)", scale=100.0)


def evenness_table(rows: Sequence[EvennessRow], *, pack_length: int) -> Table:
    """Returns a line for each model, number of devices, and packing."""
    return table_of(rows, _COLUMNS, title=f"Packs of {pack_length:,} slots, one to each device as they come")


def tolerance_table(rows: Sequence[ToleranceRow], *, tolerance: float) -> Table:
    """Returns what meets the tolerance: a packing, or each of the other means alone, with full packs."""
    title = f"Waiting of at most {100 * tolerance:g} %: which packing meets it, and what alone would do with full packs"
    return table_of(rows, _OF_TOLERANCE, title=title)


def plot_evenness(
    of_models: Sequence[PackCosts], rows: Sequence[EvennessRow], path: Path, *, footer: Sequence[str]
) -> None:
    """Draws, for each model, the costs of packs in ascending order, and waiting by the number of devices.

    Raises: ConfigError without matplotlib.
    """
    devices = sorted({row.devices for row in rows})
    with figure_as_png(path, width=13.0, height=4.4 * len(of_models)) as figure:
        panels = figure.subplots(len(of_models), 2, squeeze=False, gridspec_kw={"wspace": 0.3, "hspace": 0.45})
        for (left, right), costs in zip(panels, of_models, strict=True):
            packings, ends = costs.by_name(devices[0]), []
            for colour, (name, (label, dashes)) in zip(COLOURS, _LINES.items(), strict=False):
                style: dict[str, Any] = {
                    "color": colour,
                    "linestyle": dashes,
                    "linewidth": 2.4 if dashes == ":" else 1.6,
                }
                if name in packings:
                    values = np.sort(packings[name])
                    left.plot(np.linspace(0, 100, len(values)), values / values.mean(), **style)
                of_name = [row for row in rows if (row.model, row.packs_are) == (costs.model.name, name)]
                heights = draw_series(right, of_name, x=_DEVICES, y=_WAITING, marker="o", markersize=4, **style)
                ends.append((f"{label} {heights[-1]:.1f} %", heights[-1], colour))
            left.axhline(1.0, color=INK, linewidth=0.8)
            left.set_xlabel("packs, by cost (%)")
            left.set_ylabel("cost / mean cost")
            write_title(left, f"{costs.model.name}: costs of packs of {costs.pack_length:,} slots")
            logarithmic_counts(right, devices, label="devices")
            right.set_ylim(bottom=0.0)
            label_ends(right, ends)
            write_title(right, f"{costs.model.name}: waiting")
        write_footer(figure, footer)
