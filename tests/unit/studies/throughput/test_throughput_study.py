"""`study throughput` on a tiny model in this process, and its parts with known times."""

import io
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pair_sources import pair_run
from rich.console import Console

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World
from evenpack.progress import Progress
from evenpack.studies.throughput import study
from evenpack.studies.throughput.contenders import depth_contenders, run_to_measure
from evenpack.studies.throughput.measure import MeasuredStep, Quartiles
from evenpack.studies.throughput.study import ThroughputOptions, ThroughputStudy, study_throughput

SILENT = Progress(Console(), silent=True)


def options(**given: object) -> ThroughputOptions:
    values: dict[str, object] = {
        "layouts": ("padded", "unpadded", "packed"),
        "depths": (1, 2, None),
        "rounds": 3,
        "warmup": 1,
        "samples": 24,
        "clock": "cpu",
    }
    return ThroughputOptions(**(values | given))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found(world: World, config: RunConfig) -> ThroughputStudy:
    """Runs the study on a clock that advances by a second per reading: each phase of a micro-batch takes one.

    The engine, which reads the process's time for itself, keeps the real clock.
    """
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("evenpack.engine.engine.time", SimpleNamespace(**vars(time)))
        patched.setattr(time, "process_time", itertools.count(0.0).__next__)
        done = study_throughput(config, world, options(), progress=Progress(Console(file=stream), interval_seconds=0.0))
    shown = [line.split("  ")[:2] for line in stream.getvalue().splitlines()]
    assert [step for step, _ in shown if "/32" in step] == [f"step {step}/32" for step in range(1, 33)]
    assert shown[0] == ["step 1/32", "padded"]
    assert shown[-1] == ["step 24/24", "cost model"]
    return done


def test_a_study_measures_each_layout_and_depth(found: ThroughputStudy, config: RunConfig) -> None:
    assert [row.layout for row in found.layouts] == ["padded", "unpadded", "packed"]
    padded, unpadded, packed = found.layouts
    assert padded.padding_share > packed.padding_share > 0.0
    assert padded.sequences_per_pack == packed.sequences_per_pack > 1.0
    for row in found.layouts:
        assert (row.forward_seconds, row.backward_seconds) == (2.0, 2.0)  # of two micro-batches
        assert (row.all_reduce_seconds, row.update_seconds) == (1.0, 1.0)
        assert row.step_seconds == Quartiles(median=8.0, quartile_1=8.0, quartile_3=8.0)
        slots = row.tokens_per_second.median / (1.0 - row.padding_share)
        assert row.slots_per_second.median == pytest.approx(slots, rel=0.01)
        sequences = config.training.items_per_step * row.sequences_per_pack
        assert row.sequences_per_second.median == pytest.approx(sequences / row.step_seconds.median)
        assert row.mfu is None  # the peak of this machine is not known
        assert row.peak_memory_bytes > 50e6
        assert row.wait_share == 0.0  # of one rank
    assert found.ratio_of_promised_speed_up == pytest.approx(1.0 / packed.sequences_per_pack)  # steps took as long
    assert unpadded.performed_tflops.median > 0.0
    assert found.measured_on.layers == config.model.shape["layers"]
    assert found.cost_model is not None
    assert found.cost_model.samples == 24 + 3 * 3 * 2  # two micro-batches per step; warm-up does not count


def test_depths_have_the_factors_of_their_packings_and_what_they_make_of_them(found: ThroughputStudy) -> None:
    assert [row.depth for row in found.depths] == [1, 2, None]
    assert found.depths[0].packing_factor == 1.0
    assert 1.0 < found.depths[1].packing_factor < found.depths[2].packing_factor
    for row in found.depths:
        assert row.predicted_speed_up == pytest.approx(row.packing_factor / (1.0 + row.overhead.median))
        assert row.realised_speed_up.quartile_1 <= row.realised_speed_up.median <= row.realised_speed_up.quartile_3


@pytest.mark.slow
def test_bert_can_be_measured_too(world: World, tmp_path: Path) -> None:
    config = pair_run(tmp_path)
    prepare(config.data, config.prepared_dir)
    wanted = options(layouts=("packed", "padded/arrival"), depths=(None,), rounds=1, samples=0)
    done = study_throughput(config, world, wanted, progress=SILENT)
    assert done.cost_model is None
    assert done.cost_model_refusal is None
    assert done.depths[0].packing_factor > 1.0


def known_step(seconds: float, *, sequences: int = 8) -> MeasuredStep:
    return MeasuredStep(
        step_seconds=seconds,
        waiting_seconds=0.0,
        forward_seconds=0.0,
        backward_seconds=0.0,
        all_reduce_seconds=0.0,
        update_seconds=0.0,
        loader_seconds=0.0,
        packs=8,
        sequences=sequences,
        tokens=1,
        slots=1,
        useful_flops=1,
        performed_flops=1,
        peak_memory_bytes=1,
        micro_batches=study.MicroBatchTimes.concatenate(
            [
                study.MicroBatchTimes(
                    **{name: np.array([1]) for name in ("slots", "squared_lengths", "segments")},
                    pairs_within={},
                    layer_shares={},
                    seconds=np.array([1.0]),
                )
            ]
        ),
    )


def test_speed_ups_follow_from_known_seconds(world: World, config: RunConfig, prepared: PreparedData) -> None:
    """Packs take 1.1 times the unmasked model, padding as long as that: by hand."""
    run = run_to_measure(config)
    contenders = depth_contenders(run, world, (None,))
    measured = {
        "padding": [known_step(2.0), known_step(4.0)],
        "unmasked": [known_step(2.0), known_step(4.0)],
        "depth max": [known_step(2.2), known_step(4.4)],
    }
    row = study._depth_rows(config, [None], contenders, measured)[0]
    assert row.overhead.median == pytest.approx(0.1)
    assert row.predicted_speed_up == pytest.approx(row.packing_factor / 1.1)
    assert row.realised_speed_up.median == pytest.approx(row.packing_factor / 1.1)
