"""`evenpack.Loader`: equal, isolated, balanced packs in one exact order, for any training loop.

Which packs form step t depends on the documents, the seed and t; rank, ranks and micro-batches only divide the step. So
the state of a loader is the number of its step, the same on every rank, and it continues at any number of ranks.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, cast

import numpy as np
import xxhash

from evenpack.config import nearest, validate
from evenpack.data.batches.objectives import DynamicMasks, NextTokens, Objective
from evenpack.data.batches.pipeline import MicroBatchDataset, PipelineSettings, StepBatches, training_batches
from evenpack.data.checksums import Checksums, digest_of, find_first_damage, with_checksum, without_checksum
from evenpack.data.keys import derive_key, key_of_name
from evenpack.data.limits import HIGHEST_WEIGHT, MOST_PACKS_A_STEP, MOST_SLOTS, MOST_STEPS, MOST_VOCABULARY
from evenpack.data.order.config import PackingConfig
from evenpack.data.order.plan import PackPlan, sort_chunks_by_length
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.stages import Stage, by_name, changes_by_name
from evenpack.data.order.step_plan import StepPlan
from evenpack.data.order.step_shape import Batching, CostWeights, StepShape, divisors
from evenpack.data.order.stored_plan import open_packing, open_plan, pack_view, store_plan
from evenpack.data.packing import Packing, check_options
from evenpack.data.permutation import sequence_id_type
from evenpack.data.prepared import PreparedData
from evenpack.data.recipes import DocumentsRecipe, MaskingConfig
from evenpack.data.sequences import TokenAccounting, ViewOfDocuments, build_view, length_chunks, open_view
from evenpack.data.sources.files import refuse_split_column, refuse_splits
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.data.tokens.file import TokenFile, expect_random_reads
from evenpack.data.tokens.own import ABOUT_THE_LOSS, TokenArrays, TokenRows, hash_content
from evenpack.errors import CheckpointError, ConfigError, DataError, EvenpackError, RunError
from evenpack.extras import require
from evenpack.files import atomic_directory, expand_user, explained, hash_of_json, read_json, system_error, write_json
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, StepCounts

if TYPE_CHECKING:
    from evenpack.batch import PackedBatch

log = logging.getLogger(__name__)

STATE_VERSION = 1

ATTENTION = CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0)
"""In packs of one length nothing but attention costs one rank more than another."""

_ONLY_SOURCE = "data"
"""The name of a source that has none."""


_COMPARED_DOCUMENTS, _FEWEST_COMPARED, _SHORTEST_ROW = 64, 8, 32
"""Documents whose lengths are compared, the fewest that tell something, and the tokens that a row has at least."""
_CACHE_VERSION = 2
"""Of the files in a cache. Those of version 1 had no checksums; they are not read any more."""
_CHECKSUMS = "checksums.json"

_NO_DATASET = (
    "It is no Dataset: iterate over it (workers=N reads ahead), or take the adapter of your trainer, PackTrainer, "
    "PackSFTTrainer, PackDataModule or PackDataLoader (docs/adapters.md)"
)
_OF_PARENTS: list[Any] = []
"""Iterations whose worker processes belong to the process from which this one was forked."""


class _NoLengthError(ConfigError, TypeError):
    """A TypeError too, since `list(loader)` goes on after one."""


class LoaderState(TypedDict):
    """What a checkpoint keeps of a loader: equal on all ranks, and valid at any number of ranks."""

    version: int
    fingerprint: str
    """Of everything that decides which packs form which step before this one."""
    seed: int
    step: int
    """The next step, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class RandomMasks:
    """Masked tokens for documents of one's own: the `objective` of a Loader, which draws masks again in each epoch."""

    mask_token: int
    special_tokens: Sequence[int]
    """Tokens that are never masked and never drawn, such as [CLS], [SEP] and [PAD]; at most two in a document."""
    vocabulary_size: int
    share: float = 0.15
    """Share of a document's tokens, special ones counted, that is masked: at least one, and at most 65,536."""
    mask_share: float = 0.8
    """Share of the masked tokens that is replaced by `mask_token`."""
    random_share: float = 0.1
    """Share of the masked tokens that is replaced by a random token; the remaining ones are kept."""

    def drawn(self, pack_length: int, seed: int) -> DynamicMasks:
        """Returns the objective of these documents. Raises: ConfigError for ids beyond the vocabulary, or shares."""
        _whole("vocabulary_size", self.vocabulary_size, 1, MOST_VOCABULARY)
        _require_type("special_tokens", self.special_tokens, Sequence | np.ndarray, "a list of token ids")
        special = np.zeros(self.vocabulary_size, dtype=bool)
        ids = [self.mask_token, *self.special_tokens]
        wrong = [one for one in ids if not isinstance(one, int | np.integer) or not 0 <= one < self.vocabulary_size]
        if wrong or len(set(ids)) == self.vocabulary_size:
            raise ConfigError(
                f"mask_token and special_tokens must be ids below vocabulary_size ({self.vocabulary_size}), and leave "
                f"others to draw, found {', '.join(map(str, wrong or ids))}"
            )
        special[ids] = True
        shares = {"share": self.share, "mask_share": self.mask_share, "random_share": self.random_share}
        origin = "arguments of evenpack.RandomMasks"
        return DynamicMasks(
            masked_token=MASKED_TOKEN,
            next_sentence=NEXT_SENTENCE,
            recipe=DocumentsRecipe(kind="documents", max_sequence_length=pack_length),
            masking=validate({**shares, "max_predictions": 1 << 16}, MaskingConfig, origin=origin),
            vocabulary=MaskingVocabulary(mask_id=self.mask_token, special=special, continues=np.zeros_like(special)),
            seed=seed,
        )


class Loader:
    """One rank's micro-batches of an endless stream of steps; iterate over it, or over `steps()`.

        loader = evenpack.Loader(documents, pack_length=2048, packs_per_step=64, rank=rank, ranks=ranks)
        for batch in loader:
            ...  # batch.tokens, batch.position_ids, batch.cu_seqlens, batch.targets["next_token"]

    `state_dict()` and `load_state_dict()` are those of a checkpoint. docs/loader.md has the whole of it.
    """

    def __init__(
        self,
        documents: Any,
        *,
        packs_per_step: int,
        pack_length: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        micro_batches: int = 1,
        seed: int = 0,
        weights: Mapping[str, int] | None = None,
        steps: int | None = None,
        long_documents: Literal["split", "truncate", "drop", "error"] = "split",
        max_sequences_per_pack: int | None = None,
        packing: str = "auto",
        cost_weights: CostWeights | None = ATTENTION,
        balances_each_micro_batch: bool = False,
        objective: Objective | RandomMasks | None = None,
        padding_token: int = 0,
        vocabulary_size: int | None = None,
        cache: str | Path | None = None,
        workers: int = 0,
        arrays: Literal["torch", "numpy"] = "torch",
        stages: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Checks the settings; the documents are packed when the first batch, plan or state is asked for.

        Args:
            documents: lists of token ids; `TokenArrays`, which may be mapped; a Hugging Face dataset with a column
                `input_ids`, whose rows are divided where other columns mark several documents; the prefix of a token
                file (PREFIX.bin and PREFIX.idx, as Megatron-LM writes them); a mapping from names to several of these,
                with `weights`; or `PreparedData`.
            packs_per_step: packs of one optimizer update over all ranks.
            pack_length: slots of a pack; None: that of prepared data.
            micro_batches: parts of a rank's share of a step (gradient accumulation).
            weights: how often packs of each named source are drawn, in whole numbers.
            steps: steps after which iteration ends; None: never. An epoch has `packs / packs_per_step` of them.
            long_documents: what to do with documents longer than a pack.
            max_sequences_per_pack: None: no limit.
            packing: `auto` or an algorithm of docs/packing.md.
            cost_weights: the cost of a pack, by which a step is balanced over ranks, as equal numbers of packs with
                nearly equal costs; `per_token` does not count, since all packs have the same slots. None: packs are
                assigned in the order of their arrival.
            balances_each_micro_batch: whether ranks wait for each other in each micro-batch (FSDP, ZeRO 2 and 3) and
                not only in each step (DDP with `no_sync`, ZeRO 0 and 1).
            objective: None: the next token of each token, for prepared data as its recipe's `end_of_text_in_loss`
                says; `evenpack.RandomMasks` for models like BERT, and documents of your own.
            padding_token: the token in slots that hold none.
            vocabulary_size: checked in each batch; None: not checked.
            cache: folder in which packs are stored, so that the next loader of the same documents opens them at once.
            workers: processes that read ahead. They import the main script again, so a script that asks for some must
                begin its work below `if __name__ == "__main__":`.
            stages: changes at later steps, as `{"step": 1000, "weights": {"code": 3}, "packs_per_step": 128}`; `step`
                counts from 0, and what is left out stays. A source may have weight 0 before and after.
            arrays: `torch` for tensors, `numpy` for a machine without torch.

        Raises: ConfigError for numbers that do not fit together, with those that would, and for other types; DataError
            for documents that cannot be read, that are splits, or whose columns contradict each other, and from the
            first batch or plan for a damaged cache or damaged prepared data; PackingError for an unknown `packing`, and
            from the first batch, plan or state if the documents cannot be packed.
        """
        packs_per_step = _whole("packs_per_step", packs_per_step, 1, MOST_PACKS_A_STEP)
        ranks = _whole("ranks", ranks, 1, MOST_PACKS_A_STEP)
        micro_batches = _whole("micro_batches", micro_batches, 1, MOST_PACKS_A_STEP)
        rank = _whole("rank", rank, 0, ranks - 1)
        seed = _whole("seed", seed, 0, (1 << 63) - 1)
        workers = _whole("workers", workers, 0, 1 << 10)
        steps = MOST_STEPS if steps is None else _whole("steps", steps, 0, MOST_STEPS)
        _require_type("cost_weights", cost_weights, CostWeights, "evenpack.CostWeights or None")
        _require_type("objective", objective, Objective | RandomMasks, "evenpack.RandomMasks, an Objective or None")
        _require_type("cache", cache, str | Path, "the path of a folder or None")
        _require_type("balances_each_micro_batch", balances_each_micro_batch, bool, "True or False")
        if arrays not in ("torch", "numpy"):
            raise ConfigError(f"arrays must be 'torch' or 'numpy', found {arrays!r}")
        if arrays == "torch":
            require("torch", "arrays='torch' (the other choice is arrays='numpy')")
        if workers and arrays == "numpy":
            raise ConfigError("worker processes hand over torch tensors: take arrays='torch', or workers=0")
        if isinstance(objective, RandomMasks):
            if isinstance(documents, PreparedData):
                raise ConfigError(
                    "RandomMasks are for documents of your own, found prepared data: train it by its run file, or give "
                    "the prefix of a token file as documents"
                )
            if vocabulary_size not in (None, objective.vocabulary_size):
                raise ConfigError(
                    f"vocabulary_size is {vocabulary_size}, and that of RandomMasks {objective.vocabulary_size}: give "
                    "both the same, or only that of RandomMasks"
                )
            vocabulary_size = objective.vocabulary_size
        self.data = _training_data(
            documents,
            pack_length=pack_length,
            weights=weights,
            long_documents=long_documents,
            packing=validate(
                {"algorithm": packing, "max_sequences_per_pack": max_sequences_per_pack},
                PackingConfig,
                origin="arguments of evenpack.Loader",
            ),
            padding_token=padding_token,
            vocabulary_size=vocabulary_size,
            cache=None if cache is None else expand_user(cache),
        )
        self.data, self._stages = _staged(
            self.data, stages, packs_per_step=packs_per_step, ranks=ranks, micro_batches=micro_batches
        )
        if isinstance(objective, RandomMasks):
            objective = objective.drawn(self.data.pack_length, seed)
        elif objective is None:
            objective = NextTokens()
        shape = StepShape(
            batching="packs",
            items_per_step=packs_per_step,
            items_per_micro_batch=self._stages[0].items_per_micro_batch,
            layout="packed",
            isolate=True,
            reset_positions=True,
            policy="arrival" if cost_weights is None else "cost_balanced",
            cost_weights=(cost_weights or ATTENTION).in_layout("packed"),
            windows=() if cost_weights is None else tuple(cost_weights.per_pair_within),
            balances_each_micro_batch=balances_each_micro_batch,
        )
        self._settings = PipelineSettings(
            seed=seed,
            objective=objective,
            shape=shape,
            ranks=ranks,
            rank=rank,
            loader_workers=workers,
            pin_memory=False,
            stages=self._stages,
        )
        self._arrays = arrays
        self._stop = steps
        self.step = 0
        """The next step, counted from 0. Within a step it is that step, which a resumed loader reads as a whole."""

    def __repr__(self) -> str:
        """Returns a line with the share of this rank, and the step; it does not pack the documents."""
        one = self._settings
        share = f"{one.micro_batches} x {one.shape.items_per_micro_batch} of {one.shape.items_per_step} packs a step"
        return (
            f"Loader(packs of {self.pack_length:,}; rank {one.rank} of {one.ranks}: {share}; seed {one.seed}, "
            f"step {self.step})"
        )

    @property
    def rank(self) -> int:
        return self._settings.rank

    @property
    def ranks(self) -> int:
        return self._settings.ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in each step."""
        return self._settings.micro_batches

    @property
    def packs_per_step(self) -> int:
        """Packs of a step over all ranks; of the first stage, if there are several."""
        return self._settings.shape.items_per_step

    @property
    def has_equal_steps(self) -> bool:
        """Whether all steps have the same number of packs."""
        return all(stage.items_per_step == self.packs_per_step for stage in self._stages)

    @property
    def pack_length(self) -> int:
        """Slots of a pack."""
        return self.data.pack_length

    @cached_property
    def packs(self) -> int:
        """Packs of one epoch of all sources that are drawn, in any stage."""
        drawn = zip(*(stage.weights for stage in self._stages), strict=True)
        sources = self._dataset.planner.sources
        return sum(source.plan.packs for source, weights in zip(sources, drawn, strict=True) if any(weights))

    @property
    def accounting(self) -> dict[str, TokenAccounting]:
        """What became of the tokens of each source: kept, cut, dropped."""
        names = self.data.source_names
        return {name: source.view.accounting for name, source in zip(names, self._dataset.planner.sources, strict=True)}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides which packs form which step; ranks and micro-batches are not part of it."""
        return self._fingerprint_before(None)

    def _fingerprint_before(self, step: int | None) -> str:
        """Returns the hash of what decides the steps before this one; None: all steps."""
        stages = tuple(stage for stage in self._stages if step is None or stage.step < step or stage.step == 0)
        content = f"{self.data.fingerprint(self._settings.seed, stages=stages)} {self.packs_per_step} packs a step"
        return xxhash.xxh3_128_hexdigest(content.encode())

    def __iter__(self) -> "Iterator[PackedBatch[Any]]":
        """Yields this rank's micro-batches from `step` on, one after another.

        Raises: ConfigError if the loader was moved to another step in between.
        """
        for step in self._read():
            last = len(step.micro_batches) - 1
            for index, batch in enumerate(step.micro_batches):
                self._require_at(step.step)
                if index == last:
                    self.step = step.step + 1
                yield batch

    def steps(self) -> "Iterator[StepBatches]":
        """Yields this rank's share of each step from `step` on: its `step`, `micro_batches` and global `counts`.

        Raises: ConfigError if the loader was moved to another step in between.
        """
        for step in self._read():
            self._require_at(step.step)
            self.step = step.step + 1
            yield step

    def batches_of(self, step: int) -> "tuple[PackedBatch[Any], ...]":
        """Returns this rank's micro-batches of any step, counted from 0, at the same cost for each."""
        first = _whole("step", step, 0, MOST_STEPS) * self.micro_batches
        return tuple(self[first + index] for index in range(self.micro_batches))

    def __getitem__(self, index: int) -> "PackedBatch[Any]":
        """Returns micro-batch `index` of this rank: number `index % micro_batches` of step `index // micro_batches`.

        Raises: IndexError for an index before the first step or beyond the last; a loader has no end to count from.
        """
        self._require_own_process()
        if not isinstance(index, int | np.integer) or isinstance(index, bool):
            raise ConfigError(f"a loader takes the number of a micro-batch, a whole one, found loader[{index!r:.60}]")
        step = index // self.micro_batches
        if not 0 <= step <= MOST_STEPS:
            raise IndexError(f"micro-batches are counted from 0, in steps up to {MOST_STEPS:,}; found index {index}")
        batch = self._dataset.arrays(index)
        self._require_targets(step, batch.step_counts)
        return batch.tensors() if self._arrays == "torch" else batch

    def __len__(self) -> NoReturn:
        """Raises: a ConfigError that is a TypeError: there is no length, of which torch's DataLoader asks first."""
        raise _NoLengthError(f"an evenpack.Loader has no length: it is an endless stream of steps. {_NO_DATASET}")

    def __bool__(self) -> bool:
        return True

    def plan(self, step: int) -> StepPlan:
        """Returns all packs of a step, counted from 0, with their assignment to ranks. Reads lengths, no tokens."""
        return self._dataset.planner.plan(_whole("step", step, 0, MOST_STEPS))

    def state_dict(self) -> LoaderState:
        """Returns the state: equal on all ranks, and for a loader at any number of ranks and micro-batches."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self._fingerprint_before(self.step),
            "seed": self._settings.seed,
            "step": self.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the state's step.

        Raises: CheckpointError if it is not a state, or not that of these documents, packs and seed.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"a loader's state is what its `state_dict()` returned, a mapping, found {state!r:.60}"
            )
        missing = [key for key in LoaderState.__annotations__ if key not in state]
        if missing:
            raise CheckpointError(
                f"the loader's state has no {', '.join(missing)}: give what `state_dict()` of a loader returned"
            )
        if state["version"] != STATE_VERSION:
            raise CheckpointError(
                f"the loader's state has version {state['version']}, this evenpack reads {STATE_VERSION}: load it with "
                "the version that wrote it"
            )
        if state["seed"] != self._settings.seed:
            raise CheckpointError(
                f"the state is of seed {state['seed']}, this loader has seed {self._settings.seed}: make it with the "
                "same seed, or its steps would hold other packs"
            )
        step = _whole("the state's step", state["step"], 0, MOST_STEPS, error=CheckpointError)
        if state["fingerprint"] != (found := self._fingerprint_before(step)):
            raise CheckpointError(
                f"the state is of other data (fingerprint {state['fingerprint']}, this loader's is "
                f"{found}): documents, the order of sources, pack_length, packing, weights, packs_per_step and the "
                f"stages that begin before step {step} must be the same, and evenpack's version if it packs otherwise; "
                "rank, ranks, micro_batches, workers and later stages may differ"
            )
        self.step = step

    def _require_at(self, step: int) -> None:
        """Refuses to go on elsewhere: batches may be read ahead, so an iteration cannot follow a moved loader."""
        if self.step != step:
            raise ConfigError(
                f"this iteration continues at step {step}, and the loader is at step {self.step}: it was moved by "
                "load_state_dict or by another iteration; begin a new iteration after that, and use one at a time"
            )

    @staticmethod
    def _require_own_process() -> None:
        """Raises: ConfigError in a worker of torch's DataLoader, each of which would give the same batches again."""
        module: Any = sys.modules.get("torch.utils.data")
        if module is not None and module.get_worker_info() is not None:
            raise ConfigError(
                "an evenpack.Loader is read within a worker of torch's DataLoader: each worker would give every batch "
                f"again, and the state outside would stay behind. {_NO_DATASET}"
            )

    @cached_property
    def _verified(self) -> "OwnDocuments | PreparedData":
        """The data; prepared data is compared with its checksums first. Own documents have none, their cache has."""
        if isinstance(self.data, PreparedData):
            self.data.verify()
        return self.data

    @cached_property
    def _dataset(self) -> MicroBatchDataset:
        return MicroBatchDataset(self._verified, self._settings)

    def _read(self) -> Iterator[StepBatches]:
        self._require_own_process()
        self._warn_of_other_ranks()
        if self._settings.loader_workers == 0:
            for step in range(self.step, self._stop):
                yield StepBatches(step=step, micro_batches=self.batches_of(step))
            return
        steps = training_batches(
            self._verified,
            self._settings,
            start_step=self.step,
            stop_step=self._stop,
        )
        process = os.getpid()
        for found in steps:
            assert isinstance(found, StepBatches), "no step is skipped"
            self._require_targets(found.step, found.counts)
            yield found
            if os.getpid() != process:
                _OF_PARENTS.append(steps)  # closing it here would end the processes that the parent reads from
                raise ConfigError(
                    "this iteration began before a fork, and its worker processes belong to the parent: begin a new "
                    "one in this process, or take workers=0"
                )

    def _warn_of_other_ranks(self) -> None:
        """Logs a warning, once, on the first of several ranks of torch.distributed where `ranks` may be forgotten."""
        dist: Any = sys.modules.get("torch.distributed")
        if self.ranks > 1 or dist is None or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            _warn_once(
                f"torch.distributed has {dist.get_world_size()} ranks, and a loader is read that was made with ranks=1:"
                " where each rank reads one, all train the same whole steps. Give rank= and ranks=, unless they hold "
                "parts of one model, or this rank alone reads it"
            )

    @staticmethod
    def _require_targets(step: int, counts: StepCounts) -> None:
        """Refuses a step without targets, whose loss would be 0 / 0, on all ranks alike."""
        if counts.targets == 0:
            raise DataError(
                f"step {step} has no target: nothing is predicted in any of its {counts.packs} packs, so its loss "
                "would not be a number. Leave out documents that are one token long or have the label -100 "
                "everywhere, or take more packs_per_step"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnDocuments:
    """Documents of sources that are not prepared, and how they form packs; a `TrainingData`."""

    token_files: Mapping[str, TokenFile]
    """The documents of each source."""
    weights: tuple[int, ...]
    recipe: DocumentsRecipe
    packing: PackingConfig
    pack_length: int
    end_of_text_id: int
    vocabulary_size: int
    cache: Path | None

    def __repr__(self) -> str:
        """Returns a line with the size of each source."""
        sizes = (
            f"{name}: {one.documents:,} documents, {one.tokens:,} tokens" for name, one in self.token_files.items()
        )
        return f"OwnDocuments({'; '.join(sizes)}; packs of {self.pack_length:,})"

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(self.token_files)

    def fingerprint(self, seed: int, *, stages: Sequence[Stage]) -> str:
        """Returns a hash of everything that decides which packs form which step, but for the packs of the first one."""
        names = self.source_names
        weights = [sum(of_source) for of_source in zip(*(one.weights for one in stages), strict=True)]
        first = {one[0]: one[1] for one in by_name(names, stages[0].weights)}
        content: dict[str, Any] = {
            "sources": [
                # The packs, and not the algorithm alone: another version of it or of its solver finds others.
                [name, self._hashes[name], _hash_of_packs(self._packings[name]), first.get(name, 0)]
                for name, weight in zip(names, weights, strict=True)
                if weight
            ],
            "seed": seed,
        }
        if changes := changes_by_name(names, stages):
            content["stages"] = changes
        return hash_of_json(content)

    def ordered(self, names: Sequence[str]) -> "OwnDocuments":
        """Returns the same documents with the sources in this order."""
        weights = dict(zip(self.token_files, self.weights, strict=True))
        files = {name: self.token_files[name] for name in names}
        return replace(self, token_files=files, weights=tuple(weights[name] for name in names))

    @cached_property
    def _packings(self) -> dict[str, Packing]:
        """How the sequences of each source form packs; found once, and pickled for each worker process."""
        if self.cache is not None:
            return {name: open_packing(self._stored[name]) for name in self.token_files}
        return {
            name: pack_view(self._view(name, documents), self.packing, pack_length=self.pack_length)
            for name, documents in self.token_files.items()
        }

    def training_sources(self, *, seed: int, batching: Batching) -> tuple[PackedSource, ...]:
        assert batching == "packs", "a loader counts packs"
        sources = tuple(self._source(name, documents, seed) for name, documents in self.token_files.items())
        expect_random_reads(list(self.token_files.values()))
        return sources

    def _source(self, name: str, documents: TokenFile, seed: int) -> PackedSource:
        key = int(derive_key(seed, key_of_name(name)))
        if self.cache is None:
            view, packing = self._view(name, documents), self._packings[name]
            ids = np.empty(view.count, dtype=sequence_id_type(view.count))
            sort_chunks_by_length(length_chunks(view), packing.histogram, ids)
            plan: Any = PackPlan(packing, ids, key=key)
        else:
            view = cast(ViewOfDocuments, open_view(self._stored[name], documents, self.recipe))
            plan = open_plan(self._stored[name], key=key)
        return PackedSource(view=view, plan=plan, key=key_of_name(name))

    def _view(self, name: str, documents: TokenFile, directory: Path | None = None) -> ViewOfDocuments:
        view = build_view(self.recipe, documents, None, directory=directory)
        if view.count == 0:
            raise DataError(
                f"source '{name}' has {documents.documents} documents and no sequence to train on: a sequence has at "
                f"least {self.recipe.minimum_document_length} tokens"
            )
        return view

    @cached_property
    def _hashes(self) -> dict[str, str]:
        """The hash of each source's tokens and of what makes packs of them; read once."""
        recipe, packing = self.recipe.model_dump(), self.packing.model_dump()
        made = {"recipe": recipe, "packing": packing, "pack_length": self.pack_length}
        contents = {name: hash_content(documents) for name, documents in self.token_files.items()}
        return {name: hash_of_json({"content": content, **made}) for name, content in contents.items()}

    @cached_property
    def _stored(self) -> dict[str, Path]:
        """The folders of each source's view and plan, filled or verified; pickled for each worker process."""
        assert self.cache is not None, "asked of a loader with a cache alone"
        return {name: self._fill(name, documents, self.cache) for name, documents in self.token_files.items()}

    def _fill(self, name: str, documents: TokenFile, cache: Path) -> Path:
        """Returns a folder that this process has written whole, or that another one has and that is as it was then."""
        key = self._hashes[name]
        folder = cache / f"{key}-{_CACHE_VERSION}"
        if not folder.exists():
            try:
                with atomic_directory(folder) as unfinished:
                    view = self._view(name, documents, unfinished)
                    store_plan(unfinished, view, self.packing, pack_length=self.pack_length)
                    files = {one.name: asdict(digest_of(one).checksums()) for one in sorted(unfinished.iterdir())}
                    record = {"version": _CACHE_VERSION, "key": key, "files": files}
                    write_json(unfinished / _CHECKSUMS, with_checksum(record))
                return folder
            except OSError as error:
                if not folder.is_dir():  # else another rank was faster
                    reason = system_error(error, cache, then="begin again, or give another folder or no `cache`")
                    raise RunError(f"the loader's cache cannot be filled: {reason}") from error
        _verify(folder, key)
        return folder


def _verify(folder: Path, key: str) -> None:
    """Reads a folder of a cache. Raises: DataError if it is not as it was written, or cannot be read."""
    path = folder / _CHECKSUMS
    try:
        with explained(path, DataError):
            content = read_json(path)
        version = content.get("version", _CACHE_VERSION)
        if version != _CACHE_VERSION:
            raise DataError(f"{path} is of version {version!r}, expected {_CACHE_VERSION}; give another `cache`")
        if without_checksum(content)["key"] != key:
            raise ValueError("it is of other packs")
    except (FileNotFoundError, ValueError) as error:
        finding = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
        raise _damaged_cache(f"{path} is not as it was written ({finding})", folder) from error
    for name, record in content["files"].items():
        damage = find_first_damage(folder / name, Checksums.of_json(record))
        if damage is not None:
            raise DataError(damage.unreadable) if damage.unreadable else _damaged_cache(damage.describe(), folder)


def _damaged_cache(finding: str, folder: Path) -> DataError:
    return DataError(f"{finding}: the loader's cache is damaged. Remove {folder}, and the next loader fills it again")


def _training_data(
    documents: Any,
    *,
    pack_length: int | None,
    weights: Mapping[str, int] | None,
    long_documents: str,
    packing: PackingConfig,
    padding_token: int,
    vocabulary_size: int | None,
    cache: Path | None,
) -> "OwnDocuments | PreparedData":
    if isinstance(documents, PreparedData):
        if pack_length not in (None, documents.pack_length):
            raise ConfigError(f"the data was prepared with packs of {documents.pack_length}, found {pack_length}")
        settings = {
            "weights": (weights, None),
            "long_documents": (long_documents, "split"),
            "packing": (packing.algorithm, "auto"),
            "max_sequences_per_pack": (packing.max_sequences_per_pack, None),
            "padding_token": (padding_token, 0),
            "vocabulary_size": (vocabulary_size, None),
            "cache": (cache, None),
        }
        given = [name for name, (value, default) in settings.items() if value != default]
        if given:
            raise ConfigError(
                f"prepared data has its own {', '.join(given)}, as its run file says: leave them out, or change the "
                "run file"
            )
        return documents
    if pack_length is None:
        raise ConfigError("give pack_length, the slots of a pack")
    pack_length = _whole("pack_length", pack_length, 2, MOST_SLOTS)
    size = MOST_VOCABULARY if vocabulary_size is None else vocabulary_size
    size = _whole("vocabulary_size", size, 1, MOST_VOCABULARY)
    check_options(packing.algorithm, packing.options)
    named = documents if isinstance(documents, Mapping) else {_ONLY_SOURCE: documents}
    _check_names(named)
    token_files = {name: _opened(name, one) for name, one in named.items()}
    for name, one in token_files.items():
        _warn_of_rows(name, one)
    return OwnDocuments(
        token_files=token_files,
        weights=_checked_weights(list(token_files), weights),
        recipe=validate(
            {"kind": "documents", "max_sequence_length": pack_length, "long_documents": long_documents},
            DocumentsRecipe,
            origin="arguments of evenpack.Loader",
        ),
        packing=packing,
        pack_length=pack_length,
        end_of_text_id=_whole("padding_token", padding_token, 0, size - 1),
        vocabulary_size=size,
        cache=cache,
    )


def _check_names(named: Mapping[Any, Any]) -> None:
    """Checks the names of sources. Raises: ConfigError, and DataError for splits or columns instead of sources."""
    if not named:
        raise ConfigError("the mapping of sources is empty: give documents under at least one name")
    wrong = [name for name in named if not isinstance(name, str)]
    if wrong:
        raise ConfigError(f"the sources of a mapping must have strings as names, found {wrong[0]!r}")
    remedy = (
        f"and no split is named: give one, such as documents[{next(iter(named))!r}]. Sources of a mixture have other "
        "names, in a plain dict"
    )
    if _is_dataset_dict(named):
        raise DataError(f"the documents are of the splits {', '.join(named)}, {remedy}")
    refuse_splits(list(named), remedy)
    if len(named) > 1 and "input_ids" in named:
        raise DataError(
            f"a mapping gives sources by name, and {', '.join(named)} are columns: give one table of them, "
            "datasets.Dataset.from_dict(documents)"
        )


def _is_dataset_dict(documents: Any) -> bool:
    module = sys.modules.get("datasets")
    kinds = (getattr(module, name, None) for name in ("DatasetDict", "IterableDatasetDict"))
    return any(isinstance(kind, type) and isinstance(documents, kind) for kind in kinds)


def _opened(name: str, documents: Any) -> TokenFile:
    if isinstance(documents, Mapping):
        _check_names(documents)
    if isinstance(documents, TokenFile):
        return documents
    if isinstance(documents, str | Path):
        return TokenFile(expand_user(documents))
    if hasattr(documents, "column_names") and hasattr(documents, "select_columns"):
        if hasattr(documents, "__len__"):
            refuse_split_column(documents, name)
        return TokenRows(documents, name=name)
    table: Any = getattr(documents, "source", None)  # of a column, as of dataset["input_ids"]
    if hasattr(table, "select_columns"):
        kept = [one for one in table.column_names or () if one not in ABOUT_THE_LOSS or one == documents.column_name]
        return TokenRows(table.select_columns(kept), column=documents.column_name, name=name)
    if isinstance(documents, Sequence) or (isinstance(documents, np.ndarray) and documents.dtype == object):
        return TokenArrays.of_lists(documents, name=name)
    raise DataError(
        f"{name}: expected lists of token ids, evenpack.TokenArrays, a Hugging Face dataset or the prefix of a token "
        f"file, found {type(documents).__name__}"
    )


def _warn_of_rows(name: str, documents: TokenFile) -> None:
    """Warns of documents that are equally long: rows of a stream, or padded ones, whose borders no column tells."""
    _, lengths = documents.spans(np.arange(min(documents.documents, _COMPARED_DOCUMENTS)))
    if len(lengths) >= _FEWEST_COMPARED and lengths.min() == lengths.max() >= _SHORTEST_ROW:
        log.warning(
            "source '%s': its first %d documents have %s tokens each. If they are rows that were cut from a stream "
            "(`group_texts`, TRL's strategy `wrapped`) or padded, documents within a row see one another and padding "
            "is trained on: give the documents as they were before",
            name,
            len(lengths),
            f"{lengths[0]:,}",
        )


def _checked_weights(names: list[str], weights: Mapping[str, int] | None) -> tuple[int, ...]:
    if weights is None:
        if len(names) != 1:
            raise ConfigError(f"{len(names)} sources ({', '.join(names)}) need weights, one for each")
        return (1,)
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        raise ConfigError(f"weights must be a mapping from the sources {', '.join(names)}, found {weights!r}")
    return tuple(_whole(f"weights['{name}']", weights[name], 0, HIGHEST_WEIGHT) for name in names)


def _staged(
    data: "OwnDocuments | PreparedData",
    stages: Sequence[Mapping[str, Any]],
    *,
    packs_per_step: int,
    ranks: int,
    micro_batches: int,
) -> tuple["OwnDocuments | PreparedData", tuple[Stage, ...]]:
    """Returns the data with its sources in the order of their first stage, and all stages.

    Raises: ConfigError for stages that are out of order, or hold what a stage cannot change or ranks cannot divide.
    """
    weights, last = dict(zip(data.source_names, data.weights, strict=True)), 0
    found = [(0, weights, packs_per_step)]
    for stage in stages:
        _require_type("a stage", stage, Mapping, "a mapping with its step and what changes")
        if stage.keys() - {"step", "weights", "packs_per_step"} or len(stage) < 2:
            raise ConfigError(f"a stage has a step, and weights or packs_per_step to change, found {dict(stage)!r}")
        last = _whole("the step of a stage, after those before it,", stage.get("step"), last + 1, MOST_STEPS)
        changes = stage.get("weights") or {}
        _require_type("the weights of a stage", changes, Mapping, "a mapping from sources to weights")
        wrong = [name for name in changes if name not in weights]
        if wrong:
            raise ConfigError(
                f"the stage of step {last}: there is no source {wrong[0]!r}; {nearest(str(wrong[0]), list(weights))}"
            )
        weights = weights | {
            name: _whole(f"weights[{name!r}] of step {last}", weight, 0, HIGHEST_WEIGHT)
            for name, weight in changes.items()
        }
        packs_per_step = _whole(
            f"packs_per_step of step {last}", stage.get("packs_per_step", packs_per_step), 1, MOST_PACKS_A_STEP
        )
        found.append((last, weights, packs_per_step))
    for step, of_stage, _ in found:
        if not any(of_stage.values()):
            raise ConfigError(f"from step {step} every source has weight 0, so there is nothing to draw")
    first = {name: next((step for step, of_stage, _ in found if of_stage[name]), MOST_STEPS) for name in weights}
    names = sorted(weights, key=first.__getitem__)
    return data.ordered(names), tuple(
        Stage(
            step=step,
            weights=tuple(of_stage[name] for name in names),
            items_per_step=packs,
            items_per_micro_batch=_packs_per_micro_batch(packs, ranks, micro_batches),
        )
        for step, of_stage, packs in found
    )


def _packs_per_micro_batch(packs: int, ranks: int, micro_batches: int) -> int:
    """Returns how many packs a micro-batch has. Raises: ConfigError with what would divide the step."""
    size, rest = divmod(packs, ranks * micro_batches)
    if rest == 0:
        return size
    if packs % ranks:
        raise ConfigError(
            f"{packs} packs_per_step cannot be divided equally over {ranks} ranks: these numbers of ranks can, "
            f"{', '.join(map(str, divisors(packs)))}; another packs_per_step is another order"
        )
    raise ConfigError(
        f"{packs // ranks} packs a step and rank cannot be divided into {micro_batches} micro_batches: take one of "
        f"{', '.join(map(str, divisors(packs // ranks)))}"
    )


def _whole(name: str, value: Any, least: int, greatest: int, *, error: type[EvenpackError] = ConfigError) -> int:
    """Returns a number, numpy's among them, as an int. Raises: `error` if it is no such whole number."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or not least <= value <= greatest:
        raise error(f"{name} must be a whole number from {least:,} to {greatest:,}, found {value!r}")
    return int(value)


def _require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Checks an argument that may be None. Raises: ConfigError, also for a class in place of its instance."""
    if value is not None and (isinstance(value, type) or not isinstance(value, kind)):
        raise ConfigError(f"{name} must be {expected}, found {value!r}")


def _hash_of_packs(packing: Packing) -> str:
    digest = xxhash.xxh3_128()
    for values in (packing.depths, packing.slot_lengths, packing.counts):
        digest.update(np.ascontiguousarray(values, dtype="<i8").data)
    return digest.hexdigest()


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
