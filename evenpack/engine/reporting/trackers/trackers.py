"""Opens the trackers of a run, checks which are available, and continues without one that fails.

    metrics.jsonl                           always written, by `reporting/metrics.py`; the authoritative record
    csv_table.py  tensorboard.py  wandb.py  copies of its numbers, on rank 0, each a `Tracker`

One more tracker is a file here, a key of the section `metrics:`, a line of `_OPENERS` and, where it needs a
package, one of `missing_trackers`.
"""

import importlib.util
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from evenpack.engine.reporting.config import MetricsSection
from evenpack.engine.reporting.definitions import scalars
from evenpack.engine.reporting.trackers.tracker import RunLog, Tracker
from evenpack.errors import ConfigError

log = logging.getLogger(__name__)


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
        raise _refusal(missing)


class Trackers:
    """Holds the open trackers of a run. One that fails causes one warning and is left out from then on."""

    def __init__(self, open_trackers: Mapping[str, Tracker]) -> None:
        self._open = dict(open_trackers)

    @classmethod
    @contextmanager
    def opened(cls, section: MetricsSection, run: RunLog) -> Iterator["Trackers"]:
        """Opens those that the section names; called on rank 0 alone.

        Raises: ConfigError for one that cannot be opened, unless the run may continue without it.
        """
        trackers = cls({})
        failed = True
        try:
            missing = missing_trackers(section)
            missing |= trackers._begin(section, run, unusable=missing)
            if missing and section.on_missing_tracker == "error":
                raise _refusal(missing)
            for name, reason in missing.items():
                log.warning("the run continues without metrics.%s: %s", name, reason)
            yield trackers
            failed = False
        finally:
            trackers._each(lambda tracker: tracker.close(failed=failed))

    def write(self, record: Mapping[str, Any]) -> None:
        """Passes the numbers of a record of metrics.jsonl to the trackers.

        Raises: ValueError if a name in it is not a metric.
        """
        values = scalars(record)
        self._each(lambda tracker: tracker.write(record["step"], values))

    def flush(self) -> None:
        """See `Tracker`."""
        self._each(lambda tracker: tracker.flush())

    def _begin(self, section: MetricsSection, run: RunLog, *, unusable: Collection[str]) -> dict[str, str]:
        """Opens those that are available; returns the problems with the others, by their keys."""
        problems = {}
        for name, opener in _OPENERS.items():
            if getattr(section, name) and name not in unusable:
                try:
                    self._open[name] = opener(section, run)
                except Exception as error:  # whatever a tracker's library may raise
                    problems[name] = f"it cannot be opened ({type(error).__name__}: {error})"
        return problems

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._open[name]
                log.warning(
                    "metrics.%s failed (%s: %s) and gets no further steps; the run continues, and metrics.jsonl is "
                    "complete",
                    name,
                    type(error).__name__,
                    error,
                )


def _refusal(missing: Mapping[str, str]) -> ConfigError:
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


def _open_csv(section: MetricsSection, run: RunLog) -> Tracker:
    from evenpack.engine.reporting.trackers.csv_table import CsvTable

    return CsvTable(run)


def _open_tensorboard(section: MetricsSection, run: RunLog) -> Tracker:
    from evenpack.engine.reporting.trackers.tensorboard import TensorBoardEvents

    return TensorBoardEvents(run)


def _open_wandb(section: MetricsSection, run: RunLog) -> Tracker:
    from evenpack.engine.reporting.trackers.wandb import WandbRun

    assert section.wandb is not None, "opened where it is named"
    return WandbRun(section.wandb, run)


_OPENERS: dict[str, Callable[[MetricsSection, RunLog], Tracker]] = {
    "csv": _open_csv,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
}
"""How each tracker is opened, by its key in the section."""
