"""No sequence of a run's batches attends to another, and no backend is a fallback, on ranks (invariants 2 and 8)."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import roughen
from run_files import changed, pair_run_values, prepared, run_config, text_sources
from tiny_training import logged, never, prepare_run, train_all

from evenpack.batch import PackedBatch
from evenpack.engine.build import TrainingRun, build_at, find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World, configure_logging
from evenpack.errors import BackendError

LINES = [f"{number} {'pack ' * (number % 5)}{number * number}. And {number} more. Then all." for number in range(60)]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Returns a causal and a bidirectional run in packs of several sequences."""
    causal = prepare_run(tmp_path_factory.mktemp("causal"), {"lines": [line[:14] for line in LINES]}, steps=1)
    folder = tmp_path_factory.mktemp("both_ways")
    values = pair_run_values("bert", folder, data={"sources": text_sources(folder, {"lines": LINES})})
    return {"gpt2": causal, "bert": prepared(run_config(values))}


@dataclass(frozen=True, kw_only=True)
class Felt:
    """The change of the last hidden states after the tokens of one sequence changed."""

    there: float
    """In the sequence itself."""
    elsewhere: float
    """The largest change in all other slots."""


def probe(world: World, configs: dict[str, RunConfig]) -> dict[str, list[Felt]]:
    """Changes each sequence of this rank's first micro-batch; in `mixed ...` each pack is one segment."""
    found = {}
    for name, config in configs.items():
        borders = first_batch(build_at(find_start(open_run(config), world))).cu_seqlens.tolist()
        sequences = [slice(start, stop) for start, stop in pairwise(borders) if start < stop]
        for label, isolate in ((name, True), (f"mixed {name}", False)):
            run = build_at(find_start(open_run(changed(config, attention={"isolate": isolate})), world))
            roughen(run.engine.model)
            model, batch = run.engine.model.eval(), first_batch(run)
            found[label] = [feel(model, batch, sequence) for sequence in sequences]
    return found


def first_batch(run: TrainingRun) -> PackedBatch:
    return next(run.start.batches(stop_step=1)).micro_batches[0]


def feel(model: torch.nn.Module, batch: PackedBatch, sequence: slice) -> Felt:
    tokens = batch.tokens.clone()
    tokens[sequence] = (tokens[sequence] + 1) % 100
    moved = (last_hidden(model, replace(batch, tokens=tokens)) - last_hidden(model, batch)).abs().amax(dim=-1)
    there = torch.zeros(batch.slots, dtype=torch.bool)
    there[sequence] = True
    return Felt(there=moved[there].max().item(), elsewhere=moved[~there].max().item())


@torch.no_grad()
def last_hidden(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model.get_submodule("blocks")[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    model(batch)
    hook.remove()
    return seen[0].reshape(batch.slots, -1)


def test_no_sequence_of_a_runs_own_batches_affects_another_on_any_rank(configs: dict[str, RunConfig]) -> None:
    for felt in run_ranks(probe, 2, configs):
        for name in configs:
            assert len(felt[name]) > 4
            assert {one.elsewhere for one in felt[name]} == {0.0}, name
            assert min(one.there for one in felt[name]) > 1e-3
            assert max(one.elsewhere for one in felt[f"mixed {name}"]) > 1e-3, "the probe sees a leak"


def refused(world: World, config: RunConfig) -> str:
    with pytest.raises(BackendError) as caught:
        train_in(world, config, stop_requested=never)
    return str(caught.value)


def test_a_backend_that_cannot_serve_is_refused_on_every_rank(configs: dict[str, RunConfig], tmp_path: Path) -> None:
    config = changed(configs["gpt2"], attention={"backend": "varlen"}, run={"output_dir": tmp_path})
    for message in run_ranks(refused, 2, config):
        assert "attention backend 'varlen' cannot serve" in message
        assert "it needs a CUDA device, not cpu" in message
    assert not (tmp_path / "summary.json").exists()


def told(world: World, config: RunConfig) -> list[str]:
    """Returns the messages that this rank logs."""
    configure_logging(world)
    with logged() as said:
        train_all(world, [config])
    return said


def test_what_auto_took_is_said_once_by_one_rank(configs: dict[str, RunConfig], tmp_path: Path) -> None:
    first, second = run_ranks(told, 2, changed(configs["gpt2"], run={"output_dir": tmp_path}))
    assert len([line for line in first if line.startswith("attention backend auto chose sdpa")]) == 1
    assert second == []
