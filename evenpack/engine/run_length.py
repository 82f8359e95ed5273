"""How long a run goes on, and when it is evaluated: in steps, epochs, samples or tokens.

A *sample* is a sequence, as in MLPerf: a step of packs holds as many as its packs hold on average, the packing factor
times the packs. A *token* is a real one, never padding. Steps are settled once, before anything starts, so a run does
exactly as many as its plan shows.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from evenpack.config import Section
from evenpack.data.limits import MOST_STEPS
from evenpack.data.order.skipped_steps import SkippedSteps
from evenpack.errors import ConfigError
from evenpack.units import Epochs, Sequences, Share, Steps, Tokens, TokensPerParameter

LENGTHS = ("steps", "epochs", "max_samples", "tokens", "chinchilla_ratio")
"""Keys of `training:` of which a run file has one."""

CHINCHILLA_RATIO = 20
"""Tokens per parameter that give about the lowest loss for the operations of training (Hoffmann et al. 2022)."""

StepSpan = int | tuple[int, int]
"""A step, from 1, or a first and a last one."""


class RunLengthSection(Section):
    """The part of `training:` that says when a run ends and when it is evaluated."""

    steps: Steps | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Length of the learning-rate schedule, in optimizer updates. Exactly one of steps, epochs, max_samples, tokens and
    chinchilla_ratio is given; the steps of the others follow from the prepared data, and `--dry-run` shows them."""
    epochs: Epochs | None = Field(default=None, gt=0.0, le=MOST_STEPS)
    """Passes over all sources together; the last step is filled from the next pass. With several sources, their
    weights decide how often each is gone through, which `--dry-run` shows."""
    max_samples: Sequences | None = Field(default=None, ge=1)
    """Sequences to train on, on average at most: steps are rounded down."""
    tokens: Tokens | None = Field(default=None, ge=1)
    """Real tokens to train on, on average at least: steps are rounded up."""
    chinchilla_ratio: TokensPerParameter | None = Field(default=None, gt=0.0, le=1e9)
    """Real tokens to train on for each parameter of the model, all parameters counted. About 20 give the lowest loss
    for the operations of training (Hoffmann et al. 2022, arXiv:2203.15556)."""
    stop_after_steps: Steps | None = Field(default=None, ge=1)
    """Stop at this absolute step, with exit code 0, and go on later; null: at the schedule's end. A stop adds no
    evaluation."""
    target_accuracy: Share | None = Field(default=None, gt=0.0, le=1.0)
    """Stop as soon as an evaluation finds this share of all held-out targets predicted correctly; null: never."""
    evaluate_every_steps: Steps | None = Field(default=200, ge=1)
    """Steps from one evaluation to the next; null: the model is never evaluated. Of no effect where
    evaluate_every_samples is given."""
    evaluate_every_samples: Annotated[Sequences, Field(strict=True, ge=1)] | Literal["mlperf"] | None = None
    """Sequences from one evaluation to the next, which comes after the step that completes them; `mlperf`: by MLPerf's
    rule for BERT, from the samples of a step. Null: by evaluate_every_steps."""

    skip_steps: tuple[StepSpan, ...] = ()
    """Steps from which nothing is learned, for batches that are found to be bad: single ones and [first, last],
    numbered from 1 as in metrics.jsonl. Step number and learning rate go on, weights and optimizer stay, and the packs
    of such a step count as skipped. Steps that are done cannot be named any more, nor taken out."""

    @property
    def skipped(self) -> SkippedSteps:
        """The steps of `skip_steps`."""
        return SkippedSteps.of(self.skip_steps)

    @property
    def planned_steps(self) -> int:
        """The length of the schedule, which `resolve` settles where the run file gives it otherwise."""
        assert self.steps is not None, "a resolved run has its steps"
        return self.steps

    @property
    def last_step(self) -> int:
        """Where this start of the run ends at the latest."""
        return self.stop_after_steps or self.planned_steps

    @field_validator("skip_steps", mode="before")
    @classmethod
    def _check_spans(cls, spans: Any) -> Any:
        """One message for whatever is no step or span, where pydantic has one for each form that there could be."""
        example = "give steps and [first, last], from 1 on: [[400, 420], 1234]"
        if not isinstance(spans, list | tuple):
            raise ValueError(f"expected a list, found {spans!r}: {example}")
        for span in spans:
            ends = span if isinstance(span, list | tuple) and len(span) == 2 else [span, span]
            if any(type(end) is not int or not 1 <= end <= MOST_STEPS for end in ends) or ends[0] > ends[1]:
                raise ValueError(f"{span!r} is no step and no span of steps: {example}")
        return spans

    @model_validator(mode="after")
    def _check_length(self) -> "RunLengthSection":
        given = [f"{name}={value}" for name in LENGTHS if (value := getattr(self, name)) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(LENGTHS)}, found {' and '.join(given) or 'none'}: give one, and "
                "set the others to null or leave them out"
            )
        is_evaluated = self.evaluate_every_steps is not None or self.evaluate_every_samples is not None
        if self.target_accuracy is not None and not is_evaluated:
            raise ValueError(
                "target_accuracy is what evaluations are held against, and there are none: set evaluate_every_steps or "
                "evaluate_every_samples"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class StepContents:
    """What a step holds, and by what a run's length may be measured."""

    items: int
    """Packs or sequences, whatever a step counts."""
    items_per_epoch: int | None
    """Of all sources together; None, where nobody knows, is for lengths that are not in epochs."""
    samples: Fraction
    """On average over what the run draws; so are the tokens."""
    tokens: Fraction
    parameters: int
    """Of the model."""


def steps_of(length: RunLengthSection, step: StepContents) -> int:
    """The steps that a run has, whatever its run file gives.

    Raises: ConfigError if that is less than a step holds.
    """
    if length.epochs is not None:
        assert step.items_per_epoch is not None, "a length in epochs needs data whose epochs are known"
        return math.ceil(Fraction(str(length.epochs)) * step.items_per_epoch / step.items)
    if length.max_samples is not None:
        _require_a_step("max_samples", length.max_samples, holds=step.samples, unit="samples")
        return math.floor(length.max_samples / step.samples)
    if length.tokens is not None:
        _require_a_step("tokens", length.tokens, holds=step.tokens, unit="tokens")
        return math.ceil(length.tokens / step.tokens)
    if length.chinchilla_ratio is not None:
        ratio = Fraction(str(length.chinchilla_ratio))
        holds = step.tokens / step.parameters
        _require_a_step("chinchilla_ratio", ratio, holds=holds, unit="tokens per parameter")
        return math.ceil(ratio / holds)
    return length.planned_steps


def _require_a_step(key: str, asked: int | Fraction, *, holds: Fraction, unit: str) -> None:
    """Raises: ConfigError if less is asked for than one step holds."""
    if asked < holds:
        shown = f"{asked:,}" if isinstance(asked, int) else f"{float(asked):g}"
        held = f"{float(holds):,.1f}" if holds >= 1 else f"{float(holds):.3g}"
        raise ConfigError(
            f"training.{key} ({shown}) is less than the {held} {unit} of one step: raise it, or lower the size of a "
            "step"
        )


def is_evaluation_due(length: RunLengthSection, step: int, *, samples_per_step: Fraction) -> bool:
    """Whether the model is evaluated after `step` updates; where it is evaluated at all, after the schedule's last too.

    A stop in between adds no evaluation, so that a run that was stopped and went on has logged what any other has.
    """
    every = length.evaluate_every_samples
    is_last = step == length.planned_steps
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
