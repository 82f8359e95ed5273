"""What is known of a run's data before a step is planned: its average pack or sequence, and the epochs it makes."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from evenpack.data.config import DataConfig
from evenpack.data.manifest import PackingSummary
from evenpack.data.order.stages import Stage, StagedOrder
from evenpack.data.order.step_shape import Batching
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class AverageItem:
    """The exact average pack, or single sequence, with the sources weighted as the run draws them."""

    sequences: Fraction
    """Sequences, 1 or more: the packing factor."""
    tokens: Fraction
    row_slots: int
    """Slots that it could fill: the slots of a pack, or the longest possible sequence."""

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError(f"a packing factor is at least 1, got {float(self.sequences):g}")

    @property
    def fill(self) -> float:
        """Fraction of those slots that hold a token."""
        return float(self.tokens / self.row_slots)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The facts of a run's data from which its step and its length are computed."""

    item: AverageItem
    items_per_epoch: int | None
    """Packs or sequences of all sources that are drawn, together; None if unknown."""
    vocabulary_size: int

    @classmethod
    def of(cls, prepared: PreparedData, batching: Batching) -> "DataFacts":
        """Reads the manifest of prepared data. Raises: DataError if a source has nothing to train on."""
        return cls(
            item=average_item(prepared, batching),
            items_per_epoch=sum(
                items
                for name, items in items_of_an_epoch(prepared, batching).items()
                if prepared.config.sources[name].weight
            ),
            vocabulary_size=prepared.vocabulary_size,
        )


def average_item(
    prepared: PreparedData, batching: Batching, *, shares: Mapping[str, Fraction] | None = None
) -> AverageItem:
    """Returns the average item; `shares` are fractions of the sources in the draws; None: by their first weights.

    Raises: DataError if a source has nothing to train on.
    """
    packings = {name: training_packing(prepared, name) for name in prepared.source_names}
    return average_of(packings, shares or _by_weight(prepared.config), batching=batching, data=prepared.config)


def average_of(
    packings: Mapping[str, PackingSummary], shares: Mapping[str, Fraction], *, batching: Batching, data: DataConfig
) -> AverageItem:
    """Returns the average over sources by name, which provide these fractions of a step, packed as in `data`."""
    sequences = tokens = Fraction(0)
    for name, packing in packings.items():
        share = shares[name] / packing.items(batching)
        sequences += share * packing.sequences
        tokens += share * packing.tokens
    row_slots = data.pack_length if batching == "packs" else data.recipe.max_sequence_length
    return AverageItem(sequences=sequences, tokens=tokens, row_slots=row_slots)


def drawn_shares(config: RunConfig) -> dict[str, Fraction]:
    """Returns each source's fraction of all packs or sequences that a run draws in its own steps.

    Its length and step need to be settled only if the run has stages.
    """
    if not config.stages:
        return _by_weight(config.data)
    shares = order_of(config).shares(config.span.stop, first=config.span.start)
    return dict(zip(config.data.sources, shares, strict=True))


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """Returns the stages of a settled run."""
    return tuple(
        Stage(
            step=step,
            weights=tuple(source.weight for source in one.data.sources.values()),
            items_per_step=one.training.items_per_step,
            items_per_micro_batch=one.training.items_per_micro_batch,
        )
        for step, one in config.staged()
    )


def order_of(config: RunConfig) -> StagedOrder:
    """Returns the order of a settled run. Raises: ConfigError for weights that no mixture can have."""
    return StagedOrder(stages_of(config))


def _by_weight(data: DataConfig) -> dict[str, Fraction]:
    total = sum(source.weight for source in data.sources.values())
    return {name: Fraction(source.weight, total) for name, source in data.sources.items()}


def items_of_an_epoch(prepared: PreparedData, batching: Batching) -> dict[str, int]:
    """Returns the items of each source. Raises: DataError if one has nothing to train on."""
    return {name: training_packing(prepared, name).items(batching) for name in prepared.source_names}


def training_packing(prepared: PreparedData, source: str) -> PackingSummary:
    """Returns the packing of a source's training sequences. Raises: DataError if it has none."""
    packing = prepared.manifest.sources[source].train.packing
    if packing is None:
        raise DataError(f"source '{source}' has no sequence to train on: give it more documents, or leave it out")
    return packing
