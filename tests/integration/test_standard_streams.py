"""Commands whose standard streams are closed, full or have no reader end as they would, or with a line that says so."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenpack import console
from evenpack.launcher.cli.arguments import EXIT_BAD_INPUT
from evenpack.launcher.processes.stop import say

EVENPACK = f"{sys.executable} -m evenpack.launcher.cli"
FULL = "standard output cannot be written: No space left on device"


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command by a shell, in which $E is evenpack."""
    environment = {**os.environ, "E": EVENPACK}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("$E config show demo --json >/dev/full", EXIT_BAD_INPUT, FULL),
        ("$E --version >/dev/full", EXIT_BAD_INPUT, FULL),
        ("$E --help >/dev/full", EXIT_BAD_INPUT, "cannot be written: No space left on device"),
        ("$E config show nowhere --json >/dev/full", EXIT_BAD_INPUT, "run file nowhere does not exist"),
        ("$E config show nowhere 2>/dev/full", EXIT_BAD_INPUT, None),
        ("$E config show demo <&- >&- 2>&-", 0, None),
        ("$E config show demo --json | (exec <&-; wait); exit ${PIPESTATUS[0]}", 128 + signal.SIGPIPE, None),
    ],
)
def test_a_stream_that_takes_nothing_is_a_line_and_never_a_traceback(
    command: str, code: int, message: str | None, tmp_path: Path
) -> None:
    done = run(command, tmp_path)
    assert (done.returncode, "Traceback" in done.stderr, "Exception ignored" in done.stderr) == (code, False, False)
    if message is None:
        assert done.stderr == ""
    else:
        assert message in done.stderr
        assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) <= 2


def test_files_that_are_opened_later_do_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os; from evenpack.launcher.processes.stop import open_closed_streams, survive_readers; "
        "open_closed_streams(); survive_readers(); file = open('file', 'w'); print('to nobody', flush=True); "
        "os.write(1, b'to nobody'); os.write(2, b'to nobody'); file.write('to the file')"
    )
    done = run(f'{sys.executable} -c "{code}" <&- >&- 2>&-', tmp_path)
    assert (done.returncode, (tmp_path / "file").read_text()) == (0, "to the file")


@pytest.mark.slow
def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    name = "a\x1b[31mb\x07c\u009bd"
    lost = run(f"$E report $'{name}'", tmp_path)
    assert "a\\x1b[31mb\\x07c\\x9bd holds no metrics.jsonl" in lost.stderr
    shown = run(f"$E study packing $'{name}.npy'", tmp_path)
    assert (shown.returncode, name in shown.stderr) == (EXIT_BAD_INPUT, False)
    told = json.loads(run(f"$E report $'{name}' --json", tmp_path).stdout)
    assert name in told["message"]


def test_tables_and_lines_of_results_show_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[31mb\r\udcff"
    console.print_apart(
        [console.table([{"file": name}], title=name), console.pairs({"file": name}), console.text(name)]
    )
    assert capsys.readouterr().out.count("a\\x1b[31mb\\r\\udcff") == 4
    say(f"{name} and\ta tab\nand a line")
    assert capsys.readouterr().err == "a\\x1b[31mb\\r\\udcff and\ta tab\nand a line\n"
