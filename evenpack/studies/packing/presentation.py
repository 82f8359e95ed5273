"""Tables and figures of lengths, and of the efficiency of packs."""

from collections.abc import Mapping, Sequence
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
from evenpack.studies.lengths.statistics import HistogramDistance, length_ranges, length_statistics
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


def lengths_shown(subject: Subject) -> list[RenderableType]:
    """Returns the statistics of a subject's lengths with the cost of padding, and their histogram."""
    histogram, pack_length = subject.histogram, subject.pack_length
    statistics, ranges = length_statistics(histogram, pack_length=pack_length), length_ranges(histogram)
    most = max(bar.sequences for bar in ranges)
    columns = (
        Column("tokens", lambda bar: f"{bar.shortest:,} to {bar.longest:,}"),
        Column("sequences"),
        Column("share", lambda bar: bar.sequences / statistics.sequences, ".2%"),
        Column("", lambda bar: "█" * round(_BAR_CELLS * bar.sequences / most)),
    )
    facts = {
        "sequences": statistics.sequences,
        "tokens": statistics.tokens,
        "length": f"shortest {statistics.shortest:,}, mean {statistics.mean:,.1f}, median {statistics.median:,}, "
        f"90 % up to {statistics.percentile_90:,}, 99 % up to {statistics.percentile_99:,}, "
        f"longest {statistics.longest:,}",
        f"padded to {pack_length:,}": f"{percent(statistics.padding_share)} of all slots would be padding; "
        f"packing can be up to {statistics.speed_up_limit:.2f} times as fast",
    }
    return [pairs(facts, title=f"Lengths of {subject.origin}"), table_of(ranges, columns)]


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


_BAR_CELLS = 40
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
    sweep: Sweep | None = None,
) -> None:
    """Draws the lengths, with the lengths of `against` over them, and the efficiency by depth and algorithm.

    With a `sweep` also by depth and pack length. `footer`: what the figure is of.

    Raises: ConfigError without matplotlib.
    """
    widths = [_LENGTHS_INCHES, *[_CURVES_INCHES] * (1 if sweep is None else 2)]
    with figure_as_png(path, width=sum(widths), height=_HEIGHT_INCHES) as figure:
        panels = figure.subplots(1, len(widths), width_ratios=widths)
        _draw_lengths(panels[0], name, histogram, rows[0].pack_length, against)
        _draw_efficiencies(panels[1], rows)
        if sweep is not None:
            _draw_pack_lengths(panels[2], sweep)
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
    shares: Float64[np.ndarray, " bars"] = 100.0 * counts / histogram.sequences
    return shares


def _draw_efficiencies(axes: Any, rows: Sequence[PackingRow]) -> None:
    alone = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == "none"]
    curves = {}
    for algorithm in dict.fromkeys(row.algorithm for row in rows if row.algorithm != "none"):
        points = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == algorithm]
        # A single depth is a point: a line from no packing would suggest depths that were not tried.
        curves[_in_words(algorithm)] = [*alone, *points] if len(points) > 1 else points
    _draw_curves(axes, curves or {"no packing": alone}, unit=" %", top=100.0)
    axes.set_ylabel("packing efficiency (% of slots)")
    write_title(axes, "Efficiency by depth")


def _draw_pack_lengths(axes: Any, sweep: Sweep) -> None:
    found, curves = sweep.recommended, {}
    for length in dict.fromkeys(row.pack_length for row in sweep.rows):
        points = [(row.depth_limit, 100 * row.efficiency) for row in sweep.rows if row.pack_length == length]
        curves[_slots(length)] = points
    fullest = {_slots(row.pack_length): 100 * row.efficiency for row in sweep.fullest}
    no_limit = len({limit for points in curves.values() for limit, _ in points}) - 1
    for index, name in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot([no_limit], [fullest[name]], "D", color=colour, markerfacecolor="white", zorder=3, clip_on=False)
    _draw_curves(axes, curves, unit=" %", top=100.0, bold=_slots(found.pack_length))
    axes.set_ylabel(f"efficiency (% of slots, {_in_words(sweep.algorithm)}; diamonds: auto)")
    full = fullest[_slots(found.pack_length)]
    write_title(axes, f"Recommended: {_slots(found.pack_length)}, {full:.2f} % full by auto")


def _draw_curves(
    axes: Any,
    curves: Mapping[str, Sequence[tuple[int | None, float]]],
    *,
    unit: str = "",
    top: float | None = None,
    bold: str | None = None,
) -> None:
    """Draws a line of (limit of depth, value) for each name, which is written at its end; `top`: of the axes."""
    limits = {limit for points in curves.values() for limit, _ in points}
    ordered = [*sorted(limit for limit in limits if limit is not None), *([None] if None in limits else [])]
    places = {limit: index for index, limit in enumerate(ordered)}
    for index, (name, points) in enumerate(curves.items()):
        steps, values = [places[limit] for limit, _ in points], [value for _, value in points]
        where = "" if steps[-1] == len(ordered) - 1 else f" at depth {ordered[steps[-1]]}"
        style = {**line_style(index), "label": f"{name} {values[-1]:.2f}{unit}{where}"}
        # Lines below stay visible.
        width = max(1.4, 2.9 - 0.5 * index) if bold is None else 3.2 if name == bold else 1.4
        axes.plot(steps, values, **style, linewidth=width, marker="o", markersize=2 * width, clip_on=False)
    axes.set_xticks(range(len(ordered)), ["no limit" if limit is None else str(limit) for limit in ordered])
    axes.set_xlabel("most sequences a pack may hold")
    axes.set_xlim(-0.3, len(ordered) - 0.7)
    axes.set_ylim(top=top)
    label_ends(axes)


def _slots(pack_length: int) -> str:
    return f"{pack_length:,} slots"


def _in_words(algorithm: str) -> str:
    return algorithm.replace("_", " ")
