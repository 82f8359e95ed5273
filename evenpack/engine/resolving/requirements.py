"""What training needs beyond a run that can be resolved: held-out documents, installed packages, logins.

It imports no torch: `evenpack train` checks it before it starts ranks.
"""

import importlib.util

from evenpack.engine.config import MetricsSection
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError


def require_trainable(run: ResolvedRun) -> None:
    """Checks the requirements that training has beyond those of evaluation and export.

    Raises: ConfigError if it has a target accuracy and nothing is held out for it; or if it has the section `mlperf`
    and lacks the package for the log or the name of the submitting organization.
    """
    sources = run.prepared.manifest.sources
    has_validation = any(sources[name].validation.packing is not None for name in run.prepared.source_names)
    if run.config.training.target_accuracy is not None and not has_validation:
        raise ConfigError(
            f"training.target_accuracy ({run.config.training.target_accuracy:g}) is measured on held-out documents, "
            "and no source has any: raise data.validation_fraction (now "
            f"{run.config.data.validation_fraction:g}) and prepare again, or set target_accuracy to null"
        )
    if run.config.mlperf is not None:
        if importlib.util.find_spec("mlperf_logging") is None:
            raise ConfigError(
                "the section mlperf: needs the package mlperf-logging, which is not installed: "
                "pip install 'evenpack[mlperf]', or leave the section out"
            )
        if run.config.mlperf.submission_org is None:
            raise ConfigError(
                "mlperf.submission_org is null, and the log must name the submitter: set it, or mlperf=null"
            )


def require_trackers(section: MetricsSection) -> None:
    """Checks the trackers that the section names. Raises: ConfigError naming each that this machine cannot use."""
    missing = {}
    if section.tensorboard and importlib.util.find_spec("tensorboard") is None:
        missing["tensorboard"] = "the package tensorboard is not installed: pip install 'evenpack[tensorboard]'"
    if section.wandb is not None:
        if importlib.util.find_spec("wandb") is None:
            missing["wandb"] = "the package wandb is not installed: pip install 'evenpack[wandb]'"
        elif section.wandb.mode == "online" and (problem := _login_problem()):
            missing["wandb"] = f"{problem}: run `wandb login`, set WANDB_API_KEY, or metrics.wandb.mode=offline"
    if missing:
        lines = [f"  metrics.{name}: {reason}" for name, reason in missing.items()]
        raise ConfigError(
            "\n".join(["trackers that the run file names cannot be used:", *lines])
            + "\nFix that, or remove them from the section metrics:"
        )


def _login_problem() -> str | None:
    """Returns the problem with the login, without a prompt or network access; None if there is none."""
    import wandb

    try:
        is_logged_in = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        return f"the login to Weights & Biases is invalid ({error})"
    return None if is_logged_in else "nobody is logged in to Weights & Biases"
