"""Faults while a checkpoint is converted: a run that goes on with other ranks, or at another ZeRO stage."""

import shutil
import signal
import time
from contextlib import suppress
from itertools import product
from random import Random

import psutil

from faults.life import Life
from faults.subject import CHECKPOINT_EVERY, Case, Result, Subject, SubjectRun, listed, run_to_end
from faults.tried import BrokenError, MissedError, Tried, require_clear, require_nothing_left

BEFORE = (
    Case(stack="torchrun", ranks=2, zero_stage=1),
    Case(stack="torchrun", ranks=2, zero_stage=3),
    Case(stack="python", ranks=1, zero_stage=0),
)
AFTER = (
    Case(stack="python", ranks=1, zero_stage=1),
    Case(stack="torchrun", ranks=2, zero_stage=2),
    Case(stack="evenpack train", ranks=2, zero_stage=0),
)
DURING = "SIGKILL during the conversion of a checkpoint"

_START_SECONDS = 240.0


class ConvertingFaults:
    """Stops a run, and kills it while it goes on otherwise; the end must be that of one that was not killed."""

    def __init__(self, subject: Subject, random: Random) -> None:
        self._subject = subject
        self._random = random

    def one(self, name: str) -> Tried | None:
        """Tries one fault in a folder of that name; None if the conversion was over before it."""
        before, after = self._random.choice([pair for pair in product(BEFORE, AFTER) if _converts(*pair)])
        run = self._subject.new_run(name, before)
        undisturbed = self._subject.new_run(f"{name}_undisturbed", before)
        tried = Tried(name=DURING, where=f"{before} -> {after}", detail="")
        try:
            self._train_a_part(run)
            shutil.rmtree(undisturbed.output_dir, ignore_errors=True)
            shutil.copytree(run.output_dir, undisturbed.output_dir)
            expected = self._result_at(undisturbed, after)
            tried.detail = self._kill_while_converting(run.at(after), tried)
            if not self._result_at(run, after).equals(expected, after=0):
                raise BrokenError("the run ended with other weights or another order than one that was not killed")
            tried.outcome = "ended clearly"
        except MissedError:
            return None
        except BrokenError as problem:
            tried.problem = str(problem)
        finally:
            for one in (run, undisturbed):
                shutil.rmtree(one.folder, ignore_errors=True)
        return tried

    def _train_a_part(self, run: SubjectRun) -> None:
        """Trains until a checkpoint, and stops."""
        steps = CHECKPOINT_EVERY * self._random.randrange(1, 4)
        run_to_end([*run.command(), f"training.stop_after_steps={steps}"], run.environment())

    def _result_at(self, run: SubjectRun, case: Case) -> Result:
        run = run.at(case)
        run_to_end(run.command(), run.environment())
        return run.result()

    def _kill_while_converting(self, run: SubjectRun, tried: Tried) -> str:
        """Returns when it was killed, and what there was then. Raises: MissedError, BrokenError."""
        life = Life(run, run.command(), run.folder / "killed.log")
        universal = run.checkpoints / ".universal"
        try:
            if not life.wait_for(universal.exists, seconds=_START_SECONDS):
                raise BrokenError(f"nothing was converted: {life.said()[-600:]}")
            seconds = self._random.choice((0.0, self._random.uniform(0.0, 0.3)))
            time.sleep(seconds)
            names = sorted(path.name for path in listed(universal))
            life.mark()
            for process in life.ranks():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            end = life.wait_for_end()
            tried.said = life.said()[-800:]
            if end is None:
                raise BrokenError("the run did not end")
            if end.exit_code == 0:
                raise MissedError
            require_clear(end, run.case, silent=run.case.ranks == 1)
            require_nothing_left(life)
            tried.seconds = end.seconds
            return f"after {seconds:.2f} s, with {', '.join(names) or 'nothing'}"
        finally:
            life.kill()


def _converts(before: Case, after: Case) -> bool:
    """Returns whether a checkpoint has to be converted: at ZeRO 0 every rank has all."""
    return (before.zero_stage, after.zero_stage) != (0, 0)
