"""Batches of a Loader in the form that models of transformers take. It uses torch, and imports no transformers.

Shapes: T = slots of the micro-batch, S = segments. Packs are concatenated into one row: transformers tells sequences
apart by positions that restart, which holds for packs as well as for the sequences of one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Int

from evenpack.batch import ChosenTargets, PackedBatch, SlotTargets
from evenpack.data.tokens.own import IGNORED
from evenpack.errors import ConfigError
from evenpack.extras import require
from evenpack.losses import MASKED_TOKEN, NEXT_TOKEN

if TYPE_CHECKING:
    from torch import Tensor


def model_inputs(batch: PackedBatch, *, for_flash: bool = False) -> dict[str, Any]:
    """Returns the keyword arguments of a model for causal or masked language modelling.

    input_ids, position_ids  [1, T]; positions restart with each sequence, and in the padding of a pack
    labels                   [1, T]; -100 where nothing is predicted
    shift_labels             [1, T], of next tokens: what each slot predicts; transformers counts and predicts these
    use_cache                False, of next tokens: with a cache a decoder ignores positions and mixes sequences
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                             int32 [S + 1] twice and Python ints, if `for_flash`; all four or none

    There is no `attention_mask`: one of two axes would switch isolation off. Encoders on SDPA or eager attention do not
    look at positions and need `attention_masks`.

    Raises: ConfigError for a batch of numpy arrays, or with other targets than those of language models.
    """
    require("torch", "model_inputs")
    import torch

    if not isinstance(batch.tokens, torch.Tensor):
        raise ConfigError("models of transformers take torch tensors: make the loader with arrays='torch'")
    found = {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        **_labels(batch),
    }
    if for_flash:
        starts = segment_starts(batch)
        found |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        found |= {"max_length_q": batch.max_sequence_length, "max_length_k": batch.max_sequence_length}
    return found


def segment_starts(batch: PackedBatch) -> "Int[Tensor, ' S_plus_1']":
    """Returns the first slot of each segment, and the end; `batch.cu_seqlens` without the empty ones at its end."""
    starts = batch.cu_seqlens
    return starts[: int((starts < batch.slots).sum()) + 1]


def attention_masks(batch: PackedBatch, config: Any) -> "Tensor | dict[str, Tensor]":
    """Returns the `attention_mask` with which an encoder keeps sequences apart, on SDPA or eager attention.

    Args:
        config: of the model: `model.config`.

    Returns: a mask [1, 1, T, T]: for SDPA it is true where a token sees another, for eager attention it is added. For
        models whose layers differ, as ModernBERT's do, a dictionary with one for each kind of layer.

    Raises: ConfigError for other attention; on FlashAttention `model_inputs(batch, for_flash=True)` isolates.
    """
    require("torch", "attention_masks")
    import torch

    kind = config._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise ConfigError(
            f"masks are for attention by 'sdpa' or 'eager', this model's is '{kind}': load it with "
            "attn_implementation='sdpa', or give FlashAttention model_inputs(batch, for_flash=True)"
        )
    slots = torch.arange(batch.slots, device=batch.tokens.device)
    segments = torch.bucketize(slots, batch.cu_seqlens[1:], right=True)
    full = segments[:, None] == segments[None, :]
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" not in kinds:
        return _given(full, kind)
    near = (slots[:, None] - slots[None, :]).abs() <= config.sliding_window
    return {"full_attention": _given(full, kind), "sliding_attention": _given(full & near, kind)}


def _given(sees: "Bool[Tensor, 'T T']", kind: str) -> "Tensor":
    import torch

    if kind == "sdpa":
        return sees[None, None]
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, lowest)[None, None]


def _labels(batch: PackedBatch) -> Mapping[str, Any]:
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
