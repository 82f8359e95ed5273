"""Which steps count as spikes; `distributed/test_bad_steps.py` has what is written of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_steps import start_of
from run_files import run_config, run_values

from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.engine import LocalStep
from evenpack.engine.parts import bad_steps
from evenpack.engine.parts.bad_steps import BadSteps
from evenpack.engine.parts.part import Update
from evenpack.engine.reporting.step_totals import LossTotals, RankMaxima, RankSums, StepTotals
from evenpack.losses import StepCounts


def totals(norm: float) -> StepTotals:
    nothing = {"pairs_within": {}, "loss_sums": {}, "optimised_losses": {}, "correct": {}, "waits": None}
    numbers = dict.fromkeys(("stop", "slots", "host_to_device_bytes", "squared_lengths"), 1)
    seconds = {"compute_seconds": 1.0, "loader_seconds": 0.0}
    counts = StepCounts(packs=1, sequences=1, tokens=2, targets=1)
    several = {"source_tokens": (2,), "order_hash": ()}
    return StepTotals(
        losses={"next_token": LossTotals(loss_sum=2.0, denominator=1.0, optimised=2.0, correct=1)},
        sums=RankSums(counts=counts, gradient_norm=norm, **numbers, **seconds, **nothing, **several),
        maxima=RankMaxima(segment_room=64, compute_seconds=1.0, left_eager=None, waits=None),
        ranks=1,
    )


@pytest.mark.parametrize(("factor", "spikes"), [(3.0, [31.0, 1e4]), (100.0, [1e4]), (None, [])])
def test_a_spike_is_above_its_multiple_of_the_median(
    factor: float | None, spikes: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[float] = []

    def write(self: BadSteps, update: Update, **_: Any) -> tuple[Path, list[Any]]:
        reported.append(update.totals.gradient_norm)
        return tmp_path, []

    monkeypatch.setattr(bad_steps.BadSteps, "_write", write)
    config = run_config(run_values("gpt2", tmp_path, training={"report_spikes_above": factor}))
    steps = BadSteps(start_of(resolved=SimpleNamespace(config=config)))
    batches, local = StepBatches(step=0, micro_batches=()), object.__new__(LocalStep)
    few = [10.0, 500.0]
    for norm in (*few, *[10.0, 9.0, 11.0] * 10, 12.0, 29.0, 31.0, 1e4, 10.0):
        assert not steps.is_left_out(Update(batches=batches, local=local, totals=totals(norm), seconds=1.0))
    assert reported == spikes, "and none before there are enough steps for a median"
