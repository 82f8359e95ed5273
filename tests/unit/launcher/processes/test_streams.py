"""Standard output continues when the terminal is gone."""

import os
import pty
import sys
from pathlib import Path

import pytest

from evenpack.launcher.processes.streams import survive_hang_up


def test_what_is_written_to_a_terminal_that_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pty.openpty()
    control = os.fdopen(os.dup(there), "w")
    with os.fdopen(there, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        survive_hang_up()
        print("hello", flush=True)
        assert os.read(here, 100) == b"hello\r\n"
        assert sys.stdout.isatty()
        os.close(here)
        print("nobody hears this", flush=True)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(control.fileno(), b"while a plain stream fails")
        sys.stdout.close()
        sys.stderr.close()
    control.close()


def test_files_and_pipes_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        survive_hang_up()
        assert sys.stdout is file
        assert sys.stderr is file
