"""The progress of each job of a study, read from its folder.

result.json     written when it has ended; a finished one is never started again
metrics.jsonl   a run's own log: the step that it has reached
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from evenpack.data.checksums import checksum_of_json
from evenpack.engine.checkpoints.continuation import with_defaults
from evenpack.engine.checkpoints.files import find_changed_keys
from evenpack.engine.reporting.metrics import METRICS
from evenpack.errors import ConfigError
from evenpack.files import parse_json_object, read_json_object, write_json
from evenpack.studies.runs.jobs import Job

RESULT = "result.json"

_PLACES = (
    "run.name",
    "run.output_dir",
    "data.prepared_dir",
    "data.tokens_dir",
    "data.folder",
    "training.initialize_from",
)
"""Keys of paths, which do not change the trained result."""
_TAIL_BYTES = 1 << 14
"""Bytes read at the end of the log; more than a record of metrics.jsonl has."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The outcome of a run."""

    state: Literal["finished", "failed"]
    message: str
    """Error of a run that failed."""
    config: dict[str, Any]
    """The run file with the overrides applied."""

    def write(self, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        content = json.loads(json.dumps(asdict(self)))  # as it will be read
        write_json(output_dir / RESULT, content | {"checksum": checksum_of_json(content)})


_KEYS = {field.name for field in fields(RunResult)}


def read_result(run: Job) -> RunResult | None:
    """Reads a result; None if the run has not ended.

    Raises: ConfigError if the run has finished with other settings than the study has now.
    """
    path = run.output_dir / RESULT
    values = read_json_object(path)
    if values is None:
        return None
    content = {key: value for key, value in values.items() if key != "checksum"}
    if content.keys() != _KEYS or values.get("checksum", checksum_of_json(content)) != checksum_of_json(content):
        return None  # damaged: the command is given again, and finds what it has done
    result = RunResult(**content)
    changed = find_changed_keys(with_defaults(result.config, type(run.config)), run.config.model_dump(mode="json"))
    changed = {key: pair for key, pair in changed.items() if key not in _PLACES}
    if result.state == "finished" and changed:
        key, (before, now) = next(iter(changed.items()))
        raise ConfigError(
            f"run {run.key} was trained with {key} {before}, and the study now has {now}: undo that change, choose "
            f"another study.output_dir, or remove {run.output_dir} to train it again"
        )
    return result


def steps_done(output_dir: Path) -> int:
    """Returns the updates in the run's log, reading only its end."""
    try:
        with (output_dir / METRICS).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines[:-1]):  # what follows the last line feed is still being written
        try:
            return int(parse_json_object(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return 0


def describe_state(run: Job) -> str:
    """Describes the state in a few words. Raises: as `read_result`."""
    result = read_result(run)
    if result is not None:
        return result.state
    done = run.done()
    return f"{run.unit} {done}" if done else "to do"
