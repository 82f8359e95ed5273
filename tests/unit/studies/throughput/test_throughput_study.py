"""`study throughput` on a tiny model in this process, and its parts with known times."""

import io
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pair_sources import pair_run
from rich.console import Console
from seen_figures import DrawnFigure

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World
from evenpack.progress import Progress
from evenpack.studies.plotting import figure_as_png, require_plot
from evenpack.studies.throughput import presentation, study
from evenpack.studies.throughput.contenders import (
    FORMS,
    depth_contenders,
    run_to_measure,
)
from evenpack.studies.throughput.measure import MeasuredStep, Quartiles
from evenpack.studies.throughput.presentation import plot_throughput, throughput_tables
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


def printed(found: ThroughputStudy) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for shown in throughput_tables(found):
        console.print(shown)
    return console.export_text()


def test_a_share_of_no_padding_is_explained(found: ThroughputStudy) -> None:
    """Recipes that cut at the end of rows leave padding nothing to pad."""
    padded, *others = found.layouts
    full = replace(found, layouts=(replace(padded, padding_share=0.0), *others))
    assert "padded has no padding here: every sequence is as long as a row" in printed(full)


@pytest.mark.slow
def test_a_study_can_be_shown_and_drawn(
    found: ThroughputStudy, prepared: PreparedData, tmp_path: Path, drawn: list[DrawnFigure]
) -> None:
    text = printed(found)
    for words in (
        "step, s (middle half)",
        "packing factor",
        "peak memory (resident",
        "held-out",
        "training.cost_model",
    ):
        assert words in text
    assert "has no padding here" not in text
    require_plot(tmp_path / "t.png")
    plot_throughput(found, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    origin = found.measured_on
    fingerprint = prepared.fingerprint(seed=0)[:12]
    data = f"{found.run}: data {', '.join(prepared.source_names)} ({fingerprint}); evenpack {origin.evenpack}, "
    assert drawn[0].footer.startswith(data)
    assert f"; 1 x {origin.device} " in drawn[0].footer


@pytest.mark.slow
def test_no_text_of_a_figure_runs_into_another(
    found: ThroughputStudy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The figure is drawn with the longest names, and with all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    seen: list[int] = []

    @contextmanager
    def look(path: Path, *, width: float, height: float) -> Iterator[Any]:
        with figure_as_png(path, width=width, height=height) as figure:
            yield figure
            FigureCanvasAgg(figure).draw()  # from here on texts have a place
            names = [[label.get_window_extent() for label in axes.get_xticklabels()] for axes in figure.axes]
            titles = [axes._left_title.get_window_extent() for axes in figure.axes]
            for row in (*names, titles):
                assert all(left.x1 < right.x0 for left, right in pairwise(row))
            (note,) = figure.texts
            assert note.get_window_extent().y1 < min(label.y0 for row in names for label in row)
            seen.append(len(names[0]))

    monkeypatch.setattr(presentation, "figure_as_png", look)
    rows = tuple(replace(found.layouts[0], layout=name) for name in FORMS)
    for layouts in (rows, rows[3:6]):
        plot_throughput(replace(found, layouts=layouts), tmp_path / "t.png")
    assert seen == [len(FORMS), 3]


@pytest.mark.slow
def test_bert_can_be_measured_too(world: World, tmp_path: Path) -> None:
    config = pair_run(tmp_path)
    prepare(config.data, config.prepared_dir)
    wanted = options(layouts=("packed", "padded/arrival"), depths=(None,), rounds=1, samples=0)
    done = study_throughput(config, world, wanted, progress=SILENT)
    assert done.cost_model is None
    assert done.cost_model_refusal is None
    assert done.depths[0].packing_factor > 1.0


def test_too_few_micro_batches_give_a_study_without_a_cost_model(world: World, config: RunConfig) -> None:
    wanted = options(layouts=("packed",), depths=(), rounds=1, warmup=0, samples=2)
    done = study_throughput(config, world, wanted, progress=SILENT)
    assert done.cost_model is None
    assert "12 different micro-batches" in (done.cost_model_refusal or "")
    assert done.depths == ()
    assert done.ratio_of_promised_speed_up is None


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


@pytest.mark.slow
def test_what_packing_promises_is_compared_round_by_round() -> None:
    """Two sequences per pack and twice as fast: all arrives; the slow second round says nothing else."""
    padded = [known_step(4.0, sequences=16), known_step(40.0, sequences=16)]
    packed = [known_step(2.0, sequences=16), known_step(20.0, sequences=16)]
    assert study._promised({"padded": padded, "packed": packed}) == pytest.approx(1.0)
    assert study._promised({"padded": padded, "packed": padded}) == pytest.approx(0.5)
    assert study._promised({"packed": packed}) is None
