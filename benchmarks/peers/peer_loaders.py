"""The loaders that are compared: how each prepares the text, opens its epoch and goes on, and what a batch holds.

Each class calls its package in the way that the package's documentation recommends, and imports it when it is made, so
that every one runs in an environment of its own. Shapes: L = slots of a pack. Processes for loading are switched off
everywhere, so that the CPU time of a rank is that of its process.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Batch = Any
State = Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all loaders are asked for."""

    work: Path
    """The folder with `documents.jsonl`, one text a line, and the tokenizer's files."""
    pack_length: int
    packs_per_step: int
    """Packs of a step over all ranks."""
    packs_per_micro_batch: int
    documents_per_micro_batch: int
    """For loaders that count documents: as many as have about the tokens of `packs_per_micro_batch` packs."""
    documents: int
    tokens: int
    vocabulary: int
    begin: int
    """The token with which each document begins; it stands nowhere else."""
    end: int
    padding: int
    rank: int = 0
    ranks: int = 1
    seed: int = 0
    steps_between_checkpoints: int = 500
    """As torchtitan's default."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.packs_per_step // (self.packs_per_micro_batch * self.ranks)

    def folder(self, name: str) -> Path:
        """Returns the folder in which a loader keeps what it prepared."""
        return self.work / name

    def tokenizer(self) -> Any:
        """Returns the tokenizer, which puts `begin` and `end` around each document itself."""
        import tokenizers

        return tokenizers.Tokenizer.from_file(str(self.work / "tokenizer/tokenizer.json"))

    def texts(self) -> Iterator[str]:
        with (self.work / "documents.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one micro-batch: the tokens of each, its positions where the batch has some, and its keys."""

    tokens: list[np.ndarray]
    positions: list[np.ndarray] | None
    keys: dict[str, str] = field(default_factory=dict)


class PeerLoader(ABC):
    """One rank's micro-batches of one epoch."""

    def __init__(self, task: Task) -> None:
        """Imports the package and makes what is not the loader's own, such as a model; the clock does not run yet."""
        self.task = task

    @abstractmethod
    def prepare(self) -> None:
        """Does from the text what is done once for all runs."""

    @abstractmethod
    def batches(self, state: State | None) -> Iterator[Batch]:
        """Opens the loader and yields micro-batches to the end of the epoch, from the state if there is one."""

    @abstractmethod
    def state(self, read: int) -> State:
        """Returns what a checkpoint keeps of this rank once `read` micro-batches of the epoch were read."""

    def chosen(self, states: list[State]) -> State:
        """Returns this rank's state of those that all ranks saved, which may have been more or fewer."""
        return states[self.task.rank] if self.task.rank < len(states) else states[0]

    @abstractmethod
    def rows(self, batch: Batch) -> Rows:
        """Returns what a micro-batch holds."""


class Evenpack(PeerLoader):
    """`evenpack.Loader` on arrays of tokens, which are mapped, with its packs in a cache."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import torch

        import evenpack
        from evenpack.adapters.huggingface import ModelInputs

        self._package, self._class = evenpack, evenpack.Loader
        self._model_inputs = ModelInputs(
            config=None, causal=True, mask="none", first_position=0, dtype=torch.float32, embeddings=None
        )
        self._loader: Any = None
        self._place = (0, 0)

    def prepare(self) -> None:
        folder = self.task.folder("evenpack")
        folder.mkdir()
        ids = [encoding.ids for encoding in self.task.tokenizer().encode_batch(list(self.task.texts()))]
        np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum([len(document) for document in ids])]))
        np.save(folder / "tokens.npy", np.concatenate([np.array(document, dtype=np.uint16) for document in ids]))
        self._open()

    def _open(self) -> Any:
        task, folder = self.task, self.task.folder("evenpack")
        tokens, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "offsets"))
        loader = self._class(
            self._package.TokenArrays(tokens, offsets),
            pack_length=task.pack_length,
            packs_per_step=task.packs_per_step,
            rank=task.rank,
            ranks=task.ranks,
            micro_batches=task.micro_batches,
            seed=task.seed,
            padding_token=task.padding,
            cache=folder / "cache",
        )
        loader.packs  # noqa: B018 - fills the cache
        return loader

    def batches(self, state: State | None) -> Iterator[Batch]:
        self._loader = self._open()
        if state is not None:
            self._loader.load_state_dict(state)
        last = -(-self._loader.packs // self.task.packs_per_step) - 1
        for step in self._loader.steps():
            for index, batch in enumerate(step.micro_batches):
                self._place = (step.step, index)
                yield batch
            if step.step == last:
                return

    def state(self, read: int) -> State:
        return self._loader.state_dict()

    def rows(self, batch: Batch) -> Rows:
        """Returns the packs of this epoch: the stream goes on, so its last step has packs of the next one too."""
        inputs = self._model_inputs(batch)
        length = self.task.pack_length
        step, index = self._place
        packs = self._loader.plan(step).micro_batch(self.task.rank, index)
        in_epoch = packs.stream_positions < self._loader.packs
        tokens, positions = (
            [row for row, keep in zip(inputs[name].numpy().reshape(-1, length), in_epoch, strict=True) if keep]
            for name in ("input_ids", "position_ids")
        )
        return Rows(tokens=tokens, positions=positions, keys=_keys(inputs))


class OfTrainer(PeerLoader):
    """The data loader that transformers' `Trainer` makes; a state is the number of micro-batches, which it skips."""

    collator: Any = None
    strategy = "random"
    """Trainer's `train_sampling_strategy`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import accelerate
        import datasets
        import transformers

        datasets.disable_progress_bars()
        self._accelerate, self._datasets, self._transformers = accelerate, datasets, transformers
        self._model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=task.vocabulary,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=task.pack_length,
            )
        )
        self._tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(task.work / "tokenizer/tokenizer.json"),
            bos_token="<|begin|>",
            eos_token="<|endoftext|>",
            pad_token="<|padding|>",
        )

    def prepare(self) -> None:
        """Tokenises by `map`, and saves the data set."""
        texts = self._datasets.load_dataset(
            "json",
            data_files=str(self.task.work / "documents.jsonl"),
            split="train",
            cache_dir=str(self.task.folder(type(self).__name__) / "json"),
        )
        texts.map(self._tokenise, batched=True, remove_columns=["text"]).save_to_disk(
            str(self.task.folder(type(self).__name__) / "tokenised")
        )

    def _tokenise(self, rows: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": self._tokenizer(rows["text"])["input_ids"]}

    def _tokenised(self) -> Any:
        return self._datasets.load_from_disk(str(self.task.folder(type(self).__name__) / "tokenised"))

    def _arguments(self) -> dict[str, Any]:
        return {
            "output_dir": str(self.task.folder(type(self).__name__) / "output"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "seed": self.task.seed,
            "gradient_accumulation_steps": self.task.micro_batches,
            "train_sampling_strategy": self.strategy,
        }

    def _trainer(self) -> Any:
        raise NotImplementedError

    def batches(self, state: State | None) -> Iterator[Batch]:
        batches = self._trainer().get_train_dataloader()
        if state is not None:
            # As Trainer does: it divides by its own count of micro-batches in a step.
            batches = self._accelerate.skip_first_batches(batches, state["steps"] * self.task.micro_batches)
        yield from batches

    def state(self, read: int) -> State:
        return {"steps": read // self.task.micro_batches}

    def rows(self, batch: Batch) -> Rows:
        tokens = list(batch["input_ids"].numpy())
        positions = list(batch["position_ids"].numpy()) if "position_ids" in batch else None
        return Rows(tokens=tokens, positions=positions, keys=_keys(batch))


class Flattening(OfTrainer):
    """transformers' `Trainer` with `DataCollatorWithFlattening`; documents are truncated to the length of a pack."""

    def _tokenise(self, rows: dict[str, list[str]]) -> dict[str, Any]:
        ids = self._tokenizer(rows["text"], truncation=True, max_length=self.task.pack_length)["input_ids"]
        return {"input_ids": ids, "length": [len(document) for document in ids]}

    def _trainer(self) -> Any:
        arguments = self._arguments() | {
            "per_device_train_batch_size": self.task.documents_per_micro_batch,
            "remove_unused_columns": False,  # the sampler reads the column of lengths
        }
        return self._transformers.Trainer(
            model=self._model,
            args=self._transformers.TrainingArguments(**arguments),
            train_dataset=self._tokenised(),
            data_collator=self._transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        )


class FlatteningRebalanced(Flattening):
    """The same with Trainer's sampler that balances costs over ranks and micro-batches."""

    strategy = "batch_rebalance"


class TrlBestFit(OfTrainer):
    """TRL's `SFTTrainer` with `packing=True`, by `bfd`, its default."""

    packing_strategy = "bfd"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import trl

        self._trl = trl

    def prepare(self) -> None:
        """Tokenises, and lets SFTTrainer pack; `datasets` keeps what it packed."""
        super().prepare()
        self._trainer()

    def _trainer(self) -> Any:
        arguments = self._arguments() | {
            "per_device_train_batch_size": self.task.packs_per_micro_batch,
            "max_length": self.task.pack_length,
            "packing": True,
            "packing_strategy": self.packing_strategy,
        }
        return self._trl.SFTTrainer(
            model=self._model,
            args=self._trl.SFTConfig(**arguments),
            train_dataset=self._tokenised(),
            processing_class=self._tokenizer,
        )


class TrlBestFitSplit(TrlBestFit):
    """The same by `bfd_split`, which cuts documents that are longer than a pack into pieces."""

    packing_strategy = "bfd_split"


class TrlWrapped(TrlBestFit):
    """The same by `wrapped`, which cuts one stream of documents into rows."""

    packing_strategy = "wrapped"


class Torchtitan(PeerLoader):
    """torchtitan's `HuggingFaceTextDataLoader`, which tokenises as it reads, over a data set of `load_dataset`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import datasets
        from torchtitan.components.tokenizer import HuggingFaceTokenizer
        from torchtitan.hf_datasets import DatasetConfig, text_datasets

        datasets.disable_progress_bars()
        self._module = text_datasets
        self.tokenising_seconds = 0.0
        self._tokenizer = HuggingFaceTokenizer(tokenizer_path=str(task.work / "tokenizer"))
        self._encode = self._tokenizer.encode
        self._tokenizer.encode = self._timed_encode
        cache = str(task.folder("torchtitan"))
        text_datasets.DATASETS["own"] = DatasetConfig(
            path=str(task.work / "documents.jsonl"),
            loader=lambda path: datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache),
            sample_processor=lambda sample: sample["text"],
        )
        self._loader: Any = None

    def _timed_encode(self, *arguments: Any, **options: Any) -> list[int]:
        started = time.process_time()
        found = self._encode(*arguments, **options)
        self.tokenising_seconds += time.process_time() - started
        return found

    def prepare(self) -> None:
        """Converts the lines to Arrow, as `datasets` does the first time."""
        self._module.DATASETS["own"].loader(self._module.DATASETS["own"].path)

    def batches(self, state: State | None) -> Iterator[Batch]:
        task = self.task
        self._loader = self._module.HuggingFaceTextDataLoader(
            self._module.HuggingFaceTextDataLoader.Config(dataset="own", infinite=False),
            dp_world_size=task.ranks,
            dp_rank=task.rank,
            tokenizer=self._tokenizer,
            seq_len=task.pack_length,
            local_batch_size=task.packs_per_micro_batch,
            snapshot_every_n_steps=task.steps_between_checkpoints * task.micro_batches,
        )
        if state is not None:
            self._loader.load_state_dict(state)
        yield from self._loader

    def state(self, read: int) -> State:
        return self._loader.state_dict()

    def chosen(self, states: list[State]) -> State:
        """Returns all entries, as the distributed checkpoint has them: one for each rank, and the number of ranks."""
        return {name: value for state in states for name, value in state.items()}

    def rows(self, batch: Batch) -> Rows:
        inputs, _ = batch
        return Rows(
            tokens=list(inputs["input"].numpy()), positions=list(inputs["positions"].numpy()), keys=_keys(inputs)
        )


class LitData(PeerLoader):
    """litData's `StreamingDataset` with `TokensLoader`, from files that its `optimize` wrote, in shuffled order."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        import litdata

        self._package = litdata
        self._loader: Any = None

    def prepare(self) -> None:
        folder = self.task.folder("litdata")
        self._package.optimize(
            fn=_TokensOf(self.task),
            inputs=[str(self.task.work / "documents.jsonl")],
            output_dir=str(folder),
            num_workers=1,
            chunk_bytes="64MB",
            item_loader=self._package.TokensLoader(),
        )

    def batches(self, state: State | None) -> Iterator[Batch]:
        task = self.task
        data = self._package.StreamingDataset(
            input_dir=str(task.folder("litdata")),
            item_loader=self._package.TokensLoader(block_size=task.pack_length),
            shuffle=True,
            drop_last=True,
            seed=task.seed,
        )
        self._loader = self._package.StreamingDataLoader(
            data, batch_size=task.packs_per_micro_batch, num_workers=0, drop_last=True
        )
        if state is not None:
            self._loader.load_state_dict(state)
        yield from self._loader

    def state(self, read: int) -> State:
        return self._loader.state_dict()

    def rows(self, batch: Batch) -> Rows:
        return Rows(tokens=list(batch.numpy()), positions=None, keys=_keys({"(a tensor)": batch}))


class _TokensOf:
    """Yields the tokens of each document of a file; litData pickles it for its workers."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, _: str) -> Iterator[Any]:
        import torch

        tokenizer = self.task.tokenizer()
        for text in self.task.texts():
            yield torch.tensor(tokenizer.encode(text).ids, dtype=torch.int32)


def _keys(batch: dict[str, Any]) -> dict[str, str]:
    """Returns the keys of a batch with the type and the shape of each."""
    return {name: str(getattr(value, "shape", type(value).__name__)) for name, value in batch.items()}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One loader of the comparison."""

    name: str
    loader: type[PeerLoader]
    environment: str
    """Its environment in environments.toml; `evenpack` is the one that runs `loaders.py`."""


MODULES = {
    "evenpack": ("evenpack.data.loader", "evenpack.adapters.huggingface", "evenpack.data.order.stored_plan"),
    "trl": ("trl", "trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama"),
    "transformers": ("transformers.trainer", "accelerate", "datasets", "transformers.models.llama.modeling_llama"),
    "torchtitan": ("torchtitan.hf_datasets.text_datasets", "torchtitan.components.tokenizer"),
    "litdata": ("litdata",),
}
"""What is imported in each environment before a clock runs."""

PEERS = {
    peer: Peer(name=name, loader=loader, environment=environment)
    for peer, name, loader, environment in (
        ("evenpack", "evenpack.Loader", Evenpack, "evenpack"),
        ("trl_bfd", "TRL, bfd", TrlBestFit, "trl"),
        ("trl_bfd_split", "TRL, bfd_split", TrlBestFitSplit, "trl"),
        ("trl_wrapped", "TRL, wrapped", TrlWrapped, "trl"),
        ("flattening", "transformers, flattening", Flattening, "transformers"),
        ("rebalanced", "transformers, flattening and batch_rebalance", FlatteningRebalanced, "transformers"),
        ("torchtitan", "torchtitan", Torchtitan, "torchtitan"),
        ("litdata", "litData", LitData, "litdata"),
    )
}
