"""Colours and marks of the study's figures: a hue for each layout, a mark for each kind of evidence."""

from typing import Any

from evenpack.studies.imbalance.simulated.cluster import SCHEMES, Scheme
from evenpack.studies.plotting import INK

_SHADES = {
    "packed": ("#8aa2d3", "#5b8def", "#1d4ed8"),
    "unpadded": ("#c2410c", "#d98a04", "#a16207", "#fb923c"),
    "padded": ("#7b8794", "#0f9d76", "#4aa98a"),
}

PUBLISHED = INK
LOG = "#c2255c"

MEASURED: dict[str, Any] = {
    "color": "#111111",
    "marker": "D",
    "markersize": 9,
    "markerfacecolor": "#facc15",
    "markeredgewidth": 1.6,
    "linestyle": "none",
    "zorder": 6,
}
REPLAYED_STYLE: dict[str, Any] = {
    "marker": "^",
    "markersize": 9,
    "markeredgecolor": INK,
    "markeredgewidth": 1.0,
    "linestyle": "none",
    "capsize": 4,
    "elinewidth": 1.6,
    "zorder": 5,
}
LOG_STYLE: dict[str, Any] = {"color": LOG, "linewidth": 1.8, "linestyle": (0, (3, 1)), "marker": "s", "markersize": 4}
PUBLISHED_STYLE: dict[str, Any] = {"color": PUBLISHED, "linewidth": 1.6, "linestyle": (0, (1, 1.5))}


def colour(scheme: Scheme) -> str:
    """Returns one hue per layout."""
    same = [one for one in SCHEMES if one.layout == scheme.layout]
    return _SHADES[scheme.layout][same.index(scheme)]
