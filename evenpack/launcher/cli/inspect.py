"""The command `evenpack inspect`."""

from typing import Annotated

import typer

from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import AsJson, LengthsInput, Overrides, reporting
from evenpack.launcher.cli.subject_options import takes_subject
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.shared_options import Plot


@takes_subject
def inspect(
    lengths: LengthsInput,
    overrides: Overrides = None,
    *,
    options: SubjectOptions,
    pack_lengths: Annotated[
        str | None,
        typer.Option(help="Compare these pack lengths: 512,640. Default: up to twice as long.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Compare with these lengths: wikipedia_512.", show_default=False),
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show lengths, the cost of padding, and packing.

    The input is a prepared run, or any list of lengths. Several inputs are compared by depth.

    \b
    Examples:
      evenpack inspect demo.yaml --plot lengths.png
      evenpack inspect bert_large_phase2.yaml --against wikipedia_512
      evenpack inspect tokenized.parquet --column input_ids --json
      evenpack inspect glue:mrpc --tokenizer bert-base-uncased
      evenpack inspect wikipedia_128 wikipedia_512 wikipedia_2048 --plot depths.png
    """
    with reporting(as_json) as report:
        from evenpack.studies.inspection.against import read_against, require_one_on_each_side
        from evenpack.studies.inspection.inspect import inspect_lengths, inspect_side_by_side
        from evenpack.studies.inspection.tables import distance_table
        from evenpack.studies.lengths.subject import find_subject

        more = [word for word in overrides or [] if "=" not in word]
        changes = [word for word in overrides or [] if "=" in word]
        if against is not None:
            require_one_on_each_side(against, (lengths, *more))
        subjects = [find_subject(one, changes, options) for one in (lengths, *more)]
        if more:
            if pack_lengths is not None:
                raise ConfigError("--pack-lengths compares the packs of a single input; several have --pack-length")
            report.value, report.shown = inspect_side_by_side(subjects, plot=plot)
        else:
            compared = None if against is None else read_against(subjects[0], against)
            report.value, report.shown = inspect_lengths(
                subjects[0], pack_lengths=pack_lengths, plot=plot, against=compared
            )
            if compared is not None:
                report.value["against"] = compared.distance
                report.shown.append(distance_table(compared.distance))
