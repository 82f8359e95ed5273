"""transformers' Trainer on the packs of a Loader, over real processes."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RanksFailed, run_ranks
from host_trainers import (
    PACKS_PER_STEP,
    alone,
    kept_gradients,
    own_loader,
    plain_inputs,
    planned_by_step,
    read_by_step,
    relative_error,
    tiny_llama,
    watched,
)
from slow_cases import slow_but
from tiny_training import logged
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

import evenpack
from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.isolation import prove_isolation
from evenpack.adapters.trainer import PackTrainer
from evenpack.data.loader import ATTENTION
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError

STEPS = 6
_SAVED = 2


def arguments(folder: Path | str, **settings: Any) -> TrainingArguments:
    settings = {"max_steps": STEPS, "save_strategy": "no", "logging_steps": 1, "max_grad_norm": 0.0, **settings}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), optim="sgd", learning_rate=0.1, **quiet, **settings)


def train(
    world: World, folder: str, micro_batches: int, settings: dict[str, Any], resume: str | None
) -> dict[str, Any]:
    """Trains on this rank; returns what the model read of each step, its losses and gradients."""
    dies_at = settings.pop("dies_at", None)
    loader = own_loader(world.rank, world.size, micro_batches=micro_batches)
    model = tiny_llama()
    read = watched(model, lambda: trainer.state.global_step)
    trainer = PackTrainer(
        model=model, args=arguments(folder, gradient_accumulation_steps=micro_batches, **settings), loader=loader
    )
    gradients = kept_gradients(trainer, dies_at=dies_at)
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    epochs = [line["epoch"] for line in trainer.state.log_history if "loss" in line]
    return {"read": read, "losses": losses, "gradients": gradients, "epochs": epochs}


def train_each(world: World, folder: str) -> dict[int, dict[str, Any]]:
    """Returns what `train` does, by number of micro-batches."""
    return {count: train(world, folder, count, {"max_steps": 2}, None) for count in (1, 2, 4)}


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 4]))
def test_loss_and_gradients_are_those_of_documents_alone(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(train_each, ranks, str(tmp_path))
    loss, gradients = alone(tiny_llama(), own_loader(), 0)
    for micro_batches in (1, 2, 4):
        here = [result[micro_batches] for result in results]
        for one in here:
            assert one["losses"][0] == pytest.approx(loss, rel=1e-6)
            assert relative_error(one["gradients"][0], gradients) < 1e-6
        read = read_by_step(one["read"] for one in here)
        assert read == planned_by_step(own_loader(), range(2))
        assert all(len(packs) == PACKS_PER_STEP for packs in read.values())


def test_a_killed_run_goes_on_at_other_numbers_of_processes_in_one_order(tmp_path: Path) -> None:
    """Two processes are killed in step 3, one goes on from step 2 and is killed in step 5, four go on from step 4."""
    saving = {"save_strategy": "steps", "save_steps": _SAVED}
    straight = run_ranks(train, 1, str(tmp_path / "whole"), 1, {}, None)
    whole = read_by_step(one["read"] for one in straight)
    assert whole == planned_by_step(own_loader(), range(STEPS))
    assert len({pack for packs in whole.values() for pack in packs}) == STEPS * PACKS_PER_STEP

    folder = tmp_path / "killed"
    with pytest.raises(RanksFailed):
        run_ranks(train, 2, str(folder), 2, {**saving, "dies_at": 3}, None)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2"]
    with pytest.raises(RanksFailed):
        run_ranks(train, 1, str(folder), 4, {**saving, "dies_at": 5}, str(folder / "checkpoint-2"))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    last = run_ranks(train, 4, str(folder), 1, saving, str(folder / "checkpoint-4"))
    read = read_by_step(one["read"] for one in last)
    assert read == {step: whole[step] for step in (4, 5)}
    assert last[0]["losses"] == pytest.approx(straight[0]["losses"], rel=1e-5)
    assert last[0]["epochs"] == pytest.approx(straight[0]["epochs"])


class Feeding(IterableDataset):
    """The micro-batches of a trainer as a dataset of tensors, as a user might write it."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed

    def __iter__(self) -> Any:
        return ({key: value for key, value in one.items() if torch.is_tensor(value)} for one in self.feed)


class DispatchingTrainer(PackTrainer):
    def get_train_dataloader(self) -> Any:
        feed = super().get_train_dataloader()
        return self.accelerator.prepare(DataLoader(Feeding(feed), batch_size=None))


class ShardingTrainer(PackTrainer):
    def get_train_dataloader(self) -> Any:
        rows = list(itertools.islice(super().get_train_dataloader(), 12))
        return self.accelerator.prepare(DataLoader(rows, batch_size=1, collate_fn=lambda chosen: chosen[0]))


def spoil(world: World, folder: str) -> list[str]:
    """Returns what is said of hosts and loaders that lose, repeat or change packs."""
    texts = []
    for kind in (DispatchingTrainer, ShardingTrainer):
        loader = own_loader(world.rank, world.size, micro_batches=2)
        trainer = kind(model=tiny_llama(), args=arguments(folder, gradient_accumulation_steps=2), loader=loader)
        texts.append(_refusal(trainer.train))
    twice = own_loader(0, world.size)
    texts.append(_refusal(lambda: PackTrainer(model=tiny_llama(), args=arguments(folder), loader=twice)))
    texts.append(_refusal(lambda: _require(twice)))
    otherwise = own_loader(world.rank, world.size, cost_weights=None if world.rank else ATTENTION)
    texts.append(_refusal(lambda: _require(otherwise)))
    texts.append(_refusal(lambda: _require(own_loader(world.rank, world.size, seed=world.rank))))
    _require(own_loader(world.rank, world.size))
    return texts


def _require(loader: evenpack.Loader) -> None:
    form = plain_inputs()
    require_whole_step(loader, 0, [form(batch) for batch in loader.batches_of(0)], form)


def _refusal(action: Any) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return "nothing was said"


def test_a_host_that_changes_batches_is_refused_in_the_first_step_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(spoil, 2, str(tmp_path))
    for rank, (dispatched, sharded, own, twice, otherwise, seeds) in enumerate(results):
        assert "step 0 is not what evenpack's loader made: rank 0: micro-batch 0: expected input_ids" in dispatched
        assert "step 0 is not what evenpack's loader made: rank 0: micro-batch 1: input_ids has other" in sharded
        assert ("nothing was said" if rank == 0 else "process 1 of 2, and the loader was made for rank 0") in own
        assert "(rank, ranks) = (0, 2), (0, 2): make each with the rank of its process" in twice
        assert "the ranks together do not hold each pack of the plan once" in otherwise
        assert "different documents, seeds or packs" in seeds


def prove_other_shares(world: World) -> list[str]:
    """Returns what is said of loaders that are no shares of the same step, and of those that are."""
    first, second = (world.rank, world.size), (0, 1)
    moved = own_loader(*first)
    moved.step = world.rank
    loaders = [own_loader(0, world.size), own_loader(*first, seed=world.rank), own_loader(*(second, first)[world.rank])]
    texts = [_refusal(lambda one=one: prove_isolation(tiny_llama(), one)) for one in (*loaders, moved)]
    for place in (second, first):
        loader = own_loader(*place)
        prove_isolation(tiny_llama(), loader)
        with logged("evenpack.data.loader") as messages:
            next(loader.steps())
        texts.append(" ".join(messages))
    return texts


def test_loaders_that_are_no_shares_of_the_same_step_are_refused_with_the_proof_of_isolation() -> None:
    for rank, (twice, seeds, unequal, moved, whole, shares) in enumerate(run_ranks(prove_other_shares, 2)):
        assert "do not make shares of the same step: 2 processes train, and their loaders were made with (rank" in twice
        assert "different documents, seeds or packs: rank 0 " in seeds
        assert "(rank, ranks) = (0, 1), (1, 2): make each with the rank of its process, and ranks=2" in unequal
        assert "they are at different steps: rank 0 0, rank 1 1" in moved
        said = "torch.distributed has 2 ranks, and a loader is read that was made with ranks=1"
        assert whole.startswith(said) if rank == 0 else whole == ""
        assert shares == ""


def prove_where_one_leaks(world: World) -> list[str]:
    """Returns what each rank says where rank 1's model loses its borders: in every row, and in micro-batches alone."""
    texts = []
    for slots in (0, 100):

        def lose(_: Any, arguments: Any, inputs: dict[str, Any], longer: int = slots) -> Any:
            if world.rank == 1 and inputs["input_ids"].shape[1] > longer:
                inputs.update(position_ids=None, attention_mask=None)
            return arguments, inputs

        model = tiny_llama().train()
        model.register_forward_pre_hook(lose, with_kwargs=True)
        loader = own_loader(world.rank, world.size)
        texts.append(_refusal(lambda model=model, loader=loader: prove_isolation(model, loader)))
    return texts


def test_ranks_decide_alike_where_one_of_them_alone_sees_a_leak() -> None:
    first, second = run_ranks(prove_where_one_leaks, 2)
    assert first == second
    assert all("LlamaForCausalLM is not proved to keep the sequences of a pack apart" in text for text in first)
