"""Runs tests in processes that are forked after slow imports: `server.py ROOT MODULE ...`, JSON lines in and out.

A request is `{"tests": [...], "options": [...], "limit": SECONDS, "writes_bytecode": BOOL}`, and the answer
`{"code": EXIT_CODE or null, "seconds": S, "output": TEXT}`; null: the tests did not end within the limit. The modules
are of other projects: the package and its tests, which change, are imported by each fork anew.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any


def main(root: Path, modules: list[str]) -> None:
    """Answers requests until the input ends."""
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent)]
    for name in modules:
        importlib.import_module(name)
    # Without the checks of types in signatures the package is imported three times as fast.
    sys.modules["checked_types"] = unchecked = ModuleType("checked_types")
    unchecked.start_again = lambda: None  # type: ignore[attr-defined]
    loaded = [name for name in sys.modules if name.partition(".")[0] == "evenpack"]
    assert not loaded, f"{loaded} would not be imported anew"
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the tests of a request in a process of their own, which ends with all that they have started."""
    began = time.monotonic()
    shutil.rmtree(".hypothesis", ignore_errors=True)  # examples that another mutation has left
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if child == 0:
            run_tests(request, output.fileno())
        code = ended(child, limit=request["limit"])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
        output.seek(0)
        return {"code": code, "seconds": time.monotonic() - began, "output": output.read()}


def run_tests(request: dict[str, Any], output: int) -> None:
    """Never returns: this process is a fork."""
    code = 3
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = not request["writes_bytecode"]
        if sys.dont_write_bytecode:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import pytest

        # The same random examples each time.
        settings = ["-p", "no:cacheprovider", "--hypothesis-seed=0", "-q", "--tb=short", "--no-header"]
        settings += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that the slow imports bring
        code = int(pytest.main([*settings, *request["options"], *request["tests"]]))
    except BaseException:  # nothing may go on in this fork as if it were the server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int, *, limit: float) -> int | None:
    """Returns the exit code of a process, negative for a signal; None if it has not ended after so many seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
