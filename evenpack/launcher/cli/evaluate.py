"""The command `evenpack evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, AtStep, Overrides, RunFile, Save, load, reporting


def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    checkpoint: AtStep = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Evaluate on all text of a file, folder or pattern.", show_default=False),
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate on each source's held-out documents.

    Uses the newest checkpoint of the run, or that of --checkpoint STEP, or the one of the lowest validation loss
    (--checkpoint best), in one process, on the GPU if there is one. The data may be prepared with another recipe than
    in training, by the same tokenizer: the same documents are held out.

    \b
    Examples:
      evenpack evaluate gpt2_mini_wiki training.evaluation_packs=500
      evenpack evaluate RUN.yaml --checkpoint 400 --data other.jsonl.zst
      evenpack evaluate RUN.yaml data.prepared_dir=runs/other data.recipe='{kind: documents, ...}' --save other.json
    """
    config = load(run_file, overrides)
    with reporting(as_json, save=save) as report:
        from evenpack.launcher.evaluation import describe_evaluation, evaluate_run

        report.value, report.shown = describe_evaluation(evaluate_run(config, step=checkpoint, data=data))
