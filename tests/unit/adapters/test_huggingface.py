"""Models of transformers on packs: what they are given, and that no sequence sees another."""

from typing import Any

import numpy as np
import pytest
import torch
from host_trainers import (
    PACK_LENGTH,
    VOCABULARY,
    alone,
    flat_gradients,
    own_documents,
    own_loader,
    plain_inputs,
    relative_error,
)
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.huggingface import segment_starts
from evenpack.adapters.isolation import prove_isolation
from evenpack.errors import ConfigError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=PACK_LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
}
ENCODERS = {
    "bert": lambda: BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=PACK_LENGTH, **SIZES)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(
            vocab_size=VOCABULARY,
            local_attention=8,
            global_attn_every_n_layers=2,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            cls_token_id=0,
            sep_token_id=0,
            **SIZES,
        )
    ),
}


def built(make: Any, attention: str) -> Any:
    torch.manual_seed(0)
    model = make()
    model.config._attn_implementation = attention
    return model


def flash() -> Any:
    return LlamaConfig(attn_implementation="flash_attention_2")


def boundaries_of(batch: Any, form: Any) -> dict[str, Any]:
    return form.boundaries(batch.position_ids, batch.cu_seqlens, batch.max_sequence_length)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_learns_from_packs_what_it_learns_from_documents_alone(name: str, attention: str) -> None:
    loader = own_loader(micro_batches=2)
    model = built(DECODERS[name], attention)
    loss, gradients = alone(model, loader, 0)
    model.zero_grad()
    model_inputs = prove_isolation(model, loader)
    found = 0.0
    for batch in loader.batches_of(0):
        share = model(**model_inputs(batch), num_items_in_batch=batch.step_counts.targets).loss
        share.backward()
        found += share.item()
    assert found == pytest.approx(loss, rel=1e-6)
    assert relative_error(flat_gradients(model), gradients) < 1e-6


def test_a_decoder_that_shifts_labels_itself_predicts_the_same_targets() -> None:
    batch = own_loader().batches_of(0)[0]
    model = built(DECODERS["llama"], "sdpa")
    inputs = plain_inputs()(batch)
    shifted = model(**inputs, num_items_in_batch=batch.step_counts.targets).loss
    del inputs["shift_labels"]
    torch.testing.assert_close(model(**inputs, num_items_in_batch=batch.step_counts.targets).loss, shifted)


def test_labels_count_the_targets_of_the_step() -> None:
    loader = own_loader(micro_batches=4)
    inputs = [plain_inputs()(batch) for batch in loader.batches_of(2)]
    targets = loader.plan(2).counts.targets
    assert sum(int((one["shift_labels"] != -100).sum()) for one in inputs) == targets
    assert sum(int((one["labels"][..., 1:] != -100).sum()) for one in inputs) == targets


def test_sequences_of_a_pack_see_each_other_with_a_cache_so_inputs_forbid_it() -> None:
    batch = own_loader().batches_of(0)[0]
    model = built(DECODERS["llama"], "sdpa").eval()
    inputs = plain_inputs()(batch)
    apart = model(**inputs).logits
    assert inputs["use_cache"] is False
    assert (model(**{**inputs, "use_cache": True}).logits - apart).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_with_masks_gives_what_it_gives_for_documents_alone(name: str, attention: str) -> None:
    batch = own_loader(packs_per_step=2).batches_of(0)[0]
    model = built(ENCODERS[name], attention).eval()
    inputs = {"input_ids": batch.tokens[None]}
    inputs |= boundaries_of(batch, plain_inputs(model.config, causal=False, mask="block"))
    packed = model(**inputs).last_hidden_state[0]
    documents = own_documents()
    place, errors = 0, []
    starts = segment_starts(batch).tolist()
    for index in [index for index in batch.sequence_ids.tolist() if index >= 0]:
        while batch.tokens[place : place + len(documents[index])].tolist() != documents[index]:
            place = starts[starts.index(place) + 1]  # padding of the pack before
        single = model(input_ids=torch.tensor([documents[index]])).last_hidden_state[0]
        errors.append((packed[place : place + len(single)] - single).abs().max().item())
        place += len(single)
    assert max(errors) < 1e-5
    del inputs["attention_mask"]
    leaking = model(**inputs).last_hidden_state[0]
    assert (leaking - packed).abs().max() > 1e-3


def test_masks_of_layers_that_differ_are_a_dictionary_of_each_kind() -> None:
    batch = own_loader(packs_per_step=1).batches_of(0)[0]
    form = plain_inputs(built(ENCODERS["modernbert"], "sdpa").config, causal=False, mask="block")
    masks = boundaries_of(batch, form)["attention_mask"]
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["sliding_attention"].sum() < masks["full_attention"].sum()
    assert [mask.shape for mask in masks.values()] == [(1, 1, PACK_LENGTH, PACK_LENGTH)] * 2


def test_flash_attention_gets_all_four_boundaries_as_transformers_finds_them() -> None:
    batch = own_loader().batches_of(0)[0]
    inputs = plain_inputs(flash())(batch)
    (starts, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch.position_ids[None])
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert inputs[key].dtype == torch.int32
        assert inputs[key].tolist() == starts.tolist()
    assert type(inputs["max_length_q"]) is type(inputs["max_length_k"]) is int
    assert inputs["max_length_q"] == inputs["max_length_k"] >= longest
    assert not {"attention_mask"} & set(inputs)
    assert not {key for key in plain_inputs()(batch) if "seq_lens" in key or "max_length" in key}


def test_numpy_batches_are_refused() -> None:
    batch = own_loader(arrays="numpy").batches_of(0)[0]
    assert isinstance(batch.tokens, np.ndarray)
    with pytest.raises(ConfigError, match="arrays='torch'"):
        plain_inputs()(batch)


def test_a_host_that_drops_a_batch_or_reshapes_boundaries_is_refused() -> None:
    form = plain_inputs(flash())
    loader = own_loader(micro_batches=2)
    first, second = (form(batch) for batch in loader.batches_of(0))
    require_whole_step(loader, 0, [first, second], form)
    starts = first["cu_seq_lens_q"]
    for found, message in [
        ([first], "1 micro-batches arrived, the loader makes 2 a step"),
        ([first, second, second], "3 micro-batches arrived"),
        ([second, first], "micro-batch 0: input_ids has other values"),
        ([{**first, "cu_seq_lens_q": starts[None]}, second], "micro-batch 0: cu_seq_lens_q is torch.int32 .1, "),
        ([{**first, "cu_seq_lens_k": starts.long()}, second], "micro-batch 0: cu_seq_lens_k is torch.int64"),
        ([first, {**second, "max_length_q": torch.tensor(7)}], "micro-batch 1: max_length_q is tensor"),
        ([{**first, "attention_mask": torch.ones(1)}, second], "micro-batch 0: expected input_ids"),
    ]:
        with pytest.raises(ConfigError, match=message):
            require_whole_step(loader, 0, found, form)
    with pytest.raises(ConfigError, match="rank 0: the host accumulates 4 micro-batches, the loader makes 2 a step"):
        require_whole_step(loader, 0, [first, second], form, accumulation=4)
    require_whole_step(loader, 0, [first, second], form, accumulation=2)
