"""The search over residual weights on a list of lengths."""

from functools import partial
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.errors import ConfigError
from evenpack.studies.lengths.subject import Subject, long_lines
from evenpack.studies.plotting import require_plot
from evenpack.studies.residuals.command import ResidualsCommand
from evenpack.studies.residuals.plots import plot_residuals
from evenpack.studies.residuals.search import matrix_size, search_residuals, settings_of
from evenpack.studies.residuals.tables import residual_tables
from evenpack.studies.shared_options import parse_list, whole_number


class ResidualsRequest:
    """The options, checked before anything is read.

    Raises: ConfigError for an invalid one.
    """

    def __init__(self, options: ResidualsCommand) -> None:
        if options.plot is not None:
            require_plot(options.plot)
        if options.depth < 1:
            raise ConfigError(f"--depth must be 1 sequence per pack or more, not {options.depth}")
        self.settings = settings_of(_weights(options.weights), _lengths(options.up_to))
        self.depth = options.depth
        self.plot = options.plot


def study_residuals(subject: Subject, request: ResidualsRequest) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the search as a value for JSON and as rich tables; draws it if requested.

    Raises: PackingError if least squares cannot pack at all, for example with too many strategies.
    """
    size = matrix_size(subject.pack_length, request.depth)
    rows = search_residuals(
        subject.histogram,
        request.settings,
        pack_length=subject.pack_length,
        depth=request.depth,
        begin=lambda setting: console.messages().print(f"least squares, {setting.label} ..."),
    )
    shown: list[RenderableType] = [*long_lines(subject), *residual_tables(rows, size, depth=request.depth)]
    if request.plot is not None:
        plot_residuals(rows, request.plot, footer=[subject.origin_line(), *subject.long_sentences()])
        shown.append(console.text(f"Drew {request.plot}"))
    value = {
        "origin": subject.origin,
        "pack_length": subject.pack_length,
        "depth": request.depth,
        "long_sequences": subject.long_sequences(),
        "packing_matrix": size,
        "settings": rows,
    }
    return value, shown


def _weights(given: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(parse_list(given, "--weights", _weight)))


def _weight(word: str) -> float:
    if not (word.replace(".", "", 1).isdecimal() and word.isascii()):
        raise ValueError(f"'{word}' is not a number of 0 or more; give 1,0.09,0")
    return float(word)


def _lengths(given: str) -> tuple[int, ...]:
    length = partial(whole_number, problem="is not a length of 1 or more", example="8,16")
    return tuple(dict.fromkeys(parse_list(given, "--up-to", length)))
