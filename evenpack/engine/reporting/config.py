"""The sections `metrics:` and `mlperf:` of a run file."""

import importlib.util
from typing import Literal

from pydantic import Field

from evenpack.config import Section
from evenpack.errors import ConfigError


class WandbSection(Section):
    """Where Weights & Biases puts the run. Needs the extra `evenpack[wandb]`."""

    project: str = Field(default="evenpack", min_length=1)
    """Project in which the run appears."""
    entity: str | None = Field(default=None, min_length=1)
    """Team or user that the project belongs to; null: the default of who is logged in."""
    group: str | None = Field(default=None, min_length=1)
    """Name under which the runs of an experiment are shown together; null: none."""
    tags: tuple[str, ...] = ()
    """Labels by which runs can be found."""
    mode: Literal["online", "offline"] = "online"
    """`online` sends each step at once and needs a login; `offline` writes to OUTPUT_DIR/wandb, from where `wandb sync`
    sends it later."""


class MetricsSection(Section):
    """Trackers that get the numbers of each step. OUTPUT_DIR/metrics.jsonl is written whatever stands here."""

    csv: bool = False
    """Write OUTPUT_DIR/metrics.csv: a line for each step."""
    tensorboard: bool = False
    """Write event files to OUTPUT_DIR/tensorboard. Needs the extra `evenpack[tensorboard]`."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases; null: do not."""
    on_missing_tracker: Literal["error", "warn"] = "error"
    """What to do about a tracker that is not installed, not logged in or cannot be opened: refuse to train, or train
    with the others and say so."""


class MlperfSection(Section):
    """Write OUTPUT_DIR/mlperf.log, as MLPerf Training's rules ask for it. Needs the extra `evenpack[mlperf]`."""

    submission_org: str | None = Field(default=None, min_length=1)
    """Who submits; training asks for it, though null is read."""
    submission_platform: str = Field(min_length=1)
    """The system, for example `8xH100`."""
    submission_division: Literal["closed", "open"] = "open"
    """Whose rules the run follows: the closed division prescribes model, data and target."""
    submission_benchmark: str = Field(min_length=1)
    """The benchmark's name in MLPerf's rules, for example `bert`."""
    cache_cleared: bool = False
    """Whether whoever starts the run has dropped the caches of the file system just before, which the rules ask for
    and a training process cannot do; written down as it is."""


def require_mlperf_logging(needed_by: str, *, otherwise: str = "") -> None:
    """`otherwise`: what can be done without the package.

    Raises: ConfigError if the package `mlperf-logging` is not installed.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        raise ConfigError(
            f"{needed_by} needs the package mlperf-logging, which is not installed: pip install 'evenpack[mlperf]'"
            + otherwise
        )
