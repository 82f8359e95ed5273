"""Weights & Biases, online or into OUTPUT_DIR/wandb."""

import logging
from collections.abc import Mapping

from evenpack.engine.reporting.config import WandbSection
from evenpack.engine.reporting.definitions import scalars
from evenpack.engine.reporting.trackers.tracker import RunLog
from evenpack.files import read_json_object, write_json

log = logging.getLogger(__name__)

WANDB_RUN = "wandb_run.json"
"""Holds the id under which W&B knows the run, so that it goes on there."""


class WandbRun:
    """By W&B's own library. It takes no step back: a step that it has keeps the values that it had first."""

    def __init__(self, section: WandbSection, run: RunLog) -> None:
        import wandb

        path = run.output_dir / WANDB_RUN
        known = (read_json_object(path) or {}).get("id") if run.first_step else None
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
        write_json(path, {"id": self._run.id, "project": section.project})
        # Online the server says where it is; what was logged offline only metrics.jsonl can tell.
        is_offline = section.mode == "offline"
        self._next_step = run.told_step + 1 if known and is_offline else self._run.step
        log.info("Weights & Biases: %s", self._run.dir if is_offline else self._run.url)
        if known is None:
            for record in run.records():
                self.write(record["step"], scalars(record))

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        if step >= self._next_step:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """W&B writes in a process of its own, all the time."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
