"""Distributed pretraining on DeepSpeed: equal packs for every GPU, nearly no padding, no attention between sequences.

    import evenpack

    packing = evenpack.pack([512, 130, 87, 300], pack_length=512)
    run = evenpack.open("demo", "training.steps=50")
    run.prepare()
    for batch in run.batches(rank=0, ranks=1):
        ...
    run.train()

Each name is loaded when it is first used: packing imports no torch, and nothing imports DeepSpeed before training does.
docs/python_api.md describes them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from evenpack.version import VERSION

if TYPE_CHECKING:
    from evenpack.api.run import Run
    from evenpack.api.run import open_run_file as open  # noqa: A004 - it is called as evenpack.open
    from evenpack.api.study import study
    from evenpack.batch import ChosenTargets, PackedBatch, SlotTargets
    from evenpack.data.batches.pipeline import StepBatches
    from evenpack.data.loader import Loader, RandomMasks
    from evenpack.data.order.step_plan import StepPlan
    from evenpack.data.order.step_shape import CostWeights
    from evenpack.data.packing import pack_lengths as pack
    from evenpack.data.packing.histogram import LengthHistogram
    from evenpack.data.packing.strategy import Packing
    from evenpack.data.prepared import PreparedData
    from evenpack.data.tokens.own import TokenArrays
    from evenpack.engine.config import RunConfig
    from evenpack.errors import (
        BackendError,
        CheckpointError,
        ConfigError,
        DataError,
        EvenpackError,
        MissingExtraError,
        NotPreparedError,
        PackingError,
        RunError,
    )
    from evenpack.losses import StepCounts

__version__ = VERSION

__all__ = [
    "Loader",
    "TokenArrays",
    "RandomMasks",
    "CostWeights",
    "StepPlan",
    "open",
    "Run",
    "RunConfig",
    "PreparedData",
    "PackedBatch",
    "StepBatches",
    "SlotTargets",
    "ChosenTargets",
    "StepCounts",
    "pack",
    "Packing",
    "LengthHistogram",
    "study",
    "EvenpackError",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MissingExtraError",
    "NotPreparedError",
    "PackingError",
    "RunError",
]

_RENAMED = {"open": "open_run_file", "pack": "pack_lengths"}
"""Names that differ from those in their modules."""

_MODULES = {
    "evenpack.api.run": ("open", "Run"),
    "evenpack.api.study": ("study",),
    "evenpack.batch": ("PackedBatch", "SlotTargets", "ChosenTargets"),
    "evenpack.data.batches.pipeline": ("StepBatches",),
    "evenpack.data.packing.histogram": ("LengthHistogram",),
    "evenpack.data.packing": ("pack",),
    "evenpack.data.packing.strategy": ("Packing",),
    "evenpack.data.loader": ("Loader", "RandomMasks"),
    "evenpack.data.order.step_plan": ("StepPlan",),
    "evenpack.data.order.step_shape": ("CostWeights",),
    "evenpack.data.prepared": ("PreparedData",),
    "evenpack.data.tokens.own": ("TokenArrays",),
    "evenpack.engine.config": ("RunConfig",),
    "evenpack.losses": ("StepCounts",),
    "evenpack.errors": tuple(name for name in __all__ if name.endswith("Error")),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # to a type checker a module with this has every name there could be

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'evenpack' has no attribute '{name}'")
        try:
            module = importlib.import_module(_MODULE_OF[name])
        except ModuleNotFoundError as error:
            from evenpack.extras import explained

            raise explained(error, f"evenpack.{name}") or error from error
        value = getattr(module, _RENAMED.get(name, name))
        globals()[name] = value  # so that this is asked once
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
