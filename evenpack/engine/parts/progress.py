"""Tells how far a run is: people by a bar or occasional lines, and the watchers of heartbeats by what a rank does."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from evenpack import console
from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.activity import START, doing
from evenpack.engine.build import Start, TrainingRun
from evenpack.engine.engine import Phase
from evenpack.engine.parts.part import Part, Step
from evenpack.progress import Piece, Progress


class ProgressLine(Part):
    """Shows the step, loss, learning rate, tokens/s and remaining time, and the result of each evaluation.

    The time of evaluations and saves is in no rate.
    """

    is_for_main_alone = True

    def __init__(self, run: Start) -> None:
        self._run = run
        self._progress = Progress(console.messages())
        self._steps: Piece | None = None
        """None before the first step, whose batches a rank may have waited for."""
        self._pause = ExitStack()
        self._tokens = 0
        self._facts: tuple[str, ...] = ()

    def opened(self) -> Progress:
        return self._progress

    def before_step(self, step: Step) -> None:
        if self._steps is None:
            self._steps = self._progress.begin("step", done=self._run.steps_done, unit="tokens", counted=True)

    def evaluating(self, step: Step) -> None:
        self._pause.enter_context(self._progress.paused())

    def evaluated(self, step: Step) -> None:
        self._pause.close()

    def recording(self, step: Step) -> None:
        """Shows that the step is done; after one without an update, loss and learning rate stay as they were."""
        assert self._steps is not None, "the step has begun"
        if step.update is not None and step.is_trained:
            self._tokens += step.update.totals.counts.tokens
            self._facts = (f"loss {step.update.totals.loss:.4f}", f"lr {step.learning_rate:.2e}")
        stop = self._run.resolved.run_file.training.stop_step
        self._steps.update(step.steps_done, stop, amount=self._tokens, facts=self._facts)
        if step.evaluations:
            kind = "token loss" if self._run.config.model.losses[1:] else "loss"
            losses = ", ".join(f"{source} {found.loss:.4f}" for source, found in step.evaluations.items())
            self._progress.note(f"step {step.steps_done}  validation {kind}, {losses}")

    def saving(self, step: Step) -> None:
        self._pause.enter_context(self._progress.paused())

    def saved(self, step: Step) -> None:
        self._pause.close()


class StepActivities(Part):
    """Tells what a rank begins to do within a step, from the phases that its engine has ended."""

    def __init__(self, run: TrainingRun) -> None:
        self._engine = run.engine
        self._step = 0
        self._left = 0
        """Micro-batches of the step on this rank that are not computed."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._engine.observer = self._end_of
        yield

    def before_step(self, step: Step) -> None:
        if isinstance(step.batches, StepBatches):
            self._step, self._left = step.steps_done, len(step.batches.micro_batches)
            doing.enter("computing gradients", step.steps_done)

    def after_step(self, step: Step) -> None:
        """Ends the start: from now on nothing but a compilation takes long without a tick."""
        if not step.is_skipped:
            doing.end_black_box(START)

    def _end_of(self, phase: Phase) -> None:
        """Takes a phase that the engine has ended."""
        if phase == "backward":
            self._left -= 1
            # Each micro-batch is progress: many of them may take longer than a run may hang.
            doing.enter("computing gradients" if self._left else "reducing gradients", self._step)
        elif phase == "all_reduce":
            doing.enter("updating weights", self._step)
        elif phase == "update":
            doing.enter("summing over the ranks", self._step)
