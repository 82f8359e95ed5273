"""A rank with a fault from its start on, which the file `spoil.json` of the run's folder names: see `running.Spoil`."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from evenpack.launcher.worker import main
from faults.running import LONG_COMPILATION, NAN, OTHER_FILE, SLOW_DISK
from faults.subject import SUBJECT_VARIABLE

SLOW_CALLS = ("fsync", "replace", "rename", "link")


def spoil_a_loss(wanted: dict[str, Any]) -> None:
    """Makes the loss of one step of one rank NaN."""
    import torch

    from evenpack.engine import engine
    from evenpack.models.common.loss_sums import scaled_loss

    compute = engine.TrainingEngine.compute_gradients

    def compute_and_spoil(self: engine.TrainingEngine, step: int, micro_batches: Any) -> Any:
        factor = torch.nan if (step + 1, self.world.rank) == (wanted["step"], wanted["rank"]) else 1.0
        with mock.patch.object(engine, "scaled_loss", lambda *given, **named: scaled_loss(*given, **named) * factor):
            return compute(self, step, micro_batches)

    engine.TrainingEngine.compute_gradients = compute_and_spoil  # type: ignore[method-assign]


def compile_in_a_step(wanted: dict[str, Any]) -> None:
    """Makes torch announce a compilation in one step of one rank, which takes so many seconds."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    from evenpack.engine import engine

    compute = engine.TrainingEngine.compute_gradients

    def compile_and_compute(self: engine.TrainingEngine, step: int, micro_batches: Any) -> Any:
        if (step + 1, self.world.rank) == (wanted["step"], wanted["rank"]):
            with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
                time.sleep(wanted["seconds"])
        return compute(self, step, micro_batches)

    engine.TrainingEngine.compute_gradients = compile_and_compute  # type: ignore[method-assign]


def slow_the_disk(seconds: float) -> None:
    """Makes every flush and every new name take longer by so many seconds."""

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return call(*arguments, **options)

        return slow

    for name in SLOW_CALLS:
        setattr(os, name, slowed(getattr(os, name)))


def spoiled_arguments(arguments: list[str], wanted: dict[str, Any], *, rank: int) -> list[str]:
    """Returns the arguments of a rank, which may get another run file."""
    if (wanted["name"], wanted.get("rank")) != (OTHER_FILE, rank):
        return arguments
    return [wanted["run_file"] if one.endswith(".yaml") else one for one in arguments]


def spoiled_main() -> int:
    """Runs one rank."""
    wanted = json.loads((Path(os.environ[SUBJECT_VARIABLE]) / "spoil.json").read_text())
    if wanted["name"] == SLOW_DISK:
        slow_the_disk(wanted["seconds"])

    def train(*arguments: Any, **options: Any) -> Any:
        from evenpack.launcher.worker import _train

        if wanted["name"] == NAN:
            spoil_a_loss(wanted)
        elif wanted["name"] == LONG_COMPILATION:
            compile_in_a_step(wanted)
        return _train(*arguments, **options)

    return main(spoiled_arguments(sys.argv[1:], wanted, rank=int(os.environ.get("RANK", "0"))), train=train)


if __name__ == "__main__":
    sys.exit(spoiled_main())
