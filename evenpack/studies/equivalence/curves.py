"""The learning curve in a run's log: validation against samples seen, and against time."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenpack.engine.reporting.metrics import METRICS, read_metrics, trained_steps
from evenpack.errors import DataError
from evenpack.studies.equivalence.config import Measure


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The evaluations of one run."""

    samples: tuple[int, ...]
    """Sequences trained on so far."""
    seconds: tuple[float, ...]
    """Seconds of training so far, without evaluation and saving."""
    loss: tuple[float, ...]
    """Held-out loss in nats/target, over all sources."""
    accuracy: tuple[float, ...]
    next_sentence_accuracy: tuple[float, ...] | None
    """Accuracy; None for a model without next-sentence prediction."""
    training_loss: float
    """Loss in nats/target, over the arm's own batches in the last tenth of its trained steps."""
    next_sentence_noise: float | None
    """Standard deviation, over the same steps, of the next-sentence loss whose gradient was taken."""
    denominator_noise: float | None
    """Standard deviation of its difference from the mean over the step's sequences; 0 with exact denominators."""
    sequences_per_second: float
    """Over the whole run."""
    sequences_per_step: float
    """Over the trained steps."""
    slots_per_sequence: float
    """Slots computed per sequence, including padding."""
    host_to_device_bytes_per_sequence: float
    """Bytes that batches move to the devices, per sequence."""

    def values(self, measure: Measure) -> tuple[float, ...]:
        return self.loss if measure == "loss" else self.accuracy

    def reaches(self, target: float, measure: Measure) -> tuple[float, float] | None:
        """Returns the samples and seconds at which the measure first reaches the target; None if it never does.

        Values between evaluations are interpolated linearly.
        """
        sign = -1.0 if measure == "loss" else 1.0
        values = [sign * value for value in self.values(measure)]
        for index, value in enumerate(values):
            if value >= sign * target:
                return self._between(index, values, sign * target)
        return None

    def _between(self, index: int, values: Sequence[float], goal: float) -> tuple[float, float]:
        if index == 0:
            return float(self.samples[0]), self.seconds[0]
        before, after = values[index - 1], values[index]
        share = (goal - before) / (after - before)
        samples = self.samples[index - 1] + share * (self.samples[index] - self.samples[index - 1])
        return samples, self.seconds[index - 1] + share * (self.seconds[index] - self.seconds[index - 1])


def read_curve(output_dir: Path) -> Curve:
    """Reads the log. Skipped steps have no samples, seconds and losses.

    Raises: DataError if it has no evaluation or no trained step, lacks a step up to which samples are counted, or has a
        loss that is not finite.
    """
    path = output_dir / METRICS
    records = read_metrics(path) if path.exists() else []
    if [record["step"] for record in records] != list(range(1, len(records) + 1)):
        raise DataError(
            f"{path} does not have each step once, from the first on, so samples cannot be counted: remove "
            f"{output_dir} to train that run again"
        )
    samples, seconds = 0, 0.0
    points = []
    for record in records:
        samples += record["sequences"]
        seconds += 0.0 if "skipped" in record else record["step_seconds"]
        found = [values for values in (record.get("validation") or {}).values() if values is not None]
        if found:
            points.append((samples, seconds, found))
    if not points:
        raise DataError(f"{path} has no evaluation: set training.evaluate_every_steps and data.validation_fraction")
    trained = trained_steps(records)
    if not trained:
        raise DataError(f"all {len(records)} steps in {path} were skipped, so there is nothing to compare")
    last = trained[-math.ceil(len(trained) / 10) :]
    losses = [values["loss"] for *_, found in points for values in found] + [record["loss"] for record in last]
    if None in losses:
        raise DataError(
            f"{path} has a loss that is not finite, so the run has diverged and cannot be compared: train it again "
            "with a lower optimizer.learning_rate"
        )
    noisy = [record["optimised_next_sentence_loss"] for record in last if "optimised_next_sentence_loss" in record]
    means = [record["next_sentence_loss"] for record in last if "next_sentence_loss" in record]
    with_pairs = all("next_sentence_accuracy" in values for _, _, found in points for values in found)
    return Curve(
        samples=tuple(point[0] for point in points),
        seconds=tuple(point[1] for point in points),
        loss=tuple(_mean(found, "loss", "targets") for *_, found in points),
        accuracy=tuple(_mean(found, "accuracy", "targets") for *_, found in points),
        next_sentence_accuracy=(
            tuple(_mean(found, "next_sentence_accuracy", "sequences") for *_, found in points) if with_pairs else None
        ),
        training_loss=_mean(last, "token_loss" if "token_loss" in last[0] else "loss", "targets"),
        next_sentence_noise=_deviation(noisy),
        denominator_noise=_deviation([one - mean for one, mean in zip(noisy, means, strict=True)]),
        sequences_per_second=samples / seconds,
        sequences_per_step=samples / len(trained),
        slots_per_sequence=sum(record["slots"] for record in records) / samples,
        host_to_device_bytes_per_sequence=sum(record["host_to_device_bytes"] for record in records) / samples,
    )


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _mean(records: Sequence[dict[str, Any]], name: str, weight: str) -> float:
    total: float = sum(values[weight] for values in records)
    weighted: float = sum(values[weight] * values[name] for values in records)
    return weighted / total
