"""Compares packing algorithms: over limits of depth, over pack lengths, and with padding; recommends a pack length."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from evenpack import console
from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing import LengthHistogram, Option, check_options, cutting_stock_takes_seconds, pack
from evenpack.data.packing.baselines import sorted_batches
from evenpack.errors import ConfigError, EvenpackError, PackingError
from evenpack.shipped import names_run_file
from evenpack.studies.lengths.reading import read_histogram
from evenpack.studies.lengths.statistics import HistogramDistance, histogram_distance
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.provenance import name_of_lengths
from evenpack.studies.shared_options import parse_list, whole_number

STUDY_DEPTHS: tuple[int | None, ...] = (1, 2, 3, 4, 8, 16, None)
"""Most sequences a pack may hold; None: no limit. Those of the published tables."""
OVERVIEW_DEPTHS: tuple[int | None, ...] = (1, 2, 3, 4, 8, None)
BATCH_SIZES = (8, 32, 128, 1024)
"""Batch sizes of sorted batches."""

_STRETCHES = ((1, 1), (7, 6), (5, 4), (4, 3), (3, 2), (2, 1))
"""Pack lengths to try, as fractions of the longest sequence."""
_SLOTS_OF_LEAST_SQUARES = 512
_MOST_SHUFFLED = 50_000_000
"""Sequences up to which next fit, which shuffles them all, is a default: 1.5 GB."""
_LONGER_PACK_GAIN = 0.01
"""Fraction of slots that a longer pack must save: its attention costs more memory, and its steps hold more."""
_NEGLIGIBLE_SHARE = 0.001
"""Fraction of slots that counts as no difference."""


@dataclass(frozen=True, kw_only=True)
class PackerChoice:
    """An algorithm of `evenpack.data.packing`, or `auto`, with its options.

    Raises: PackingError for an unknown one.
    """

    algorithm: str
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self.algorithm, self.options)

    @property
    def label(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class PackingRow:
    """The result of one algorithm at one pack length and limit of depth."""

    algorithm: str
    """Algorithm with its options; for `auto` its choice."""
    pack_length: int
    """Slots of a pack."""
    depth_limit: int | None
    """Most sequences a pack may hold; None: no limit."""
    depth: int
    """Sequences of the fullest pack."""
    strategies: int
    """Number of strategies used."""
    packs: int
    efficiency: float
    """Fraction of slots that hold a token."""
    padding: int
    """Slots of all packs that hold no token."""
    packing_factor: float
    """Sequences per pack, on average."""
    speed_up: float
    """Slots of every sequence padded to the longest, divided by the slots of these packs."""
    lower_bound: int
    """Proven lower bound on the packs at this limit of depth."""
    gap: float
    """Packs above the lower bound, as a fraction of it."""
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class PaddingRow:
    """The result of sequences sorted by length, cut into batches, each padded to its longest."""

    batch_size: int
    slots: int
    efficiency: float
    """Fraction of slots that hold a token."""
    speed_up: float
    """Slots of every sequence padded to the longest of all, divided by these."""


def study_packing(
    histogram: LengthHistogram,
    *,
    pack_length: int,
    depths: Sequence[int | None] = STUDY_DEPTHS,
    choices: Sequence[PackerChoice] | None = None,
    baselines: bool = True,
    begin: Callable[[str], None] = lambda line: None,
    refused: Callable[[str, int | None, PackingError], None] | None = None,
) -> tuple[PackingRow, ...]:
    """Packs by each of `choices` at each of `depths`; `begin` is called before each, with a line for people.

    If an algorithm fails, `refused` is called with its error and the others continue; without `refused` the error is
    raised.

    The default `choices` are the two greedy algorithms at every depth, except for packs of one sequence, which need no
    algorithm; cutting_stock wherever it takes seconds; and as `baselines` least squares at depth 3 and up to 512 slots,
    and without a limit first fit decreasing and, up to 50 million sequences, next fit.

    Raises: PackingError for an unknown algorithm or depth, or the error of an algorithm.
    """
    for depth in depths:
        if depth is not None and depth < 1:
            raise PackingError(f"a depth is 1 sequence per pack or more, found {depth}")
    rows: list[PackingRow] = []
    for depth in dict.fromkeys(depths):
        of_depth = []
        for choice in choices or _of_use(histogram, pack_length, depth, baselines=baselines):
            begin(f"{choice.label}, {'no limit of depth' if depth is None else f'depth {depth}'} ...")
            try:
                of_depth.append(_packing_row(histogram, choice, depth, pack_length))
            except PackingError as error:
                if refused is None:
                    raise
                refused(choice.label, depth, error)
        # Each is compared with the greatest bound that any algorithm proves at this limit.
        bound = max((row.lower_bound for row in of_depth), default=0)
        rows += [replace(row, lower_bound=bound, gap=row.packs / bound - 1) for row in of_depth]
    return tuple(rows)


def sweep_pack_lengths(
    histogram: LengthHistogram,
    pack_lengths: Sequence[int],
    *,
    algorithm: str,
    depths: Sequence[int | None],
    begin: Callable[[str], None] = lambda line: None,
) -> tuple[PackingRow, ...]:
    """Packs by one algorithm at each pack length and depth.

    Raises: PackingError if a sequence is longer than a pack.
    """
    choices = (PackerChoice(algorithm=algorithm),)
    return tuple(
        row
        for pack_length in pack_lengths
        for row in study_packing(histogram, pack_length=pack_length, depths=depths, choices=choices, begin=begin)
    )


def pack_lengths_to_try(pack_length: int) -> tuple[int, ...]:
    """Returns `pack_length` and some lengths up to twice as long, within the limit, ascending.

    Multiples of 8 if it is one.
    """
    step = 8 if pack_length % 8 == 0 else 1
    lengths = dict.fromkeys(-(-pack_length * above // (below * step)) * step for above, below in _STRETCHES)
    return tuple(length for length in lengths if length <= MOST_SLOTS)


def study_sorted_batches(
    histogram: LengthHistogram, batch_sizes: Sequence[int] = BATCH_SIZES
) -> tuple[PaddingRow, ...]:
    """Returns the padding of batches of similar lengths; batch sizes above the number of sequences are left out.

    Raises: PackingError for a batch size below 1.
    """
    padded = histogram.sequences * histogram.longest
    batches = [sorted_batches(histogram, size) for size in batch_sizes if size <= histogram.sequences]
    return tuple(
        PaddingRow(batch_size=one.batch_size, slots=one.slots, efficiency=one.efficiency, speed_up=padded / one.slots)
        for one in batches
    )


def _of_use(
    histogram: LengthHistogram, pack_length: int, depth: int | None, *, baselines: bool
) -> tuple[PackerChoice, ...]:
    if depth == 1:
        return (PackerChoice(algorithm="none"),)
    names = ["first_fit_decreasing"] if baselines and depth is None else []
    if names and histogram.sequences <= _MOST_SHUFFLED:
        names.insert(0, "next_fit")
    names += ["shortest_pack_first", "longest_pack_first"]
    if baselines and depth == 3 and pack_length <= _SLOTS_OF_LEAST_SQUARES:
        names.append("least_squares")
    if cutting_stock_takes_seconds(pack_length):
        names.append("cutting_stock")
    return tuple(PackerChoice(algorithm=name) for name in names)


def _packing_row(histogram: LengthHistogram, choice: PackerChoice, depth: int | None, pack_length: int) -> PackingRow:
    packing = pack(histogram, choice.algorithm, pack_length=pack_length, max_sequences_per_pack=depth, **choice.options)
    return PackingRow(
        algorithm=replace(choice, algorithm=packing.algorithm).label,
        pack_length=pack_length,
        depth_limit=1 if packing.algorithm == "none" else depth,
        depth=packing.depth,
        strategies=len(packing.strategies),
        packs=packing.packs,
        efficiency=packing.efficiency,
        padding=packing.padding,
        packing_factor=packing.packing_factor,
        speed_up=histogram.sequences * histogram.longest / (packing.packs * pack_length),
        lower_bound=packing.lower_bound,
        gap=packing.gap,
        cpu_seconds=packing.cpu_seconds,
    )


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


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recommended pack length, and the least sufficient depth."""

    pack_length: int
    efficiency: float
    """Fraction of slots that hold a token in packs of any depth."""
    sufficient_depth: int | None
    """The least tried limit of depth within 0.1 points of that; None: only packs without a limit."""
    efficiency_at_depth: float
    reason: str


def recommend(
    rows: Sequence[PackingRow], fullest: Sequence[PackingRow], at_depths: Callable[[int], Sequence[PackingRow]]
) -> Recommendation:
    """Returns the pack length of `rows`, unless a longer one of `fullest` saves 1 point of slots or more.

    Of several longer ones the next is taken only if it saves a point more.

    Args:
        rows: one pack length, with and without a limit of depth, the best algorithm for each among them.
        fullest: `auto` without a limit at several pack lengths, that one among them.
        at_depths: `auto` at another pack length, with and without a limit.
    """
    base = rows[0].pack_length
    fullness = {row.pack_length: row.efficiency for row in fullest}
    chosen = base
    for length in sorted(length for length in fullness if length > base):
        if fullness[length] >= fullness[chosen] + _LONGER_PACK_GAIN:
            chosen = length
    if chosen == base:
        return _at(base, rows, f"longer packs, up to {max(fullness):,} slots, would be less than 1 point fuller")
    gain = 100 * (fullness[chosen] - fullness[base])
    return _at(chosen, at_depths(chosen), f"{gain:.1f} points fuller than {base:,}")


def _at(pack_length: int, rows: Sequence[PackingRow], reason: str) -> Recommendation:
    best: dict[int | None, float] = {}
    for row in rows:
        best[row.depth_limit] = max(row.efficiency, best.get(row.depth_limit, 0.0))
    limits = sorted(limit for limit in best if limit is not None)
    depth = next((limit for limit in limits if best[limit] >= best[None] - _NEGLIGIBLE_SHARE), None)
    return Recommendation(
        pack_length=pack_length,
        efficiency=best[None],
        sufficient_depth=depth,
        efficiency_at_depth=best[depth],
        reason=reason,
    )


SWEPT_BY = "longest_pack_first"
"""Algorithm of the comparison of pack lengths; every length and depth takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """Lengths that a subject is compared with."""

    name: str
    histogram: LengthHistogram
    distance: HistogramDistance
    """Distance of the subject's lengths, as they are packed, to these."""

    @property
    def footer(self) -> str:
        """The line below a figure that describes the other lengths."""
        distance = self.distance.total_variation
        return f"Against {self.name}: data {name_of_lengths(self.histogram)}; total variation {distance:.4f}"


def read_against(subject: Subject, against: str) -> Against:
    """Reads the lengths called `against`: a published name, or an input that needs no option.

    Raises: ConfigError for a run; as `read_histogram`, `--against` named.
    """
    if names_run_file(against):
        raise ConfigError(
            f"--against takes a published name or a file of lengths, and {against} is a run: make it INPUT instead"
        )
    try:
        other = read_histogram(against)
    except EvenpackError as error:
        raise type(error)(f"--against {against}: {error}") from error
    name = "standard input" if against == "-" else against
    return Against(name=name, histogram=other, distance=histogram_distance(subject.histogram, other, origin=name))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Packs of several lengths, and the one of them that is recommended."""

    rows: Sequence[PackingRow]
    """Packings of one algorithm by depth."""
    algorithm: str
    """The algorithm of `rows`."""
    fullest: Sequence[PackingRow]
    """Packings by `auto` without a limit of depth, which the recommendation compares."""
    recommended: Recommendation


def sweep_lengths(subject: Subject, packings: Sequence[PackingRow], pack_lengths: Sequence[int] | None) -> Sweep:
    """Packs at the subject's pack length and others, and recommends one of them.

    Args:
        packings: at the subject's pack length, with and without a limit of depth.
        pack_lengths: the others; None: up to twice as long.

    Raises: PackingError if a sequence is longer than a pack.
    """
    histogram, base = subject.histogram, subject.pack_length
    lengths = sorted({base, *(pack_lengths_to_try(base) if pack_lengths is None else pack_lengths)})
    with console.messages().status("packing ...") as status:
        fullest = sweep_pack_lengths(histogram, lengths, algorithm="auto", depths=(None,), begin=status.update)
        recommended = recommend(
            packings,
            fullest,
            lambda chosen: sweep_pack_lengths(
                histogram, [chosen], algorithm="auto", depths=OVERVIEW_DEPTHS[1:], begin=status.update
            ),
        )
        rows = sweep_pack_lengths(histogram, lengths, algorithm=SWEPT_BY, depths=OVERVIEW_DEPTHS)
    return Sweep(rows=rows, algorithm=SWEPT_BY, fullest=fullest, recommended=recommended)
