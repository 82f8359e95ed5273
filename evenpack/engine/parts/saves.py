"""Saves the checkpoints of a run: in the background during the run, and waiting for the disk at its end."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from evenpack.engine.activity import doing
from evenpack.engine.build import TrainingRun
from evenpack.engine.checkpoints.background import BackgroundWriter
from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.engine.parts.metrics_writer import MetricsWriter, SaveCost
from evenpack.engine.parts.part import Part, Step
from evenpack.errors import SaveError

log = logging.getLogger(__name__)

_SAVE_TIMEOUT_SECONDS = 18.0
"""Seconds that a save in progress has to end when an error ends the run: less than the guard gives to such a rank."""


class Saves(Part):
    """Saves checkpoints at the end of steps, for all ranks; a save may be in flight while it is open."""

    def __init__(self, run: TrainingRun, writer: MetricsWriter) -> None:
        self._run = run
        self._writer = writer
        self._background = BackgroundWriter(run.checkpoints)
        self._step = run.start.steps_done
        """The step of the save in flight."""
        self._pause_seconds = 0.0
        self._has_warned = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # the other ranks may be anywhere
            doing.enter("waiting for a save", self._step)
            self._background.wait_alone(seconds=_SAVE_TIMEOUT_SECONDS)
            raise

    def after_step(self, step: Step) -> None:
        """Notes the end of a save in the background, before the step is recorded."""
        self._collect()

    def saving(self, step: Step) -> None:
        """Saves a checkpoint after `step`. It is on disk on return, unless the run continues.

        A failure is a warning if the run continues: the next save may succeed. Raises: SaveError otherwise.
        """
        started = time.perf_counter()
        goes_on = not step.ends_loop
        if goes_on:
            self._warn_of_waiting(step.steps_done)
        doing.enter("saving a checkpoint", step.steps_done)
        self._background.finish()
        doing.enter("saving a checkpoint", step.steps_done)
        self._collect()
        if self._run.start.world.is_main:
            self._writer.commit()
        training, engine = self._run.start.config.training, self._run.engine.deepspeed
        state = self._run.state(step.steps_done, samples=step.samples, reached_accuracy=step.reached_accuracy)
        result: Checkpoint | SaveError | None = None
        try:
            if goes_on and training.checkpoint_in_background:
                self._background.begin(engine, state)
            else:
                result = self._run.checkpoints.save(engine, state)
        except SaveError as error:
            if not goes_on:
                raise
            result = error
        self._step, self._pause_seconds = step.steps_done, time.perf_counter() - started
        if result is not None:
            self._note(result, seconds=self._pause_seconds)

    def _collect(self) -> None:
        ended = self._background.ended()
        if ended is not None:
            self._note(ended.result, seconds=ended.seconds)

    def _note(self, result: Checkpoint | SaveError, *, seconds: float) -> None:
        if not self._run.start.world.is_main:
            return
        cost: SaveCost = {"step": self._step, "pause_seconds": self._pause_seconds}
        if isinstance(result, SaveError):
            log.warning("step %d has no checkpoint, and the run goes on without it: %s", self._step, result)
            cost["failed"] = 1
        else:
            cost |= {"seconds": seconds, "bytes": sum(file.size for file in result.files)}
        self._writer.note_save(cost)

    def _warn_of_waiting(self, step: int) -> None:
        if self._background.is_writing and self._run.start.world.is_main and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the checkpoint of step %d is still being written when that of step %d is due, so training waits for "
                "it, now and whenever that happens: raise training.checkpoint_every_steps (%d) to go on without waits",
                self._step,
                step,
                self._run.start.config.training.checkpoint_every_steps,
            )
