"""On what something was measured."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import evenpack
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import World
from evenpack.models.families import family_of
from evenpack.studies.cost_model import MeasuredOn


def device_name(world: World) -> str:
    """Of one rank."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    threads = torch.get_num_threads()
    return f"CPU ({_processor()}), {threads} {'thread' if threads == 1 else 'threads'} a rank"


def measured_on(config: RunConfig, prepared: PreparedData, world: World, *, layouts: tuple[str, ...]) -> MeasuredOn:
    """All that a figure must carry."""
    shape = config.model.shape
    return MeasuredOn(
        device=device_name(world),
        model=f"{config.model.kind} {config.model.preset}",
        causal=family_of(config.model).causal,
        layers=shape["layers"],
        hidden_size=shape["hidden_size"],
        vocabulary_size=prepared.vocabulary_size,
        rows_per_micro_batch=config.training.items_per_micro_batch,
        layouts=layouts,
        precision=config.training.precision,
        attention=config.attention.backend,
        evenpack=evenpack.__version__,
        torch=torch.__version__,
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str | None:
    """Of the source, with a mark if it was changed since; None if it is no checkout."""
    root = Path(evenpack.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
