"""Batches of a Loader in the form that models of transformers take. It uses torch, and imports no transformers.

Shapes: T = slots of the micro-batch, S = segments. Packs are concatenated into one row: transformers tells sequences
apart by positions that restart, which holds for packs as well as for the sequences of one.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxtyping import Bool, Int

from evenpack.batch import ChosenTargets, PackedBatch, SlotTargets
from evenpack.data.tokens.own import IGNORED
from evenpack.errors import ConfigError
from evenpack.losses import MASKED_TOKEN, NEXT_TOKEN

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Mask = Literal["none", "block"]
"""No mask, so that the model finds borders in positions that restart, or a mask of the blocks of sequences."""

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that attend, as `layer_types` of a configuration names them."""


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What one model is given with each batch; `prove_isolation` returns the one that keeps its sequences apart.

    Called with a batch, it returns the keyword arguments of the model:

    input_ids, position_ids  [1, T]; positions restart with each sequence, and in the padding of a pack
    labels                   [1, T]; -100 where nothing is predicted
    shift_labels             [1, T], of next tokens: what each slot predicts; transformers counts and predicts these
    use_cache                False, of next tokens: with a cache a decoder ignores positions and mixes sequences
    attention_mask           with a block mask: [1, 1, T, T], or a dictionary of these by kind of layer
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                             for FlashAttention: int32 [S + 1] twice and Python ints; all four or none

    Without a block mask there is no `attention_mask`: one of two axes would switch isolation off.
    """

    config: Any
    """The model's, `model.config`; None for a model that has none."""
    causal: bool
    """Whether it predicts next tokens; otherwise masked ones."""
    mask: Mask
    first_position: int
    """The position of a sequence's first token: RoBERTa's families count from behind their padding."""
    dtype: "torch.dtype"
    """What the model computes in, of which an added mask must be."""
    embeddings: int | None
    """Rows of the model's table of tokens, of which `config.vocab_size` may use fewer; None: not checked."""
    takes: frozenset[str] | None = None
    """The arguments of the model's forward; None: any."""

    def __call__(self, batch: PackedBatch) -> dict[str, Any]:
        """Returns the keyword arguments for this batch.

        Raises: ConfigError for a batch of numpy arrays, other targets than those of language models, or tokens, where
            they are on the CPU, that the model has no embedding of.
        """
        import torch

        if not isinstance(batch.tokens, torch.Tensor):
            raise ConfigError("models of transformers take torch tensors: make the loader with arrays='torch'")
        if batch.tokens.device.type == "cpu":  # elsewhere it would wait for the device
            self.require_embeddings(batch)
        found = {
            "input_ids": batch.tokens[None],
            **labels_of(batch),
            **self.boundaries(batch.position_ids, batch.cu_seqlens, batch.max_sequence_length),
        }
        return {name: value for name, value in found.items() if self.takes is None or name in self.takes}

    def require_embeddings(self, batch: PackedBatch) -> None:
        """Raises: ConfigError for token ids that the model has no embedding of."""
        if self.embeddings is None:
            return
        size, largest = (
            getattr(text_config(self.config), "vocab_size", None) or self.embeddings,
            int(batch.tokens.max()),
        )
        if largest >= min(size, self.embeddings):
            raise ConfigError(
                f"token id {largest} is beyond the model: its vocabulary (config.vocab_size) has "
                f"{size} entries, and its table of embeddings {self.embeddings} rows. Take the tokenizer of this "
                "model, or model.resize_token_embeddings"
            )

    def boundaries(
        self, positions: "Int[Tensor, ' T']", cu_seqlens: "Int[Tensor, ' S_plus_1']", longest: int
    ) -> dict[str, Any]:
        """Returns what tells the model where sequences begin.

        Args:
            positions: from 0 in each segment.
            cu_seqlens: starts of the segments, and their end; it may end in empty ones.
            longest: at least the length of the longest segment.
        """
        found: dict[str, Any] = {"position_ids": positions[None] + self.first_position}
        if self.mask == "block":
            found["attention_mask"] = block_masks(
                positions, cu_seqlens, self.config, causal=self.causal, dtype=self.dtype
            )
        elif "flash" in attention_of(self.config):
            starts = _starts(cu_seqlens, len(positions))
            found |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
            found |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
        return found


def attention_of(config: Any) -> str:
    """Returns the name of the attention in transformers that the model uses."""
    return str(getattr(config, "_attn_implementation", None))


def segment_starts(batch: PackedBatch) -> "Int[Tensor, ' S_plus_1']":
    """Returns the first slot of each segment, and the end; `batch.cu_seqlens` without the empty ones at its end."""
    return _starts(batch.cu_seqlens, batch.slots)


def _starts(cu_seqlens: "Int[Tensor, ' S_plus_1']", slots: int) -> "Int[Tensor, ' S_plus_1']":
    return cu_seqlens[: int((cu_seqlens < slots).sum()) + 1]


def block_masks(
    positions: "Int[Tensor, ' T']",
    cu_seqlens: "Int[Tensor, ' S_plus_1']",
    config: Any,
    *,
    causal: bool,
    dtype: "torch.dtype",
) -> "Tensor | dict[str, Tensor | None]":
    """Returns the `attention_mask` that keeps sequences apart, with the window or the chunk of each kind of layer.

    Args:
        positions: from 0 in each segment; chunks are those of a sequence, as of a document alone.
        config: of the model: `model.config`.
        dtype: what the model computes in.

    Returns: a mask [1, 1, T, T]: for SDPA it is true where a token sees another, for other attention it is added. For
        models whose layers differ, as ModernBERT's do, a dictionary by kind of layer: None where they do not attend.
    """
    import torch

    config = text_config(config)
    slots = torch.arange(len(positions), device=positions.device)
    segments = torch.bucketize(slots, cu_seqlens[1:], right=True)
    within = segments[:, None] == segments[None, :]
    if causal:
        within = within.tril()
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    is_added = attention_of(config) != "sdpa"

    def mask(kind: str) -> "Tensor":
        sees = within
        if kind == "sliding_attention" and window:
            sees = within & ((slots[:, None] - slots[None, :]).abs() <= window - causal)
        elif kind == "chunked_attention" and chunk:
            chunks = positions // chunk
            sees = within & (chunks[:, None] == chunks[None, :])
        return _added(sees, dtype) if is_added else sees[None, None]

    kinds = sorted(set(getattr(config, "layer_types", None) or ("sliding_attention",)))
    attending = [kind for kind in kinds if kind in _ATTENTION]
    if len(attending) < 2:  # layers without attention make their own of it: none
        return mask(next(iter(attending), "full_attention"))
    return dict.fromkeys(kinds) | {kind: mask(kind) for kind in attending}


def _added(sees: "Bool[Tensor, 'T T']", dtype: "torch.dtype") -> "Tensor":
    import torch

    zeros = torch.zeros(sees.shape, device=sees.device, dtype=dtype)
    return zeros.masked_fill(~sees, torch.finfo(dtype).min)[None, None]


def text_config(config: Any) -> Any:
    """Returns the configuration of the language model within one of several modalities."""
    if hasattr(config, "get_text_config"):
        with contextlib.suppress(ValueError):  # nested are an encoder's and a decoder's
            return config.get_text_config()
    return config


def labels_of(batch: PackedBatch) -> Mapping[str, Any]:
    """Returns what a language model predicts, as `ModelInputs` describes it. Raises: ConfigError for other targets."""
    import torch

    name, targets = next(iter(batch.targets.items()))
    if name == NEXT_TOKEN.name and isinstance(targets, SlotTargets):
        shifted = targets.labels.masked_fill(targets.weights == 0, IGNORED)
        # A model that shifts labels itself predicts the same targets: no segment's last slot predicts anything.
        labels = torch.cat([shifted.new_full((1,), IGNORED), shifted[:-1]])
        return {"labels": labels[None], "shift_labels": shifted[None], "use_cache": False}
    if name == MASKED_TOKEN.name and isinstance(targets, ChosenTargets):
        used = targets.weights > 0
        if not (targets.weights[used] == 1).all():
            raise ConfigError("labels have no weights: give the objective a masked-token loss divided_by='targets'")
        labels = torch.full_like(batch.tokens, IGNORED)
        labels[targets.positions[used]] = targets.labels[used]
        return {"labels": labels[None]}
    raise ConfigError(f"language models predict {NEXT_TOKEN.name} or {MASKED_TOKEN.name}, this batch has {name}")
