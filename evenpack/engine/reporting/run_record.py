"""Writes OUTPUT_DIR/run.json: the settings, data and starts of a run, for readers of its metrics."""

import logging
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, field_validator

from evenpack.config import Section
from evenpack.engine.ownership import require_owned
from evenpack.engine.provenance import commit_of_source
from evenpack.errors import DataError
from evenpack.files import explained, read_json, write_json
from evenpack.version import VERSION

if TYPE_CHECKING:
    from torch import nn

    from evenpack.engine.build import Start
    from evenpack.engine.world.distributed import World

log = logging.getLogger(__name__)

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
    """Name of the kind of device."""


class StartRecord(Section):
    """Describes one start of the run, from the beginning or from a checkpoint."""

    steps_done: int = Field(ge=0)
    """Steps done before, skipped ones included."""
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


class RunRecord(Section):
    """Holds the contents of run.json."""

    config: dict[str, Any]
    """The resolved run file of the newest start, as JSON values."""
    data: DataIdentity
    muon_parameters: tuple[str, ...] = ()
    """Parameters that Muon updates, where it is the optimizer; AdamW updates the others."""
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


def write_start(run: "Start", places: Sequence[Place], model: "nn.Module") -> None:
    """Adds this start, with the place of each rank, to the record; called by rank 0.

    Raises: RunError if it cannot be read or written, or if another start has taken the directory.
    """
    import torch

    from evenpack.engine.optimizers.muon import hidden_matrices

    path = run.config.run.output_dir / RUN_RECORD
    prepared = run.prepared
    start = StartRecord(
        steps_done=run.steps_done,
        ranks=run.world.size,
        device=run.world.device_name,
        commit=commit_of_source(),
        evenpack=VERSION,
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        places=tuple(places),
    )
    record = RunRecord(
        config=run.resolved.run_file.model_dump(mode="json"),
        data=DataIdentity(
            fingerprint=prepared.fingerprint(seed=0),
            tokenizer=prepared.manifest.tokenizer.checksum,
            vocabulary_size=prepared.vocabulary_size,
            pack_length=prepared.pack_length,
            sources=tuple(prepared.source_names),
        ),
        muon_parameters=tuple(hidden_matrices(model)) if run.config.optimizer.kind == "muon" else (),
        starts=(*earlier_starts(path.parent, run.steps_done), start),
    )
    with explained(path, action="written"):
        write_json(path, record.model_dump(mode="json"), check=partial(require_owned, path.parent))


def read_run_record(output_dir: Path) -> RunRecord | None:
    """Reads run.json; None if there is none, as before a run has started.

    Raises: DataError naming a broken file, or one of another version; RunError if it cannot be read now.
    """
    path = output_dir / RUN_RECORD
    values = None
    with explained(path):
        try:
            values = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            pass  # None is not in the form of a record either
    try:
        return RunRecord.model_validate(values)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"]) or "the whole file"
        raise DataError(
            f"{path} is not in the form that `evenpack train` writes ({place}): start the run again, which "
            "writes it, or remove it"
        ) from error


def earlier_starts(output_dir: Path, steps_done: int) -> tuple[StartRecord, ...]:
    """Returns the recorded starts before the one after so many steps; none of a record that is not understood.

    Raises: RunError if it cannot be read now.
    """
    try:
        known = read_run_record(output_dir)
    except DataError as error:  # training does not need it
        log.warning("%s. It is written again with this start as the first", error)
        return ()
    return () if known is None else tuple(start for start in known.starts if start.steps_done < steps_done)
