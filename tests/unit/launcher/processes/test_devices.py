"""The devices of this machine, and the memory of ranks on its CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

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
def test_freed_buffers_are_used_again_without_page_faults_unless_the_user_has_set_it_otherwise() -> None:
    """The buffer fills 10,240 pages of 4 KiB, or 20 huge ones; by default each is mapped newly."""
    kept, faults = printed(REUSE, "keep")
    assert kept == "True"
    assert int(faults) < 5
    assert int(printed(REUSE, "leave")[1]) >= 20
    kept, faults = printed(REUSE, "keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert int(faults) >= 20


def test_devices_are_counted_without_torch_only_where_it_is_built_without_gpus() -> None:
    count = "import sys; from evenpack.launcher.processes.devices import cuda_devices; print(cuda_devices())"
    shown = f"{count}; print('torch' in sys.modules); import torch; print(torch.version.cuda or torch.version.hip)"
    found, is_imported, build = printed(shown)
    assert (is_imported == "False") == (build == "None")
    if build == "None":
        assert found == "0"
