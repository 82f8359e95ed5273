"""Figures as they are drawn, for tests that look at what is written in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.figure import Figure

from evenpack.studies.plotting import figure_as_png


def keep_figures(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[Figure]:
    """Returns a list that will hold each figure that one of the modules draws."""
    drawn: list[Figure] = []

    @contextmanager
    def keeping(path: Path, *, width: float, height: float) -> Iterator[Figure]:
        with figure_as_png(path, width=width, height=height) as figure:
            drawn.append(figure)
            yield figure

    for module in modules:
        monkeypatch.setattr(module, "figure_as_png", keeping)
    return drawn


def texts_of(figure: Figure) -> str:
    """All that is written in the figure's legends and below its axes, in one line."""
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return " ".join([*legends, *(text.get_text() for text in figure.texts)]).replace("\n", " ")
