"""Opens `evenpack.data.where` for a run file: the content of a step, and the steps of a document.

It does not import torch, so that the answer is fast.
"""

from functools import partial
from pathlib import Path

import numpy as np

from evenpack.config import with_values
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences import SentencePairsView, SequenceView
from evenpack.data.sequences.joined import JoinedOrigins, JoinedView
from evenpack.data.sequences.pairs import PairOrigins, PairsAsDocuments
from evenpack.data.sequences.view import SequenceOrigins
from evenpack.data.sources.kinds import held_out
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import DOCUMENT_HASHES
from evenpack.data.where import Decode, StepContent, TracedSource, Where
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, find_record
from evenpack.engine.resolving.data_facts import order_of
from evenpack.engine.resolving.resolve import resolve
from evenpack.engine.resolving.settle import settle_prepared
from evenpack.errors import ConfigError


def open_where(config: RunConfig, *, with_text: bool = False) -> Where:
    """Returns the order of the run over its prepared data, in time that does not grow with them.

    Raises: NotPreparedError or DataError if the data are missing or incomplete; ConfigError for text of a source that
    holds only tokens.
    """
    prepared = PreparedData.open(config.prepared_dir, config.data, verify="nothing")
    config = settle_prepared(config, prepared).config
    if len(config.parts) > 1:  # the last part's data answer for all steps
        run = resolve(with_values(config, {"training": {"cost_model": None}}, origin="the run file"), prepared)
        prepared = run.parts[-1].prepared
    training = config.training
    packed = packed_sources(prepared, "train", seed=config.run.seed, batching=training.batching)
    return Where(
        [
            TracedSource(
                name=name,
                packed=source,
                origins=open_origins(prepared, name, source.view),
                is_held_out=partial(_is_held_out, prepared, name),
            )
            for name, source in zip(prepared.source_names, packed, strict=True)
        ],
        order_of(config),
        steps=training.planned_steps,
        skipped=training.skipped,
        decode=_decoder(prepared) if with_text else None,
    )


def open_origins(prepared: PreparedData, source: str, view: SequenceView) -> SequenceOrigins:
    """Returns the origins of the training sequences of a source, of which `view` is the view."""
    if isinstance(view, JoinedView):
        assert prepared.follows is not None, "the view is of several forms"
        before = open_origins(prepared.follows[0], source, view.before)
        return JoinedOrigins(before, open_origins(prepared, source, view.after), first=view.before.count)
    if not isinstance(view, SentencePairsView):
        assert isinstance(view, SequenceOrigins), "as every view of documents"
        return view
    if prepared.config.recipe.kind == "masked_pairs":
        return PairsAsDocuments(view=view)
    documents = TokenFile(prepared.token_file_prefix(source), verify=False)
    return PairOrigins.open(view, documents)


def differs_from_trained(content: StepContent, output_dir: Path) -> str | None:
    """Returns a message if metrics.jsonl has the step with another order hash; None otherwise."""
    record = find_record(output_dir / METRICS, step=content.step)
    trained = None if record is None else record.get("order_hash")
    if trained is None or trained == content.order_hash:
        return None
    return (
        f"{output_dir / METRICS} has step {content.step} with order hash {trained}, this run file and its prepared "
        f"data make it {content.order_hash}: the run was trained with another seed, step size or data than these, so "
        "this is not the content of the step. Use the run file of its checkpoint"
    )


def _is_held_out(prepared: PreparedData, source: str, document: int) -> bool:
    """Returns whether documents are held out, for a source that is split by the hash of its documents."""
    record = prepared.manifest.files[f"sources/{source}/{DOCUMENT_HASHES}.npy"]
    identity = np.array(open_array(prepared.directory / record.path)[document : document + 1])
    return bool(held_out(identity, prepared.config.sources[source], prepared.config.validation_fraction)[0])


def _decoder(prepared: PreparedData) -> Decode:
    if not prepared.tokenizer_dir.is_dir():
        raise ConfigError(
            f"{prepared.directory} holds no tokenizer, because its source holds tokens, so there is no text to show: "
            "leave --text out"
        )
    return prepared.tokenizer.decode
