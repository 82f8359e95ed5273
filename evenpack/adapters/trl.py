"""TRL's `SFTTrainer` on packs: TRL makes tokens and labels of conversations, and the loader packs them."""

from typing import Any

from evenpack.adapters.trainer import PackTrainer
from evenpack.data.loader import Loader
from evenpack.errors import ConfigError
from evenpack.extras import missing_host

try:
    from trl import SFTConfig, SFTTrainer
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.trl") from error


class PackSFTTrainer(PackTrainer, SFTTrainer):  # type: ignore[misc]  # trl is not typed
    """An `SFTTrainer` on equal, balanced packs: `PackSFTTrainer(..., train_dataset=dataset, packs_per_step=64)`.

    Chat template, prompt and completion, and what counts in the loss are TRL's. What it prepared becomes the documents
    of a Loader, with packs of `max_length`, which is there as `loader` afterwards.
    """

    train_dataset: Any
    _host_computes_loss = True

    def __init__(
        self,
        *arguments: Any,
        packs_per_step: int,
        loader_settings: dict[str, Any] | None = None,
        allow_leaks: bool = False,
        **keywords: Any,
    ) -> None:
        """Takes an SFTTrainer's arguments.

        Args:
            packs_per_step: packs of one update over all processes.
            loader_settings: other arguments of `evenpack.Loader`, such as `seed`, `packing`, `cache` or `workers`.
            allow_leaks: as of `PackTrainer`.

        Raises: ConfigError for arguments by which TRL would pack (in evaluation too) or keep what is too long, or
            that count otherwise.
        """
        super(PackTrainer, self).__init__(*arguments, **keywords)
        args, prepared = self.args, self.train_dataset
        if not isinstance(args, SFTConfig) or args.packing or args.padding_free or args.max_length is None:
            raise ConfigError(
                "give SFTConfig(max_length=...) without packing and padding_free: max_length is the slots of a pack, "
                "and evenpack's loader packs"
            )
        if args.eval_packing:
            raise ConfigError(
                "leave eval_packing out: without `packing` TRL evaluates packed rows as if each were one document, so "
                "eval_loss would be that of documents which see one another"
            )
        columns = prepared.column_names
        if columns is not None and not {"input_ids", "labels"} <= set(columns):
            raise ConfigError(
                f"TRL prepared a dataset of {', '.join(columns)}, and packs need input_ids and labels: give text, "
                "conversations, or prompts and completions, without skip_prepare_dataset"
            )
        loader = Loader(
            prepared,
            pack_length=args.max_length,
            packs_per_step=packs_per_step,
            rank=args.process_index,
            ranks=args.world_size,
            micro_batches=args.gradient_accumulation_steps,
            **(loader_settings or {}),
        )
        self.train_dataset = None
        self._take(loader, allow_leaks=allow_leaks)

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns TRL's loss; its `num_tokens` are the real tokens of the steps, as the plan has them."""
        found = super().compute_loss(*arguments, **keywords)
        if self.model.training:
            self._total_train_tokens = self.tokens_seen
            self._metrics["train"]["num_tokens"] = [self.tokens_seen]
        return found
