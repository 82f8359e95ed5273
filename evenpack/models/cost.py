"""The parameters and the floating-point operations of a model, counted on the model itself.

Conventions, so that a reported MFU can be checked by hand:

- Matrix products only, 2 m n k operations each; norms, softmax, activations, rotations, dropout and embedding look-ups
  are left out.
- The backward pass is twice the forward pass. Work done again to save memory (activation checkpointing, attention
  scores and logits recomputed by fused kernels) is not counted, because it brings no progress.
- Causal attention counts the pairs (i, j) with j <= i of one segment: l (l + 1) / 2 for length l, not l².
  Bidirectional attention counts all l². A layer with a window counts the pairs that are at most so far apart
  (`visible_pairs.py`).
- An output head counts where a loss is taken: the masked-token head at the masked tokens, the pooler and the
  next-sentence head at each sequence's first token.
- Tokens that only pad a sequence are not useful work, including their attended pairs, and the head if they are targets.

Every count is linear in the work, so it is made once for a model, on the meta device, and kept. Torch is imported when
something is counted for the first time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import TYPE_CHECKING

from evenpack.losses import NEXT_SENTENCE
from evenpack.models.common.section import TransformerConfig
from evenpack.visible_pairs import total_pairs_within

if TYPE_CHECKING:
    from evenpack.batch import PackedBatch
    from evenpack.models.trace import Products

PASSES = 3
"""Passes over the blocks: one forward, and a backward of twice its work (gradients of inputs and weights)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The amount of data that goes through the model; adds up over micro-batches, ranks and steps."""

    slots: int
    """Positions that go through the blocks; each is in exactly one segment."""
    squared_lengths: int
    """Sum of length² over those segments."""
    head_slots: int
    """Positions whose logits are computed."""
    sequences: int
    """First tokens that go through the pooler and the next-sentence head, where the model has them."""
    pairs_within: Mapping[int, int] = field(default_factory=dict, hash=False)
    """For each window of the model's layers, the pairs of positions of one segment that are at most so far apart."""

    def __add__(self, other: "Work") -> "Work":
        if self.pairs_within.keys() != other.pairs_within.keys():
            raise ValueError(
                f"work within the windows {sorted(self.pairs_within)} and within {sorted(other.pairs_within)} does not "
                "add up: count both with the windows of one model (`config.windows`)"
            )
        numbers = [one.name for one in fields(self) if one.name != "pairs_within"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        pairs = {window: count + other.pairs_within[window] for window, count in self.pairs_within.items()}
        return Work(**sums, pairs_within=pairs)

    def attended_pairs(self, *, causal: bool, window: int | None = None) -> int:
        """Returns the pairs of positions that attend to each other: sum of l (l + 1) / 2, or of l².

        Raises: ValueError for a window whose pairs were not counted.
        """
        if window is not None and window not in self.pairs_within:
            raise ValueError(
                f"this work has no pairs within a window of {window}, only within {sorted(self.pairs_within)}: give "
                "what counts it the windows of the model (`config.windows`)"
            )
        pairs = self.squared_lengths if window is None else self.pairs_within[window]
        return (pairs + self.slots) // 2 if causal else pairs


def useful_work(batch: "PackedBatch") -> Work:
    """Returns the work on real tokens: in the blocks, in attention, and in the heads where a loss is taken.

    Padding is left out, so that a layout that pads more is not rewarded for it.
    """
    return Work(
        slots=batch.local_counts.tokens,
        squared_lengths=batch.squared_lengths,
        head_slots=batch.local_counts.real_targets,
        sequences=batch.local_counts.sequences,
        pairs_within=batch.pairs_within,
    )


def performed_work(batch: "PackedBatch") -> Work:
    """Returns the work on all slots, padding included, and on all rows of the heads; synchronises with the device."""
    lengths = batch.cu_seqlens.diff().long()
    next_sentences = batch.targets.get(NEXT_SENTENCE.name)
    return Work(
        slots=batch.slots,
        squared_lengths=int((lengths * lengths).sum()),
        head_slots=batch.head_rows,
        sequences=0 if next_sentences is None else next_sentences.labels.shape[0],
        pairs_within=total_pairs_within(lengths.cpu().numpy(), batch.pairs_within) if batch.pairs_within else {},
    )


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a model as it is built."""

    parameters: int
    """Trained numbers; a matrix that is used twice counts once."""
    merged: tuple[int, ...]
    """Elements of the matrices that are several layers in one, a sum for each kind: LAMB updates each kind apart from
    the rest."""
    matrices: tuple[int, ...]
    """Elements of the weights of linear layers in blocks, a sum for each shape that one layer has: Muon updates those
    of one shape together."""


def parameter_count(config: TransformerConfig, *, vocabulary_size: int, max_positions: int) -> int:
    """Returns the number of trained parameters; an output matrix that is the token embedding counts once."""
    return model_sizes(config, vocabulary_size=vocabulary_size, max_positions=max_positions).parameters


@cache
def model_sizes(config: TransformerConfig, *, vocabulary_size: int, max_positions: int) -> ModelSizes:
    """Builds the model without memory and returns its sizes."""
    import torch
    from torch import nn

    from evenpack.models.build import new_model
    from evenpack.models.common.layers import MergedLinear

    with torch.device("meta"):
        model = new_model(config, vocabulary_size=vocabulary_size, max_positions=max_positions)
    merged: dict[tuple[int, ...], int] = {}
    for module in model.modules():
        if isinstance(module, MergedLinear):
            merged[module.parts] = merged.get(module.parts, 0) + module.weight.numel()
    matrices: Counter[tuple[int, int]] = Counter()
    for name, module in model.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            for rows in module.parts if isinstance(module, MergedLinear) else (module.out_features,):
                matrices[rows, module.in_features] += rows * module.in_features
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        merged=tuple(merged.values()),
        matrices=tuple(matrices.values()),
    )


def step_flops(config: TransformerConfig, *, vocabulary_size: int, work: Work) -> int:
    """Returns the operations of forward and backward over the work of a micro-batch, a step or a run."""
    products = model_products(config, vocabulary_size=vocabulary_size)
    sizes = (0, work.slots, work.head_slots, work.sequences)
    linear = sum(factor * size for factor, size in zip(products.linear, sizes, strict=True))
    return PASSES * (linear + attention_flops(products, work))


def attention_flops(products: "Products", work: Work) -> int:
    """Returns the operations of the forward pass: scores and the weighted sums of values, in all layers and heads."""
    return sum(
        factor * work.attended_pairs(causal=causal, window=window)
        for (causal, window), factor in products.attention.items()
    )


@cache
def model_products(config: TransformerConfig, *, vocabulary_size: int) -> "Products":
    """Returns the matrix products of a forward pass, from two passes through few layers."""
    from evenpack.models.trace import Products, at_two_depths, count_products

    first, second, further = at_two_depths(config, partial(count_products, vocabulary_size=vocabulary_size), periods=1)

    def extended(one: int, other: int) -> int:
        return one + further * (other - one)

    attention: Mapping[tuple[bool, int | None], int] = {
        kind: extended(first.attention.get(kind, 0), factor) for kind, factor in second.attention.items()
    }
    # A deeper model may have windows that none of these layers has, and whose pairs are not counted.
    own = {kind: factor for kind, factor in attention.items() if factor}
    return Products(linear=tuple(map(extended, first.linear, second.linear)), attention=own)
