"""The command `evenpack where`."""

from typing import Annotated

import typer

from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, Save, load, reporting


def where(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Show this step's content; steps count from 1.", show_default=False)
    ] = None,
    document: Annotated[
        int | None,
        typer.Option(metavar="ID", help="Show the steps of this document; documents count from 0.", show_default=False),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Source of the document, if several exist.", show_default=False)
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Also show the text.")] = False,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Show the documents of a step, or the steps of a document.

    The answer is computed from the run file and its prepared data, whether the run has reached the step or not. If
    metrics.jsonl has the step with another order hash, the answer is followed by an error.

    \b
    Examples:
      evenpack where RUN.yaml --step 1200 --text
      evenpack where RUN.yaml --document 7 --source wiki --json
    """
    if (step is None) == (document is None):
        raise ConfigError("give one of the two options: --step N, or --document ID")
    if step is not None and source is not None:
        raise ConfigError(f"a step has sequences of all sources: leave --source {source} out, or give --document ID")
    config = load(run_file, overrides)
    with reporting(as_json, save=save) as report:
        from evenpack.engine.resolving.where import differs_from_trained, open_where
        from evenpack.launcher import where_views

        opened = open_where(config, with_text=text)
        if step is not None:
            report.value = opened.step(step)
            report.shown = where_views.step_tables(report.value)
            report.unmet = differs_from_trained(report.value, config.run.output_dir)
        elif document is not None:
            report.value = opened.document(document, source)
            report.shown = where_views.document_tables(report.value)
