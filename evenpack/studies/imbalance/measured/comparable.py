"""Whether the rates of two runs may be divided by each other."""

from collections.abc import Mapping
from typing import Any

from evenpack.engine.reporting.run_record import RunRecord
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.measured.logged_run import LoggedRun
from evenpack.studies.report.comparison import differing

_FORM = (
    "training.layout",
    "training.batching",
    "training.assignment",
    "training.packs_per_step",
    "training.packs_per_micro_batch",
    "training.sequences_per_step",
    "training.sequences_per_micro_batch",
)
"""How steps are formed: what a baseline is there to differ in."""

_SPEED = ("attention.", "deepspeed.", "masking.", "optimizer.kind", "training.precision", "training.loader_workers")
"""What else decides how long a step takes, on the same model and data."""

_ALIKE = 0.1
"""Relative difference of sequences per step up to which steps are alike."""


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
    return _shown(differing(one, other, ("model.", *_FORM, *_SPEED)))


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
    models = differing(record.config, other.config, ("model.",))
    if models:
        raise ConfigError(
            f"the baseline {other_label} has another model than {label} ({_shown(models)}): train it with the same one"
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
    settings = differing(record.config, other.config, _SPEED)
    if settings:
        warnings.append(f"run and baseline differ in more than their layout: {_shown(settings)}")
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


def _shown(differences: Mapping[str, tuple[str, str]]) -> str:
    return "; ".join(f"{key} {ours} and {theirs}" for key, (ours, theirs) in differences.items())
