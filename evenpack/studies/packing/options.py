"""Parses the options of `evenpack study packing`."""

from contextlib import suppress
from functools import partial

from evenpack.data.packing import Option
from evenpack.studies.packing.packing import STUDY_DEPTHS, PackerChoice
from evenpack.studies.shared_options import parse_list, whole_number


def parse_depths(given: str | None) -> tuple[int | None, ...]:
    """Parses `2,3,none` as numbers; the default depths if None. Raises: ConfigError for other words."""
    if given is None:
        return STUDY_DEPTHS
    return parse_list(given, "--depths", _depth)


def parse_pack_lengths(given: str) -> tuple[int, ...]:
    """Parses `512,640` as numbers. Raises: ConfigError for other words."""
    return parse_list(given, "--pack-lengths", partial(whole_number, example="512,640"))


def _depth(word: str) -> int | None:
    problem = "is neither a number of 1 or more nor 'none'"
    return None if word == "none" else whole_number(word, problem=problem, example="2,3,none")


def parse_choices(given: str | None) -> tuple[PackerChoice, ...] | None:
    """Parses `cutting_stock,least_squares:weight=0:leftovers=best_fit` as choices.

    Raises: ConfigError for an option without a value; PackingError for unknown algorithms and options.
    """
    return None if given is None else parse_list(given, "--algorithms", _choice)


def _choice(word: str) -> PackerChoice:
    algorithm, *pairs = word.split(":")
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ValueError(f"'{wrong[0]}' gives no value; write {algorithm}:option=value")
    options = {name: _value(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    return PackerChoice(algorithm=algorithm, options=options)


def _value(word: str) -> Option:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
