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
    "figure.constrained_layout.wspace": 0.05,
    "figure.constrained_layout.hspace": 0.05,
}

_FOOTER_COLUMNS_PER_INCH = 16
"""Characters of a footer, of 8 points, that surely fit an inch."""
_FOOTER_GAP_INCHES = 0.12
THIN_AND_BOLD = "Thin: single steps; bold: means over about a fiftieth of the steps (5 at least)."
"""Footer of a figure that has thin and bold lines."""


def require_plot(path: Path | None) -> None:
    """Checks the path of a figure, if one is wanted.

    Raises: ConfigError if no PNG can be drawn there, before any work is done for it.
    """
    if path is not None:
        require_matplotlib()
        require_file(path, ".png", option="--plot")


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
        figure = Figure(figsize=(width, height), layout="constrained")
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
    figure.draw_without_rendering()  # lays out what is above
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
) -> None:
    """Draws one column of rows against another and names the axes by them.

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


def label_ends(axes: Any) -> None:
    """Names the lines that have a label right of the axes, from the one with the highest end to the lowest."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    lines.sort(key=lambda line: -float(line.get_ydata()[-1]))
    axes.margins(x=0.02)
    axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
