"""`evenpack prepare`."""

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


def prepare(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Turn text into tokens and packs.

    Writes to data.prepared_dir. A second call does nothing; an interrupted one goes on.

    \b
    Example:
      evenpack prepare configs/gpt2_mini_wiki.yaml data.sources.wiki.path=wiki.jsonl.zst
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.data.prepare.prepare import prepare as prepare_data
        from evenpack.data.prepare.shown import PrepareProgress
        from evenpack.studies.inspection.tables import splits_table

        with PrepareProgress(console.messages()) as progress:
            try:
                manifest = prepare_data(config.data, config.prepared_dir, progress=progress)
            except KeyboardInterrupt:
                progress.note("interrupted; the same command goes on from here")
                raise
        splits = manifest.summary()
        report.value = {
            "directory": config.prepared_dir,
            "vocabulary_size": manifest.tokenizer.vocabulary_size,
            "splits": splits,
        }
        report.shown.append(splits_table(splits, title=f"Prepared in {config.prepared_dir}"))
