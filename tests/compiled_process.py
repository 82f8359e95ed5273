"""Trains with and without torch.compile in a process of its own: `compiled_process.py FOLDER JOB ...`, JSON to JSON.

The checks of shapes and types in the other tests are wrappers that torch.compile would have to trace, so this process
has none. A job's keys are the defaults of `Job`; each has a line of results.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, trained eagerly and compiled."""

    kind: str = "gpt2"
    layout: str = "packed"
    batching: str = "packs"
    assignment: str | None = None
    positions: str = "learned"
    backend: str = "auto"
    dropout: float = 0.0
    checkpointing: bool = False
    zero_stage: int = 0
    steps: int = 12
    code: str = "inductor"
    """Backend of torch.compile; `aot_eager` makes the same graphs and no code."""
    is_engine: bool = True
    """Whether DeepSpeed's engine takes the steps; else the model alone is called, over batches made by hand."""


@contextmanager
def compiling_by(code: str) -> Iterator[None]:
    """Lets torch.compile use another of its backends."""
    originals = torch.compile, torch.nn.Module.compile
    torch.compile = functools.partial(originals[0], backend=code)
    torch.nn.Module.compile = functools.partialmethod(originals[1], backend=code)
    try:
        yield
    finally:
        torch.compile, torch.nn.Module.compile = originals


def taken_by_hand(job: Job, compiled: bool) -> dict[str, Any]:
    """Training and evaluation passes of a model over batches of other lengths each, and of other room for segments."""
    from batches import build_batch, random_sequences

    from evenpack.config import validate
    from evenpack.models.build import new_model
    from evenpack.models.families import find_family

    section = {
        "kind": job.kind,
        "preset": "tiny",
        "hidden_size": 32,
        "heads": 2,
        "layers": 3,
        "positions": job.positions,
    }
    section |= {"dropout": job.dropout, "activation_checkpointing": job.checkpointing}
    family = find_family(job.kind)
    if family.objective == "masked_tokens":
        section |= {"window": 6, "layers": 4}
    config = validate(section, family.config, origin="a test")
    model = new_model(config, vocabulary_size=64, max_positions=32, attention_backend=job.backend, seed=3)
    if compiled:
        model.compile_parts(varying_slots=job.layout != "packed")
    losses, graphs = [], []
    for step in range(job.steps):
        short = 3 + step % 9
        packs = [random_sequences([short, 24 - short], vocabulary_size=64, seed=step + row) for row in range(3)]
        batch = build_batch(packs[: 3 if job.layout == "packed" else 2 + step % 2], job.layout, max_sequence_length=32)[
            0
        ]
        room = torch.full((1 + 5 * step,), batch.slots, dtype=torch.int32)
        batch = replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens, room]))
        torch.manual_seed(step)
        model.train()
        loss = loss_of(model, batch)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        losses += [loss.item(), sum(float(gradient.square().sum()) for gradient in gradients)]
        model.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model.eval(), batch).item())
        graphs.append(counters["stats"]["unique_graphs"])
    left_eager = sum(counters["unimplemented"].values())
    return {"losses": losses, "graphs": graphs, "names": list(model.state_dict()), "left_eager": left_eager}


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The next-token loss, or for a model of masked tokens, which the batches have none of, that of the first slots.

    These are another number in each batch.
    """
    if "masked_token" in [loss.name for loss in model.config.losses]:
        from evenpack.batch import ChosenTargets

        slots = torch.arange(3 + len(batch.cu_seqlens) % 17)
        targets = ChosenTargets(positions=slots, labels=slots, weights=torch.ones(len(slots)))
        return model.masked_token_loss(model.hidden_states(batch), targets).loss_sum
    return model(batch)["next_token"].loss_sum


def taken_by_engine(job: Job, compiled: bool, folder: Path, world: Any) -> dict[str, Any]:
    """Steps of a run with its evaluation at the end."""
    from run_files import changed

    from evenpack.engine.build import build_at, find_start
    from evenpack.engine.evaluate import evaluate_model
    from evenpack.engine.resolving.resolve import open_run

    config = changed(run_of(job, folder), training={"compile": compiled}, run={"output_dir": str(folder / "none")})
    run = build_at(find_start(open_run(config), world))
    losses, graphs = [], []
    for batches in run.start.batches(stop_step=job.steps):
        local = run.engine.train_step(batches.step, batches.micro_batches)
        losses += [*(float(sums.double().sum()) for sums in local.loss_sums.values()), float(local.gradient_norm)]
        graphs.append(counters["stats"]["unique_graphs"])
    evaluations = evaluate_model(run.engine.model, run.start.resolved, world)
    losses += [found.loss for found in evaluations.values()]
    return {"losses": losses, "graphs": graphs, "names": list(run.engine.model.state_dict())}


def run_of(job: Job, folder: Path) -> Any:
    from run_files import pair_run_values, prepared, run_config, run_values

    from evenpack.models.families import find_family

    family = find_family(job.kind)
    is_masked = family.objective == "masked_tokens"
    training: dict[str, Any] = {"layout": job.layout, "batching": job.batching, "assignment": job.assignment}
    training |= {"steps": job.steps, "packs_per_step": None, "packs_per_micro_batch": None}
    training |= {f"{job.batching}_per_step": 8, f"{job.batching}_per_micro_batch": 4}
    model = {"layers": 3, "dropout": job.dropout, "activation_checkpointing": job.checkpointing}
    sections: dict[str, Any] = {
        "data": {"validation_fraction": 0.02},
        "model": model | ({"positions": job.positions} if job.kind != "bert" else {}),
        "attention": {"backend": job.backend},
        "training": training,
        "optimizer": {"learning_rate": 1e-5},  # at larger ones rounding grows over 200 steps, as in any training
        "deepspeed": {"zero_stage": job.zero_stage},
    }
    if is_masked:
        sections["data"]["tokenizer"] = {"kind": "train_word_pieces", "vocabulary_size": 400}
        if "sentence_pairs" not in family.recipes:
            sections["data"]["recipe"] = {"kind": "documents", "max_sequence_length": 48}
            sections["model"] |= {"layers": 4, "window": 6}
    make = pair_run_values if is_masked else run_values
    return prepared(run_config(make(job.kind, folder / job.kind, **sections)))


def main() -> None:
    jobs = [Job(**json.loads(line)) for line in sys.argv[2:]]
    world = nullcontext()
    if any(job.is_engine for job in jobs):
        from evenpack.engine.world.distributed import joined_world

        world = joined_world()
    with world as entered:
        by_engine = functools.partial(taken_by_engine, folder=Path(sys.argv[1]), world=entered)
        for job in jobs:
            print(json.dumps(both_ways(job, by_engine if job.is_engine else taken_by_hand)), flush=True)


def both_ways(job: Job, take: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What the job's steps give eagerly and compiled."""
    torch._dynamo.reset()
    counters.clear()
    eager = take(job, compiled=False)
    with compiling_by(job.code):
        compiled = take(job, compiled=True)
    breaks = {reason.splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    return {"job": asdict(job), "eager": eager, "compiled": compiled, "breaks": breaks}


main()
