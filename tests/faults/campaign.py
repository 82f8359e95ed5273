"""Draws faults until the time is over, judges each, and compares each run that has had some with an undisturbed one.

A run is started again and again by the same command, with faults while it is on and between two starts, until it has
reached its last step. A fault is survived if the run went on, or ended within a minute with a message and an exit code
other than 0, and if in the end weights and order are those of the undisturbed run, bit for bit.
"""

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from evenpack.errors import CheckpointError
from faults import subject
from faults.at_rest import Damage, damage_a_file
from faults.converting import ConvertingFaults
from faults.disks import remove_small_disk, small_disk
from faults.life import END_SECONDS, Life
from faults.preparing import PreparingFaults
from faults.running import (
    A_FILE_DELETED,
    NAN,
    RUNNING_FAULTS,
    SPOILS,
    Injected,
    RunningFault,
    Spoil,
    spoils_of,
    wait_for_moment,
    write_spoil,
)
from faults.subject import CASES, Case, Result, Stack, Subject, SubjectRun
from faults.tried import (
    BrokenError,
    MissedError,
    OtherResultError,
    Tried,
    require_clear,
    require_nothing_left,
    require_said,
    require_saved,
)

_SMALL_DISK_MEGABYTES = 8
_ENOUGH_STEPS = 4
"""Steps by which a run shows that it goes on."""
_START_SECONDS = 240.0
"""What a start may take on a busy machine."""
_HANGS_SECONDS = 900.0
_MOST_LIVES = 14
"""Starts of one run with faults; after them it runs to its end undisturbed."""
_OFTENER = 5
"""How much oftener a fault is drawn that costs no start."""
_PASS_CODES_ON: tuple[Stack, ...] = ("evenpack train", "python")
"""Stacks whose exit code is the ranks'."""


@dataclass(kw_only=True)
class State:
    """A run on its way through its lives."""

    run: SubjectRun
    most_lives: int
    lives: int = 0
    case: Case | None = None
    """How the run was started last: a spoiled worker always by `deepspeed`."""
    tried: list[Tried] = field(default_factory=list)
    plan: list[str] | None = None
    """Names of the faults that are to come; None: random ones."""
    logged_after: int = 0
    """The step after which metrics.jsonl is compared: a fault may have taken the lines before it."""

    def add(self, name: str, moment: str, detail: str) -> Tried:
        """Adds a fault, which is lost until it is judged otherwise."""
        self.tried.append(Tried(name=name, where=f"{self.case or self.run.case}; {moment}", detail=detail))
        if self.plan:
            self.plan.pop(0)
        return self.tried[-1]


class Campaign:
    """Faults in one folder, with one seed."""

    def __init__(self, folder: Path, *, seed: int, say: Callable[[str], None]) -> None:
        self.tried: list[Tried] = []
        self._folder = folder
        self._random = Random(seed)
        self._say = say
        self._runs = 0
        disk = folder / "small_disk"
        remove_small_disk(disk)
        self._disk = disk if small_disk(disk, megabytes=_SMALL_DISK_MEGABYTES) else None
        if self._disk is None:
            say("no small disk can be mounted here: no fault fills one")
        self._subject = Subject(folder / "subject")
        self._converting = ConvertingFaults(self._subject, self._random)
        self._preparing = PreparingFaults(folder / "preparing", disk=self._disk, random=self._random)

    def close(self) -> None:
        """Takes the small disk away."""
        if self._disk is not None:
            remove_small_disk(self._disk)

    def run_for(self, seconds: float) -> None:
        """Tries faults for that time, and until the last run is done."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            drawn = self._random.random()
            if drawn < 0.3:
                self.prepare_with_faults(3)
            elif drawn < 0.4:
                self.convert_with_a_fault()
            else:
                self.run_with_faults(self._random.choice(CASES), deadline=deadline)

    def prepare_with_faults(self, number: int) -> None:
        """Prepares data so many times with a fault each."""
        for _ in range(number):
            tried = self._preparing.one()
            if tried is not None:
                self._tell(tried)
                self.tried.append(tried)

    def convert_with_a_fault(self) -> None:
        """Kills a run while it converts a checkpoint."""
        self._runs += 1
        tried = self._converting.one(f"converted_{self._runs}")
        if tried is not None:
            self._tell(tried)
            self.tried.append(tried)

    def begin_again(self, seed: int) -> None:
        """Makes what comes next independent of what was before."""
        self._random.seed(seed)

    def run_with_faults(
        self, case: Case, *, deadline: float, most_lives: int = _MOST_LIVES, plan: Sequence[str] | None = None
    ) -> None:
        """Trains one run to its end, with faults until the deadline.

        `plan`: the names of running faults and spoils, in their order, instead of random ones. A spoil needs a start of
        its own, so what comes before it must end the run.
        """
        self._runs += 1
        on_disk = self._disk if plan is None and self._random.random() < 0.4 else None
        run = self._subject.new_run(f"run_{self._runs}", case, within=on_disk)
        state = State(run=run, most_lives=most_lives, plan=None if plan is None else list(plan))
        reference = self._subject.reference(case.ranks, case.zero_stage)
        try:
            while not self._live(state, deadline=deadline):
                pass
            if not self._result(state).equals(reference, after=state.logged_after):
                raise OtherResultError("the run ended with other weights or another order than the undisturbed run")
        except BrokenError as problem:
            kept = self._keep(run)
            blamed = state.tried if isinstance(problem, OtherResultError) else state.tried[-1:]
            for one in blamed or [state.add("no fault", "undisturbed", "")]:
                one.outcome, one.problem = "lost", f"{problem} ({kept})"
            self._say(str(state.tried[-1]))
        self.tried.extend(state.tried)
        shutil.rmtree(run.folder, ignore_errors=True)

    def _result(self, state: State) -> Result:
        """Returns what the run has computed; it is started once more if its last checkpoint lost a file as it ended."""
        try:
            return state.run.result()
        except CheckpointError:
            self._live(state, deadline=0.0)
            return state.run.result()

    def _live(self, state: State, *, deadline: float) -> bool:
        """Starts the run once; returns whether it has reached its end."""
        state.lives += 1
        has_faults = time.monotonic() < deadline and state.lives <= state.most_lives
        damaged, spoil = self._prepare_faults(state) if has_faults else (None, None)
        run = state.run if spoil is None else state.run.spoiled()
        state.case = run.case
        life = Life(run, run.command(spoiled=spoil is not None), run.folder / f"life_{state.lives}.log")
        try:
            is_done = self._has_its_faults(state, life, damaged, spoil) and (
                self._goes_on_with_faults(state, life, deadline if has_faults else 0.0)
                and self._reaches_its_end(state, life)
            )
        finally:
            life.kill()
        require_nothing_left(life)
        return is_done

    def _has_its_faults(self, state: State, life: Life, damaged: Damage | None, spoil: Spoil | None) -> bool:
        """Judges a start with a fault that was there before; returns whether the run goes on."""
        if damaged is not None:
            return self._goes_on_after(state, life, damaged)
        return spoil is None or self._goes_on_spoilt(state, life, spoil)

    def _goes_on_with_faults(self, state: State, life: Life, deadline: float) -> bool:
        """Injects faults while the run is on; returns False if one of them ends it."""
        while life.is_on() and time.monotonic() < deadline and (state.plan is None or next_of(state) is not None):
            with suppress(MissedError):  # another one may find what it needs
                if not self._goes_on_with_a_fault(state, life):
                    return False
        return True

    def _prepare_faults(self, state: State) -> tuple[Damage | None, Spoil | None]:
        """Damages a file, or spoils the next start; often neither."""
        after = state.run.last_saved()
        if state.plan is not None:
            planned = state.plan[0] if state.plan and state.plan[0] in SPOILS else None
            return None, None if planned is None else write_spoil(state.run, self._random, after=after, name=planned)
        drawn = self._random.random()
        if state.lives > 1 and drawn < 0.5:
            damaged = damage_a_file(state.run, self._random)
            if damaged is not None and damaged.path.name == "metrics.jsonl":
                state.logged_after = subject.STEPS
            return damaged, None
        if drawn <= 0.75:
            return None, None
        name = self._rare(state, dict.fromkeys(spoils_of(state.run), 1))
        return None, write_spoil(state.run, self._random, after=after, name=name)

    def _rare(self, state: State, weights: dict[str, int]) -> str:
        """Draws a kind of fault; the oftener one has been tried, the less likely it is."""
        tried = Counter(one.name for one in [*self.tried, *state.tried])
        return self._random.choices([*weights], [weight / (1 + tried[name]) for name, weight in weights.items()])[0]

    def _reaches_its_end(self, state: State, life: Life) -> bool:
        """Returns whether a run without any more faults has reached its end. Raises: BrokenError.

        A file that was deleted under it may be missed as late as at a save, many steps after it was seen to go on.
        """
        if life.is_on():
            life.mark()
        end = life.wait_for_end(seconds=_HANGS_SECONDS)
        if end is None:
            raise BrokenError(f"the run hangs after step {life.step()}")
        if end.exit_code == 0:
            return True
        last = state.tried[-1] if state.tried else None
        if last is None or last.name != A_FILE_DELETED or f"/{last.detail} " not in end.said:
            raise BrokenError(f"the run ended with {end.exit_code} although nothing disturbed it: {end.said[-600:]}")
        require_clear(end, life.run.case, silent=False)
        last.outcome, last.said = "ended clearly", end.said[-800:]
        self._tell(last)
        return False

    def _goes_on_with_a_fault(self, state: State, life: Life) -> bool:
        """Injects one fault; returns whether the run goes on. Raises: MissedError, BrokenError."""
        fitting = [one for one in RUNNING_FAULTS if one.fits(state.run)]
        planned = next_of(state)
        if planned is None:
            planned = self._rare(state, {one.name: 1 if one.costs_start else _OFTENER for one in fitting})
        (fault,) = (one for one in fitting if one.name == planned)
        moment = wait_for_moment(life, self._random, start_seconds=12.0)
        life.mark()
        step = 0 if moment == "starting" else life.step()
        try:
            injected = fault.inject(life, self._random)
        except BrokenError:
            state.add(fault.name, moment, "")
            raise
        tried = state.add(fault.name, moment, injected.detail)
        if "metrics.jsonl" in injected.detail:
            state.logged_after = subject.STEPS
        goes_on = self._judge(life, fault, injected, tried)
        if not goes_on and step > 0 and fault.asks_to_save and life.run.case.stack in _PASS_CODES_ON:
            require_saved(state.run, tried, exit_code=life.process.wait(), step=step)
        self._tell(tried)
        return goes_on

    def _judge(self, life: Life, fault: RunningFault, injected: Injected, tried: Tried) -> bool:
        """Waits for what the fault leads to; returns whether the run goes on. Raises: BrokenError."""
        if fault.ends != "must":
            life.wait_for(lambda: False, seconds=injected.hold_seconds)
            if injected.undo is not None:
                injected.undo()
            if self._goes_on(life):
                tried.outcome = "went on"
                return True
        end = life.wait_for_end() if fault.ends == "must" or not life.is_on() else None
        tried.said = life.said()[-800:]
        if fault.ends == "never":
            raise BrokenError("the run did not go on")
        if end is None:
            raise BrokenError(f"the run neither went on nor ended within {END_SECONDS:.0f} s")
        if end.exit_code == 0 and life.step() >= subject.STEPS:
            tried.outcome = "went on"  # the fault came when all was saved
            return True
        require_clear(
            end,
            life.run.case,
            silent=injected.nobody_is_left or (fault.silent and not injected.may_return_0),
            may_return_0=injected.may_return_0,
        )
        require_said(end, injected.says)
        tried.outcome, tried.seconds = "ended clearly", end.seconds
        return False

    def _goes_on(self, life: Life) -> bool:
        """Returns whether the run makes more steps, or has reached its last one."""
        target = life.step() + _ENOUGH_STEPS
        if target > subject.STEPS:
            life.wait_for(lambda: False, seconds=_START_SECONDS)
            return not life.is_on() and life.process.returncode == 0
        return life.wait_for(lambda: life.step() >= target, seconds=_START_SECONDS) and life.is_on()

    def _goes_on_after(self, state: State, life: Life, damaged: Damage) -> bool:
        """Judges a start after a file was damaged; returns whether the run goes on. Raises: BrokenError."""
        tried = state.add(damaged.name, "before a start", f"{damaged.path.name}: {damaged.detail}")
        if life.wait_for(lambda: self._is_past(state.run, life, damaged), seconds=_START_SECONDS) and life.is_on():
            tried.outcome = "went on"
            self._tell(tried)
            return True
        life.wait_for(lambda: False, seconds=_START_SECONDS)
        end = life.wait_for_end(seconds=_START_SECONDS + END_SECONDS)
        tried.said = life.said()[-800:]
        damaged.repair()
        if end is None:
            raise BrokenError("the run hangs at its start")
        if end.exit_code == 0:
            tried.outcome = "went on"
            self._tell(tried)
            return True
        require_clear(end, life.run.case, silent=False)
        tried.outcome = "ended clearly"
        self._tell(tried)
        return False

    def _is_past(self, run: SubjectRun, life: Life, damaged: Damage) -> bool:
        """Returns whether the damage did not prevent a step, and data have been verified."""
        is_verified = not damaged.is_data or "the prepared data is as it was written" in life.said()
        has_stepped = re.search(r"^step \d", life.said(), re.MULTILINE)  # an error may speak of steps too
        return is_verified and has_stepped is not None and life.step() > run.last_saved()

    def _goes_on_spoilt(self, state: State, life: Life, spoil: Spoil) -> bool:
        """Judges a start with such a fault; returns whether the run goes on. Raises: BrokenError."""
        tried = state.add(spoil.name, "from the start", spoil.detail)
        if spoil.says is None and self._goes_on(life):
            tried.outcome = "went on"
            self._tell(tried)
            return True
        life.wait_for(lambda: False, seconds=_START_SECONDS)
        end = life.wait_for_end(seconds=_START_SECONDS + END_SECONDS)
        tried.said = life.said()[-800:]
        if end is None:
            raise BrokenError("the run hangs")
        if spoil.name == NAN and end.exit_code == 0:
            state.tried.remove(tried)  # it has ended before that step
            return True
        if spoil.says is None:
            raise BrokenError(f"the run did not go on: {end.said[-400:]}")
        require_clear(end, state.run.case, silent=False)
        if spoil.says not in end.said:
            raise BrokenError(f"the message does not say {spoil.says}: {end.said[-400:]}")
        tried.outcome = "ended clearly"
        self._tell(tried)
        return False

    def _keep(self, run: SubjectRun) -> Path:
        """Keeps the files of a run that broke a promise; returns where."""
        kept = self._folder / f"broken_{self._runs}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run.folder, kept, ignore_dangling_symlinks=True)
        return kept

    def _tell(self, tried: Tried) -> None:
        self._say(str(tried))


def next_of(state: State) -> str | None:
    """Returns the running fault that is next by the plan; None without a plan, or where it has another one or none."""
    return state.plan[0] if state.plan and state.plan[0] not in SPOILS else None
