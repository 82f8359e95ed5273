"""A rank stays on the cores beside its GPU, unless somebody has chosen its cores already."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenpack.engine.world.distributed import bind_to_cores_of

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)


class Machine:
    """Eight cores, of which this process may use `own`; what its threads are bound to is written down."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = set(range(8))
        self.bound: dict[int, set[int]] = {}
        self.folder = folder
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: self.own)
        monkeypatch.setattr(os, "sched_setaffinity", self.bound.__setitem__)

    def bind(self, cores: str | None, gpu: SimpleNamespace = GPU) -> frozenset[int] | None:
        if cores is not None:
            (self.folder / "0000:1b:00.0").mkdir(exist_ok=True)
            (self.folder / "0000:1b:00.0/local_cpulist").write_text(cores)
        return bind_to_cores_of(gpu, pci_devices=self.folder)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def thread() -> Iterator[threading.Thread]:
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    yield waiting
    done.set()
    waiting.join()


def test_every_thread_is_bound_to_the_cores_beside_the_gpu(machine: Machine, thread: threading.Thread) -> None:
    assert machine.bind("0-1,4,6-7\n") == {0, 1, 4, 6, 7}
    assert {os.getpid(), thread.native_id} <= set(machine.bound)
    assert all(cores == {0, 1, 4, 6, 7} for cores in machine.bound.values())


@pytest.mark.parametrize("listed", [None, "", "0-7", "8-15", "none"])
def test_nothing_is_bound_where_the_gpu_has_no_cores_of_its_own(machine: Machine, listed: str | None) -> None:
    assert machine.bind(listed) is None
    assert machine.bound == {}


def test_cores_that_were_chosen_and_gpus_without_a_place_are_left_as_they_are(machine: Machine) -> None:
    assert machine.bind("0-3", SimpleNamespace(name="a device of an older torch")) is None
    machine.own = {2, 3, 4}
    assert machine.bind("0-3") is None
    assert machine.bound == {}
