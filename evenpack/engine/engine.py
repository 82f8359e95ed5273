"""One optimizer update over this rank's micro-batches, by DeepSpeed."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from evenpack.batch import PackedBatch
from evenpack.data.keys import derive_key
from evenpack.engine.compilation import compile_if_asked
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.optimizers.build import build_optimizer
from evenpack.engine.optimizers.schedules import learning_rate
from evenpack.engine.resolving.objective import DenominatorsOf
from evenpack.engine.world.distributed import World, quiet_deepspeed
from evenpack.models.common.loss_sums import Denominators, LossOutputs, scaled_loss

Phase = Literal["begin", "forward", "backward", "all_reduce", "update"]
"""Phases of a step, in this order; forward and backward alternate, once for each micro-batch."""

_DROPOUT = 3
"""Purpose of a seed: separates dropout from other numbers derived from the run's seed."""


LossSums = dict[str, Float[Tensor, " micro_batches"]]


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """The results of one step on this rank. Tensors are on its device: reading one waits for it."""

    loss_sums: LossSums
    """Loss sums of each micro-batch in nats, by the loss's name; FP32."""
    optimised_losses: dict[str, Float64[Tensor, ""]]
    """This rank's part of the losses whose gradient was taken, by name."""
    correct: dict[str, Int[Tensor, ""]]
    """Targets of all micro-batches that were predicted correctly, by the name of each loss that has targets."""
    gradient_norm: Float[Tensor, ""]
    """L2 norm of the global mean gradient before clipping, the same on all ranks."""
    local_gradient_norm: Float[Tensor, ""] | None
    """L2 norm of this rank's own part of the gradient, before the mean over the ranks; None from ZeRO 2 on, where each
    backward pass replaces that part by one of the mean."""
    left_eager: int | None
    """Functions that torch.compile has given up so far; None if nothing is compiled."""
    stopwatch: "Stopwatch"
    """Time from the first forward to the end of the last backward pass, without the all-reduce after it; from ZeRO 2 on
    the reduction is within it."""


class TrainingEngine:
    """A model, its optimizer and DeepSpeed, with the exact global mean gradient at any split of the step."""

    def __init__(self, model: nn.Module, config: RunConfig, world: World, *, denominators: DenominatorsOf) -> None:
        """Moves `model` to the rank's device; every rank then has rank 0's weights.

        Raises: ConfigError if this number of ranks cannot divide a step.
        """
        settings = deepspeed_config(config, world.size)
        model.to(world.device)
        self.compilation = compile_if_asked(model, config)
        self.config = config
        self._stages = config.staged()
        self.world = world
        self.denominators = denominators
        self.sharding = config.deepspeed.sharding
        self.observer: Callable[[Phase], None] = lambda _: None
        """Called at the end of each phase, when the host has issued its work; a device may still be computing."""
        self.micro_batches: int = settings["gradient_accumulation_steps"]
        """Micro-batches of each rank in the step that was computed last, or in the first one."""
        optimizer = build_optimizer(model, config.optimizer, world.device)
        initialize = quiet_deepspeed().initialize
        self.deepspeed: Any = initialize(model=model, optimizer=optimizer, config=settings)[0]
        # A gradient of a rank's own is reduced by `reduction`, so that computing and waiting for others can be
        # distinguished.
        self.deepspeed.enable_backward_allreduce = self.sharding.balances_each_micro_batch
        self.reduction = self.sharding.reduction(self.deepspeed, self.model, world)

    @property
    def model(self) -> nn.Module:
        """The model itself, for evaluation and export."""
        return self.deepspeed.module

    def release(self) -> None:
        """Lets go of weights, gradients and optimizer, which the hooks of ZeRO hold beyond the life of this object."""
        self.deepspeed.destroy()

    def train_step(self, step: int, micro_batches: Sequence[PackedBatch]) -> LocalStep:
        """Runs update number `step` + 1 (steps count from 0), over this rank's micro-batches of the step.

        Nothing here waits for the device, except to check the gradient norm as the sharding does (`Sharding.update`).
        An update whose norm is not finite is left out with `on_nan: skip`; else it may be made and is invalid, so the
        caller must check the norm.
        """
        loss_sums, correct, stopwatch = self.compute_gradients(step, micro_batches)
        own_norm = self.reduction.finish()
        self.observer("all_reduce")
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        training = self.config.training
        norm = self.sharding.update(
            self.deepspeed,
            training.gradient_clipping,
            norm=own_norm if self.world.size == 1 else None,
            leaves_out=training.on_nan == "skip",
        )
        self.compilation.note_update()
        self.observer("update")
        return LocalStep(
            loss_sums=loss_sums,
            optimised_losses=self.optimised_losses(loss_sums, micro_batches),
            correct=correct,
            gradient_norm=torch.as_tensor(norm, device=self.world.device).float(),
            local_gradient_norm=own_norm,
            left_eager=self.compilation.left_eager,
            stopwatch=stopwatch,
        )

    def learning_rate(self, step: int) -> float:
        """Returns the rate of a step's update, whether it is made or skipped."""
        return learning_rate(
            step,
            peak=self._config_at(step).optimizer.learning_rate,
            steps=self.config.training.planned_steps,
            schedule=self.config.schedule,
        )

    def _config_at(self, step: int) -> RunConfig:
        """Returns the run file as it applies to a step."""
        return next(config for first, config in reversed(self._stages) if first <= step)

    def _enter_stage_of(self, step: int) -> None:
        """Tells DeepSpeed the size of a step that is of another stage than the one before."""
        training = self._config_at(step).training
        found = training.micro_batches(self.world.size)
        if (found, training.items_per_micro_batch) == (
            self.micro_batches,
            self.deepspeed.train_micro_batch_size_per_gpu(),
        ):
            return
        self.micro_batches = found
        self.deepspeed.set_train_micro_batch_size(training.items_per_micro_batch)
        self.deepspeed.set_train_batch_size(training.items_per_step)
        if hasattr(self.deepspeed.optimizer, "gradient_accumulation_steps"):  # which ZeRO keeps a copy of
            self.deepspeed.optimizer.gradient_accumulation_steps = found

    def compute_gradients(
        self, step: int, micro_batches: Sequence[PackedBatch]
    ) -> tuple[LossSums, dict[str, Int[Tensor, ""]], "Stopwatch"]:
        """Accumulates this rank's part of the gradient, up to ZeRO 1 without waiting for other ranks.

        Raises: ValueError if the number of micro-batches is not the step's; RunError if the model's code cannot
            be compiled.
        """
        if len(self._stages) > 1:
            self._enter_stage_of(step)
        if len(micro_batches) != self.micro_batches:
            raise ValueError(f"a step has {self.micro_batches} micro-batches on each rank, got {len(micro_batches)}")
        self.model.train()
        stopwatch = Stopwatch(self.world.device)
        self.observer("begin")
        loss_sums, correct = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)
        for index, on_host in enumerate(micro_batches):
            batch = on_host.to(self.world.device, non_blocking=True)  # the loader has page-locked it
            slot = self.world.rank * self.micro_batches + index
            torch.manual_seed(dropout_seed(self.config.run.seed, step, slot))
            self.deepspeed.set_gradient_accumulation_boundary(index == self.micro_batches - 1)
            with self.compilation.explained():
                outputs: LossOutputs = self.deepspeed(batch)
            loss = scaled_loss(
                outputs, self.denominators_of(batch), world_size=self.world.size, accumulation=self.micro_batches
            )
            self.observer("forward")
            if index == self.micro_batches - 1:
                self.reduction.begin()
            with self.compilation.explained():
                self.deepspeed.backward(loss)
            self.observer("backward")
            for name, output in outputs.items():
                loss_sums[name].append(output.loss_sum.detach())
                if output.correct is not None:
                    correct[name].append(output.correct)
        stopwatch.stop()
        return (
            {name: torch.stack(sums) for name, sums in loss_sums.items()},
            {name: torch.stack(counts).sum() for name, counts in correct.items()},
            stopwatch,
        )

    def denominators_of(self, batch: PackedBatch) -> Denominators:
        """Returns the denominators of the batch's loss sums.

        With them the losses of all micro-batches of all ranks add up to the loss whose gradient is taken.
        """
        if self.config.model.denominators == "micro_batch":  # a mean of means: as if all had the counts of this one
            parts = self.world.size * self.micro_batches
            return {name: parts * each for name, each in self.denominators(batch.local_counts).items()}
        return self.denominators(batch.step_counts)

    def optimised_losses(
        self, loss_sums: LossSums, micro_batches: Sequence[PackedBatch]
    ) -> dict[str, Float64[Tensor, ""]]:
        """Returns this rank's part of the losses whose gradient is taken, in nats."""
        divisors = [self.denominators_of(batch) for batch in micro_batches]
        table = torch.tensor([[each[name] for name in loss_sums] for each in divisors], dtype=torch.float64)
        sums = torch.stack(list(loss_sums.values()), dim=1)  # [micro-batches, losses]
        losses = (sums.double() / table.to(sums.device, non_blocking=True)).sum(dim=0)
        return dict(zip(loss_sums, losses.unbind(), strict=True))


class Stopwatch:
    """Seconds of work on a device, started when made; on CUDA by events, which do not block the host."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        self._started = self._stopped = time.perf_counter()
        self._cpu_started = self._cpu_stopped = time.process_time()
        if device.type == "cuda":
            new_event: Any = torch.cuda.Event  # has no annotations
            self._events = (new_event(enable_timing=True), new_event(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        """Marks the end."""
        self._stopped, self._cpu_stopped = time.perf_counter(), time.process_time()
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the seconds between start and stop; on CUDA waits for the work before `stop`, not for later work."""
        if self._events is None:
            return self._stopped - self._started
        started, stopped = self._events
        stopped.synchronize()
        return float(started.elapsed_time(stopped)) / 1000.0

    def busy_seconds(self) -> float:
        """Returns the seconds for which the device was at work; on a CPU, the CPU seconds of this process.

        A CPU may serve other processes in between, which is not the rank's work; a GPU serves the rank alone. On a CPU
        the threads that save and verify beside the step count too: PyTorch's threads do a part of the rank's work, so
        the calling thread's seconds would be too few, and the clock of a thread that may end cannot be read safely.
        """
        return self._cpu_stopped - self._cpu_started if self._events is None else self.seconds()


def dropout_seed(run_seed: int, step: int, slot: int) -> int:
    """Returns the seed of torch's random numbers for one micro-batch, so that a resumed run draws the same numbers.

    Args:
        slot: index of the micro-batch among all of the step: rank x micro-batches + index.
    """
    return int(derive_key(run_seed, step, slot, _DROPOUT))
