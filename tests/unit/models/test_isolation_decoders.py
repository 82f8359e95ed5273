"""Invariant 2 for the whole model: what happens in one sequence is not felt in any other."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from batches import build_batch, random_sequences
from scored_tokens import next_token_logits

from evenpack.models.build import new_model
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.llama.config import LlamaConfig

VOCABULARY = 53
PACKS = {
    "short neighbours": [[5, 1, 9, 3, 2], [12, 4]],
    "long sequences": [[90, 70], [100, 3, 60]],
}
CPU_BACKENDS = ("auto", "reference", "sdpa")
SHAPE = {"preset": "tiny", "layers": 2, "hidden_size": 48}
DECODERS = {
    "learned": Gpt2Config(kind="gpt2", positions="learned", heads=3, **SHAPE),
    "alibi": Gpt2Config(kind="gpt2", positions="alibi", heads=3, **SHAPE),
    "rotary": Gpt2Config(kind="gpt2", positions="rotary", heads=3, **SHAPE),
    "llama": LlamaConfig(kind="llama", heads=4, key_value_heads=2, feed_forward_size=80, **SHAPE),
}


class Probe:
    """A pack, a model, and the effect of one sequence's loss."""

    def __init__(self, pack_lengths, decoder, backend):
        self.model = new_model(
            DECODERS[decoder], vocabulary_size=VOCABULARY, max_positions=1024, attention_backend=backend, seed=1
        )
        with torch.no_grad():  # initial weights are so small that a leak could hide in rounding
            for block in self.model.blocks:
                block.attention.query_key_value.weight.mul_(10.0)
        packs = [random_sequences(lengths, vocabulary_size=VOCABULARY, seed=7) for lengths in pack_lengths]
        longest = max(max(lengths) for lengths in pack_lengths)
        self.batch, self.spans = build_batch(
            packs, "packed", max_sequence_length=longest, pack_length=max(map(sum, pack_lengths)) + 5
        )

    def merged(self):
        """Returns the control's batch, with one segment over everything."""
        merged = torch.where(self.batch.cu_seqlens > 0, self.batch.slots, 0).to(torch.int32)
        return replace(self.batch, cu_seqlens=merged, max_sequence_length=self.batch.slots)

    def changed(self, batch, slots):
        tokens = batch.tokens.clone()
        tokens[slots] = (tokens[slots] + 1) % VOCABULARY
        return replace(batch, tokens=tokens)

    def run(self, batch, loss_slots):
        """Returns logits, and gradients of the loss at `loss_slots` by the embedded tokens and by the parameters."""
        embedded = []
        hook = self.model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
        logits = next_token_logits(self.model, batch)
        hook.remove()
        targets = batch.targets["next_token"]
        losses = F.cross_entropy(logits, targets.labels, reduction="none") * targets.weights
        parameters = dict(self.model.named_parameters())
        by_embedding, *by_parameter = torch.autograd.grad(losses[loss_slots].sum(), [embedded[0], *parameters.values()])
        return logits.detach(), by_embedding, dict(zip(parameters, by_parameter, strict=True))


def padding_slots(probe):
    """Returns the tail of each pack, which is a segment like any other."""
    covered = torch.zeros(probe.batch.slots, dtype=torch.bool)
    for span in probe.spans:
        covered[span] = True
    edges = torch.nn.functional.pad((~covered).int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)][::2]


def everywhere_but(slots, changed):
    others = torch.ones(slots, dtype=torch.bool)
    others[changed] = False
    return others


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS.keys())
def test_changing_one_sequence_changes_no_other_logits_and_no_other_gradients(packs, decoder, backend):
    probe = Probe(packs, decoder, backend)
    tails = padding_slots(probe)
    assert len(tails) == len(packs)
    for changed in [*probe.spans, *tails]:
        others = everywhere_but(probe.batch.slots, changed)
        logits, by_embedding, by_parameter = probe.run(probe.batch, others)
        new_logits, new_by_embedding, new_by_parameter = probe.run(probe.changed(probe.batch, changed), others)
        assert torch.equal(logits[others], new_logits[others])
        assert torch.equal(by_embedding[others], new_by_embedding[others])
        assert not by_embedding[changed].any()
        assert not new_by_embedding[changed].any()
        for name, gradient in by_parameter.items():
            assert torch.equal(gradient, new_by_parameter[name]), name


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_probe_sees_a_leak_when_segments_are_merged(decoder, backend):
    probe = Probe(PACKS["short neighbours"], decoder, backend)
    batch, changed = probe.merged(), probe.spans[0]
    others = everywhere_but(batch.slots, changed)
    logits, by_embedding, by_parameter = probe.run(batch, others)
    new_logits, new_by_embedding, new_by_parameter = probe.run(probe.changed(batch, changed), others)
    assert (logits - new_logits)[others].abs().max() > 1e-3
    assert (by_embedding - new_by_embedding)[others].abs().max() > 1e-3
    assert by_embedding[changed].abs().max() > 1e-3
    for name in ("blocks.0.attention.query_key_value.weight", "blocks.1.feed_forward.expand.weight"):
        assert (by_parameter[name] - new_by_parameter[name]).abs().max() > 1e-3
