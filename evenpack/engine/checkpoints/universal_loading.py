"""Loads a checkpoint in DeepSpeed's universal form into an engine of any ZeRO stage.

From ZeRO 1 on DeepSpeed's own loader does it, with two corrections: at ZeRO 3 it lets all groups of parameters share
one count of updates, which then grows by as many as there are groups; and it puts counts on the CPU, where torch's
fused AdamW does not look for them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.engine.checkpoints.pickles import forbidding_code
from evenpack.engine.checkpoints.universal import Shapes
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.units import counted


def parameter_shapes(module: nn.Module) -> Shapes:
    """Returns the shapes of whole parameters by name, also where a rank holds only its part of them."""
    return {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in module.named_parameters()
    }


def require_only_parameters(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Checks that the module's parameters, each under one name, are all that it saves: no more is converted.

    Raises: CheckpointError that names what it saves besides.
    """
    others = sorted(module.state_dict().keys() - parameter_shapes(module).keys())
    if others:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} cannot go on with other ranks or at another ZeRO stage, because the model "
            f"saves more than its parameters: {', '.join(others)} (persistent buffers, or second names of parameters). "
            f"Continue at deepspeed.zero_stage={checkpoint.state.zero_stage} with "
            f"{counted(checkpoint.state.world_size, 'rank')}, as it was saved"
        )


def load_universal(engine: Any, universal: Checkpoint, world: World) -> None:
    """Loads a universal checkpoint; all ranks call it.

    Raises: CheckpointError if a rank would hold nothing of a group of parameters, which DeepSpeed cannot load.
    """
    with forbidding_code(()):
        if engine.zero_optimization_stage() == 0:
            _load_whole(engine, universal.path)
            return
        _require_part_of_each_group(engine, world)
        with mock.patch.object(engine, "load_universal_checkpoint", return_value=True), _only_errors():
            engine.load_checkpoint(str(universal.path.parent), tag=universal.path.name)
    _separate_counts(engine.optimizer.optimizer)


def _load_whole(engine: Any, path: Path) -> None:
    """Loads it at ZeRO 0, where DeepSpeed has no loader for it, with one parameter at a time on the host."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in ordered:
        folder = path / "zero" / names[parameter]
        parameter.data.copy_(_read(folder / "fp32.pt")["param"])
        optimizer.state[parameter] = {
            "step": _read(folder / "step.pt"),
            **{key: _read(folder / f"{key}.pt")["param"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")},
        }
    _separate_counts(optimizer)
    counters = _read(path / "mp_rank_00_model_states.pt")
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, counters[name])


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _separate_counts(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter a count of updates of its own, where torch's optimizer looks for it."""
    is_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        device = parameter.device if is_on_device else torch.device("cpu")
        state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=device)


def _require_part_of_each_group(engine: Any, world: World) -> None:
    """DeepSpeed 0.19 fails at ZeRO 1 and 2 on a rank that holds nothing but padding of a group."""
    groups = getattr(engine.optimizer, "bit16_groups", ())
    if world.any(any(all(parameter._hp_mapping is None for parameter in group) for group in groups)):
        raise CheckpointError(
            f"{world.size} ranks are more than this model's biases and norms can be divided among at ZeRO stage "
            f"{engine.zero_optimization_stage()} when the number of ranks changes: take fewer ranks, or "
            "deepspeed.zero_stage=0 or 3"
        )


@contextmanager
def _only_errors() -> Iterator[None]:
    """DeepSpeed's loader warns on every rank that there is no tensor parallelism."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
