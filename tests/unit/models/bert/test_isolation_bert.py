"""A change in one sequence of BERT has no effect on any other, in either direction of attention (invariant 2)."""

from dataclasses import replace

import pytest
import torch
from masked_batches import build_masked_batch, random_pairs, roughen
from scored_tokens import masked_token_logits, next_sentence_logits

from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert

VOCABULARY = 53
PACKS = {
    "short neighbours": [[5, 2, 9, 3, 2], [12, 4]],
    "long sequences": [[90, 70], [100, 3, 60]],
}
CPU_BACKENDS = ("auto", "reference", "sdpa")


class Probe:
    """A pack, a model, and the effect of one sequence on the losses of all others."""

    def __init__(self, pack_lengths, backend):
        config = BertConfig(kind="bert", preset="tiny", layers=2, hidden_size=48, heads=3, dropout=0.0)
        self.model = Bert(config, vocabulary_size=VOCABULARY, max_positions=1024, attention_backend=backend, seed=1)
        roughen(self.model)
        packs = [random_pairs(lengths, vocabulary_size=VOCABULARY, seed=7) for lengths in pack_lengths]
        longest = max(max(lengths) for lengths in pack_lengths)
        self.batch, self.spans = build_masked_batch(
            packs, "packed", max_sequence_length=longest, pack_length=max(map(sum, pack_lengths)) + 5
        )

    def merged(self):
        """Returns the control's batch, with one segment over everything."""
        merged = torch.where(self.batch.cu_seqlens > 0, self.batch.slots, 0).to(torch.int32)
        return replace(self.batch, cu_seqlens=merged, max_sequence_length=self.batch.slots)

    def padding(self):
        """Returns the tails of the packs, which are segments like any other."""
        covered = torch.zeros(self.batch.slots, dtype=torch.bool)
        for span in self.spans:
            covered[span] = True
        return (~covered).nonzero()[:, 0]

    def changed(self, batch, slots):
        tokens, types = batch.tokens.clone(), batch.token_type_ids.clone()
        tokens[slots] = (tokens[slots] + 1) % VOCABULARY
        types[slots] = 1 - types[slots]
        return replace(batch, tokens=tokens, token_type_ids=types)

    def run(self, batch, excluded):
        """Returns the logits of all other sequences, and their losses' gradients by embedded tokens and parameters."""
        others, counted = {}, []
        for name, targets in batch.targets.items():
            counted.append(~torch.isin(targets.positions, excluded) & (targets.weights > 0))
            others[name] = replace(targets, weights=counted[-1].float())
        masked, pairs = counted
        batch = replace(batch, targets=others)
        embedded = []
        hook = self.model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
        sums = self.model(batch)
        hook.remove()
        parameters = dict(self.model.named_parameters())
        loss = sums["masked_token"].loss_sum + sums["next_sentence"].loss_sum
        by_embedding, *by_parameter = torch.autograd.grad(loss, [embedded[0], *parameters.values()])
        with torch.no_grad():
            logits = [masked_token_logits(self.model, batch)[masked], next_sentence_logits(self.model, batch)[pairs]]
        return logits, by_embedding, dict(zip(parameters, by_parameter, strict=True))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS.keys())
def test_changing_one_sequence_changes_no_other_logits_and_no_other_gradients(packs, backend):
    probe = Probe(packs, backend)
    slots = torch.arange(probe.batch.slots)
    assert len(probe.padding()) > 0
    for changed in [*(slots[span] for span in probe.spans), probe.padding()]:
        logits, by_embedding, by_parameter = probe.run(probe.batch, changed)
        new_logits, new_by_embedding, new_by_parameter = probe.run(probe.changed(probe.batch, changed), changed)
        assert all(torch.equal(new, old) for new, old in zip(new_logits, logits, strict=True))
        assert torch.equal(by_embedding, new_by_embedding)
        assert not by_embedding[changed].any()
        assert by_embedding.any()
        for name, gradient in by_parameter.items():
            assert torch.equal(gradient, new_by_parameter[name]), name


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_probe_sees_a_leak_when_segments_are_merged(backend):
    probe = Probe(PACKS["short neighbours"], backend)
    batch, changed = probe.merged(), torch.arange(probe.batch.slots)[probe.spans[0]]
    logits, by_embedding, by_parameter = probe.run(batch, changed)
    new_logits, new_by_embedding, new_by_parameter = probe.run(probe.changed(batch, changed), changed)
    assert all((new - old).abs().max() > 1e-3 for new, old in zip(new_logits, logits, strict=True))
    assert (by_embedding - new_by_embedding).abs().max() > 1e-3
    assert by_embedding[changed].abs().max() > 1e-3
    for name in ("blocks.0.attention.query_key_value.weight", "next_sentence_head.pooler.weight"):
        assert (by_parameter[name] - new_by_parameter[name]).abs().max() > 1e-3
