"""The steps that a run has logged, with what its run.json says of it."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from evenpack.config import load_run_file, validate
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.run_record import RUN_RECORD, RunRecord, read_run_record
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.measured.step_log import StepLog, read_step_log
from evenpack.studies.imbalance.simulated.cluster import Scheme

_ASSIGNED = {
    "arrival": "by arrival",
    "sorted": "sorted",
    "sorted_serpentine": "sorted in a serpentine",
    "cost_balanced": "by cost",
    "max_tokens": "by max tokens",
}

_PADS_WHOLE_ROWS = ("arrival", "cost_balanced")
"""Policies of the padded layout that leave a row as wide as the longest possible sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRun:
    """A run that was measured while it trained."""

    label: str
    """Name of the run, or of the file where no run.json lies beside it."""
    log: StepLog
    record: RunRecord | None
    """What run.json says; None for a log of something else, or of a version that wrote none."""

    @property
    def ranks(self) -> int | None:
        """Returns the ranks of the logged steps; None if nothing says."""
        return self.log.devices or (None if self.record is None else self.record.starts[-1].ranks)

    @property
    def device(self) -> str | None:
        """Returns the device that each rank had, at the last start; None if it is not recorded."""
        return None if self.record is None else self.record.starts[-1].device

    @cached_property
    def config(self) -> RunConfig | None:
        """Returns the settings that the run trained with. Raises: ConfigError if this version cannot read them."""
        if self.record is None:
            return None
        return validate(dict(self.record.config), RunConfig, origin=str(self.log.path.with_name(RUN_RECORD)))

    @property
    def scheme(self) -> Scheme | None:
        """Returns the simulated scheme that forms steps as this run does, if there is one."""
        return None if self.config is None else scheme_of(self.config)

    @property
    def layout(self) -> str | None:
        """Returns layout, items and assignment in words; None if they are not recorded."""
        if self.config is None:
            return None
        training = self.config.training
        rows = "packs" if training.layout == "packed" else f"{training.layout} {training.batching}"
        return f"{rows}, assigned {_ASSIGNED[training.policy]}"

    @property
    def is_padding(self) -> bool:
        """Whether this is training without packing: one sequence in each row of full width."""
        training = None if self.config is None else self.config.training
        return training is not None and training.layout == "padded" and training.policy in _PADS_WHOLE_ROWS


def read_logged_run(path: Path, *, column: str | None = None, warm_up_steps: int | None = None) -> LoggedRun:
    """Reads a log, and the run.json beside it if the log is a run's metrics.jsonl.

    Raises: DataError, as `read_step_log`, and for a broken run.json.
    """
    record = read_run_record(path.parent) if path.name == METRICS else None
    return LoggedRun(
        label=path.name if record is None else str(record.config["run"]["name"]),
        log=read_step_log(path, column=column, warm_up_steps=warm_up_steps),
        record=record,
    )


def log_of_run(named: Path) -> Path:
    """Returns the log of a run that is named by its run file or its output directory.

    Raises: ConfigError if there is none.
    """
    is_file = named.suffix in (".yaml", ".yml")
    path = (load_run_file(named, RunConfig).run.output_dir if is_file else named) / METRICS
    if not path.is_file():
        raise ConfigError(
            f"--baseline-run {named}: there is no {path}; name a run that has trained, by its run file or output_dir"
        )
    return path


def scheme_of(config: RunConfig) -> Scheme | None:
    """Returns the simulated scheme that forms steps as the run does; None for packs in another layout than packed."""
    training = config.training
    if (training.batching == "packs") != (training.layout == "packed"):
        return None
    return Scheme(layout=training.layout, policy=training.policy)


def is_same_device(one: str, other: str) -> bool:
    """Returns whether two names are of one kind of device: equal, or with the same model of GPU in them."""
    return one == other or bool(_gpu_models(one) & _gpu_models(other))


def _gpu_models(name: str) -> set[str]:
    """Returns the words such as H100, but neither memory (HBM3, 80GB) nor form (SXM4)."""
    return set() if name.startswith("CPU") else set(re.findall(r"\b[A-Z]{1,3}\d{2,4}\w*", name))
