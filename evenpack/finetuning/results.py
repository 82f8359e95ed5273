"""The results of fine-tuning: a file for each seed, from which an interrupted command continues, and one for all.

OUTPUT_DIR/settings.json    settings of the training
OUTPUT_DIR/seed_0.json      written when seed 0 is done
OUTPUT_DIR/results.json     written when all seeds are done
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from evenpack import console
from evenpack.config import Section
from evenpack.data.checksums import with_checksum, without_checksum
from evenpack.differences import differences
from evenpack.errors import ConfigError, DataError
from evenpack.files import read_kept, write_json

_SETTINGS = "settings.json"
_RESULTS = "results.json"


class SeedResult(Section):
    """The result of one training."""

    seed: int
    metrics: dict[str, dict[str, float]]
    """Metrics after the last epoch: by evaluation file, by metric."""
    intervals: dict[str, dict[str, tuple[float, float]]]
    """95 % intervals by bootstrap over the file's examples."""
    metrics_by_epoch: list[dict[str, dict[str, float]]]
    losses_by_epoch: list[float]
    """Mean over the sequences of each epoch."""
    steps: int
    sequences_per_step: float
    """Mean sequences per step."""
    least_sequences_per_step: int
    most_sequences_per_step: int
    packs_per_step: float
    """Mean packs per step; a sequence that is not packed is a pack of its own."""
    sequences_per_pack: float
    padding_share: float
    """Slots without a token, as a fraction of all slots computed in training."""
    training_seconds: float
    """Seconds of training without evaluation."""
    sequences_per_second: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of all seeds of a run."""

    task: str
    settings: dict[str, Any]
    headline: str
    """The metric by which seeds are ranked."""
    median_seed: int
    """The median seed by the headline metric of the first evaluation file; of two the lower one."""
    medians: dict[str, dict[str, float]]
    """Median of each metric over the seeds."""
    guesses: dict[str, dict[str, float]]
    """Metrics of the most frequent label of the training file; empty for spans."""
    seeds: list[SeedResult]


class ResultFolder:
    """The results in an output directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self, settings: Mapping[str, Any]) -> None:
        """Makes the directory, or opens one of the same settings.

        Raises: ConfigError that names the difference if it holds results of other settings.
        """
        path = self.directory / _SETTINGS
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(path, dict(settings))
            return
        found = read_kept(path)
        if found is None:
            raise ConfigError(f"{path} is not readable JSON: remove the folder or give another run.output_dir")
        wrong = [
            f"{key}: {there!r} there, {here!r} here" for key, (there, here) in differences(found, settings).items()
        ]
        if wrong:
            raise ConfigError(
                f"{self.directory} holds results of other settings: {'; '.join(wrong)}. Give another run.output_dir "
                "or remove that folder"
            )

    def read(self, seed: int) -> SeedResult | None:
        """Reads a seed's result; None if it has not been trained to its end.

        Raises: DataError for a file of another form.
        """
        path = self._path(seed)
        values = read_kept(path)
        if values is None:
            return None
        try:
            return SeedResult.model_validate(without_checksum(values))
        except ValueError as error:
            raise DataError(
                f"{path} is damaged, or no result of this version: remove it, and the seed is trained again"
            ) from error

    def seeds_done(self, seeds: Sequence[int]) -> int:
        """Returns how many seeds have been trained to their end."""
        return sum(self._path(seed).exists() for seed in seeds)

    def write(self, result: SeedResult) -> None:
        """Marks the seed as done."""
        write_json(self._path(result.seed), with_checksum(result.model_dump(mode="json")))

    def write_summary(self, summary: Summary) -> None:
        """Writes the results of the command."""
        values = asdict(summary) | {"seeds": [seed.model_dump(mode="json") for seed in summary.seeds]}
        write_json(self.directory / _RESULTS, values)

    def read_summary(self) -> Summary:
        """Reads the results of the command. Raises: DataError if they are missing, or of another form."""
        path = self.directory / _RESULTS
        values = read_kept(path)
        try:
            if values is None:
                raise ValueError("there is no such object")
            return Summary(**values | {"seeds": [SeedResult.model_validate(seed) for seed in values["seeds"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} holds no results of this version: remove {self.directory} to fine-tune again"
            ) from error

    def _path(self, seed: int) -> Path:
        return self.directory / f"seed_{seed}.json"


def summarise(
    task: str,
    headline: str,
    seeds: Sequence[SeedResult],
    *,
    settings: Mapping[str, Any],
    guesses: dict[str, dict[str, float]],
) -> Summary:
    """Computes medians over the seeds."""
    first = next(iter(seeds[0].metrics))
    ranked = sorted(seeds, key=lambda seed: seed.metrics[first][headline])
    return Summary(
        task=task,
        settings=dict(settings),
        headline=headline,
        median_seed=ranked[(len(ranked) - 1) // 2].seed,
        medians={
            name: {metric: statistics.median(seed.metrics[name][metric] for seed in seeds) for metric in metrics}
            for name, metrics in seeds[0].metrics.items()
        },
        guesses=guesses,
        seeds=list(seeds),
    )


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
