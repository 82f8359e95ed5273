"""What training needs beyond a run that can be resolved: bounds, held-out documents, installed packages, logins.

It imports no torch: `evenpack train` checks it before it starts ranks.
"""

import importlib.util
import logging
from collections.abc import Mapping

from evenpack.engine.config import MetricsSection
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError

log = logging.getLogger(__name__)


def require_trainable(run: ResolvedRun) -> None:
    """Checks the requirements that training has beyond those of evaluation and export.

    Raises: ConfigError if the run exceeds the `maximum_epochs` of a source; if it has a target accuracy and
    nothing is held out for it; or if it has the section `mlperf` and lacks the package for the log or the
    name of the submitting organization.
    """
    require_bounded_epochs(run)
    sources = run.prepared.manifest.sources
    has_validation = any(sources[name].validation.packing is not None for name in run.prepared.source_names)
    if run.config.training.target_accuracy is not None and not has_validation:
        raise ConfigError(
            f"training.target_accuracy ({run.config.training.target_accuracy:g}) is measured on held-out documents, "
            "and no source has any: raise data.validation_fraction (now "
            f"{run.config.data.validation_fraction:g}) and prepare again, or set target_accuracy to null"
        )
    if run.config.mlperf is not None:
        require_mlperf_logging("the section mlperf:", otherwise=", or leave the section out")
        if run.config.mlperf.submission_org is None:
            raise ConfigError(
                "mlperf.submission_org is null, and the log must name the submitter: set it, or mlperf=null"
            )


def require_bounded_epochs(run: ResolvedRun) -> None:
    """Refuses a run that repeats a source more often than its `maximum_epochs`, or warns.

    Raises: ConfigError if `data.on_maximum_epochs` is `error`.
    """
    message = exceeded_epochs(run)
    if message is None:
        return
    if run.config.data.on_maximum_epochs == "error":
        raise ConfigError(f"{message}, or set data.on_maximum_epochs=warn")
    log.warning("%s", message)


def exceeded_epochs(run: ResolvedRun) -> str | None:
    """Returns a message about the sources whose `maximum_epochs` the run exceeds; None if there are none."""
    epochs = run.epochs(run.config.training.planned_steps)
    bounds = {name: source.maximum_epochs for name, source in run.config.data.sources.items()}
    lines = [
        f"  {name}: {epochs[name]:.2f} epochs, at most {bound:g}"
        for name, bound in bounds.items()
        if bound is not None and epochs[name] > bound
    ]
    if not lines:
        return None
    return "\n".join(
        [
            f"{run.config.training.planned_steps} steps repeat more of a source than its maximum_epochs allows:",
            *lines,
            "Lower its weight (data.sources.NAME.weight, stages), give it more documents, or train for fewer steps",
        ]
    )


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
