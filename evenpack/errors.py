"""The errors that a user can correct, in one tree.

    EvenpackError
    ├── ConfigError        the run file, an override, the command line or an environment variable
    ├── DataError          sources, tokenizers, token files, prepared data
    │   └── NotPreparedError
    ├── PackingError       lengths, histograms, packing limits
    ├── BackendError       an attention backend or device that is not usable
    ├── MissingExtraError  a package that an extra of evenpack brings is not installed; an ImportError, too
    ├── CheckpointError    a checkpoint that is missing, broken or of another run
    │   └── UnjudgedCheckpointError
    └── RunError           a run that could not continue: a rank died, the disk is full
        └── SaveError

Each message says what was expected, what was found, and what to do. The command line prints it without a
traceback and exits with `EXIT_BAD_INPUT`.
"""

EXIT_BAD_INPUT = 2
"""Exit code for every `EvenpackError`."""

EXIT_STOPPED = 75
"""Exit code of a run that was asked to stop, saved its state and can be resumed (EX_TEMPFAIL)."""


class EvenpackError(Exception):
    """Base of every error that the user can correct."""


class ConfigError(EvenpackError):
    """The run file, an override, the command line or an environment variable is wrong."""


class DataError(EvenpackError):
    """A source, tokenizer, token file or prepared set is wrong."""


class NotPreparedError(DataError):
    """The run's data has not been prepared, or only partly."""


class PackingError(EvenpackError):
    """Lengths or limits that cannot be packed."""


class BackendError(EvenpackError):
    """A named attention backend or device cannot serve the request."""


class MissingExtraError(EvenpackError, ImportError):
    """A package that an extra of evenpack brings is not installed."""


class CheckpointError(EvenpackError):
    """A checkpoint is missing, broken, or belongs to another run."""


class UnjudgedCheckpointError(CheckpointError):
    """A checkpoint cannot be read now, or is of another format: it may be complete, so that it is left alone."""


class RunError(EvenpackError):
    """A run could not continue."""


class SaveError(RunError):
    """A checkpoint could not be saved; the run and its older checkpoints are as they were."""
