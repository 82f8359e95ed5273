"""A run that was measured while it trained: the steady steps of its log, and its speed-up over a measured baseline.

A log has one of two formats; what is not a steady step is cut and reported:

metrics   evenpack's metrics.jsonl: `sequences` / `step_seconds` of each record, with the ranks and how long they waited
seq/s     lines of MLPerf's BERT logs: {..., 'seq/s': 381.2, 'global_steps': 75, ...}, with any prefix
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from evenpack.errors import ConfigError, DataError
from evenpack.files import explained, parse_json_object
from evenpack.shipped import names_run_file
from evenpack.studies.imbalance.step_cost import StepCost
from evenpack.studies.statistics.paired import Interval
from evenpack.studies.statistics.resampling import ROUNDS, interval, resampled

_SEQ_PER_S = re.compile(r"""['"]seq/s['"]\s*:\s*([^,}\s]+)""")
_GLOBAL_STEPS = re.compile(r"""['"]global_steps['"]\s*:\s*(\d+)""")
_GLOBAL_BATCH = re.compile(r'"key": "global_batch_size", "value": (\d+)')
_BATCH_OF_A_RANK = re.compile(r"--train_batch_size[= ](\d+)")
_MLLOG = ":::MLLOG"
MINIMUM_STEPS = 50
"""Least number of steps; fewer show too little of the tail that decides at many devices."""
LEAST_WARM_UP_STEPS = 10
"""Least number of warm-up steps to cut."""
DIP_SPREADS = 5.0
"""A step is a dip if its rate is this many spreads below the median. Stragglers are to be measured, so the bound is
far away: a normal law has a probability of 3e-7 there, a Gumbel none."""


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One step of a log."""

    rate: float
    """Sequences/s over all devices."""
    sequences: float | None = None
    """Sequences of the step; None if the log does not say."""
    ranks: int | None = None
    """Number of ranks that computed it; None if the log does not say."""
    wait_share: float | None = None
    """Fraction of the step for which the mean rank waits for the slowest one; None if the log does not say."""


@dataclass(frozen=True, kw_only=True)
class LoggedSteps:
    """All steps of a file."""

    format: str
    """Recognised format of the file, in words."""
    steps: tuple[LoggedStep, ...]
    warnings: tuple[str, ...] = ()


def read_steps(path: Path) -> LoggedSteps:
    """Reads all steps of a file in whatever format it has.

    Raises: DataError for a file that cannot be read, has no line with a rate, or a rate that is not finite or not above
    0 (named with its line).
    """
    with explained(path, DataError, missing=True):
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    for reader in (_read_metrics, _read_seq_per_s):
        found = reader(path, lines)
        if found.steps:
            return found
    raise DataError(
        f"{path}: no line with a rate. Expected records with 'sequences' and 'step_seconds' (metrics.jsonl), or lines "
        "with 'seq/s': NUMBER (MLPerf logs; written with log_freq above 0, means between evaluations are not enough)"
    )


def _read_metrics(path: Path, lines: list[str]) -> LoggedSteps:
    """Reads metrics.jsonl.

    Records without both fields, such as validation, are not steps; nor is an incomplete last line.
    """
    steps = []
    for number, line in enumerate(lines, start=1):
        if not line.startswith("{"):
            continue
        try:
            record = parse_json_object(line)
        except ValueError:
            continue
        if "sequences" in record and "step_seconds" in record:
            sequences = _number(record["sequences"], path, number, "sequences")
            seconds = _number(record["step_seconds"], path, number, "step_seconds")
            steps.append(
                LoggedStep(
                    rate=sequences / seconds,
                    sequences=sequences,
                    ranks=_ranks(record),
                    wait_share=_wait_share(record, seconds),
                )
            )
    return LoggedSteps(format="metrics.jsonl of evenpack: sequences / step_seconds", steps=tuple(steps))


def _ranks(record: dict[str, Any]) -> int | None:
    """Returns the number of ranks of a record; None in one of a version that did not write it."""
    ranks, size = record.get("ranks"), record.get("world_size")
    seconds = ranks.get("compute_seconds") if isinstance(ranks, dict) else None
    if isinstance(seconds, list):
        return len(seconds)
    return size if isinstance(size, int) else None


def _wait_share(record: dict[str, Any], step_seconds: float) -> float | None:
    mean, slowest = record.get("compute_seconds_mean"), record.get("compute_seconds_max")
    if not (isinstance(mean, int | float) and isinstance(slowest, int | float)):
        return None
    return max(0.0, slowest - mean) / step_seconds


def _read_seq_per_s(path: Path, lines: list[str]) -> LoggedSteps:
    """Reads MLPerf logs. Some systems write each rate twice, as a dict and as an MLLOG event: then the dicts count.

    Raises: DataError if a line is the mean of several steps.
    """
    found = [(number, line, match) for number, line in enumerate(lines, 1) if (match := _SEQ_PER_S.search(line))]
    plain = [hit for hit in found if _MLLOG not in hit[1]]
    kept = plain or found
    warnings = []
    if plain and len(plain) < len(found):
        warnings.append(f"{len(found) - len(plain)} {_MLLOG} lines with 'seq/s' repeat other lines and were left out")
    updates = [int(match[1]) for _, line, _ in kept if (match := _GLOBAL_STEPS.search(line))]
    every = statistics.median(np.diff(updates).tolist()) if len(updates) > 1 else 1
    if every > 1:
        raise DataError(
            f"{path}: a line is the mean of {every:.0f} steps (log_freq above 1). The mean hides how long single steps "
            "waited for their slowest device, so no maximum over more devices follows: log every step (log_freq 1)"
        )
    batch, of_rank = (_only_number(pattern, lines) for pattern in (_GLOBAL_BATCH, _BATCH_OF_A_RANK))
    ranks = batch // of_rank if batch and of_rank and batch % of_rank == 0 else None
    sequences = None if batch is None else float(batch)
    return LoggedSteps(
        format="lines with 'seq/s'",
        steps=tuple(
            LoggedStep(rate=_number(match[1], path, number, "'seq/s'"), sequences=sequences, ranks=ranks)
            for number, _, match in kept
        ),
        warnings=tuple(warnings),
    )


def _only_number(pattern: re.Pattern[str], lines: list[str]) -> int | None:
    """Returns the number that a log writes in this place; None if it writes none, or several."""
    found = {int(number) for line in lines for number in pattern.findall(line)}
    return found.pop() if len(found) == 1 else None


def _number(value: object, path: Path, number: int, name: str) -> float:
    try:
        parsed = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        parsed = math.nan
    if not (math.isfinite(parsed) and parsed > 0):
        raise DataError(f"{path}, line {number}: {name} must be a finite number above 0, got {value!r}")
    return parsed


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLog:
    """The steady steps of a log."""

    path: Path
    format: str
    """Recognised format of the file, in words."""
    steps_read: int
    rates: Float64[np.ndarray, " steps"]
    """Sequences/s over all devices, in the order of the file."""
    every_rate: Float64[np.ndarray, " steps_read"]
    """The same of all steps of the last number of ranks, nothing cut."""
    cuts: Mapping[str, int]
    """Steps that are left out, by reason; with `rates` they are all steps."""
    warnings: tuple[str, ...]
    devices: int | None
    """Number of ranks according to metrics.jsonl; None if the log does not contain it."""
    sequences_per_step: float | None
    """Mean over these steps; None if the log does not contain it."""
    wait_share: float | None
    """Fraction of these steps for which the mean rank waits for the slowest; None if the log does not contain it."""

    @property
    def sequences_per_second(self) -> float:
        """Returns the rate of a long run: as many sequences in each step, over the mean of the steps' seconds."""
        return float(1.0 / np.mean(1.0 / self.rates))


def read_step_log(path: Path) -> StepLog:
    """Reads the steady steps of a log.

    Of a run that went on with another number of ranks, only the
    steps of the last number are kept.
    Raises: DataError, as `read_steps`, and for fewer than 50 steady steps.
    """
    found = read_steps(path)
    devices = next((step.ranks for step in reversed(found.steps) if step.ranks is not None), None)
    same = [step for step in found.steps if step.ranks in (None, devices)]
    kept, cuts, warnings = _steady(same)
    cuts[f"other ranks: the last steps are of {devices}"] = len(found.steps) - len(same)
    if len(kept) < MINIMUM_STEPS:
        raise DataError(
            f"{path}: {len(kept)} of {len(found.steps)} steps are left without warm-up and dips, at least "
            f"{MINIMUM_STEPS} are needed; give the log of a longer run, with every step in it"
        )
    return StepLog(
        path=path,
        format=found.format,
        steps_read=len(found.steps),
        rates=np.array([step.rate for step in kept]),
        every_rate=np.array([step.rate for step in same]),
        cuts={reason: steps for reason, steps in cuts.items() if steps},
        warnings=(*found.warnings, *warnings),
        devices=devices,
        sequences_per_step=_mean([step.sequences for step in kept]),
        wait_share=_mean([step.wait_share for step in kept]),
    )


def steady_start(rates: Float64[np.ndarray, " steps"]) -> int:
    """Returns the number of warm-up steps: until the rate first comes within a spread of its median, at least 10."""
    median, spread = median_and_spread(rates)
    reached = np.flatnonzero(rates >= median - spread)
    return min(len(rates), max(LEAST_WARM_UP_STEPS, int(reached[0])))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def median_and_spread(rates: Float64[np.ndarray, " steps"]) -> tuple[float, float]:
    """Returns median and spread.

    The spread is the median absolute deviation, scaled to a normal law's standard deviation.
    """
    median = float(np.median(rates))
    return median, 1.4826 * float(np.median(np.abs(rates - median)))


def _steady(steps: Sequence[LoggedStep]) -> tuple[list[LoggedStep], dict[str, int], list[str]]:
    """Returns the steps without warm-up and dips, how many were cut for which reason, and warnings."""
    rates = np.array([step.rate for step in steps])
    median, spread = median_and_spread(rates)
    start = steady_start(rates)
    floor = median - DIP_SPREADS * spread
    is_warm_up = np.arange(len(rates)) < start
    is_dip = (rates < floor) & ~is_warm_up
    warm_up = (
        "warm-up: the rate had not yet come within a spread of its median" if start > LEAST_WARM_UP_STEPS else "warm-up"
    )
    dip = f"dip: below {floor:.6g} sequences/s, {DIP_SPREADS:.0f} spreads of {spread:.4g} under the median {median:.6g}"
    cuts = {warm_up: int(is_warm_up.sum()), dip: int(is_dip.sum())}
    warnings = []
    if is_dip.sum() > 0.05 * len(rates):
        warnings.append(
            f"{is_dip.sum()} of {len(rates)} steps were cut as dips: check whether training itself is unsteady"
        )
    return [step for step, left_out in zip(steps, is_warm_up | is_dip, strict=True) if not left_out], cuts, warnings


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
_SAME = 0.01
"""The same for several runs of one system."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRun:
    """A run that was measured while it trained."""

    label: str
    """Name of the run, or of the file where no run.json lies beside it."""
    log: StepLog
    record: RunRecord | None
    """The contents of run.json; None for another kind of log."""
    parts: tuple[StepLog, ...] = ()
    """The logs of several runs of one system, which `log` pools; empty for a single run."""

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


def read_logged_run(path: Path) -> LoggedRun:
    """Reads a log, and the run.json beside it if the log is a run's metrics.jsonl.

    Raises: DataError, as `read_step_log`, and for a broken run.json.
    """
    record = read_run_record(path.parent) if path.name == METRICS else None
    return LoggedRun(
        label=path.name if record is None else str(record.config["run"]["name"]),
        log=read_step_log(path),
        record=record,
    )


def pooled(runs: Sequence[LoggedRun]) -> LoggedRun:
    """Returns several runs of one system as one. Raises: ConfigError for runs of unlike batch or number of devices."""
    first, *others = sorted(runs, key=lambda run: run.ranks is None)  # the first says how many devices, if one does
    if not others:
        return first
    for what, values in (
        ("devices", [run.ranks for run in runs]),
        ("sequences per step", [run.log.sequences_per_step for run in runs]),
    ):
        known = [(value, run.log.path) for value, run in zip(values, runs, strict=True) if value is not None]
        for two, other in known[1:]:
            one, path = known[0]
            if abs(one - two) > _SAME * one:
                raise ConfigError(
                    f"--log {other} is of a run of {two:,.4g} {what}, and {path} of one of "
                    f"{one:,.4g}: several logs are of runs of one system with one batch; study the others by themselves"
                )
    logs = [run.log for run in runs]
    if len({log.path.resolve() for log in logs}) < len(logs):
        raise ConfigError(f"--log {first.log.path} and others: a file is named twice; name each run once")
    log = replace(
        first.log,
        steps_read=sum(one.steps_read for one in logs),
        rates=np.concatenate([one.rates for one in logs]),
        every_rate=np.concatenate([one.every_rate for one in logs]),
        cuts={},
        warnings=tuple(dict.fromkeys(f"{one.path.name}: {warning}" for one in logs for warning in one.warnings)),
    )
    return LoggedRun(label=f"{first.label} and {len(others)} more", log=log, record=first.record, parts=tuple(logs))


def log_of_run(named: Path) -> Path:
    """Returns the log of a run that is named by its run file or its output directory, or the log that is named.

    Raises: ConfigError if there is none.
    """
    if named.is_file() and not names_run_file(named):
        return named
    path = (load_run_file(named, RunConfig).run.output_dir if names_run_file(named) else named) / METRICS
    if not path.is_file():
        raise ConfigError(
            f"--baseline-run {named}: there is no {path}; name a run that has trained, by its run file or output_dir"
        )
    return path


def is_same_device(one: str, other: str) -> bool:
    """Returns whether two names are of one kind of device: equal, or with the same model of GPU in them."""
    return one == other or bool(_gpu_models(one) & _gpu_models(other))


def _gpu_models(name: str) -> set[str]:
    """Returns the words such as H100, but neither memory (HBM3, 80GB) nor form (SXM4)."""
    return set() if name.startswith("CPU") else set(re.findall(r"\b[A-Z]{1,3}\d{2,4}\w*", name))


def require_comparable(run: LoggedRun, baseline: LoggedRun, *, ranks: int) -> list[str]:
    """Returns warnings for what else differs besides the layout, of a run on so many ranks.

    Raises: ConfigError for other ranks, devices, data or models, because a ratio of rates would say nothing then.
    """
    if baseline.ranks not in (None, ranks):
        taken = " (--log-devices, 8 by default: its log does not say)" if run.ranks is None else ""
        raise ConfigError(
            f"{run.label} ran on {ranks} ranks{taken} and its baseline {baseline.label} on {baseline.ranks}: a "
            f"speed-up is one on as many devices; train the baseline on {ranks} ranks"
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


def timing_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
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
        found = differences(record.data.model_dump(mode="json"), other.data.model_dump(mode="json"))
        raise ConfigError(
            f"the baseline {other_label} trained on other data than {label} ({_in_words(found)}), so "
            "their sequences/s do not compare: train it with the same data section, data.prepared_dir included"
        )
    models = _differences_in(("model.",), record.config, other.config)
    if models:
        raise ConfigError(
            f"the baseline {other_label} has another model than {label} ({models}): train it with the same one"
        )


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
    return _in_words({key: pair for key, pair in found.items() if key.startswith(keys)})


def _in_words(found: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key} {as_text(ours)} and {as_text(theirs)}" for key, (ours, theirs) in found.items())


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The steady steps of one run."""

    label: str
    path: Path
    format: str
    layout: str | None
    """Layout, items and assignment in words; None if they are not recorded."""
    ranks: int
    device: str | None
    commit: str | None
    steps_read: int
    steps_used: int
    cuts: Mapping[str, int]
    """Steps that are left out, by reason."""
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
    """Sequences/s of the baseline; None if there is none, or it is not padded."""
    speed_up: float | None
    """Speed-up in sequences/s over the baseline; None without one."""
    speed_up_interval: Interval | None
    """95 % interval of that: of both runs' steps."""
    warnings: tuple[str, ...]

    @property
    def is_over_padding(self) -> bool:
        """Whether the speed-up is one over padding, like those that are simulated."""
        return self.padded_baseline is not None


def measure(run: LoggedRun, *, ranks: int, baseline: LoggedRun | None, cost: StepCost) -> MeasuredComparison:
    """Compares the steps of a run with those of a baseline. Raises: ConfigError, as `require_comparable`."""
    warnings = [*run.log.warnings, *_device_warnings(run, cost)]
    over = speed_up = reach = None
    if baseline is not None:
        warnings += require_comparable(run, baseline, ranks=ranks)
        warnings += [f"{baseline.label}: {one}" for one in baseline.log.warnings]
        over = baseline.log.sequences_per_second if _is_padding(baseline, warnings) else None
        speed_up = run.log.sequences_per_second / baseline.log.sequences_per_second
        reach = interval(_bootstrapped(run, seed=0) / _bootstrapped(baseline, seed=1))
    return MeasuredComparison(
        run=_measured_steps(run, ranks),
        baseline=None if baseline is None else _measured_steps(baseline, ranks),
        padded_baseline=over,
        speed_up=speed_up,
        speed_up_interval=reach,
        warnings=tuple(warnings),
    )


def _is_padding(baseline: LoggedRun, warnings: list[str]) -> bool:
    if baseline.record is None:
        warnings.append(
            f"the layout of the baseline {baseline.label} is not recorded: its steps are TAKEN as padded, and "
            "speed-ups over padding are over them"
        )
    elif not baseline.is_padding:
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


def _bootstrapped(run: LoggedRun, *, seed: int) -> Float64[np.ndarray, " rounds"]:
    """Returns rates of long runs of resampled steps, in blocks where neighbours are correlated; of runs, if several."""
    if run.parts:
        steps, totals = (np.array([part(1.0 / one.rates) for one in run.parts]) for part in (len, np.sum))
        drawn = np.random.default_rng([seed, 4]).integers(len(steps), size=(ROUNDS, len(steps)))
        return steps[drawn].sum(axis=1) / totals[drawn].sum(axis=1)
    seconds = resampled(1.0 / run.log.rates, rounds=ROUNDS, seed=seed)
    return 1.0 / seconds.mean(axis=1)
