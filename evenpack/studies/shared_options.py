"""The option of the command line that several studies have, and the one way to read a list in an option."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from evenpack.errors import ConfigError

T = TypeVar("T")

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw a figure.")]


def parse_list(given: str, option: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """Parses an option that holds words with commas between them, as `--depths 2,3,none`.

    Args:
        read: returns the value of a word, or raises ValueError with what is wrong with it, and what would be right.

    Raises: ConfigError with the option, for the first word that `read` refuses.
    """
    try:
        return tuple(read(word.strip()) for word in given.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {given}: {error}") from error


def whole_number(word: str, *, problem: str = "is not a number of 1 or more", example: str) -> int:
    """Returns a number of 1 or more. Raises: ValueError with the problem and an example, for other words."""
    if not (word.isascii() and word.isdecimal() and int(word) >= 1):
        raise ValueError(f"'{word}' {problem}; give {example}")
    return int(word)
