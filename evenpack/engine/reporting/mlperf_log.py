"""OUTPUT_DIR/mlperf.log: the events of a run in the form that MLPerf Training prescribes, by its own logger.

Samples are sequences, in packs too, and an `epoch_num` counts them, as the benchmark's reference does for BERT. A run
that goes on from a checkpoint appends to its log, so that the time to train spans all of it, interruptions included.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from evenpack.engine.build import Run
from evenpack.engine.optimizers.config import LambSection
from evenpack.engine.reporting.config import MlperfSection
from evenpack.engine.reporting.metrics import free_name, samples_trained

log = logging.getLogger(__name__)

MLPERF_LOG = "mlperf.log"


class MlperfLog:
    """Rank 0's writer of the log; for a run without the section, and on other ranks, it writes nothing."""

    def __init__(self, run: Run, file: logging.Handler | None) -> None:
        self._run = run
        self._logger = None if file is None else _mlperf_logger(file)
        self._samples = self._evaluated = 0

    @classmethod
    @contextmanager
    def opened(cls, run: Run, *, started: float) -> Iterator["MlperfLog"]:
        """Begins the log, or goes on with it, up to the start of the clock; no training data is read before.

        Args:
            started: when the run began to be built, by `time.time`.
        """
        section, output_dir = run.config.mlperf, run.config.run.output_dir
        if section is None or not run.world.is_main:
            yield cls.silent(run)
            return
        path = output_dir / MLPERF_LOG
        if run.first_step == 0 and path.exists():
            kept = free_name(path)
            path.replace(kept)
            log.warning("the run begins at step 1, so %s of an earlier start is kept as %s", path, kept.name)
        with closing(logging.FileHandler(path)) as file:
            written = cls(run, file)
            if run.first_step == 0:
                written._describe(section, started)
                written._start("run_start")
            written._samples = samples_trained(output_dir / "metrics.jsonl", step=run.first_step)
            written._block("start")
            yield written

    @classmethod
    def silent(cls, run: Run) -> "MlperfLog":
        """Writes nothing."""
        return cls(run, None)

    def evaluation_started(self, *, samples: int) -> None:
        """`samples`: trained on until now."""
        self._samples = samples
        self._block("stop")
        self._start("eval_start", metadata=self._now())

    def evaluation_stopped(self, *, accuracy: float | None, samples: int) -> None:
        """`samples`: of the evaluation."""
        if accuracy is not None:
            self._event("eval_accuracy", accuracy, metadata=self._now())
        self._end("eval_stop", metadata=self._now())
        self._evaluated = samples
        self._block("start")

    def run_stopped(self, *, is_reached: bool, samples: int) -> None:
        """At the target or at the schedule's end; not where the run is to go on later."""
        self._samples = samples
        self._block("stop")
        self._event("train_samples", samples)
        self._event("eval_samples", self._evaluated)
        self._end("run_stop", metadata={"status": "success" if is_reached else "aborted"} | self._now())

    def _describe(self, section: MlperfSection, started: float) -> None:
        config, resolved = self._run.config, self._run.resolved
        optimizer, schedule, training = config.optimizer, config.schedule, config.training
        assert isinstance(optimizer, LambSection), "RunConfig asks for it"
        self._start("init_start", time_ms=int(started * 1e3))
        values: dict[str, Any] = {
            "submission_benchmark": section.submission_benchmark,
            "submission_division": section.submission_division,
            "submission_org": section.submission_org,
            "submission_platform": section.submission_platform,
            "cache_clear": section.cache_cleared,
            "seed": config.run.seed,
            "global_batch_size": round(resolved.samples_per_step),
            "gradient_accumulation_steps": self._run.engine.micro_batches,
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
            self._event(key, value)
        self._end("init_stop")

    def _block(self, side: str) -> None:
        write = self._start if side == "start" else self._end
        write(f"block_{side}", metadata={"first_epoch_num": self._samples, "epoch_count": 1} | self._now())

    def _now(self) -> dict[str, int]:
        return {"epoch_num": self._samples, "samples_count": self._samples}

    def _start(self, key: str, **details: Any) -> None:
        if self._logger is not None:
            self._logger.start(key=key, **details)

    def _end(self, key: str, **details: Any) -> None:
        if self._logger is not None:
            self._logger.end(key=key, **details)

    def _event(self, key: str, value: Any, **details: Any) -> None:
        if self._logger is not None:
            self._logger.event(key=key, value=value, **details)


def _mlperf_logger(file: logging.Handler) -> Any:
    """MLPerf's own logger, which writes lines into this file and nothing else."""
    from mlperf_logging.mllog.mllog import MLLogger

    logger = logging.Logger("mlperf", level=logging.INFO)  # not one of the program's: it prints nothing
    logger.addHandler(file)
    return MLLogger(logger=logger, root_dir=str(Path(__file__).parents[3]))
