"""Figures as PNG. matplotlib is an extra: only figures need it."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.errors import ConfigError
from evenpack.files import atomic_open, require_file
from evenpack.studies.columns import Column

INK = "#1f2933"
_FAINT = "#9aa5b1"
_GRID = "#e4e7eb"
_DASHES = ("-", "--", ":")
COLOURS = (
    *("#2563eb", "#e8590c", "#0f9d76", "#9333ea", "#c2255c", "#8d6e00"),
    *("#0b7285", "#f59f00", "#364fc7", "#74b816", "#f783ac", "#868e96"),
)
"""So many that the series of a figure have one each; the second half is for figures whose panels show two kinds."""

_STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}

_LABEL_POINTS = 13.0
"""Height of a line's name in points."""
_LEADER = 0.03
"""Length of the line that leads to a name, as a fraction of the axes' width."""
_FOOTER_COLUMNS_PER_INCH = 16
"""Characters of a footer, of 8 points, that surely fit an inch."""
_FOOTER_GAP_INCHES = 0.12
THIN_AND_BOLD = "Thin: single steps; bold: means over about a fiftieth of the steps (5 at least)."
"""Footer of a figure that has thin and bold lines."""


def require_plot(path: Path | None, *, option: str = "--plot") -> None:
    """Checks the path of a figure, if one is wanted.

    Raises: ConfigError if no PNG can be drawn there, before any work is done for it.
    """
    if path is not None:
        require_matplotlib()
        require_file(path, ".png", option=option)


def require_matplotlib() -> None:
    """Checks that matplotlib is installed. Raises: ConfigError if it is not."""
    try:
        import matplotlib  # noqa: F401  # tested, not used
    except ImportError as error:
        raise ConfigError("plots need matplotlib: install it with `pip install 'evenpack[plots]'`") from error


@contextmanager
def figure_as_png(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """Yields a figure in inches that becomes a PNG, atomically; matplotlib's global state is not changed."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_open(path) as file:
            figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0.2)


def line_style(index: int, colours: Sequence[str] = COLOURS) -> dict[str, Any]:
    """Returns colour and dashes of the line with this number; colours are used again with the next dashes."""
    return {"color": colours[index % len(colours)], "linestyle": _DASHES[index // len(colours) % len(_DASHES)]}


def write_title(axes: Any, finding: str) -> None:
    """Writes a title of one or two lines above the axes, on the left."""
    axes.set_title(finding, loc="left", fontsize=11.5, fontweight="bold", pad=12)


def write_footer(figure: Any, lines: Sequence[str]) -> None:
    """Writes below everything that is in the figure what it is of: run, data, commit, device. To be called last.

    Long lines go on in the next, so that the figure does not become wider.
    """
    drawn = figure.get_tightbbox()  # in inches
    width, height = figure.get_size_inches()
    columns = int(_FOOTER_COLUMNS_PER_INCH * drawn.width)
    wrapped = [part for line in lines for part in textwrap.wrap(line, columns, break_on_hyphens=False)]
    at = (drawn.x0 / width, (drawn.y0 - _FOOTER_GAP_INCHES) / height)
    figure.text(*at, "\n".join(wrapped), fontsize=8, va="top", color=INK, linespacing=1.4)


def draw_series(
    axes: Any,
    rows: Sequence[Any],
    *,
    x: Column,
    y: Column,
    low: Column | None = None,
    high: Column | None = None,
    **style: Any,
) -> list[float]:
    """Draws one column of rows against another and names the axes by them; returns the heights.

    With `low` and `high`, each point has a bar between them. `style`: as of matplotlib's `plot` or `errorbar`.
    """
    at, heights = x.numbers(rows), y.numbers(rows)
    if low is None or high is None:
        axes.plot(at, heights, **style)
    else:
        below = [height - end for height, end in zip(heights, low.numbers(rows), strict=True)]
        above = [end - height for height, end in zip(heights, high.numbers(rows), strict=True)]
        axes.errorbar(at, heights, yerr=[below, above], **style)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    return heights


def draw_band(axes: Any, rows: Sequence[Any], *, x: Column, low: Column, high: Column, **style: Any) -> None:
    """Fills between two columns of rows, without a border."""
    axes.fill_between(x.numbers(rows), low.numbers(rows), high.numbers(rows), linewidth=0, **style)


def logarithmic_counts(axes: Any, counts: Sequence[int], *, label: str) -> None:
    """Makes the horizontal axis one of doublings, with a tick at each of the counts."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=10 if len(counts) < 10 else 8.5)
    axes.minorticks_off()
    axes.set_xlabel(label)


def smooth(values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """The mean over about a fiftieth of the values around each, five at least; at both ends over fewer.

    What is not a number counts for nothing, and has a mean of its neighbours.
    """
    reach = min(max(2, len(values) // 100), len(values) // 10)
    window = np.ones(2 * reach + 1)
    known = np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), window, mode="same")
    counts = np.convolve(known.astype(np.float64), window, mode="same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def label_ends(axes: Any, ends: Sequence[tuple[str, float, str]]) -> None:
    """Writes (text, height, colour) right of the axes where each line ends, moved apart where two would overlap.

    A thin line leads from the end of a line to its text. Axes may be linear or logarithmic.
    """
    axes.margins(x=0.02)
    axes.set_ylim(*axes.get_ylim())  # the labels depend on it
    height_points = axes.get_window_extent().height / axes.figure.dpi * 72
    to_fraction = axes.transData + axes.transAxes.inverted()
    at = axes.get_xlim()[1]
    heights = ((text, float(to_fraction.transform((at, y))[1]), colour) for text, y, colour in ends)
    ordered = sorted(heights, key=lambda end: -end[1])  # from top to bottom
    gap = _LABEL_POINTS / height_points
    places = spread([end[1] for end in ordered], gap=gap)
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


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Moves descending heights down until each is `gap` below the one before, then up until none is below 0."""
    places: list[float] = []
    for height in heights:
        places.append(min(height, places[-1] - gap) if places else height)
    floor = 0.0
    for index in reversed(range(len(places))):
        places[index] = max(places[index], floor)
        floor = places[index] + gap
    return places
