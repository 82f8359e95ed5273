"""Commands on data: `evenpack prepare`, `verify`, `where` and `shards ...`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenpack import console
from evenpack.console import Report
from evenpack.errors import EXIT_BAD_INPUT, ConfigError
from evenpack.launcher.cli.arguments import SETTINGS, Overrides, RunFile, load
from evenpack.studies.columns import Column, table_of

if TYPE_CHECKING:
    from evenpack.data.config import DataConfig
    from evenpack.data.prepare.workers import Workers
    from evenpack.data.verification import Verified
    from evenpack.data.where import DocumentVisits, StepContent


_WORKERS_HELP = """Processes that tokenise text; 1: this one alone, with several threads. By default one for each two
cores, as far as the sources can be divided. Under mpirun, all ranks but the first are workers."""


def prepare(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    workers: Annotated[int | None, typer.Option(min=1, help=_WORKERS_HELP)] = None,
) -> Report:
    """Turn text into tokens and packs.

    Writes to data.prepared_dir. A second call only verifies the files; an interrupted preparation is resumed.

    \b
    Examples:
      evenpack prepare gpt2_mini_wiki data.sources.wiki.path=wiki.jsonl.zst
      mpirun -n 65 evenpack prepare RUN.yaml       on several hosts: the first rank joins what 64 others tokenise
    """
    from evenpack.data.prepare.workers import local_workers, mpi_workers, started_ranks

    if started_ranks() == 1:
        return _prepare(run_file, overrides, local_workers(workers))
    if workers is not None:
        raise ConfigError("under mpirun the ranks are the workers: leave out --workers, or start without mpirun")
    with mpi_workers() as ranks:
        return Report(is_silent=True) if ranks is None else _prepare(run_file, overrides, ranks)


def _prepare(run_file: Path, overrides: list[str] | None, workers: "Workers | None") -> Report:
    from evenpack.launcher.preparing import prepare_run, rows_table, splits_table

    config = load(run_file, overrides)
    found = prepare_run(config, workers=workers)
    forms: list[dict[str, Any]] = [
        {
            "directory": folder,
            "vocabulary_size": manifest.tokenizer.vocabulary_size,
            "splits": manifest.summary(),
            "source_rows": manifest.row_summary(),
        }
        for folder, manifest in found.items()
    ]
    first, *others = forms
    rows = [rows_table(first["source_rows"])] if first["source_rows"] else []
    splits = [splits_table(one["splits"], title=f"Prepared in {one['directory']}") for one in forms]
    return Report(value=first | ({"other_forms": others} if others else {}), shown=[*rows, *splits])


EXIT_DAMAGED = 1
"""Exit code if a file is not as it was written."""


def verify(run_file: RunFile, overrides: Overrides = None) -> Report:
    """Compare every file of the prepared data with its checksum.

    Names each damaged file and the start of its damage. Exit code 0 if all are as they were written, 1 if one is not, 2
    if the data is not prepared, or the system cannot read it.

    \b
    Example:
      evenpack verify gpt2_mini_wiki
    """
    config = load(run_file, overrides)
    reports = [_verify(data.prepared_dir or config.prepared_dir, data) for data in config.forms]
    first, *others = (report.value for report in reports)
    return Report(
        value=first | ({"other_forms": others} if others else {}),
        shown=[shown for report in reports for shown in report.shown],
        exit_code=max(report.exit_code for report in reports),
    )


def _verify(prepared_dir: Path, config: "DataConfig") -> Report:
    """Verifies the files of one form of packs.

    Raises: NotPreparedError without prepared data; DataError for a damaged manifest or other data.
    """
    from evenpack.data.manifest import Manifest, data_section, refuse_differences
    from evenpack.data.verification import Verifier
    from evenpack.progress import FREQUENT_LINES_SECONDS, Progress

    directory = prepared_dir.absolute()
    manifest = Manifest.read(directory).of_sources(config.sources)
    refuse_differences(manifest.data, data_section(config), directory)
    with Progress(console.messages(), interval_seconds=FREQUENT_LINES_SECONDS) as progress:
        verifier = Verifier(directory, manifest)
        verified = verifier.verify_all(progress)
    rate = (
        f"{verified.bytes / 1e6:,.1f} MB read in {verified.elapsed_seconds:,.2f} s "
        f"({verified.bytes_per_second / 1e9:.2f} GB/s)"
    )
    report = Report(value={"directory": directory, "files": len(manifest.files), **_figures(verified)})
    lines = [f"{directory}: all {len(manifest.files)} files are as they were written; {rate}"]
    if verified.damages:
        is_damaged = any(damage.unreadable is None for damage in verified.damages)
        report.exit_code = EXIT_DAMAGED if is_damaged else EXIT_BAD_INPUT
        report.value["remedy"] = verifier.remedy(verified.damages)
        finding = "are damaged" if is_damaged else "cannot be read"
        lines = [
            f"{directory}: {len(verified.damages)} of {len(manifest.files)} files {finding}; {rate}",
            *(f"  {damage.describe()}" for damage in verified.damages),
            report.value["remedy"],
        ]
    report.shown.append(console.text("\n".join(lines)))
    return report


def _figures(verified: "Verified") -> dict[str, Any]:
    return {
        "bytes": verified.bytes,
        "elapsed_seconds": verified.elapsed_seconds,
        "bytes_per_second": verified.bytes_per_second,
        "damaged": [
            {"file": damage.path, "problem": damage.problem, "first_bad_byte": damage.first_bad_byte}
            for damage in verified.damages
        ],
    }


def where(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    step: Annotated[int | None, typer.Option(metavar="N", help="Show this step's content; steps count from 1.")] = None,
    document: Annotated[
        int | None, typer.Option(metavar="ID", help="Show the steps of this document; documents count from 0.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Source of the document, if several exist.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Also show the text.")] = False,
) -> Report:
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
    from evenpack.engine.where import differs_from_trained, open_where

    opened = open_where(config, with_text=text)
    if document is not None:
        visits = opened.document(document, source)
        return Report(value=visits, shown=_document_tables(visits))
    assert step is not None, "one of the two is given"
    found = opened.step(step)
    return Report(value=found, shown=_step_tables(found), unmet=differs_from_trained(found, config.run.output_dir))


_MOST_ROWS = 1000
"""Rows of a table; --json has all."""
_TEXT_SHOWN = 60
"""Characters of a text in a table."""
_PARTS = (
    *(Column(name, f"of.{name}") for name in ("pack", "slot", "source", "epoch", "sequence")),
    Column("document", "part.document"),
    Column("from token", "part.start"),
    Column("tokens", lambda row: (row["part"] or row["of"]).tokens),
)
_TEXT = Column("text", lambda row: None if row["part"] is None else repr(row["part"].text[:_TEXT_SHOWN])[1:-1])
_VISITS = (
    *map(Column, ("step", "epoch", "pack", "slot", "sequence")),
    Column("from token", "start"),
    *map(Column, ("tokens", "skipped")),
)


def _step_tables(content: "StepContent") -> list[Any]:
    """Returns a row for each part of a document in a step."""
    tokens = sum(sequence.tokens for sequence in content.sequences)
    title = (
        f"Step {content.step:,}{' (skipped)' if content.skipped else ''}: {content.packs:,} packs, "
        f"{len(content.sequences):,} sequences, {tokens:,} tokens, order hash {content.order_hash}"
    )
    rows: list[dict[str, Any]] = [
        {"of": sequence, "part": part} for sequence in content.sequences for part in sequence.parts or (None,)
    ]
    has_text = any(row["part"] is not None and row["part"].text is not None for row in rows)
    return _table(rows, [*_PARTS, *([_TEXT] if has_text else [])], title=title)


def _document_tables(found: "DocumentVisits") -> list[Any]:
    """Returns a row for each part of a document in each step that has one."""
    title = f"Document {found.document} of {found.source}: {found.tokens:,} tokens"
    shown = [] if found.text is None else [console.text(found.text)]
    if found.absence is not None:
        return [console.text(f"{title}. No step trains on it: {found.absence}"), *shown]
    if not found.visits:
        return [console.text(f"{title}. The run ends before it reaches the document"), *shown]
    return [*_table(found.visits, _VISITS, title=f"{title}, in {len(found.sequences):,} sequences"), *shown]


def _table(rows: Sequence[Any], columns: Sequence[Column], *, title: str) -> list[Any]:
    shown: list[Any] = [console.text(title, bold=True), table_of(rows[:_MOST_ROWS], columns)]
    if len(rows) > _MOST_ROWS:
        shown.append(console.text(f"and {len(rows) - _MOST_ROWS:,} more rows; --json shows all"))
    return shown


shards_app = typer.Typer(
    help="HDF5 shards of masked pairs, in the formats of MLPerf's BERT.",
    no_args_is_help=True,
    context_settings=SETTINGS,
)


@shards_app.command("pick")
def pick_evaluation_set(
    shards: Annotated[Path, typer.Argument(metavar="SHARDS", help="A file, a folder or a glob pattern.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT.hdf5", help="File to create.")],
    *,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 10_000,
) -> Report:
    """Pick the fixed evaluation set from the shards of the evaluation text, by MLPerf's rule.

    Of N rows the i-th sample is row floor(i N / SAMPLES), so the same shards always give the same set.

    \b
    Example:
      evenpack shards pick hdf5/eval eval_10k.hdf5
    """
    from evenpack.data.shards.writing import pick_evaluation_set as pick
    from evenpack.data.sources.without_text import find_shards
    from evenpack.progress import Progress

    with Progress(console.messages()) as progress:
        picked = pick(find_shards(shards), output, samples=samples, progress=progress)
    line = f"Wrote {output}: {picked.samples:,} of {picked.candidates:,} rows, layout {picked.layout}"
    return Report(value=picked, shown=[console.text(line)])
