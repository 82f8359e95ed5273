"""Steps of a loop and runs of which only some values are known."""

from dataclasses import fields
from typing import Any

import torch

from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.build import TrainingRun
from evenpack.engine.parts.part import Step
from evenpack.engine.world.distributed import World

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def run_of(**values: Any) -> TrainingRun:
    """Returns a run with these fields, on one rank; the others are None."""
    run = object.__new__(TrainingRun)
    for field in fields(TrainingRun):
        object.__setattr__(run, field.name, ({"world": ALONE} | values).get(field.name))
    return run


def step_of(number: int, **values: Any) -> Step:
    """Returns a step that is not skipped, with these values."""
    step = object.__new__(Step)
    vars(step).update({"number": number, "batches": StepBatches(step=number - 1, micro_batches=())}, **values)
    return step
