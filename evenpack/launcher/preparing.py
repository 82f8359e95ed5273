"""Prepares a run's data with progress on the terminal, for the commands that need it."""

import logging

from evenpack import console
from evenpack.data.prepare.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.shown import PrepareProgress
from evenpack.data.prepare.tokenising.workers import Workers
from evenpack.data.prepared import PreparedData
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.step_items import epochs_of_steps, implausible_epochs

log = logging.getLogger(__name__)


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


def warn_of_epochs(config: RunConfig) -> None:
    """Warns of prepared sources that the run would read implausibly often; `train` warns of all kinds of lengths."""
    epochs = epochs_of_steps(config, PreparedData.open(config.prepared_dir, config.data))
    implausible = None if epochs is None else implausible_epochs(config, epochs)
    if implausible is not None:
        log.warning("%s", implausible)
