"""Defines the length of a run, in steps, epochs, samples or tokens, and when it is evaluated.

A *sample* is a sequence, as in MLPerf: a step of packs has, on average, the packing factor times its number of packs.
*Tokens* are real ones, without padding. The number of steps is computed once, before anything starts, so a run does
exactly the number that its plan shows.
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
"""Keys of `training:` of which a run file has exactly one."""

CHINCHILLA_RATIO = 20
"""Tokens per parameter for about the lowest loss at a given number of operations (Hoffmann et al. 2022)."""

StepSpan = int | tuple[int, int]
"""A step, counted from 1, or a first and a last step."""


class RunLengthSection(Section):
    """The keys of `training:` for the length of a run and for its evaluations."""

    steps: Steps | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Length of the learning-rate schedule, in optimizer updates. Exactly one of steps, epochs, max_samples, tokens and
    chinchilla_ratio is given; steps are computed from the others and the prepared data, and `--dry-run` shows them."""
    epochs: Epochs | None = Field(default=None, gt=0.0, le=MOST_STEPS)
    """Passes over all sources together; the last step is filled from the next pass. With several sources, the number
    of passes over each depends on their weights; `--dry-run` shows it."""
    max_samples: Sequences | None = Field(default=None, ge=1)
    """Sequences to train on, on average at most: steps are rounded down."""
    tokens: Tokens | None = Field(default=None, ge=1)
    """Real tokens to train on, on average at least: steps are rounded up."""
    chinchilla_ratio: TokensPerParameter | None = Field(default=None, gt=0.0, le=1e9)
    """Real tokens to train on for each parameter of the model, all parameters counted. About 20 give the lowest loss
    at a given number of operations (Hoffmann et al. 2022, arXiv:2203.15556)."""
    stop_after_steps: Steps | None = Field(default=None, ge=1)
    """Stop after this absolute step, with exit code 0; the run can be resumed later. Null: stop at the schedule's end.
    There is no additional evaluation at such a stop."""
    target_accuracy: Share | None = Field(default=None, gt=0.0, le=1.0)
    """Stop as soon as this share of all held-out targets is predicted correctly in an evaluation; null: never."""
    evaluate_every_steps: Steps | None = Field(default=200, ge=1)
    """Steps from one evaluation to the next; null: the model is never evaluated. Ignored where evaluate_every_samples
    is given."""
    evaluate_every_samples: Annotated[Sequences, Field(strict=True, ge=1)] | Literal["mlperf"] | None = None
    """Sequences from one evaluation to the next; evaluation follows the step that reaches the number. `mlperf`: by
    MLPerf's rule for BERT, from the samples of a step. Null: by evaluate_every_steps."""

    skip_steps: tuple[StepSpan, ...] = ()
    """Steps that are skipped because their batches are bad: single steps and spans [first, last], numbered from 1 as in
    metrics.jsonl. A skipped step advances the step number and the learning-rate schedule and leaves weights and
    optimizer unchanged; its packs are counted as skipped. Steps already done can be neither added nor removed."""

    @property
    def skipped(self) -> SkippedSteps:
        """The skipped steps."""
        return SkippedSteps.of(self.skip_steps)

    @property
    def planned_steps(self) -> int:
        """The length of the schedule, which `resolve` computes if the run file gives it in another unit."""
        assert self.steps is not None, "a resolved run has its steps"
        return self.steps

    @property
    def last_step(self) -> int:
        """The step at which this start of the run ends at the latest."""
        return self.stop_after_steps or self.planned_steps

    @field_validator("skip_steps", mode="before")
    @classmethod
    def _check_spans(cls, spans: Any) -> Any:
        """Checks the spans with a single error message, where pydantic would give one for each possible form."""
        example = "give steps and [first, last], from 1 on: [[400, 420], 1234]"
        if not isinstance(spans, list | tuple):
            raise ValueError(f"expected a list, found {spans!r}: {example}")
        for span in spans:
            ends = span if isinstance(span, list | tuple) and len(span) == 2 else [span, span]
            if any(type(end) is not int or not 1 <= end <= MOST_STEPS for end in ends) or ends[0] > ends[1]:
                raise ValueError(f"{span!r} is neither a step nor a span of steps: {example}")
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
                "target_accuracy is compared with evaluations, and there are none: set evaluate_every_steps or "
                "evaluate_every_samples"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class StepContents:
    """The amounts that a step holds, from which the number of steps is computed."""

    items: int
    """Packs or sequences of a step, by `training.batching`."""
    items_per_epoch: int | None
    """Packs or sequences in an epoch of all sources; None if unknown, for lengths that are not in epochs."""
    samples: Fraction
    """Mean number of sequences of a step over the whole run."""
    tokens: Fraction
    """Mean number of real tokens of a step over the whole run."""
    parameters: int | None
    """Number of the model's parameters; None for lengths that are not in tokens for each of them."""


def steps_of(length: RunLengthSection, step: StepContents) -> int:
    """Returns the number of steps of a run, whatever the unit in its run file.

    Raises: ConfigError if the given length is less than one step.
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
        assert step.parameters is not None, "a length by parameters needs a model that is counted"
        ratio = Fraction(str(length.chinchilla_ratio))
        holds = step.tokens / step.parameters
        _require_a_step("chinchilla_ratio", ratio, holds=holds, unit="tokens per parameter")
        return math.ceil(ratio / holds)
    return length.planned_steps


def _require_a_step(key: str, asked: int | Fraction, *, holds: Fraction, unit: str) -> None:
    """Checks that the length is at least one step. Raises: ConfigError."""
    if asked < holds:
        shown = f"{asked:,}" if isinstance(asked, int) else f"{float(asked):g}"
        held = f"{float(holds):,.1f}" if holds >= 1 else f"{float(holds):.3g}"
        raise ConfigError(
            f"training.{key} ({shown}) is less than the {held} {unit} of one step: raise it, or lower the size of a "
            "step"
        )


def is_evaluation_due(length: RunLengthSection, step: int, *, samples_per_step: Fraction) -> bool:
    """Returns whether the model is evaluated after `step` updates; the end of the schedule is included if any is.

    A stop before the end adds no evaluation, so that a run that was stopped and resumed has the same log as another.
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
    """Returns the samples between two evaluations of MLPerf's BERT: floor(0.05 (230.23 batch + 3e6) / 25000) 25000."""
    return math.floor(0.05 * (230.23 * samples_per_step + 3_000_000) / 25_000) * 25_000
