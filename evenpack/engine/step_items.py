"""What a step is made of, packs or single sequences, on average over what a run draws."""

from dataclasses import dataclass
from fractions import Fraction

from evenpack.data.order.step_shape import Batching
from evenpack.data.prepare.manifest import PackingSummary
from evenpack.data.prepared import PreparedData
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class AverageItem:
    """A pack, or a single sequence, exactly; the sources weighted as the run draws them."""

    sequences: Fraction
    """1 or more: the packing factor."""
    tokens: Fraction
    row_slots: int
    """Slots that it could fill: of a pack, or of the longest sequence there can be."""

    @property
    def fill(self) -> float:
        """Share of those slots that hold a token."""
        return float(self.tokens / self.row_slots)


def average_item(prepared: PreparedData, batching: Batching) -> AverageItem:
    """Raises: DataError if a source has nothing to train on."""
    counts = items_of_an_epoch(prepared, batching)
    total = sum(prepared.weights)
    sequences = tokens = Fraction(0)
    for name, weight in zip(prepared.source_names, prepared.weights, strict=True):
        packing = training_packing(prepared, name)
        share = Fraction(weight, total * counts[name])
        sequences += share * packing.sequences
        tokens += share * packing.tokens
    row_slots = prepared.pack_length if batching == "packs" else prepared.config.recipe.max_sequence_length
    return AverageItem(sequences=sequences, tokens=tokens, row_slots=row_slots)


def items_of_an_epoch(prepared: PreparedData, batching: Batching) -> dict[str, int]:
    """Of each source. Raises: DataError if one has nothing to train on."""
    packings = {name: training_packing(prepared, name) for name in prepared.source_names}
    return {name: packing.packs if batching == "packs" else packing.sequences for name, packing in packings.items()}


def training_packing(prepared: PreparedData, source: str) -> PackingSummary:
    """How a source's training sequences were packed. Raises: DataError if it has none."""
    packing = prepared.manifest.sources[source].train.packing
    if packing is None:
        raise DataError(f"source '{source}' has no sequence to train on: give it more documents, or leave it out")
    return packing
