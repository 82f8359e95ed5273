"""Prepares a run's data with progress on the terminal, for the commands that need it."""

from evenpack import console
from evenpack.data.prepare.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.shown import PrepareProgress
from evenpack.data.prepare.tokenising.workers import Workers
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.config import RunConfig


def prepare_run(
    config: RunConfig,
    *,
    workers: Workers | None = None,
    part_bytes: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Manifest:
    """Turns the run's text into tokens and packs; prepared data is only verified.

    `workers`, `part_bytes` and `tokenizer` are those of `prepare`.

    Raises: DataError or ConfigError for sources that cannot be read; KeyboardInterrupt, after which it can be resumed.
    """
    with PrepareProgress(console.messages()) as progress:
        try:
            return prepare(
                config.data,
                config.prepared_dir,
                progress=progress,
                workers=workers,
                part_bytes=part_bytes,
                tokenizer=tokenizer,
            )
        except KeyboardInterrupt:
            progress.note("interrupted; run the same command again to continue")
            raise
