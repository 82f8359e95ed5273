"""Documents, tiny models, the gradients of documents alone and what models read, for tests of adapters on ranks."""

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import evenpack
from evenpack.adapters.huggingface import ModelInputs

VOCABULARY = 61
PACK_LENGTH = 32
PACKS_PER_STEP = 16


def own_documents(count: int = 320) -> list[list[int]]:
    """Returns documents of many lengths; the longest fills a pack, the shortest predicts one token."""
    random = np.random.default_rng(7)
    lengths = random.integers(2, PACK_LENGTH + 1, size=count)
    return [random.integers(1, VOCABULARY, size=length).tolist() for length in lengths]


def own_loader(rank: int = 0, ranks: int = 1, **settings: Any) -> evenpack.Loader:
    """Returns a rank's loader of these documents."""
    settings = {"pack_length": PACK_LENGTH, "packs_per_step": PACKS_PER_STEP, "seed": 3, **settings}
    return evenpack.Loader(own_documents(), rank=rank, ranks=ranks, **settings)


def tiny_llama(attention: str = "sdpa") -> Any:
    """Returns a decoder of transformers with the same random weights at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=PACK_LENGTH, **sizes)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def plain_inputs(
    config: Any = None, *, causal: bool = True, mask: Any = "none", first_position: int = 0
) -> ModelInputs:
    """Returns inputs of which nothing was proved, of a model in FP32."""
    return ModelInputs(
        config=config,
        causal=causal,
        mask=mask,
        first_position=first_position,
        dtype=torch.float32,
        embeddings=None,
    )


def flat_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Returns the gradients of all parameters as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def kept_gradients(trainer: Any, *, dies_at: int | None = None) -> list[torch.Tensor]:
    """Returns a list to which each step of a Trainer of transformers adds its gradients; it may die at one."""
    from transformers import TrainerCallback

    kept: list[torch.Tensor] = []

    class Keeper(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            kept.append(flat_gradients(model))
            if state.global_step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_callback(Keeper())
    return kept


def alone(model: Any, loader: evenpack.Loader, step: int) -> tuple[float, torch.Tensor]:
    """Returns the loss of a step and its gradients, from each of its documents by itself."""
    documents = own_documents()
    plan = loader.plan(step)
    model.zero_grad()
    total = 0.0
    for index in plan.packs.sequence_ids.tolist():
        tokens = torch.tensor([documents[index]])
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") / plan.counts.targets
        loss.backward()
        total += loss.item()
    return total, flat_gradients(model)


Row = tuple[int, ...]
Read = list[tuple[int, list[list[int]]]]
"""Steps, and the rows of tokens that a model was given in each."""


def watched(model: torch.nn.Module, step: Callable[[], int]) -> Read:
    """Returns a list to which every forward pass in training adds what the model reads, and in which step."""
    read: Read = []

    def keep(_module: Any, _arguments: Any, inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():  # the proof of isolation takes none
            read.append((step(), inputs["input_ids"].tolist()))

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return read


def read_by_step(read_of_ranks: Iterable[Read]) -> dict[int, list[Row]]:
    """Returns the packs that all ranks' models read in each step, sorted: rows of tokens of one pack each."""
    found: dict[int, list[Row]] = {}
    for read in read_of_ranks:
        for step, (row,) in read:
            found.setdefault(step, []).extend(map(tuple, np.array(row).reshape(-1, PACK_LENGTH).tolist()))
    return {step: sorted(packs) for step, packs in found.items()}


def planned_by_step(loader: evenpack.Loader, steps: range) -> dict[int, list[Row]]:
    """Returns the packs of each step, from a loader of one rank."""
    return {
        step: sorted(map(tuple, torch.cat([b.tokens for b in loader.batches_of(step)]).view(-1, PACK_LENGTH).tolist()))
        for step in steps
    }


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
