"""Results as tables."""

from typing import Any

from rich.table import Table

from evenpack import console
from evenpack.finetuning.results import SeedResult, Summary

_NAMES = {"matthews_correlation": "Matthews corr.", "exact_match": "exact match", "f1": "F1"}
"""Names of metrics for people, where they differ from those in JSON."""


def result_tables(summary: Summary) -> list[Table]:
    """Returns a table for each evaluation file, and one of speed and batch."""
    names = summary.seeds[0].metrics
    return [*(_quality(summary, name) for name in names), _batch(summary)]


def _quality(summary: Summary, name: str) -> Table:
    rows: list[dict[str, Any]] = [
        {"": f"seed {seed.seed}", **_metrics(seed.metrics[name]), "95 %": _interval(summary, seed, name)}
        for seed in summary.seeds
    ]
    rows.append({"": "median", **_metrics(summary.medians[name]), "95 %": f"seed {summary.median_seed}'s"})
    if name in summary.guesses:
        rows.append({"": "most frequent label", **_metrics(summary.guesses[name]), "95 %": None})
    title = f"{summary.task}, {name} (95 % of {_shown(summary.headline)}: bootstrap over its examples)"
    return console.table(rows, title=title)


def _batch(summary: Summary) -> Table:
    rows = [
        {
            "": f"seed {seed.seed}",
            "steps": seed.steps,
            "sequences per step": f"{seed.sequences_per_step:.1f}",
            "least": seed.least_sequences_per_step,
            "most": seed.most_sequences_per_step,
            "packs per step": f"{seed.packs_per_step:.1f}",
            "sequences per pack": f"{seed.sequences_per_pack:.2f}",
            "padding": console.percent(seed.padding_share),
            "last loss": seed.losses_by_epoch[-1],
            "sequences/s": f"{seed.sequences_per_second:,.0f}",
        }
        for seed in summary.seeds
    ]
    return console.table(rows, title=f"The step ({summary.settings['training.layout']})")


def _metrics(values: dict[str, float]) -> dict[str, str]:
    return {_shown(metric): f"{value:.4f}" for metric, value in values.items()}


def _shown(metric: str) -> str:
    return _NAMES.get(metric, metric)


def _interval(summary: Summary, seed: SeedResult, name: str) -> str:
    low, high = seed.intervals[name][summary.headline]
    return f"{low:.4f} to {high:.4f}"
