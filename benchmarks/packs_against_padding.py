"""Measures in trainers of others how many more sequences/s a Loader's packs give than rows that are padded.

    OMP_NUM_THREADS=1 python benchmarks/packs_against_padding.py [--hosts DDP Lightning] [--rounds 5] [--json FILE]

The same documents, model and number of slots, in each host: packs through its adapter, and one document a row, padded
to the length of a pack, by a DataLoader as one writes it there. An ideal host gives as many times more sequences/s as a
pack has sequences (the packing factor); the report says which share of that is reached. Sequences per CPU second of the
process, one thread, whole updates with accumulation; segments of both take turns, and ratios are within a pair of
segments, whose order alternates. Medians. The model is wide for its packs, so that attention does not decide: SDPA
computes scores between all packs of a micro-batch, most of which a mask then removes.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import measuring
import numpy as np

import evenpack

LENGTH = 128
MICRO_BATCHES = 2
PACKS = 2
"""Packs, or padded rows, of a micro-batch."""
VOCABULARY = 2048
STEPS = 3
"""Updates of a segment."""

Segment = Callable[[int], tuple[float, int]]
"""Trains for so many updates; returns CPU seconds and sequences, of all but the first update."""


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--hosts", nargs="+", default=list(HOSTS), choices=list(HOSTS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for host in arguments.hosts:
        row = measuring.in_own_process(measure, host, arguments.rounds)
        rows.append(row)
        rates = f"{row['padding']:7.1f} -> {row['packs']:7.1f} sequences/CPU s"
        print(
            f"{row['host']:22}  {rates}  x{row['speed_up']:.2f} of x{row['packing_factor']:.2f}: {row['share']:.3f}",
            flush=True,
        )
    settings = {"pack_length": LENGTH, "packs_per_micro_batch": PACKS, "micro_batches": MICRO_BATCHES, "steps": STEPS}
    measuring.write_report({**settings, "rows": rows}, arguments.json)


def measure(host: str, rounds: int) -> dict[str, Any]:
    """Returns the medians of some pairs of segments in one host."""
    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arms = HOSTS[host](folder)
        pairs = []
        for index in range(rounds + 1):
            order = ("packs", "padding") if index % 2 else ("padding", "packs")
            pairs.append({arm: arms[arm](1 + STEPS) for arm in order})
    found = []
    for pair in pairs[1:]:  # the first one warms up
        (packs_seconds, sequences), (rows_seconds, rows) = pair["packs"], pair["padding"]
        factor = sequences / (STEPS * MICRO_BATCHES * PACKS)
        speed_up = sequences / packs_seconds * rows_seconds / rows
        found.append((sequences / packs_seconds, rows / rows_seconds, speed_up, factor, speed_up / factor))
    names = ("packs", "padding", "speed_up", "packing_factor", "share")
    medians = {name: statistics.median(values) for name, values in zip(names, zip(*found, strict=True), strict=True)}
    return {"host": host, **medians, "shares": [one[-1] for one in found]}


def documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(3.9, 0.6, 6_000), 8, LENGTH).astype(np.int64)
    return [random.integers(1, VOCABULARY, length) for length in lengths]


def own_settings() -> dict[str, Any]:
    packs = PACKS * MICRO_BATCHES
    return {"pack_length": LENGTH, "packs_per_step": packs, "packing": "longest_pack_first"}


def own_loader() -> evenpack.Loader:
    return evenpack.Loader(documents(), micro_batches=MICRO_BATCHES, **own_settings())


def padded_rows() -> list[dict[str, Any]]:
    """Returns the documents as rows of a dataset, as a collator that pads would make them."""
    import torch

    rows = []
    for one in documents():
        tokens = torch.zeros(LENGTH, dtype=torch.int64)
        tokens[: len(one)] = torch.from_numpy(one)
        there = (torch.arange(LENGTH) < len(one)).long()
        rows.append({"input_ids": tokens, "attention_mask": there, "labels": tokens.masked_fill(there == 0, -100)})
    return rows


def padded_batches() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(padded_rows(), batch_size=PACKS, shuffle=True)  # type: ignore[arg-type]


def build_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


def sequences_of(loader: evenpack.Loader, first: int, last: int) -> int:
    return sum(loader.plan(step).counts.sequences for step in range(first, last))


def loops(update: Callable[[list[dict[str, Any]], bool], None], batches: Any = None) -> dict[str, Segment]:
    """Returns the segments of a host in which one writes the loop: `update` trains on the inputs of one update.

    Args:
        update: takes them, and whether their loss is a share of the step's mean, to be added.
        batches: the host's DataLoader of padded rows.
    """
    import torch

    from evenpack.adapters.huggingface import ModelInputs

    model_inputs = ModelInputs(
        config=None, causal=True, mask="none", first_position=0, dtype=torch.float32, embeddings=None
    )
    loader = own_loader()
    rows = padded_batches() if batches is None else batches

    def updates_of_packs() -> Iterator[list[dict[str, Any]]]:
        for step in loader.steps():
            count = {"num_items_in_batch": step.counts.targets}
            yield [{**model_inputs(batch), **count} for batch in step.micro_batches]

    def updates_of_rows() -> Iterator[list[dict[str, Any]]]:
        while True:
            one = iter(rows)
            while len(update := list(islice(one, MICRO_BATCHES))) == MICRO_BATCHES:
                yield update

    def run(steps: int, updates: Iterator[list[dict[str, Any]]], is_share: bool) -> float:
        update(next(updates), is_share)
        started = time.process_time()
        for _ in range(steps - 1):
            update(next(updates), is_share)
        return time.process_time() - started

    of_packs, of_rows = updates_of_packs(), updates_of_rows()

    def packs(steps: int) -> tuple[float, int]:
        first = loader.step + 1
        return run(steps, of_packs, True), sequences_of(loader, first, loader.step)

    def padding(steps: int) -> tuple[float, int]:
        return run(steps, of_rows, False), (steps - 1) * MICRO_BATCHES * PACKS

    return {"packs": packs, "padding": padding}


def one_rank(folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)


def ddp(folder: str) -> dict[str, Segment]:
    from contextlib import nullcontext

    import torch
    from torch.nn.parallel import DistributedDataParallel

    one_rank(folder)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(inputs: list[dict[str, Any]], is_share: bool) -> None:
        for index, given in enumerate(inputs):
            with nullcontext() if index == MICRO_BATCHES - 1 else model.no_sync():
                (model(**given).loss / (1 if is_share else MICRO_BATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loops(update)


def fsdp2(folder: str) -> dict[str, Segment]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one_rank(folder)
    model = build_model()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(inputs: list[dict[str, Any]], is_share: bool) -> None:
        for index, given in enumerate(inputs):
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
            (model(**given).loss / (1 if is_share else MICRO_BATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loops(update)


def deepspeed_initialize(folder: str) -> dict[str, Segment]:
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    one_rank(folder)
    model = build_model()
    settings = {
        "train_batch_size": PACKS * MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 1 << 30,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def update(inputs: list[dict[str, Any]], is_share: bool) -> None:
        for given in inputs:
            engine.backward(engine(**given).loss * (MICRO_BATCHES if is_share else 1))
            engine.step()

    return loops(update)


def accelerate(folder: str) -> dict[str, Segment]:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, rows = accelerator.prepare(model, optimizer, padded_batches())

    def update(inputs: list[dict[str, Any]], is_share: bool) -> None:
        for given in inputs:
            accelerator.backward(model(**given).loss / (1 if is_share else MICRO_BATCHES))
        optimizer.step()
        optimizer.zero_grad()

    return loops(update, rows)


def trainer(folder: str) -> dict[str, Segment]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from evenpack.adapters.trainer import PackTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times.append(time.process_time())

    model, rows = build_model(), padded_rows()

    def arguments(steps: int) -> Any:
        quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
        plain = {"optim": "sgd", "per_device_train_batch_size": PACKS, "gradient_accumulation_steps": MICRO_BATCHES}
        return TrainingArguments(output_dir=folder, max_steps=steps, logging_strategy="no", **quiet, **plain)

    def timed(one: Any) -> float:
        one.add_callback(clock := Clock())
        one.train()
        return clock.times[-1] - clock.times[0]

    def packs(steps: int) -> tuple[float, int]:
        loader = own_loader()
        return timed(PackTrainer(model=model, args=arguments(steps), loader=loader)), sequences_of(loader, 1, steps)

    def padding(steps: int) -> tuple[float, int]:
        one = Trainer(model=model, args=arguments(steps), train_dataset=rows)
        return timed(one), (steps - 1) * MICRO_BATCHES * PACKS

    return {"packs": packs, "padding": padding}


def lightning(folder: str) -> dict[str, Segment]:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from evenpack.adapters.lightning import PackDataModule

    class Model(LightningModule):  # type: ignore[misc]  # lightning is not typed here
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.model, self.factor, self.times = build_model(), factor, list[float]()

        def training_step(self, inputs: dict[str, Any], _index: int) -> Any:
            return self.model(**inputs).loss * self.factor

        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.times) < self.trainer.global_step:
                self.times.append(time.process_time())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def timed(steps: int, factor: int, data: Any) -> float:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        settings = {"max_steps": steps, "accumulate_grad_batches": MICRO_BATCHES, "accelerator": "cpu", "devices": 1}
        model = Model(factor)
        fitting = Trainer(enable_checkpointing=False, default_root_dir=folder, **settings, **quiet)
        fitting.fit(model, datamodule=data) if isinstance(data, PackDataModule) else fitting.fit(model, data)
        return model.times[-1] - model.times[0]

    rows = padded_batches()

    def packs(steps: int) -> tuple[float, int]:
        data = PackDataModule(documents(), **own_settings())
        return timed(steps, MICRO_BATCHES, data), sequences_of(data.loader, 1, steps)

    def padding(steps: int) -> tuple[float, int]:
        return timed(steps, 1, rows), (steps - 1) * MICRO_BATCHES * PACKS

    return {"packs": packs, "padding": padding}


HOSTS: dict[str, Callable[[str], dict[str, Segment]]] = {
    "transformers' Trainer": trainer,
    "accelerate": accelerate,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "DeepSpeed's initialize": deepspeed_initialize,
    "Lightning": lightning,
}

if __name__ == "__main__":
    main()
