"""One rank of a training run, as `deepspeed`, `torchrun`, `mpirun` or plain Python starts it.

    deepspeed --module evenpack.launcher.worker RUN.yaml [section.key=value ...]
    torchrun --nproc-per-node 2 -m evenpack.launcher.worker RUN.yaml
    python -m evenpack.launcher.worker RUN.yaml

Exit codes: 0 when the run has reached its last step, 75 when it was asked to stop and has saved (0 under
`torchrun --max-restarts`), 2 for an error that the user can correct, 1 for any other.

Loader processes import this module again, so heavy modules are imported only where they are used.
"""

import argparse
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, runtime_checkable

from evenpack.engine.activity import START, doing
from evenpack.errors import EXIT_BAD_INPUT, EvenpackError, RunError
from evenpack.files import explained, is_of_the_system, system_error
from evenpack.launch_environment import refuse_other_options
from evenpack.launcher.processes.devices import (
    choose_accelerator,
    configure_allocator,
    cpu_cores,
    require_seen_gpus,
    settle_device,
)
from evenpack.launcher.processes.guard import Ancestors, Guard, WatchedRun, end_process
from evenpack.launcher.processes.hangs import HangLimits, Heartbeat
from evenpack.launcher.processes.holding import held_as_writer, held_output_dir
from evenpack.launcher.processes.identities import LaunchToken, RankPlace, parent_command
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, is_lost_connection
from evenpack.launcher.processes.stop import StopFlag, say, stopped_exit_code, survive_readers
from evenpack.worker_pool import QuickEnd

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig
    from evenpack.engine.world.meeting import Meeting

EXIT_ERROR = 1
"""Exit code for errors that the user has not caused."""

_OTHERS_SECONDS = 2.0
"""Seconds that a rank with an error waits for the statuses of others, to see whether they have it too or caused it."""

_OWNER = "output directory of rank 0"
"""Name in a meeting."""


@runtime_checkable
class Outcome(Protocol):
    """The outcome of the training loop."""

    @property
    def state(self) -> Literal["finished", "stopped"]: ...

    @property
    def step(self) -> int: ...


@runtime_checkable
class TrainFunction(Protocol):
    """The training loop.

    It calls `stop_requested` at the end of each step, and tells `activity.doing` what it begins to do.
    """

    def __call__(self, config: "RunConfig", *, stop_requested: Callable[[], bool]) -> Outcome: ...


def main(arguments: Sequence[str] | None = None, *, train: TrainFunction | None = None) -> int:
    """Runs one rank and returns its exit code. `train` replaces evenpack's own loop."""
    survive_readers()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # says where a signal such as SIGBUS has met this process
    try:
        refuse_other_options(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_intermixed_args(arguments)
        place = RankPlace.of_environment(os.environ, parent_command())
    except EvenpackError as error:
        say(f"error: {error}")  # no rank knows its number, so each says it
        return EXIT_BAD_INPUT
    stop = StopFlag()
    stop.install()
    guard = Guard(place, Ancestors() if place.launched else None, stop)
    guard.start()
    share_cores(place)
    token = options.evenpack_run
    config, problem = _load_config(options.run_file, options.overrides)
    if problem is not None and place.local_rank == 0:
        say(_error_line(problem, place))
    if train is None and place.rank == 0 and problem is None:
        joining = f", then joining {place.world_size} ranks" if place.world_size > 1 else ""
        say(f"importing torch and DeepSpeed{joining}")
    meeting = None
    if place.world_size > 1 and (problem is not None or token is None):
        try:
            meeting, problems = _meet(token, problem)
        except EvenpackError as error:
            if problem is None or place.local_rank == 0:
                say(_error_line(error, place))
            return EXIT_BAD_INPUT
        if problems and place.local_rank == 0:  # for all ranks of its machine
            say(_error_line("\n  ".join(["other ranks cannot start:", *problems]), place))
        if problems:
            return EXIT_BAD_INPUT
    if config is None:
        return EXIT_BAD_INPUT
    run_id = token.run_id if token is not None else uuid.uuid4().hex if meeting is None else meeting.id
    rank = Rank(config, place, token, run_id=run_id, guard=guard, stop=stop, meeting=meeting)
    return rank.run(train or _train)


def _meet(token: LaunchToken | None, problem: EvenpackError | None) -> "tuple[Meeting, list[str]]":
    """Meets the other ranks, for an id of the run that `evenpack train` has not given, or to end them with `problem`.

    Rank 0 may hold the others' store, so the meeting must live as long as this process.

    Returns: the meeting, and what other ranks have for a problem. Raises: EvenpackError.
    """
    choose_accelerator()
    from evenpack.engine.world.agreement import all_problems
    from evenpack.engine.world.distributed import AGREEMENT, meet

    meeting = meet("run id" if token is None else AGREEMENT)
    return meeting, all_problems(meeting, None if problem is None else str(problem))


def _error_line(error: object, place: RankPlace) -> str:
    return f"error: {error}" if place.rank == 0 else f"rank {place.rank}: error: {error}"


class Rank:
    """This process as a rank of one run."""

    def __init__(
        self,
        config: "RunConfig",
        place: RankPlace,
        token: LaunchToken | None,
        *,
        run_id: str,
        guard: Guard,
        stop: StopFlag,
        meeting: "Meeting | None",
    ) -> None:
        """`meeting`: where ranks have met that `evenpack train` has not started; None for one that is alone."""
        self._config = config
        self._meeting = meeting
        self._place = place
        self._token = token
        self._folder = RankFolder(config.run.output_dir, run_id)
        self._owns_files = False
        """Whether the files of ranks in the output directory are this run's."""
        self._stop = stop
        limits = HangLimits.of(config.run)
        self._heartbeat = Heartbeat(self._folder, RankStatus.starting(run_id, place), limits=limits)
        self._guard = guard
        self._watched = WatchedRun(
            place, folder=self._folder, token=token, stop=self._stop, heartbeat=self._heartbeat, limits=limits
        )

    def run(self, train: TrainFunction) -> int:
        """Trains and returns the exit code; after an error it ends the process, so that nothing waits at exit."""
        with ExitStack() as held:
            try:
                self._begin(held)
                outcome = train(self._config, stop_requested=self._stop.is_set)
            except EvenpackError as error:
                self._fail(str(error))
            except BaseException as error:
                if is_of_the_system(error):
                    path = None if error.filename else self._config.run.output_dir
                    place = f" on {socket.gethostname()} while {doing.activity}"
                    self._fail(system_error(error, path, place=place))
                self._crash(error)
            exit_code = stopped_exit_code() if outcome.state == "stopped" else 0
            with suppress(OSError):
                self._heartbeat.end(outcome.state, exit_code=exit_code, step=outcome.step)
            self._guard.finish(exit_code)
        return exit_code

    def _begin(self, held: ExitStack) -> None:
        output_dir = self._config.run.output_dir
        if self._token is None:  # otherwise `evenpack train` owns the directory
            self._own_output_dir(held)
        self._owns_files = True
        launcher = None if self._token is None else self._token.process_if_here()
        if launcher is not None and not launcher.is_alive():  # a later run may have the folder already
            end_process(EXIT_ERROR)
        with explained(output_dir, action="written"):
            self._folder.path.mkdir(parents=True, exist_ok=True)
            # By which ranks that a killed launcher has left know to end, and a rank that is stopped at once is known.
            self._folder.write_status(self._heartbeat.status)
            self._heartbeat.keep_up()
        if self._token is not None and self._place.rank == 0:
            held.enter_context(held_as_writer(output_dir))
        self._guard.watch(self._watched)

    def _own_output_dir(self, held: ExitStack) -> None:
        """Makes the output directory this run's, or waits until rank 0 has: before, its files may be another run's.

        Raises: RunError.
        """
        ours = self._config.run.output_dir
        place = [socket.gethostname(), str(ours.resolve())]
        if self._place.rank == 0:
            try:
                held.enter_context(held_output_dir(ours))
                held.enter_context(held_as_writer(ours))
                self._folder.remove_earlier()
            except RunError:
                if self._meeting is not None:
                    self._meeting.broadcast(_OWNER)
                    self._meeting.wait_for_readers(_OWNER)
                raise
            if self._meeting is not None:
                self._meeting.broadcast(_OWNER, place)
        elif self._meeting is not None:
            theirs = self._meeting.broadcast(_OWNER)
            if theirs is None:  # rank 0 says why
                end_process(EXIT_BAD_INPUT)
            if theirs[0] == place[0] and theirs[1] != place[1]:
                raise RunError(
                    f"run.output_dir is {theirs[1]} for rank 0 and {ours} for rank {self._place.rank}: give all ranks "
                    "the same run file and overrides, and start again"
                )

    def _fail(self, error: str) -> NoReturn:
        """Ends with an error that the user can correct; one that all ranks have is printed only by rank 0."""
        _ignore_children()
        self._record(error, exit_code=EXIT_BAD_INPUT)
        if self._place.world_size == 1 or not self._owns_files:  # no rank of a run without files has a status
            say(_error_line(error, self._place))
        elif not self._other_rank_reports(error):
            say(f"rank {self._place.rank}: error: {error}")
        elif self._place.rank == 0:
            say(f"error: {error}")
        end_process(EXIT_BAD_INPUT)

    def _crash(self, error: BaseException) -> NoReturn:
        """Ends with any other error, and its traceback unless it only follows from another rank's end."""
        _ignore_children()
        summary = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if is_lost_connection(error) and doing.black_box == START:
            time.sleep(_OTHERS_SECONDS)  # the other may have been stopped, and then the guard ends this rank, too
        first = self._watched.missing_rank() if is_lost_connection(error) else self._wait_for_other_failure()
        if first is None:
            first = self._record(summary)
        if first is not None and first.rank != self._place.rank:
            self._end_after(first, summary)
        shown = "".join(traceback.format_exception(error)).rstrip()
        say(f"rank {self._place.rank} on {self._heartbeat.status.host} failed:\n{shown}")
        end_process(EXIT_ERROR)

    def _end_after(self, first: Failure, summary: str) -> NoReturn:
        """Ends with an error that follows from another rank's."""
        self._record(summary)
        say(f"rank {self._place.rank} ended as well ({summary}), after {first.describe()}")
        end_process(EXIT_ERROR)

    def _record(self, error: str, *, exit_code: int = EXIT_ERROR) -> Failure | None:
        """Writes the final status; returns the first failure of the run, or None if the disk does not store it."""
        with suppress(OSError):
            if self._owns_files:
                status = self._heartbeat.end("failed", exit_code=exit_code, error=error)
                return self._folder.claim_failure(Failure.of(status)) if status.state == "failed" else None
        return None

    def _other_rank_reports(self, error: str) -> bool:
        """Returns whether the rank to compare with (rank 0; for rank 0: rank 1) ends with the same error."""
        other = 0 if self._place.rank > 0 else 1
        deadline = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < deadline:
            status = self._folder.read_status(other)
            if status is not None and status.state == "failed":
                return status.error == error
            time.sleep(0.05)
        return False

    def _wait_for_other_failure(self) -> Failure | None:
        deadline = time.monotonic() + _OTHERS_SECONDS
        while self._place.world_size > 1 and time.monotonic() < deadline:
            failure = self._watched.first_failure()
            if failure is not None:
                return failure
            time.sleep(0.1)
        return None


def _ignore_children() -> None:
    """Lets the deaths of loaders pass, for which torch's handler would raise an error in the middle of this one's."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def share_cores(place: RankPlace) -> None:
    """Gives each rank of this machine its part of the cores; values that the user has set stay.

    Otherwise torch would start as many threads as there are cores in each rank. To be called before torch is imported,
    which reads the variable then.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // place.local_world_size)))


def _load_config(path: Path, overrides: Sequence[str]) -> "tuple[RunConfig | None, EvenpackError | None]":
    """Returns the run file's content, for which this machine will do, or why there is none."""
    from evenpack.config import load_run_file
    from evenpack.engine.config import RunConfig

    try:
        config = load_run_file(path, RunConfig, overrides)
        configure_allocator(config, os.environ)
        require_seen_gpus(config, os.environ)
    except EvenpackError as error:
        return None, error
    return config, None


def _train(config: "RunConfig", *, stop_requested: Callable[[], bool]) -> Outcome:
    settle_device()
    from evenpack.engine.train import train

    return train(config, stop_requested=stop_requested)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evenpack.launcher.worker", description="One rank of a training run.")
    parser.add_argument("run_file", type=Path, metavar="RUN.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--local_rank", "--local-rank", help="added by `deepspeed`; not used: the environment has it")
    parser.add_argument("--evenpack-run", type=LaunchToken.parse, help="added by `evenpack train`: its process and run")
    return parser


if __name__ == "__main__":
    end = QuickEnd()
    end.exit_code = main()
    sys.exit(end.exit_code)
