"""Machines of a hostfile are reached as pdsh will reach them, before anything is started."""

import os
from pathlib import Path

import pytest

from evenpack.errors import ConfigError
from evenpack.launcher.processes.start import plan_launch, reached_by_pdsh

SSH = """#!/bin/sh
echo "$@" >> "$RECORD"
case "$*" in
    *node2*) echo "Warning: added" >&2; echo "ssh: connect to host node2 port 22: No route to host" >&2; exit 255 ;;
    *) echo "10.0.0.7 192.168.0.7" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose ssh does not reach node2."""
    for name, text in (("ssh", SSH), ("pdsh", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}


def hostfile(tmp_path: Path, *names: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text("".join(f"{name} slots=2\n" for name in names))
    return path


def test_a_machine_that_is_not_reached_is_named_with_the_reason(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        reached_by_pdsh(hostfile(tmp_path, "node1", "node2", "node3"), [], environment)
    message = str(raised.value)
    assert "1 of 3 machines of " in message
    assert "\n  node2: ssh: connect to host node2 port 22: No route to host\n" in message
    assert "PDSH_SSH_ARGS_APPEND='-F FILE'" in message
    assert "--no_ssh_check" in message


def test_deepspeed_is_told_what_was_found_by_the_options_of_pdsh(tmp_path: Path, environment: dict[str, str]) -> None:
    hosts = hostfile(tmp_path, "node1", "node3")
    own = environment | {"PDSH_SSH_ARGS_APPEND": "-F my_config"}
    assert reached_by_pdsh(hosts, ["--ssh_port", "2222"], own) == ["--no_ssh_check", "--master_addr=10.0.0.7"]
    calls = (tmp_path / "record").read_text().splitlines()
    assert all("-F my_config -p 2222 node" in call for call in calls)
    assert reached_by_pdsh(hosts, ["--master_addr=node1"], own) == ["--no_ssh_check"]
    plan = plan_launch(Path("run.yaml"), [], num_gpus=None, hostfile=hosts).reached(own)
    assert plan.command[3:6] == ("--no_ssh_check", "--master_addr=10.0.0.7", "--log_level=critical")


@pytest.mark.parametrize(
    "options", ["--no_ssh_check", "--launcher=openmpi", "--launcher OpenMPI", "--launcher pdsh --no_ssh", "--no_ssh"]
)
def test_nobody_logs_in_where_pdsh_does_not(tmp_path: Path, environment: dict[str, str], options: str) -> None:
    assert reached_by_pdsh(hostfile(tmp_path, "node2"), options.split(), environment) == []


@pytest.mark.parametrize("options", ["--launcher pdsh", "--launcher=pdsh", "--launcher PDSH", "--launcher_args=-b"])
def test_pdsh_that_is_named_logs_in_too(tmp_path: Path, environment: dict[str, str], options: str) -> None:
    with pytest.raises(ConfigError, match="node2: ssh: connect to host"):
        reached_by_pdsh(hostfile(tmp_path, "node2"), options.split(), environment)


def test_the_last_of_two_launchers_counts_as_for_deepspeed(tmp_path: Path, environment: dict[str, str]) -> None:
    two = ["--launcher=pdsh", "--launcher", "openmpi"]
    assert reached_by_pdsh(hostfile(tmp_path, "node2"), two, environment) == []


def test_pdsh_that_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apt-get install pdsh"):
        reached_by_pdsh(hostfile(tmp_path, "node1"), [], {"PATH": str(tmp_path)})


def test_a_run_of_one_machine_reaches_nothing() -> None:
    plan = plan_launch(Path("run.yaml"), [], num_gpus=None, cpu_ranks=1, hostfile=None)
    assert plan.reached({"PATH": ""}) == plan
