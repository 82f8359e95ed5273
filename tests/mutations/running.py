"""Applies mutations in copies of the checkout, one after another, and runs the tests that should see them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, Literal

from mutations.catalogue import Mutation

_SERVER = Path(__file__).with_name("server.py")
_OUTPUTS = {"build", "runs", "site"}
"""Folders of a checkout's own that are not copied."""
SLOW_IMPORTS = (
    "numpy",
    "scipy.optimize",
    "scipy.stats",
    "torch",
    "pydantic",
    "typer",
    "rich.progress",
    "yaml",
    "jaxtyping",
    "beartype",
    "transformers",
    "tokenizers",
    "pytest",
)
"""Modules of other projects that most tests import."""
_LIMIT_SECONDS = 600.0
"""Only a mutation that makes its tests hang takes so long."""
_BASELINE_LIMIT_SECONDS = 7200.0

Outcome = Literal["seen", "UNSEEN", "HANGS", "BREAKS"]
"""Seen: a test fails. HANGS: no test fails, and they do not end. BREAKS: the tests cannot run at all."""

_OUTCOMES: dict[int | None, Outcome] = {0: "UNSEEN", 1: "seen", None: "HANGS"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a mutation."""

    mutation: Mutation
    outcome: Outcome
    seconds: float
    output: str


class Copy:
    """A copy of the checkout with a server that runs its tests."""

    def __init__(self, root: Path, server: "subprocess.Popen[str]") -> None:
        self.root = root
        self._server = server

    @classmethod
    @contextmanager
    def of(cls, checkout: Path, *, imports: Sequence[str] = SLOW_IMPORTS) -> Iterator["Copy"]:
        """Makes the copy, which is removed at the end; `imports` are done once for all tests."""
        with TemporaryDirectory(prefix="evenpack-mutations-") as folder:
            root = Path(folder) / "checkout"
            shutil.copytree(checkout, root, ignore=partial(_not_copied, checkout))
            command = [sys.executable, str(_SERVER), str(root), *imports]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            ) as server:
                yield cls(root, server)
                assert server.stdin is not None
                server.stdin.close()

    def run(
        self, tests: Sequence[str], *, options: Sequence[str] = (), limit: float, writes_bytecode: bool = False
    ) -> dict[str, Any]:
        """Runs tests; see `server.py`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request = {
            "tests": list(tests),
            "options": list(options),
            "limit": limit,
            "writes_bytecode": writes_bytecode,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answered: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answered

    def try_out(self, mutation: Mutation) -> Result:
        """Applies a mutation, runs its tests up to the first that fails, and takes it back."""
        path = self.root / mutation.file
        before, stat = path.read_bytes(), path.stat()
        path.write_text(mutation.applied(self.root), encoding="utf-8")
        # Compiled files are found by the second of a change, and those of the unchanged file stay for what follows.
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10 * 10**9))
        try:
            found = self.run(mutation.tests, options=["-x"], limit=_LIMIT_SECONDS)
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        outcome = _OUTCOMES.get(found["code"], "BREAKS")
        return Result(mutation=mutation, outcome=outcome, seconds=found["seconds"], output=found["output"])


def _not_copied(checkout: Path, folder: str, names: list[str]) -> set[str]:
    hidden = {name for name in names if name.startswith(".") or name == "__pycache__"}
    return hidden | (_OUTPUTS if Path(folder) == checkout else set())


def baseline(copy: Copy, mutations: Sequence[Mutation]) -> str | None:
    """Runs all named tests without a mutation; returns the output if one of them fails, None if all pass."""
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    found = copy.run(tests, limit=_BASELINE_LIMIT_SECONDS, writes_bytecode=True)
    return None if found["code"] == 0 else str(found["output"])


def try_all(
    checkout: Path,
    mutations: Sequence[Mutation],
    *,
    jobs: int,
    on_ready: Callable[[], None],
    on_result: Callable[[Result], None],
) -> str | None:
    """Tries each mutation; returns the output of the tests if they fail without any, and then tries none.

    Args:
        on_ready: called once the tests have passed without a mutation.
        on_result: called in this thread, in the order in which they are done.
    """
    with ExitStack() as stack:
        copies: Queue[Copy] = Queue()
        first = stack.enter_context(Copy.of(checkout))
        failed = baseline(first, mutations)
        if failed is not None:
            return failed
        on_ready()
        copies.put(first)
        for _ in range(jobs - 1):
            copies.put(stack.enter_context(Copy.of(first.root)))

        def take(mutation: Mutation) -> Result:
            copy = copies.get()
            try:
                return copy.try_out(mutation)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as executor:
            for done in as_completed([executor.submit(take, mutation) for mutation in mutations]):
                on_result(done.result())
    return None
