"""The launcher of this machine's ranks: their environment, and how they end."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenpack.errors import EXIT_STOPPED
from evenpack.launcher.processes.start import LOCAL_LAUNCHER

RANK = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
pathlib.Path(f"rank_{rank}").write_text(json.dumps(dict(os.environ)))
end = [word for word in sys.argv[1:] if not word.startswith("--")][rank]
if end == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pathlib.Path("waits").touch()
    time.sleep(1000)
while "wait" in sys.argv and not os.path.exists("waits"):
    time.sleep(0.01)
if end == "signal":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1000)
if int(end) < 0:
    os.kill(os.getpid(), -int(end))
sys.exit(int(end))
"""


def launched(folder: Path, *launcher: str, ends: tuple[str, ...]) -> int:
    """Returns the exit code of a launcher whose ranks end as told."""
    (folder / "rank_program.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])}
    command = [sys.executable, "-m", *launcher, "rank_program", *ends]
    return subprocess.run(command, env=environment, cwd=folder, timeout=600, check=False).returncode


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (("0", "0"), 0),
        ((str(EXIT_STOPPED), str(EXIT_STOPPED)), EXIT_STOPPED),
        (("0", "3", "0"), 3),
        (("wait", "2"), 2),
        (("wait", "-9"), 256 - 9),
        (("wait", "signal"), 256 - 15),
    ],
    ids=str,
)
def test_the_exit_code_is_that_of_the_first_rank_that_did_not_end_well(
    tmp_path: Path, ends: tuple[str, ...], code: int
) -> None:
    """Ranks that wait end by the SIGTERM that follows a failure, or that the launcher was sent."""
    devices = ",".join(map(str, range(len(ends))))
    assert launched(tmp_path, LOCAL_LAUNCHER, f"--devices={devices}", "--port=1", ends=ends) == code


@pytest.mark.slow
def test_ranks_have_the_environment_that_deepspeed_gives_them(tmp_path: Path) -> None:
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [4, 6]}).encode()).decode()
    places = {"ours": (LOCAL_LAUNCHER, "--devices=4,6", "--port=1234")}
    options = [f"--world_info={world}", "--master_port=1234", "--module", "--log_level=critical"]
    places["deepspeed"] = ("deepspeed.launcher.launch", *options)
    found = {}
    for name, launcher in places.items():
        folder = tmp_path / name
        folder.mkdir()
        assert launched(folder, *launcher, ends=("0", "0")) == 0
        found[name] = [json.loads((folder / f"rank_{rank}").read_text()) for rank in (0, 1)]
        for environment in found[name]:
            environment.pop("PYTHONPATH"), environment.pop("PWD", None)
    ours = [rank.items() - os.environ.items() for rank in found["ours"]]
    for rank in (0, 1):
        assert ours[rank] <= found["deepspeed"][rank].items()
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= dict(
            ours[rank]
        ).keys()
        assert found["deepspeed"][rank].keys() - found["ours"][rank].keys() <= {"PYTORCH_NVML_BASED_CUDA_CHECK"}


SEEN_ALREADY = """
import os, signal, sys
from evenpack.launcher.processes.local_launcher import _Ranks
ranks = _Ranks()
ranks.start([sys.executable, "-c", "raise SystemExit(3)"], {})
(process,) = ranks._processes
os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
ranks.stop(signal.SIGTERM, None)
assert process.returncode == 3
sys.exit(ranks.wait())
"""


def test_a_rank_whose_end_the_ending_signal_has_seen_is_not_waited_for() -> None:
    """`Popen.terminate` looks whether the process has ended, and then nothing is left to wait for."""
    done = subprocess.run([sys.executable, "-c", SEEN_ALREADY], capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
