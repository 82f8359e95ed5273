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


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cuda_devices", lambda: 0)
    monkeypatch.setattr(start, "cpu_cores", lambda: 8)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nnode-a slots=4\n\nnode-b slots=8  # the larger one\n")
    return path


@pytest.mark.usefixtures("cpu_only")
def test_the_command_runs_the_worker_module_with_the_run_file_and_the_overrides() -> None:
    plan = plan_launch(RUN, ["training.steps=5", "run.seed=1"], num_gpus=None, hostfile=None)
    assert plan.command[:3] == (sys.executable, "-m", LOCAL_LAUNCHER)
    assert plan.command[-4:] == (WORKER_MODULE, "run.yaml", "training.steps=5", "run.seed=1")
    assert plan.environment["DS_ACCELERATOR"] == "cpu"
    assert plan.environment["PYTHONUNBUFFERED"] == "1"


@pytest.mark.usefixtures("cpu_only")
def test_a_cpu_gets_two_ranks_unless_another_number_is_requested() -> None:
    plan = plan_launch(RUN, [], num_gpus=None, hostfile=None)
    assert plan.devices.ranks == 2
    assert "--devices=0,1" in plan.command
    assert "4 of 8 cores each" in plan.devices.choice
    assert "PyTorch sees no CUDA device; --cpu-ranks chooses another number" in plan.devices.choice
    asked = plan_launch(RUN, [], num_gpus=None, cpu_ranks=5, hostfile=None)
    assert (asked.devices.ranks, asked.environment["DS_ACCELERATOR"]) == (5, "cpu")
    assert asked.devices.choice == "5 ranks on the CPU (as requested), 1 of 8 cores each"
    alone = plan_launch(RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None)
    assert alone.devices.choice == "1 rank on the CPU (as requested), 8 of 8 cores each"
    many = plan_launch(RUN, [], num_gpus=None, cpu_ranks=16, hostfile=None)
    assert many.devices.choice.endswith("warning: they share 8 cores and wait for each other, so give at most 8")


def test_ranks_on_the_cpu_do_not_wait_until_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[None] = []
    monkeypatch.setattr(start, "cuda_devices", lambda: counted.append(None) or 0)
    plan_launch(RUN, [], num_gpus=None, cpu_ranks=2, hostfile=None)
    assert counted == []
    plan_launch(RUN, [], num_gpus=None, hostfile=None)
    assert counted == [None]


def test_gpus_that_are_requested_are_never_mistaken_for_cpu_ranks() -> None:
    with pytest.raises(
        ConfigError, match=r"--num-gpus 8: PyTorch sees no CUDA device .* say --cpu-ranks 8\. .* --ranks 8 --device"
    ):
        local_devices(8, cuda_count=0, environment={})
    with pytest.raises(ConfigError, match="--num-gpus 2: DS_ACCELERATOR is cpu"):
        local_devices(2, cuda_count=2, environment={"DS_ACCELERATOR": "cpu"})


def test_ranks_on_the_cpu_can_be_requested_where_there_are_gpus() -> None:
    devices = local_devices(None, 3, cuda_count=8, environment={})
    assert (devices.kind, devices.ranks) == ("cpu", 3)


def test_ranks_on_the_cpu_go_together_with_no_other_choice_of_devices(hostfile: Path) -> None:
    with pytest.raises(ConfigError, match="--num-gpus 2 and --cpu-ranks 3 exclude each other"):
        plan_launch(RUN, [], num_gpus=2, cpu_ranks=3, hostfile=None)
    with pytest.raises(ConfigError, match="--cpu-ranks is for this machine alone"):
        plan_launch(RUN, [], num_gpus=None, cpu_ranks=3, hostfile=hostfile)
    with pytest.raises(ConfigError, match="--cpu-ranks must be at least 1, not 0"):
        plan_launch(RUN, [], num_gpus=None, cpu_ranks=0, hostfile=None)


def test_one_core_gets_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cpu_cores", lambda: 1)
    assert local_devices(None, cuda_count=0, environment={}).ranks == 1


@pytest.mark.usefixtures("cpu_only")
def test_two_runs_on_one_machine_get_two_ports_unless_one_is_named() -> None:
    ports = {
        part
        for _ in range(5)
        for part in plan_launch(RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None).command
        if "port" in part
    }
    assert len(ports) > 1
    named = plan_launch(
        RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None, deepspeed_options="--master_port=1234"
    ).command
    assert [part for part in named if "port" in part] == ["--master_port=1234"]


def test_all_gpus_are_taken_or_the_requested_number() -> None:
    assert local_devices(None, cuda_count=8, environment={}).options == ("--num_gpus=8",)
    assert local_devices(3, cuda_count=8, environment={}).options == ("--num_gpus=3",)
    assert local_devices(3, cuda_count=8, environment={}).kind == "cuda"


def test_the_devices_that_cuda_visible_devices_names_are_taken_and_no_others() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4, 6,7"}
    assert local_devices(None, cuda_count=3, environment=environment).options == ("--include=localhost:4,6,7",)
    assert local_devices(None, cuda_count=3, environment=environment).numbers == "4,6,7"
    assert local_devices(2, cuda_count=3, environment=environment).options == ("--include=localhost:4,6",)


def test_devices_by_uuid_are_refused_since_deepspeed_would_take_others() -> None:
    with pytest.raises(ConfigError, match="by number only"):
        local_devices(None, cuda_count=1, environment={"CUDA_VISIBLE_DEVICES": "GPU-8a56"})


def test_more_gpus_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="this machine shows 2 CUDA devices"):
        local_devices(3, cuda_count=2, environment={})
    with pytest.raises(ConfigError, match="at least 1"):
        plan_launch(RUN, [], num_gpus=0, hostfile=None)


def test_gpus_are_left_alone_where_deepspeed_is_set_to_use_the_cpu() -> None:
    assert local_devices(None, cuda_count=2, environment={"DS_ACCELERATOR": "cpu"}).kind == "cpu"


def test_a_hostfile_gives_its_slots_or_the_requested_number_on_each_machine(hostfile: Path) -> None:
    devices = hosts_of(hostfile, None)
    assert (devices.ranks, devices.options) == (12, (f"--hostfile={hostfile}",))
    assert hosts_of(hostfile, 2).ranks == 4
    assert hosts_of(hostfile, 2).options == (f"--hostfile={hostfile}", "--num_gpus=2")


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
    path = tmp_path / "hosts"
    path.write_text(f"{name} slots=2\n")
    plan = plan_launch(RUN, [], num_gpus=None, hostfile=path)
    assert parse_args(plan.command[3:]).force_multi == remote
    assert plan.devices.choice == f"2 ranks on {name} of {path}"
    with pytest.raises(ConfigError, match="needs pdsh") if remote else nullcontext():
        assert plan.reached({"PATH": str(tmp_path)}) is plan


def test_this_machine_is_known_by_its_addresses() -> None:
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # of no machine: for documentation (RFC 5737)


def test_a_hostfile_run_leaves_port_and_accelerator_to_the_other_machines(hostfile: Path) -> None:
    plan = plan_launch(RUN, ["run.seed=1"], num_gpus=None, hostfile=hostfile)
    assert not [part for part in plan.command if "master_port" in part]
    assert "DS_ACCELERATOR" not in plan.environment
    assert plan.devices.kind == "hosts"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("node-a slots=four\n", "line 1: expected 'NAME slots=N', found 'node-a slots=four'"),
        ("node-a slots=4\nnode-b\n", "line 2: expected"),
        ("node-a slots=0\n", "line 1: expected"),
        ("node-a slots=4\nnode-a slots=4\n", "line 2: node-a is named twice"),
        ("-oProxyCommand=x slots=4\n", "line 1: ssh would take -oProxyCommand=x for an option"),
        ("# nobody\n", "names no machine"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        hosts_of(path, None)


def test_a_missing_hostfile_is_refused_though_deepspeed_would_run_here_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        plan_launch(RUN, [], num_gpus=None, hostfile=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "found"),
    [("node-a slots=4\n".encode("utf-16"), "0xff at byte 0"), (b"node-a slots=4  # gro\xdf\n", "0xdf at byte 21")],
    ids=["UTF-16", "Latin-1"],
)
def test_a_hostfile_that_is_not_utf_8_is_refused_with_the_byte(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"expected lines 'NAME slots=N' in UTF-8, found {found}; save it as UTF-8"):
        hosts_of(path, None)


@pytest.mark.parametrize("num_gpus", [0, -2])
def test_a_number_of_gpus_of_each_machine_that_is_not_positive_is_refused(hostfile: Path, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"--num-gpus must be at least 1, not {num_gpus}"):
        plan_launch(RUN, [], num_gpus=num_gpus, hostfile=hostfile)


def test_more_ranks_than_a_machine_of_the_hostfile_has_slots_is_an_error(hostfile: Path) -> None:
    with pytest.raises(ConfigError, match=r"smallest machine of .* has 4 slots"):
        hosts_of(hostfile, 5)


def test_fewer_gpus_than_slots_need_pdsh(hostfile: Path) -> None:
    openmpi = "--launcher OpenMPI --launcher_args '-env X=1'"
    with pytest.raises(ConfigError, match="with --launcher openmpi DeepSpeed uses all slots"):
        plan_launch(RUN, [], num_gpus=2, hostfile=hostfile, deepspeed_options=openmpi)
    assert plan_launch(RUN, [], num_gpus=None, hostfile=hostfile, deepspeed_options=openmpi).devices.kind == "hosts"
    assert plan_launch(RUN, [], num_gpus=2, hostfile=hostfile, deepspeed_options="--launcher PDSH").devices.ranks == 4


def test_an_override_that_a_remote_shell_would_interpret_is_refused(hostfile: Path) -> None:
    with pytest.raises(ConfigError, match="write it into the run file instead"):
        plan_launch(RUN, ["run.name=a;b"], num_gpus=None, hostfile=hostfile)


@pytest.mark.parametrize(
    "option", ["--num_gpus=4", "--include localhost:0", "--inclu=a", "-H hosts", "-ihost:0", "--no_py"]
)
def test_options_that_decide_which_ranks_there_are_cannot_be_smuggled_in(option: str) -> None:
    with pytest.raises(ConfigError, match="use --num-gpus, --cpu-ranks and --hostfile instead"):
        plan_launch(RUN, [], num_gpus=None, hostfile=None, deepspeed_options=option)


@pytest.mark.usefixtures("cpu_only")
def test_further_options_reach_deepspeed_before_the_module() -> None:
    options = "--enable_each_rank_log 'my logs' --bind_cores_to_rank"
    command = plan_launch(RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None, deepspeed_options=options).command
    assert Path(command[0]).parent == Path(sys.executable).parent
    assert "--num_gpus=1" in command
    start = command.index("--enable_each_rank_log")
    assert command[start : start + 4] == ("--enable_each_rank_log", "my logs", "--bind_cores_to_rank", "--module")
    with pytest.raises(ConfigError, match="No closing quotation"):
        plan_launch(RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None, deepspeed_options="--x 'y")


@pytest.mark.usefixtures("cpu_only")
def test_a_hostfile_that_deepspeed_would_find_by_itself_is_kept_from_a_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "hostfile"
    found.write_text("node-a slots=4\n")
    monkeypatch.setattr(start, "_DEEPSPEED_HOSTFILE", found)
    plan = plan_launch(RUN, [], num_gpus=None, cpu_ranks=1, hostfile=None, deepspeed_options="--bind_cores_to_rank")
    assert "--hostfile=/dev/null" in plan.command


@pytest.mark.usefixtures("cpu_only")
def test_the_shell_line_is_the_command_as_a_user_could_type_it() -> None:
    plan = plan_launch(Path("my run.yaml"), [], num_gpus=None, cpu_ranks=1, hostfile=None)
    words = shlex.split(plan.shell_line())
    assert words[:2] == ["PYTHONUNBUFFERED=1", "DS_ACCELERATOR=cpu"]
    assert tuple(words[2:]) == plan.command


@pytest.mark.usefixtures("cpu_only")
def test_the_token_is_no_prefix_of_an_option_of_deepspeed() -> None:
    from deepspeed.launcher.runner import parse_args

    options = "--no_local_rank"
    plan = plan_launch(RUN, ["run.seed=1"], num_gpus=None, cpu_ranks=1, hostfile=None, deepspeed_options=options)
    token = LaunchToken.of_this_process()
    parsed = parse_args(plan.command_of(token)[3:])
    assert parsed.user_script == WORKER_MODULE
    assert parsed.user_args == ["run.yaml", "run.seed=1", f"--evenpack-run={token}"]


def test_without_deepspeed_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match="-m pip install deepspeed"):
        plan_launch(RUN, [], num_gpus=None, cpu_ranks=2, hostfile=None)
