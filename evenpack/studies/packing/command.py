"""The command `evenpack study packing`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class PackingCommand:
    """Show lengths and what padding costs, compare packing algorithms over depths, and recommend a pack length.

    With --pack-lengths or --against, without the slow algorithms of others; with --depths, --algorithms or --sample,
    the packs alone.

    \b
    Examples:
      evenpack study packing wikipedia_512 --plot packing.png
      evenpack study packing RUN.yaml --against wikipedia_512
      evenpack study packing lengths.npy --pack-length 2048 --algorithms longest_pack_first,cutting_stock
      evenpack study packing squad_1_1_384 --depths 3 --algorithms least_squares:weight=0.002:weight_up_to=64
    """

    depths: Annotated[str | None, typer.Option(help="Most sequences a pack may hold: 2,3,none. Default: seven.")] = None
    algorithms: Annotated[
        str | None, typer.Option(help="cutting_stock,least_squares:weight=0. Default: all that apply.")
    ] = None
    sample: Annotated[int | None, typer.Option(help="Pack so many random sequences instead of all.")] = None
    pack_lengths: Annotated[
        str | None, typer.Option(help="Compare these pack lengths: 512,640. Default: up to twice as long.")
    ] = None
    against: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Compare with these lengths: wikipedia_512.")
    ] = None
    plot: Plot = None

    def uses_device(self) -> bool:
        """Returns False: lengths are enough."""
        return False

    def run(self, find_subject: "Callable[..., Subject]") -> Report:
        """Checks the options before reading the lengths.

        Raises: ConfigError for an invalid option, or a plot that cannot be drawn; PackingError for a sample of more
        than all sequences, or if nothing could be packed.
        """
        from evenpack.studies.plotting import require_plot

        require_plot(self.plot)
        self._require_one_kind()
        return self._compare(find_subject)

    @property
    def _narrowed(self) -> "Sequence[str]":
        """The options that ask for packs alone."""
        given = {"--depths": self.depths, "--algorithms": self.algorithms, "--sample": self.sample}
        return [name for name, value in given.items() if value is not None]

    def _require_one_kind(self) -> None:
        """Raises: ConfigError for options that do not go together."""
        from evenpack.errors import ConfigError

        of_lengths = {"--pack-lengths": self.pack_lengths, "--against": self.against}
        given = [name for name, value in of_lengths.items() if value is not None]
        if given and self._narrowed:
            raise ConfigError(f"{given[0]} and {self._narrowed[0]} do not go together: leave one of them out")

    def _compare(self, find_subject: "Callable[..., Subject]") -> Report:
        """Compares the algorithms. The error of one is printed, and the others continue."""
        from evenpack import console
        from evenpack.data.packing.baselines import sample_histogram
        from evenpack.errors import ConfigError, PackingError
        from evenpack.studies.lengths.statistics import length_statistics
        from evenpack.studies.packing.presentation import (
            distance_table,
            lengths_table,
            packing_table,
            plot_packing,
            sorted_batches_table,
            sweep_shown,
        )
        from evenpack.studies.packing.study import (
            parse_choices,
            parse_depths,
            parse_pack_lengths,
            read_against,
            study_packing,
            study_sorted_batches,
            sweep_lengths,
        )

        depths, choices = parse_depths(self.depths), parse_choices(self.algorithms)
        pack_lengths = None if self.pack_lengths is None else parse_pack_lengths(self.pack_lengths)
        subject = find_subject()
        if subject.keeps_order:
            raise ConfigError(
                f"{subject.origin} has rows with atoms, which are packs already: take a run with the recipe documents"
            )
        against = None if self.against is None else read_against(subject, self.against)
        histogram, pack_length = subject.histogram, subject.pack_length
        if self.sample is not None:
            histogram = sample_histogram(histogram, self.sample, seed=0)
        rows = study_packing(
            histogram,
            pack_length=pack_length,
            depths=depths,
            choices=choices,
            baselines=self.against is None and pack_lengths is None,
            begin=console.messages().print,
            refused=lambda algorithm, depth, error: console.print_error(f"{algorithm}: {error}"),
        )
        if not rows:
            raise PackingError("none of the algorithms could pack these lengths; see above")
        batches = study_sorted_batches(histogram)
        sweep = None if self._narrowed else sweep_lengths(subject, rows, pack_lengths)
        shown: list[Any] = [
            *map(console.text, subject.long_sentences()),
            *([] if sweep is None else [lengths_table(subject)]),
            packing_table(rows),
            *([sorted_batches_table(batches)] if batches else []),
            *([] if sweep is None else sweep_shown(sweep)),
            *([] if against is None else [distance_table(against.distance)]),
        ]
        value: dict[str, Any] = {
            "origin": subject.origin,
            "pack_length": pack_length,
            "long_sequences": subject.long_sequences(),
            "lengths": length_statistics(subject.histogram, pack_length=pack_length),
            "histogram": subject.histogram.counts[: subject.histogram.longest].tolist(),
            "packings": rows,
            "sorted_batches": batches,
        }
        if sweep is not None:
            value |= {"pack_lengths": sweep.rows, "pack_lengths_auto": sweep.fullest}
            value["recommendation"] = sweep.recommended
        if against is not None:
            value["against"] = against.distance
        if self.plot is not None:
            footer = [subject.provenance_line(), *subject.long_sentences()]
            if self.sample is not None:
                footer.append(f"A random sample of {self.sample:,} of {subject.histogram.sequences:,} sequences.")
            if against is not None:
                footer.append(against.footer)
            plot_packing(subject.origin, histogram, rows, self.plot, footer=footer, against=against)
            shown.append(console.text(f"Drew {self.plot}"))
        return Report(value=value, shown=shown)
