"""`study throughput` on a tiny model in this process, and its parts on times that are known."""

import io
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pair_sources import pair_run
from rich.console import Console
from tiny_run import PACK_LENGTH, lone_world, tiny_gpt2_run

from evenpack.data.config import PackingConfig
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import World
from evenpack.engine.resolve import open_run
from evenpack.errors import ConfigError
from evenpack.models.common.batch_work import useful_work
from evenpack.models.cost import step_flops
from evenpack.progress import Progress
from evenpack.studies.plotting import figure_as_png, require_plot
from evenpack.studies.throughput import plots, study
from evenpack.studies.throughput.clock import PeakMemory, PhaseClock, Spread
from evenpack.studies.throughput.command import ThroughputCommand
from evenpack.studies.throughput.contenders import (
    FORMS,
    contender,
    depth_contenders,
    parse_forms,
    run_to_measure,
)
from evenpack.studies.throughput.measure import MeasuredStep, StepTimer
from evenpack.studies.throughput.measured import StepProgress
from evenpack.studies.throughput.options import parse_clock, parse_options
from evenpack.studies.throughput.plots import plot_throughput
from evenpack.studies.throughput.samples import sample_micro_batches
from evenpack.studies.throughput.study import ThroughputOptions, ThroughputStudy, study_throughput
from evenpack.studies.throughput.tables import throughput_tables


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with lone_world() as alone:
        yield alone


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def prepared(config: RunConfig) -> PreparedData:
    return PreparedData.open(config.prepared_dir, config.data)


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
    said: list[tuple[str, int, int]] = []
    done = study_throughput(config, world, options(), progress=lambda *state: said.append(state))
    assert said[-1] == ("cost model", 24, 24)
    assert [step for _, step, total in said if total == 4 * 8] == list(range(1, 33))
    return done


def test_a_study_measures_each_layout_and_depth(found: ThroughputStudy, config: RunConfig) -> None:
    assert [row.layout for row in found.layouts] == ["padded", "unpadded", "packed"]
    padded, unpadded, packed = found.layouts
    assert padded.padding_share > packed.padding_share > 0.0
    assert padded.sequences_per_pack == packed.sequences_per_pack > 1.0
    for row in found.layouts:
        phases = row.forward_seconds + row.backward_seconds + row.all_reduce_seconds + row.update_seconds
        assert 0.5 * phases < row.step_seconds.median < 2.0 * phases
        slots = row.tokens_per_second.median / (1.0 - row.padding_share)
        assert row.slots_per_second.median == pytest.approx(slots, rel=0.2)
        assert row.mfu is None  # the peak of this machine is not known
        assert row.peak_memory_bytes > 50e6
    assert 0.3 < (found.ratio_of_promised_speed_up or 0.0) < 3.0
    assert unpadded.performed_tflops.median > 0.0
    assert found.measured_on.layers == config.model.shape["layers"]
    assert found.cost_model is not None
    assert found.cost_model.samples == 24 + 3 * 3 * 2  # two micro-batches a step; warm-up does not count


def test_depths_have_the_factors_of_their_packings_and_what_they_make_of_them(found: ThroughputStudy) -> None:
    assert [row.depth for row in found.depths] == [1, 2, None]
    assert found.depths[0].packing_factor == 1.0
    assert 1.0 < found.depths[1].packing_factor < found.depths[2].packing_factor
    for row in found.depths:
        assert row.predicted_speed_up == pytest.approx(row.packing_factor / (1.0 + row.overhead.median))
        assert row.realised_speed_up.quartile_1 <= row.realised_speed_up.median <= row.realised_speed_up.quartile_3


def test_a_study_can_be_shown_and_drawn(found: ThroughputStudy, tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    for shown in throughput_tables(found):
        console.print(shown)
    text = console.export_text()
    for words in (
        "step, s (middle half)",
        "packing factor",
        "peak memory (resident",
        "held-out",
        "training.cost_model",
    ):
        assert words in text
    require_plot(tmp_path / "t.png")
    plot_throughput(found, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_no_text_of_a_figure_runs_into_another(
    found: ThroughputStudy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the longest names there are, and with all of them."""
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

    monkeypatch.setattr(plots, "figure_as_png", look)
    rows = tuple(replace(found.layouts[0], layout=name) for name in FORMS)
    for layouts in (rows, rows[3:6]):
        plot_throughput(replace(found, layouts=layouts), tmp_path / "t.png")
    assert seen == [len(FORMS), 3]


def test_bert_can_be_measured_too(world: World, tmp_path: Path) -> None:
    config = pair_run(tmp_path)
    prepare(config.data, config.prepared_dir)
    wanted = options(layouts=("packed", "padded/arrival"), depths=(None,), rounds=1, samples=0)
    done = study_throughput(config, world, wanted, progress=lambda *_: None)
    assert done.cost_model is None
    assert done.cost_model_refusal is None
    assert done.depths[0].packing_factor > 1.0


def test_too_few_micro_batches_give_a_study_without_a_cost_model(world: World, config: RunConfig) -> None:
    wanted = options(layouts=("packed",), depths=(), rounds=1, warmup=0, samples=2)
    done = study_throughput(config, world, wanted, progress=lambda *_: None)
    assert done.cost_model is None
    assert "12 micro-batches of different make-up" in (done.cost_model_refusal or "")
    assert done.depths == ()
    assert done.ratio_of_promised_speed_up is None


def test_layouts_hold_the_same_sequences_and_padding_has_as_many_rows_as_packs(
    world: World, config: RunConfig, prepared: PreparedData
) -> None:
    run = run_to_measure(config)
    ids = [
        sorted(torch.cat([one.dataset[index].sequence_ids for index in range(2)]).tolist())
        for one in (contender(name, run, world) for name in ("padded", "packed"))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) > 8
    padding, unmasked, packed = depth_contenders(run, world, (1, None))
    rows = config.training.packs_per_micro_batch
    assert padding.dataset[0].slots == packed[1].dataset[0].slots == packed[None].dataset[0].slots == rows * PACK_LENGTH
    assert padding.dataset[0].local_counts.sequences == rows
    assert padding.packing_factor == packed[1].packing_factor == 1.0
    whole, apart = unmasked.dataset[0], packed[None].dataset[0]
    assert whole.tokens.tolist() == apart.tokens.tolist()
    assert whole.position_ids.max() == PACK_LENGTH - 1
    assert len(set(whole.cu_seqlens.tolist())) < len(set(apart.cu_seqlens.tolist()))


def test_repacked_data_holds_every_sequence_and_survives_pickling(prepared: PreparedData) -> None:
    two = prepared.repacked(PackingConfig(max_sequences_per_pack=2))
    again = pickle.loads(pickle.dumps(two))
    for one in (two, again):
        plan = one.plan("one", "train", seed=1)
        assert plan.max_sequences_per_pack == 2
        drawn = plan.draw(np.arange(plan.packs))
        assert sorted(drawn.sequence_ids.tolist()) == list(range(plan.sequences))
    assert prepared.plan("one", "train", seed=1).max_sequences_per_pack > 2
    assert (
        len({one.fingerprint(1) for one in (prepared, two, prepared.repacked(PackingConfig(max_sequences_per_pack=3)))})
        == 3
    )
    assert again.fingerprint(1) == two.fingerprint(1)


def test_samples_are_of_many_sizes_and_lengths(world: World, config: RunConfig, prepared: PreparedData) -> None:
    singles = contender("unpadded/arrival", open_run(config), world).dataset
    batches = list(sample_micro_batches(singles, 40))
    counts = [batch.local_counts.sequences for batch in batches]
    assert set(counts) == {1, 2, 3, 4}
    means = [batch.local_counts.tokens / count for batch, count in zip(batches, counts, strict=True)]
    assert min(means) < 0.25 * PACK_LENGTH
    assert max(means) > 0.9 * PACK_LENGTH
    again = [batch.order_hash for batch in sample_micro_batches(singles, 40)]
    assert again == [batch.order_hash for batch in batches]


def test_a_timed_step_counts_exactly_and_trains(world: World, config: RunConfig, prepared: PreparedData) -> None:
    run = run_to_measure(config)
    timer = StepTimer(run, world, clock="wall")
    packed = contender("packed", run, world)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in timer.engine.model.parameters()])
    step = timer.time_step_of(packed.dataset, 0)
    after = torch.cat([parameter.detach().flatten() for parameter in timer.engine.model.parameters()])
    assert (before != after).any()
    batches = [packed.dataset[index] for index in range(2)]
    assert step.slots == 8 * PACK_LENGTH
    assert step.tokens == batches[0].step_counts.tokens == sum(batch.local_counts.tokens for batch in batches)
    work = useful_work(batches[0]) + useful_work(batches[1])
    assert step.useful_flops == step_flops(config.model, vocabulary_size=prepared.vocabulary_size, work=work)
    assert step.micro_batches.slots.tolist() == [4 * PACK_LENGTH] * 2
    in_micro_batches = step.micro_batches.seconds.sum()
    assert in_micro_batches == pytest.approx(step.forward_seconds + step.backward_seconds)
    assert in_micro_batches < step.step_seconds
    assert step.loader_seconds > 0.0


def test_each_part_of_an_update_counts_in_its_phase(
    world: World, config: RunConfig, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_to_measure(config)
    timer = StepTimer(run, world, clock="wall")
    packed = contender("packed", run, world)
    plain = timer.time_step_of(packed.dataset, 0)
    delays = {"backward": 0.3, "allreduce_gradients": 0.4, "step": 0.5}
    for name, delay in delays.items():
        monkeypatch.setattr(timer.engine.deepspeed, name, delayed(getattr(timer.engine.deepspeed, name), delay))
    slow = timer.time_step_of(packed.dataset, 1)
    assert slow.forward_seconds < plain.forward_seconds + 0.2
    assert slow.backward_seconds == pytest.approx(plain.backward_seconds + 2 * 0.3, abs=0.2)
    assert slow.all_reduce_seconds == pytest.approx(plain.all_reduce_seconds + 0.4, abs=0.2)
    assert slow.update_seconds == pytest.approx(plain.update_seconds + 0.5, abs=0.2)
    assert slow.step_seconds > 1.5


def delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Sleeps first."""

    def run(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **named)

    return run


def test_phases_are_what_passes_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PhaseClock(torch.device("cpu"))
    ticks = iter([10.0, 11.0, 13.0, 14.0, 18.0])
    monkeypatch.setattr(clock, "now", lambda: next(ticks))
    for phase in ("begin", "forward", "backward", "all_reduce", "update"):
        clock(phase)  # type: ignore[arg-type]
    assert clock.take() == [("forward", 1.0), ("backward", 2.0), ("all_reduce", 1.0), ("update", 4.0)]
    assert clock.take() == []


def test_the_cpu_clock_stands_still_while_the_process_sleeps() -> None:
    clock = PhaseClock(torch.device("cpu"), "cpu")
    clock("begin")
    time.sleep(0.2)
    clock("forward")
    assert clock.take()[0][1] < 0.1


def test_the_cpu_clock_is_refused_where_it_would_mislead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="sees no work of a cuda device"):
        PhaseClock(torch.device("cuda"), "cpu")
    with pytest.raises(ConfigError, match="waits for others, and there are 2"):
        PhaseClock(torch.device("cpu"), "cpu", ranks=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS=1"):
        PhaseClock(torch.device("cpu"), "cpu")
    PhaseClock(torch.device("cpu"), "wall", ranks=2)


def test_several_ranks_are_not_measured_by_the_cpu_clock(
    world: World, config: RunConfig, prepared: PreparedData
) -> None:
    with pytest.raises(ConfigError, match="measure on one rank"):
        StepTimer(open_run(config), replace(world, size=2), clock="cpu")


def test_peak_memory_rises_by_what_a_step_takes() -> None:
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    before = memory.bytes()
    held = np.ones(40_000_000, dtype=np.uint8)
    after = memory.bytes()
    assert after - before > 0.8 * held.nbytes


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(median=3.0, quartile_1=2.0, quartile_3=4.0)


def known_step(seconds: float, *, sequences: int = 8) -> MeasuredStep:
    return MeasuredStep(
        step_seconds=seconds,
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
    row = study._depth_rows(config, contenders, measured)[0]
    assert row.overhead.median == pytest.approx(0.1)
    assert row.predicted_speed_up == pytest.approx(row.packing_factor / 1.1)
    assert row.realised_speed_up.median == pytest.approx(row.packing_factor / 1.1)


def test_what_packing_promises_is_compared_round_by_round() -> None:
    """Two sequences a pack and twice as fast: all arrives; the slow second round says nothing else."""
    padded = [known_step(4.0, sequences=16), known_step(40.0, sequences=16)]
    packed = [known_step(2.0, sequences=16), known_step(20.0, sequences=16)]
    assert study._promised({"padded": padded, "packed": packed}) == pytest.approx(1.0)
    assert study._promised({"padded": padded, "packed": padded}) == pytest.approx(0.5)
    assert study._promised({"packed": packed}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layouts": "packed/sorted"}, "no layout 'packed/sorted'"),
        ({"layouts": "paded"}, "no layout 'paded'; did you mean 'padded'"),
        ({"layouts": "packed,packed"}, "given twice"),
        ({"depths": "two"}, "'two' is neither a number"),
        ({"depths": "0"}, "'0' is neither a number"),
        ({"rounds": 0}, "--rounds must be 1 or more, found 0"),
        ({"warmup": -1}, "--warmup must be 0 or more"),
        ({"samples": -1}, "--samples must be 0 or more"),
        ({"clock": "sun"}, "no such clock"),
        ({"plot": Path("figure.pdf")}, "a plot is a PNG file"),
        ({"samples": 0, "cost_model": Path("c.json")}, "--cost-model needs --samples"),
        ({"cost_model": Path("/nowhere/at/all/c.json")}, "there is no folder /nowhere/at/all"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_read(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options(ThroughputCommand(**given))  # type: ignore[arg-type]


def test_options_have_their_defaults() -> None:
    assert parse_forms("packed, unpadded/max_tokens") == ("packed", "unpadded/max_tokens")
    assert parse_clock("cpu") == "cpu"
    none = parse_options(ThroughputCommand(depths=""))
    assert none.depths == ()
    assert none.layouts == ("padded", "unpadded", "packed")


def test_progress_names_what_a_step_was_of_and_begins_again_with_other_steps() -> None:
    stream = io.StringIO()
    progress = StepProgress(Progress(Console(file=stream), clock=lambda: 1.0))
    for what, done, total in (("packed", 1, 2), ("padded", 2, 2), ("cost model", 4, 8), ("cost model", 8, 8)):
        progress(what, done, total)
    assert [line.split("  ")[:2] for line in stream.getvalue().splitlines()] == [
        ["step 1/2", "packed"],
        ["step 2/2", "padded"],
        ["step 4/8", "cost model"],
        ["step 8/8", "cost model"],
    ]
