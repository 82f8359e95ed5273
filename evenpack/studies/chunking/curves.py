"""Perplexity of one run: by step, by hundredths of an epoch and smoothed, and on held-out documents.

metrics.jsonl   the run's own log, as long as it exists
curve.json      the part that the study needs, stored with the result: enough for every table and figure

Held-out documents are the same for all arms, because a hash of the text splits them off:

own rows    chunked by the arm's own recipe: its last evaluation in training
documents   one by one, at the arm's MSL: the same targets for all arms of a length, so the fair one; a run on such
            documents has evaluated them in training
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64
from scipy.signal import lfilter

from evenpack.data.recipes import DocumentsRecipe
from evenpack.engine.reporting.metrics import METRICS
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.runs.arms import kept_values, loss_of_evaluation, mean_loss, read_steps
from evenpack.studies.runs.jobs import Evaluation, StudyRun, evaluation_of
from evenpack.studies.runs.study_file import Settings

CURVE = "curve.json"

SEGMENTS = 100
"""Segments of an epoch (appendix A.6)."""

_DIGITS = 7
"""Digits of a loss in curve.json."""
_LARGEST_FACTOR = 0.999

DOCUMENTS = "documents"


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """The learning curve of one run."""

    losses: Float64[np.ndarray, " steps"]
    """Loss of each step in nats/target; infinite if it was not finite, and then so are all means from there on.

    A skipped step changes no weight, so it has the loss of the trained step before it (the first ones: of that after).
    """
    tokens_per_step: float
    """Real tokens on average over the trained steps, as are the slots."""
    slots_per_step: float
    own_loss: float | None
    """Loss of the last evaluation, over rows of held-out documents by the run's own recipe; None without one, and
    infinite (`Infinity` in curve.json) if it was not finite."""

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def perplexity(self) -> Float64[np.ndarray, " steps"]:
        """Returns exp(loss) of each step."""
        with np.errstate(over="ignore"):
            values: Float64[np.ndarray, " steps"] = np.exp(self.losses)
        return values

    def last_epoch(self, epochs: float) -> Float64[np.ndarray, " last_steps"]:
        """Returns the perplexity of the last epoch's steps: of E epochs' N steps those from N (E - 1) / E on.

        A step in which the previous epoch ends belongs to the last one.
        """
        return self.perplexity[math.floor(self.steps * (epochs - 1) / epochs) :]

    def segments(self, epochs: float) -> Float64[np.ndarray, " 100"]:
        """Returns the mean perplexity of each hundredth of the last epoch (appendix A.6).

        This is a mean of perplexities, and not the perplexity of a mean loss. Steps are equal parts of the epoch; one
        that is in two segments counts in each by its fraction there.
        """
        return _means(self.last_epoch(epochs), np.linspace(0.0, 1.0, SEGMENTS + 1))

    def final(self, epochs: float) -> float:
        """Returns the mean perplexity over the last hundredth of the last epoch."""
        return float(self.segments(epochs)[-1])

    def last_tenth(self, epochs: float) -> float:
        """Returns the mean perplexity over the last ten hundredths of the last epoch."""
        return float(self.segments(epochs)[-SEGMENTS // 10 :].mean())

    def at_step(self, step: int, epochs: float) -> float | None:
        """Returns the mean perplexity over the hundredth of an epoch that ends with `step`; None for a shorter run."""
        if step > self.steps:
            return None
        window = min(step, max(1.0, self.steps / epochs / SEGMENTS))
        return float(_means(self.perplexity[:step], np.array([1.0 - window / step, 1.0]))[0])


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Perplexities of one run; None for those that have not been evaluated."""

    own_rows: float | None
    documents: float | None


def read_curve(output_dir: Path) -> Curve:
    """Reads the run's log and stores the needed part in curve.json; without a log it reads curve.json.

    Raises: DataError if there is neither, if curve.json is damaged, or the log does not have each step once or has no
    trained step.
    """
    return kept_values(output_dir / CURVE, [output_dir / METRICS], lambda: _from_log(output_dir), _curve_of)


def _curve_of(values: dict[str, Any]) -> Curve:
    losses = [math.inf if loss is None else loss for loss in values["losses"]]
    means = {name: values[name] for name in ("tokens_per_step", "slots_per_step", "own_loss")}
    return Curve(losses=np.array(losses, dtype=np.float64), **means)


def held_out_evaluations(study: ChunkingConfig, runs: Sequence[StudyRun]) -> tuple[Evaluation, ...]:
    """Returns the evaluations that follow each of the runs. Raises: ConfigError.

    Documents alone have the same targets for all runs: no end-of-text where a run was trained without it.
    """
    has_none = any(getattr(run.config.data.recipe, "end_of_text_in_loss", "all") == "none" for run in runs)
    documents_ends: Settings = {"end_of_text_in_loss": "none"} if has_none else {}
    asked = [(run, _documents_of(study, run, documents_ends)) for run in runs]
    return tuple(
        evaluation_of(run, DOCUMENTS, settings, study_dir=study.study.output_dir)
        for run, settings in asked
        if settings is not None
    )


def read_held_out(curve: Curve, evaluations: Sequence[Evaluation], *, documents_alone: bool) -> HeldOut:
    """Reads the evaluation of one run. Raises: DataError for an incomplete result.

    Args:
        documents_alone: whether the study compares documents alone; without an evaluation of them they are what the
            run evaluated itself.
    """
    losses = [loss_of_evaluation(evaluation) for evaluation in evaluations]
    if documents_alone and not losses:
        losses = [curve.own_loss]
    return HeldOut(
        own_rows=_perplexity(curve.own_loss),
        documents=_perplexity(losses[0] if losses else None),
    )


def smoothed(
    values: Float64[np.ndarray, " steps"], *, smoothing: float, weighs: Literal["old", "new"]
) -> Float64[np.ndarray, " steps"]:
    """Returns the exponential moving average of appendix A.7, beginning with the first value.

    The appendix prints S_t = a y_t + (1 - a) S_(t-1) with a = min(sqrt(alpha), 0.999)^dt and dt = 1.

    Args:
        smoothing: alpha, from 0 to below 1.
        weighs: what a weighs. `new` is as printed: an alpha near 1, as such charts have, hardly smooths then. `old` is
            S_t = a S_(t-1) + (1 - a) y_t, which smooths: this is how the charts of Weights & Biases use the same
            factor, min(sqrt(alpha), 0.999)^dt (time-weighted average), from which the appendix seems to take it.
    """
    if len(values) == 0 or smoothing == 0.0:
        return values
    factor = min(math.sqrt(smoothing), _LARGEST_FACTOR)
    keep = factor if weighs == "old" else 1.0 - factor
    average: Float64[np.ndarray, " steps"]
    average, _ = lfilter([1.0 - keep], [1.0, -keep], values, zi=[keep * values[0]])
    return average


def _means(
    values: Float64[np.ndarray, " steps"], edges: Float64[np.ndarray, " edges"]
) -> Float64[np.ndarray, " parts"]:
    """Returns means between edges, which are fractions of the whole; all values have equal widths."""
    sums = np.append(0.0, np.cumsum(values))
    with np.errstate(invalid="ignore"):
        parts = np.diff(np.interp(edges * len(values), np.arange(len(sums)), sums))
    means: Float64[np.ndarray, " parts"] = parts / (np.diff(edges) * len(values))
    return np.where(np.isnan(means), np.inf, means)


def _from_log(output_dir: Path) -> dict[str, Any]:
    records, trained = read_steps(output_dir)
    evaluated = [record["validation"] for record in records if record.get("validation")]
    return {
        "losses": _losses(records, first=trained[0]),
        "tokens_per_step": sum(record["tokens"] for record in trained) / len(trained),
        "slots_per_step": sum(record["slots"] for record in trained) / len(trained),
        "own_loss": mean_loss(evaluated[-1]) if evaluated else None,
    }


def _losses(records: Sequence[dict[str, Any]], *, first: dict[str, Any]) -> list[float | None]:
    """Returns the loss of each step; a skipped step has the loss of the trained one before it, or of the first one."""
    losses, source = [], first
    for record in records:
        source = source if "skipped" in record else record
        losses.append(None if source["loss"] is None else _rounded(source["loss"]))
    return losses


def _rounded(loss: float) -> float | None:
    return float(f"{loss:.{_DIGITS}g}") if math.isfinite(loss) else None


def _documents_of(study: ChunkingConfig, run: StudyRun, documents_ends: Settings) -> Settings | None:
    """Returns the settings under which a run is evaluated on documents alone; None where it is not."""
    length = run.config.data.recipe.max_sequence_length
    alone = {"kind": "documents", "max_sequence_length": length, "long_documents": "split", **documents_ends}
    if not study.chunking.documents_alone or _evaluates_documents(study, run, alone):
        return None
    return {
        "data.recipe": alone,
        "data.pack_length": length,
        "data.packing": {"algorithm": "auto"},
        "training.evaluation_packs": study.chunking.documents_packs,
    }


def _evaluates_documents(study: ChunkingConfig, run: StudyRun, alone: Settings) -> bool:
    """Returns whether a run's own evaluation is that of documents alone: evaluations always isolate.

    Both must be of all that was held out, since packs of another length hold other documents.
    """
    is_of_all = run.config.training.evaluation_packs is None and study.chunking.documents_packs is None
    return is_of_all and run.config.data.recipe == DocumentsRecipe.model_validate(alone)


def _perplexity(loss: float | None) -> float | None:
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
