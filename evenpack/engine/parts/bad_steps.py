"""Steps whose loss or gradient is not finite, and spikes: their contents are written, and the run ends or continues.

`OUTPUT_DIR/bad_steps/step_N.json` has the packs and documents of the step, and for each rank the norm of its own
gradient (up to ZeRO 1) and the loss of each micro-batch: a batch that is bad shows in its documents, a device that is
bad in its rank.
"""

import logging
import math
import socket
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenpack.engine.build import Start
from evenpack.engine.parts.part import Part, Step, Update
from evenpack.engine.where import open_where
from evenpack.errors import EvenpackError, RunError
from evenpack.files import write_json

log = logging.getLogger(__name__)

_REMEMBERED_STEPS = 100
_FEWEST_STEPS = 20
"""Steps before which no median is trusted."""
_MOST_IN_A_ROW = 5
"""Steps in a row that are left out; after more it is not the data."""


@dataclass(frozen=True, kw_only=True)
class _RankPart:
    """One rank's part of a bad step."""

    rank: int
    host: str
    gradient_norm: float | None
    """L2 norm of the rank's own part of the gradient, before the mean over the ranks; None from ZeRO 2 on, where no
    rank has such a part."""
    micro_batches: list[dict[str, Any]]

    @property
    def is_finite(self) -> bool:
        losses = [loss for one in self.micro_batches for loss in one["loss_sums"].values()]
        return all(map(math.isfinite, losses)) and (self.gradient_norm is None or math.isfinite(self.gradient_norm))


class BadSteps(Part):
    """Judges each step of a run, on every rank by the same totals."""

    def __init__(self, run: Start) -> None:
        self._run = run
        self._keys = run.config.training
        self._norms: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._in_a_row = 0

    def after_step(self, step: Step) -> None:
        if step.update is not None:
            step.is_left_out = self.is_left_out(step.update)

    def is_left_out(self, update: Update) -> bool:
        """Returns whether the update of this step was left out because its gradient is not finite.

        Raises: RunError, on every rank alike, if such a step ends the run.
        """
        norm = update.totals.gradient_norm
        if update.totals.is_finite:
            self._report_spike(update)
            self._norms.append(norm)
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        is_left_out = self._keys.on_nan == "skip" and not math.isfinite(norm)
        goes_on = is_left_out and self._in_a_row <= _MOST_IN_A_ROW
        path, parts = self._write(update, reason="not finite", goes_on=goes_on)
        what = f"{_named(update)}; {_blame(parts)}. What was in the step: {path}"
        if not goes_on:
            raise RunError(f"{what}\n{self._why_it_ends(is_left_out)}")
        if self._run.world.is_main:
            log.warning("%s. Its update is left out (training.on_nan)", what)
        return True

    def _report_spike(self, update: Update) -> None:
        factor, totals = self._keys.report_spikes_above, update.totals
        if factor is None or len(self._norms) < _FEWEST_STEPS:
            return
        median = statistics.median(self._norms)
        if totals.gradient_norm <= factor * median:
            return
        path, _ = self._write(update, reason="spike", goes_on=True, median_norm=median)
        if self._run.world.is_main:
            ratio = totals.gradient_norm / median if median else math.inf
            log.warning(
                "%s: %.3g times the median of the last %d steps. What was in the step: %s",
                _named(update),
                ratio,
                len(self._norms),
                path,
            )

    def _why_it_ends(self, is_left_out: bool) -> str:
        if is_left_out:
            return (
                f"{self._in_a_row} steps in a row are not finite: the weights or a device are damaged rather than the "
                "data. Resume from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        others = ", or all such steps by training.on_nan=skip"
        if self._keys.on_nan == "skip":
            others = " (training.on_nan=skip leaves out only steps whose gradient is not finite)"
        return (
            "Nothing was saved since the newest checkpoint. Look at the documents of the step; leave it out by "
            f"training.skip_steps{others}; if they are sound, lower optimizer.learning_rate, lengthen "
            "schedule.warmup_steps or set training.gradient_clipping, and start again"
        )

    def _write(
        self, update: Update, *, reason: str, goes_on: bool, median_norm: float | None = None
    ) -> tuple[Path, list[_RankPart]]:
        """Writes the report on rank 0, and returns its path and the parts of all ranks."""
        parts = self._run.world.all_gather(_own_part(self._run, update))
        step = update.batches.step + 1
        path = self._run.config.run.output_dir / "bad_steps" / f"step_{step:06d}.json"
        report = {
            "step": step,
            "reason": reason,
            "loss": update.totals.loss,
            "gradient_norm": update.totals.gradient_norm,
            "median_gradient_norm": median_norm,
            "goes_on": goes_on,
            "ranks": [asdict(part) for part in parts],
        }
        self._run.world.on_main(lambda: _store(path, report | {"content": self._content(step)}))
        return path, parts

    def _content(self, step: int) -> Any:
        """Returns packs and documents of a step, or why they are not known."""
        try:
            return asdict(open_where(self._run.config).step(step))
        except EvenpackError as error:
            return str(error)


def _store(path: Path, report: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _as_json(report))
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


def _own_part(run: Start, update: Update) -> _RankPart:
    local = update.local
    sums = {name: each.tolist() for name, each in local.loss_sums.items()}
    return _RankPart(
        rank=run.world.rank,
        host=socket.gethostname(),
        gradient_norm=None if local.local_gradient_norm is None else float(local.local_gradient_norm),
        micro_batches=[
            {
                "loss_sums": {name: each[index] for name, each in sums.items()},
                "targets": batch.local_counts.targets,
                "sequence_ids": batch.sequence_ids[batch.sequence_ids >= 0].tolist(),
            }
            for index, batch in enumerate(update.batches.micro_batches)
        ],
    )


def _named(update: Update) -> str:
    totals = update.totals
    return f"step {update.batches.step + 1}: loss {totals.loss:.6g}, gradient norm {totals.gradient_norm:.6g}"


def _blame(parts: list[_RankPart]) -> str:
    """Returns in words which ranks computed what is not finite."""
    bad = [f"rank {part.rank} on {part.host}" for part in parts if not part.is_finite]
    if not bad and any(part.gradient_norm is None for part in parts):
        return "the losses are finite on every rank, and no rank has a gradient of its own (deepspeed.zero_stage)"
    if not bad:
        return "finite on every single rank, and not as their sum"
    if len(bad) == len(parts) > 1:
        return "not finite on any rank"
    return f"not finite on {', '.join(bad)}"


def _as_json(value: Any) -> Any:
    """Returns the value with numbers that JSON does not have as words: nan, inf, -inf."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
