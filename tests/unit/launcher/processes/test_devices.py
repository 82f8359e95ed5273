"""The devices of this machine, and the memory of ranks on its CPU."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.launcher.processes import devices
from evenpack.launcher.processes.devices import configure_allocator, require_seen_gpus
from evenpack.launcher.processes.start import plan_launch

REUSE = """
import resource, sys
from evenpack.launcher.processes import devices
kept = devices.keep_freed_memory() if sys.argv[1] == "keep" else None
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = b"x" * (40 << 20)
    del buffer
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(script: str, *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={"PYTHONPATH": str(Path.cwd()), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_buffers_are_reused_without_page_faults_unless_the_user_sets_that() -> None:
    """The buffer fills 10,240 pages of 4 KiB, or 20 huge ones; by default each is mapped newly."""
    kept, faults = printed(REUSE, "keep")
    assert kept == "True"
    assert int(faults) < 5
    assert int(printed(REUSE, "leave")[1]) >= 20
    kept, faults = printed(REUSE, "keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert int(faults) >= 20


@pytest.mark.slow
def test_devices_are_counted_without_torch_only_where_it_is_built_without_gpus() -> None:
    count = "import sys; from evenpack.launcher.processes.devices import cuda_devices; print(cuda_devices())"
    shown = f"{count}; print('torch' in sys.modules); import torch; print(torch.version.cuda or torch.version.hip)"
    found, is_imported, build = printed(shown)
    assert (is_imported == "False") == (build == "None")
    if build == "None":
        assert found == "0"


@pytest.fixture
def unseen_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and a build of torch for CUDA, whose driver is too old."""
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(devices, "_build_of_torch", lambda: {"__version__": "2.13.0+cu130", "cuda": "13.0"})
    monkeypatch.setattr(devices, "cuda_devices", lambda: 0)


def run(name: str) -> RunConfig:
    return load_run_file(Path(name), RunConfig)


@pytest.mark.parametrize(
    "environment", [{}, {"CUDA_VISIBLE_DEVICES": "7"}, {"CUDA_VISIBLE_DEVICES": "GPU-8a56"}], ids=str
)
def test_a_run_for_gpus_is_refused_where_torch_does_not_see_the_gpus(
    unseen_gpu: None, environment: dict[str, str]
) -> None:
    seen = r"\(nvidia0\).* 2\.13\.0\+cu130, built for CUDA 13\.0 .* nvidia-smi .* set DS_ACCELERATOR=cpu"
    with pytest.raises(ConfigError, match=seen):
        require_seen_gpus(run("bert_large_phase2_sprint"), environment)


def test_another_run_trains_on_the_cpu_there_and_says_so(unseen_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require_seen_gpus(run("demo"), {"LOCAL_RANK": "1"})
        assert not caplog.text, "its neighbour says it"
        require_seen_gpus(run("demo"), {})
    assert caplog.text.strip().endswith("the run trains on the CPU")


@pytest.mark.parametrize(
    "environment",
    [{"DS_ACCELERATOR": "cpu"}, *({"CUDA_VISIBLE_DEVICES": hidden} for hidden in ("", "-1", "none", "NoDevFiles"))],
    ids=str,
)
def test_who_asks_for_the_cpu_gets_it(
    unseen_gpu: None, caplog: pytest.LogCaptureFixture, environment: dict[str, str]
) -> None:
    require_seen_gpus(run("bert_large_phase2_sprint"), environment)
    assert not caplog.text


def test_nothing_is_said_of_gpus_that_are_seen_or_not_there(
    unseen_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 1)
    require_seen_gpus(run("bert_large_phase2_sprint"), {})
    monkeypatch.setattr(devices, "cuda_devices", lambda: 0)
    (tmp_path / "nvidia0").unlink()
    require_seen_gpus(run("bert_large_phase2_sprint"), {})
    assert not caplog.text


def test_ranks_are_not_planned_on_that_machines_cpu_unless_requested(
    unseen_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    given: dict[str, Any] = {"config": run("bert_large_phase2_sprint"), "num_gpus": None, "hostfile": None}
    with pytest.raises(ConfigError, match="PyTorch sees none of"):
        plan_launch(Path("run.yaml"), [], **given)
    assert plan_launch(Path("run.yaml"), [], cpu_ranks=2, **given).devices.ranks == 2


RANK_OF_SUCH_A_MACHINE = """
import os, sys
from pathlib import Path
from evenpack.launcher import worker
from evenpack.launcher.processes import devices
devices._DEVICE_FILES = Path(sys.argv[1])
devices._build_of_torch = lambda: {"__version__": "2.13.0+cu130", "cuda": "13.0"}
devices.cuda_devices = lambda: 0
code = worker.main(["bert_large_phase2_sprint", "training.layout=unpadded"])
print(code, os.environ.get("PYTORCH_ALLOC_CONF"), "torch" in sys.modules)
"""


def test_a_rank_checks_the_devices_before_it_imports_torch(unseen_gpu: None, tmp_path: Path) -> None:
    assert printed(RANK_OF_SUCH_A_MACHINE, str(tmp_path)) == ["2", "expandable_segments:True", "False"]


@pytest.mark.parametrize(
    ("layout", "given", "expected"),
    [
        ("unpadded", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("packed", {}, {}),
        ("unpadded", {"CUDA_VISIBLE_DEVICES": "MIG-5c"}, {"CUDA_VISIBLE_DEVICES": "MIG-5c"}),
        ("unpadded", {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ("unpadded", {"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
    ids=str,
)
def test_gpu_memory_grows_in_place_for_unequal_micro_batches_unless_set(
    layout: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    config = load_run_file(Path("bert_large_phase2_sprint"), RunConfig, [f"training.layout={layout}"])
    configure_allocator(config, given)
    assert given == expected
