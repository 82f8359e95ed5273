"""A model of transformers is proved to keep documents apart before the first step, or it is refused."""

import json
import random
import re
from collections import namedtuple
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from host_trainers import VOCABULARY, own_documents, own_loader, tiny_llama
from repository import ROOT
from slow_cases import slow_but
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM, TrainingArguments

import evenpack
from evenpack.adapters.huggingface import segment_starts
from evenpack.adapters.isolation import find_isolation, first_position, prove_isolation, undisturbed
from evenpack.adapters.trainer import PackTrainer
from evenpack.studies.tiny_copies import tiny_model

ISOLATED = ("gpt2", "llama", "mistral", "mixtral", "gemma3_text", "deepseek_v3", "lfm2", "qwen3")
BY_A_BLOCK_MASK = ("opt", "gpt_oss", "falcon", "mpt", "xglm", "biogpt")
ENCODERS = {
    **dict.fromkeys(("bert", "electra", "modernbert"), 0),
    **dict.fromkeys(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet"), 2),
    **dict.fromkeys(("roberta-prelayernorm",), 2),
}
"""Encoders, which a block mask isolates, and their first position."""

REFUSED = (
    "bloom",
    "bart",
    "mamba",
    "mamba2",
    "jamba",
    "nemotron_h",
    "minimax",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "llama4_text",  # it scales queries by slots, from the eighth on in a tiny copy
)

MASKS = evenpack.RandomMasks(mask_token=3, special_tokens=[0, 1, 2], vocabulary_size=VOCABULARY, share=0.3)


def built(kind: str, *, causal: bool, attention: str | None = None, **changes: Any) -> Any:
    """Returns a tiny model of this type with random weights and without dropout, in training mode."""
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    config = tiny_model(auto.from_config, AutoConfig.for_model(kind)).config
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    given = {} if attention is None else {"attn_implementation": attention}
    return auto.from_config(config, **given).train()


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    settings = {"max_steps": 1, "save_strategy": "no", "report_to": "none", "logging_steps": 1, **settings}
    return TrainingArguments(output_dir=str(folder), disable_tqdm=True, use_cpu=True, learning_rate=0.0, **settings)


def loss_alone(model: Any, loader: evenpack.Loader, *, causal: bool) -> float:
    """Returns the loss of step 0 from each of its documents by itself, as the model runs with its tokens alone."""
    total, documents = 0.0, own_documents()
    counts = loader.plan(0).counts
    with torch.no_grad():
        if causal:
            for index in loader.plan(0).packs.sequence_ids.tolist():
                tokens = torch.tensor([documents[index]])
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                total += F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
            return total / counts.targets
        for batch in loader.batches_of(0):
            targets = batch.targets["masked_token"]
            labels = torch.full_like(batch.tokens, -100)
            used = targets.weights > 0
            labels[targets.positions[used]] = targets.labels[used]
            for start, stop in pairwise(segment_starts(batch).tolist()):
                if (labels[start:stop] != -100).any():
                    logits = model(input_ids=batch.tokens[None, start:stop]).logits[0]
                    total += F.cross_entropy(logits, labels[start:stop], reduction="sum").item()
    return total / counts.targets


FAMILIES = [
    *((kind, "none", 0) for kind in ISOLATED),
    *((kind, "block", 0) for kind in BY_A_BLOCK_MASK),
    *((kind, "block", first) for kind, first in ENCODERS.items()),
    *((kind, None, 0) for kind in REFUSED),
]


ONE_OF_EACH = ("llama", "mixtral", "modernbert", "roberta", "bloom", "mamba2", "llama4_text")
"""Without a mask, dense and of experts; with a block mask, from positions 0 and 2; refused for three reasons."""


@pytest.mark.parametrize(
    ("kind", "mask", "first"), slow_but(ONE_OF_EACH, FAMILIES), ids=[kind for kind, _, _ in FAMILIES]
)
def test_a_model_trains_as_documents_alone_or_is_refused(
    kind: str, mask: str | None, first: int, tmp_path: Path
) -> None:
    causal = kind not in ENCODERS
    model = built(kind, causal=causal)
    loader = own_loader(packs_per_step=2, objective=None if causal else MASKS)
    trainer = PackTrainer(model=model, args=arguments(tmp_path), loader=loader)
    if mask is None:
        with pytest.raises(evenpack.ConfigError, match=f"{type(model).__name__} is not proved to keep .*tolerance"):
            trainer.train()
        assert trainer.state.global_step == 0
        return
    expected = loss_alone(model, loader, causal=causal)
    trainer.train()
    assert (trainer._form.mask, trainer._form.first_position) == (mask, first)
    assert first_position(model) == first
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_attention_that_is_sparse_in_long_rows_alone_is_asked_in_long_rows() -> None:
    """BigBird attends to all of a short row, whatever its configuration says, and there a block mask would isolate."""
    model = built("big_bird", causal=False, attention_type="block_sparse", block_size=8, num_random_blocks=1)
    attention = [type(layer.attention.self) for layer in model.bert.encoder.layer]
    for slots, isolated in ((40, True), (128, False)):
        found = find_isolation(model, causal=False, max_sequence_length=32, slots=slots, own_loss=False)
        assert found.isolated is isolated
        assert [type(layer.attention.self) for layer in model.bert.encoder.layer] == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chunks_of_attention_are_those_of_a_document(attention: str) -> None:
    """Without a mask transformers counts them, in a block mask the adapter does."""
    kinds = {"attention_chunk_size": 40, "no_rope_layers": [1] * 4, "layer_types": ["chunked_attention"] * 4}
    model = built("llama4_text", causal=True, attention=attention, **kinds)
    inputs = prove_isolation(model, own_loader(packs_per_step=4))
    assert inputs.mask == "none"
    for chunk in (8, 40):
        model.config.attention_chunk_size = chunk
        batch = own_loader(packs_per_step=4)[0]
        found, expected = (model(**each(batch)).logits for each in (replace(inputs, mask="block"), inputs))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "roberta"])
def test_everything_is_as_before(kind: str) -> None:
    """Weights, buffers, gradients, mode, dropout, plain attributes and random states."""
    causal = kind != "roberta"
    model = built(kind, causal=causal)
    model.config.router_jitter_noise = 0.1
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.register_forward_pre_hook(spoil)
    model.register_buffer("calls", torch.zeros(()))
    model.cached, model.memory = 3, torch.zeros(2)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    model.eval()
    next(iter(model.children())).train()
    before = state_of(model)
    find_isolation(model, causal=causal, max_sequence_length=32)
    assert state_of(model) == before
    assert first_position(model) == (0 if causal else 2)
    assert state_of(model) == before
    python = random.getstate()  # checks of types draw from it too, so it is compared here alone
    with undisturbed(model):
        model(input_ids=torch.tensor([[5, 6]]))
    assert random.getstate() == python


def spoil(module: Any, _inputs: Any) -> None:
    """Does to a module what models do in a forward pass."""
    module.calls += 1
    module.cached = torch.ones(3)
    module.memory += 1
    module.left_behind = 1
    module._buffers["another"] = torch.ones(2)
    np.random.random()
    random.random()
    torch.rand(1)


def state_of(model: Any) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(name, one.tolist(), None if one.grad is None else one.grad.sum().item()) for name, one in named]
    modules = [(name, one.training, getattr(one, "p", None)) for name, one in model.named_modules()]
    states = [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()]
    attributes = [model.cached, model.memory.tolist(), hasattr(model, "left_behind"), model.config.router_jitter_noise]
    return [str(one) for one in (tensors, modules, states, attributes)]


@pytest.mark.parametrize("kind", ["gpt2", "modernbert", "mixtral"])
def test_dropout_and_compiled_code_change_nothing(kind: str) -> None:
    causal = kind != "modernbert"
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    config = tiny_model(auto.from_config, AutoConfig.for_model(kind)).config
    for name in ("resid_pdrop", "attn_pdrop", "embd_pdrop", "attention_dropout", "embedding_dropout", "mlp_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.4)
    config.router_jitter_noise = 0.2
    model = auto.from_config(config)

    def refuse(*_: Any) -> Any:
        raise AssertionError("it was compiled")

    found = find_isolation(torch.compile(model, backend=refuse), causal=causal, max_sequence_length=32, own_loss=causal)
    assert found.isolated, found.reason


class Leaking(torch.nn.Module):
    """Gives each token a hundredth of what a function of all tokens of the row says."""

    def __init__(self, leak: Any) -> None:
        super().__init__()
        self.model, self.leak = tiny_llama(), leak
        self.config = self.model.config

    def forward(self, input_ids: Any, **given: Any) -> Any:
        output = self.model(input_ids=input_ids, **given)
        output.logits = output.logits + self.leak(input_ids).double().sub(30).mul(1e-3)[:, None, None]
        return output


LEAKS = {
    "all": (lambda ids: ids.double().mean(1), "change by"),
    "later": (lambda ids: ids[:, 25].double() if ids.shape[1] > 30 else ids[:, 0] * 0.0, "change by"),
    "length": (lambda ids: torch.tensor([float(ids.shape[1])]), ": without a mask, logits and losses are "),
}


@pytest.mark.parametrize(("leak", "message"), LEAKS.values(), ids=list(LEAKS))
def test_a_small_leak_is_named_with_its_size_and_what_would_do(leak: Any, message: str) -> None:
    with pytest.raises(evenpack.ConfigError) as refused:
        prove_isolation(Leaking(leak), own_loader(packs_per_step=2), own_loss=False)
    text = str(refused.value)
    assert text.startswith("Leaking is not proved to keep the sequences of a pack apart: without a mask, ")
    for part in (message, "(tolerance ", "with a block mask, ", "another model", "allow_leaks=True"):
        assert part in text


LEAKS_OF_16_BITS = {
    "from the first document": lambda ids, _: ids[:, 0].double(),
    "of the longest document": lambda ids, positions: positions.max(1).values.double(),
}


@pytest.mark.parametrize("leak", LEAKS_OF_16_BITS.values(), ids=list(LEAKS_OF_16_BITS))
def test_a_leak_that_16_bits_would_round_away_is_seen(leak: Any) -> None:
    class Leak(Leaking):
        def forward(self, input_ids: Any, **given: Any) -> Any:
            output = self.model(input_ids=input_ids, **given)
            positions = given.get("position_ids", torch.arange(input_ids.shape[1])[None])
            output.logits = output.logits + leak(input_ids, positions).mul(1e-3)[:, None, None]
            return output

    with pytest.raises(evenpack.ConfigError, match="the other documents' logits and losses change by"):
        prove_isolation(Leak(None).bfloat16(), own_loader(packs_per_step=2), own_loss=False)


def test_queries_that_are_scaled_along_the_row_are_refused_in_16_bits() -> None:
    model = built("llama4_text", causal=True).bfloat16()
    found = find_isolation(model, causal=True, max_sequence_length=32, slots=64)
    assert not found.isolated
    assert "give micro-batches of at most 8 slots" in found.reason
    assert find_isolation(model, causal=True, max_sequence_length=4, slots=8).isolated


class Wrapper(torch.nn.Module):
    """A module of one's own around a model, without a configuration."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


def test_masks_have_the_windows_of_a_model_within_a_wrapper() -> None:
    model, settings = built("gpt_oss", causal=True), {"causal": True, "max_sequence_length": 32, "slots": 64}
    plain, wrapped = (find_isolation(one, **settings) for one in (model, Wrapper(model)))
    assert plain.isolated
    assert plain.inputs is not None
    assert len(plain.inputs(own_loader(packs_per_step=2)[0])["attention_mask"]) == 2  # one for each kind of layer
    assert plain.inputs == replace(wrapped.inputs, embeddings=plain.inputs.embeddings)


@dataclass(slots=True)
class Slotted:
    window: int = 20


class OfTwoTexts:
    window = 20

    def get_text_config(self) -> Any:
        raise ValueError("Multiple valid text configs were found")


CONFIGS = [{"window": 20}, Slotted(), namedtuple("Named", "window")(20), OfTwoTexts()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: type(one).__name__)
def test_configurations_of_any_kind_are_read(config: Any) -> None:
    model = Leaking(lambda ids: ids[:, 0] * 0.0)
    model.config = config
    assert find_isolation(model, causal=True, max_sequence_length=32, own_loss=False).isolated


@pytest.mark.parametrize(("parts", "own_loss"), [(1, True), (2, True), (2, False)])
def test_a_routers_loss_that_each_micro_batch_would_add_is_refused(parts: int, own_loss: bool) -> None:
    model = Wrapper(built("mixtral", causal=True, output_router_logits=True))
    loader = own_loader(packs_per_step=2, micro_batches=parts)
    if parts == 1 or not own_loss:
        prove_isolation(model, loader, own_loss=own_loss)
        return
    with pytest.raises(evenpack.ConfigError, match="adds the router's auxiliary loss of each micro-batch whole"):
        prove_isolation(model, loader)


class Broken(Leaking):
    def forward(self, input_ids: Any, **given: Any) -> Any:
        raise AttributeError("it has no rope")


@pytest.mark.parametrize("allow_leaks", [False, True])
def test_a_model_that_fails_is_refused_with_its_error(allow_leaks: bool) -> None:
    with pytest.raises(evenpack.ConfigError, match="a document alone fails with AttributeError: it has no rope"):
        prove_isolation(Broken(None), own_loader(packs_per_step=2), allow_leaks=allow_leaks)


def test_a_model_in_which_nothing_reaches_anything_proves_nothing() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with pytest.raises(evenpack.ConfigError, match="not seen to reach each other within a document either"):
        prove_isolation(model, own_loader(packs_per_step=2))


def test_leaks_are_trained_on_demand_and_recorded(tmp_path: Path) -> None:
    model = built("mamba2", causal=True)
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer = PackTrainer(
        model=model, args=arguments(tmp_path, **settings), loader=own_loader(packs_per_step=2), allow_leaks=True
    )
    trainer.train()
    kept = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    isolation = kept["stateful_callbacks"]["evenpack.Loader"]["attributes"]["isolation"]
    assert isolation["isolated"] is False
    assert "Mamba2ForCausalLM is not proved" in isolation["reason"]


PRECISIONS = [
    ("opt", "eager", {"bf16": True}),
    ("xlm-roberta", "sdpa", {"dtype": "bfloat16"}),
    ("bert", "eager", {"dtype": "float16"}),
    ("mixtral", "sdpa", {"dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("kind", "attention", "precision"), slow_but(("opt", "xlm-roberta"), PRECISIONS))
def test_masks_have_the_precision_that_the_model_computes_in(
    kind: str, attention: str, precision: dict[str, Any], tmp_path: Path
) -> None:
    causal = kind not in ENCODERS
    dtype = getattr(torch, precision.get("dtype", "float32"))
    model = built(kind, causal=causal, attention=attention).to(dtype)
    loader = own_loader(packs_per_step=2, objective=None if causal else MASKS)
    trainer = PackTrainer(model=model, args=arguments(tmp_path, bf16="bf16" in precision), loader=loader)
    expected = loss_alone(model, loader, causal=causal)
    trainer.train()
    assert trainer._form.dtype == (torch.bfloat16 if "bf16" in precision else dtype)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=0.02)


def test_a_model_in_double_precision_is_held_to_the_precision_of_its_losses() -> None:
    model = built("llama", causal=True).double().train()
    assert prove_isolation(model, own_loader(packs_per_step=2)).dtype == torch.float64


def test_positions_beyond_the_models_table_are_refused() -> None:
    """RoBERTa's first position is 2, so a table of 33 rows has no place for the last of 32 tokens."""
    loader = own_loader(packs_per_step=2, objective=MASKS)
    for rows in (33, 34):
        model = built("roberta", causal=False, max_position_embeddings=rows)
        if rows == 34:
            prove_isolation(model, loader, own_loss=False)
            return
        with pytest.raises(
            evenpack.ConfigError, match=r"table of positions has 33 rows, .* number 2, .*up to 32 tokens"
        ):
            prove_isolation(model, loader, own_loss=False)


@pytest.mark.parametrize("step", [0, 1])
def test_tokens_beyond_the_models_vocabulary_are_refused(step: int, tmp_path: Path) -> None:
    loader = own_loader(packs_per_step=2)
    tokens = [int(batch.tokens.max()) for batch in (loader[0], loader[1])]
    model = built("llama", causal=True, vocab_size=tokens[step])
    message = (
        rf"token id {tokens[step]} .*vocab_size\) has {tokens[step]} entries, and its table of .* {tokens[step]} rows"
    )
    trainer = PackTrainer(model=model, args=arguments(tmp_path, max_steps=2), loader=loader)
    if tokens[0] < tokens[1] or step == 0:
        with pytest.raises(evenpack.ConfigError, match=message):
            trainer.train()


class ExtraLoss(LlamaForCausalLM):
    """Adds a loss of the logits' size, which is a mean over the row."""

    def forward(self, **given: Any) -> Any:
        output = super().forward(**given)
        if output.loss is not None:
            output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).pow(2).mean()
        return output


@pytest.mark.parametrize("kind", ["extra loss", "bert"])
def test_a_loss_that_is_no_share_of_the_steps_is_refused_and_the_page_says_what_to_take(kind: str) -> None:
    causal = kind != "bert"
    loader = own_loader(packs_per_step=2, objective=None if causal else MASKS, steps=1)
    model = ExtraLoss(tiny_llama().config) if causal else built("bert", causal=False)
    with pytest.raises(evenpack.ConfigError, match=r"its own loss is .*own_loss=False, and token_loss of its logits"):
        prove_isolation(model, loader)
    page = (ROOT / "docs/adapters.md").read_text("utf-8")
    lines = re.search("```python\n(from evenpack.adapters.trainer import token_loss.*?)```", page, re.DOTALL)
    assert lines is not None
    found = {"model": model, "loader": loader, "device": "cpu", "prove_isolation": prove_isolation}
    exec(lines[1], found)
    assert found["loss"].item() == pytest.approx(loss_alone(model, loader, causal=causal), rel=1e-6)


class OfRealData(LlamaForCausalLM):
    """Lets documents see each other in what only real micro-batches have."""

    kind = ""

    def forward(self, input_ids: Any, position_ids: Any = None, **given: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        if self.kind == "row":  # tokens beyond slot 48 see the mean of the row
            embedded = torch.cat([embedded[:, :48], embedded[:, 48:] + embedded.mean(1, keepdim=True)], 1)
        elif self.kind == "special token":
            embedded = embedded * (1 - (input_ids == self.config.eos_token_id).float().mean())
        elif self.kind == "kept by shape" and position_ids is not None:
            position_ids = vars(self).setdefault("kept", {}).setdefault(input_ids.shape, position_ids)
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, **given)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("", None), ("row", "of the first micro"), ("special token", "of the first micro"), ("kept by shape", "of each")],
)
def test_what_only_real_documents_meet_is_asked_of_the_first_micro_batch(kind: str, message: str | None) -> None:
    model = OfRealData(tiny_llama().config)
    model.kind = kind
    documents = [[*one[:-1], model.config.eos_token_id] for one in own_documents()]
    loader = evenpack.Loader(documents, pack_length=32, packs_per_step=4)
    if message is None:
        prove_isolation(model, loader)
        return
    find = {"causal": True, "max_sequence_length": 32, "slots": 128}
    assert find_isolation(model, **find).isolated is (kind != "kept by shape")
    with pytest.raises(evenpack.ConfigError, match=f"logits and losses .*{message}"):
        prove_isolation(model, loader)


def test_as_many_documents_run_alone_whatever_a_micro_batch_holds() -> None:
    """With FSDP and ZeRO 3 ranks run each forward pass together."""
    passes = []
    for lengths in ([32], [9, 9, 9], [2] * 16):
        seen: list[int] = []
        model = tiny_llama()
        model.register_forward_pre_hook(
            lambda *given, seen=seen: seen.append(given[-1]["input_ids"].shape[1]), with_kwargs=True
        )
        loader = evenpack.Loader([list(range(4, 4 + one)) for one in lengths], pack_length=32, packs_per_step=1)
        prove_isolation(model, loader)
        passes.append(len(seen))
    assert passes[0] == passes[1] == passes[2]


def test_a_model_is_proved_in_the_mode_in_which_it_is_trained(tmp_path: Path) -> None:
    """from_pretrained returns a model in evaluation mode, which Trainer alone ends."""
    loader, modes = own_loader(packs_per_step=2), []
    model = tiny_llama().eval()
    model.register_forward_pre_hook(lambda module, _: modes.append([one.training for one in module.modules()]))
    with pytest.raises(evenpack.ConfigError, match=r"LlamaForCausalLM is in evaluation mode, .* call model.train\(\)"):
        prove_isolation(model, loader)
    model.train()
    model.model.layers[0].eval()
    expected = [one.training for one in model.modules()]
    prove_isolation(model, loader)
    assert all(found == expected for found in modes)
    modes.clear()
    PackTrainer(model=model.eval(), args=arguments(tmp_path), loader=loader).train()
    assert modes
    assert all(all(found) for found in modes)


class Codebook(LlamaForCausalLM):
    """Writes into one of its parameters while it runs."""

    def forward(self, **given: Any) -> Any:
        self.model.norm.weight.mul_(0.9)
        return super().forward(**given)


REFUSED_PLAINLY = {
    "writes parameters": (
        lambda: Codebook(tiny_llama().config),
        r"writes into its parameters \(model.norm.weight\).* load the weights again$",
    ),
    "short table": (
        lambda: built("gpt2", causal=True, n_positions=20),
        "its table of positions has 20 rows, .* up to 32 tokens",
    ),
    "flex on a CPU": (
        lambda: tiny_llama("flex_attention"),
        "flex_attention has no backward pass on a CPU: take",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_PLAINLY)
def test_what_has_nothing_to_do_with_borders_is_named_as_what_it_is(kind: str) -> None:
    make, message = REFUSED_PLAINLY[kind]
    with pytest.raises(evenpack.ConfigError, match=message):
        prove_isolation(make(), own_loader(packs_per_step=2))


class Tuples(LlamaForCausalLM):
    def forward(self, **given: Any) -> Any:
        return super().forward(**given).to_tuple()


def test_a_model_that_returns_tuples_is_proved_as_another() -> None:
    assert prove_isolation(Tuples(tiny_llama().config), own_loader(packs_per_step=2)).mask == "none"
