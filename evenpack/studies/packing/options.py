"""Parses the options of `evenpack study packing`."""

from contextlib import suppress

from evenpack.data.packing import Option
from evenpack.errors import ConfigError
from evenpack.studies.packing.packing import STUDY_DEPTHS, PackerChoice


def parse_depths(given: str | None) -> tuple[int | None, ...]:
    """Parses `2,3,none` as numbers; the default depths if None. Raises: ConfigError for other words."""
    if given is None:
        return STUDY_DEPTHS
    words = [word.strip() for word in given.split(",")]
    wrong = [word for word in words if word != "none" and not _is_positive(word)]
    if wrong:
        raise ConfigError(f"--depths {given}: '{wrong[0]}' is neither a number of 1 or more nor 'none'; give 2,3,none")
    return tuple(None if word == "none" else int(word) for word in words)


def parse_pack_lengths(given: str) -> tuple[int, ...]:
    """Parses `512,640` as numbers. Raises: ConfigError for other words."""
    words = [word.strip() for word in given.split(",")]
    wrong = [word for word in words if not _is_positive(word)]
    if wrong:
        raise ConfigError(f"--pack-lengths {given}: '{wrong[0]}' is not a number of 1 or more; give 512,640")
    return tuple(int(word) for word in words)


def _is_positive(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def parse_choices(given: str | None) -> tuple[PackerChoice, ...] | None:
    """Parses `cutting_stock,least_squares:weight=0:leftovers=best_fit` as choices.

    Raises: ConfigError for an option without a value; PackingError for unknown algorithms and options.
    """
    if given is None:
        return None
    choices = []
    for word in given.split(","):
        algorithm, *pairs = word.strip().split(":")
        wrong = [pair for pair in pairs if "=" not in pair]
        if wrong:
            raise ConfigError(f"--algorithms {given}: '{wrong[0]}' gives no value; write {algorithm}:option=value")
        options = {name: _value(value) for name, _, value in (pair.partition("=") for pair in pairs)}
        choices.append(PackerChoice(algorithm=algorithm, options=options))
    return tuple(choices)


def _value(word: str) -> Option:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
