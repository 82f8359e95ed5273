"""Writes OUTPUT_DIR/mlperf.log: the events of a run in the form that MLPerf Training prescribes, by its own logger.

Samples are sequences, in packs too, and `epoch_num` counts them, as the benchmark's reference does for BERT. A timed
run that was interrupted starts again: the log is of a run from its first step to its end.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from evenpack.engine.build import Start
from evenpack.engine.evaluate import overall_accuracy
from evenpack.engine.optimizers.config import LambSection
from evenpack.engine.ownership import require_owned
from evenpack.engine.parts.part import Part, Step
from evenpack.errors import RunError

MLPERF_LOG = "mlperf.log"


def require_first_start(run: Start) -> None:
    """Checks on rank 0 that a run with the section `mlperf` begins. Raises: RunError if it has begun before."""
    output_dir = run.config.run.output_dir
    if run.config.mlperf is not None and (run.steps_done or (output_dir / MLPERF_LOG).exists()):
        raise RunError(
            f"{output_dir} holds a run that has begun, and a log for MLPerf is of a run from its first step to its "
            "end: choose another run.output_dir to start again, or set mlperf=null to go on without a log"
        )


class MlperfLog(Part):
    """Writes the log of a run with the section `mlperf`, on rank 0."""

    is_for_main_alone = True

    def __init__(self, run: Start, *, started: float) -> None:
        """Takes the time at which building the run began, by `time.time`."""
        self._run = run
        self._started = started
        self._logger: Any = None
        """MLPerf's own, once the log is open."""
        self._samples = 0
        self._evaluated_samples = 0
        self._block_start: float | None = None
        """Start time of a block whose first step is not done; it is written with that step."""
        self._stopped = 0.0
        """The time at which the last step, or its evaluation, was done."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Begins the log, up to the start of the clock.

        Raises: RunError if the log cannot be written.
        """
        path = self._run.config.run.output_dir / MLPERF_LOG
        require_owned(path.parent)
        with closing(_LogFile(path)) as file:
            self._logger = mlperf_logger(file)
            self._describe()
            self._logger.start(key="run_start")
            self._block_start = time.time()
            yield

    def after_step(self, step: Step) -> None:
        """Writes the start of a block of steps if this step is the first of its block that is trained on."""
        if self._block_start is not None and step.is_trained:
            self._logger.start(key="block_start", metadata=self._now(), time_ms=int(self._block_start * 1e3))
            self._block_start = None
        self._stopped = time.time()

    def evaluating(self, step: Step) -> None:
        """Writes the end of a block of steps and the start of an evaluation."""
        self._samples = step.samples
        self._stop_block()
        self._logger.start(key="eval_start", metadata=self._now())

    def evaluated(self, step: Step) -> None:
        """Writes the end of an evaluation, with the share of all held-out targets that it predicted correctly."""
        evaluations = step.evaluations or {}
        accuracy = overall_accuracy(evaluations)
        if accuracy is not None:
            self._logger.event(key="eval_accuracy", value=accuracy, metadata=self._now())
        self._logger.end(key="eval_stop", metadata=self._now())
        self._evaluated_samples = sum(found.sequences for found in evaluations.values())
        self._block_start = self._stopped = time.time()

    def saving(self, step: Step) -> None:
        """Ends the log of a run that is complete, before its last checkpoint is saved.

        A run in whose data damage was found never comes here, so its log has no end.
        """
        if not step.ends_schedule:
            return
        self._samples = step.samples
        self._stop_block()
        self._logger.event(key="train_samples", value=self._samples, metadata=self._now())
        self._logger.event(key="eval_samples", value=self._evaluated_samples, metadata=self._now())
        status = {"status": "aborted" if step.reached_accuracy is None else "success"}
        self._logger.end(key="run_stop", metadata=status | self._now(), time_ms=int(self._stopped * 1e3))

    def _stop_block(self) -> None:
        """Writes the end of a block of steps, unless none of them was trained on: it then has no start either."""
        if self._block_start is None:
            self._logger.end(key="block_stop", metadata=self._now())

    def _describe(self) -> None:
        config, resolved = self._run.config, self._run.resolved
        section, optimizer, schedule, training = config.mlperf, config.optimizer, config.schedule, config.training
        assert section is not None, "others have no log"
        assert isinstance(optimizer, LambSection), "RunConfig requires it"
        self._logger.start(key="init_start", time_ms=int(self._started * 1e3))
        values: dict[str, Any] = {
            "submission_benchmark": section.submission_benchmark,
            "submission_division": section.submission_division,
            "submission_org": section.submission_org,
            "submission_platform": section.submission_platform,
            "cache_clear": section.cache_cleared,
            "seed": config.run.seed,
            "global_batch_size": round(resolved.samples_per_step),
            "gradient_accumulation_steps": resolved.settled.micro_batches(self._run.world.size),
            "max_sequence_length": config.data.recipe.max_sequence_length,
            "opt_name": optimizer.kind,
            "opt_base_learning_rate": optimizer.learning_rate,
            "opt_epsilon": optimizer.epsilon,
            "opt_lamb_epsilon": optimizer.epsilon,
            "opt_lamb_beta_1": optimizer.beta1,
            "opt_lamb_beta_2": optimizer.beta2,
            "opt_lamb_weight_decay_rate": optimizer.weight_decay,
            "opt_learning_rate_training_steps": training.planned_steps,
            "opt_learning_rate_warmup_steps": schedule.warmup_steps,
            "num_warmup_steps": schedule.warmup_steps,
            "start_warmup_step": 0,
        }
        for key, value in values.items():
            self._logger.event(key=key, value=value)
        self._logger.end(key="init_stop")

    def _now(self) -> dict[str, int]:
        return {"epoch_num": self._samples, "samples_count": self._samples}


class _LogFile(logging.FileHandler):
    """A log file that raises an error if a line cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        """Raises: RunError, where logging itself would continue."""
        raise RunError(f"cannot write to {self.baseFilename}: is the disk full?") from sys.exc_info()[1]


def mlperf_logger(file: logging.Handler) -> Any:
    """Returns MLPerf's own logger, which writes to this file alone."""
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("mlperf", level=logging.INFO)  # outside the program's tree of loggers: it prints nothing
    logger.addHandler(file)
    return MLLogger(logger=logger, root_dir=str(Path(__file__).parents[3]))
