"""The form of a checkpoint on disk, and the functions that distinguish a complete one from a broken one.

    checkpoints/
      latest                         text, the newest one's name, for people and for DeepSpeed's tools
      step_000200/
        manifest.json                written last: the TrainState, and each other file's size and checksum
        mp_rank_00_model_states.pt   DeepSpeed's: the weights, and at ZeRO 0 the optimizer's state
        zero_pp_rank_0_mp_rank_00_optim_states.pt   and so on, from ZeRO 1 on
      .step_000400.ID.partial/       an unfinished save: in progress, or interrupted by a kill
      .step_000200.replaced/         moved aside for a new checkpoint of the same step
      .step_000100.removed/          being deleted
      .universal/                    a checkpoint rewritten for other ranks; removed by the next save (`universal.py`)

`saving.py` writes and `loading.py` reads them with all ranks; this module handles a single rank.
"""

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from evenpack.data.order.step_shape import CostWeights
from evenpack.engine.activity import doing
from evenpack.errors import CheckpointError, ConfigError, UnjudgedCheckpointError
from evenpack.files import explained, file_checksum, fsync_directory, fsync_file, read_json, write_json

CHECKPOINTS = "checkpoints"
"""Name of the folder in a run's output directory."""

MANIFEST = "manifest.json"
LATEST = "latest"
PARTIAL = "partial"
REPLACED = "replaced"
REMOVED = "removed"
UNIVERSAL = ".universal"
"""Name of the folder of converted checkpoints."""

FORMAT = 2
"""Format of the manifest and of the files beside it. It rises with any change that an older checkpoint does not
survive: a key of the run file renamed or given another default, another content of `TrainState`. A new key whose
default is the earlier behaviour needs no new number (`continuation.compare_run_files`)."""

_CHECKPOINT = re.compile(rf"step_(\d{{6,}})|\.step_(\d{{6,}})\.{REPLACED}")
_HIDDEN = re.compile(
    rf"\.step_\d+\.(([0-9a-f]+\.)?{PARTIAL}|{REPLACED}|{REMOVED})|\.{LATEST}\.[0-9a-f]+\.partial|\{UNIVERSAL}"
)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a run needs, besides its weights and its optimizer's state, to continue as if it had never stopped."""

    step: int
    """Steps done, skipped ones included."""
    fingerprint: str
    """Fingerprint of the prepared data and the seed: it determines which packs form which step."""
    world_size: int
    zero_stage: int
    cost_weights: CostWeights
    """The weights by which packs or sequences are assigned to ranks."""
    config: dict[str, Any]
    """The resolved run file, as JSON values."""
    reached_accuracy: float | None
    """The accuracy of this step that reached the run's target; None if it did not."""
    samples: int
    """Number of sequences trained on."""
    stages: tuple[dict[str, Any], ...] = ()
    """The stages that have begun (`ResolvedRun.past`); none in a checkpoint from before there were any."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.world_size < 1:
            raise ValueError(f"step {self.step} or world size {self.world_size} is out of range")

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"cost_weights": self.cost_weights.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainState":
        """Returns the state of a JSON object.

        Raises: KeyError, TypeError, ValueError or ConfigError if `to_json` did not make it.
        """
        read = {
            "cost_weights": CostWeights.from_json(values["cost_weights"]),
            "stages": tuple(values.get("stages", ())),
        }
        known = {name: value for name, value in values.items() if name != "validation_loss"}  # was there before
        return cls(**(known | read))


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint as it was when it was saved."""

    name: str
    """Path relative to the checkpoint, with '/'."""
    size: int
    """Size in bytes."""
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose manifest could be read."""

    path: Path
    state: TrainState
    files: tuple[FileRecord, ...]

    @property
    def step(self) -> int:
        return self.state.step


def checkpoint_name(step: int) -> str:
    """Returns the directory's name; steps beyond a million only make it longer."""
    return f"step_{step:06d}"


def hidden(name: str, suffix: str) -> str:
    """Returns the name under which the checkpoint `name` does not count as one."""
    return f".{name}.{suffix}"


def find_candidates(directory: Path) -> list[Path]:
    """Returns checkpoints by their names alone, newest first.

    One that was moved aside counts if a kill came before the new one had the name.

    Raises: UnjudgedCheckpointError if the directory cannot be read.
    """
    # In the order of names hidden ones come first: a visible one has precedence over the one that was moved aside.
    found = {step: path for path in _children(directory) if (step := step_of(path)) is not None}
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(path: Path) -> int | None:
    """Returns the step in the name of a checkpoint; None for other files."""
    match = _CHECKPOINT.fullmatch(path.name)
    return None if match is None else int(match[1] or match[2])


def find_leftovers(directory: Path) -> list[Path]:
    """Returns all hidden entries that saves and removals left; they are useless once a newer checkpoint is complete."""
    return sorted(path for path in _children(directory) if _HIDDEN.fullmatch(path.name))


def list_files(directory: Path) -> list[str]:
    """Returns the names of all files below `directory` except its manifest, sorted."""
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST)


def commit_files(directory: Path, names: Iterable[str]) -> list[FileRecord]:
    """Flushes files to disk and returns their sizes and checksums."""
    records = []
    for name in names:
        path = directory / name
        fsync_file(path)
        records.append(FileRecord(name=name, size=path.stat().st_size, checksum=file_checksum(path)))
        doing.tick()
    return records


def write_manifest(directory: Path, state: TrainState, files: Sequence[FileRecord]) -> None:
    """Writes the manifest, which declares `directory` to be a complete checkpoint."""
    for folder in sorted({(directory / record.name).parent for record in files} | {directory}):
        fsync_directory(folder)
    content = {
        "format": FORMAT,
        "saved_at": time.time(),
        "state": state.to_json(),
        "files": [asdict(record) for record in sorted(files, key=lambda record: record.name)],
    }
    write_json(directory / MANIFEST, content | {"checksum": _content_checksum(content)})


def read_manifest(path: Path) -> Checkpoint:
    """Reads the manifest of the checkpoint at `path`; its other files are not read.

    Raises: CheckpointError with the problem of the manifest, without the checkpoint's path; UnjudgedCheckpointError if
    it cannot be read now, or is of another version of evenpack.
    """
    try:
        with leaving_alone(path / MANIFEST):
            content = read_json(path / MANIFEST)
        _require_no_later_format(path, content)
        checksum = content.pop("checksum")
        found = _content_checksum(content)
        if checksum != found:
            raise CheckpointError(f"{MANIFEST} has checksum {found}, expected {checksum}")
        _require_no_earlier_format(path, content["format"])
        files = tuple(FileRecord(**record) for record in content["files"])
        checkpoint = Checkpoint(path=path, state=TrainState.from_json(content["state"]), files=files)
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST} is missing") from error
    except (NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{MANIFEST} is unreadable ({type(error).__name__}: {error})") from error
    if checkpoint.step != step_of(path):
        raise CheckpointError(f"{MANIFEST} is of step {checkpoint.step}, unlike the directory's name")
    return checkpoint


def manifest_or_problem(path: Path) -> tuple[Checkpoint | None, str | None]:
    """Returns the checkpoint at `path`, or the problem of its manifest. Raises: UnjudgedCheckpointError."""
    try:
        return read_manifest(path), None
    except UnjudgedCheckpointError:
        raise
    except CheckpointError as error:
        return None, str(error)


def find_wrong_size(checkpoint: Checkpoint) -> str | None:
    """Returns the problem of the first file that is missing or of another size than when it was saved, else None.

    Raises: UnjudgedCheckpointError if the system cannot say.
    """
    for record in checkpoint.files:
        file = checkpoint.path / record.name
        try:
            with leaving_alone(file):
                size = file.stat().st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            return f"{record.name} cannot be found ({error.strerror})"
        if size != record.size:
            return f"{record.name} has {size} bytes, expected {record.size}"
    return None


def find_wrong_content(checkpoint: Checkpoint, files: Iterable[FileRecord]) -> str | None:
    """Returns the problem of the first of `files` whose bytes are not those that were saved; None if there is none.

    Raises: UnjudgedCheckpointError if one cannot be read now.
    """
    for record in files:
        file = checkpoint.path / record.name
        try:
            with leaving_alone(file):
                checksum = file_checksum(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            return f"{record.name} cannot be found ({error.strerror})"
        if checksum != record.checksum:
            return f"{record.name} has checksum {checksum}, expected {record.checksum}"
        doing.tick()
    return None


def whole_by_size(directory: Path) -> list[Checkpoint]:
    """Returns the checkpoints whose files have the right sizes: reading all bytes at each save would be slow.

    Raises: UnjudgedCheckpointError.
    """
    found = (checkpoint_by_size(path) for path in find_candidates(directory))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def checkpoint_by_size(path: Path) -> Checkpoint | None:
    """Returns the checkpoint at `path`; None if its manifest is damaged, or a file is missing or of another size.

    Raises: UnjudgedCheckpointError if that cannot be told: it may be complete all the same.
    """
    checkpoint, _ = manifest_or_problem(path)
    return checkpoint if checkpoint is not None and find_wrong_size(checkpoint) is None else None


def remove_checkpoint(path: Path, *, rename: Callable[[Path, Path], object] = Path.rename) -> bool:
    """Removes a checkpoint's name by `rename`, then deletes its files; returns whether all could be deleted.

    A kill in between leaves a hidden rest, never half a checkpoint under its own name.
    """
    if not path.name.startswith("."):
        remnant = path.with_name(hidden(path.name, REMOVED))
        shutil.rmtree(remnant, ignore_errors=True)
        rename(path, remnant)
        path = remnant
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return not path.exists()


def leaving_alone(path: Path) -> AbstractContextManager[None]:
    """Makes an error of the system at a checkpoint, or a file of one, an UnjudgedCheckpointError; see `explained`."""
    then = "run the same command again, or move the checkpoint away: it may be complete, and is left alone"
    return explained(path, UnjudgedCheckpointError, place=f" on {socket.gethostname()}", then=then)


def _require_no_later_format(path: Path, content: dict[str, Any]) -> None:
    """Checks it before anything else, because a later version may compute the checksum in another way."""
    found = content.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise UnjudgedCheckpointError(
            f"{path / MANIFEST} has format {found}, which a later version of evenpack writes; this one reads {FORMAT}, "
            f"and leaves it alone: upgrade, or move {path} away"
        )


def _require_no_earlier_format(path: Path, found: int) -> None:
    if found < FORMAT:
        raise UnjudgedCheckpointError(
            f"{path / MANIFEST} has format {found}, of an earlier version of evenpack; this one reads {FORMAT}: "
            "continue with the version that wrote it, or export its weights with that one, for "
            "training.initialize_from of a new run"
        )


def _children(directory: Path) -> list[Path]:
    """Returns what the directory holds, by name; nothing if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError), leaving_alone(directory):
        return sorted(directory.iterdir())
    return []


def _content_checksum(content: dict[str, Any]) -> str:
    """Returns the checksum of a manifest without its own; independent of white space and of the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())
