"""transformers' `Trainer` on the steps of a Loader: its step t is the loader's step t, at any number of processes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from evenpack.adapters.first_step import HandOver, require_whole_step
from evenpack.adapters.huggingface import ModelInputs, text_config
from evenpack.data.loader import Loader
from evenpack.data.tokens.own import IGNORED
from evenpack.errors import CheckpointError, ConfigError, RunError
from evenpack.extras import missing_host
from evenpack.losses import NEXT_TOKEN

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.trainer") from error

if TYPE_CHECKING:
    from evenpack.adapters.isolation import Isolation

log = logging.getLogger(__name__)

_STATE = "evenpack.Loader"
"""The key of the loader's state in the `stateful_callbacks` of trainer_state.json."""


_STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy")


class PackTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A `Trainer` that trains on packs: `PackTrainer(model=model, args=arguments, loader=loader).train()`.

    Accelerate never sees a DataLoader, so it can neither shard nor dispatch. Optimizer step t takes the loader's
    step t; `resume_from_checkpoint` continues there at once, also with another number of processes.
    """

    compute_loss_func: Any
    isolation: "Isolation"
    """What was proved of the model; there once training has begun, and in each checkpoint."""
    _form: ModelInputs | None = None
    _hand_over: HandOver | None = None
    tokens_seen = 0
    """Real tokens of all steps that this trainer has begun, over all processes."""
    _host_computes_loss = False
    """Whether a subclass of Trainer computes next-token losses itself, from logits."""

    def __init__(self, *arguments: Any, loader: Loader, allow_leaks: bool = False, **keywords: Any) -> None:
        """Takes a Trainer's arguments and a loader, which takes the place of `train_dataset`.

        Args:
            allow_leaks: whether to train a model that is not proved to keep the sequences of a pack apart.

        Raises: ConfigError if the arguments count processes, micro-batches or targets in another way than the loader.
        """
        super().__init__(*arguments, **keywords)
        if self.train_dataset is not None:
            raise ConfigError("give loader or train_dataset, not both: PackTrainer trains on the loader")
        self._take(loader, allow_leaks=allow_leaks)

    def _take(self, loader: Loader, *, allow_leaks: bool) -> None:
        self.loader, self._allow_leaks = loader, allow_leaks
        if loader.step:
            raise ConfigError(
                f"the loader is at step {loader.step}, and a Trainer begins at 0: give a new loader, and resume by "
                "trainer.train(resume_from_checkpoint=...), which moves it"
            )
        self._check_arguments()
        self._check_loss()
        self.add_callback(_LoaderState(self))

    def get_train_dataloader(self) -> Any:
        """Returns this rank's micro-batches from Trainer's step on."""
        # Trainer would read and drop the batches of all earlier steps; the loader begins behind them.
        self.args.ignore_data_skip = True
        self._check_arguments()
        self._check_loss()
        self._checked, self._form = False, None
        predicts_next = self._host_computes_loss or NEXT_TOKEN.name in self.loader[0].targets
        if self.compute_loss_func is None and not predicts_next:
            self.compute_loss_func = partial(token_loss, shifts=False)
        return _Feed(self)

    def prove_isolation(self) -> ModelInputs:
        """Returns what makes the model's inputs of a batch; all ranks call it, once Trainer has wrapped the model.

        Raises: ConfigError unless the model is proved to keep sequences apart, or `allow_leaks` was given.
        """
        from evenpack.adapters.isolation import isolation_on, required

        self.model_wrapped.train()  # as Trainer does with each step
        found = isolation_on(
            self.model_wrapped,
            self.loader[self.loader.step * self.loader.micro_batches],
            device=self.args.device,
            own_loss=self.model_accepts_loss_kwargs and self.compute_loss_func is None and not self._host_computes_loss,
        )
        self._form = required(found, allow_leaks=self._allow_leaks, rank=self.loader.rank)
        self.isolation = found
        return self._form

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of a step and the number of its targets over all ranks; checks those of the first.

        Raises: ConfigError if the host changed them, or their number; RunError if the loader ended.
        """
        step = self.state.global_step
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples and step >= self.args.max_steps:
            return samples, count
        if not samples:
            raise RunError(
                f"the loader ended at step {step}, before max_steps ({self.args.max_steps}): make it with steps=None, "
                "or with at least as many steps"
            )
        if self._hand_over is not None:  # of the first step
            self._hand_over.end()
            self._hand_over = None
        if not self._checked:
            self._checked = True
            assert self._form is not None, "it made the samples"
            require_whole_step(self.loader, step, samples, self._form)
            if not self._allow_leaks:
                self._hand_over = HandOver(self.model_wrapped, calls=len(samples))
                for one in samples:
                    self._hand_over.expect(one)
            self._check_count(count, self.loader.plan(step).counts.targets)
        if len(samples) != self.loader.micro_batches:
            raise ConfigError(
                f"step {step} took {len(samples)} micro-batches, and the loader makes {self.loader.micro_batches} a "
                "step: a callback has changed gradient_accumulation_steps. Leave it as it is while it trains, or stop, "
                "and resume with another Trainer and loader"
            )
        self.tokens_seen += self._step_tokens
        if self.args.include_num_input_tokens_seen == "non_padding":
            self.state.num_input_tokens_seen += self._step_tokens
        return samples, count

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Logs without Trainer's samples per second, which counts by a batch size that packs do not have."""
        logs.pop("train_samples_per_second", None)
        super().log(logs, *arguments, **keywords)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts slots for "all"; real tokens are counted with each step, as the plan has them."""
        if self.args.include_num_input_tokens_seen != "non_padding":
            super()._track_num_input_tokens(inputs)

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

        by_epoch = [name for name in _STRATEGIES if str(getattr(args, name).value) == "epoch"]
        if by_epoch:
            raise ConfigError(
                f"{', '.join(by_epoch)}='epoch' would be the end alone, since the loader is endless: give 'steps'; an "
                f"epoch of its data has {-(-loader.packs // loader.packs_per_step):,} of them"
            )

    def _check_loss(self) -> None:
        """Raises: ConfigError for options of the loss that would not be computed, or otherwise on packs."""
        if self.args.label_smoothing_factor:
            raise ConfigError("label_smoothing_factor is not computed on packs: give a compute_loss_func that smooths")
        if self.args.neftune_noise_alpha is not None:
            raise ConfigError(
                "neftune_noise_alpha is for rows of one document: its noise is divided by the root of the row's "
                "length, and a row of packs holds many; leave it out"
            )
        router = getattr(text_config(getattr(self.model, "config", None)), "output_router_logits", False)
        parts = self.loader.micro_batches * self.loader.ranks
        if router and parts > 1 and self.compute_loss_func is None:
            raise ConfigError(
                "config.output_router_logits=True adds the router's auxiliary loss of each micro-batch whole, so a "
                f"step of {parts} (micro_batches x ranks) would add it {parts} times: set it to False (TRL sets it, "
                "unless router_aux_loss_coef=0.0 in SFTConfig), or give a compute_loss_func"
            )

    def _check_count(self, count: Any, targets: int) -> None:
        if count is None:
            raise ConfigError(
                f"{type(self.model).__name__} takes no number of targets (num_items_in_batch), so its loss would be a "
                "mean of means over micro-batches and ranks: give PackTrainer a compute_loss_func that divides by it"
            )
        if int(count) != targets:
            raise ConfigError(f"Trainer counts {int(count)} targets in a step that has {targets}: labels were changed")


def token_loss(outputs: Any, labels: Any, num_items_in_batch: Any, *, shifts: bool) -> Any:
    """Returns the sum of losses at the labels over the targets of the step, from logits.

    BERT's own loss in transformers is a mean over the micro-batch, which Trainer takes for such a share.

    Args:
        shifts: whether each label is predicted by the slot before it, as next tokens are: `ModelInputs.causal`.
    """
    from torch.nn.functional import cross_entropy

    logits = outputs["logits"].float()
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total / num_items_in_batch


@dataclass(frozen=True)
class _Feed:
    """An iterable that is no DataLoader, so that nothing takes it apart; without a length, as the loader has none."""

    trainer: PackTrainer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.trainer.state.global_step >= self.trainer.args.max_steps:
            return  # Trainer looks at its steps behind one only, so a finished training that resumes would go on
        inputs_of = self.trainer._form or self.trainer.prove_isolation()
        for batch in self.trainer.loader:
            self.trainer._step_tokens = batch.step_counts.tokens  # Trainer asks for one step at a time
            yield inputs_of(batch)


class _LoaderState(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Keeps the loader's state in Trainer's own, which it writes to each checkpoint."""

    def __init__(self, trainer: PackTrainer) -> None:
        self._trainer, self._loader = trainer, trainer.loader

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
        if state.global_step >= args.max_steps:
            said = "the checkpoint is of step %d, and max_steps is %d: nothing is trained"
            log.warning(said, state.global_step, args.max_steps)
            control.should_training_stop = True
            return
        self._trainer.prove_isolation()
        self._keep(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keeps the next step, and the epochs of the data that have been seen."""
        self._keep(state)
        state.epoch = state.global_step * self._loader.packs_per_step / self._loader.packs

    def _keep(self, state: Any) -> None:
        kept = {**self._loader.state_dict(), "step": state.global_step, "isolation": self._trainer.isolation.summary}
        state.stateful_callbacks[_STATE] = {"args": {}, "attributes": kept}
