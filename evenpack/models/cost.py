"""What a model costs: parameters, floating-point operations, and the peak of the device they run on.

Conventions, so that a reported MFU can be checked by hand:

- Matrix products only, 2 m n k operations each; norms, softmax, GELU, dropout and embedding look-ups are left out.
- The backward pass is twice the forward pass. Work done again to save memory (activation checkpointing, attention
  scores and logits recomputed by fused kernels) does not count: it is no progress.
- Causal attention counts the pairs (i, j) with j <= i of one segment: l (l + 1) / 2 for length l, not l².
  Bidirectional attention counts all l².
- The LM head counts where a loss is taken: for BERT at masked tokens, its pooler and next-sentence head at each
  sequence's first token.

`useful_work` leaves padding out, so a layout that pads more is not rewarded for it; `performed_work` is all that was
put through the model. Nothing here depends on the hardware but the last table.
"""

from dataclasses import dataclass, fields

import torch

from evenpack.batch import MaskedTargets, PackedBatch
from evenpack.models.layers import FEED_FORWARD_RATIO
from evenpack.models.model_config import BertConfig, Gpt2Config, ModelConfig

_PASSES = 3
"""Forward once, backward twice its work: gradients of the inputs and of the weights."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What goes through the model; adds up over micro-batches, ranks and steps."""

    slots: int
    """Positions that pass the blocks; each lies in exactly one segment."""
    squared_lengths: int
    """Sum of length² over those segments."""
    head_slots: int
    """Positions whose logits are computed."""
    sequences: int
    """First tokens that pass the pooler and the next-sentence head, where the model has them."""

    def __add__(self, other: "Work") -> "Work":
        return Work(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    @property
    def causal_pairs(self) -> int:
        """Pairs of positions that attend: sum of l (l + 1) / 2."""
        return (self.squared_lengths + self.slots) // 2


def useful_work(batch: PackedBatch) -> Work:
    """Real tokens, real segments, and the positions and sequences that count in the loss."""
    return Work(
        slots=batch.local_counts.tokens,
        squared_lengths=batch.squared_lengths,
        head_slots=batch.local_counts.targets,
        sequences=batch.local_counts.sequences,
    )


def performed_work(batch: PackedBatch) -> Work:
    """All slots, padding and its segments included, and all rows of the heads; waits for the device if it is there."""
    lengths = batch.cu_seqlens.diff().to(torch.int64)
    return Work(
        slots=batch.slots,
        squared_lengths=int((lengths * lengths).sum()),
        head_slots=batch.targets.labels.shape[0],
        sequences=batch.targets.sequence_starts.shape[0] if isinstance(batch.targets, MaskedTargets) else 0,
    )


def parameter_count(config: ModelConfig, *, vocabulary_size: int, max_positions: int) -> int:
    """Trained numbers of the model; an output matrix that is the token embedding counts once."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    biases_per_block = (3 + 1 + FEED_FORWARD_RATIO + 1) * width
    norm = 2 * width
    position_rows = max_positions if config.positions == "learned" else 0
    embeddings = (vocabulary_size + position_rows) * width
    blocks = layers * (_block_weights(width) + biases_per_block + 2 * norm)
    if isinstance(config, Gpt2Config):
        return embeddings + blocks + norm
    dense = width * width + width
    masked_token_head = dense + norm + vocabulary_size
    next_sentence_head = dense + 2 * width + 2 if config.next_sentence else 0
    return embeddings + config.token_types * width + norm + blocks + masked_token_head + next_sentence_head


def step_flops(config: ModelConfig, *, vocabulary_size: int, work: Work) -> int:
    """Operations of forward and backward over `work`: a micro-batch's, a step's or a run's; see the conventions."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    blocks = 2 * layers * _block_weights(width) * work.slots
    pairs = work.causal_pairs if isinstance(config, Gpt2Config) else work.squared_lengths
    scores_and_values = 2 * (2 * layers * width * pairs)
    heads = 2 * width * vocabulary_size * work.head_slots
    if isinstance(config, BertConfig):
        heads += 2 * width * width * work.head_slots
        heads += 2 * width * (width + 2) * work.sequences if config.next_sentence else 0
    return _PASSES * (blocks + scores_and_values + heads)


def _block_weights(width: int) -> int:
    """Elements of a block's matrices: query, key, value, output, and the two of the feed-forward layer."""
    return (3 + 1 + 2 * FEED_FORWARD_RATIO) * width * width


_PEAK_TERAFLOPS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("H100", "PCIe"), 756.0, 51.2),
    (("H100", "NVL"), 835.5, 60.0),
    (("H100", "HBM3"), 989.4, 66.9),
    (("H200", "NVL"), 835.5, 60.0),
    (("H200",), 989.4, 66.9),
    (("GH200",), 989.4, 66.9),
    (("B200",), 2250.0, 75.0),
    (("A100",), 312.0, 19.5),
)
"""Words in the device's name, then dense peaks: 16-bit tensor cores, and FP32 with TF32 off (torch's default).

Sources, sparsity's factor of two taken out: NVIDIA's H100 architecture white paper (table 2), data sheets of H100 NVL,
H200, H200 NVL, GH200, HGX B200 and A100. The first row that matches counts.
"""


def device_peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense peak in operations a second of one device, or None where it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it. A slice of a card (MIG) has no known peak.
        dtype: of the matrix products: bfloat16, float16 or float32.
    """
    words = device_name.replace("-", " ").split()
    if "MIG" in words:
        return None
    for names, half_precision, single_precision in _PEAK_TERAFLOPS:
        if all(name in words for name in names):
            by_dtype = {torch.bfloat16: half_precision, torch.float16: half_precision, torch.float32: single_precision}
            return by_dtype[dtype] * 1e12 if dtype in by_dtype else None
    return None
