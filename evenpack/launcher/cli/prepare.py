"""The command `evenpack prepare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting

if TYPE_CHECKING:
    from evenpack.data.prepare.tokenising.workers import Workers

_WORKERS_HELP = """Processes that tokenise text; 1: this one alone, with several threads. By default one for each two
cores, as far as the sources can be divided. Under mpirun, all ranks but the first are workers."""


def prepare(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    workers: Annotated[int | None, typer.Option(min=1, help=_WORKERS_HELP, show_default=False)] = None,
    part_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes of the source that a worker takes at a time; by default 16 MiB to 1 GiB."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into tokens and packs.

    Writes to data.prepared_dir. A second call only verifies the files; an interrupted preparation is resumed.

    \b
    Examples:
      evenpack prepare gpt2_mini_wiki data.sources.wiki.path=wiki.jsonl.zst
      mpirun -n 65 evenpack prepare RUN.yaml       on several hosts: the first rank joins what 64 others tokenise
    """
    from evenpack.data.prepare.tokenising.mpi import mpi_workers, started_ranks
    from evenpack.data.prepare.tokenising.workers import local_workers

    if started_ranks() == 1:
        _prepare(run_file, overrides, local_workers(workers), part_bytes, as_json=as_json)
        return
    if workers is not None:
        raise ConfigError("under mpirun the ranks are the workers: leave out --workers, or start without mpirun")
    with mpi_workers() as ranks:
        if ranks is not None:
            _prepare(run_file, overrides, ranks, part_bytes, as_json=as_json)


def _prepare(
    run_file: Path, overrides: list[str] | None, workers: "Workers | None", part_bytes: int | None, *, as_json: bool
) -> None:
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack.launcher.preparing import prepare_run, warn_of_epochs
        from evenpack.studies.inspection.tables import rows_table, splits_table

        manifest = prepare_run(config, workers=workers, part_bytes=part_bytes)
        warn_of_epochs(config)
        splits, rows = manifest.summary(), manifest.row_summary()
        report.value = {
            "directory": config.prepared_dir,
            "vocabulary_size": manifest.tokenizer.vocabulary_size,
            "splits": splits,
            "source_rows": rows,
        }
        if rows:
            report.shown.append(rows_table(rows))
        report.shown.append(splits_table(splits, title=f"Prepared in {config.prepared_dir}"))
