"""Three evaluations on held-out documents, which are the same for all arms: a hash of the text splits them.

own rows                chunked by the arm's own recipe: its last evaluation in training
own rows, real tokens   the same, without padding in the loss; of arms whose loss counts padding
documents               one by one, at the arm's MSL: the same targets for all arms of a length, so the fair one
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenpack.data.config import PaddingRecipe
from evenpack.errors import DataError
from evenpack.files import read_json_object
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.chunking.curves import Curve, mean_loss
from evenpack.studies.runs.config import Settings
from evenpack.studies.runs.evaluations import Evaluation, evaluation_of
from evenpack.studies.runs.expansion import StudyRun

DOCUMENTS = "documents"
REAL_TOKENS = "real_tokens"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Perplexities of one run; None for those that have not been evaluated."""

    own_rows: float | None
    own_rows_real_tokens: float | None
    documents: float | None


def held_out_evaluations(study: ChunkingConfig, runs: Sequence[StudyRun]) -> tuple[Evaluation, ...]:
    """Returns the evaluations that follow each finished run of the last phase. Raises: ConfigError."""
    return tuple(
        evaluation_of(run, name, settings, study_dir=study.study.output_dir)
        for run in runs
        if run.phase == study.last_phase
        for name, settings in _asked(study, run).items()
    )


def read_held_out(curve: Curve, evaluations: Sequence[Evaluation]) -> HeldOut:
    """Reads the evaluations of one run. Raises: DataError for an incomplete result."""
    losses = {evaluation.name: _loss(evaluation) for evaluation in evaluations}
    return HeldOut(
        own_rows=_perplexity(curve.own_loss),
        own_rows_real_tokens=_perplexity(losses.get(REAL_TOKENS)),
        documents=_perplexity(losses.get(DOCUMENTS)),
    )


def _asked(study: ChunkingConfig, run: StudyRun) -> dict[str, Settings]:
    recipe = run.config.data.recipe
    asked: dict[str, Settings] = {}
    if study.chunking.documents_alone:
        length = recipe.max_sequence_length
        asked[DOCUMENTS] = {
            "data.recipe": {"kind": "documents", "max_sequence_length": length, "long_documents": "split"},
            "data.pack_length": length,
            "data.packing": {"algorithm": "auto"},
            "training.evaluation_packs": study.chunking.documents_packs,
        }
    if isinstance(recipe, PaddingRecipe) and recipe.padding_in_loss:
        asked[REAL_TOKENS] = {"data.recipe.padding_in_loss": False}
    return asked


def _loss(evaluation: Evaluation) -> float | None:
    values = read_json_object(evaluation.result)
    if values is None:
        return None
    try:
        return mean_loss(values["sources"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{evaluation.result} is not a result of `evenpack evaluate`: remove it, and that run is evaluated again"
        ) from error


def _perplexity(loss: float | None) -> float | None:
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
