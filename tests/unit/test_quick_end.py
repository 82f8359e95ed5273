"""A process ends without teardown, but with its exit handlers, its output and its code."""

import subprocess
import sys

import pytest

BEGIN = """
import atexit, sys
from evenpack.worker_pool import QuickEnd

class Loud:
    def __del__(self):
        print("torn down")

cycle = Loud()
cycle.itself = cycle
end = QuickEnd()
atexit.register(print, "handler", end=" ")
"""


@pytest.mark.parametrize(
    ("rest", "code", "printed"),
    [
        ("end.exit_code = 75; sys.exit(75)", 75, "handler "),
        ("end.exit_code = 0", 0, "handler "),
        ("raise SystemExit(2)", 2, "handler torn down\n"),
        ("raise ValueError", 1, "handler torn down\n"),
    ],
)
def test_a_process_with_an_exit_code_skips_teardown_alone(rest: str, code: int, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + rest], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, printed)
