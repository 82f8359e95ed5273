"""Lightning's data module on the packs of a Loader: global step t takes the loader's step t, on any number of ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from evenpack.adapters.first_step import HandOver, require_whole_step
from evenpack.adapters.huggingface import ModelInputs
from evenpack.batch import PackedBatch
from evenpack.data.loader import Loader
from evenpack.errors import CheckpointError, ConfigError
from evenpack.extras import missing_host

try:
    from lightning.pytorch import LightningDataModule
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.lightning") from error


class PackDataModule(LightningDataModule):  # type: ignore[misc]  # lightning is not typed here
    """Packs for `trainer.fit(model, datamodule=PackDataModule(documents, pack_length=..., packs_per_step=...))`.

    The loader is made in `setup`, of the Trainer's ranks and `accumulate_grad_batches`, and is no DataLoader, so that
    Lightning does not put a DistributedSampler into it. A model's loss is a share of the step's mean, and Lightning
    averages over ranks and micro-batches: return `loss * trainer.world_size * trainer.accumulate_grad_batches`.
    """

    loader: Loader
    """This rank's; there from `setup` on."""

    def __init__(
        self,
        documents: Any,
        *,
        form: Callable[[PackedBatch], Any] | None = None,
        own_loss: bool = True,
        allow_leaks: bool = False,
        **settings: Any,
    ) -> None:
        """Takes the documents and settings of an `evenpack.Loader`, but for those that the Trainer knows.

        Args:
            form: makes of a batch what `training_step` takes, of which nothing is proved. None: the arguments of the
                LightningModule's one model of transformers, with the targets of the step as `num_items_in_batch`.
            own_loss: whether `training_step` takes that model's own loss, and not one of its logits.
            allow_leaks: whether to train a model that is not proved to keep the sequences of a pack apart.

        Raises: ConfigError if rank, ranks, micro_batches or steps are given.
        """
        super().__init__()
        own = {"rank", "ranks", "micro_batches", "steps"} & set(settings)
        if own:
            raise ConfigError(
                f"leave out {', '.join(sorted(own))}: Lightning's Trainer says them (devices, accumulate_grad_batches, "
                "max_steps)"
            )
        self._documents, self._settings = documents, settings
        self._form: Callable[[PackedBatch], Any] | None = form
        self._is_own_form = form is not None
        self._own_loss, self._allow_leaks = own_loss, allow_leaks
        self._isolation: dict[str, Any] = {}
        self._state: Mapping[str, Any] | None = None
        self._first = self._arrived = 0
        self._found: list[Any] = []
        self._checked = False
        self._hand_over: HandOver | None = None

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
                f"limit_train_batches or fast_dev_run ({limit}) cuts a step of accumulate_grad_batches "
                f"({micro_batches}): give a multiple, or stop by max_steps"
            )
        self.loader = Loader(
            self._documents,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            micro_batches=micro_batches,
            **self._settings,
        )
        self._form = self._form if self._is_own_form else None
        if _shards_all(trainer.strategy):  # its forward pass can only be run as a whole, so before it is sharded
            self._prove()

    @property
    def form(self) -> Callable[[PackedBatch], Any]:
        """Makes of a batch what `training_step` takes; there from Trainer's first batch on."""
        assert self._form is not None, "it was proved with the first loader"
        return self._form

    def _prove(self) -> None:
        """Makes the form, after the proof that the model keeps sequences apart, on all ranks."""
        from evenpack.adapters.isolation import isolation_on, required

        if self._form is not None:
            return
        first = self.loader[self.trainer.global_step * self.loader.micro_batches]
        with self.trainer.precision_plugin.train_step_context():
            found = isolation_on(_model_of(self.trainer.lightning_module), first, own_loss=self._own_loss)
        inputs_of = required(found, allow_leaks=self._allow_leaks, rank=self.loader.rank)
        self._isolation = found.summary
        self._form = partial(_counted, inputs_of)

    def train_dataloader(self) -> Any:
        """Returns this rank's micro-batches from the Trainer's global step on.

        Raises: CheckpointError if the checkpoint that it resumes is of other data.
        """
        self._prove()
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
        return {**self.loader.state_dict(), "step": self.trainer.global_step, "isolation": self._isolation}

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
        if self._checked and self._hand_over is not None:
            self._hand_over.end()
            self._hand_over = None
        if not self._checked:
            if not self._found and not self._is_own_form and not self._allow_leaks:
                self._hand_over = HandOver(_model_of(self.trainer.lightning_module), calls=self.loader.micro_batches)
            self._found.append(batch)
            if self._hand_over is not None:
                self._hand_over.expect(batch)
            if len(self._found) == self.loader.micro_batches:
                require_whole_step(self.loader, step, self._found, self.form)
                self._checked = True
                self._found = []
        return batch

    def _move_to(self, step: int) -> None:
        assert self._state is not None, "a loader or a checkpoint gave it"
        self.loader.load_state_dict({**self._state, "step": step})
        self._first, self._arrived, self._found = step, 0, []


def _counted(inputs_of: ModelInputs, batch: PackedBatch) -> dict[str, Any]:
    """Returns the model's inputs, and the targets of the whole step as `num_items_in_batch`, which divides the loss."""
    return {**inputs_of(batch), "num_items_in_batch": batch.step_counts.targets}


def _shards_all(strategy: Any) -> bool:
    return any(kind.__name__ == "FSDPStrategy" for kind in type(strategy).__mro__)


def _model_of(module: Any) -> Any:
    """Returns the one model of transformers in a LightningModule. Raises: ConfigError if there is not just one."""
    found: list[Any] = []
    names: list[str] = []
    for name, part in module.named_modules():
        is_model = hasattr(part, "config") and hasattr(part, "get_input_embeddings")
        if is_model and not any(name.startswith(f"{one}.") for one in names):
            found.append(part)
            names.append(name)
    if len(found) != 1:
        raise ConfigError(
            f"{type(module).__name__} has {len(found)} models of transformers ({', '.join(names)}), and packs are "
            "proved on one: give PackDataModule a form, which makes of a batch what training_step takes; "
            "prove_isolation(model, loader) returns one for a model (docs/adapters.md)"
        )
    return found[0]


@dataclass(frozen=True)
class _Feed:
    """An iterable that is no DataLoader, so that nothing takes it apart; without a length, as the loader has none."""

    module: PackDataModule

    def __iter__(self) -> Iterator[Any]:
        self.module._move_to(self.module.trainer.global_step)
        for batch in self.module.loader:
            yield self.module.form(batch)
