"""transformers' `Trainer` on the steps of a Loader: its step t is the loader's step t, at any number of processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.huggingface import attention_masks, model_inputs
from evenpack.batch import PackedBatch
from evenpack.data.loader import Loader
from evenpack.errors import CheckpointError, ConfigError, RunError
from evenpack.extras import missing_host
from evenpack.losses import MASKED_TOKEN

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.trainer") from error

_STATE = "evenpack.Loader"
"""The key of the loader's state in the `stateful_callbacks` of trainer_state.json."""


class PackTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A `Trainer` that trains on packs: `PackTrainer(model=model, args=arguments, loader=loader).train()`.

    Accelerate never sees a DataLoader, so it can neither shard nor dispatch. Optimizer step t takes the loader's
    step t; `resume_from_checkpoint` continues there at once, also with another number of processes.
    """

    compute_loss_func: Any

    def __init__(self, *arguments: Any, loader: Loader, **keywords: Any) -> None:
        """Takes a Trainer's arguments and a loader, which takes the place of `train_dataset`.

        Raises: ConfigError if the arguments count processes, micro-batches or targets in another way than the loader.
        """
        super().__init__(*arguments, **keywords)
        if self.train_dataset is not None:
            raise ConfigError("give loader or train_dataset, not both: PackTrainer trains on the loader")
        self._take(loader)

    def _take(self, loader: Loader) -> None:
        self.loader = loader
        if loader.step:
            raise ConfigError(
                f"the loader is at step {loader.step}, and a Trainer begins at 0: give a new loader, and resume by "
                "trainer.train(resume_from_checkpoint=...), which moves it"
            )
        self._check_arguments()
        self.add_callback(_LoaderState(loader))

    def get_train_dataloader(self) -> Any:
        """Returns this rank's micro-batches from Trainer's step on."""
        # Trainer would read and drop the batches of all earlier steps; the loader begins behind them.
        self.args.ignore_data_skip = True
        self._check_arguments()
        self._checked = False
        self._form = partial(_inputs, config=getattr(self.model, "config", None))
        if MASKED_TOKEN.name in self.loader[0].targets and self.compute_loss_func is None:
            self.compute_loss_func = masked_token_loss
        return _Feed(self)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of a step and the number of its targets over all ranks; checks those of the first.

        Raises: ConfigError if the host changed them; RunError if the loader ended.
        """
        step = self.state.global_step
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            raise RunError(
                f"the loader ended at step {step}, before max_steps ({self.args.max_steps}): make it with steps=None, "
                "or with at least as many steps"
            )
        if not self._checked:
            self._checked = True
            require_whole_step(self.loader, step, samples, self._form)
            self._check_count(count, self.loader.plan(step).counts.targets)
        return samples, count

    def _check_arguments(self) -> None:
        args, loader = self.args, self.loader
        if args.gradient_accumulation_steps != loader.micro_batches:
            raise ConfigError(
                f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, and the loader divides a step "
                f"into {loader.micro_batches} micro_batches: give both the same number"
            )
        if (args.process_index, args.world_size) != (loader.rank, loader.ranks):
            raise ConfigError(
                f"this is process {args.process_index} of {args.world_size}, and the loader was made for rank "
                f"{loader.rank} of {loader.ranks}: give it rank=args.process_index, ranks=args.world_size"
            )
        if args.n_gpu > 1:
            raise ConfigError(
                f"one process has {args.n_gpu} GPUs, and DataParallel would cut packs apart: start one process for "
                "each by torchrun or accelerate launch"
            )
        if max(self.get_tp_size(), self.get_cp_size(), self.get_sp_size()) > 1:
            raise ConfigError("PackTrainer is for data parallelism (DDP, FSDP, ZeRO): ranks must not share packs")
        if args.max_steps <= 0:
            epoch = -(-loader.packs // loader.packs_per_step)
            raise ConfigError(f"set max_steps: the loader is endless, and an epoch of its data has {epoch:,} steps")
        if args.world_size > 1 and not args.average_tokens_across_devices:
            raise ConfigError(
                "average_tokens_across_devices must be True: each rank would divide by its own number of targets"
            )

    def _check_count(self, count: Any, targets: int) -> None:
        if count is None:
            raise ConfigError(
                f"{type(self.model).__name__} takes no number of targets (num_items_in_batch), so its loss would be a "
                "mean of means over micro-batches and ranks: give PackTrainer a compute_loss_func that divides by it"
            )
        if int(count) != targets:
            raise ConfigError(f"Trainer counts {int(count)} targets in a step that has {targets}: labels were changed")


def masked_token_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """Returns the sum of losses at masked tokens over the targets of the step.

    BERT's own loss in transformers is a mean over the micro-batch, which Trainer takes for such a share.
    """
    from torch.nn.functional import cross_entropy

    logits = outputs["logits"].float()
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def _inputs(batch: PackedBatch, *, config: Any) -> dict[str, Any]:
    """Returns what the model is given; encoders do not look at positions, and get masks."""
    attention = str(getattr(config, "_attn_implementation", None))
    found = model_inputs(batch, for_flash="flash" in attention)
    if MASKED_TOKEN.name in batch.targets and "flash" not in attention:
        found["attention_mask"] = attention_masks(batch, config)
    return found


@dataclass(frozen=True)
class _Feed:
    """An iterable that is no DataLoader, so that nothing takes it apart; without a length, as the loader has none."""

    trainer: PackTrainer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.trainer.loader:
            yield self.trainer._form(batch)


class _LoaderState(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Keeps the loader's state in Trainer's own, which it writes to each checkpoint."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves the loader to Trainer's step. Raises: CheckpointError if the checkpoint is of other data."""
        kept = state.stateful_callbacks.get(_STATE)
        if state.global_step and kept is None:
            raise CheckpointError(
                "this checkpoint was not made by PackTrainer, so its step names other data: start a new run from its "
                "weights, or resume it with the Trainer that made it"
            )
        start = self._loader.state_dict() if kept is None else kept["attributes"]
        self._loader.load_state_dict({**start, "step": state.global_step})
        self._keep(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keeps the next step, and the epochs of the data that have been seen."""
        self._keep(state)
        state.epoch = state.global_step * self._loader.packs_per_step / self._loader.packs

    def _keep(self, state: Any) -> None:
        kept = {**self._loader.state_dict(), "step": state.global_step}
        state.stateful_callbacks[_STATE] = {"args": {}, "attributes": kept}
