"""A run file in Python: the same functions that the commands call, without the command line."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, SupportsIndex

from evenpack.config import find_run_file, load_run_file
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, RunError
from evenpack.extras import require
from evenpack.files import expand_user

if TYPE_CHECKING:
    import torch

    from evenpack.batch import PackedBatch
    from evenpack.data.batches.pipeline import StepBatches
    from evenpack.data.manifest import Manifest
    from evenpack.engine.resolving.resolve import ResolvedRun
    from evenpack.launcher.trained import Export, RunEvaluation
    from evenpack.launcher.training import TrainingResult
    from evenpack.models.build import Model
    from evenpack.studies.plan.plan import RunPlan


def open_run_file(run_file: str | Path, *overrides: str) -> "Run":
    """Reads and checks a run file; nothing else is read or started yet.

    Args:
        run_file: a path, or the name of a run file that comes with evenpack (`evenpack config list`).
        overrides: `section.key=value`, as on the command line.

    Raises: ConfigError with the place, what was expected and what came.
    """
    require("train", "evenpack.open")
    path = find_run_file(_path("run_file", run_file))
    return Run(config=load_run_file(path, RunConfig, overrides), run_file=path, overrides=overrides)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its file with the overrides, and what can be done with it; returned by `evenpack.open`.

    Errors are the same as on the command line, `EvenpackError` and its kinds. Messages go to the logger `evenpack`.
    """

    config: RunConfig
    """The checked values, defaults included."""
    run_file: Path
    overrides: tuple[str, ...]

    def __repr__(self) -> str:
        """Returns a line that names the file, its overrides and the model; `config` has all values."""
        words = [repr(str(self.run_file)), *map(repr, self.overrides)]
        model = self.config.model
        return f"Run({', '.join(words)}: {model.kind} {model.preset} into {self.config.run.output_dir})"

    def prepare(self) -> "Manifest":
        """Turns the run's text into tokens and packs, with progress on standard error, and returns the manifest.

        Packs of several forms, which stages need, are all made; the manifest is that of the first. Data that is
        prepared already is only verified; an interrupted preparation continues.

        Raises: DataError or ConfigError for sources that cannot be read.
        """
        from evenpack.launcher.preparing import prepare_run

        return next(iter(prepare_run(self.config).values()))

    @property
    def prepared(self) -> PreparedData:
        """The prepared data, opened again at each access, which checks sizes; its `verify()` compares the content.

        Raises: NotPreparedError before `prepare`; DataError if it was prepared from another data section.
        """
        return PreparedData.open(self.config.prepared_dir, self.config.data, verify="nothing")

    def plan(self, *, ranks: int = 1) -> "RunPlan":
        """Returns what training on so many ranks will do: data, step, memory, cost, DeepSpeed's settings.

        Raises: as `prepared`; ConfigError if the ranks cannot divide a step, or if the run cannot be trained.
        """
        from evenpack.launcher.planning import plan_training

        return plan_training(self.config, ranks=ranks)

    def steps(
        self,
        *,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        stop_step: int | None = None,
        loader_workers: int = 0,
    ) -> "Iterator[StepBatches]":
        """Yields one rank's share of each training step, in order, with its `step` (from 0) and `micro_batches`.

        They are the steps of `evenpack train`: step t holds the same sequences for any number of ranks, and starting at
        any step costs the same. Steps of `training.skip_steps` are left out. The first call of a process compares all
        prepared files with their checksums, unless `data.verify_in_training` is false.

        Args:
            start_step: the first step, from 0.
            stop_step: the step before which to stop, at most `training.steps`; None: where `evenpack train` stops.
            loader_workers: processes that read ahead. They import the main script again, so a script that asks for
                some must begin its work below `if __name__ == "__main__":`.

        Raises: as `prepared`; ConfigError if there is no such rank or step, or if the ranks cannot divide a step.
        """
        _require_rank(rank, ranks)
        resolved = self._resolved()
        training = resolved.config.training
        stop = training.stop_step if stop_step is None else _whole("stop_step", stop_step)
        if stop > training.planned_steps:
            raise ConfigError(f"stop_step ({stop}) must be at most training.steps ({training.planned_steps})")
        if not 0 <= _whole("start_step", start_step) <= stop:
            raise ConfigError(f"start_step ({start_step}) must lie between 0 and stop_step ({stop})")
        resolved.require_divisible(ranks)
        return _steps(resolved, range(start_step, stop), rank=rank, ranks=ranks, loader_workers=loader_workers)

    def batches(
        self,
        *,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        stop_step: int | None = None,
        loader_workers: int = 0,
    ) -> "Iterator[PackedBatch]":
        """Yields the micro-batches of `steps`, one after another; arguments and errors are the same.

        `batch.step_counts` has the counts of the whole step over all ranks, by which its losses are divided.
        """
        found = self.steps(
            rank=rank, ranks=ranks, start_step=start_step, stop_step=stop_step, loader_workers=loader_workers
        )
        return (batch for step in found for batch in step.micro_batches)

    def evaluation_batches(self, source: str, *, rank: int = 0, ranks: int = 1) -> "Iterator[PackedBatch]":
        """Yields one rank's share of a source's validation packs, each pack once over all ranks, in a fixed order.

        At most `training.evaluation_packs` packs. A rank may get fewer batches than another, and none if nothing is
        held out.

        Raises: as `steps`; ConfigError if the run has no such source.
        """
        from evenpack.config import nearest
        from evenpack.engine.evaluate import validation_batches

        if source not in self.config.data.sources:
            raise ConfigError(
                f"the run has no source '{source}'; {nearest(str(source), list(self.config.data.sources))}"
            )
        _require_rank(rank, ranks)
        return validation_batches(self._resolved(), source, rank=rank, ranks=ranks)

    def new_model(self, device: "torch.device | str" = "cpu") -> "Model":
        """Returns the run's model with the initial weights of its seed; `model(batch)` returns sums of losses.

        Raises: as `prepared`, which says how large the vocabulary is.
        """
        import torch

        from evenpack.engine.build import build_model

        return build_model(self._resolved(verify="later"), torch.device(device))

    def train(
        self,
        *,
        num_gpus: int | None = None,
        cpu_ranks: int | None = None,
        hostfile: str | Path | None = None,
    ) -> "TrainingResult":
        """Trains the prepared run by DeepSpeed, as `evenpack train` does, and waits for its end.

        It continues from the newest checkpoint. The ranks are separate processes, which print to standard error. A
        KeyboardInterrupt (SIGINT) asks them to save at the end of the step; the result's `state` is `stopped` then.
        Call it from the main thread, because no other receives signals.

        Args:
            num_gpus: GPUs of this machine, or of each machine of the hostfile; None: all.
            cpu_ranks: that many ranks on this machine's CPU instead.
            hostfile: machines, in lines `NAME slots=N`.

        Raises:
            ConfigError: as `prepared`, if the ranks cannot divide a step, or if the run cannot be trained.
            RunError: if it fails, with the error of the first failed rank.
        """
        from evenpack.launcher.processes.start import plan_launch
        from evenpack.launcher.training import check_training, run_training

        launch = plan_launch(
            self.run_file,
            self.overrides,
            config=self.config,
            num_gpus=num_gpus,
            cpu_ranks=cpu_ranks,
            hostfile=None if hostfile is None else _path("hostfile", hostfile),
        )
        result = run_training(launch, check_training(self.config, ranks=launch.devices.ranks))
        if result.state == "failed":
            raise RunError(result.error or result.message)
        return result

    def evaluate(self, *, checkpoint: int | None = None, data: str | Path | None = None) -> "RunEvaluation":
        """Evaluates a checkpoint on each source's held-out documents, in this process, on the GPU if there is one.

        Args:
            checkpoint: the step after which it was saved; None: the newest complete one.
            data: a file, folder or pattern of text, whose documents are evaluated instead of the held-out ones.

        Raises: as `prepared`; CheckpointError if there is no such checkpoint, with those that exist.
        """
        from evenpack.launcher.trained import evaluate_run

        return evaluate_run(self.config, step=checkpoint, data=None if data is None else _path("data", data))

    def export(self, directory: str | Path, *, checkpoint: int | None = None) -> "Export":
        """Writes a checkpoint into a new folder, for `from_pretrained` of Hugging Face transformers.

        Raises: as `evaluate`; ConfigError if transformers has no such model, or if the folder is not empty.
        """
        from evenpack.launcher.trained import export_run

        return export_run(self.config, _path("directory", directory), step=checkpoint)

    def _resolved(self, *, verify: Literal["all", "later"] = "all") -> "ResolvedRun":
        """Returns the resolved run; what depends on the manifest alone, which has a checksum, verifies no more."""
        from evenpack.engine.resolving.resolve import open_run

        return open_run(self.config, verify=verify)


def _path(name: str, value: object) -> Path:
    """Returns the path, with its `~` expanded. Raises: ConfigError for anything but a text or path."""
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name} must be a path, found {value!r:.80}")
    return expand_user(value)


def _whole(name: str, value: object) -> int:
    """Returns the value. Raises: ConfigError for anything but a whole number."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} must be a whole number, found {value!r:.80}")
    return operator.index(value)


def _require_rank(rank: int, ranks: int) -> None:
    """Raises: ConfigError unless there is such a rank."""
    if not 0 <= _whole("rank", rank) < _whole("ranks", ranks):
        raise ConfigError(f"rank {rank} is none of {ranks} ranks: give at least 1 rank, and one that counts from 0")


def _steps(
    resolved: "ResolvedRun", steps: range, *, rank: int, ranks: int, loader_workers: int
) -> "Iterator[StepBatches]":
    """Yields the steps of one rank, on the CPU; closing it ends the loader."""
    import torch

    from evenpack.data.batches.pipeline import StepBatches, training_batches
    from evenpack.engine.world.distributed import World

    world = World(rank=rank, size=ranks, local_rank=0, device=torch.device("cpu"))
    settings = replace(resolved.pipeline_settings(world), loader_workers=loader_workers)
    skipped = resolved.config.training.skipped
    for step in training_batches(
        resolved.prepared, settings, start_step=steps.start, stop_step=steps.stop, skipped=skipped
    ):
        if isinstance(step, StepBatches):
            yield step
