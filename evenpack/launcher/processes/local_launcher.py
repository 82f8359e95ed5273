"""Starts the ranks of this machine with the environment that `deepspeed` would give them, and waits for their end.

    python -m evenpack.launcher.processes.local_launcher --devices=0,1 --port=29500 MODULE [argument ...]

`deepspeed` does it by two processes, each of which imports DeepSpeed and torch before it starts anything, and looks for
ended ranks once a second. This one imports neither. Its exit code is 0 if all ranks end with 0, else the code of
the first one that failed (256 - N for signal N), whose end is followed by a SIGTERM to the rest, or the code of ranks
that were stopped. Signals to stop are passed on, unless this process was started with them ignored.
"""

import argparse
import os
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from contextlib import suppress

from evenpack.errors import EXIT_STOPPED

_KILL_AFTER_SECONDS = 30
"""Seconds from the SIGTERM after a rank's failure until ranks that are left are killed, as `deepspeed` has it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the ranks and returns the exit code."""
    parser = argparse.ArgumentParser(prog="evenpack.launcher.processes.local_launcher", description=__doc__)
    parser.add_argument("--devices", required=True, help="numbers of the devices, with commas: a rank for each")
    parser.add_argument("--port", required=True, help="at which the ranks meet")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    ranks = _Ranks()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, which a process inherits, exit codes are lost
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, ranks.stop)
    signal.signal(signal.SIGALRM, ranks.kill)
    count = len(options.devices.split(","))
    for rank in range(count):
        environment = environment_of(rank, count, devices=options.devices, port=options.port)
        ranks.start([sys.executable, "-u", "-m", options.module, *options.arguments], environment)
    return ranks.wait()


def environment_of(rank: int, ranks: int, *, devices: str, port: str) -> dict[str, str]:
    """Returns what a rank's environment has more than this process's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "CUDA_VISIBLE_DEVICES": devices,
    }


class _Ranks:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_stopped = False

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(command, env={**os.environ, **environment})
        self._processes.append(process)
        if self._is_stopped:  # the signal may have come before the process was in the list
            process.terminate()

    def stop(self, _number: int, _frame: types.FrameType | None) -> None:
        self._is_stopped = True
        for process in self._processes:
            process.terminate()

    def kill(self, _number: int, _frame: types.FrameType | None) -> None:
        for process in self._processes:
            process.kill()

    def wait(self) -> int:
        """Returns the exit code once every rank has ended."""
        exit_code = 0
        running = self._processes
        while running:
            with suppress(ChildProcessError):  # `terminate` looks first, and may have seen the end of the last one
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for process in [process for process in running if process.poll() is not None]:
                running = [other for other in running if other is not process]
                if exit_code in (0, EXIT_STOPPED):
                    exit_code = process.returncode % 256 or exit_code
                if process.returncode not in (0, EXIT_STOPPED):
                    signal.alarm(signal.alarm(0) or _KILL_AFTER_SECONDS)  # counted from the first failure
                    for other in running:
                        other.terminate()
        return exit_code


if __name__ == "__main__":
    sys.exit(main())
