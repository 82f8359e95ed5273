"""The run file -> what DeepSpeed is told. No number is kept in two places."""

from copy import deepcopy
from typing import Any

from evenpack.engine.config import RunConfig, TrainingSection
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
"""Keys of DeepSpeed that follow from the rest of the run file, and what sets them there."""

_WOULD_BE_WRONG = {
    "gradient_allreduce_op": "the loss is scaled for the mean over ranks",
    "managed_gradient_accumulation": "the engine relies on DeepSpeed's count of micro-batches",
    "zero_optimization.compute_grad_norm": "each step records the norm and stops at one that is not finite",
}
"""Keys of DeepSpeed that would break what evenpack promises, and why."""


def deepspeed_config(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`: derived keys, and `deepspeed.extra` merged in.

    Raises: ConfigError if `world_size` cannot divide the step or `extra` holds a key that evenpack derives.
    """
    training = config.training
    derived: dict[str, Any] = {
        "train_batch_size": training.items_per_step,
        "train_micro_batch_size_per_gpu": training.items_per_micro_batch,
        "gradient_accumulation_steps": micro_batches_per_step(training, world_size),
        # Without the key DeepSpeed clips at 1.0. At ZeRO 0 our engine clips, since DeepSpeed would wait for the device.
        "gradient_clipping": (training.gradient_clipping or 0.0) if config.deepspeed.zero_stage > 0 else 0.0,
        "zero_optimization": {"stage": config.deepspeed.zero_stage},
        # It would synchronise the device before and after each step.
        "timers": {"throughput": {"enabled": False}},
    }
    if training.precision == "bf16_autocast":
        derived["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            # By default ZeRO would reduce the gradients of linear layers in bfloat16: they would be no exact mean.
            "lower_precision_safe_modules": [],
        }
    _refuse_known(config.deepspeed.extra)
    return _merged(derived, config.deepspeed.extra)


def micro_batches_per_step(training: TrainingSection, world_size: int) -> int:
    """Micro-batches of each rank in each step (DeepSpeed's gradient accumulation).

    Raises: ConfigError with what would do, if the packs or sequences of a step cannot be divided evenly.
    """
    step, micro_batch, items = training.items_per_step, training.items_per_micro_batch, training.batching
    accumulation, rest = divmod(step, world_size * micro_batch)
    if rest == 0:
        return accumulation
    sizes = "no number of ranks would do"
    if step % micro_batch == 0:
        sizes = f"the number of ranks can be {_listed(_divisors(step // micro_batch))}"
    if step % world_size:
        remedy = f"no {items}_per_micro_batch helps {world_size} ranks: choose a {items}_per_step that they divide"
    else:
        remedy = f"{world_size} ranks can do {items}_per_micro_batch {_listed(_divisors(step // world_size))}"
    if training.packing_adjustment == "fewer_accumulations":
        remedy += f" (training.packing_adjustment made packs_per_step {step} of the run file's)"
    raise ConfigError(
        f"{world_size} ranks x training.{items}_per_micro_batch ({micro_batch}) must divide training.{items}_per_step "
        f"({step}), so that every rank gets the same number of {items}. With this {items}_per_micro_batch "
        f"{sizes}; {remedy}"
    )


def _refuse_known(extra: dict[str, Any]) -> None:
    for name, place in _SET_ELSEWHERE.items():
        if _holds(extra, name):
            raise ConfigError(f"deepspeed.extra sets '{name}', which evenpack derives: set {place} instead")
    for name, reason in _WOULD_BE_WRONG.items():
        if _holds(extra, name):
            raise ConfigError(f"deepspeed.extra sets '{name}', which must keep its default: {reason}")


def _holds(values: Any, dotted_name: str) -> bool:
    for key in dotted_name.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _merged(derived: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` added to `derived`, section by section.

    Raises: ConfigError if `extra` puts a single value where evenpack writes a section.
    """
    merged = dict(derived)
    for name, value in extra.items():
        if name in derived and not isinstance(value, dict):
            raise ConfigError(f"deepspeed.extra.{name} must be a section of DeepSpeed's keys, found {value!r}")
        merged[name] = {**derived.get(name, {}), **value} if isinstance(value, dict) else value
    return deepcopy(merged)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
