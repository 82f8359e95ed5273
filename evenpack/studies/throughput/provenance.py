"""The provenance of a measurement."""

from datetime import UTC, datetime

import torch

from evenpack.engine.provenance import commit_of_source
from evenpack.engine.resolving.cost_model import MeasuredOn
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.models.families import family_of
from evenpack.version import VERSION


def measured_on(run: ResolvedRun, world: World, *, layouts: tuple[str, ...]) -> MeasuredOn:
    """Returns the provenance that a figure must carry."""
    config = run.config
    shape = config.model.shape
    return MeasuredOn(
        device=world.device_name,
        family=config.model.kind,
        model=f"{config.model.kind} {config.model.preset}",
        causal=family_of(config.model).causal,
        layers=shape["layers"],
        hidden_size=shape["hidden_size"],
        vocabulary_size=run.prepared.vocabulary_size,
        rows_per_micro_batch=config.training.items_per_micro_batch,
        layouts=layouts,
        precision=config.training.precision,
        attention=config.attention.backend,
        evenpack=VERSION,
        torch=torch.__version__,
        commit=commit_of_source(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
