"""The sections `metrics:` and `mlperf:` of a run file."""

import importlib.util
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from evenpack.config import Section
from evenpack.errors import ConfigError


class WandbSection(Section):
    """Says where Weights & Biases puts the run; this needs the extra `evenpack[wandb]`."""

    project: str = Field(default="evenpack", min_length=1)
    """Project in which the run appears."""
    entity: str | None = Field(default=None, min_length=1)
    """Team or user that owns the project; null: the default of the user who is logged in."""
    group: str | None = Field(default=None, min_length=1)
    """Name under which the runs of an experiment are shown together; null: none."""
    tags: tuple[str, ...] = ()
    """Labels by which runs can be found."""
    mode: Literal["online", "offline"] = "online"
    """`online` sends each step at once and needs a login; `offline` writes to OUTPUT_DIR/wandb, from where `wandb sync`
    sends it later."""


class MetricsSection(Section):
    """Trackers that receive the metrics of each step. OUTPUT_DIR/metrics.jsonl is always written."""

    csv: bool = False
    """Write OUTPUT_DIR/metrics.csv: a line for each step."""
    tensorboard: bool = False
    """Write event files to OUTPUT_DIR/tensorboard. Needs the extra `evenpack[tensorboard]`."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases; null: do not."""
    on_missing_tracker: Literal["error", "warn"] = "error"
    """What to do about a tracker that is not installed, not logged in or cannot be opened: refuse to train, or log a
    warning and train with the others."""


class MlperfSection(Section):
    """Write OUTPUT_DIR/mlperf.log, as MLPerf Training's rules require. Needs the extra `evenpack[mlperf]`."""

    submission_org: str | None = Field(default=None, min_length=1)
    """The submitting organization; null can be read, but training requires a name."""
    submission_platform: str = Field(min_length=1)
    """The system, for example `8xH100`."""
    submission_division: Literal["closed", "open"] = "open"
    """Whose rules the run follows: the closed division prescribes model, data and target."""
    submission_benchmark: str = Field(min_length=1)
    """The benchmark's name in MLPerf's rules, for example `bert`."""
    cache_cleared: bool = False
    """Whether the caches of the file system were dropped just before the start, which the rules require and a training
    process cannot do; the value is logged as it is given."""


def require_mlperf_logging(needed_by: str, *, otherwise: str = "") -> None:
    """Checks that the package `mlperf-logging` is installed.

    Args:
        otherwise: the end of the message, with what can be done without the package.

    Raises: ConfigError if it is not installed.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        raise ConfigError(
            f"{needed_by} needs the package mlperf-logging, which is not installed: pip install 'evenpack[mlperf]'"
            + otherwise
        )


def missing_trackers(section: MetricsSection) -> dict[str, str]:
    """Returns the reasons why trackers that the section names cannot be used on this machine, by their keys."""
    missing = {}
    if section.tensorboard and importlib.util.find_spec("tensorboard") is None:
        missing["tensorboard"] = "the package tensorboard is not installed: pip install 'evenpack[tensorboard]'"
    if section.wandb is not None:
        if importlib.util.find_spec("wandb") is None:
            missing["wandb"] = "the package wandb is not installed: pip install 'evenpack[wandb]'"
        elif section.wandb.mode == "online" and (problem := _login_problem()):
            missing["wandb"] = f"{problem}: run `wandb login`, set WANDB_API_KEY, or metrics.wandb.mode=offline"
    return missing


def require_trackers(section: MetricsSection) -> None:
    """Checks the trackers. Raises: ConfigError naming each unusable one, unless the run may continue without it."""
    missing = missing_trackers(section)
    if missing and section.on_missing_tracker == "error":
        raise refusal(missing)


def refusal(missing: Mapping[str, str]) -> ConfigError:
    """Returns the error for trackers that cannot be used, by their keys and reasons."""
    lines = [f"  metrics.{name}: {reason}" for name, reason in missing.items()]
    return ConfigError(
        "\n".join(["trackers that the run file names cannot be used:", *lines])
        + "\nFix that, remove them from the section metrics:, or set metrics.on_missing_tracker=warn to train without "
        "them"
    )


def _login_problem() -> str | None:
    """Returns the problem with the login, without a prompt or network access; None if there is none."""
    import wandb

    try:
        is_logged_in = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        return f"the login to Weights & Biases is invalid ({error})"
    return None if is_logged_in else "nobody is logged in to Weights & Biases"
