"""Generates DeepSpeed's configuration from the run file. No number is kept in two places."""

from copy import deepcopy
from typing import Any

from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError

_SET_ELSEWHERE = {
    "train_batch_size": "training.packs_per_step (or sequences_per_step)",
    "train_micro_batch_size_per_gpu": "training.packs_per_micro_batch (or sequences_per_micro_batch)",
    "gradient_accumulation_steps": "training.packs_per_step and training.packs_per_micro_batch",
    "gradient_clipping": "training.gradient_clipping",
    "torch_autocast": "training.precision",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "amp": "training.precision",
    "optimizer": "the optimizer: section",
    "scheduler": "the schedule: section",
    "zero_optimization.stage": "deepspeed.zero_stage",
    "timers.throughput": "metrics.jsonl, which holds evenpack's own measurements",
}
"""Keys of DeepSpeed that evenpack derives from the run file, and the keys that set them there."""

_REFUSED_KEYS = {
    "gradient_allreduce_op": "the loss is scaled for the mean over ranks",
    "managed_gradient_accumulation": "the engine relies on DeepSpeed's count of micro-batches",
    "checkpoint": "evenpack writes checkpoints in the background and converts them itself",
    "datastates_ckpt": "evenpack writes checkpoints in the background itself",
    "zero_optimization.round_robin_gradients": "DeepSpeed's checkpoints then name the wrong places of the parameters",
    "zero_optimization.elastic_checkpoint": "its checkpoints lack what resuming at another ZeRO stage needs",
    "zero_optimization.zero_hpz_partition_size": "no checkpoint of it has been resumed with other ranks",
    "zero_optimization.mics_shard_size": "DeepSpeed 0.19 has no MiCS",
    "zero_optimization.compute_grad_norm": "each step records the norm and stops at one that is not finite",
}
"""Keys of DeepSpeed that would break evenpack's guarantees, and the reasons."""

_OFFLOADS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param")
"""Keys of `zero_optimization` by which DeepSpeed moves what ZeRO divides to the host."""


def deepspeed_config(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Returns the dict for `deepspeed.initialize`: derived keys, and `deepspeed.extra` merged in.

    Raises: ConfigError if `world_size` cannot divide the step, or `extra` holds a key that evenpack derives or that has
        no place at this ZeRO stage.
    """
    training, section = config.training, config.deepspeed
    derived: dict[str, Any] = {
        "train_batch_size": training.items_per_step,
        "train_micro_batch_size_per_gpu": training.items_per_micro_batch,
        "gradient_accumulation_steps": training.micro_batches(world_size),
        **section.sharding.deepspeed_settings(training.gradient_clipping),
        # It would synchronise the device before and after each step.
        "timers": {"throughput": {"enabled": False}},
    }
    if training.precision == "bf16_autocast":
        derived["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            # By default ZeRO would reduce the gradients of linear layers in bfloat16: they would not be an exact mean.
            "lower_precision_safe_modules": [],
        }
    _refuse(config)
    return _merged(derived, section.extra)


def _refuse(config: RunConfig) -> None:
    """Checks `extra`; at ZeRO 0 DeepSpeed ignores what is to be moved to the host, or fails."""
    extra = config.deepspeed.extra
    for name, place in _SET_ELSEWHERE.items():
        if _holds(extra, name):
            raise ConfigError(f"deepspeed.extra sets '{name}', which evenpack derives: set {place} instead")
    for name, reason in _REFUSED_KEYS.items():
        if _holds(extra, name):
            raise ConfigError(f"deepspeed.extra sets '{name}', which must keep its default: {reason}")
    for name in _OFFLOADS if config.deepspeed.zero_stage == 0 else ():
        if _holds(extra, f"zero_optimization.{name}"):
            raise ConfigError(
                f"deepspeed.extra sets 'zero_optimization.{name}' at deepspeed.zero_stage=0, where nothing is divided "
                f"that could be moved to the host, with optimizer.kind {config.optimizer.kind}: leave it out"
            )


def _holds(values: Any, dotted_name: str) -> bool:
    for key in dotted_name.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _merged(derived: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Returns `derived` with `extra` added, section by section.

    Raises: ConfigError if `extra` puts a single value where evenpack writes a section.
    """
    merged = dict(derived)
    for name, value in extra.items():
        if name in derived and not isinstance(value, dict):
            raise ConfigError(f"deepspeed.extra.{name} must be a section of DeepSpeed's keys, found {value!r}")
        merged[name] = {**derived.get(name, {}), **value} if isinstance(value, dict) else value
    return deepcopy(merged)
