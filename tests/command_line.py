"""Runs the command line in the process of the test, which has the imports."""

import contextlib
import io
import json
import os
import sys
from typing import Any, NamedTuple

import pytest

from evenpack.launcher.cli.app import main


class Done(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Returns the document that `--json` has printed."""
        return json.loads(self.stdout)


def evenpack(*arguments: object, **environment: str) -> Done:
    """Runs `evenpack ARGUMENTS`; arguments and environment of the process are afterwards what they were."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before, arguments_before = dict(os.environ), sys.argv
    os.environ.update(environment)
    sys.argv = ["evenpack", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = arguments_before
        os.environ.clear()
        os.environ.update(before)
    return Done(code=int(end.value.code or 0), stdout=stdout.getvalue(), stderr=stderr.getvalue())
