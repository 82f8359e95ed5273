"""Regimes of drawn logs, whose levels and laws are known."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command_line import evenpack

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.measurement import pooled, read_logged_run
from evenpack.studies.imbalance.regimes import (
    Estimate,
    ForecastRow,
    change_points,
    divide,
    fitting_steps,
    forecast_from_regimes,
)

DEVICES = 8
WITHIN, BETWEEN = 0.05, 0.06
QUICK = ("--steps", "30", "--batch", "4", "--devices", "8,16")

study = partial(evenpack, "study", "imbalance", "squad_1_1_384")


def drawn(levels: Sequence[float], *, length: int = 500, seed: int = 0, within: float = WITHIN) -> np.ndarray:
    """Returns the rates of a run with a regime at each level: normal steps."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.normal(level, within * level, length) for level in levels])


def system(runs: int, regimes: int, *, seed: int = 0, length: int = 250, of_runs: float = 0.0) -> list[np.ndarray]:
    """Returns runs whose levels are normal around 1,000 sequences/s; `of_runs` is a deviation that a run's have all."""
    random = np.random.default_rng([seed, 7])
    return [
        drawn(
            1000.0 * (1 + random.normal(0, BETWEEN, regimes) + random.normal(0, of_runs)),
            seed=100 * seed + run,
            length=length,
        )
        for run in range(runs)
    ]


def estimates(row: ForecastRow) -> dict[str, Estimate]:
    return {estimate.method: estimate for estimate in row.estimates}


def mlperf_log(path: Path, rates: np.ndarray, *, batch: int = 256, of_rank: int = 32) -> Path:
    """Writes a log of round v0.7."""
    head = [
        f"+ python run_pretraining.py --train_batch_size={of_rank} --log_freq=1 --unpad",
        f'0: :::MLLOG {{"key": "global_batch_size", "value": {batch}, "time_ms": 1, "metadata": {{}}}}',
    ]
    steps = [
        f"0: {{'training_steps': {step}, 'step_loss': 4.2, 'seq/s': {rate:.4f}, 'global_steps': {step}}}"
        for step, rate in enumerate(rates, start=1)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, *steps]) + "\n")
    return path


def test_changes_are_found_where_the_level_changes_and_nowhere_else() -> None:
    rates = drawn([1000, 1100, 1020, 930], length=2400)
    found = change_points(rates)
    assert len(found) == 3
    assert np.abs(np.array(found) - [2400, 4800, 7200]).max() < 40
    for seed in range(5):
        assert change_points(drawn([1000], length=12_000, seed=seed)) == ()
        assert change_points(np.random.default_rng(seed).gumbel(1.6, 0.13, 12_000)) == ()
    assert change_points(drawn([1000, 2000], length=100)) == (), "too short for two regimes"
    paused = drawn([1000], length=6000)
    paused[3000:3010] = 20.0
    assert change_points(paused) == ()


def test_levels_that_are_alike_are_divided_by_the_given_length_alone() -> None:
    rates = drawn([1000, 1000, 1100], length=1000)
    assert [regime.first_step for regime in divide([rates], 1000).regimes] == [10, 1000, 2000]
    assert [regime.first_step for regime in divide([rates[:1199]], 1000).regimes] == [10], "few steps are no regime"
    found = divide([rates])
    assert len(found.regimes) == 2
    assert found.regimes[1].first_step == pytest.approx(2000, abs=40)


def test_the_length_that_changes_fit_is_found_though_some_are_not_seen() -> None:
    assert fitting_steps([995, 1010, 2008, 3990, 4310]) == pytest.approx(1000, abs=15)
    assert fitting_steps([1000]) is None
    assert fitting_steps([700, 1530, 2910, 4170, 5030]) is None


def test_a_length_that_the_changes_do_not_fit_is_named_with_one_that_would_do() -> None:
    rates = drawn([1000, 1100, 1000, 1100, 980], length=1000)
    with pytest.raises(ConfigError, match=r"--regime-steps 800: . of 4 changes.*at steps .*about (99|100|1,00).*give"):
        divide([rates], 800)
    assert len(divide([rates], 1000).regimes) == 5


def test_what_is_no_step_is_left_out_and_counted() -> None:
    rates = drawn([1000, 1100], length=1000)
    rates[[300, 301]] = 250.0  # an evaluation takes four times a step
    rates[999] = 1500.0  # the shard's last batch is short
    first, second = divide([rates], 1000).regimes
    assert (first.hiccups, first.short_steps, second.hiccups, second.short_steps) == (2, 1, 0, 0)
    assert first.hiccup_seconds == pytest.approx(2 * (1 / 250 - 1 / 1000) / (1 / rates[10:1000]).sum(), rel=0.01)
    assert first.steps == 990 - 3
    assert first.mean == pytest.approx(1000, rel=0.01)
    assert first.deviation == pytest.approx(WITHIN * 1000, rel=0.07)


@pytest.mark.slow
def test_the_split_of_the_variance_is_that_of_the_drawn_system() -> None:
    found = forecast_from_regimes(divide(system(10, 20), 250), log_devices=DEVICES, counts=[8])
    assert (found.runs, len(found.regimes)) == (10, 200)
    truth = BETWEEN**2 / (BETWEEN**2 + WITHIN**2)
    assert found.share_between_in_run is not None
    for share in (found.share_between, found.share_between_in_run):
        assert share.interval.low < truth < share.interval.high
    assert found.within.value == pytest.approx(WITHIN, rel=0.02)
    assert found.between.interval.low < BETWEEN < found.between.interval.high
    assert found.law == "normal"
    assert found.run_deviation == pytest.approx(BETWEEN / 20**0.5, rel=0.5)
    # a run's 20 levels and 5,000 steps: variance of its mean against that of one value
    expected = (BETWEEN**2 + WITHIN**2) / (BETWEEN**2 / 20 + WITHIN**2 / 5000)
    assert found.effective_values.value == pytest.approx(expected, rel=0.1)


def test_differences_between_runs_are_in_the_pooled_share_alone() -> None:
    found = forecast_from_regimes(divide(system(20, 5, of_runs=0.1), 250), log_devices=DEVICES, counts=[8])
    alone = BETWEEN**2 / (BETWEEN**2 + WITHIN**2)
    assert found.share_between_in_run is not None
    assert found.share_between_in_run.value == pytest.approx(alone, abs=0.06)
    assert found.share_between.value > alone + 0.15


def test_one_regime_in_each_run_has_no_variance_within_a_run() -> None:
    found = forecast_from_regimes(divide(system(5, 1)), log_devices=DEVICES, counts=[8])
    assert found.share_between_in_run is None


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_resampled_regimes_can() -> None:
    """Steps resampled instead would give a hundredth of the width, and hold it almost never."""
    held = widths = 0.0
    for seed in range(12):
        found = forecast_from_regimes(divide(system(8, 6, seed=seed), 250), log_devices=DEVICES, counts=[8])
        held += found.between.interval.low < BETWEEN < found.between.interval.high
        widths += (found.between.interval.high - found.between.interval.low) / 12
    assert held >= 9
    assert widths > 0.2 * BETWEEN


@pytest.mark.slow
def test_the_forecast_is_that_of_drawn_clusters() -> None:
    """Four times the devices: the slowest of four independent regimes and steps."""
    division = divide(system(10, 20, seed=3), 250)
    random = np.random.default_rng(9)
    for of_levels, method in ((BETWEEN, "normal"), (BETWEEN, "empirical"), (0.0, "without_levels")):
        levels = 1000 * (1 + random.normal(0, of_levels, (200_000, 4)))
        slowest = (levels * (1 + random.normal(0, WITHIN, levels.shape))).min(axis=1)
        one = levels[:, 0] * (1 + random.normal(0, WITHIN, 200_000))
        (row,) = forecast_from_regimes(division, log_devices=DEVICES, counts=[32]).rows
        truth = (1 / one).mean() / (1 / slowest).mean()
        assert estimates(row)[method].expected == pytest.approx(truth, abs=0.006), method


def test_steps_of_a_gumbel_law_are_forecast_by_it() -> None:
    random = np.random.default_rng(4)
    runs = [
        np.concatenate([random.gumbel(level, 0.04 * level, 1000) for level in random.normal(1000, 60, 6)])
        for _ in range(6)
    ]
    found = forecast_from_regimes(divide(runs, 1000), log_devices=DEVICES, counts=[512])
    assert found.law == found.rows[0].best.method == "gumbel"
    assert all(regime.gumbel_distance < regime.normal_distance for regime in found.regimes)
    by_method = estimates(found.rows[0])
    assert by_method["gumbel"].expected == pytest.approx(by_method["empirical"].expected, abs=0.003)
    assert abs(by_method["normal"].expected - by_method["empirical"].expected) > 0.01


def test_forecasts_begin_at_the_logs_devices_and_are_marked_beyond_its_shards() -> None:
    division = divide(system(2, 4), 250)
    found = forecast_from_regimes(division, log_devices=DEVICES, counts=[4, 8, 64, 65])
    assert [(row.devices, row.extrapolated) for row in found.rows] == [(8, False), (64, False), (65, True)]
    assert found.rows[0].best.expected == 1.0
    assert any("below 8 devices nothing is forecast" in warning for warning in found.warnings)
    assert any("beyond 64 devices" in warning for warning in found.warnings)
    assert forecast_from_regimes(division, log_devices=DEVICES, counts=[8, 64]).warnings == ()


def test_a_padded_baseline_makes_speed_ups_of_relative_rates() -> None:
    division = divide(system(4, 6), 250)
    relative = forecast_from_regimes(division, log_devices=DEVICES, counts=[8, 32])
    speed_up = forecast_from_regimes(division, log_devices=DEVICES, counts=[8, 32], padded_baseline=500.0)
    own = np.concatenate([1 / rates for rates in division.rates]).mean() ** -1 / 500
    assert speed_up.rows[0].best.expected == pytest.approx(own, rel=0.002)
    for one, other in zip(relative.rows, speed_up.rows, strict=True):
        ratio = other.best.expected / speed_up.rows[0].best.expected
        assert one.best.expected == pytest.approx(ratio, rel=1e-9)


@pytest.mark.slow
def test_several_logs_are_one_system_with_intervals_over_runs(tmp_path: Path) -> None:
    paths = [mlperf_log(tmp_path / f"result_{number}.txt", rates) for number, rates in enumerate(system(3, 3))]
    code, _, err = study(*QUICK, "--log", tmp_path, "--regime-steps", "250", "--save", tmp_path / "saved" / "x.json")
    assert code == 0, err
    value = json.loads((tmp_path / "saved" / "x.json").read_text())
    assert value["measured"]["run"]["ranks"] == 8  # 256 sequences of 32 each
    assert value["measured"]["speed_up"] is None
    regimes = value["regimes"]
    assert (regimes["runs"], len(regimes["regimes"]), regimes["regime_steps"]) == (3, 9, 250)
    assert [row["devices"] for row in regimes["rows"]] == [8, 16]
    rates = [run.log.sequences_per_second for run in map(read_logged_run, paths)]
    reach, found = value["measured"]["run"]["interval"], value["measured"]["run"]["sequences_per_second"]
    assert min(rates) - 1e-9 <= reach["low"] < found < reach["high"] <= max(rates) + 1e-9


def test_one_regime_is_forecast_as_draws_of_one_law() -> None:
    """Four times the devices: the slowest of four independent steps. Intervals are of the steps."""
    division = divide([drawn([1000], length=3000)])
    assert len(division.regimes) == 1
    found = forecast_from_regimes(division, log_devices=DEVICES, counts=[4, 8, 32, 2048])
    assert found.between.value == pytest.approx(0.0, abs=1e-6)
    assert found.share_between_in_run is None
    assert found.within.interval.low < WITHIN < found.within.interval.high
    assert [(row.devices, row.extrapolated) for row in found.rows] == [(8, False), (32, False), (2048, True)]
    steps = np.random.default_rng(9).normal(1, WITHIN, (200_000, 4))
    truth = (1 / steps[:, 0]).mean() / (1 / steps.min(axis=1)).mean()
    by_method = estimates(found.rows[1])
    for method in ("normal", "without_levels", "empirical"):
        reach = by_method[method].interval
        assert reach.low < truth < reach.high, method
        assert 0.0005 < reach.high - reach.low < 0.01, method
    assert any("below 8 devices" in warning for warning in found.warnings)
    assert any("beyond 1,192 devices fewer than 20 logged steps" in warning for warning in found.warnings)


@pytest.mark.slow
def test_one_regime_of_correlated_steps_has_wider_intervals() -> None:
    noise, series = np.random.default_rng(4).normal(size=3000), np.zeros(3000)
    for step in range(1, 3000):
        series[step] = 0.8 * series[step - 1] + noise[step]
    rates = 1000 * (1 + WITHIN * series / series.std())
    widths = []
    for each in (rates, np.random.default_rng(0).permutation(rates)):
        found = forecast_from_regimes(divide([each]), log_devices=DEVICES, counts=[32])
        assert len(found.regimes) == 1
        widths.append(found.rows[0].best.interval.high - found.rows[0].best.interval.low)
    assert widths[0] > 1.5 * widths[1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"batch": 512}, "is of a run of 16 devices, and .* of one of 8"),
        ({"batch": 512, "of_rank": 64}, "is of a run of 512 sequences per step, and .* of one of 256"),
    ],
)
def test_runs_of_another_system_are_refused(other: dict[str, int], message: str, tmp_path: Path) -> None:
    rates = drawn([1000], length=300)
    (tmp_path / "silent.txt").write_text("".join(f"'seq/s': {rate}\n" for rate in rates))
    named = [mlperf_log(tmp_path / "a.txt", rates), mlperf_log(tmp_path / "b.txt", rates, **other)]
    silent, *runs = [read_logged_run(path) for path in (tmp_path / "silent.txt", *named)]
    assert pooled([silent, runs[0]]).ranks == 8
    for all_ in (runs, [silent, *runs]):
        with pytest.raises(ConfigError, match=message):
            pooled(all_)


def test_a_log_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    run = read_logged_run(mlperf_log(tmp_path / "a.txt", drawn([1000], length=300)))
    with pytest.raises(ConfigError, match="named twice"):
        pooled([run, run])


def test_one_regime_has_no_variance_between_and_says_so(tmp_path: Path) -> None:
    log = mlperf_log(tmp_path / "a.txt", drawn([1000], length=300))
    code, _, err = study(*QUICK, "--log", log, "--regime-steps", "250")
    assert code == 2
    assert "has 1 regimes of 200 steps or more, and a variance between regimes needs two" in " ".join(err.split())
