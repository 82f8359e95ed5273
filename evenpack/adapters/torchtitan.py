"""torchtitan's data loader on the packs of a Loader: `dataloader=PackDataLoader.Config(...)` in a Trainer's config.

Shapes: B = packs of a micro-batch (`local_batch_size`), L = slots of a pack (`seq_len`). torchtitan finds boundaries
where positions are 0, in layers with flex or varlen attention; its SDPA does not isolate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenpack.adapters.huggingface import labels_of
from evenpack.batch import PackedBatch
from evenpack.data.loader import Loader
from evenpack.errors import CheckpointError, ConfigError
from evenpack.extras import missing_host

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.torchtitan") from error

if TYPE_CHECKING:
    from torch import Tensor


def torchtitan_inputs(batch: PackedBatch) -> "tuple[dict[str, Tensor], Tensor]":
    """Returns ({"input": [B, L], "positions": [B, L]}, labels [B, L]); labels are what each slot predicts, or -100."""
    tokens, positions, labels = (
        each.view(-1, batch.row_slots) for each in (batch.tokens, batch.position_ids, labels_of(batch)["shift_labels"])
    )
    return {"input": tokens, "positions": positions}, labels


class PackDataLoader(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not typed
    """One data-parallel rank's packs of each step; its state is that of the Loader, valid at any degree."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # torchtitan is not typed
        """`dataset_path` is the prefix of a token file (PREFIX.bin and PREFIX.idx); override `documents` for others."""

        packs_per_step: int = 0
        """Packs of a step over all ranks: `training.global_batch_size`."""
        seed: int = 0
        num_workers: int = 0
        """Processes that read ahead."""
        cache: str | None = None
        """Folder in which packs are stored."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Takes what torchtitan's Trainer gives a data loader; packs have `seq_len` slots.

        Raises: ConfigError for numbers that do not fit together.
        """
        micro_batches, rest = divmod(config.packs_per_step, dp_world_size * local_batch_size)
        if rest or not micro_batches:
            raise ConfigError(
                f"packs_per_step ({config.packs_per_step}) must be training.global_batch_size, a multiple of "
                f"{dp_world_size} ranks x local_batch_size {local_batch_size}"
            )
        if snapshot_every_n_steps is not None and snapshot_every_n_steps % micro_batches:
            raise ConfigError(
                f"torchtitan saves after {snapshot_every_n_steps} micro-batches, which are no whole steps of "
                f"{micro_batches}: packs_per_step ({config.packs_per_step}) must be training.global_batch_size"
            )
        self.loader = Loader(
            self.documents(config),
            pack_length=seq_len,
            packs_per_step=config.packs_per_step,
            rank=dp_rank,
            ranks=dp_world_size,
            micro_batches=micro_batches,
            seed=config.seed,
            balances_each_micro_batch=True,
            cache=config.cache,
            workers=config.num_workers,
        )
        self._read = 0

    def documents(self, config: Config) -> Any:
        """Returns the documents, in any form that `evenpack.Loader` takes."""
        if config.dataset_path is None:
            raise ConfigError("set dataset_path, the prefix of a token file, or override PackDataLoader.documents")
        return config.dataset_path

    def __iter__(self) -> Iterator[tuple[dict[str, "Tensor"], "Tensor"]]:
        self._read = 0
        for batch in self.loader:
            self._read += 1
            yield torchtitan_inputs(batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state, equal on all ranks. Raises: CheckpointError within a step."""
        if self._read % self.loader.micro_batches:
            raise CheckpointError(
                f"torchtitan saves within a step of {self.loader.micro_batches} micro-batches: packs_per_step "
                f"({self.loader.packs_per_step}) must be training.global_batch_size"
            )
        return {**self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the state's step; an empty state, of a checkpoint without one, is the first step."""
        if state_dict:
            self.loader.load_state_dict(state_dict)
