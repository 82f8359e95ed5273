"""Rewrites a checkpoint as DeepSpeed's universal one, for any number of ranks at any ZeRO stage, and loads it.

    checkpoints/.universal/
      ID/                        of this start alone, which makes it and loads it
        zero/NAME/               of each complete parameter: fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
        zero/optimizer_state.pt  what DeepSpeed reads beside them
        counters.pt              DeepSpeed's counts of steps and samples

DeepSpeed's own converter reads no ZeRO 0, cannot go between ZeRO 3 and the others, and writes everything twice. This
one reads by `shards.py`; every rank writes a part of the parameters. The next save removes the directory before it
writes, because the disk may have no room for both, and so does the next conversion.

From ZeRO 1 on DeepSpeed's optimizer loads it, with two corrections: at ZeRO 3 it lets all groups of parameters share
one count of updates, which then grows by as many as there are groups; and it puts counts on the CPU, where torch's
fused AdamW does not look for them.
"""

import logging
import math
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenpack.engine.activity import doing
from evenpack.engine.checkpoints.files import UNIVERSAL, Checkpoint
from evenpack.engine.checkpoints.pickles import forbidding_code
from evenpack.engine.checkpoints.saving import free_space
from evenpack.engine.checkpoints.shards import STATES, SavedTensors, saved_tensors
from evenpack.engine.checkpoints.weights import Shapes, require_fitting
from evenpack.engine.optimizers.build import whole_shape
from evenpack.engine.ownership import require_owned
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.units import counted

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_COUNTERS_FILE = "counters.pt"


def make_universal(checkpoint: Checkpoint, shapes: Shapes, world: World) -> Path:
    """Writes the universal form of a complete checkpoint; all ranks call it, and have it when it returns.

    Each parameter is checked against the model's `shapes`, and its numbers and the optimizer's count of updates for
    being possible.

    Raises: CheckpointError on every rank alike if a file is missing, or not of this model, or there is no space; what
    was written is removed then.
    """
    # A name of its own: a stopped rank of an earlier start may go on to write into the directory of its conversion.
    directory = checkpoint.path.parent / UNIVERSAL / world.broadcast(uuid.uuid4().hex)
    saved = saved_tensors(checkpoint)
    try:
        with _together(checkpoint, world):
            if world.is_main:
                require_owned(directory.parents[2])
                shutil.rmtree(directory.parent, ignore_errors=True)  # what earlier starts have made
                (directory / "zero").mkdir(parents=True)
        with _together(checkpoint, world):
            if world.is_main:
                _write_common(saved, shapes, directory)
            for name in sorted(shapes)[world.rank :: world.size]:
                _write_parameter(saved, name, directory)
                doing.tick()
    except CheckpointError:
        world.on_main(lambda: shutil.rmtree(directory, ignore_errors=True))
        raise
    return directory


def _write_common(saved: SavedTensors, shapes: Shapes, directory: Path) -> None:
    """Checks the complete checkpoint, and writes what DeepSpeed reads in addition to the parameters."""
    remedy = (
        "Restore the model section with which it was saved (it is in its manifest.json), or choose another "
        "run.output_dir to start again."
    )
    found = {name: tuple(shape) for name, shape in saved.shapes.items()}
    require_fitting(shapes, found, origin=f"checkpoint {saved.checkpoint.path}", remedy=remedy)
    _require_steps(saved)
    step = torch.tensor(float(next(iter(saved.steps), 0)))
    groups: list[dict[str, list[int]]] = [{"params": []} for _ in range(saved.group_count)]
    common = {"ds_version": saved.model_states["ds_version"], "param_groups": groups}  # ZeRO 3 looks one level below
    torch.save(
        common | {"optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups}},
        directory / "zero" / "optimizer_state.pt",
    )
    torch.save({name: saved.model_states[name] for name in _COUNTERS}, directory / _COUNTERS_FILE)


def _write_parameter(saved: SavedTensors, name: str, directory: Path) -> None:
    """Writes the files of one parameter. Raises: CheckpointError for a number not finite."""
    folder = directory / "zero" / name
    folder.mkdir(parents=True)
    for state in STATES:
        tensor = saved.read(name, state)
        if not math.isfinite(tensor.sum(dtype=torch.float64)):
            raise CheckpointError(
                f"checkpoint {saved.checkpoint.path}: {state} of {name} has numbers that are not finite"
            )
        torch.save({"param": tensor}, folder / f"{state}.pt")
    torch.save(torch.tensor(float(next(iter(saved.steps), 0))), folder / "step.pt")


def _require_steps(saved: SavedTensors) -> None:
    """Checks the optimizer's counts: steps that were left out are not counted."""
    if len(saved.steps) > 1 or any(not 0 <= step <= saved.checkpoint.step for step in saved.steps):
        raise CheckpointError(
            f"checkpoint {saved.checkpoint.path} is of step {saved.checkpoint.step}, and its optimizer has counted "
            f"{sorted(saved.steps)} updates: its files do not belong together. Restore it from a copy, or move it away "
            "to continue from an older one."
        )


@contextmanager
def _together(checkpoint: Checkpoint, world: World) -> Iterator[None]:
    """Works as `World.together`, and explains what cannot be written; torch reports a full disk as RuntimeError."""
    with world.together():
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"rank {world.rank} on {socket.gethostname()} failed while converting {checkpoint.path}, saved by "
                f"{checkpoint.state.world_size} ranks at ZeRO stage {checkpoint.state.zero_stage}, for {world.size} "
                f"ranks ({free_space(checkpoint.path.parent)}): {error}\n"
                "The checkpoint itself is untouched. Converting needs as much space again: make some, then run the "
                "same command again; or continue with as many ranks, and at the ZeRO stage, with which it was saved."
            ) from error


def parameter_shapes(module: nn.Module) -> Shapes:
    """Returns the shapes of whole parameters by name, also where a rank holds only its part of them."""
    return {name: tuple(whole_shape(parameter)) for name, parameter in module.named_parameters()}


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


def load_universal(engine: Any, universal: Path, world: World) -> None:
    """Loads a universal checkpoint; all ranks call it.

    Raises: CheckpointError if a rank would hold nothing of a group of parameters, which DeepSpeed cannot load.
    """
    with forbidding_code(()):
        if engine.zero_optimization_stage() == 0:
            _load_whole(engine, universal)
        else:
            _require_part_of_each_group(engine, world)
            _load_part(engine, universal)
        for name, value in _read(universal / _COUNTERS_FILE).items():
            setattr(engine, name, value)


def _load_part(engine: Any, path: Path) -> None:
    """Loads a rank's part of it, as `load_checkpoint` of DeepSpeed's engine does with `checkpoint.load_universal`.

    That engine would also read the counters, under names that depend on the ZeRO stage.
    """
    optimizer, divides_parameters = engine.optimizer, engine.zero_optimization_stage() == 3
    if divides_parameters:
        optimizer.checkpoint_event_prologue()
    with _only_errors():
        optimizer.load_state_dict(None, checkpoint_folder=str(path))
    if divides_parameters:
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()
    _separate_counts(optimizer.optimizer)


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
