"""Weights & Biases, online or into OUTPUT_DIR/wandb."""

import logging
from collections.abc import Mapping

from evenpack.engine.reporting.config import WandbSection
from evenpack.engine.reporting.definitions import scalars
from evenpack.engine.reporting.trackers.tracker import RunLog
from evenpack.files import read_json_object, write_json

log = logging.getLogger(__name__)

WANDB_RUN = "wandb_run.json"
"""Holds the run's W&B id and the step at which its last start ended normally."""


class WandbRun:
    """Logs with W&B's own library. A step that its server already has keeps its first values."""

    def __init__(self, section: WandbSection, run: RunLog) -> None:
        import wandb

        self._path = run.output_dir / WANDB_RUN
        self._step = run.first_step
        known = self._known_id(section, run)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            tags=section.tags,
            name=run.name,
            id=known,
            resume="allow",
            mode=section.mode,
            dir=str(run.output_dir),
            config=run.config,
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._note(ended_at_step=None)
        # Online the server returns the next step; offline a W&B run is resumed only if it has all earlier steps.
        is_offline = section.mode == "offline"
        self._next_step = run.first_step + 1 if known and is_offline else self._run.step
        log.info("Weights & Biases: %s", self._run.dir if is_offline else self._run.url)
        for record in run.records():
            self.write(record["step"], scalars(record))

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        self._step = step
        if step >= self._next_step:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Does nothing: W&B writes continuously, in a process of its own."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._note(ended_at_step=self._step)

    def _known_id(self, section: WandbSection, run: RunLog) -> str | None:
        """Returns the id of the W&B run that has exactly the earlier steps; None if a new W&B run begins.

        Offline, a kill loses what W&B's process has not written, and a W&B run from which training goes back to an
        earlier step has too many.
        """
        known = read_json_object(self._path) or {}
        is_whole = section.mode == "online" or known.get("ended_at_step") == run.first_step
        return known.get("id") if run.first_step and is_whole else None

    def _note(self, *, ended_at_step: int | None) -> None:
        write_json(self._path, {"id": self._run.id, "project": self._run.project, "ended_at_step": ended_at_step})
