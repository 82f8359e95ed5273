"""`evenpack prepare`."""

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


def prepare(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Turn text into tokens and packs.

    Writes to data.prepared_dir. A second call only verifies what is there; an interrupted one goes on.

    \b
    Example:
      evenpack prepare configs/gpt2_mini_wiki.yaml data.sources.wiki.path=wiki.jsonl.zst
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack.launcher.preparing import prepare_run
        from evenpack.studies.inspection.tables import rows_table, splits_table

        manifest = prepare_run(config)
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
