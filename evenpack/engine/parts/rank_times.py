"""Measures each rank's compute time and work, splits its waits by cause, and names ranks that have become slow.

The record of a step has means and maxima over ranks. Each rank keeps sums of its own, which are gathered once in many
steps, and whenever another number of ranks is slow.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.build import Start
from evenpack.engine.engine import LocalStep
from evenpack.engine.parts.part import Part, Step
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.engine.reporting.rank_waits import Kind, WaitModel, WaitValues
from evenpack.engine.reporting.run_record import Place
from evenpack.engine.world.distributed import World

log = logging.getLogger(__name__)

_DIGITS = 6
"""Decimal places of seconds; the clock is no more precise."""

_LATE: dict[Kind, str] = {
    "compute": "its passes take {:.1%} longer than those of others, for the same work",
    "loader": "it waits for its batches longer than others do, by {:.1%} of the passes' time",
}


class RankTimes(Part):
    """Accumulates this rank's compute time, work and waits since they were last gathered."""

    def __init__(
        self,
        world: World,
        *,
        every_steps: int | None,
        model: WaitModel | None = None,
        place: Place | None = None,
    ) -> None:
        """They are gathered every so many steps, and at the end; None: never. Without a `model` no wait is split."""
        self._world, self._every_steps, self._model, self._place = world, every_steps, model, place
        self._slow_ranks = 0
        self._begin()

    @classmethod
    def of(cls, run: Start, places: Sequence[Place]) -> "RankTimes":
        """Makes the part of a run whose ranks are at these places.

        At ZeRO 2 and 3 a backward pass waits for the other ranks within, so that nothing says which of them was slow.
        """
        model, training = None, run.config.training
        if run.world.size > 1 and not run.config.deepspeed.sharding.balances_each_micro_batch:
            model = WaitModel(rank_count=run.world.size, planned_steps=training.planned_steps)
        every_steps = training.log_rank_times_every_steps
        return cls(run.world, every_steps=every_steps, model=model, place=places[run.world.rank])

    def wait_values(self, batches: StepBatches, local: LocalStep, *, loader_seconds: float) -> WaitValues | None:
        if self._model is None:
            return None
        return self._model.own_values(
            cost=sum(batch.cost for batch in batches.micro_batches),
            work=local.stopwatch.busy_seconds(),
            compute=local.stopwatch.seconds(),
            loader=loader_seconds,
        )

    def after_step(self, step: Step) -> None:
        update, model = step.update, self._model
        if update is None:
            return
        self.add(update.batches.micro_batches, update.local.stopwatch.seconds())
        if model is None:
            return
        assert update.totals.waits is not None, "what this part gave"
        step.waits = model.explain(step.steps_done, *update.totals.waits)
        if step.waits is not None:
            self._split_steps += 1
            self._sums.update(cost=model.own.cost, work_seconds=model.own.work)
            self._sums.update({f"wait_{cause}_seconds": getattr(step.waits.own, cause) for cause in WAIT_CAUSES})
            self._sums.update(waited_for_seconds=step.waits.waited_for)
            for kind in step.waits.changed:
                log.warning("%s", self._described(model, kind, step.steps_done))

    def recording(self, step: Step) -> None:
        has_changed = step.waits is not None and step.waits.slow_ranks != self._slow_ranks
        if step.waits is not None:
            self._slow_ranks = step.waits.slow_ranks
        is_due = step.ends_loop or step.is_due(self._every_steps) or has_changed
        if self._every_steps is not None and is_due and self._seconds:
            step.rank_times = self.gather()

    def add(self, micro_batches: Sequence[PackedBatch], compute_seconds: float) -> None:
        """Adds a step of this rank."""
        self._seconds.append(compute_seconds)
        for batch in micro_batches:
            self._sums.update(
                sequences=batch.local_counts.sequences,
                tokens=batch.local_counts.tokens,
                slots=batch.slots,
                squared_lengths=batch.squared_lengths,
            )
            self._pairs_within.update(batch.pairs_within)

    def gather(self) -> dict[str, Any]:
        """Returns the values of all ranks since the last call, and resets them; all ranks call it after a step or more.

        Each value but `steps` and `split_steps` is a list in the order of ranks, or one for each window of the model.
        The values are sums over these steps; for `compute_seconds` there are also the longest step and the population
        standard deviation over steps.
        """
        model, within = self._model, self._pairs_within
        mine: dict[str, Any] = {
            "compute_seconds": sum(self._seconds),
            "compute_seconds_max": max(self._seconds),
            "compute_seconds_deviation": float(np.std(self._seconds)),
            **self._sums,
        }
        counts = {"steps": len(self._seconds)}
        if model is not None and self._split_steps:
            counts["split_steps"] = self._split_steps
            mine["slowness"] = model.slowness
            for kind, test in model.tests.items():
                mine[f"{kind}_slow_since"], mine[f"{kind}_slow_by"] = test.since, test.slow_by
                mine[f"{kind}_least_slowdown"] = None if test.rule is None else test.rule.slowdown
        mine = {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in mine.items()}
        self._begin()
        ranks, pairs = zip(*self._world.all_gather((mine, within)), strict=True)
        values: dict[str, Any] = {name: [rank[name] for rank in ranks] for name in mine}
        if within:
            values["pairs_within"] = {str(window): [rank[window] for rank in pairs] for window in within}
        return {**counts, **values}

    def _described(self, model: WaitModel, kind: Kind, step: int) -> str:
        """Says that this rank has become slow in a step, or well again."""
        where = "" if self._place is None else f" on {self._place.host}, {self._place.device} ({self._place.model}),"
        test = model.tests[kind]
        if test.since is None or test.slow_by is None:
            return f"rank {self._world.rank}{where} is no longer slow (step {step})"
        late = _LATE[kind].format(test.slow_by)
        since = f"rank {self._world.rank}{where} is slow since about step {test.since}"
        return f"{since}: {late}; `evenpack waits` shows what it costs (step {step})"

    def _begin(self) -> None:
        self._seconds: list[float] = []
        self._split_steps = 0
        self._sums: Any = Counter()  # typeshed knows counts of whole numbers alone
        """The work of this rank and, where they are split, its waits."""
        self._pairs_within: Counter[int] = Counter()
