"""`study throughput` on a CUDA device: events, memory and MFU."""

from pathlib import Path

import pytest
import torch
from tiny_run import tiny_gpt2_run

from evenpack.engine.world.distributed import joined_world
from evenpack.studies.throughput.contenders import changed
from evenpack.studies.throughput.study import ThroughputOptions, study_throughput

pytestmark = pytest.mark.gpu


def test_phases_by_events_add_up_to_the_step(tmp_path: Path) -> None:
    config = changed(tiny_gpt2_run(tmp_path), model={"hidden_size": 512, "heads": 8, "layers": 8})
    options = ThroughputOptions(
        layouts=("packed", "padded"), depths=(1, None), rounds=5, warmup=3, samples=24, clock="wall"
    )
    with joined_world() as world:
        assert world.device.type == "cuda"
        found = study_throughput(config, world, options, progress=lambda *_: None)
    for row in found.layouts:
        phases = row.forward_seconds + row.backward_seconds + row.all_reduce_seconds + row.update_seconds
        assert 0.5 * phases < row.step_seconds.median < 2.0 * phases
        assert 0 < row.peak_memory_bytes <= torch.cuda.get_device_properties(0).total_memory
        assert row.mfu is None or 0.0 < row.mfu.median < 1.0
    assert found.measured_on.device == torch.cuda.get_device_name()
