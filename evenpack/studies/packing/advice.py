"""What lengths say beside their packs: the cost of padding, the best pack length, and the distance from others."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from evenpack import console
from evenpack.console import pairs, percent
from evenpack.errors import ConfigError, EvenpackError
from evenpack.shipped import names_run_file
from evenpack.studies.columns import Column, table_of
from evenpack.studies.lengths.reading import read_histogram
from evenpack.studies.lengths.statistics import (
    HistogramDistance,
    LengthRange,
    LengthStatistics,
    histogram_distance,
    length_ranges,
    length_statistics,
)
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.packing.presentation import DrawnLengths, Sweep, depth_curves_table, recommendation_text
from evenpack.studies.packing.study import (
    OVERVIEW_DEPTHS,
    PackingRow,
    pack_lengths_to_try,
    recommend,
    sweep_pack_lengths,
)
from evenpack.studies.provenance import name_of_lengths

_BAR_CELLS = 40


def lengths_table(statistics: LengthStatistics, *, origin: str, pack_length: int) -> Table:
    """Returns lengths and the cost of padding as a table."""
    return pairs(
        {
            "sequences": statistics.sequences,
            "tokens": statistics.tokens,
            "length": f"shortest {statistics.shortest:,}, mean {statistics.mean:,.1f}, median {statistics.median:,}, "
            f"90 % up to {statistics.percentile_90:,}, 99 % up to {statistics.percentile_99:,}, "
            f"longest {statistics.longest:,}",
            f"padded to {pack_length:,}": f"{percent(statistics.padding_share)} of all slots would be padding; "
            f"packing can be up to {statistics.speed_up_limit:.2f} times as fast",
        },
        title=f"Lengths of {origin}",
    )


def histogram_table(ranges: Sequence[LengthRange], *, sequences: int) -> Table:
    """Returns a histogram with one bar for each range of lengths."""
    most = max(bar.sequences for bar in ranges)
    columns = (
        Column("tokens", lambda bar: f"{bar.shortest:,} to {bar.longest:,}"),
        Column("sequences"),
        Column("share", lambda bar: bar.sequences / sequences, ".2%"),
        Column("", lambda bar: "█" * round(_BAR_CELLS * bar.sequences / most)),
    )
    return table_of(ranges, columns)


def distance_table(found: HistogramDistance) -> Table:
    """Returns the distances of lengths to another histogram as a table."""
    return pairs(
        {
            "other": f"{found.sequences:,} sequences, mean {found.mean_length:,.1f}, longest {found.longest:,}",
            "total variation": f"{found.total_variation:.4f}: fraction of sequences that would have to change length",
            "largest CDF gap": f"{found.largest_cdf_gap:.4f}: between the fractions of sequences up to a length",
        },
        title=f"Lengths compared with those of {found.origin}",
    )


SWEPT_BY = "longest_pack_first"
"""Algorithm of the comparison of pack lengths; every length and depth takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Against(DrawnLengths):
    """Lengths that a subject is compared with."""

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


def sweep_shown(sweep: Sweep) -> list[RenderableType]:
    """Returns the pack lengths by depth as a table, and the recommendation."""
    by_pack_length = {
        f"{length:,} slots": [row for row in sweep.rows if row.pack_length == length]
        for length in dict.fromkeys(row.pack_length for row in sweep.rows)
    }
    title = f"Pack lengths by limit of depth ({sweep.algorithm}): efficiency, speed-up over padding"
    return [depth_curves_table(by_pack_length, sweep.fullest, title=title), recommendation_text(sweep.recommended)]


def lengths_shown(subject: Subject) -> list[RenderableType]:
    """Returns the statistics of a subject's lengths, and their histogram."""
    statistics = length_statistics(subject.histogram, pack_length=subject.pack_length)
    return [
        lengths_table(statistics, origin=subject.origin, pack_length=subject.pack_length),
        histogram_table(length_ranges(subject.histogram), sequences=statistics.sequences),
    ]
