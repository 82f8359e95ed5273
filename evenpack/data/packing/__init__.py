"""Packs a histogram of lengths: one entry function over a table of algorithms, and one for a list of lengths."""

import difflib
import inspect
import time
from collections.abc import Mapping, Sequence

import numpy as np

from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing.baselines import first_fit_decreasing, next_fit, unpacked
from evenpack.data.packing.certificate import Certificate
from evenpack.data.packing.cutting_stock import cutting_stock
from evenpack.data.packing.greedy import longest_pack_first, shortest_pack_first
from evenpack.data.packing.histogram import FittedHistogram, LengthHistogram, LongPolicy, numbers, whole
from evenpack.data.packing.least_squares import least_squares, least_squares_padding
from evenpack.data.packing.strategy import Certified, Option, Packer, Packing, Strategy
from evenpack.errors import PackingError

__all__ = [
    "ALGORITHMS",
    "Certificate",
    "FittedHistogram",
    "LengthHistogram",
    "LongPolicy",
    "Option",
    "Packer",
    "Packing",
    "Strategy",
    "check_options",
    "cutting_stock_takes_seconds",
    "pack",
    "pack_lengths",
]

ALGORITHMS: dict[str, Packer] = {
    "longest_pack_first": longest_pack_first,
    "shortest_pack_first": shortest_pack_first,
    "cutting_stock": cutting_stock,
    "least_squares": least_squares,
    "least_squares_padding": least_squares_padding,
    "next_fit": next_fit,
    "first_fit_decreasing": first_fit_decreasing,
    "none": unpacked,
}

_OTHER_NAMES = {
    "lpfhp": "longest_pack_first",
    "spfhp": "shortest_pack_first",
    "nnlshp": "least_squares",
    "bfd": "longest_pack_first",
    "best_fit_decreasing": "longest_pack_first",
    "wfd": "shortest_pack_first",
    "worst_fit_decreasing": "shortest_pack_first",
    "ffd": "first_fit_decreasing",
}
"""Names of algorithms in papers and other packers; only for messages."""

_RELATIVE_TOLERANCE = 1e-4
"""Relative distance of longest_pack_first from a full packing of the tokens below which nothing better is sought."""
_SECONDS_UP_TO = 2048
"""Slots of a pack up to which cutting_stock takes seconds, whatever the limit of depth; at 4,096 it takes more than
a minute."""


def pack(
    histogram: LengthHistogram | np.ndarray | Sequence[int | float],
    algorithm: str = "auto",
    *,
    pack_length: int,
    max_sequences_per_pack: int | None = None,
    **options: Option,
) -> Packing:
    """Packs every sequence of `histogram` exactly once into packs of `pack_length` slots.

    Counts are accepted in place of a histogram: index i counts the sequences of length i + 1.

    `options` are the keyword arguments of the algorithm's own function, such as `weight` of least_squares.

    The result depends on the arguments alone; its `algorithm` names the choice of `auto`: longest_pack_first where that
    is within 0.01 % of the packs that the tokens alone would fill, else cutting_stock for packs of up to 2,048 slots.

    Raises: PackingError for an unknown algorithm or option, a limit below 1, a sequence longer than a pack, or counts
    that are wrong.
    """
    checked_options = check_options(algorithm, options)
    pack_length = whole("pack_length", pack_length, "in slots")
    limit = pack_length
    if max_sequences_per_pack is not None:
        limit = whole("max_sequences_per_pack", max_sequences_per_pack, "or null for no limit")
    if not isinstance(histogram, LengthHistogram):
        histogram = LengthHistogram.from_counts(histogram)
    if pack_length > MOST_SLOTS:
        raise PackingError(f"pack_length can be {MOST_SLOTS} slots at most, found {pack_length}")
    if histogram.longest > pack_length:
        too_long = int(histogram.counts[pack_length:].sum())
        raise PackingError(
            f"{too_long} sequences, the longest of {histogram.longest} tokens, do not fit into a pack of "
            f"{pack_length} slots; raise pack_length or cut the sequences"
        )
    if algorithm != "auto":
        return _packed(histogram, algorithm, pack_length, limit, **checked_options)
    greedy = _packed(histogram, "longest_pack_first", pack_length, limit)
    if greedy.gap <= _RELATIVE_TOLERANCE or not cutting_stock_takes_seconds(pack_length):
        return greedy
    return _packed(histogram, "cutting_stock", pack_length, limit)


def pack_lengths(
    lengths: np.ndarray | Sequence[int | float],
    *,
    pack_length: int,
    algorithm: str = "auto",
    max_sequences_per_pack: int | None = None,
    **options: Option,
) -> Packing:
    """Packs sequences of the given lengths, each exactly once, into packs of `pack_length` slots.

    The result has the packs by the lengths in them (`strategies`, `counts`), how full they are (`efficiency`,
    `padding`, `packing_factor`), how many packs no packing can do without (`lower_bound`), and which sequences each
    pack holds (`assign(lengths)`). It depends on the arguments alone; the order of `lengths` does not matter.

    Args:
        lengths: in tokens, one for each sequence; a list or a numpy array, memory-mapped or not.
        pack_length: slots of a pack.
        algorithm: `auto` or one of docs/packing.md.
        max_sequences_per_pack: None: no limit.
        options: options of the algorithm, such as `weight` of least_squares.

    Raises: PackingError with the first length that is not a whole number from 1 on, and its index; if there is none, or
    one is longer than a pack; for an unknown algorithm or option.
    """
    values = numbers(lengths, "sequence")
    longest = float(np.fmax.reduce(values, initial=1))  # without NaN, which is refused with its index
    return pack(
        LengthHistogram.from_lengths(values, longest=int(min(max(longest, 1.0), MOST_SLOTS))),
        algorithm,
        pack_length=pack_length,
        max_sequences_per_pack=max_sequences_per_pack,
        **options,
    )


def cutting_stock_takes_seconds(pack_length: int) -> bool:
    """Returns False where `auto` does not use cutting_stock."""
    return pack_length <= _SECONDS_UP_TO


def check_options(algorithm: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Returns the options, with integers converted to floats where the algorithm takes floats.

    Raises: PackingError for an unknown algorithm or option, or a value of another type.
    """
    if algorithm not in ("auto", *ALGORITHMS):
        usual = _OTHER_NAMES.get(str(algorithm).lower().replace("-", "_"), str(algorithm))
        near = _nearest(usual, ["auto", *ALGORITHMS])
        raise PackingError(f"there is no packing algorithm '{algorithm}'; {near}")
    parameters = inspect.signature(ALGORITHMS[algorithm]).parameters.values() if algorithm != "auto" else ()
    defaults = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    checked: dict[str, Option] = {}
    for name, value in options.items():
        if not defaults:
            raise PackingError(f"packing algorithm '{algorithm}' takes no options, found {name}={value!r}")
        if name not in defaults:
            raise PackingError(
                f"packing algorithm '{algorithm}' has no option '{name}'; {_nearest(name, list(defaults))}"
            )
        kind = type(defaults[name])
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise PackingError(
                f"option '{name}' of '{algorithm}' is of type {kind.__name__}, like {defaults[name]!r}; found {value!r}"
            )
        checked[name] = kind(value)
    return checked


def _packed(histogram: LengthHistogram, name: str, pack_length: int, limit: int, **options: Option) -> Packing:
    start = time.process_time()
    found = ALGORITHMS[name](histogram, pack_length, limit, **options)
    cpu_seconds = time.process_time() - start
    if not isinstance(found, Certified):
        found = Certified(counts=found, certificate=Certificate.without_solving(histogram, pack_length, limit))
    strategies = tuple(sorted(found.counts, reverse=True))
    return Packing(
        algorithm=name,
        pack_length=pack_length,
        histogram=histogram,
        strategies=strategies,
        counts=np.array([found.counts[strategy] for strategy in strategies], dtype=np.int64),
        cpu_seconds=cpu_seconds,
        certificate=found.certificate,
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"did you mean '{close[0]}'? " if close else "") + f"known: {', '.join(known)}"
