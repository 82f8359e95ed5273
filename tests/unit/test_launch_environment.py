"""A launcher's environment variable that is wrong is named with its value and what was expected."""

import re

import pytest

from evenpack.data.prepare.tokenising import encoding_threads
from evenpack.data.prepare.workers import started_ranks
from evenpack.engine.world.distributed import complete_environment, quiet_deepspeed
from evenpack.errors import ConfigError
from evenpack.launch_environment import check_ranks
from evenpack.launcher.processes.devices import choose_accelerator
from evenpack.launcher.processes.identities import RankPlace
from evenpack.launcher.processes.start import local_devices

WRONG = {
    "a rank in words": ({"RANK": "abc"}, "RANK='abc': expected a whole number of 0 or more"),
    "a fraction": ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5'"),
    "another script's digits": ({"RANK": "٣"}, "RANK="),
    "a number of any length": ({"RANK": "9" * 5000}, "RANK="),
    "no rank at all": ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0': expected a whole number of 1 or more"),
    "a rank beyond the last": ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 and WORLD_SIZE=2: ranks are numbered 0 to 1"),
    "a machine of more ranks": ({"WORLD_SIZE": "2", "LOCAL_SIZE": "4"}, "LOCAL_SIZE=4 and WORLD_SIZE=2"),
    "ranks of a machine, left in a shell": ({"LOCAL_SIZE": "8"}, "LOCAL_SIZE=8 and no WORLD_SIZE"),
    "Open MPI's": ({"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x'"),
    "MPICH's": ({"PMI_RANK": "0", "PMI_SIZE": "-1"}, "PMI_SIZE='-1'"),
    "Open MPI's of a shell, alone on its machine": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        "RANK=1 and OMPI_COMM_WORLD_RANK=0, WORLD_SIZE=2 and OMPI_COMM_WORLD_SIZE=1 contradict each other",
    ),
    "the local rank that DeepSpeed compares": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "LOCAL_RANK=1 and OMPI_COMM_WORLD_LOCAL_RANK=0 contradict each other",
    ),
    "a port too large": ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected a whole number from 1 to 65535"),
    "a machine's number": ({"CROSS_RANK": "-1"}, "CROSS_RANK='-1'"),
    "torchrun's restarts": ({"TORCHELASTIC_MAX_RESTARTS": "no"}, "TORCHELASTIC_MAX_RESTARTS='no'"),
    "an unknown device": ({"DS_ACCELERATOR": "foo"}, "DS_ACCELERATOR='foo': expected cpu or cuda"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_variable_is_named_wherever_a_rank_begins(case: str) -> None:
    environment, expected = WRONG[case]
    for reader in (check_ranks, complete_environment, RankPlace.of_environment):
        with pytest.raises(ConfigError, match=f"environment variables? {re.escape(expected)}"):
            reader(dict(environment))


def test_launchers_that_agree_and_tasks_of_srun_in_which_another_starts_ranks_are_right() -> None:
    ranks = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    for others in (
        {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    ):
        place = RankPlace.of_environment(ranks | others)
        assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (9, 16, 1, 8)


def test_variables_of_single_commands_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYON_NUM_THREADS", "OMPI_COMM_WORLD_SIZE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "many")
    with pytest.raises(ConfigError, match="RAYON_NUM_THREADS='many'"):
        encoding_threads()
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE='many'"):
        started_ranks()
    for choose in (choose_accelerator, quiet_deepspeed, lambda: local_devices(1)):
        with pytest.raises(ConfigError, match="DS_ACCELERATOR='many'"):
            choose()
