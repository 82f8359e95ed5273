"""Lightning's data module on the packs of a Loader: global step t takes the loader's step t, on any number of ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.huggingface import model_inputs
from evenpack.batch import PackedBatch
from evenpack.data.loader import Loader
from evenpack.errors import CheckpointError, ConfigError
from evenpack.extras import missing_host
from evenpack.losses import MASKED_TOKEN

try:
    from lightning.pytorch import LightningDataModule
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.lightning") from error


def counted_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Returns `model_inputs`, and the targets of the whole step as `num_items_in_batch`, which divides the loss.

    Raises: ConfigError for masked tokens: encoders need masks of their attention, and BERT's loss divides otherwise.
    """
    if MASKED_TOKEN.name in batch.targets:
        raise ConfigError(
            "encoders mix sequences without an attention_mask, and BERT's own loss is a mean over the micro-batch: "
            "give PackDataModule a form that adds attention_masks(batch, config), and take the loss by "
            "masked_token_loss of evenpack.adapters.trainer (docs/adapters.md)"
        )
    return {**model_inputs(batch), "num_items_in_batch": batch.step_counts.targets}


class PackDataModule(LightningDataModule):  # type: ignore[misc]  # lightning is not typed here
    """Packs for `trainer.fit(model, datamodule=PackDataModule(documents, pack_length=..., packs_per_step=...))`.

    The loader is made in `setup`, of the Trainer's ranks and `accumulate_grad_batches`, and is no DataLoader, so that
    Lightning does not put a DistributedSampler into it. A model's loss is a share of the step's mean, and Lightning
    averages over ranks and micro-batches: return `loss * trainer.world_size * trainer.accumulate_grad_batches`.
    """

    loader: Loader
    """This rank's; there from `setup` on."""

    def __init__(self, documents: Any, *, form: Callable[[PackedBatch], Any] = counted_inputs, **settings: Any) -> None:
        """Takes the documents and settings of an `evenpack.Loader`, but for those that the Trainer knows.

        Args:
            form: makes of a batch what `training_step` takes.

        Raises: ConfigError if rank, ranks, micro_batches or steps are given.
        """
        super().__init__()
        own = {"rank", "ranks", "micro_batches", "steps"} & set(settings)
        if own:
            raise ConfigError(
                f"leave out {', '.join(sorted(own))}: Lightning's Trainer says them (devices, accumulate_grad_batches, "
                "max_steps)"
            )
        self._documents, self._form, self._settings = documents, form, settings
        self._state: Mapping[str, Any] | None = None
        self._first = self._arrived = 0
        self._found: list[Any] = []
        self._checked = False

    def setup(self, stage: str) -> None:
        """Makes the loader of this rank, for training. Raises: ConfigError for numbers that do not fit together."""
        if stage != "fit":
            return
        trainer = self.trainer
        if trainer.max_steps <= 0:
            raise ConfigError("set max_steps in Lightning's Trainer: the loader has no end, and so no epochs")
        shards = trainer.distributed_sampler_kwargs
        if shards is not None and shards["num_replicas"] != trainer.world_size:
            raise ConfigError("PackDataModule is for data parallelism (DDP, FSDP): ranks must not share packs")
        micro_batches, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        if isinstance(limit, int) and limit % micro_batches:
            raise ConfigError(
                f"limit_train_batches ({limit}) cuts a step of accumulate_grad_batches ({micro_batches}): give a "
                "multiple, or stop by max_steps"
            )
        self.loader = Loader(
            self._documents,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            micro_batches=micro_batches,
            **self._settings,
        )

    def train_dataloader(self) -> Any:
        """Returns this rank's micro-batches from the Trainer's global step on.

        Raises: CheckpointError if the checkpoint that it resumes is of other data.
        """
        step = self.trainer.global_step
        if self._state is None and step:
            raise CheckpointError(
                f"Lightning continues at global step {step}, from a checkpoint without a state of "
                f"{type(self).__qualname__}: its step names other data; start a new run from its weights"
            )
        self._state = self._state or self.loader.state_dict()
        self._move_to(step)
        # Lightning takes an update after each multiple of accumulate_grad_batches, counted by batches of all steps. A
        # start with another number, or a checkpoint within a step, would make the first step a part of one.
        counted = self.trainer.fit_loop.epoch_loop.batch_progress.current
        ahead = counted.ready % self.loader.micro_batches
        for name in ("ready", "started", "processed", "completed"):
            setattr(counted, name, getattr(counted, name) - ahead)
        self._checked = False
        return _Feed(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state at the Trainer's global step: Lightning reads a batch ahead."""
        return {**self.loader.state_dict(), "step": self.trainer.global_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keeps the state, which is compared once the Trainer has its global step."""
        self._state = state_dict

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Checks that the batch belongs to the Trainer's step, and the micro-batches of the first step.

        Raises: ConfigError if Lightning or a callback counts, drops or changes them.
        """
        if not self.trainer.training:
            return batch
        step, index = divmod(self._arrived, self.loader.micro_batches)
        step += self._first
        if self.trainer.global_step != step:
            raise ConfigError(
                f"micro-batch {index} of step {step} arrived, and Lightning is at global step "
                f"{self.trainer.global_step}: an update takes {self.loader.micro_batches} micro-batches here; let no "
                "callback change accumulate_grad_batches, and use one optimizer, stepped by Lightning"
            )
        self._arrived += 1
        if not self._checked:
            self._found.append(batch)
            if len(self._found) == self.loader.micro_batches:
                require_whole_step(self.loader, step, self._found, self._form)
                self._checked = True
                self._found = []
        return batch

    def _move_to(self, step: int) -> None:
        assert self._state is not None, "a loader or a checkpoint gave it"
        self.loader.load_state_dict({**self._state, "step": step})
        self._first, self._arrived, self._found = step, 0, []


@dataclass(frozen=True)
class _Feed:
    """An iterable that is no DataLoader, so that nothing takes it apart; without a length, as the loader has none."""

    module: PackDataModule

    def __iter__(self) -> Iterator[Any]:
        self.module._move_to(self.module.trainer.global_step)
        for batch in self.module.loader:
            yield self.module._form(batch)
