"""`evenpack study packing`."""

from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, LengthsInput, Overrides, Plot, Save, reporting
from evenpack.launcher.cli.subject_options import SubjectOptions, takes_subject


@takes_subject
def study_packing(
    lengths: LengthsInput,
    overrides: Overrides = None,
    *,
    options: SubjectOptions,
    depths: Annotated[
        str | None, typer.Option(help="Most sequences a pack may hold: 2,3,none.", show_default=False)
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(help="cutting_stock,least_squares:weight=0. Default: all, where of use.", show_default=False),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Pack so many sequences, drawn at random, in place of all.", show_default=False)
    ] = None,
    plot: Plot = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Compare packing algorithms over depths.

    \b
    Examples:
      evenpack study packing wikipedia_512 --plot packing.png
      evenpack study packing lengths.npy --pack-length 2048 --algorithms longest_pack_first,cutting_stock
    """
    with reporting(as_json, save=save) as report:
        from evenpack.launcher.inspection import find_subject, parse_choices, parse_depths, study_subject

        limits, choices = parse_depths(depths), parse_choices(algorithms)  # before anything is read
        subject = find_subject(lengths, overrides or [], options)
        report.value, report.shown = study_subject(subject, depths=limits, choices=choices, sample=sample, plot=plot)
