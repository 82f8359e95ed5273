"""Records a run on rank 0: a line of metrics.jsonl for each step, and summary.json."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch

from evenpack.console import save_json
from evenpack.data.batches.pipeline import SkippedStep, StepBatches
from evenpack.engine.build import Start
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import evaluations_to_json
from evenpack.engine.ownership import require_owned
from evenpack.engine.parts.part import Part, Step
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.engine.reporting.metrics import METRICS, MetricsLog, named_if_damaged, read_metrics, save_totals
from evenpack.engine.reporting.step_totals import StepTotals
from evenpack.engine.reporting.summary import run_summary
from evenpack.engine.world.distributed import World
from evenpack.files import explained
from evenpack.models.common.device_peaks import device_peak_flops
from evenpack.models.cost import Work, step_flops

SUMMARY = "summary.json"

_SUMMARISE = (
    "start the same command again: the last checkpoint of this run is complete, and only its summary is missing"
)


class SaveCost(TypedDict):
    """The cost of one save, in seconds of rank 0: the values of `checkpoint` in a step's record."""

    step: int
    """The step after which it was saved."""
    pause_seconds: float
    """Time for which training stood still."""
    seconds: NotRequired[float]
    """Time until it was complete on disk, and obsolete ones were removed."""
    bytes: NotRequired[int]
    """Size of all its files."""
    failed: NotRequired[int]
    """1 in place of these two if it could not be written."""


class MetricsWriter(Part):
    """Records each step of a run, on rank 0."""

    is_for_main_alone = True

    _metrics: MetricsLog
    """The log, while the part is open."""

    def __init__(self, run: Start) -> None:
        self._run = run
        self._saves: deque[SaveCost] = deque()
        """Saves that are in no record yet."""
        self._evaluation_started = 0.0
        self._evaluation_seconds: float | None = None
        self._peak_flops = peak_flops(run.config, run.world)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Truncates metrics.jsonl to the step at which the run resumes."""
        path = self._run.config.run.output_dir / METRICS
        resumed = MetricsLog.resume(path, step=self._run.steps_done, begun_at=self._run.steps_of_parent)
        with resumed as self._metrics:
            yield

    def evaluating(self, step: Step) -> None:
        self._evaluation_started = time.perf_counter()

    def evaluated(self, step: Step) -> None:
        """Measures the time of an evaluation separately from the time of the steps."""
        self._evaluation_seconds = time.perf_counter() - self._evaluation_started

    def recording(self, step: Step) -> None:
        """Writes the record of a step, which changed no parameter if it was skipped or left out."""
        step.record = self._record(step)
        self._metrics.append(step.record)

    def commit(self) -> None:
        """Flushes the metrics to disk; called before a checkpoint of this step is saved."""
        self._metrics.commit()

    def note_save(self, cost: SaveCost) -> None:
        """Puts what a save has cost into the next record that has none."""
        self._saves.append(cost)

    def ending(self, step: Step) -> None:
        state = "finished" if step.is_last else "stopped"
        self.summarise(state, step.steps_done, reached_accuracy=step.reached_accuracy)

    def summarise(self, state: str, step: int, *, reached_accuracy: float | None) -> None:
        """Writes summary.json from the records in metrics.jsonl; writes nothing if there are none.

        `reached_accuracy`: the accuracy that reached the run's target; None if the target was not reached.

        Raises: RunError if it cannot be written, or if another start has taken the directory; DataError for a damaged
        record.
        """
        output_dir = self._run.config.run.output_dir
        with explained(output_dir / METRICS, then=_SUMMARISE):
            records = read_metrics(output_dir / METRICS)
        if records:
            with named_if_damaged(output_dir / METRICS):
                summary = run_summary(self._run, records, state=state, step=step, reached_accuracy=reached_accuracy)
                summary["checkpoints"] = save_totals(records, self._saves)
            with explained(output_dir / SUMMARY, action="written", then=_SUMMARISE):
                save_json(summary, output_dir / SUMMARY, check=partial(require_owned, output_dir))

    def _record(self, step: Step) -> dict[str, Any]:
        if step.update is None or not step.is_trained:
            record = skipped_record(step.batches, self._run.prepared.source_names, learning_rate=step.learning_rate)
            if step.is_left_out:
                record["skipped"]["not_finite"] = 1
        else:
            record = step_record(
                self._run,
                step.steps_done,
                step.update.totals,
                learning_rate=step.learning_rate,
                step_seconds=step.update.seconds,
                peak_flops=self._peak_flops,
            )
        if step.waits is not None:
            record |= {f"wait_{cause}_seconds": getattr(step.waits.mean, cause) for cause in WAIT_CAUSES}
            record["slow_ranks"] = step.waits.slow_ranks
        record["samples"] = step.samples
        record["source_epochs"] = self._run.resolved.epochs(step.steps_done)
        if left_out := self._run.resolved.left_out(step.batches.step):
            record["left_out"] = left_out
        if step.evaluations is not None:
            record["validation"] = evaluations_to_json(self._run.prepared, step.evaluations)
            record["evaluation_seconds"] = self._evaluation_seconds
        if step.rank_times is not None:
            record["ranks"] = step.rank_times
        if self._saves:
            record["checkpoint"] = self._saves.popleft()
        return record


def step_record(
    run: Start, step: int, totals: StepTotals, *, learning_rate: float, step_seconds: float, peak_flops: float | None
) -> dict[str, Any]:
    """Returns the record of a step in metrics.jsonl. Amounts are sums over all ranks, times are in seconds."""
    counts, losses = totals.counts, run.config.model.losses
    main, *others = losses
    record = {
        "step": step,
        "loss": totals.loss,
        "accuracy": totals.accuracy(main),
        "learning_rate": learning_rate,
        **totals.metrics,
        "padding_share": 1.0 - counts.tokens / totals.sums.slots,
        "order_hash": f"{totals.order_hash:016x}",
        "world_size": run.world.size,
        "step_seconds": step_seconds,
        "tokens_per_second": counts.tokens / step_seconds,
        "targets_per_second": counts.targets / step_seconds,
        "slots_per_second": totals.sums.slots / step_seconds,
        "sequences_per_second": counts.sequences / step_seconds,
        "source_tokens": dict(zip(run.prepared.source_names, totals.sums.source_tokens, strict=True)),
    }
    if counts.padding_targets:
        record |= {
            "padding_targets": counts.padding_targets,
            "loss_per_real_target": totals.loss_per_real_target,
        }
    if others:
        record |= {loss.metric: totals.losses[loss.name].mean for loss in losses}
        record |= {loss.optimised_metric: totals.losses[loss.name].optimised for loss in losses}
        record |= {loss.accuracy: totals.accuracy(loss) for loss in others if loss.accuracy is not None}
    if peak_flops is not None:
        work = Work(
            slots=counts.tokens,
            squared_lengths=totals.sums.squared_lengths,
            head_slots=counts.real_targets,
            sequences=counts.sequences,
            pairs_within=totals.sums.pairs_within,
        )
        flops = step_flops(run.config.model, vocabulary_size=run.prepared.vocabulary_size, work=work)
        record["mfu"] = flops / step_seconds / peak_flops
    return record


def skipped_record(step: StepBatches | SkippedStep, sources: Sequence[str], *, learning_rate: float) -> dict[str, Any]:
    """Returns the record of a skipped step: its amounts are 0, and `skipped` holds what the step would have held."""
    counts = step.counts
    nothing = dict.fromkeys(("tokens", "targets", "sequences", "slots", "host_to_device_bytes"), 0)
    return {
        "step": step.step + 1,
        "loss": None,
        "learning_rate": learning_rate,
        **nothing,
        "source_tokens": dict.fromkeys(sources, 0),
        "skipped": {"packs": counts.packs, "sequences": counts.sequences, "tokens": counts.tokens},
    }


def peak_flops(config: RunConfig, world: World) -> float | None:
    """Returns the dense peak FLOP/s of all ranks' devices together at the run's precision; None if it is unknown."""
    if world.device.type != "cuda":
        return None
    dtype = torch.bfloat16 if config.training.precision == "bf16_autocast" else torch.float32
    one = device_peak_flops(torch.cuda.get_device_name(world.device), dtype)
    return None if one is None else one * world.size
