"""Estimated seconds of a micro-batch: exact operations at rates that were measured on one H100.

The rates are those of compiled steps of BERT-large and GPT-2 124M in BF16 (docs/gpu.md, "Measured on one H100";
`benchmarks/results/h100_2026-11-27_*.json`). Those two steps are reproduced to 3 %; they were measured, so this is no
independent check. A step of GPT-2 XL was measured with a slower head and a larger room for segments than runs have
today, and takes 20 % longer than the estimate.
"""

from dataclasses import dataclass

from evenpack.engine.optimizers.config import OptimizerBase
from evenpack.engine.resolving.cost_model import LinearSeconds
from evenpack.errors import ConfigError
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import PASSES, model_products, model_sizes


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """What a device reached in compiled BF16 steps. A channel is one of the model's width, in one layer."""

    products: float
    """Operations of matrix products per second: 774 TFLOP/s in BERT-large's blocks, 727 in those of GPT-2 124M, 744 in
    its head."""
    attention: float
    """Operations of attention per second, in addition to `attention_per_slot`. Both are least squares of four times, to
    12 %: 96 sequences of 256, 95 causal ones of 344, and the steps of BERT-large (26.3 ms) and GPT-2 124M (25.6 ms
    without its empty segments). Heads have 64 channels."""
    attention_per_slot: float
    """Seconds per slot and channel that attention takes whatever the lengths, as short sequences do not fill tiles."""
    element_wise: float
    """Seconds of element-wise kernels per slot and channel: 34.7 and 31.5 ms of the steps."""
    loss: float
    """Seconds per logit outside of products: 15 ms of 3.3 G in GPT-2 124M's step."""
    weights: float
    """Seconds per parameter and micro-batch, in which weights are cast and gradients added: 24 bytes at 3.02 TB/s."""
    update: dict[str, float]
    """Seconds per parameter of norm, clipping and update, by optimizer: 9.7 ms for BERT-large, 2.2 for GPT-2 124M."""
    gaps: float
    """Seconds of a step in which no kernel runs."""


RATES = {
    "h100": MeasuredRates(
        products=750e12,
        attention=180e12,
        attention_per_slot=17.8e-12,
        element_wise=57e-12,
        loss=4.55e-12,
        weights=7.95e-12,
        update={"adamw": 17.5e-12, "lamb": 28.8e-12},
        gaps=5e-3,
    )
}
"""The measured rates by device, as `device_peaks.py` names it."""


def linear_seconds(
    model: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    head_share: float,
    optimizer: OptimizerBase,
    device: str,
) -> LinearSeconds:
    """Returns the estimate of a model on one device, compiled, without communication.

    Args:
        head_share: rows of the output head per slot: 1 for next tokens.

    Raises: ConfigError for a device or an optimizer without measured rates.
    """
    rates = RATES.get(device)
    if rates is None or optimizer.kind not in rates.update:
        known = "; ".join(f"{name} with {', '.join(one.update)}" for name, one in RATES.items())
        raise ConfigError(
            f"seconds are estimated from rates that were measured on {known}, and none were on {device} with "
            f"{optimizer.kind}: measure a cost model by `evenpack study throughput RUN.yaml --cost-model FILE.json`"
        )
    products = model_products(model, vocabulary_size=vocabulary_size)
    parameters = model_sizes(model, vocabulary_size=vocabulary_size, max_positions=max_positions).parameters
    channels = model.shape["layers"] * model.shape["hidden_size"]
    per_squared_length, per_pair_within, per_diagonal = 0.0, dict.fromkeys(model.windows, 0.0), 0.0
    for (causal, window), operations in products.attention.items():
        per_pair = PASSES * operations / rates.attention / (2 if causal else 1)
        per_diagonal += per_pair if causal else 0.0  # half of a square, and half of its diagonal
        if window is None:
            per_squared_length += per_pair
        else:
            per_pair_within[window] += per_pair
    _, per_slot, per_head_slot, _ = products.linear
    return LinearSeconds(
        constant=parameters * rates.weights,
        per_slot=PASSES * (per_slot + head_share * per_head_slot) / rates.products
        + channels * (rates.element_wise + rates.attention_per_slot)
        + head_share * vocabulary_size * rates.loss
        + per_diagonal,
        per_squared_length=per_squared_length,
        per_pair_within=per_pair_within,
        per_step=parameters * rates.update[optimizer.kind] + rates.gaps,
    )
