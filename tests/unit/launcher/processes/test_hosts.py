"""Machines of a hostfile are reached by pdsh, as they are by `deepspeed`, before anything is started."""

import os
import shutil
from pathlib import Path

import pytest

from evenpack.errors import ConfigError
from evenpack.launcher.processes import start
from evenpack.launcher.processes.start import plan_launch, reached_by_pdsh

SSH = """#!/bin/sh
echo "$@" >> "$RECORD"
case "$*" in
    *node2*) echo "Warning: added" >&2; echo "ssh: connect to host node2 port 22: No route to host" >&2; exit 255 ;;
    *node4*) exec sleep 600 ;;
    *node5*) exit 3 ;;
    *node6*) echo "Welcome to node6"; exit 1 ;;
    *) echo "Warning: added" >&2; echo "Welcome"; echo "10.0.0.7 192.168.0.7 " ;;
esac
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an ssh is called with that reaches only some machines."""
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed (Debian: apt-get install pdsh)")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


@pytest.mark.usefixtures("record")
def test_machines_that_are_not_reached_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_ANSWER_SECONDS", 5)
    with pytest.raises(ConfigError) as raised:
        reached_by_pdsh(["node1", "me@node2.site", "node3", "node4", "node5", "node6"])
    message = str(raised.value)
    assert "4 of 6 machines of " in message
    assert "\n  me@node2.site: ssh: connect to host node2 port 22: No route to host\n" in message
    assert "\n  node4: command timeout\n" in message
    assert "\n  node5: ssh exited with exit code 3\n" in message
    assert "PDSH_SSH_ARGS_APPEND='-F FILE'" in message


@pytest.mark.usefixtures("record")
def test_of_many_machines_that_are_not_reached_five_are_shown() -> None:
    with pytest.raises(ConfigError, match=r"(?s)7 of 8 machines of .*\n  node24: .*\n  and 2 more\n"):
        reached_by_pdsh(["node1", *(f"node2{digit}" for digit in range(7))])


@pytest.mark.parametrize("domain", ["", ".site"])
def test_deepspeed_is_told_what_was_found_by_the_options_of_pdsh(
    tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch, domain: str
) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F my_config")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"node1{domain} slots=2\nme@node3{domain} slots=2\n")
    plan = plan_launch(Path("run.yaml"), [], num_gpus=None, hostfile=hosts).reached()
    assert plan.command[3:6] == ("--no_ssh_check", "--master_addr=10.0.0.7", "--log_level=critical")
    assert all("ConnectTimeout=10 -F my_config -o BatchMode=yes" in call for call in record.read_text().splitlines())


def test_pdsh_that_is_missing_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install pdsh"):
        reached_by_pdsh(["node1"])
    plan = plan_launch(Path("run.yaml"), [], num_gpus=None, cpu_ranks=1, hostfile=None)
    assert plan.reached() == plan, "a run of this machine needs none"
