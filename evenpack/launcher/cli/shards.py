"""The commands `evenpack shards ...`: HDF5 shards of masked pairs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from evenpack.launcher.cli.arguments import SETTINGS, AsJson, Overrides, RunFile, load, reporting

shards_app = typer.Typer(
    help="Write HDF5 shards of masked pairs, in the formats of MLPerf's BERT.",
    no_args_is_help=True,
    context_settings=SETTINGS,
)

ROWS_PER_SHARD = 100_000


@shards_app.command("export")
def export_shards(
    run_file: RunFile,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Folder to create.", show_default=False)],
    overrides: Overrides = None,
    *,
    layout: Annotated[
        Literal["fixed", "variable"], typer.Option(help="Padded and compressed rows, or rows of variable length.")
    ] = "fixed",
    rows_per_shard: Annotated[int, typer.Option(min=1, help="Most rows of a shard.")] = ROWS_PER_SHARD,
    as_json: AsJson = False,
) -> None:
    """Write a prepared set's pairs with their masks as shards.

    Writes DIRECTORY/SOURCE/train and DIRECTORY/SOURCE/validation, rows in the order of the set. The set must have
    stored masks (data.recipe.static_masks, or shards as its source).

    \b
    Example:
      evenpack shards export bert_mini_wiki shards data.recipe.static_masks.max_predictions=19
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.data.prepared import PreparedData
        from evenpack.data.shards.export import export_shards as export
        from evenpack.progress import Progress

        prepared = PreparedData.open(config.prepared_dir, config.data)
        with Progress(console.messages()) as progress:
            exported = export(prepared, directory, layout=layout, rows_per_shard=rows_per_shard, progress=progress)
        report.value = {"directory": directory, "layout": layout, "splits": exported}
        report.shown.append(
            console.text(
                "\n".join(
                    f"Wrote {directory / part.source / part.split}: {part.rows:,} rows in {part.shards:,} shards"
                    for part in exported
                )
            )
        )


@shards_app.command("pick")
def pick_evaluation_set(
    shards: Annotated[
        Path, typer.Argument(metavar="SHARDS", help="A file, a folder or a glob pattern.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT.hdf5", help="File to create.", show_default=False)],
    *,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 10_000,
    layout: Annotated[
        Literal["fixed", "variable"] | None, typer.Option(help="Default: the shards' layout.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pick the fixed evaluation set from the shards of the evaluation text, by MLPerf's rule.

    Of N rows the i-th sample is row floor(i N / SAMPLES), so the same shards always give the same set.

    \b
    Example:
      evenpack shards pick hdf5/eval eval_10k.hdf5
    """
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.data.shards.evaluation_set import pick_evaluation_set as pick
        from evenpack.data.sources.hdf5 import find_shards
        from evenpack.progress import Progress

        with Progress(console.messages()) as progress:
            picked = pick(find_shards(shards), output, samples=samples, layout=layout, progress=progress)
        report.value = picked
        report.shown.append(
            console.text(f"Wrote {output}: {picked.samples:,} of {picked.candidates:,} rows, layout {picked.layout}")
        )
