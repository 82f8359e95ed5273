"""Records a run on rank 0: metrics.jsonl, the progress line and summary.json."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from evenpack import console
from evenpack.data.batches.pipeline import SkippedStep
from evenpack.engine.build import Run
from evenpack.engine.evaluate import Evaluations, aggregate_loss, evaluations_to_json, overall_accuracy
from evenpack.engine.reporting.config import MetricsSection
from evenpack.engine.reporting.metrics import (
    METRICS,
    MetricsLog,
    read_metrics,
    write_summary,
)
from evenpack.engine.reporting.mlperf_log import MlperfLog
from evenpack.engine.reporting.save_cost import SaveCost, save_totals
from evenpack.engine.reporting.step_totals import StepTotals
from evenpack.engine.reporting.summary import run_summary, whole_steps
from evenpack.engine.reporting.trackers.tracker import RunLog
from evenpack.engine.reporting.trackers.trackers import Trackers
from evenpack.models.common.device_peaks import device_peak_flops
from evenpack.models.cost import Work, step_flops
from evenpack.progress import Piece, Progress

SUMMARY = "summary.json"


class StepProgress:
    """Shows the step, loss, learning rate, tokens/s and remaining time."""

    def __init__(self, progress: Progress, *, step: int, stop_step: int) -> None:
        """`step`: the number of updates done before."""
        self.paused = progress.paused
        """Context manager for evaluation and saving, whose time is not counted."""
        self._steps: Piece = progress.begin("step", done=step, unit="tokens", counted=True)
        self._stop_step = stop_step
        self._tokens = 0
        self._facts: tuple[str, ...] = ()

    def update(self, *, step: int, loss: float, learning_rate: float, tokens: int) -> None:
        """Shows that `step` is done; `tokens` counts the real tokens of this step over all ranks."""
        self._tokens += tokens
        self._facts = (f"loss {loss:.4f}", f"lr {learning_rate:.2e}")
        self.skip(step=step)

    def skip(self, *, step: int) -> None:
        """Shows that `step` was skipped; loss and learning rate stay as they were."""
        self._steps.update(step, self._stop_step, amount=self._tokens, facts=self._facts)


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """The outputs that rank 0 writes to."""

    metrics: MetricsLog
    trackers: Trackers
    progress: StepProgress


class Journal:
    """Records each step of a run on rank 0; on the other ranks it writes nothing."""

    def __init__(self, run: Run, outputs: "_Outputs | None", mlperf: MlperfLog) -> None:
        self.samples = run.first_samples
        """Number of sequences trained on, earlier starts included; the same on all ranks."""
        self._run = run
        self._mlperf = mlperf
        self._saves: deque[SaveCost] = deque()
        """Saves that are in no record yet."""
        self._evaluated_samples = 0
        self._evaluation_seconds: float | None = None
        self._outputs = outputs
        self._peak_flops = peak_flops(run)

    @classmethod
    @contextmanager
    def opened(cls, run: Run, mlperf: MlperfLog, trackers: MetricsSection) -> Iterator["Journal"]:
        """Truncates metrics.jsonl to the step at which the run resumes, and opens the trackers.

        Raises: ConfigError for a tracker that cannot be opened, unless the run may continue without it.
        """
        if not run.world.is_main:
            yield cls(run, None, mlperf)
            return
        last_step = run.config.training.last_step
        path = run.config.run.output_dir / METRICS
        with (
            MetricsLog.resume(path, step=run.first_step) as metrics,
            Trackers.opened(trackers, _run_log(run)) as opened,
            Progress(console.messages()) as progress,
        ):
            steps = StepProgress(progress, step=run.first_step, stop_step=last_step)
            yield cls(run, _Outputs(metrics=metrics, trackers=opened, progress=steps), mlperf)

    def count(self, totals: StepTotals) -> None:
        """Counts the samples of a step; called after its update and before the step is recorded."""
        self._mlperf.step_done()
        self.samples += totals.counts.sequences

    def evaluated(self, evaluate: Callable[[], Evaluations]) -> Evaluations:
        """Calls `evaluate`, returns its result and measures its time apart from that of the steps."""
        started = time.perf_counter()
        self._mlperf.evaluation_started(samples=self.samples)
        with self.paused():
            evaluations = evaluate()
        self._mlperf.evaluation_stopped(accuracy=overall_accuracy(evaluations))
        self._evaluated_samples = sum(found.sequences for found in evaluations.values())
        self._evaluation_seconds = time.perf_counter() - started
        return evaluations

    def add(
        self,
        step: int,
        totals: StepTotals,
        *,
        learning_rate: float,
        step_seconds: float,
        evaluations: Evaluations | None,
        ranks: dict[str, Any] | None,
    ) -> None:
        """Records a finished step; `step` is the number of updates done, `ranks` the result of `RankTimes.gather`."""
        if self._outputs is None:
            return
        record = step_record(
            self._run, step, totals, learning_rate=learning_rate, step_seconds=step_seconds, peak_flops=self._peak_flops
        )
        self._append(record, evaluations=evaluations, ranks=ranks)
        self._outputs.progress.update(
            step=step, loss=totals.loss, learning_rate=learning_rate, tokens=totals.counts.tokens
        )

    def skip(
        self,
        skipped: SkippedStep,
        *,
        learning_rate: float,
        is_not_finite: bool = False,
        evaluations: Evaluations | None,
        ranks: dict[str, Any] | None,
    ) -> None:
        """Records a skipped step, which changed no parameter; the other arguments are those of `add`.

        `is_not_finite`: it was computed, and left out because of its gradient; the run file does not name it.
        """
        if self._outputs is None:
            return
        record = skipped_record(skipped, self._run.prepared.source_names, learning_rate=learning_rate)
        if is_not_finite:
            record["skipped"]["not_finite"] = 1
        self._append(record, evaluations=evaluations, ranks=ranks)
        self._outputs.progress.skip(step=skipped.step + 1)

    def saved(self, cost: SaveCost) -> None:
        """Puts what a save has cost into the next record that has none."""
        self._saves.append(cost)

    def commit(self) -> None:
        """Flushes the metrics to disk; called before a checkpoint of this step is saved."""
        if self._outputs is not None:
            self._outputs.metrics.commit()
            self._outputs.trackers.flush()

    def _append(self, record: dict[str, Any], *, evaluations: Evaluations | None, ranks: dict[str, Any] | None) -> None:
        """Adds the values that every step has to its record, and writes it."""
        assert self._outputs is not None, "rank 0 writes"
        record["samples"] = self.samples
        record["source_epochs"] = self._run.resolved.epochs(record["step"])
        if evaluations is not None:
            record["validation"] = evaluations_to_json(self._run.prepared, evaluations)
            aggregate = aggregate_loss(evaluations, self._run.config.training.validation_weights)
            if aggregate is not None:
                record["validation_aggregate"] = aggregate
            record["evaluation_seconds"] = self._evaluation_seconds
        if ranks is not None:
            record["ranks"] = ranks
        if self._saves:
            record["checkpoint"] = self._saves.popleft().to_json()
        self._outputs.metrics.append(record)
        self._outputs.trackers.write(record)

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context manager for work other than training, whose time is left out of the rates shown."""
        return nullcontext() if self._outputs is None else self._outputs.progress.paused()

    def summarise(self, state: str, step: int, *, reached_accuracy: float | None) -> None:
        """Writes summary.json from the records in metrics.jsonl; writes nothing if there are none.

        `reached_accuracy`: the accuracy that reached the run's target; None if the target was not reached.
        """
        if self._outputs is None:
            return
        output_dir = self._run.config.run.output_dir
        records = whole_steps(read_metrics(output_dir / METRICS))
        if records:
            summary = run_summary(self._run, records, state=state, step=step, reached_accuracy=reached_accuracy)
            summary["checkpoints"] = save_totals(records, self._saves)
            write_summary(output_dir / SUMMARY, summary)

    def end_mlperf(self, *, is_reached: bool, stopped: float) -> None:
        """Ends the MLPerf log of a run that is complete; its clock stopped at `stopped`, a value of `time.time`."""
        self._mlperf.run_stopped(
            is_reached=is_reached, samples=self.samples, evaluated_samples=self._evaluated_samples, stopped=stopped
        )


def _run_log(run: Run) -> RunLog:
    return RunLog(
        name=run.config.run.name,
        output_dir=run.config.run.output_dir,
        config=run.resolved.settled_config.model_dump(mode="json"),
        first_step=run.first_step,
    )


def step_record(
    run: Run, step: int, totals: StepTotals, *, learning_rate: float, step_seconds: float, peak_flops: float | None
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
        "padding_share": 1.0 - counts.tokens / totals.slots,
        "order_hash": f"{totals.order_hash:016x}",
        "world_size": run.world.size,
        "step_seconds": step_seconds,
        "tokens_per_second": counts.tokens / step_seconds,
        "targets_per_second": counts.targets / step_seconds,
        "slots_per_second": totals.slots / step_seconds,
        "sequences_per_second": counts.sequences / step_seconds,
        "source_tokens": dict(zip(run.prepared.source_names, totals.source_tokens, strict=True)),
    }
    if totals.padding_targets:
        record |= {
            "padding_targets": totals.padding_targets,
            "loss_per_real_target": totals.loss_per_real_target,
        }
    if others:
        record |= {loss.metric: totals.losses[loss.name].mean for loss in losses}
        record |= {loss.optimised_metric: totals.losses[loss.name].optimised for loss in losses}
        record |= {loss.accuracy: totals.accuracy(loss) for loss in others if loss.accuracy is not None}
    if peak_flops is not None:
        work = Work(
            slots=counts.tokens,
            squared_lengths=totals.squared_lengths,
            head_slots=counts.targets - totals.padding_targets,
            sequences=counts.sequences,
        )
        flops = step_flops(run.config.model, vocabulary_size=run.prepared.vocabulary_size, work=work)
        record["mfu"] = flops / step_seconds / peak_flops
    return record


def skipped_record(skipped: SkippedStep, sources: Sequence[str], *, learning_rate: float) -> dict[str, Any]:
    """Returns the record of a skipped step: its amounts are 0, and `skipped` holds what the step would have held."""
    counts = skipped.counts
    nothing = dict.fromkeys(("tokens", "targets", "sequences", "slots", "host_to_device_bytes"), 0)
    return {
        "step": skipped.step + 1,
        "loss": None,
        "learning_rate": learning_rate,
        **nothing,
        "source_tokens": dict.fromkeys(sources, 0),
        "skipped": {"packs": counts.packs, "sequences": counts.sequences, "tokens": counts.tokens},
    }


def peak_flops(run: Run) -> float | None:
    """Returns the dense peak FLOP/s of all ranks' devices together at the run's precision; None if it is unknown."""
    if run.world.device.type != "cuda":
        return None
    dtype = torch.bfloat16 if run.config.training.precision == "bf16_autocast" else torch.float32
    one = device_peak_flops(torch.cuda.get_device_name(run.world.device), dtype)
    return None if one is None else one * run.world.size
