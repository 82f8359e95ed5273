"""The command `evenpack budget`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, Save, load, reporting
from evenpack.launcher.cli.subject_options import takes
from evenpack.studies.budget.options import BudgetOptions


@takes("options", BudgetOptions)
def budget(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="The run file; --compute needs none.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    *,
    options: BudgetOptions,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Show the budget of a run: its batch, epochs, operations, hours, and the cost of padding.

    It is exact over prepared data; otherwise it is estimated from --corpus-tokens, or from the run file alone.
    docs/budget.md explains how each figure is computed.

    \b
    Examples:
      evenpack budget gpt2_small --devices 8 --device h100 --mfu 0.4
      evenpack budget RUN.yaml --corpus-tokens 114400095 --corpus-documents 803000 training.steps=null training.epochs=2
      evenpack budget --compute 1e21 --served-tokens 1e12
    """
    config = None if run_file is None else load(run_file, overrides)
    with reporting(as_json, save=save) as report:
        from evenpack.studies.budget.command import compute_budget

        report.take(compute_budget(config, options))
