"""Provides sentence pairs in memory, and small prepared runs of them, for tests that need BERT's data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import run_files
from prepared_files import sentence_documents, write_jsonl
from sources import ListView

from evenpack.data.batches.objectives import DynamicMasks
from evenpack.data.order.plan import PackPlan
from evenpack.data.order.selection import PackedSource
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.recipes import MaskingConfig, Recipe, SentencePairsRecipe
from evenpack.data.sequences import MaskedPairsView, SentencePairsView
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.data.tokens.file import TokenFile
from evenpack.engine.config import RunConfig
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, Divisor

PAD, CLS, SEP, MASK = 0, 2, 3, 4
VOCABULARY_SIZE = 90
REDUCTIONS: dict[str, Divisor] = {"token": "targets", "sequence": "sequences", "pack": "packs"}
"""What divides a loss, by the values of `model.mlm_reduction` and `model.next_sentence_reduction`."""
_FIRST_ORDINARY = 5
_FIRST_CONTINUATION = 50
"""Ids from here on go on with the word before."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One sequence as it is stored."""

    tokens: list[int]
    first_length: int
    """Of [CLS] A [SEP]."""
    label: int


class TokensInMemory(TokenFile):
    """A token file in memory."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.prefix = Path("memory")
        self.documents = len(sequences)
        self._tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.uint16)
        self.tokens = len(self._tokens)
        self.dtype = self._tokens.dtype
        self.document_offsets = np.cumsum([0, *map(len, sequences)])

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = self.document_offsets[documents]
        return starts, self.document_offsets[documents + 1] - starts


def random_sentence_pairs(halves: Sequence[tuple[int, int]], *, seed: int) -> list[Pair]:
    """Returns pairs whose A and B have the given numbers of tokens, without the special ones."""
    random = np.random.default_rng(seed)
    pairs = []
    for first, second in halves:
        a, b = (random.integers(_FIRST_ORDINARY, VOCABULARY_SIZE, count).tolist() for count in (first, second))
        label = int(random.integers(2))
        pairs.append(Pair(tokens=[CLS, *a, SEP, *b, SEP], first_length=first + 2, label=label))
    return pairs


def random_halves(count: int, *, longest: int, seed: int) -> list[tuple[int, int]]:
    """Returns the lengths of As and Bs; the longest pair has exactly `longest` tokens with its special ones."""
    random = np.random.default_rng(seed)
    halves = [(int(random.integers(1, longest - 4)), 0) for _ in range(count)]
    return [(first, int(random.integers(1, longest - 3 - first + 1))) for first, _ in halves[1:]] + [(1, longest - 4)]


def with_own_masks(pairs: Sequence[Pair], *, seed: int) -> tuple[list[Pair], list[dict[int, int]]]:
    """Returns the pairs as model input, with the label of each masked position: none, all, or some of them."""
    random = np.random.default_rng(seed)
    seen, masks = [], []
    for pair in pairs:
        ordinary = np.flatnonzero(~np.isin(pair.tokens, (PAD, CLS, SEP, MASK)))
        places = np.sort(random.choice(ordinary, int(random.integers(len(ordinary) + 1)), replace=False)).tolist()
        shown = dict(enumerate(pair.tokens))
        for place in places:
            replacement = (MASK, int(random.integers(_FIRST_ORDINARY, VOCABULARY_SIZE)), shown[place])
            shown[place] = replacement[int(random.choice(3, p=[0.6, 0.2, 0.2]))]
        seen.append(replace(pair, tokens=list(shown.values())))
        masks.append({place: pair.tokens[place] for place in places})
    return seen, masks


def pair_source(
    pairs: Sequence[Pair],
    *,
    pack_length: int,
    longest: int,
    key: int = 7,
    masks: Sequence[Mapping[int, int]] | None = None,
) -> PackedSource:
    """Returns a source of these pairs; `key` identifies it and draws its packs. `masks`: the stored ones."""
    view = _pairs_view(pairs, longest)
    if masks is not None:
        view = _masked_view(view, masks)
    histogram = LengthHistogram.from_lengths(view.lengths(), longest=longest)
    packing = pack(histogram, "longest_pack_first", pack_length=pack_length)
    plan = PackPlan(packing, np.argsort(view.lengths(), kind="stable"), key=key)
    return PackedSource(view=view, plan=plan, key=key)


def _masked_view(view: SentencePairsView, masks: Sequence[Mapping[int, int]]) -> MaskedPairsView:
    counts = np.array([len(of_pair) for of_pair in masks], dtype=np.int64)
    most = np.zeros(view.max_sequence_length + 1, dtype=np.uint16)
    for length, count in zip(view.lengths().tolist(), counts.tolist(), strict=True):
        most[length] = max(most[length], count)
    return MaskedPairsView(
        recipe=view.recipe.model_copy(update={"static_masks": MaskingConfig()}),
        token_file=view.token_file,
        accounting=view.accounting,
        max_segments_per_sequence=1,
        directory=None,
        first_segment_lengths=view.first_segment_lengths,
        next_sentence_labels=view.next_sentence_labels,
        mask_offsets=np.append(0, np.cumsum(counts)),
        mask_positions=np.array([place for of_pair in masks for place in of_pair], dtype=np.uint16),
        mask_labels=np.array([label for of_pair in masks for label in of_pair.values()], dtype=np.int32),
        most_masks=most,
    )


def _pairs_view(pairs: Sequence[Pair], longest: int) -> SentencePairsView:
    lengths = ListView(sequences=[[len(pair.tokens)] for pair in pairs], max_sequence_length=longest)
    return SentencePairsView(
        recipe=SentencePairsRecipe(kind="sentence_pairs", max_sequence_length=longest),
        token_file=TokensInMemory([pair.tokens for pair in pairs]),
        accounting=lengths.accounting,
        max_segments_per_sequence=1,
        directory=None,
        first_segment_lengths=np.array([pair.first_length for pair in pairs], dtype=np.uint16),
        next_sentence_labels=np.array([pair.label for pair in pairs], dtype=np.uint8),
    )


def masked_objective(
    *,
    seed: int = 3,
    reduction: Literal["token", "sequence"] = "token",
    next_sentence_reduction: Literal["sequence", "pack"] = "sequence",
    recipe: Recipe | None = None,
    **masking: Any,
) -> DynamicMasks:
    """Returns BERT's objective over the vocabulary of this file; `recipe` None: sentence pairs."""
    ids = np.arange(VOCABULARY_SIZE)
    per_token, per_pair = REDUCTIONS[reduction], REDUCTIONS[next_sentence_reduction]
    return DynamicMasks(
        recipe=recipe or SentencePairsRecipe(kind="sentence_pairs", max_sequence_length=20),
        masking=MaskingConfig(**masking),
        vocabulary=MaskingVocabulary(
            mask_id=MASK, special=np.isin(ids, (PAD, CLS, SEP, MASK)), continues=ids >= _FIRST_CONTINUATION
        ),
        seed=seed,
        masked_token=replace(MASKED_TOKEN, divided_by=per_token),
        next_sentence=replace(NEXT_SENTENCE, divided_by=per_pair),
    )


def pair_run_values(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Writes a run file over two sources of sentences to `folder`; `sections` change values, section by section."""
    for number, name in enumerate(("wiki", "code")):
        write_jsonl(folder / f"{name}.jsonl", sentence_documents(60 - 25 * number, seed=number))
    values = run_files.pair_run_values(
        "bert",
        folder,
        data={
            "sources": {
                "wiki": {"kind": "jsonl", "path": str(folder / "wiki.jsonl"), "weight": 2},
                "code": {"kind": "jsonl", "path": str(folder / "code.jsonl")},
            },
            "validation_fraction": 0.2,
            "recipe": {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 2},
            "pack_length": 96,
        },
    )
    return {**values, **{name: {**values.get(name, {}), **changes} for name, changes in sections.items()}}


def pair_run(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Returns the same run as a configuration; nothing is prepared."""
    return run_files.run_config(pair_run_values(folder, **sections))
