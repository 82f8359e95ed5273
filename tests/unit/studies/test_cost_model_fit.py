"""The cost model fits times with known parameters, and is read from files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import evenpack
from evenpack.data.order.step_shape import CostWeights
from evenpack.engine.resolving.cost_model import CostModel, MeasuredOn
from evenpack.errors import ConfigError, DataError
from evenpack.studies import cost_model_fit
from evenpack.studies.cost_model_fit import MicroBatchTimes, fit_cost_model, shuffled_places
from evenpack.visible_pairs import visible_pairs

SHIPPED = Path(evenpack.__file__).parent / "studies" / "imbalance" / "cost_models"
MEASURED = sorted(path for path in SHIPPED.glob("*.json") if not path.stem.endswith("_estimate"))

TRUTH = np.array([2e-3, 3e-6, 5e-9])
"""Seconds a micro-batch, a slot, a squared length."""

ORIGIN = MeasuredOn(
    device="a device",
    family="gpt2",
    model="gpt2 tiny",
    causal=True,
    layers=2,
    hidden_size=64,
    vocabulary_size=100,
    rows_per_micro_batch=8,
    layouts=("unpadded",),
    precision="fp32",
    attention="auto",
    evenpack="0.1.0",
    torch="2.13.0",
    commit=None,
    date="2026-11-21T00:00:00+00:00",
)


def times(*, rows: int = 400, noise: float = 0.0, per_segment: float = 0.0, repeats: int = 1) -> MicroBatchTimes:
    """Returns times of 1 to 8 packs of 512 slots, each cut into 1 to 16 equal sequences."""
    random = np.random.default_rng(1)
    packs = random.integers(1, 9, size=rows).repeat(repeats)
    pieces = random.integers(1, 17, size=rows).repeat(repeats)
    slots, segments = 512 * packs, packs * pieces
    squares = packs * pieces * (512 // pieces) ** 2
    exact = TRUTH[0] + TRUTH[1] * slots + TRUTH[2] * squares + per_segment * segments
    seconds = exact * (1.0 + noise * random.standard_normal(len(exact)))
    return MicroBatchTimes(
        slots=slots, squared_lengths=squares, pairs_within={}, layer_shares={}, segments=segments, seconds=seconds
    )


def fit(given: MicroBatchTimes) -> CostModel:
    return fit_cost_model(given, per_step=0.5, measured_on=ORIGIN)


def test_a_noiseless_truth_is_found_exactly() -> None:
    model = fit(times())
    np.testing.assert_allclose([model.constant, model.per_slot, model.per_squared_length], TRUTH, rtol=1e-6)
    assert model.per_segment == 0.0
    assert model.held_out_95_percent_error < 1e-9
    assert model.repeat_noise is None or model.repeat_noise < 1e-12


@pytest.mark.parametrize("shares", [{64: 0.5, 200: 0.25}, {64: 1.0}])
def test_a_pair_costs_the_same_within_a_window_and_without_one(shares: dict[int, float]) -> None:
    given = times()
    lengths = given.slots // given.segments
    within = {window: given.segments * visible_pairs(lengths, window=window, causal=False) for window in shares}
    rest = 1.0 - sum(shares.values())
    attended = rest * given.squared_lengths + sum(share * within[window] for window, share in shares.items())
    seconds = TRUTH[0] + TRUTH[1] * given.slots + TRUTH[2] * attended
    windowed = replace(given, pairs_within=within, layer_shares=shares, seconds=seconds)
    model = fit(windowed)
    found = [model.constant, model.per_slot, model.per_squared_length, *model.per_pair_within.values()]
    shared = [TRUTH[2] * share for share in (rest, *shares.values())]
    np.testing.assert_allclose(found, [*TRUTH[:2], *shared], rtol=1e-6)
    assert list(model.per_pair_within) == list(shares)
    predicted = model.seconds(given.slots, given.squared_lengths, pairs_within=within)
    np.testing.assert_allclose(predicted, seconds, rtol=1e-9)
    with pytest.raises(ValueError, match="a cost per pair within a window of 64"):
        model.seconds(given.slots, given.squared_lengths)


def test_noise_is_measured_and_the_truth_is_near() -> None:
    model = fit(times(rows=2000, noise=0.05))
    np.testing.assert_allclose([model.constant, model.per_slot, model.per_squared_length], TRUTH, rtol=0.1)
    assert model.noise == pytest.approx(0.05, rel=0.15)
    assert model.held_out_median_error == pytest.approx(0.0337, rel=0.2)  # 0.6745 of the standard deviation
    assert model.held_out_95_percent_error == pytest.approx(0.098, rel=0.2)


def test_repeats_tell_noise_from_what_the_model_misses() -> None:
    given = times(noise=0.03, repeats=4)
    beyond_all_terms = 1.0 + 0.2 * np.sin(given.squared_lengths)
    model = fit(replace(given, seconds=given.seconds * beyond_all_terms))
    assert model.repeat_noise == pytest.approx(0.03, rel=0.15)
    assert model.noise > 0.1


def test_the_term_for_segments_stays_where_it_earns_its_place() -> None:
    assert fit(times(noise=0.02)).per_segment == 0.0
    model = fit(times(noise=0.02, per_segment=1e-3))
    assert model.per_segment == pytest.approx(1e-3, rel=0.1)
    slots, squares, sequences = np.array([512]), np.array([4096]), np.array([3])
    expected = TRUTH @ [1, 512, 4096] + 3e-3
    assert model.seconds(slots, squares, sequences)[0] == pytest.approx(expected, rel=0.1)
    with pytest.raises(ValueError, match="give their number"):
        model.seconds(slots, squares)


def test_a_cost_is_never_negative() -> None:
    given = times()
    falling = replace(given, seconds=1.0 - 1e-8 * given.squared_lengths)
    model = fit(falling)
    assert model.per_squared_length == 0.0
    assert model.constant > 0.5


def test_repeats_of_a_micro_batch_are_never_on_both_sides() -> None:
    group = np.random.default_rng(5).integers(0, 40, size=1000)
    places = shuffled_places(group, seed=1)
    by_group = [set(places[group == number].tolist()) for number in range(40)]
    assert {len(found) for found in by_group} == {1}
    assert set().union(*by_group) == set(range(40))
    assert [found.pop() for found in by_group] != list(range(40))
    assert (places != shuffled_places(group, seed=2)).any()


def test_held_out_error_is_not_that_of_the_rows_that_were_fitted() -> None:
    """Rows that are to be held out take twice as long: the fit cannot know."""
    given = times()
    terms = np.stack([given.slots, given.squared_lengths, given.segments], axis=1)
    _, group = np.unique(np.c_[np.ones(len(terms)), terms], axis=0, return_inverse=True)
    places = shuffled_places(group.ravel(), seed=0)
    is_held_out = places < round(0.25 * (places.max() + 1))
    assert 0.1 < is_held_out.mean() < 0.5
    slow = replace(given, seconds=given.seconds * np.where(is_held_out, 2.0, 1.0))
    model = fit(slow)
    assert model.held_out_median_error == pytest.approx(1.0)
    assert model.per_slot == pytest.approx(TRUTH[1])


def test_micro_batches_that_are_too_few_or_too_much_alike_are_refused() -> None:
    few = times(rows=5)
    with pytest.raises(DataError, match="12 different micro-batches or more, got 5"):
        fit(few)
    slots = np.arange(1, 101) * 64
    alike = MicroBatchTimes(
        slots=slots,
        squared_lengths=slots * 64,
        pairs_within={},
        layer_shares={},
        segments=slots // 64,
        seconds=slots * 1e-5,
    )
    with pytest.raises(DataError, match="too similar"):
        fit(alike)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_must_be_positive_numbers(wrong: float) -> None:
    one = np.array([1])
    with pytest.raises(DataError, match="positive numbers"):
        MicroBatchTimes(
            slots=one, squared_lengths=one, pairs_within={}, layer_shares={}, segments=one, seconds=np.array([wrong])
        )


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    model = fit(times(noise=0.01))
    path = tmp_path / "model.json"
    model.write(path)
    assert CostModel.read(path) == model
    assert model.cost_weights == CostWeights(
        per_token=model.per_slot, per_squared_length=model.per_squared_length, per_segment=model.per_segment
    )


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(ConfigError, match="No such file"):
        CostModel.read(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a readable JSON file"):
        CostModel.read(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="found list"):
        CostModel.read(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        fit(times()).write(tmp_path / "no" / "model.json")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_shipped_model_can_be_read_and_says_how_far_it_is_to_be_trusted(path: Path) -> None:
    model = CostModel.read(path)
    assert 0.0 < model.held_out_median_error < 0.2
    assert model.per_slot > 0.0
    assert model.measured_on.commit is not None


def test_a_fit_that_does_not_converge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(cost_model_fit, "nnls", stuck)
    with pytest.raises(DataError, match=r"does not converge \(Maximum number of iterations reached"):
        fit(times())
