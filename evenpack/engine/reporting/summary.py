"""Computes summary.json, the results of a run, from its metrics.jsonl."""

import statistics
from collections import Counter
from typing import Any

import torch

from evenpack.engine.build import Start
from evenpack.engine.reporting.metrics import seconds_of, trained_steps
from evenpack.losses import losses_logged_apart

_OF_SKIPPED = ("packs", "sequences", "tokens")


def run_summary(
    run: Start, records: list[dict[str, Any]], *, state: str, step: int, reached_accuracy: float | None
) -> dict[str, Any]:
    """Returns a summary of the whole run, earlier starts included.

    Rates leave evaluation and saving out, and are medians over the steps that as many ranks computed as the last step.

    `reached_accuracy`: the accuracy that reached the run's target; None if the target was not reached.
    """
    tokens = sum(record["tokens"] for record in records)
    slots = sum(record["slots"] for record in records)
    skipped = [record["skipped"] for record in records if "skipped" in record]
    trained = trained_steps(records)
    evaluated = [record for record in records if "validation" in record]
    alike = computed_alike(trained)
    return {
        "name": run.config.run.name,
        "state": state,
        "step": step,
        "steps": run.config.training.planned_steps,
        "first_loss": trained[0]["loss"] if trained else None,
        "last_loss": trained[-1]["loss"] if trained else None,
        **_losses_apart(trained),
        "validation_step": evaluated[-1]["step"] if evaluated else None,
        "validation": evaluated[-1]["validation"] if evaluated else None,
        "source_tokens": _added(trained, "source_tokens"),
        "source_epochs": run.resolved.epochs(step),
        "tokens": tokens,
        "sequences": sum(record["sequences"] for record in records),
        "skipped": {"steps": len(skipped), "not_finite": sum("not_finite" in step for step in skipped)}
        | {name: sum(step[name] for step in skipped) for name in _OF_SKIPPED},
        "padding_share": 1.0 - tokens / slots if slots else 0.0,
        "tokens_per_second": _median(alike, "tokens_per_second"),
        "step_seconds_median": _median(alike, "step_seconds"),
        "parameters": run.resolved.parameters,
        "ranks": alike[-1]["world_size"] if alike else run.world.size,
        "device": torch.cuda.get_device_name(run.world.device) if run.world.device.type == "cuda" else "cpu",
        "fingerprint": run.resolved.fingerprint(step),
        "target": _target(run, records, reached_accuracy),
    }


def computed_alike(trained: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the steps that as many ranks computed as the last one."""
    return [record for record in trained if record["world_size"] == trained[-1]["world_size"]]


def _losses_apart(trained: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns the losses whose sum is `loss`, at the first and last step; empty for a model with one loss."""
    losses = losses_logged_apart(trained[0]) if trained else ()
    ends = {"first": trained[0], "last": trained[-1]} if trained else {}
    return {f"{end}_{loss.metric}": record.get(loss.metric) for end, record in ends.items() for loss in losses}


def _added(records: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Returns the sum over records of a value that each source has, of which skipped steps have none."""
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record.get(name, {}))
    return dict(totals)


def _median(records: list[dict[str, Any]], name: str) -> float:
    """Returns the median of a value; 0 without records, that is if all steps so far were skipped."""
    return statistics.median(record[name] for record in records) if records else 0.0


def _target(run: Start, records: list[dict[str, Any]], reached_accuracy: float | None) -> dict[str, Any] | None:
    """Returns whether and when `training.target_accuracy` was reached; None without one. Seconds leave saving out."""
    target = run.config.training.target_accuracy
    if target is None:
        return None
    is_reached = reached_accuracy is not None
    return {
        "accuracy": target,
        "reached": is_reached,
        "reached_accuracy": reached_accuracy,
        "samples": records[-1].get("samples") if is_reached else None,
        "seconds": seconds_of(records) if is_reached else None,
    }
