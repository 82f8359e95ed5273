"""Invariant 2 for whole models: what happens in one sequence is not felt in any other, in either direction."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs, roughen

from evenpack.models.build import new_model
from evenpack.models.families import config_of, find_family

VOCABULARY = 53
PACKS = {
    "short neighbours": [[5, 2, 9, 3, 2], [12, 4]],
    "long sequences": [[90, 70], [100, 3, 60]],
}
SHAPE = {"preset": "tiny", "layers": 2, "hidden_size": 48, "heads": 3, "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "learned": {"kind": "gpt2", "positions": "learned"},
    "alibi": {"kind": "gpt2", "positions": "alibi"},
    "rotary": {"kind": "gpt2", "positions": "rotary"},
    "llama": {"kind": "llama", "heads": 4, "key_value_heads": 2, "feed_forward_size": 80},
    "bert": {"kind": "bert"},
    "modernbert": {"kind": "modernbert", "layers": 3, "feed_forward_size": 64, "window": 5},
}
every_model = pytest.mark.parametrize("name", MODELS)
every_backend = pytest.mark.parametrize("backend", ["reference", "sdpa"])


class Probe:
    """A batch, a model, and the effect of some slots on the losses of all others."""

    def __init__(self, name, backend, pack_lengths):
        kind = MODELS[name]["kind"]
        config = config_of(kind).model_validate(SHAPE | MODELS[name])
        self.model = new_model(
            config, vocabulary_size=VOCABULARY, max_positions=1024, attention_backend=backend, seed=1
        )
        roughen(self.model)  # initial weights are so small that a leak could hide in rounding
        build, draw = build_batch, random_sequences
        if find_family(kind).objective == "masked_tokens":
            build, draw = build_masked_batch, random_pairs
        self.batch, spans = build(
            [draw(lengths, vocabulary_size=VOCABULARY, seed=7) for lengths in pack_lengths],
            "packed",
            max_sequence_length=max(map(max, pack_lengths)),
            pack_length=max(map(sum, pack_lengths)) + 5,
        )
        slots = torch.arange(self.batch.slots)
        self.sequences = [slots[span] for span in spans]
        self.padding = slots[~torch.isin(slots, torch.cat(self.sequences))]
        """The tails of packs, which are segments like any other."""

    def merged(self):
        """Returns the control's batch, with one segment over everything."""
        merged = torch.where(self.batch.cu_seqlens > 0, self.batch.slots, 0).to(torch.int32)
        return replace(self.batch, cu_seqlens=merged, max_sequence_length=self.batch.slots)

    def effects(self, batch, changed):
        """Returns what all other slots compute before and after a change: states, and their losses' gradients.

        The gradients are those by all embedded tokens and by each parameter.
        """
        tokens, types = batch.tokens.clone(), batch.token_type_ids.clone()
        tokens[changed] = (tokens[changed] + 1) % VOCABULARY
        types[changed] = 1 - types[changed]
        return [self._run(one, changed) for one in (batch, replace(batch, tokens=tokens, token_type_ids=types))]

    def _run(self, batch, excluded):
        slots, targets, embedded = torch.arange(batch.slots), {}, []
        for name, one in batch.targets.items():
            is_counted = ~torch.isin(getattr(one, "positions", slots), excluded)
            targets[name] = replace(one, weights=one.weights * is_counted)
        hook = self.model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
        outputs = self.model(replace(batch, targets=targets)).values()
        hook.remove()
        parameters = dict(self.model.named_parameters())
        loss = torch.stack([output.loss_sum for output in outputs]).sum()
        by_embedding, *by_parameter = torch.autograd.grad(loss, [embedded[0], *parameters.values()])
        states = self.model.hidden_states(batch).detach()[~torch.isin(slots, excluded)]
        return states, by_embedding, dict(zip(parameters, by_parameter, strict=True))


@every_backend
@every_model
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS.keys())
def test_changing_one_sequence_changes_nothing_of_any_other(packs, name, backend):
    probe = Probe(name, backend, packs)
    assert len(probe.padding) > 0
    for changed in [*probe.sequences, probe.padding]:
        (states, by_embedding, by_parameter), after = probe.effects(probe.batch, changed)
        assert torch.equal(states, after[0])
        assert torch.equal(by_embedding, after[1])
        assert by_embedding.any()
        assert not by_embedding[changed].any()
        for parameter, gradient in by_parameter.items():
            assert torch.equal(gradient, after[2][parameter]), parameter


@every_backend
@every_model
def test_the_probe_sees_a_leak_when_segments_are_merged(name, backend):
    probe = Probe(name, backend, PACKS["short neighbours"])
    changed = probe.sequences[0]
    (states, by_embedding, by_parameter), after = probe.effects(probe.merged(), changed)
    assert (states - after[0]).abs().max() > 1e-3
    assert (by_embedding - after[1]).abs().max() > 1e-3
    assert by_embedding[changed].abs().max() > 1e-3
    for parameter in ("blocks.0.attention.query_key_value.weight", "blocks.1.feed_forward.expand.weight"):
        assert (by_parameter[parameter] - after[2][parameter]).abs().max() > 1e-3
