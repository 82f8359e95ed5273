"""The trackers of a run: copies of the numbers of metrics.jsonl, on rank 0, in other forms.

metrics.jsonl itself (`metrics_writer.py`) is always written, and is the authoritative record. One more tracker is a
`Tracker` here, a key of the section `metrics:`, a line of `_OPENERS` and, where it needs a package, one of
`require_trackers` (`resolving/requirements.py`).
"""

import csv
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import StringIO
from typing import Any, Protocol, runtime_checkable

from evenpack.engine.build import Start
from evenpack.engine.config import WandbSection
from evenpack.engine.ownership import require_owned
from evenpack.engine.parts.part import Part, Step
from evenpack.engine.reporting.definitions import scalars
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.errors import ConfigError
from evenpack.files import atomic_open, read_json_object, write_json

log = logging.getLogger(__name__)

CSV_TABLE = "metrics.csv"

_STEP = "step"

TENSORBOARD = "tensorboard"

_FLUSH_SECONDS = 30

WANDB_RUN = "wandb_run.json"
"""Holds the run's W&B id and the step at which its last start ended normally."""

Row = Mapping[str, int | float | str]


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of each step; an error in it does not stop the run."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds the metrics of a step, by `group/name`; steps are in ascending order."""
        ...

    def flush(self) -> None:
        """Flushes to disk; called before a checkpoint of this step is saved."""
        ...

    def close(self, *, failed: bool) -> None:
        """Closes the tracker; `failed`: the run ends with an error."""
        ...


class Trackers(Part):
    """The trackers of a run, on rank 0. One that fails causes one warning and is left out from then on.

    It is not closed: a tracker that waits for its network there would keep all ranks waiting.
    """

    is_for_main_alone = True

    def __init__(self, run: Start) -> None:
        self._run = run
        self._open: dict[str, Tracker] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens those that the section names; `MetricsWriter` has truncated metrics.jsonl before.

        Raises: ConfigError for one that cannot be opened.
        """
        failed = True
        try:
            for name, opener in _OPENERS.items():
                if value := getattr(self._run.config.metrics, name):
                    self._open[name] = self._opened(name, partial(opener, value, self._run))
            yield
            failed = False
        finally:
            self._each(lambda tracker: tracker.close(failed=failed))

    def recording(self, step: Step) -> None:
        if step.record is not None:
            self.write(step.record)

    def write(self, record: Mapping[str, Any]) -> None:
        """Passes the numbers of a record of metrics.jsonl to the trackers.

        Raises: ValueError if a name in it is not a metric.
        """
        values = scalars(record)
        self._each(lambda tracker: tracker.write(record["step"], values))

    def saving(self, step: Step) -> None:
        self._each(lambda tracker: tracker.flush())

    def _opened(self, name: str, opener: Callable[[], Tracker]) -> Tracker:
        try:
            return opener()
        except Exception as error:  # whatever a tracker's library may raise
            raise ConfigError(
                f"metrics.{name} cannot be opened ({type(error).__name__}: {error}): fix that, or remove it from the "
                "section metrics:"
            ) from error

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._open[name]
                log.warning(
                    "metrics.%s failed (%s: %s) and gets no further steps; the run continues, and metrics.jsonl is "
                    "complete",
                    name,
                    type(error).__name__,
                    error,
                )


def _earlier_records(run: Start) -> list[dict[str, Any]]:
    """Returns the records of the steps done before, for a tracker that does not have them."""
    return read_metrics(run.config.run.output_dir / METRICS)


class CsvMetrics:
    """Writes the table from metrics.jsonl when a run begins or resumes, and then a line for each step."""

    def __init__(self, run: Start) -> None:
        self._path = run.config.run.output_dir / CSV_TABLE
        self._columns = [_STEP]
        self._replace([{_STEP: record["step"], **scalars(record)} for record in _earlier_records(run)])

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        row = {_STEP: step, **values}
        if not row.keys() <= set(self._columns):  # the first evaluation adds columns
            with self._path.open(newline="", encoding="utf-8") as file:
                rows: list[Row] = list(csv.DictReader(file))
            self._file.close()
            self._replace([*rows, row])
        else:
            self._file.write(_csv_lines(self._columns, [row]))

    def flush(self) -> None:
        """Does nothing: each line is written at once."""

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _replace(self, rows: Sequence[Row]) -> None:
        """Writes the whole table, with a column for each name in any row, and opens it for appending."""
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        with atomic_open(self._path, check=partial(require_owned, self._path.parent)) as file:
            file.write(_csv_lines(self._columns, [{name: name for name in self._columns}, *rows]))
        self._file = self._path.open("ab", buffering=0)


def _csv_lines(columns: Sequence[str], rows: Iterable[Row]) -> bytes:
    text = StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class TensorBoardEvents:
    """Writes with torch's `SummaryWriter`. A resumed run makes TensorBoard discard the steps that are repeated."""

    def __init__(self, run: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.config.run.output_dir / TENSORBOARD
        is_new = not any(directory.glob("events.out.tfevents.*"))
        purge_step = None if is_new else run.steps_done + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=_FLUSH_SECONDS)
        if is_new:
            for record in _earlier_records(run):
                self.write(record["step"], scalars(record))

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbRun:
    """Logs with W&B's own library. A step that its server already has keeps its first values."""

    def __init__(self, section: WandbSection, run: Start) -> None:
        import wandb

        output_dir = run.config.run.output_dir
        self._path = output_dir / WANDB_RUN
        self._step = run.steps_done
        known = self._known_id(section, run)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=run.config.run.name,
            id=known,
            resume="allow",
            mode=section.mode,
            dir=str(output_dir),
            config=run.config.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._note(ended_at_step=None)
        # Online the server returns the next step; offline a W&B run is resumed only if it has all earlier steps.
        is_offline = section.mode == "offline"
        self._next_step = run.steps_done + 1 if known and is_offline else self._run.step
        log.info("Weights & Biases: %s", self._run.dir if is_offline else self._run.url)
        for record in _earlier_records(run):
            self.write(record["step"], scalars(record))

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        if step >= self._next_step:
            self._run.log(dict(values), step=step)
        self._step = step

    def flush(self) -> None:
        """Does nothing: W&B writes continuously, in a process of its own."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._note(ended_at_step=self._step)

    def _known_id(self, section: WandbSection, run: Start) -> str | None:
        """Returns the id of the W&B run that has exactly the earlier steps; None if a new W&B run begins.

        Offline, a kill loses what W&B's process has not written, and a W&B run from which training goes back to an
        earlier step has too many.
        """
        known = read_json_object(self._path) or {}
        is_whole = section.mode == "online" or known.get("ended_at_step") == run.steps_done
        return known.get("id") if run.steps_done and is_whole else None

    def _note(self, *, ended_at_step: int | None) -> None:
        write_json(self._path, {"id": self._run.id, "project": self._run.project, "ended_at_step": ended_at_step})


_OPENERS: dict[str, Callable[[Any, Start], Tracker]] = {
    "csv": lambda _, run: CsvMetrics(run),
    "tensorboard": lambda _, run: TensorBoardEvents(run),
    "wandb": WandbRun,
}
"""How each tracker is opened, by its key in the section: of the key's value and the run."""
