"""The parts of the training loop: classes with a few hooks, and the step that is passed to them.

A part is open while the loop runs, and does something at the hooks that it defines. Every rank calls each hook for its
parts in the order of their list, so that a part may wait for the other ranks in it. Some parts are rank 0's alone.

    before_step   the step's batches have come
    after_step    its update is made, left out or skipped
    evaluating    an evaluation is due; evaluated: it is done
    recording     the step is complete, and goes into the records of the run
    saving        a checkpoint is due, and is saved unless a part before the last one raises; saved: it is done
    ending        the last step is recorded and saved
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from evenpack.data.batches.pipeline import SkippedStep, StepBatches
from evenpack.engine.build import TrainingRun
from evenpack.engine.engine import LocalStep
from evenpack.engine.evaluate import Evaluations, overall_accuracy
from evenpack.engine.reporting.rank_waits import ExplainedStep, WaitValues
from evenpack.engine.reporting.step_totals import StepTotals
from evenpack.engine.world.distributed import World

Hook = Literal["before_step", "after_step", "evaluating", "evaluated", "recording", "saving", "saved", "ending"]
"""Names of the hooks, in the order in which a step goes through them."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The results of a step that was computed."""

    batches: StepBatches
    local: LocalStep
    """This rank's results."""
    totals: StepTotals
    """The results summed over all ranks, the same on each."""
    seconds: float
    """Time of the step on this rank, the wait for its batches included."""


class Step:
    """A step on its way through the loop; the loop and its parts fill in its attributes."""

    def __init__(self, run: TrainingRun, batches: StepBatches | SkippedStep, *, samples_before: int) -> None:
        self.batches = batches
        self.steps_done = batches.step + 1
        """Steps done with it, skipped ones included: the number by which records and messages name it."""
        self.learning_rate: float = run.engine.learning_rate(batches.step)
        """The rate of its update, whether that is made or not."""
        self.update: Update | None = None
        """Results of the update; None before it is computed, and for a step that the run file skips."""
        self.is_left_out = False
        """Whether its update was computed and not made (`bad_steps.py`)."""
        self.stop = False
        """Whether a stop is requested on any rank."""
        self.evaluations: Evaluations | None = None
        """The step's evaluations; None if none is due."""
        self.waits: ExplainedStep | None = None
        """The waits of its ranks; None if they are not split (`rank_times.py`)."""
        self.rank_times: dict[str, Any] | None = None
        """Times of each rank; None if they are not due (`rank_times.py`)."""
        self.record: dict[str, Any] | None = None
        """Its record in metrics.jsonl, on rank 0 (`metrics_writer.py`)."""
        self._training = run.start.resolved.run_file.training
        self._part_ends = run.start.config.training.stop_step
        self._samples_before = samples_before

    @property
    def is_skipped(self) -> bool:
        """Whether the run file skips it."""
        return isinstance(self.batches, SkippedStep)

    @property
    def is_trained(self) -> bool:
        """Whether its update was made."""
        return self.update is not None and not self.is_left_out

    @property
    def samples(self) -> int:
        """Number of sequences trained on up to its end, earlier starts included."""
        return self._samples_before + (self.batches.counts.sequences if self.is_trained else 0)

    @property
    def reached_accuracy(self) -> float | None:
        """The accuracy of its evaluation if it reaches the run's target, else None."""
        accuracy, target = overall_accuracy(self.evaluations or {}), self._training.target_accuracy
        return accuracy if accuracy is not None and target is not None and accuracy >= target else None

    @property
    def is_last(self) -> bool:
        """Whether the run file has no more steps, or the target is reached."""
        return self.steps_done == self._training.stop_step or self.reached_accuracy is not None

    @property
    def ends_schedule(self) -> bool:
        """Whether the run is complete with it, and not only this start of it."""
        return self.steps_done == self._training.planned_steps or self.reached_accuracy is not None

    @property
    def ends_loop(self) -> bool:
        """Whether no step follows in this start of the run, or in the part of it that is built."""
        return self.is_last or self.stop or self.ends_part

    @property
    def ends_part(self) -> bool:
        """Whether it is the last step of a part of the run, after which the next one is built."""
        return self.steps_done == self._part_ends

    def is_due(self, every_steps: int | None) -> bool:
        """Returns whether something that is done every so many steps is due; None: never."""
        return every_steps is not None and self.steps_done % every_steps == 0


class Part:
    """One part of the loop. Each hook does nothing unless a part defines it."""

    is_for_main_alone: ClassVar[bool] = False
    """Whether it works on rank 0 alone; it waits for no other rank then."""

    def opened(self) -> AbstractContextManager[object]:
        """Returns a context that is open from before the first batch to the end of the loop, or to its error."""
        return nullcontext()

    @property
    def wants_stop(self) -> bool:
        """Whether the run should stop at the end of this step; checked once per step, on each rank alone."""
        return False

    def wait_values(self, batches: StepBatches, local: LocalStep, *, loader_seconds: float) -> WaitValues | None:
        """Returns what splits the waits of the ranks; it is reduced with the step's own values, and one part has it."""
        return None

    def before_step(self, step: Step) -> None: ...

    def after_step(self, step: Step) -> None: ...

    def evaluating(self, step: Step) -> None: ...

    def evaluated(self, step: Step) -> None: ...

    def recording(self, step: Step) -> None: ...

    def saving(self, step: Step) -> None: ...

    def saved(self, step: Step) -> None: ...

    def ending(self, step: Step) -> None: ...


class Parts:
    """The list of a loop's parts on one rank."""

    def __init__(self, parts: Sequence[Part], world: World, *, stop_requested: Callable[[], bool]) -> None:
        """`stop_requested` is called once per step."""
        self._stop_requested = stop_requested
        self._parts = [part for part in parts if world.is_main or not part.is_for_main_alone]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the parts in their order, and closes them in the reverse one."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.opened())
            yield

    @property
    def wants_stop(self) -> bool:
        """Whether this rank wants the run to stop: because it is asked to, or because one of the parts does."""
        return self._stop_requested() or any(part.wants_stop for part in self._parts)

    def wait_values(self, batches: StepBatches, local: LocalStep, *, loader_seconds: float) -> WaitValues | None:
        """Returns those of the part that has them, when the step's update is made."""
        each = (part.wait_values(batches, local, loader_seconds=loader_seconds) for part in self._parts)
        return next((one for one in each if one is not None), None)

    def call(self, hook: Hook, step: Step) -> None:
        """Calls a hook of each part."""
        for part in self._parts:
            getattr(part, hook)(step)
