"""A rank whose loss is NaN in one step: the rank and the step are in the file `spoil.json` of the run's folder."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from evenpack.launcher.worker import main


def spoil() -> None:
    from evenpack.engine import engine
    from evenpack.models.common.losses import scaled_loss
    from faults.subject import SUBJECT_VARIABLE

    wanted = json.loads((Path(os.environ[SUBJECT_VARIABLE]) / "spoil.json").read_text())
    compute = engine.TrainingEngine.compute_gradients

    def compute_and_spoil(self: engine.TrainingEngine, step: int, micro_batches: Any) -> Any:
        factor = torch.nan if (step + 1, self.world.rank) == (wanted["step"], wanted["rank"]) else 1.0
        with mock.patch.object(engine, "scaled_loss", lambda *given, **named: scaled_loss(*given, **named) * factor):
            return compute(self, step, micro_batches)

    engine.TrainingEngine.compute_gradients = compute_and_spoil  # type: ignore[method-assign]


def train(*arguments: Any, **options: Any) -> Any:
    spoil()
    from evenpack.launcher.worker import _train

    return _train(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main(train=train))
