"""The memory of ranks on a CPU against that of their machine, before a model is built: the kernel would kill them."""

from evenpack.data.mapped_pages import memory_bytes
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import FREE_SHARE, FittingSearch, MicroBatchSize, micro_batch_size, training_memory
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError
from evenpack.models.common.section import FEED_FORWARD_RATIO
from evenpack.units import FP32_BYTES, counted

_GIGABYTE = 1e9
_NUMBERS_OF_A_SLOT = 16
"""More numbers, in units of its widest layer, than a block keeps of a slot: no shipped run has 8."""


def require_host_memory(run: ResolvedRun, *, ranks: int, ranks_here: int) -> None:
    """Checks that ranks on this machine's CPU have memory for a step, by what they need at the least.

    That is weights, gradients, the optimizer's state and activations, as estimated for a GPU, without buffers and
    logits. Torch is imported only where that may be too much.

    Raises: ConfigError with what is needed, what is there, and settings that would fit.
    """
    config, vocabulary_size = run.config, run.prepared.vocabulary_size
    size, room = micro_batch_size(config, run.item), memory_bytes()
    share = room // ranks_here
    if generous_bytes(config, size, vocabulary_size=vocabulary_size) <= share:
        return
    phases = training_memory(config, size, vocabulary_size=vocabulary_size, ranks=ranks).phases
    least = max(one.parameters + one.gradients + one.optimizer + one.activations for one in phases)
    if least <= share:
        return
    batching, items = config.training.batching, config.training.items_per_micro_batch
    usable = int(share * (1 - FREE_SHARE))
    search = FittingSearch(item=run.item, vocabulary_size=vocabulary_size, ranks=ranks, usable=usable)
    fitting = [
        " ".join([*found.overrides, f"training.{batching}_per_micro_batch={found.items_per_micro_batch}"])
        for found in search.alternatives(config)
    ]
    raise ConfigError(
        f"{counted(ranks_here, 'rank')} on this machine's CPU would need at least {_shown(ranks_here * least)}: "
        f"{_shown(least)} for each, estimated for a micro-batch of {items:,} {batching} "
        f"({size.slots:,} slots). It has {_shown(room)} in all, or its control group has, and the kernel would "
        "kill them. "
        + (f"What fits: {'; or '.join(fitting)}" if fitting else "Take a smaller model, or a larger machine")
    )


def _shown(count: int) -> str:
    return f"{count / _GIGABYTE:,.1f} GB"


def generous_bytes(config: RunConfig, size: MicroBatchSize, *, vocabulary_size: int) -> int:
    """Returns more than a rank needs, by sizes of the run file alone: without torch, and far from exact."""
    shape = config.model.shape
    hidden = shape["hidden_size"]
    widest = max(FEED_FORWARD_RATIO * hidden, *shape.values())
    matrices = shape["layers"] * 2 * FEED_FORWARD_RATIO * hidden * widest
    parameters = matrices + (2 * vocabulary_size + config.max_positions) * hidden
    kept = size.slots * (shape["layers"] + 1) * _NUMBERS_OF_A_SLOT * widest
    return FP32_BYTES * ((4 + config.optimizer.fp32_states) * parameters + kept)
