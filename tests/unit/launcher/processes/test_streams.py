"""Standard output continues when the terminal is gone."""

import io
import os
import pty
import sys
from pathlib import Path

import pytest

from evenpack.launcher.processes.stop import survive_readers


def test_what_is_written_to_a_terminal_that_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pty.openpty()
    control = os.fdopen(os.dup(there), "w")
    with os.fdopen(there, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        survive_readers()
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


def test_what_is_written_to_a_pipe_without_a_reader_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = os.pipe()
    with os.fdopen(there, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        survive_readers()
        print("hello")
        assert os.read(here, 100) == b"hello\n"
        os.close(here)
        print("nobody hears this", flush=True)
        with pytest.raises(BrokenPipeError):
            os.write(there, b"while a plain stream fails")
        sys.stdout.close()


def test_what_is_written_to_a_full_disk_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        survive_readers()
        print("nobody reads this", flush=True)
        with pytest.raises(OSError, match="No space left"):
            os.write(stream.fileno(), b"while a plain stream fails")
        sys.stdout.close()


def test_files_get_every_line_and_streams_without_a_descriptor_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        print("before")
        memory = io.StringIO()
        monkeypatch.setattr(sys, "stderr", memory)
        survive_readers()
        print("after")
        assert sys.stderr is memory
        assert (tmp_path / "log").read_text() == "before\nafter\n"
        sys.stdout.close()
