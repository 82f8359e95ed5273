"""The losses that models learn from, by name, and which counts of a step divide them. It uses no torch.

A batch's targets and a model's outputs are mappings by these names. A loss is added by a line in `LOSSES`, and by the
model that returns its sum: gradients, totals over ranks, metrics.jsonl, summary.json, evaluations, tables and plots
follow from the line.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Divisor = Literal["targets", "sequences", "packs"]
"""A count of a step by which a loss is divided, by its name in `StepCounts`."""


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of one whole step over all ranks; every rank computes them from the plan, without communication."""

    packs: int
    sequences: int
    tokens: int
    """Real tokens, without padding."""
    targets: int
    """Tokens to be predicted: next tokens, or masked ones."""
    padding_targets: int = 0
    """Targets among them that only pad sequences, and are nevertheless predicted."""

    @property
    def real_targets(self) -> int:
        """Targets without those that only pad."""
        return self.targets - self.padding_targets

    def __add__(self, other: "StepCounts") -> "StepCounts":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return StepCounts(**sums)

    def of(self, divisor: Divisor) -> int:
        """Returns the count of this name."""
        return getattr(self, divisor)


NO_COUNTS = StepCounts(packs=0, sequences=0, tokens=0, targets=0)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Declares a loss. A model's section lists its losses, the main one first (`TransformerConfig.losses`)."""

    name: str
    """Key of the loss in a batch's targets and in a model's outputs."""
    title: str
    """Name of the loss within a sentence."""
    metric: str
    """Key of the loss in metrics.jsonl and summary.json, where a model has several losses; the sum of all is `loss`."""
    accuracy: str | None
    """The key of the share of its targets that were predicted correctly; None: it is not counted."""
    counted_by: Divisor
    """The count of a step that is the number of its targets."""
    divided_by: Divisor
    """The count that divides its sum. sequences, of a loss counted by targets: the mean over each sequence's targets,
    then over sequences; packs: the mean over each pack's sequences, then over packs. The inner divisions are in the
    weights of the targets."""
    unit: str

    @property
    def optimised_metric(self) -> str:
        """The key of the loss whose gradient was taken."""
        return f"optimised_{self.metric}"

    @property
    def in_evaluation(self) -> "Loss":
        """The loss as it is evaluated: never a mean over packs, so that the results of all runs compare."""
        return replace(self, divided_by=self.counted_by) if self.divided_by == "packs" else self


NEXT_TOKEN = Loss(
    name="next_token",
    title="next-token loss",
    metric="token_loss",
    accuracy="accuracy",
    counted_by="targets",
    divided_by="targets",
    unit="nats/token",
)
MASKED_TOKEN = replace(NEXT_TOKEN, name="masked_token", title="masked-token loss")
NEXT_SENTENCE = Loss(
    name="next_sentence",
    title="next-sentence loss",
    metric="next_sentence_loss",
    accuracy="next_sentence_accuracy",
    counted_by="sequences",
    divided_by="sequences",
    unit="nats/sequence",
)

LOSSES = (NEXT_TOKEN, MASKED_TOKEN, NEXT_SENTENCE)
"""The losses of pretraining; the names of metrics follow from them."""

LOSSES_BY_METRIC = {loss.metric: loss for loss in (*LOSSES, replace(NEXT_TOKEN, title="token loss"))}
"""The losses by their key, where a model has several. Next-token and masked-token loss share theirs."""

SEQUENCE_CLASS = replace(
    NEXT_SENTENCE, name="sequence_class", title="loss of classes", metric="class_loss", accuracy=None
)
SEQUENCE_SCORE = replace(
    SEQUENCE_CLASS,
    name="sequence_score",
    title="squared error of scores",
    metric="score_loss",
    unit="squared error/sequence",
)
ANSWER_SPAN = replace(SEQUENCE_CLASS, name="answer_span", title="loss of answer spans", metric="span_loss")
"""The losses of fine-tuning, each the mean over the sequences of a step. The metrics of a task are computed from
predictions (`finetuning/tasks.py`)."""


def losses_logged_apart(record: Mapping[str, Any] | Iterable[str]) -> tuple[Loss, ...]:
    """Returns the losses whose values a record of metrics.jsonl, or an evaluation, reports separately."""
    return tuple(loss for metric, loss in LOSSES_BY_METRIC.items() if metric in record)
