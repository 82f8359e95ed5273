"""Prepares a run's data with progress on the terminal, for the commands that may have to."""

from evenpack import console
from evenpack.data.prepare.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.shown import PrepareProgress
from evenpack.engine.config import RunConfig


def prepare_run(config: RunConfig) -> Manifest:
    """Turns the run's text into tokens and packs; what is prepared already is only verified.

    Raises: DataError or ConfigError for sources that cannot be read; KeyboardInterrupt, after which it can go on.
    """
    with PrepareProgress(console.messages()) as progress:
        try:
            return prepare(config.data, config.prepared_dir, progress=progress)
        except KeyboardInterrupt:
            progress.note("interrupted; the same command goes on from here")
            raise
