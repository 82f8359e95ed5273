"""Figures as PNG. matplotlib is an extra: without it nothing else is missing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.data.packing import LengthHistogram
from evenpack.errors import ConfigError
from evenpack.files import atomic_open
from evenpack.studies.lengths.statistics import LengthStatistics, length_ranges
from evenpack.studies.packing.packing import PackingRow

_INK = "#1f2933"
_FAINT = "#9aa5b1"
_GRID = "#e4e7eb"
COLOURS = ("#2563eb", "#e8590c", "#0f9d76", "#9333ea", "#c2255c", "#8d6e00")

_STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}

_MAX_BARS = 64
_LABEL_POINTS = 13.0
"""Height of a line's name."""
_LEADER = 0.03
"""Length of the line that leads to a name, as a share of the axes' width."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of a run by step, in nats a target."""

    steps: Sequence[int]
    losses: Sequence[float]
    validation: Mapping[str, Sequence[tuple[int, float]]]
    """(step, loss) of each source."""


def require_plot(path: Path) -> None:
    """Raises: ConfigError if no PNG can be drawn at `path`, before any work is done for it."""
    require_matplotlib()
    if path.suffix != ".png" or path.is_dir():
        raise ConfigError(f"a plot is a PNG file: give --plot a name like {path.with_suffix('.png')}, not {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent}, where the plot would go, is no folder: {error.strerror}") from error


def require_matplotlib() -> None:
    """Raises: ConfigError if there is none."""
    try:
        import matplotlib  # noqa: F401  # looked for, not used
    except ImportError as error:
        raise ConfigError("plots need matplotlib: install it with `pip install 'evenpack[plots]'`") from error


def plot_loss(curve: LossCurve, path: Path, *, name: str) -> None:
    """The training loss, smoothed over its light raw values, and the validation losses of each source.

    Raises: ConfigError without matplotlib, or if the curve has no step.
    """
    if not curve.steps:
        raise ConfigError(f"run '{name}' has no step yet whose loss could be plotted")
    smoothed = smooth(np.asarray(curve.losses, dtype=np.float64))
    last = _last_step(curve)
    with figure_as_png(path, width=8.0, height=4.5) as figure:
        axes = figure.add_subplot()
        axes.plot(curve.steps, curve.losses, color=COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(curve.steps, smoothed, color=COLOURS[0], linewidth=2.0)
        ends = [(f"training {smoothed[-1]:.2f}", float(smoothed[-1]), COLOURS[0])]
        for index, (source, points) in enumerate(curve.validation.items(), start=1):
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.0, marker="o", markersize=4.5)
            ends.append((f"validation {source} {points[-1][1]:.2f}", points[-1][1], colour))
        axes.set_xlabel("step (optimizer updates)")
        axes.set_ylabel("loss (nats a target)")
        axes.set_xlim(0, last)
        label_ends(axes, ends)
        write_title(axes, f"{name}: loss {curve.losses[0]:.2f} → {smoothed[-1]:.2f} in {curve.steps[-1]:,} steps")


def plot_packing(
    histogram: LengthHistogram,
    statistics: LengthStatistics,
    rows: Sequence[PackingRow],
    path: Path,
    *,
    pack_length: int,
    sweep: Sequence[PackingRow] = (),
) -> None:
    """How long sequences are; how full packs get by depth and algorithm; if given, by depth and pack length (`sweep`).

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=20.0 if sweep else 11.0, height=4.2) as figure:
        ratios = {"width_ratios": [1.15, 1.0, 1.0][: 3 if sweep else 2], "wspace": 0.85 if sweep else 0.28}
        panels = figure.subplots(1, 3 if sweep else 2, gridspec_kw=ratios)
        _draw_lengths(panels[0], histogram, statistics, pack_length)
        _draw_efficiencies(panels[1], rows)
        if sweep:
            _draw_pack_lengths(panels[2], sweep)


def plot_depth_curves(curves: Mapping[str, Sequence[PackingRow]], path: Path) -> None:
    """The speed-up over padding by depth, a curve for each list of lengths.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=8.0, height=4.5) as figure:
        axes = figure.add_subplot()
        _draw_curves(axes, {name: [(row.depth_limit, row.speed_up) for row in rows] for name, rows in curves.items()})
        axes.set_ylabel("speed-up: slots of padded training over slots of packs")
        best = max((row.speed_up, name) for name, rows in curves.items() for row in rows)
        write_title(axes, f"Padding {best[1]} would take {best[0]:.2f} times the slots of its packs")


def smooth(losses: Float64[np.ndarray, " steps"]) -> Float64[np.ndarray, " steps"]:
    """Mean over about a fiftieth of the run around each step, five steps at least; at both ends over fewer."""
    reach = min(max(2, len(losses) // 100), len(losses) // 10)
    window = np.ones(2 * reach + 1)
    return np.convolve(losses, window, mode="same") / np.convolve(np.ones_like(losses), window, mode="same")


def _draw_lengths(axes: Any, histogram: LengthHistogram, statistics: LengthStatistics, pack_length: int) -> None:
    ranges = length_ranges(histogram, bars=_MAX_BARS)
    lefts = [bar.shortest - 0.5 for bar in ranges]
    widths = [bar.longest - bar.shortest + 1 for bar in ranges]
    shares = [100 * bar.sequences / statistics.sequences for bar in ranges]
    axes.bar(lefts, shares, width=widths, align="edge", color=COLOURS[0], alpha=0.85, linewidth=0.4, edgecolor="white")
    axes.axvline(statistics.median, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)))
    width = max(pack_length, histogram.longest)
    at_right = statistics.median > width / 2
    axes.annotate(
        f"median {statistics.median:,}",
        (statistics.median, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if at_right else 5, -4),
        textcoords="offset points",
        ha="right" if at_right else "left",
        va="top",
    )
    axes.set_xlim(0, width + 0.5)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("share of sequences (%)")
    write_title(axes, f"Padding to {pack_length:,} would waste {100 * statistics.padding_share:.1f} % of all slots")


def _draw_efficiencies(axes: Any, rows: Sequence[PackingRow]) -> None:
    alone = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == "none"]
    curves = {}
    for algorithm in dict.fromkeys(row.algorithm for row in rows if row.algorithm != "none"):
        points = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == algorithm]
        # At a single depth it is a point: a line from no packing would tell of depths not tried.
        curves[algorithm.replace("_", " ")] = [*alone, *points] if len(points) > 1 else points
    _draw_curves(axes, curves, unit=" %")
    axes.set_ylabel("packing efficiency (% of slots)")
    axes.set_ylim(top=101)
    best = max(rows, key=lambda row: row.efficiency)
    write_title(axes, f"Packs of up to {best.depth} sequences are {100 * best.efficiency:.2f} % full")


def _draw_pack_lengths(axes: Any, sweep: Sequence[PackingRow]) -> None:
    curves = {
        f"{length:,} slots": [(row.depth_limit, 100 * row.efficiency) for row in sweep if row.pack_length == length]
        for length in dict.fromkeys(row.pack_length for row in sweep)
    }
    _draw_curves(axes, curves, unit=" %")
    axes.set_ylabel("packing efficiency (% of slots)")
    axes.set_ylim(top=101)
    best = max(sweep, key=lambda row: row.efficiency)
    write_title(axes, f"By pack length: {best.pack_length:,} slots get {100 * best.efficiency:.2f} % full")


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[tuple[int | None, float]]], *, unit: str = "") -> None:
    """A line of (limit of depth, value) for each name, which stands at its end."""
    limits = {limit for points in curves.values() for limit, _ in points}
    ordered = [*sorted(limit for limit in limits if limit is not None), *([None] if None in limits else [])]
    places = {limit: index for index, limit in enumerate(ordered)}
    ends = []
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        steps, values = [places[limit] for limit, _ in points], [value for _, value in points]
        width = max(1.4, 2.9 - 0.5 * index)  # those below stay visible
        axes.plot(steps, values, color=colour, linewidth=width, marker="o", markersize=2 * width)
        ends.append((f"{name} {values[-1]:.2f}{unit}", values[-1], colour))
    axes.set_xticks(range(len(ordered)), ["no limit" if limit is None else str(limit) for limit in ordered])
    axes.set_xlabel("most sequences a pack may hold")
    axes.set_xlim(-0.3, len(ordered) - 0.7)
    label_ends(axes, ends)


@contextmanager
def figure_as_png(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """A figure in inches that becomes a PNG, atomically; matplotlib's global state stays as it is."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(path) as file:
            figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0.2)


def write_title(axes: Any, finding: str) -> None:
    axes.set_title(finding, loc="left", fontsize=11.5, fontweight="bold", pad=12)


def label_ends(axes: Any, ends: Sequence[tuple[str, float, str]]) -> None:
    """Writes (text, height, colour) right of the axes where each line ends, moved apart where two would overlap.

    A thin line leads from where a line ends to where its text had to go. On linear and logarithmic axes.
    """
    axes.margins(x=0.02)
    axes.set_ylim(*axes.get_ylim())  # the labels hang on it
    height_points = axes.get_window_extent().height / axes.figure.dpi * 72
    to_fraction = axes.transData + axes.transAxes.inverted()
    at = axes.get_xlim()[1]
    ordered = sorted(
        ((text, float(to_fraction.transform((at, y))[1]), colour) for text, y, colour in ends), key=_height
    )
    gap = _LABEL_POINTS / height_points
    places = spread([end[1] for end in ordered], gap=gap, low=0.0)
    for (text, height, colour), place in zip(ordered, places, strict=True):
        moved = abs(place - height) > gap / 2
        if moved:
            axes.plot(
                [1.0, 1.0 + _LEADER],
                [height, place],
                color=colour,
                linewidth=0.7,
                transform=axes.transAxes,
                clip_on=False,
            )
        axes.annotate(
            text,
            (1.0 + (_LEADER if moved else 0.0), place),
            xycoords="axes fraction",
            xytext=(2 if moved else 6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )


def _height(end: tuple[str, float, str]) -> float:
    """From above to below."""
    return -end[1]


def spread(heights: Sequence[float], *, gap: float, low: float) -> list[float]:
    """Falling heights, moved down until each is `gap` below the one before, then up again until none is below `low`."""
    places: list[float] = []
    for height in heights:
        places.append(min(height, places[-1] - gap) if places else height)
    floor = low
    for index in reversed(range(len(places))):
        places[index] = max(places[index], floor)
        floor = places[index] + gap
    return places


def _last_step(curve: LossCurve) -> int:
    return max([curve.steps[-1], *(points[-1][0] for points in curve.validation.values())])
