"""The texts of figures that a test draws: what they say, and whether one runs into another."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


@dataclass(frozen=True, kw_only=True)
class DrawnFigure:
    """A figure as it was saved."""

    titles: tuple[str, ...]
    labels: tuple[str, ...]
    """Of the axes, and of legends."""
    tops: tuple[float, ...]
    """Upper ends of the vertical axes."""
    footer: str
    """The last text of the figure itself, as one line."""
    collisions: tuple[tuple[str, str], ...]
    """Texts that cover one another."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[DrawnFigure]:
    """Returns the figures that a test saves, in order."""
    figures: list[DrawnFigure] = []
    save = Figure.savefig

    def look(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        figures.append(_seen(figure))

    monkeypatch.setattr(Figure, "savefig", look)
    return figures


def _seen(figure: Figure) -> DrawnFigure:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # from here on texts have a place
    boxes = {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in _visible(figure)}
    pairs = combinations(boxes, 2)
    legends = [text.get_text() for axes in figure.axes if (legend := axes.get_legend()) for text in legend.get_texts()]
    return DrawnFigure(
        titles=tuple(axes.get_title(loc="left") for axes in figure.axes),
        labels=(*(label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())), *legends),
        tops=tuple(axes.get_ylim()[1] for axes in figure.axes),
        footer=figure.texts[-1].get_text().replace("\n", " ") if figure.texts else "",
        collisions=tuple((one, other) for one, other in pairs if _covers(boxes[one], boxes[other])),
    )


def _visible(figure: Figure) -> list[Text]:
    """Returns the texts with words in them; of the labels at ticks, those that are within the axes."""
    ticks = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    all_ticks = {id(label) for axis in ticks for label in [*axis.get_ticklabels(which="both")]}
    shown = {id(label) for axis in ticks for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and (id(text) in shown or id(text) not in all_ticks)
    ]


def _covers(one: Bbox, other: Bbox) -> bool:
    """A pixel of both is no collision: boxes are a little larger than letters."""
    shared = Bbox.intersection(one, other)
    return shared is not None and shared.width > 1 and shared.height > 1
