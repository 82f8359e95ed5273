"""The content of a step, and the steps of a document: queries on a run's order.

A step determines its draws, a draw its source and pack, a pack its sequences, a sequence the parts of documents in it.
All of these are found by arithmetic or in mapped arrays, so that the content of a step takes the same time for a
thousand sequences and for a billion. The steps of a document are searched: first the source for the sequences that hold
a part of it, then all steps for those sequences, which takes about as long as planning the whole run.

    from evenpack.engine.where import open_where

    where = open_where(config)
    where.step(1200).sequences          # what the ranks trained on in step 1200
    where.document(7, "wiki").visits    # in which steps document 7 of source wiki was, in every epoch

This package does not depend on runs: `engine/where.py` opens this class for a run file. Questions and answers number
steps from 1, as the records of metrics.jsonl with which they are compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.selection import PackedSource, order_hash, select_packs
from evenpack.data.order.skipped_steps import SkippedSteps
from evenpack.data.order.stages import StagedOrder
from evenpack.data.sequences.view import Origins, SequenceOrigins
from evenpack.errors import ConfigError

Decode = Callable[[Sequence[int]], str]
"""Turns tokens into text."""

_SCANNED = 1 << 20
"""Sequences that are searched together for the parts of a document."""


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of a document."""

    document: int
    """Number of the document in the source, from 0, in the order in which `prepare` read it."""
    start: int
    """First token within the document."""
    tokens: int
    text: str | None
    """The text; None if it was not requested."""


@dataclass(frozen=True, kw_only=True)
class PlacedSequence:
    """A sequence and its position in a step."""

    pack: int
    """Index of the pack within the step, from 0, before load balancing assigns it to a rank."""
    source: str
    epoch: int
    """Epoch of its source, from 0."""
    stream_position: int
    """Position of its pack in the source's endless stream."""
    slot: int
    """Index within the sequences of its pack."""
    sequence: int
    tokens: int
    """Tokens, including padding."""
    parts: tuple[DocumentPart, ...]
    """Parts of documents; empty if its origin is unknown."""


@dataclass(frozen=True, kw_only=True)
class StepContent:
    """The content of a step, over all ranks."""

    step: int
    skipped: bool
    """Whether nothing is learned from it (`training.skip_steps`)."""
    packs: int
    order_hash: str
    """The value that metrics.jsonl has for the step if it was trained in this order."""
    sequences: tuple[PlacedSequence, ...]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A part of a document in a step."""

    step: int
    skipped: bool
    epoch: int
    pack: int
    stream_position: int
    slot: int
    sequence: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class DocumentVisits:
    """All occurrences of a document in a run."""

    source: str
    document: int
    tokens: int
    """Tokens of the whole document."""
    text: str | None
    """The text; None if it was not requested."""
    absence: str | None
    """The reason why no sequence holds a part of it; None if one does."""
    sequences: tuple[int, ...]
    """Ids of the sequences that hold a part of it; of packs in several forms, those of each behind the ones before."""
    visits: tuple[Visit, ...]
    """Visits in the order of training, over all epochs of the run."""


@dataclass(frozen=True, kw_only=True)
class TracedSource:
    """A source of the mixture with the origins of its sequences."""

    name: str
    packed: PackedSource
    origins: SequenceOrigins
    is_held_out: Callable[[int], bool]
    """Tells whether a document belongs to validation."""


class Where:
    """The order of one run, to be queried in both directions."""

    def __init__(
        self,
        sources: Sequence[TracedSource],
        order: StagedOrder,
        *,
        steps: int,
        skipped: SkippedSteps,
        decode: Decode | None = None,
    ) -> None:
        """Takes the sources and the length of a run.

        Args:
            sources: in the order's numbering.
            steps: of the whole run.
            decode: gives each part its text, which costs reading its tokens.
        """
        self.sources = tuple(sources)
        self.order = order
        self.steps = steps
        self.skipped = skipped
        self.decode = decode

    def step(self, step: int) -> StepContent:
        """Returns the content of step `step` (from 1). Raises: ConfigError for a step that the run does not have."""
        if not 1 <= step <= self.steps:
            raise ConfigError(
                f"step {step} is not in this run, whose steps are 1 to {self.steps}: give one of them, or raise "
                "training.steps"
            )
        packs = select_packs([source.packed for source in self.sources], *self.order.draws(step - 1))
        pack_of_sequence = np.repeat(np.arange(packs.packs), np.diff(packs.offsets))
        slots = np.arange(len(packs.sequence_ids)) - packs.offsets[pack_of_sequence]
        parts = self._parts(packs.sources[pack_of_sequence], packs.sequence_ids)
        sequences = []
        for index, pack in enumerate(pack_of_sequence.tolist()):
            source = self.sources[int(packs.sources[pack])]
            position = int(packs.stream_positions[pack])
            sequences.append(
                PlacedSequence(
                    pack=pack,
                    source=source.name,
                    epoch=int(source.packed.plan.epochs(packs.stream_positions[[pack]])[0]),
                    stream_position=position,
                    slot=int(slots[index]),
                    sequence=int(packs.sequence_ids[index]),
                    tokens=int(packs.lengths[index]),
                    parts=parts[index],
                )
            )
        return StepContent(
            step=step,
            skipped=step - 1 in self.skipped,
            packs=packs.packs,
            order_hash=f"{order_hash(packs):016x}",
            sequences=tuple(sequences),
        )

    def document(self, document: int, source: str | None = None) -> DocumentVisits:
        """Returns all occurrences of a document of a source, which may be left out if there is only one; searches all.

        Raises: ConfigError for an unknown document or source; DataError if the origins are unknown.
        """
        index = self._index_of(source, document)
        traced = self.sources[index]
        file = traced.origins.document_file
        if not 0 <= document < file.documents:
            raise ConfigError(
                f"source '{traced.name}' has the documents 0 to {file.documents - 1}, in the order in which they were "
                f"prepared; there is no document {document}"
            )
        sequence_ids = _sequences_of(traced, document)
        tokens = _span(traced, document)[1]
        return DocumentVisits(
            source=traced.name,
            document=document,
            tokens=tokens,
            text=self._text(traced, document, 0, tokens),
            absence=None if len(sequence_ids) else _absence(traced, document),
            sequences=tuple(sequence_ids.tolist()),
            visits=tuple(self._visits(index, document, sequence_ids)),
        )

    def _visits(self, index: int, document: int, sequence_ids: Int64[np.ndarray, " K"]) -> Iterator[Visit]:
        """Yields the visits of the sequences of a source that hold the document, in the order of training."""
        traced = self.sources[index]
        parts = _by_sequence(traced.origins.origins(sequence_ids))
        for step in range(self.steps if len(sequence_ids) else 0):
            sources, positions = self.order.draws(step)
            (packs,) = np.nonzero(sources == index)
            drawn = traced.packed.plan.draw(positions[packs])
            for place in np.flatnonzero(np.isin(drawn.sequence_ids, sequence_ids)).tolist():
                at = int(np.searchsorted(drawn.offsets, place, side="right")) - 1
                position = positions[packs[at : at + 1]]
                for holder, start, tokens in parts[int(np.searchsorted(sequence_ids, drawn.sequence_ids[place]))]:
                    if holder == document:
                        yield Visit(
                            step=step + 1,
                            skipped=step in self.skipped,
                            epoch=int(traced.packed.plan.epochs(position)[0]),
                            pack=int(packs[at]),
                            stream_position=int(position[0]),
                            slot=place - int(drawn.offsets[at]),
                            sequence=int(drawn.sequence_ids[place]),
                            start=start,
                            tokens=tokens,
                        )

    def _parts(
        self, sources: Int64[np.ndarray, " M"], sequence_ids: Int64[np.ndarray, " M"]
    ) -> list[tuple[DocumentPart, ...]]:
        """Returns the parts of each sequence of a step."""
        parts: list[tuple[DocumentPart, ...]] = [()] * len(sequence_ids)
        for index, traced in enumerate(self.sources):
            (members,) = np.nonzero(sources == index)
            found = _by_sequence(traced.origins.origins(sequence_ids[members]))
            for member, triples in zip(members.tolist(), found, strict=True):
                parts[member] = tuple(DocumentPart(*triple, self._text(traced, *triple)) for triple in triples)
        return parts

    def _text(self, traced: TracedSource, document: int, start: int, tokens: int) -> str | None:
        if self.decode is None:
            return None
        begin = _span(traced, document)[0] + start
        return self.decode(traced.origins.document_file.read(begin, begin + tokens).tolist())

    def _index_of(self, source: str | None, document: int) -> int:
        names = [traced.name for traced in self.sources]
        if source is None and len(names) > 1:
            raise ConfigError(
                f"each source numbers its own documents, so document {document} may be of any of {', '.join(names)}: "
                "name one of them (--source)"
            )
        if source is not None and source not in names:
            raise ConfigError(f"the run has no source '{source}': its sources are {', '.join(names)}")
        return 0 if source is None else names.index(source)


def _span(traced: TracedSource, document: int) -> tuple[int, int]:
    """Returns first token in the file, and number of tokens, of a document."""
    offsets, lengths = traced.origins.document_file.spans(np.array([document]))
    return int(offsets[0]), int(lengths[0])


def _absence(traced: TracedSource, document: int) -> str:
    """Returns the reason why no sequence to train on holds a part of the document."""
    if traced.is_held_out(document):
        return "it is held out for validation"
    return "the recipe leaves it out: it is too short or too long, or has too few sentences"


def _sequences_of(traced: TracedSource, document: int) -> Int64[np.ndarray, " K"]:
    """Returns the sequences that hold a part of the document, ascending, by a scan of the source's."""
    found = [np.zeros(0, dtype=np.int64)]
    for start in range(0, traced.packed.view.count, _SCANNED):
        sequence_ids = np.arange(start, min(start + _SCANNED, traced.packed.view.count))
        origins = traced.origins.origins(sequence_ids)
        found.append(np.repeat(sequence_ids, origins.per_sequence)[origins.documents == document])
    return np.unique(np.concatenate(found))


def _by_sequence(origins: Origins) -> list[list[tuple[int, int, int]]]:
    """Returns (document, start, tokens) of each part of each sequence."""
    triples = list(zip(origins.documents.tolist(), origins.starts.tolist(), origins.tokens.tolist(), strict=True))
    ends = np.cumsum(origins.per_sequence).tolist()
    return [triples[end - count : end] for end, count in zip(ends, origins.per_sequence.tolist(), strict=True)]
