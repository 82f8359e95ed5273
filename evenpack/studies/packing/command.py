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
    the packs alone. With --residuals, packs by least squares at each pair of a weight and a length up to which it
    applies, and shows the residual by length; half a minute each at 512 slots.

    \b
    Examples:
      evenpack study packing wikipedia_512 --plot packing.png
      evenpack study packing RUN.yaml --against wikipedia_512
      evenpack study packing wikipedia_128 --beside wikipedia_512,wikipedia_2048 --plot depths.png
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
    pack_lengths: Annotated[
        str | None, typer.Option(help="Compare these pack lengths: 512,640. Default: up to twice as long.")
    ] = None
    against: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Compare with these lengths: wikipedia_512.")
    ] = None
    beside: Annotated[
        str | None, typer.Option(metavar="INPUTS", help="Only compare by depth with these inputs: wikipedia_512,x.npy.")
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
        if self.residuals is not None:
            return self._search(self.residuals, find_subject)
        if self.beside is not None:
            return self._side_by_side([find_subject(), *map(find_subject, self.beside.split(","))])
        return self._compare(find_subject)

    @property
    def _narrowed(self) -> "Sequence[str]":
        """The options that ask for packs alone."""
        given = {"--depths": self.depths, "--algorithms": self.algorithms, "--sample": self.sample}
        return [name for name, value in given.items() if value is not None]

    def _require_one_kind(self) -> None:
        """Raises: ConfigError for options that do not go together."""
        from evenpack.errors import ConfigError

        of_lengths = {"--pack-lengths": self.pack_lengths, "--against": self.against, "--beside": self.beside}
        given = [name for name, value in of_lengths.items() if value is not None]
        others = ["--residuals"] if self.residuals is not None else self._narrowed
        if given and (others or (self.beside is not None and len(given) > 1)):
            raise ConfigError(f"{given[0]} and {(*given[1:], *others)[0]} do not go together: leave one of them out")

    def _compare(self, find_subject: "Callable[..., Subject]") -> Report:
        """Compares the algorithms. The error of one is printed, and the others continue."""
        from evenpack import console
        from evenpack.data.packing.baselines import sample_histogram
        from evenpack.errors import ConfigError, PackingError
        from evenpack.studies.lengths.statistics import length_statistics
        from evenpack.studies.packing.presentation import (
            distance_table,
            lengths_shown,
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
            *([] if sweep is None else lengths_shown(subject)),
            packing_table(rows),
            *([sorted_batches_table(batches)] if batches else []),
            *([] if sweep is None else sweep_shown(sweep)),
            *([] if against is None else [distance_table(against.distance)]),
            *subject.verification_texts(),
        ]
        value: dict[str, Any] = {
            "origin": subject.origin,
            **subject.verification(),
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
            footer = [subject.provenance_line(), *subject.long_sentences(), *subject.verification_sentences()]
            if self.sample is not None:
                footer.append(f"A random sample of {self.sample:,} of {subject.histogram.sequences:,} sequences.")
            if against is not None:
                footer.append(against.footer)
            if sweep is not None:
                footer.append(f"Recommended by what auto fills without a limit: {sweep.recommended.reason}.")
            plot_packing(subject.origin, histogram, rows, self.plot, footer=footer, against=against, sweep=sweep)
            shown.append(console.text(f"Drew {self.plot}"))
        return Report(value=value, shown=shown)

    def _side_by_side(self, subjects: "Sequence[Subject]") -> Report:
        """Packs several lists of lengths, each at its own pack length, over limits of depth."""
        from evenpack import console
        from evenpack.errors import ConfigError
        from evenpack.studies.packing.presentation import depth_curves_table, plot_depth_curves
        from evenpack.studies.packing.study import CURVE_DEPTHS, SWEPT_BY, sweep_pack_lengths
        from evenpack.studies.provenance import COMPUTED, made_by

        names = [subject.origin for subject in subjects]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"'{twice[0]}' is given twice: compare inputs of different names")
        curves = {
            subject.origin: sweep_pack_lengths(
                subject.histogram, [subject.pack_length], algorithm=SWEPT_BY, depths=CURVE_DEPTHS
            )
            for subject in subjects
        }
        title = f"Limits of depth ({SWEPT_BY}): efficiency, speed-up over padding"
        shown: list[Any] = [
            depth_curves_table(curves, title=title),
            *(line for subject in subjects for line in subject.verification_texts()),
        ]
        if self.plot is not None:
            footer = [f"Packs by {SWEPT_BY}; {made_by()}; {COMPUTED}"]
            for one in subjects:
                footer += [f"{one.origin}: data {one.data}", *one.long_sentences(), *one.verification_sentences()]
            plot_depth_curves(curves, self.plot, footer=footer)
            shown.append(console.text(f"Drew {self.plot}"))
        return Report(value={"curves": curves}, shown=shown)

    def _search(self, weights: str, find_subject: "Callable[..., Subject]") -> Report:
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
