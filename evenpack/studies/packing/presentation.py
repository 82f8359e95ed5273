"""Tables and figures of lengths, and of the efficiency of packs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from evenpack.console import pairs, percent, table, text
from evenpack.data.packing import LengthHistogram
from evenpack.studies.columns import Column, cells_across, table_of
from evenpack.studies.lengths.statistics import HistogramDistance, length_statistics
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.packing.study import Against, PackingRow, PaddingRow, Recommendation, Sweep
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, label_ends, line_style, write_footer, write_title

_DEPTH_LIMIT = Column("depth limit", "depth_limit", "d", missing="none")
_PACKINGS = (
    Column("algorithm"),
    _DEPTH_LIMIT,
    Column("depth"),
    Column("strategies"),
    Column("packs"),
    Column("bound", "lower_bound"),
    Column("efficiency", form=".3%"),
    Column("padding"),
    Column("factor", "packing_factor", ".3f"),
    Column("above bound", "gap", ".4%"),
    Column("CPU ms", "cpu_seconds", ".1f", scale=1e3),
)
_BATCHES = (
    Column("batch size", "batch_size", ","),
    Column("slots"),
    Column("efficiency", form=".2%"),
    Column("speed-up", "speed_up", ".3f"),
)
_FULL_AND_FAST = Column("", lambda row: f"{100 * row.efficiency:.1f} % {row.speed_up:.2f}x")


def packing_table(rows: Sequence[PackingRow]) -> Table:
    """Returns a table of algorithms at several depths."""
    return table_of(rows, _PACKINGS, title=f"Packs of {rows[0].pack_length:,} slots")


def sorted_batches_table(rows: Sequence[PaddingRow]) -> Table:
    """Returns the results of padding instead of packing."""
    return table_of(
        rows, _BATCHES, title="For comparison: sorted by length, cut into batches, each padded to its longest"
    )


def recommendation_text(found: Recommendation) -> Text:
    """Returns the settings to write into the run file."""
    lines = [
        f"Recommended: data.pack_length={found.pack_length} ({found.reason}), data.packing.algorithm=auto: "
        f"{percent(found.efficiency)} full"
    ]
    if found.sufficient_depth is not None:
        lines.append(
            f"If a model needs few sequences per pack: data.packing.max_sequences_per_pack={found.sufficient_depth} "
            f"still fills {percent(found.efficiency_at_depth)}"
        )
    return text("\n".join(lines))


def sweep_shown(sweep: Sweep) -> list[RenderableType]:
    """Returns efficiency and speed-up over padding by pack length and limit of depth, and the recommendation."""
    by_pack_length = {
        f"{length:,} slots": [row for row in sweep.rows if row.pack_length == length]
        for length in dict.fromkeys(row.pack_length for row in sweep.rows)
    }
    lines = cells_across(by_pack_length, heading=_DEPTH_LIMIT, value=_FULL_AND_FAST)
    for line, row in zip(lines, sweep.fullest, strict=True):
        line["auto, none"] = _FULL_AND_FAST.text(row)
    title = f"Pack lengths by limit of depth ({sweep.algorithm}): efficiency, speed-up over padding"
    return [table(lines, title=title), recommendation_text(sweep.recommended)]


def lengths_table(subject: Subject) -> Table:
    """Returns the statistics of a subject's lengths with the cost of padding."""
    histogram, pack_length = subject.histogram, subject.pack_length
    statistics = length_statistics(histogram, pack_length=pack_length)
    facts = {
        "sequences": statistics.sequences,
        "tokens": statistics.tokens,
        "length": f"shortest {statistics.shortest:,}, mean {statistics.mean:,.1f}, median {statistics.median:,}, "
        f"90 % up to {statistics.percentile_90:,}, 99 % up to {statistics.percentile_99:,}, "
        f"longest {statistics.longest:,}",
        f"padded to {pack_length:,}": f"{percent(statistics.padding_share)} of all slots would be padding; "
        f"packing can be up to {statistics.speed_up_limit:.2f} times as fast",
    }
    return pairs(facts, title=f"Lengths of {subject.origin}")


def distance_table(found: HistogramDistance) -> Table:
    """Returns the distances of lengths to another histogram as a table."""
    return pairs(
        {
            "other": f"{found.sequences:,} sequences, mean {found.mean_length:,.1f}, longest {found.longest:,}",
            "total variation": f"{found.total_variation:.4f}: fraction of sequences that would have to change length",
            "largest CDF gap": f"{found.largest_cdf_gap:.4f}: between the fractions of sequences up to a length",
        },
        title=f"Lengths compared with those of {found.origin}",
    )


_MAX_BARS = 64
_HEIGHT_INCHES = 4.2
_LENGTHS_INCHES = 5.7
_CURVES_INCHES = 7.5
"""With the names of lines at their ends."""


def plot_packing(
    name: str,
    histogram: LengthHistogram,
    rows: Sequence[PackingRow],
    path: Path,
    *,
    footer: Sequence[str],
    against: Against | None = None,
) -> None:
    """Draws the lengths, with the lengths of `against` over them, and the efficiency by depth and algorithm.

    `footer`: what the figure is of.

    Raises: ConfigError without matplotlib.
    """
    widths = [_LENGTHS_INCHES, _CURVES_INCHES]
    with figure_as_png(path, width=sum(widths), height=_HEIGHT_INCHES) as figure:
        panels = figure.subplots(1, len(widths), width_ratios=widths)
        _draw_lengths(panels[0], name, histogram, rows[0].pack_length, against)
        _draw_efficiencies(panels[1], rows)
        write_footer(figure, footer)


def _draw_lengths(axes: Any, name: str, drawn: LengthHistogram, pack_length: int, against: Against | None) -> None:
    longest = max(pack_length, drawn.longest, 0 if against is None else against.histogram.longest)
    width = -(-longest // _MAX_BARS)
    edges = np.arange(0, longest + width, width)
    statistics = length_statistics(drawn, pack_length=pack_length)
    bars = {"color": COLOURS[0], "alpha": 0.85, "linewidth": 0.4, "edgecolor": "white", "label": name}
    axes.bar(edges[:-1] + 0.5, percent_between(drawn, edges), width=width, align="edge", **bars)
    dashes, median = (0, (4, 3)), f"median {statistics.median:,}"
    axes.axvline(statistics.median, color=INK, linewidth=1.0, linestyle=dashes, label=median)
    if against is not None:
        shares = percent_between(against.histogram, edges)
        axes.stairs(shares, edges + 0.5, color=COLOURS[1], linewidth=1.8, label=against.name)
    axes.legend(frameon=False, loc="best")
    axes.set_xlim(0, edges[-1] + 0.5)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("sequences (%)" if width == 1 else f"sequences (% per {width:,} tokens of length)")
    write_title(axes, f"Padding to {pack_length:,} would waste {100 * statistics.padding_share:.1f} % of all slots")


def percent_between(histogram: LengthHistogram, edges: np.ndarray) -> Float64[np.ndarray, " bars"]:
    """Returns the percentage of sequences longer than each of the ascending `edges` and no longer than the next."""
    up_to = np.append(0, np.cumsum(histogram.counts))
    counts = np.diff(up_to[np.minimum(edges, len(up_to) - 1)])
    return 100.0 * counts / histogram.sequences


def _draw_efficiencies(axes: Any, rows: Sequence[PackingRow]) -> None:
    """Draws a line of (limit of depth, efficiency) for each algorithm, whose name is written at its end."""
    alone = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == "none"]
    curves: dict[str, list[tuple[int | None, float]]] = {}
    for algorithm in dict.fromkeys(row.algorithm for row in rows if row.algorithm != "none"):
        points = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == algorithm]
        # A single depth is a point: a line from no packing would suggest depths that were not tried.
        curves[algorithm.replace("_", " ")] = [*alone, *points] if len(points) > 1 else points
    limits = {row.depth_limit for row in rows}
    ordered = [*sorted(limit for limit in limits if limit is not None), *([None] if None in limits else [])]
    places = {limit: index for index, limit in enumerate(ordered)}
    for index, (name, points) in enumerate((curves or {"no packing": alone}).items()):
        steps, values = [places[limit] for limit, _ in points], [value for _, value in points]
        where = "" if steps[-1] == len(ordered) - 1 else f" at depth {ordered[steps[-1]]}"
        style = {**line_style(index), "label": f"{name} {values[-1]:.2f} %{where}"}
        width = max(1.4, 2.9 - 0.5 * index)  # lines below stay visible
        axes.plot(steps, values, **style, linewidth=width, marker="o", markersize=2 * width, clip_on=False)
    axes.set_xticks(range(len(ordered)), ["no limit" if limit is None else str(limit) for limit in ordered])
    axes.set_xlabel("most sequences a pack may hold")
    axes.set_ylabel("packing efficiency (% of slots)")
    axes.set_xlim(-0.3, len(ordered) - 0.7)
    axes.set_ylim(top=100.0)
    label_ends(axes)
    write_title(axes, "Efficiency by depth")
