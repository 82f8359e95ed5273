"""The command `evenpack study packing`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class PackingCommand:
    """Compare packing algorithms over depths, or search the residual weights of one of them.

    With --residuals, packs by least squares at each pair of a weight and a length up to which it applies, and shows the
    residual by length. One solution takes half a minute at 512 slots.

    \b
    Examples:
      evenpack study packing wikipedia_512 --plot packing.png
      evenpack study packing glue:cola --algorithms shortest_pack_first
      evenpack study packing lengths.npy --pack-length 2048 --algorithms longest_pack_first,cutting_stock
      evenpack study packing squad_1_1_384 --residuals 1,0.09,0.002 --residuals-up-to 8,64 --plot residuals.png
    """

    depths: Annotated[
        str | None, typer.Option(help="Most sequences a pack may hold: 2,3,none. Default: seven; with --residuals 3.")
    ] = None
    algorithms: Annotated[
        str | None, typer.Option(help="cutting_stock,least_squares:weight=0. Default: all that apply.")
    ] = None
    sample: Annotated[int | None, typer.Option(help="Pack so many random sequences instead of all.")] = None
    residuals: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="1,0.09,0: search these weights of the residual of short lengths; other lengths weigh 1.",
        ),
    ] = None
    residuals_up_to: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Lengths up to which a weight of --residuals applies.")
    ] = "8,16"
    plot: Plot = None

    def uses_device(self) -> bool:
        """Returns False: lengths are enough."""
        return False

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options before reading the lengths.

        Raises: ConfigError for an invalid option, or a plot that cannot be drawn; PackingError for a sample of more
        than all sequences, or if nothing could be packed.
        """
        from evenpack.studies.plotting import require_plot

        require_plot(self.plot)
        return self._compare(find_subject) if self.residuals is None else self._search(self.residuals, find_subject)

    def _compare(self, find_subject: "Callable[[], Subject]") -> Report:
        """Compares the algorithms. The error of one is printed, and the others continue."""
        from evenpack import console
        from evenpack.data.packing.baselines import sample_histogram
        from evenpack.errors import PackingError
        from evenpack.studies.packing.presentation import (
            DrawnLengths,
            packing_table,
            plot_packing,
            sorted_batches_table,
        )
        from evenpack.studies.packing.study import (
            parse_choices,
            parse_depths,
            study_packing,
            study_sorted_batches,
        )

        depths, choices = parse_depths(self.depths), parse_choices(self.algorithms)
        subject = find_subject()
        histogram, pack_length = subject.histogram, subject.pack_length
        if self.sample is not None:
            histogram = sample_histogram(histogram, self.sample, seed=0)
        rows = study_packing(
            histogram,
            pack_length=pack_length,
            depths=depths,
            choices=choices,
            begin=console.messages().print,
            refused=lambda algorithm, depth, error: console.print_error(f"{algorithm}: {error}"),
        )
        if not rows:
            raise PackingError("none of the algorithms could pack these lengths; see above")
        batches = study_sorted_batches(histogram)
        shown: list[Any] = [*map(console.text, subject.long_sentences()), packing_table(rows, pack_length=pack_length)]
        if batches:
            shown.append(sorted_batches_table(batches))
        if self.plot is not None:
            footer = [subject.provenance_line(), *subject.long_sentences()]
            if self.sample is not None:
                footer.append(f"A random sample of {self.sample:,} of {subject.histogram.sequences:,} sequences.")
            drawn = DrawnLengths(name=subject.origin, histogram=histogram)
            plot_packing(drawn, rows, self.plot, pack_length=pack_length, footer=footer)
            shown.append(console.text(f"Drew {self.plot}"))
        value = {
            "origin": subject.origin,
            "pack_length": pack_length,
            "long_sequences": subject.long_sequences(),
            "packings": rows,
            "sorted_batches": batches,
        }
        return Report(value=value, shown=shown)

    def _search(self, weights: str, find_subject: "Callable[[], Subject]") -> Report:
        """Packs by least squares at each weight, at one limit of depth."""
        from evenpack import console
        from evenpack.errors import ConfigError
        from evenpack.studies.packing.presentation import plot_residuals, residual_tables
        from evenpack.studies.packing.residuals import matrix_size, parse_settings, search_residuals
        from evenpack.studies.packing.study import parse_depths

        settings = parse_settings(weights, self.residuals_up_to)
        (depth, *others) = parse_depths("3" if self.depths is None else self.depths)
        if depth is None or others:
            raise ConfigError(f"--residuals packs at one limit of depth: give --depths 3, not {self.depths}")
        if self.algorithms is not None or self.sample is not None:
            raise ConfigError(
                "--residuals packs all sequences by least squares: leave --algorithms and --sample out, or --residuals"
            )
        subject = find_subject()
        size = matrix_size(subject.pack_length, depth)
        rows = search_residuals(
            subject.histogram,
            settings,
            pack_length=subject.pack_length,
            depth=depth,
            begin=lambda setting: console.messages().print(f"least squares, {setting.label} ..."),
        )
        shown: list[Any] = [*map(console.text, subject.long_sentences()), *residual_tables(rows, size, depth=depth)]
        if self.plot is not None:
            plot_residuals(rows, self.plot, footer=[subject.provenance_line(), *subject.long_sentences()])
            shown.append(console.text(f"Drew {self.plot}"))
        value = {
            "origin": subject.origin,
            "pack_length": subject.pack_length,
            "depth": depth,
            "long_sequences": subject.long_sequences(),
            "packing_matrix": size,
            "settings": rows,
        }
        return Report(value=value, shown=shown)
