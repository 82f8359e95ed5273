"""The speed-up of single steps compared with its law: figure 6 of PackedBERT, for simulated clusters and for logs."""

import numpy as np
import pytest
from matplotlib.axes import Axes

from evenpack.data.packing import LengthHistogram, pack
from evenpack.studies.imbalance.cluster import UNPADDED_ARRIVAL, ClusterOptions
from evenpack.studies.imbalance.extrapolation import PUBLISHED_CLUSTER, single_device_gumbel
from evenpack.studies.imbalance.presentation import _draw_histogram
from evenpack.studies.imbalance.simulation import StepHistogram, simulate, step_histogram
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, find_cost
from evenpack.studies.lengths.reading import published_histogram
from evenpack.studies.statistics.laws import Gumbel


def test_every_step_is_in_a_bar_and_the_law_of_drawn_steps_is_found() -> None:
    speed_ups = np.random.default_rng(0).gumbel(1.6038, 0.1288, 20_000)
    found = step_histogram(speed_ups, speed_up=1.6, devices=8, beside=PUBLISHED_CLUSTER)
    assert (sum(found.counts), found.steps, len(found.edges)) == (20_000, 20_000, len(found.counts) + 1)
    assert (found.edges[0], found.edges[-1]) == (speed_ups.min(), speed_ups.max())
    assert found.fitted is not None
    assert found.fitted.location == pytest.approx(1.6038, abs=0.005)
    assert found.fitted.scale == pytest.approx(0.1288, abs=0.003)
    assert found.fitted_distance == pytest.approx(0, abs=0.01)
    assert found.beside_distance == pytest.approx(0, abs=0.01)


def test_a_law_beside_that_is_wrong_is_far_from_the_steps() -> None:
    speed_ups = np.random.default_rng(0).gumbel(1.9, 0.1288, 2_000)
    found = step_histogram(speed_ups, speed_up=1.6, devices=8, beside=PUBLISHED_CLUSTER)
    assert found.beside_distance is not None
    assert found.beside_distance > 0.4


def test_steps_that_are_all_alike_have_no_law() -> None:
    found = step_histogram(np.full(100, 1.5), speed_up=1.5, devices=2)
    assert (found.fitted, found.fitted_distance, found.beside, found.beside_distance) == (None, None, None, None)
    assert (sum(found.counts), found.deviation) == (100, 0)


def simulated(histogram: LengthHistogram, laws: dict[int, Gumbel]) -> tuple[StepHistogram, ...]:
    simulation = simulate(
        histogram,
        pack(histogram, pack_length=histogram.longest),
        devices=(2,),
        cost=find_cost(DEFAULT_COST),
        options=ClusterOptions(steps=30, batch=4),
        laws=laws,
        processes=1,
    )
    (row,) = simulation.of(UNPADDED_ARRIVAL)
    assert row.devices == 2  # a law asks for no row of its own
    return simulation.step_histograms


def test_the_speed_up_of_the_figure_is_that_of_the_table() -> None:
    histogram = published_histogram("wikipedia_512")
    simulation = simulate(
        histogram,
        pack(histogram, pack_length=512),
        devices=(1, 8),
        cost=find_cost(DEFAULT_COST),
        options=ClusterOptions(steps=30),
        laws={1: None, 8: None},
        processes=1,
    )
    figures = [one.speed_up for one in simulation.step_histograms]
    assert figures == [row.speed_up for row in simulation.of(UNPADDED_ARRIVAL)]
    assert all(one.mean != one.speed_up for one in simulation.step_histograms)


def test_simulated_steps_of_a_device_and_of_the_cluster_follow_their_laws() -> None:
    laws = {8: PUBLISHED_CLUSTER, 1: single_device_gumbel(PUBLISHED_CLUSTER, 8)}
    one, cluster = simulated(published_histogram("wikipedia_512"), laws)
    assert (one.devices, one.beside) == (1, laws[1])
    assert (cluster.devices, cluster.beside) == (8, PUBLISHED_CLUSTER)
    assert one.steps == cluster.steps == sum(one.counts) == sum(cluster.counts) == 30
    assert one.mean > cluster.mean + 0.08
    assert one.deviation > cluster.deviation


def test_lengths_that_are_all_alike_give_steps_of_one_speed() -> None:
    (one,) = simulated(LengthHistogram(counts=np.array([0] * 63 + [1000])), {1: PUBLISHED_CLUSTER})
    assert one.deviation == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("law", [PUBLISHED_CLUSTER, None])
def test_the_area_of_the_bars_is_that_of_the_curves(law: Gumbel | None) -> None:
    from matplotlib.figure import Figure

    axes: Axes = Figure().add_subplot()
    values = np.random.default_rng(0).gumbel(1.6038, 0.1288, 1_000)
    histogram = step_histogram(values, speed_up=1.6521, devices=8, beside=law)
    _draw_histogram(axes, histogram, of="Measured", is_measured=True, law="published")
    assert sum(bar.get_width() * bar.get_height() for bar in axes.patches) == pytest.approx(1)
    areas = [np.trapezoid(line.get_ydata(), line.get_xdata()) for line in axes.lines]
    assert areas == pytest.approx([1] * (1 if law is None else 2), abs=0.01)
    assert axes.get_title(loc="left").startswith("Measured, 8 devices\n1.652 times padding's speed; Gumbel")
    assert "location 1.604, scale 0.129" in axes.get_legend().get_texts()[-2 if law else 0].get_text() or law is None
