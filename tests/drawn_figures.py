"""Figures as they are saved, for tests that look at what is drawn and written in them."""

from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Returns the figures that a test saves, in order."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def texts_of(figure: Figure) -> str:
    """All that is written in titles, in legends and below the axes, in one line."""
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
    labels = [text.get_text() for legend in legends for text in legend.get_texts()]
    return " ".join([*titles, *labels, *(text.get_text() for text in figure.texts)]).replace("\n", " ")
