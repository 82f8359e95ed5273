"""Rates and waiting of a run that was measured while it trained, and its speed-up over a measured baseline."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.config import load_run_file, validate, with_defaults
from evenpack.differences import as_text, differences
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.run_record import RUN_RECORD, RunRecord, read_run_record
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.cluster import Scheme
from evenpack.studies.imbalance.logs import Cut, StepLog, read_step_log
from evenpack.studies.imbalance.step_cost import StepCost
from evenpack.studies.imbalance.step_times import StepHistogram, step_histogram
from evenpack.studies.statistics.fits import ROUNDS, interval, resampled
from evenpack.studies.statistics.paired import Interval

_ASSIGNED = {
    "arrival": "by arrival",
    "sorted": "sorted",
    "sorted_serpentine": "sorted in a serpentine",
    "cost_balanced": "by cost",
    "max_tokens": "by max tokens",
}

_PADS_WHOLE_ROWS = ("arrival", "cost_balanced")
"""Policies of the padded layout that leave a row as wide as the longest possible sequence."""
_FORM = (
    "training.layout",
    "training.batching",
    "training.assignment",
    "training.packs_per_step",
    "training.packs_per_micro_batch",
    "training.sequences_per_step",
    "training.sequences_per_micro_batch",
)
"""Keys that form the step, in which a baseline is expected to differ."""
_SPEED = ("attention.", "deepspeed.", "masking.", "optimizer.kind", "training.precision", "training.loader_workers")
"""Other keys that decide how long a step takes, on the same model and data."""
_ALIKE = 0.1
"""Relative difference of sequences per step up to which steps are alike."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRun:
    """A run that was measured while it trained."""

    label: str
    """Name of the run, or of the file where no run.json lies beside it."""
    log: StepLog
    record: RunRecord | None
    """The contents of run.json; None for another kind of log."""

    @property
    def ranks(self) -> int | None:
        """Returns the ranks of the logged steps; None if they are not recorded."""
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


def require_comparable(run: LoggedRun, baseline: LoggedRun) -> list[str]:
    """Returns warnings for what else differs besides the layout.

    Raises: ConfigError for other ranks, devices, data or models, because a ratio of rates would say nothing then.
    """
    if run.ranks is not None and baseline.ranks is not None and run.ranks != baseline.ranks:
        raise ConfigError(
            f"{run.label} ran on {run.ranks} ranks and its baseline {baseline.label} on {baseline.ranks}: a speed-up "
            f"is one on as many devices; train the baseline on {run.ranks} ranks"
        )
    warnings = []
    unknown = [one.label for one in (run, baseline) if one.record is None]
    if unknown:
        warnings.append(
            f"there is no run.json beside the log of {' and '.join(unknown)}: whether data, model and device of the "
            "baseline are the same is not recorded"
        )
    if run.record is not None and baseline.record is not None:
        _require_same_work(run.label, run.record, baseline.label, baseline.record)
        warnings += _other_settings(run.record, baseline.record)
    return [*warnings, *_other_steps(run, baseline)]


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns in words what decides a step's time and differs between two settled run files; empty if nothing does."""
    return _differences_in(("model.", *_FORM, *_SPEED), one, other)


def _require_same_work(label: str, record: RunRecord, other_label: str, other: RunRecord) -> None:
    ours, theirs = record.starts[-1].device, other.starts[-1].device
    if ours != theirs:
        raise ConfigError(
            f"{label} was measured on {ours} and its baseline {other_label} on {theirs}: train both on one kind of "
            "device"
        )
    if record.data.fingerprint != other.data.fingerprint:
        raise ConfigError(
            f"the baseline {other_label} trained on other data than {label} ({_data_difference(record, other)}), so "
            "their sequences/s do not compare: train it with the same data section, data.prepared_dir included"
        )
    models = _differences_in(("model.",), record.config, other.config)
    if models:
        raise ConfigError(
            f"the baseline {other_label} has another model than {label} ({models}): train it with the same one"
        )


def _data_difference(record: RunRecord, other: RunRecord) -> str:
    for name in ("sources", "tokenizer", "pack_length"):
        ours, theirs = getattr(record.data, name), getattr(other.data, name)
        if ours != theirs and name == "tokenizer":
            return "another tokenizer"
        if ours != theirs:
            return f"{name.replace('_', ' ')} {_listed(theirs)}, not {_listed(ours)}"
    return "another recipe, packing or mixture, or other documents"


def _listed(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _other_settings(record: RunRecord, other: RunRecord) -> list[str]:
    warnings = []
    settings = _differences_in(_SPEED, record.config, other.config)
    if settings:
        warnings.append(f"run and baseline differ in more than their layout: {settings}")
    ours, theirs = record.starts[-1].commit, other.starts[-1].commit
    if ours != theirs:
        warnings.append(
            f"run and baseline were trained by other commits: {ours or 'unknown'} and {theirs or 'unknown'}"
        )
    return warnings


def _other_steps(run: LoggedRun, baseline: LoggedRun) -> list[str]:
    ours, theirs = run.log.sequences_per_step, baseline.log.sequences_per_step
    if ours is None or theirs is None or abs(ours - theirs) <= _ALIKE * ours:
        return []
    return [
        f"a step of {run.label} holds {ours:,.4g} sequences on average and one of its baseline {theirs:,.4g}: the time "
        "of optimizer and all-reduce is spread over other amounts of work"
    ]


def _differences_in(keys: tuple[str, ...], one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns in words the settings that differ, of those that begin with one of `keys`; empty if none does.

    A key that is newer than a recorded run file has its default there.
    """
    found = differences(with_defaults(one, RunConfig), with_defaults(other, RunConfig))
    return "; ".join(
        f"{key} {as_text(ours)} and {as_text(theirs)}" for key, (ours, theirs) in found.items() if key.startswith(keys)
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The steady steps of one run."""

    label: str
    path: Path
    format: str
    layout: str | None
    """Layout, items and assignment in words; None if they are not recorded."""
    scheme: Scheme | None
    """The simulated scheme of the same kind, if there is one."""
    ranks: int
    device: str | None
    commit: str | None
    steps_read: int
    steps_used: int
    cuts: tuple[Cut, ...]
    sequences_per_second: float
    """Over all ranks, of a long run."""
    interval: Interval
    """95 % interval of that, over steps."""
    wait_share: float | None
    """Fraction of the steps for which the mean rank waits for the slowest one; None if the log does not contain it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredComparison:
    """A measured run, and the baseline that it is compared with."""

    run: MeasuredSteps
    baseline: MeasuredSteps | None
    padded_baseline: float | None
    """Sequences/s of the baseline, or those that were given for it; None if there is no baseline of padding."""
    speed_up: float | None
    """Speed-up in sequences/s over the baseline; None without one."""
    speed_up_interval: Interval | None
    """95 % interval of that: of both runs' steps, or of the run's alone where a number was given for the baseline."""
    step_histogram: StepHistogram | None
    """Speed-ups over padding of single steps."""
    warnings: tuple[str, ...]

    @property
    def is_over_padding(self) -> bool:
        """Whether the speed-up is one over padding, like those that are simulated."""
        return self.padded_baseline is not None


def measure(
    run: LoggedRun, *, ranks: int, baseline: LoggedRun | None, padded_baseline: float | None, cost: StepCost
) -> MeasuredComparison:
    """Compares the steps of a run with those of a baseline, or with a number of sequences/s for padding.

    Raises: ConfigError, as `require_comparable`.
    """
    warnings = [*run.log.warnings, *_device_warnings(run, cost)]
    over = padded_baseline
    if baseline is not None:
        warnings += [*require_comparable(run, baseline), *(f"{baseline.label}: {one}" for one in baseline.log.warnings)]
        over = baseline.log.sequences_per_second if _is_padding(baseline, warnings) else None
    speed_up, speed_ups = _speed_up(run, baseline, padded_baseline)
    return MeasuredComparison(
        run=_measured_steps(run, ranks),
        baseline=None if baseline is None else _measured_steps(baseline, ranks),
        padded_baseline=over,
        speed_up=speed_up,
        speed_up_interval=None if speed_ups is None else interval(speed_ups),
        step_histogram=None
        if over is None
        else step_histogram(run.log.rates / over, speed_up=run.log.sequences_per_second / over, devices=ranks),
        warnings=tuple(warnings),
    )


def _is_padding(baseline: LoggedRun, warnings: list[str]) -> bool:
    if baseline.record is not None and not baseline.is_padding:
        warnings.append(
            f"the baseline is {baseline.layout}, and simulated speed-ups are over padding by arrival: the measured one "
            "is in the table alone"
        )
        return False
    return True


def _device_warnings(run: LoggedRun, cost: StepCost) -> list[str]:
    if run.device is None or is_same_device(run.device, cost.device):
        return []
    simulated = f"an ESTIMATE for {cost.device}" if cost.estimated else f"from a cost model measured on {cost.device}"
    return [
        f"{run.label} was measured on {run.device}, and the simulated lines are {simulated}: neither checks the other. "
        "Measure a cost model there (study throughput --cost-model FILE) and give it as --cost-model"
    ]


def _measured_steps(run: LoggedRun, ranks: int) -> MeasuredSteps:
    log = run.log
    return MeasuredSteps(
        label=run.label,
        path=log.path,
        format=log.format,
        layout=run.layout,
        scheme=run.scheme,
        ranks=ranks,
        device=run.device,
        commit=None if run.record is None else run.record.starts[-1].commit,
        steps_read=log.steps_read,
        steps_used=len(log.rates),
        cuts=log.cuts,
        sequences_per_second=log.sequences_per_second,
        interval=interval(_bootstrapped(run, seed=0)),
        wait_share=log.wait_share,
    )


def _speed_up(
    run: LoggedRun, baseline: LoggedRun | None, padded_baseline: float | None
) -> tuple[float | None, Float64[np.ndarray, " rounds"] | None]:
    """Returns the ratio of the long runs' rates, and the same by each round of the bootstrap."""
    rate, rates = run.log.sequences_per_second, _bootstrapped(run, seed=0)
    if baseline is not None:
        return rate / baseline.log.sequences_per_second, rates / _bootstrapped(baseline, seed=1)
    if padded_baseline is not None:
        return rate / padded_baseline, rates / padded_baseline
    return None, None


def _bootstrapped(run: LoggedRun, *, seed: int) -> Float64[np.ndarray, " rounds"]:
    """Returns rates of long runs of resampled steps, in blocks where neighbours are correlated."""
    seconds = resampled(1.0 / run.log.rates, rounds=ROUNDS, seed=seed)
    rates: Float64[np.ndarray, " rounds"] = 1.0 / seconds.mean(axis=1)
    return rates
