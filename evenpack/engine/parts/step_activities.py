"""Reports what a rank begins to do within a step, from the phases that its engine has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

from evenpack.engine.activity import OnActivity
from evenpack.engine.engine import Phase, TrainingEngine
from evenpack.engine.parts.part import Part, Step


class StepActivities(Part):
    """Observes the engine while the loop runs."""

    def __init__(self, engine: TrainingEngine, on_activity: OnActivity) -> None:
        self._engine = engine
        self._on_activity = on_activity
        self._step = 0
        self._left = 0
        """Micro-batches of the step on this rank that are not computed."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._engine.observer = self._end_of
        yield

    def before_step(self, step: Step) -> None:
        if not step.is_skipped:
            self._step, self._left = step.number, self._engine.micro_batches
            self._on_activity("computing gradients", step.number)

    def _end_of(self, phase: Phase) -> None:
        """Takes a phase that the engine has ended."""
        if phase == "backward":
            self._left -= 1
            # Each micro-batch is progress: many of them may take longer than a run may hang.
            self._on_activity("computing gradients" if self._left else "reducing gradients", self._step)
        elif phase == "all_reduce":
            self._on_activity("updating weights", self._step)
        elif phase == "update":
            self._on_activity("summing over the ranks", self._step)
