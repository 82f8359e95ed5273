"""Checks between sections of a run file that depend on one another: steps, sources, layouts."""

import math
from collections.abc import Mapping

from evenpack.config import nearest
from evenpack.data.config import DataConfig
from evenpack.data.order.step_shape import Layout
from evenpack.engine.optimizers.config import OptimizerBase
from evenpack.engine.resolving.run_length import RunLengthSection
from evenpack.engine.sharding import SHARDINGS
from evenpack.kernels.config import WHOLE_ROWS, AttentionConfig


def check_sharding(optimizer: OptimizerBase, stage: int, *, compiles: bool) -> None:
    """Checks a ZeRO stage. Raises: ValueError if the optimizer, or compiled blocks, cannot work at it."""
    sharding = SHARDINGS[stage]
    if optimizer.reason_for_whole_tensors and not sharding.updates_whole_tensors:
        raise ValueError(
            f"optimizer.kind {optimizer.kind} needs deepspeed.zero_stage=0, found {stage}: "
            f"{optimizer.reason_for_whole_tensors}, and ZeRO cuts them up. Set deepspeed.zero_stage=0 or "
            "optimizer.kind=adamw"
        )
    if compiles and sharding.gathers_parameters:
        raise ValueError(
            f"training.compile is true at deepspeed.zero_stage={stage}, where DeepSpeed gathers the parameters of each "
            "layer by hooks, which torch.compile cuts out of a block: set training.compile=false, or "
            "deepspeed.zero_stage=2"
        )


def check_named_steps(training: RunLengthSection, data: DataConfig, denominators: str) -> None:
    """Checks steps. Raises: ValueError for steps that the run does not have, or a schedule with unsettled numbers.

    Args:
        denominators: those of the model's losses.
    """
    if data.mixture_schedule:
        _check_length_is_in_steps(training, denominators)
    steps = training.steps
    if steps is None:
        return  # `resolve` validates the run again with its steps
    if training.skipped and training.skipped.spans[-1][1] > steps:
        raise ValueError(
            f"training.skip_steps names step {training.skipped.spans[-1][1]}, above training.steps ({steps})"
        )
    if next(training.skipped.gaps(1, steps), None) is None:
        raise ValueError(f"training.skip_steps leaves none of the {steps} steps to be trained")
    if data.mixture_schedule and data.mixture_schedule[-1].step > steps:
        raise ValueError(
            f"data.mixture_schedule has an entry of step {data.mixture_schedule[-1].step}, above training.steps "
            f"({steps})"
        )


def _check_length_is_in_steps(training: RunLengthSection, denominators: str) -> None:
    """Refuses values that depend on an average over the mixture, which is unknown before its steps are."""
    if training.steps is None:
        raise ValueError(
            "data.mixture_schedule is by steps, and the number of steps in epochs, samples or tokens depends on "
            "it: give training.steps"
        )
    others = {"training.tokens_per_step": None, "training.packing_adjustment": "none"}
    for key, off in others.items():
        found = getattr(training, key.rpartition(".")[2], off)
        if found != off:
            raise ValueError(
                f"data.mixture_schedule is by steps, and {key} ({found}) makes other steps of them by the average of "
                f"a mixture that changes: set {key}={'null' if off is None else off}"
            )
    if denominators == "expected":
        raise ValueError(
            "model.loss_balancing expected divides by the average of an unchanging mixture, and "
            "data.mixture_schedule changes it: set model.loss_balancing=exact"
        )


def check_layout(layout: Layout, attention: AttentionConfig, *, resets_positions: bool) -> None:
    """Checks what only some layouts have. Raises: ValueError for a setting that needs another layout."""
    about_packs = {"attention.isolate": attention.isolate, "model.reset_positions": resets_positions}
    switched_off = [key for key, is_on in about_packs.items() if not is_on]
    if switched_off and layout != "packed":
        raise ValueError(
            f"{switched_off[0]}: false applies to packs alone; training.layout must be packed, found {layout}"
        )
    if attention.backend in WHOLE_ROWS and layout == "unpadded":
        raise ValueError(
            f"attention.backend {attention.backend} computes whole rows, and training.layout unpadded has none of "
            "equal length: set training.layout to packed or padded, or choose another backend"
        )


def check_keep_policy(training: RunLengthSection, data: DataConfig, *, checkpoint_every_steps: int | None) -> None:
    """Checks that there can be a best checkpoint. Raises: ValueError with the reason why there cannot."""
    every, policy = training.evaluate_every_steps, "training.keep_best_checkpoint"
    if every is None and training.evaluate_every_samples is None:
        raise ValueError(
            f"{policy} compares validation losses, and the model is never evaluated: set "
            f"training.evaluate_every_steps, or {policy}=false"
        )
    if data.validation_fraction == 0.0:
        raise ValueError(
            f"{policy} compares validation losses, and nothing is held out: set data.validation_fraction, or {policy}="
            "false"
        )
    steps = training.steps
    if every is None or checkpoint_every_steps is None or steps is None or training.evaluate_every_samples is not None:
        return
    first = math.lcm(every, checkpoint_every_steps)
    if checkpoint_every_steps < steps < first:
        raise ValueError(
            f"{policy} compares checkpoints whose step is evaluated, and the first of them would be that of step "
            f"{first}, above training.steps ({steps}): training.checkpoint_every_steps ({checkpoint_every_steps}) "
            f"should be a multiple of training.evaluate_every_steps ({every})"
        )


def check_validation_weights(weights: Mapping[str, float] | None, data: DataConfig) -> None:
    """Checks weights. Raises: ValueError for a name that is not a source, or weights of none."""
    if weights is None:
        return
    if not weights:
        raise ValueError("training.validation_weights names no source: name those that count, or set it to null")
    for name in weights:
        if name not in data.sources:
            raise ValueError(
                f"training.validation_weights: there is no source '{name}'; {nearest(name, list(data.sources))}"
            )
