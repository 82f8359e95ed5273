"""Steps of a loop and runs of which only some values are known."""

from dataclasses import fields
from typing import Any

import torch

from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.build import Start, TrainingRun
from evenpack.engine.parts.part import Step
from evenpack.engine.world.distributed import World

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def start_of(**values: Any) -> Start:
    """Returns a start of a run with these fields, on one rank; the others are None."""
    return _with_fields(Start, {"world": ALONE} | values)


def run_of(**values: Any) -> TrainingRun:
    """Returns a run with these fields; the others are None."""
    return _with_fields(TrainingRun, values)


def _with_fields(kind: type[Any], values: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(made, field.name, values.get(field.name))
    return made


def step_of(number: int, **values: Any) -> Step:
    """Returns a step that is not skipped, with these values."""
    step = object.__new__(Step)
    batches = StepBatches(step=number - 1, micro_batches=())
    vars(step).update({"steps_done": number, "batches": batches, "evaluations": None}, **values)
    return step
