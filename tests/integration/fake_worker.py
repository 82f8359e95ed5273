"""A rank that acts like evenpack's worker but, instead of training, does what FAKE_TRAINING names.

It imports no torch, which would take most of a test's time: ranks meet by sockets of their own.
"""

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evenpack.engine.activity import START, doing, saving
from evenpack.errors import CheckpointError, RunError
from evenpack.launch_environment import RANK, WORLD_SIZE
from evenpack.launcher.worker import main

STEP_SECONDS = 0.05


@dataclass(frozen=True)
class Outcome:
    state: str
    step: int


class Meeting:
    """A barrier for all ranks; a rank that waits for one that has died gets a ConnectionError."""

    def __init__(self) -> None:
        self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)  # torch's store may have the port
        if self.rank == 0:
            with socket.create_server(address) as server:
                self.others = [server.accept()[0] for _ in range(size - 1)]
        else:
            self.others = [self._connect(address)]

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        while True:
            with suppress(ConnectionRefusedError):
                return socket.create_connection(address)
            time.sleep(0.05)

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        if self.rank > 0:
            self.others[0].sendall(bytes([flag]))
            return self._receive(self.others[0])
        answer = any([flag, *map(self._receive, self.others)])
        for other in self.others:
            other.sendall(bytes([answer]))
        return answer

    def _receive(self, other: socket.socket) -> bool:
        byte = other.recv(1)
        if not byte:
            raise ConnectionResetError("the other rank is gone")
        return bool(byte[0])


def loop(config, *, stop_requested):
    """Runs steps with a barrier until a stop is requested on any rank; then rank 0 saves."""
    meeting = Meeting()
    doing.end_black_box(START)
    step = 0
    while step < config.training.steps:
        step += 1
        doing.enter("computing gradients", step)
        time.sleep(STEP_SECONDS)
        doing.enter("summing over the ranks", step)
        asked = meeting.any(stop_requested())
        if meeting.rank == 0:
            (config.run.output_dir / "step").write_text(str(step))
            print(f"step {step}", flush=True)
        if asked:
            if meeting.rank == 0:
                time.sleep(0.5)
                (config.run.output_dir / "saved").write_text(str(step))
            meeting.any(False)
            return Outcome("stopped", step)
    meeting.any(False)
    return Outcome("finished", step)


def loop_alone(config, *, stop_requested):
    """Runs steps of one rank until a stop is requested."""
    step = 0
    while not stop_requested():
        step += 1
        (config.run.output_dir / "step").write_text(str(step))
        time.sleep(STEP_SECONDS)
    return Outcome("stopped", step)


def meet_in_vain(config, *, stop_requested):
    """Waits for a rank that does not come, as ranks do before their first collective, and rank 1 in one."""
    if os.environ["RANK"] == "1":
        doing.enter("joining the ranks")
    (config.run.output_dir / f"waits_{os.environ['RANK']}").write_text("yes")
    time.sleep(1000)


def crash_while_others_meet(config, *, stop_requested):
    """Rank 2 crashes while the others wait for it."""
    if os.environ["RANK"] == "2":
        while not all((config.run.output_dir / f"waits_{rank}").exists() for rank in (0, 1)):
            time.sleep(STEP_SECONDS)
        raise ZeroDivisionError("one by zero")
    return meet_in_vain(config, stop_requested=stop_requested)


def finish(config, *, stop_requested):
    return Outcome("finished", config.training.steps)


def refuse(config, *, stop_requested):
    raise CheckpointError("the checkpoint is of another run")


def refuse_on_rank_1(config, *, stop_requested):
    if os.environ["RANK"] == "1":
        raise CheckpointError("the checkpoint is truncated here")
    return hang(config, stop_requested=stop_requested)


def crash_on_rank_1(config, *, stop_requested):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("one by zero")
    return loop(config, stop_requested=stop_requested)


def save_while_rank_1_fails(config, *, stop_requested):
    """Rank 1 fails at once; rank 0 needs longer than a rank that has nothing to do gets, because it is saving."""
    if os.environ["RANK"] == "0":
        doing.enter("waiting for a save", 3)
        time.sleep(11)
        (config.run.output_dir / "saved").touch()
    raise RunError("the loss is not finite")


def compute_while_a_thread_saves(config, *, stop_requested):
    """As `save_while_rank_1_fails`, but the main thread of rank 0 waits for rank 1, which has failed."""
    if os.environ["RANK"] == "1":
        raise RunError("the loss is not finite")

    def save():
        with saving():
            time.sleep(11)
            (config.run.output_dir / "saved").touch()

    threading.Thread(target=save, daemon=True).start()
    return hang(config, stop_requested=stop_requested)


def fill_the_disk(config, *, stop_requested):
    """No rank can write a new file any more, neither metrics nor the record of a failure; rank 0 sees it first."""
    from evenpack import files
    from evenpack.launcher.processes import ranks

    meeting = Meeting()
    doing.enter("recording the step", 3)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ranks.write_text = ranks.write_text_once = files.atomic_open = Path.touch = refuse
    if meeting.rank == 0:
        refuse()
    meeting.any(False)


def break_connection_on_rank_1(config, *, stop_requested):
    if os.environ["RANK"] == "1":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed: the network is down")
    return hang(config, stop_requested=stop_requested)


def crash_in_first_life(config, *, stop_requested):
    """Works only after torchrun has started the ranks again."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ZeroDivisionError("one by zero")
    return finish(config, stop_requested=stop_requested)


def die_on_rank_1(config, *, stop_requested):
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return hang(config, stop_requested=stop_requested)


def hang(config, *, stop_requested):
    """Hangs as in a collective that the others never join: it notices no stop and handles no signal."""
    doing.enter("computing gradients", 1)
    (config.run.output_dir / "step").write_text("hangs")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(1000)


def wait_on_rank_1(config, *, stop_requested):
    """Steps, until rank 1 waits for something in its third step."""
    enter = doing.enter

    def enter_and_wait(activity, step):
        enter(activity, step)
        if (os.environ["RANK"], activity, step) == ("1", "computing gradients", 3):
            wait_for_a_broken_disk()

    doing.enter = enter_and_wait
    return loop(config, stop_requested=stop_requested)


def wait_for_a_broken_disk():
    time.sleep(1000)


def compile_on_rank_1(config, *, stop_requested):
    """Waits for rank 1, which compiles for longer than a step may hang; if FAKE_FOREVER is set, without end."""
    meeting = Meeting()
    doing.enter("computing gradients", 3)
    if os.environ["RANK"] == "1":
        doing.begin_black_box("compiling")
    doing.end_black_box(START)
    if os.environ["RANK"] == "1":
        time.sleep(1000 if "FAKE_FOREVER" in os.environ else 1.5 * config.run.hang_timeout_seconds)
        doing.end_black_box("compiling")
    meeting.any(False)
    return Outcome(state="finished", step=3)


def hang_holding_everything(config, *, stop_requested):
    """Hangs in C, without letting any other thread of this process run."""
    import ctypes

    (config.run.output_dir / "step").write_text("hangs")
    ctypes.PyDLL(None).sleep(1000)


def hang_in_python(config, *, stop_requested):
    """Handles signals, but never completes its step."""
    doing.enter("computing gradients", 1)
    (config.run.output_dir / "step").write_text("hangs")
    time.sleep(1000)


def loop_with_helper(config, *, stop_requested):
    """Runs with a child process, like a loader."""
    import subprocess

    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (config.run.output_dir / f"helper_{os.environ['RANK']}").write_text(str(helper.pid))
    return loop(config, stop_requested=stop_requested)


TRAININGS = {
    function.__name__: function
    for function in (
        fill_the_disk,
        finish,
        meet_in_vain,
        crash_while_others_meet,
        loop,
        loop_alone,
        loop_with_helper,
        save_while_rank_1_fails,
        compute_while_a_thread_saves,
        refuse,
        refuse_on_rank_1,
        break_connection_on_rank_1,
        crash_in_first_life,
        crash_on_rank_1,
        die_on_rank_1,
        hang,
        hang_holding_everything,
        hang_in_python,
        wait_on_rank_1,
        compile_on_rank_1,
    )
}


def train(config, **given):
    """Does what FAKE_TRAINING names; the place of a rank has the same names then, whatever `mpirun` calls it."""
    os.environ |= {"RANK": str(RANK.read(os.environ) or 0), "WORLD_SIZE": str(WORLD_SIZE.read(os.environ) or 1)}
    return TRAININGS[os.environ["FAKE_TRAINING"]](config, **given)


if __name__ == "__main__":
    (Path(os.environ["FAKE_PIDS"]) / str(RANK.read(os.environ) or 0)).write_text(str(os.getpid()))
    sys.exit(main(train=train))
