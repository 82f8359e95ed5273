"""Writes OUTPUT_DIR/run.json: the settings, data and starts of a run, for readers of its metrics."""

import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, field_validator

from evenpack.config import Section
from evenpack.engine.provenance import commit_of_source
from evenpack.errors import DataError, RunError
from evenpack.files import read_json_object, write_json
from evenpack.version import VERSION

if TYPE_CHECKING:
    from evenpack.engine.build import TrainingRun
    from evenpack.engine.world.distributed import World

RUN_RECORD = "run.json"


class DataIdentity(Section):
    """Identifies the data of a run; equal for runs over the same data."""

    fingerprint: str
    """Hash of files, tokenizer, recipe, pack length and mixture, without the seed."""
    tokenizer: str
    """Checksum of the tokenizer: losses per token are comparable where it is the same."""
    vocabulary_size: int = Field(ge=1)
    pack_length: int = Field(ge=1)
    sources: tuple[str, ...]


class Place(Section):
    """Says where a rank runs."""

    host: str
    device: str
    """Its name for torch: `cuda:3`."""
    model: str
    """Name of the kind of device, by which ranks are alike."""


class StartRecord(Section):
    """Describes one start of the run, from the beginning or from a checkpoint."""

    first_step: int = Field(ge=0)
    """Number of updates done before."""
    ranks: int = Field(ge=1)
    device: str
    """Name of the device of each rank."""
    commit: str | None
    """Commit of the source; null if the source is not a checkout."""
    evenpack: str
    torch: str
    date: str
    """ISO 8601, UTC."""
    places: tuple[Place, ...] = ()
    """The place of each rank, in their order; none in a record of an earlier version."""

    @property
    def unlike(self) -> tuple[str, ...]:
        """Returns the kinds of its ranks' devices if there are several, else none."""
        models = tuple(dict.fromkeys(place.model for place in self.places))
        return models if len(models) > 1 else ()


class RunRecord(Section):
    """Holds the contents of run.json."""

    config: dict[str, Any]
    """The resolved run file of the newest start, as JSON values."""
    data: DataIdentity
    starts: tuple[StartRecord, ...] = Field(min_length=1)
    """All starts, oldest first; a start replaces those that began at the same step or a later one."""

    @field_validator("config")
    @classmethod
    def _require_name(cls, config: dict[str, Any]) -> dict[str, Any]:
        run = config.get("run")
        if not isinstance(run, dict) or not isinstance(run.get("name"), str):
            raise ValueError("the run has no name")
        return config


def place_of(world: "World") -> Place:
    """Returns the place of this rank."""
    return Place(host=socket.gethostname(), device=str(world.device), model=world.device_name)


def write_start(run: "TrainingRun", places: Sequence[Place]) -> None:
    """Adds this start, with the place of each rank, to the record; called by rank 0.

    Raises: RunError if it cannot be written.
    """
    import torch

    path = run.config.run.output_dir / RUN_RECORD
    prepared = run.prepared
    start = StartRecord(
        first_step=run.first_step,
        ranks=run.world.size,
        device=run.world.device_name,
        commit=commit_of_source(),
        evenpack=VERSION,
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        places=tuple(places),
    )
    record = RunRecord(
        config=run.config.model_dump(mode="json"),
        data=DataIdentity(
            fingerprint=prepared.fingerprint(seed=0),
            tokenizer=prepared.manifest.tokenizer.checksum,
            vocabulary_size=prepared.vocabulary_size,
            pack_length=prepared.pack_length,
            sources=tuple(prepared.source_names),
        ),
        starts=(*earlier_starts(path.parent, run.first_step), start),
    )
    try:
        write_json(path, record.model_dump(mode="json"))
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error}; is the disk full?") from error


def read_run_record(output_dir: Path) -> RunRecord | None:
    """Reads run.json; None if there is none, as before a run has started. Raises: DataError naming a broken file."""
    path = output_dir / RUN_RECORD
    if not path.exists():
        return None
    try:
        return RunRecord.model_validate(read_json_object(path))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"]) or "the whole file"
        raise DataError(
            f"{path} is not in the form that `evenpack train` writes ({place}): remove it; the run is then reported "
            "without its settings until it is started again"
        ) from error


def earlier_starts(output_dir: Path, first_step: int) -> tuple[StartRecord, ...]:
    """Returns the recorded starts that have led to `first_step`."""
    try:
        known = read_run_record(output_dir)
    except DataError:
        return ()  # training does not need it
    return () if known is None else tuple(start for start in known.starts if start.first_step < first_step)
