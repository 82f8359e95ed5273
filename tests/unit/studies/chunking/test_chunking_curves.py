"""Epochs, segments, final values and smoothing of a run's perplexity, from its log."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunked_runs import curve

from evenpack.errors import DataError
from evenpack.studies.chunking.curves import CURVE, read_curve, read_held_out, smoothed


def write_metrics(folder: Path, losses: list[float | None], **last: Any) -> Path:
    """Writes a log with one record per step; `last` is added to the last one."""
    records = [{"step": step, "loss": loss, "tokens": 60, "slots": 64} for step, loss in enumerate(losses, start=1)]
    records[-1] |= last
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "metrics.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    return log


@pytest.mark.parametrize(
    ("steps", "epochs", "first"),
    [(10, 2.0, 6), (11, 2.0, 6), (9, 3.0, 7), (10, 3.0, 7), (7, 1.0, 1), (15, 1.5, 6)],
)
def test_a_step_in_which_an_epoch_ends_belongs_to_the_next_one(steps: int, epochs: float, first: int) -> None:
    found = curve(range(1, steps + 1)).last_epoch(epochs)
    np.testing.assert_allclose(found, np.arange(first, steps + 1))


def test_final_perplexity_is_the_mean_over_the_last_hundredth_of_the_last_epoch() -> None:
    found = curve([1000.0] * 200 + [500.0] * 198 + [100.0, 300.0])
    assert found.final(2.0) == pytest.approx(200.0)
    assert found.final(2.0) != pytest.approx(math.sqrt(100.0 * 300.0)), "not that of the mean loss"
    np.testing.assert_allclose(found.segments(2.0)[:99], 500.0)


def test_segments_are_equal_shares_of_the_epoch_whatever_its_steps() -> None:
    even = curve([9.0] * 200 + [float(step // 2) for step in range(2, 202)]).segments(2.0)
    np.testing.assert_allclose(even, np.arange(1, 101))
    few = curve([9.0] * 50 + [float(step) for step in range(1, 51)]).segments(2.0)
    np.testing.assert_allclose(few, np.repeat(np.arange(1.0, 51.0), 2), err_msg="a step lasts two segments")
    crossing = curve([9.0] * 150 + [float(step) for step in range(1, 151)]).segments(2.0)
    np.testing.assert_allclose(crossing[:2], [(1 + 2 / 2) / 1.5, (2 / 2 + 3) / 1.5])


def test_perplexity_at_a_step_is_a_mean_like_the_final_one() -> None:
    found = curve([8.0] * 398 + [4.0, 2.0])
    assert found.at_step(400, 2.0) == pytest.approx(found.final(2.0)) == pytest.approx(3.0)
    assert found.at_step(399, 2.0) == pytest.approx(6.0)
    assert found.at_step(1, 2.0) == pytest.approx(8.0)
    assert found.at_step(401, 2.0) is None
    assert curve([8.0, 4.0]).at_step(2, 2.0) == pytest.approx(4.0), "never less than a step"


def test_a_run_that_diverged_counts_as_infinite_from_there_on(tmp_path: Path) -> None:
    write_metrics(tmp_path, [1.0] * 150 + [None] + [1.0] * 49)
    segments = read_curve(tmp_path).segments(2.0)
    np.testing.assert_allclose(segments[:50], math.e)
    assert np.isinf(segments[50:]).all()


def test_both_readings_of_the_moving_average() -> None:
    values = np.array([8.0, 0.0, 0.0])
    factor = math.sqrt(0.81)
    np.testing.assert_allclose(
        smoothed(values, smoothing=0.81, weighs="old"), [8.0, 8.0 * factor, 8.0 * factor**2], err_msg="smooths"
    )
    np.testing.assert_allclose(
        smoothed(values, smoothing=0.81, weighs="new"), [8.0, 8.0 * (1 - factor), 8.0 * (1 - factor) ** 2]
    )
    np.testing.assert_allclose(smoothed(values, smoothing=0.9999, weighs="old")[1], 8.0 * 0.999)
    np.testing.assert_array_equal(smoothed(values, smoothing=0.0, weighs="old"), values)


def test_what_is_kept_of_a_log_is_as_good_as_the_log(tmp_path: Path) -> None:
    validation = {"a": {"loss": 2.0, "targets": 10}, "b": {"loss": 5.0, "targets": 20}, "nothing": None}
    log = write_metrics(tmp_path, [3.0, 2.123456789], validation=validation)
    found = read_curve(tmp_path)
    np.testing.assert_allclose(found.losses, [3.0, 2.123457], rtol=1e-9)
    assert (found.tokens_per_step, found.slots_per_step, found.own_loss) == (60.0, 64.0, 4.0)
    log.unlink()
    kept = read_curve(tmp_path)
    assert kept.losses.tolist() == found.losses.tolist()
    assert [vars(kept)[name] for name in vars(kept) if name != "losses"] == [60.0, 64.0, 4.0]
    (tmp_path / CURVE).write_text((tmp_path / CURVE).read_text().replace("2.123457", "2.123456"))
    with pytest.raises(DataError, match=f"{CURVE} is damaged or of another version"):
        read_curve(tmp_path)


def test_an_evaluation_whose_loss_was_not_finite_is_infinite_and_is_kept(tmp_path: Path) -> None:
    log = write_metrics(
        tmp_path, [3.0], validation={"a": {"loss": 2.0, "targets": 10}, "b": {"loss": None, "targets": 9}}
    )
    for _ in range(2):
        found = read_curve(tmp_path)
        assert found.own_loss == math.inf
        assert read_held_out(found, (), documents_alone=True).documents == math.inf
        log.unlink(missing_ok=True)


def test_a_log_without_each_step_is_refused_and_one_that_is_gone_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither .*curve.json nor .*metrics.jsonl exists"):
        read_curve(tmp_path)
    log = write_metrics(tmp_path, [3.0, 2.0, 1.0])
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DataError, match="does not have each step once"):
        read_curve(tmp_path)
    assert not (tmp_path / CURVE).exists()
