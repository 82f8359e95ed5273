"""How long a run goes on, and when it is evaluated: in steps, or in samples.

A *sample* is a sequence, as in MLPerf: a step of packs holds as many as its packs hold on average, the packing factor
times the packs. Steps are settled once, before anything starts, so a run does exactly as many as its plan shows.
"""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.data.limits import MOST_STEPS
from evenpack.errors import ConfigError


class RunLengthSection(Section):
    """The part of `training:` that says when a run ends and when it is evaluated."""

    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Length of the learning-rate schedule, in optimizer updates. Exactly one of steps, epochs and max_samples is
    given; the steps of the other two follow from the prepared data."""
    epochs: float | None = Field(default=None, gt=0.0, le=MOST_STEPS)
    """Passes over all sources together; the last step is filled from the next pass. With several sources, their
    weights decide how often each is gone through, which `--dry-run` shows."""
    max_samples: int | None = Field(default=None, ge=1)
    """Sequences to train on, on average at most: steps are rounded down."""
    stop_after_steps: int | None = Field(default=None, ge=1)
    """Stop at this absolute step and go on later; null: at the schedule's end."""
    target_accuracy: float | None = Field(default=None, gt=0.0, le=1.0)
    """Stop as soon as an evaluation finds this share of all held-out targets predicted correctly; null: never."""
    evaluate_every_steps: int | None = Field(default=200, ge=1)
    """Null: never. Of no effect where evaluate_every_samples is given."""
    evaluate_every_samples: Annotated[int, Field(strict=True, ge=1)] | Literal["mlperf"] | None = None
    """Evaluate after the step that completes each further so many samples; `mlperf`: by MLPerf's rule for BERT, from
    the samples of a step. Null: by evaluate_every_steps."""

    @property
    def planned_steps(self) -> int:
        """The length of the schedule, which `resolve` settles where the run file gives epochs or samples."""
        assert self.steps is not None, "a resolved run has its steps"
        return self.steps

    @property
    def last_step(self) -> int:
        """Where this start of the run ends at the latest."""
        return self.stop_after_steps or self.planned_steps

    @model_validator(mode="after")
    def _check_length(self) -> "RunLengthSection":
        lengths = {"steps": self.steps, "epochs": self.epochs, "max_samples": self.max_samples}
        given = [f"{name}={value}" for name, value in lengths.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(lengths)}, found {' and '.join(given) or 'none'}: give one, and "
                "set the others to null or leave them out"
            )
        is_evaluated = self.evaluate_every_steps is not None or self.evaluate_every_samples is not None
        if self.target_accuracy is not None and not is_evaluated:
            raise ValueError(
                "target_accuracy is what evaluations are held against, and there are none: set evaluate_every_steps or "
                "evaluate_every_samples"
            )
        return self


def steps_of(length: RunLengthSection, *, items_per_step: int, items_per_epoch: int, samples_per_item: Fraction) -> int:
    """The steps that a run has, whatever its run file gives.

    Args:
        items_per_step: packs or sequences, whatever a step counts.
        items_per_epoch: of all sources together.
        samples_per_item: sequences of an item on average over what the run draws: the packing factor, or 1.

    Raises: ConfigError if `max_samples` is less than a step's.
    """
    if length.epochs is not None:
        return math.ceil(Fraction(str(length.epochs)) * items_per_epoch / items_per_step)
    if length.max_samples is not None:
        steps = math.floor(length.max_samples / (items_per_step * samples_per_item))
        if steps == 0:
            samples = float(items_per_step * samples_per_item)
            raise ConfigError(
                f"training.max_samples ({length.max_samples:,}) is less than the {samples:,.1f} samples of one step: "
                "raise it, or lower the size of a step"
            )
        return steps
    return length.planned_steps


def is_evaluation_due(length: RunLengthSection, step: int, *, samples_per_step: Fraction) -> bool:
    """Whether the model is evaluated after `step` updates; where it is evaluated at all, after the last one too."""
    every = length.evaluate_every_samples
    # An evaluation may end a run that has a target: one that is not due must not come of a stop in between.
    is_last = step == (length.last_step if length.target_accuracy is None else length.planned_steps)
    if every is None:
        steps = length.evaluate_every_steps
        return steps is not None and (is_last or step % steps == 0)
    if is_last:
        return True
    if every == "mlperf":
        every = mlperf_evaluation_interval(float(samples_per_step))
    return math.floor(step * samples_per_step / every) > math.floor((step - 1) * samples_per_step / every)


def mlperf_evaluation_interval(samples_per_step: float) -> int:
    """Samples between two evaluations of MLPerf's BERT: floor(0.05 (230.23 batch + 3e6) / 25000) 25000."""
    return math.floor(0.05 * (230.23 * samples_per_step + 3_000_000) / 25_000) * 25_000
