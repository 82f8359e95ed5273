"""The list of a loop's parts, on rank 0 and on others."""

import torch
from loop_steps import step_of

from evenpack.engine.parts.part import Part, Parts, Step
from evenpack.engine.world.distributed import World


class Noted(Part):
    """Notes the steps that begin."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def before_step(self, step: Step) -> None:
        self.begun.append(step.steps_done)


class NotedOnMain(Noted):
    is_for_main_alone = True


def test_parts_of_rank_0_alone_are_not_called_on_the_others() -> None:
    for rank, expected in ((0, [3]), (1, [])):
        everywhere, on_main = Noted(), NotedOnMain()
        world = World(rank=rank, size=2, local_rank=rank, device=torch.device("cpu"))
        Parts([everywhere, on_main], world, stop_requested=lambda: False).call("before_step", step_of(3))
        assert (everywhere.begun, on_main.begun) == ([3], expected)
