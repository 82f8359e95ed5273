"""The command that starts the ranks of a run."""

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from evenpack.errors import ConfigError, RunError
from evenpack.launcher.processes import start
from evenpack.launcher.processes.identities import LaunchToken
from evenpack.launcher.processes.start import (
    LOCAL_LAUNCHER,
    WORKER_MODULE,
    hosts_of,
    is_this_machine,
    local_devices,
    plan_launch,
)

RUN = Path("run.yaml")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores."""
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start, "cuda_devices", lambda: 0)
    monkeypatch.setattr(start, "cpu_cores", lambda: 8)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cuda_devices", lambda: 8)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nnode-a slots=4\n\nnode-b slots=8  # the larger one\n")
    return path


def test_the_command_runs_the_worker_module_with_the_run_file_and_the_overrides() -> None:
    plan = plan_launch(RUN, ["training.steps=5", "run.seed=1"], num_gpus=None, hostfile=None)
    assert plan.command[:3] == (sys.executable, "-m", LOCAL_LAUNCHER)
    assert plan.command[-4:] == (WORKER_MODULE, "run.yaml", "training.steps=5", "run.seed=1")
    assert plan.environment["DS_ACCELERATOR"] == "cpu"


def test_a_cpu_gets_two_ranks_unless_another_number_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_launch(RUN, [], num_gpus=None, hostfile=None)
    assert plan.devices.ranks == 2
    assert "--devices=0,1" in plan.command
    assert plan.devices.choice.endswith("--cpu-ranks chooses another number), 4 of 8 cores each")
    assert local_devices(None, 5).ranks == 5
    assert "so give at most 8" in local_devices(None, 16).choice
    monkeypatch.setattr(start, "cpu_cores", lambda: 1)
    assert local_devices(None).ranks == 1


def test_ranks_on_the_cpu_do_not_wait_until_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[None] = []
    monkeypatch.setattr(start, "cuda_devices", lambda: counted.append(None) or 0)
    plan_launch(RUN, [], num_gpus=None, cpu_ranks=2, hostfile=None)
    assert counted == []
    plan_launch(RUN, [], num_gpus=None, hostfile=None)
    assert counted == [None]


def test_gpus_that_are_requested_are_never_mistaken_for_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"PyTorch sees no CUDA device .* say --cpu-ranks 8\. .* --ranks 8 --device"):
        local_devices(8)
    monkeypatch.setattr(start, "cuda_devices", lambda: 2)
    with pytest.raises(ConfigError, match="--num-gpus 3: this machine shows 2 CUDA devices"):
        local_devices(3)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError, match="--num-gpus 2: DS_ACCELERATOR is cpu"):
        local_devices(2)
    assert local_devices(None).kind == "cpu"


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"num_gpus": 2, "cpu_ranks": 3}, "--num-gpus 2 and --cpu-ranks 3 exclude each other"),
        ({"num_gpus": None, "cpu_ranks": 3, "hostfile": Path("hosts")}, "--cpu-ranks is for this machine alone"),
        ({"num_gpus": None, "cpu_ranks": 0}, "--cpu-ranks must be at least 1, not 0"),
        ({"num_gpus": -2, "hostfile": Path("hosts")}, "--num-gpus must be at least 1, not -2"),
    ],
)
def test_choices_that_cannot_be_are_refused(places: dict[str, Path | int | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_launch(RUN, [], **{"hostfile": None, **places})


def test_two_runs_on_one_machine_get_two_ports() -> None:
    plans = [plan_launch(RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None) for _ in range(5)]
    assert len({part for plan in plans for part in plan.command if part.startswith("--port=")}) > 1


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("visible", "asked", "devices"),
    [
        ("", None, "0,1,2,3,4,5,6,7"),
        ("", 3, "0,1,2"),
        ("15, 14,13,12,11,10,9,8", 3, "15,14,13"),
        ("GPU-8a56,GPU-1b,GPU-2,GPU-3,GPU-4,GPU-5,GPU-6,GPU-7", 1, "GPU-8a56"),
    ],
)
def test_all_gpus_are_taken_or_the_first_of_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, asked: int | None, devices: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = local_devices(asked)
    assert (found.kind, found.ranks, found.options) == ("cuda", asked or 8, (f"--devices={devices}",))


def test_a_hostfile_gives_its_slots_or_the_requested_number_on_each_machine(hostfile: Path) -> None:
    plan = plan_launch(RUN, [], num_gpus=None, hostfile=hostfile)
    assert (plan.devices.ranks, plan.devices.machines) == (12, ("node-a", "node-b"))
    assert "DS_ACCELERATOR" not in plan.environment, "the other machines choose for themselves"
    fewer = hosts_of(hostfile, 2)
    assert (fewer.ranks, "--num_gpus=2" in fewer.options) == (4, True)
    with pytest.raises(ConfigError, match=r"smallest machine of .* has 4 slots"):
        hosts_of(hostfile, 5)


@pytest.mark.parametrize(
    ("name", "remote"),
    [("node2", True), ("user@node1", True), ("10.99.0.2", True), ("node1", False), ("localhost", False)],
)
def test_the_only_machine_of_a_hostfile_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remote: bool
) -> None:
    """`deepspeed` starts the ranks of one machine where it is called, unless it is told not to."""
    from deepspeed.launcher.runner import parse_args

    monkeypatch.setattr(start.socket, "gethostname", lambda: "node1")
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "hosts"
    path.write_text(f"{name} slots=2\n")
    plan = plan_launch(RUN, [], num_gpus=None, hostfile=path)
    given = parse_args(plan.command[3:])
    assert (given.force_multi, given.no_ssh_check) == (remote, not remote)
    with pytest.raises(ConfigError, match="needs pdsh") if remote else nullcontext():
        assert plan.reached() is plan


def test_this_machine_is_known_by_its_addresses() -> None:
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # of no machine: for documentation (RFC 5737)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"node-a slots=four\n", "line 1: expected 'NAME slots=N', found 'node-a slots=four'"),
        (b"node-a slots=4\nnode-b\n", "line 2: expected"),
        (b"node-a slots=0\n", "line 1: expected"),
        (b"node-a slots=4\nnode-a slots=4\n", "line 2: node-a is named twice"),
        (b"-oProxyCommand=x slots=4\n", "line 1: expected"),
        (b"# nobody\n", "names no machine"),
        (b"node-a slots=4  # gro\xdf\n", "byte 0xdf in position 21: .*; save it as UTF-8"),
        (None, "No such file"),  # `deepspeed` would run here instead
    ],
)
def test_a_wrong_hostfile_is_refused_with_the_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        hosts_of(path, None)


def test_an_override_that_a_remote_shell_would_interpret_is_refused(hostfile: Path) -> None:
    with pytest.raises(ConfigError, match="write it into the run file instead"):
        plan_launch(RUN, ["run.name=a;b"], num_gpus=None, hostfile=hostfile)


def test_the_shell_line_is_the_command_as_a_user_could_type_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_launch(Path("my run.yaml"), [], num_gpus=None, cpu_ranks=1, hostfile=None)
    words = shlex.split(plan.shell_line())
    assert words[:3] == ["PYTHONUNBUFFERED=1", "PYTHONSAFEPATH=1", "DS_ACCELERATOR=cpu"]
    assert tuple(words[3:]) == plan.command


def test_the_token_is_no_prefix_of_an_option_of_deepspeed(hostfile: Path) -> None:
    from deepspeed.launcher.runner import parse_args

    plan = plan_launch(RUN, ["run.seed=1"], num_gpus=None, hostfile=hostfile)
    token = LaunchToken.of_this_process()
    parsed = parse_args(plan.command_of(token)[3:])
    assert parsed.user_script == WORKER_MODULE
    assert parsed.user_args == ["run.yaml", "run.seed=1", f"--evenpack-run={token}"]


def test_without_deepspeed_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match="-m pip install deepspeed"):
        plan_launch(RUN, [], num_gpus=None, cpu_ranks=2, hostfile=None)
