"""Decoders on a CUDA device agree with themselves on the CPU, over all available attention backends."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import build_batch, random_sequences
from scored_tokens import next_token_logits

from evenpack.kernels.capabilities import FUSED, AttentionRequest, able_backends
from evenpack.models.build import new_model
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2
from evenpack.models.llama.config import LlamaConfig

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCABULARY = 1000
LONGEST = 256
HEAD_DIM = 64


SHAPE = {"preset": "tiny", "hidden_size": 4 * HEAD_DIM, "heads": 4}
DECODERS = {
    "learned": Gpt2Config(kind="gpt2", positions="learned", **SHAPE),
    "alibi": Gpt2Config(kind="gpt2", positions="alibi", **SHAPE),
    "rotary": Gpt2Config(kind="gpt2", positions="rotary", **SHAPE),
    "llama": LlamaConfig(kind="llama", key_value_heads=2, feed_forward_size=512, **SHAPE),
}


def build_model(*, decoder="learned", device=DEVICE, backend="auto", layers=4, **settings):
    config = DECODERS[decoder].model_copy(update={"layers": layers, **settings})
    model = new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=3)
    return model.to(device)


def some_batch(device=DEVICE):
    packs = [random_sequences(lengths, vocabulary_size=VOCABULARY) for lengths in ([256], [130, 7, 1, 60], [20] * 11)]
    batch, spans = build_batch(packs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    return batch.to(device), spans


def loss_and_gradients(model, batch):
    model.zero_grad()
    sums = model(batch)
    sums["next_token"].loss_sum.backward()
    return sums["next_token"].loss_sum.item(), {
        name: parameter.grad.cpu() for name, parameter in model.named_parameters()
    }


def serving_backends(decoder):
    """Returns every backend that supports bfloat16 here; none of torch's own may be missing."""
    request = AttentionRequest(
        device_type="cuda",
        dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        causal=True,
        alibi=decoder == "alibi",
        dropout=False,
    )
    able = set(able_backends(request))
    assert able >= {"reference", "sdpa", "flex"} | (set() if decoder == "alibi" else {"varlen"})
    return sorted(able)


def bf16_autocast():
    return torch.autocast("cuda", dtype=torch.bfloat16)


def test_initial_weights_are_those_of_the_cpu():
    config = Gpt2Config(kind="gpt2", preset="tiny")
    with DEVICE:
        on_device = Gpt2(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=5)
    on_cpu = Gpt2(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=5).state_dict()
    assert all(parameter.device.type == "cuda" for parameter in on_device.parameters())
    assert all(torch.equal(tensor.cpu(), on_cpu[name]) for name, tensor in on_device.state_dict().items())


@pytest.mark.parametrize("decoder", DECODERS)
def test_fp32_gives_the_loss_and_gradients_of_the_cpu(decoder):
    cpu = torch.device("cpu")
    loss, gradients = loss_and_gradients(build_model(decoder=decoder), some_batch()[0])
    expected_loss, expected = loss_and_gradients(
        build_model(device=cpu, backend="reference", decoder=decoder), some_batch(cpu)[0]
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("decoder", DECODERS)
def test_bf16_autocast_stays_near_fp32_with_every_backend(decoder):
    batch, _ = some_batch()
    expected_loss, expected = loss_and_gradients(build_model(decoder=decoder), batch)
    for backend in serving_backends(decoder):
        with bf16_autocast():
            loss, gradients = loss_and_gradients(build_model(backend=backend, decoder=decoder), batch)
        assert loss == pytest.approx(expected_loss, rel=1e-3), backend
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).norm() <= 0.05 * gradient.norm(), (backend, name)


def losses_at(model, batch, slots):
    """Returns logits, and the gradient of the loss at `slots` with respect to the embedded tokens."""
    embedded = []
    hook = model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
    with bf16_autocast():
        logits = next_token_logits(model, batch)
    hook.remove()
    losses = (
        F.cross_entropy(logits.float(), batch.targets["next_token"].labels, reduction="none")
        * batch.targets["next_token"].weights
    )
    (gradient,) = torch.autograd.grad(losses[slots].sum(), embedded)
    return logits.detach().float(), gradient


@pytest.mark.parametrize("decoder", DECODERS)
def test_sequences_are_isolated_with_every_backend_and_the_control_leaks(decoder):
    batch, spans = some_batch()
    rows = torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32, device=DEVICE)
    changed = spans[1]
    tokens = batch.tokens.clone()
    tokens[changed] = (tokens[changed] + 1) % VOCABULARY
    others = torch.ones(batch.slots, dtype=torch.bool, device=DEVICE)
    others[changed] = False
    for backend in serving_backends(decoder):
        model = build_model(backend=backend, decoder=decoder)
        deviations = []
        for isolated in (batch, replace(batch, cu_seqlens=rows)):
            logits, gradient = losses_at(model, isolated, others)
            new_logits, _ = losses_at(model, replace(isolated, tokens=tokens), others)
            deviations.append(((logits - new_logits)[others].abs().max().item(), gradient[changed].abs().max().item()))
        assert deviations[0] == (0.0, 0.0), backend
        assert min(deviations[1]) > 1e-4, backend


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype when it is switched on
def test_nothing_waits_for_the_device_with_a_fused_kernel(decoder):
    batch, _ = some_batch()
    for backend in [name for name in serving_backends(decoder) if name in FUSED]:
        model = build_model(decoder=decoder, backend=backend)
        with bf16_autocast():
            for _ in range(2):
                model(batch)[
                    "next_token"
                ].loss_sum.backward()  # kernels are loaded and compiled, and the allocator is warm after this
            torch.cuda.set_sync_debug_mode("error")
            try:
                model(batch)["next_token"].loss_sum.backward()
            except RuntimeError as error:
                raise AssertionError(f"{backend} waits") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_activation_checkpointing_needs_less_memory_and_gives_the_same_gradients():
    batch, _ = some_batch()
    peaks, gradients = [], []
    for checkpointing in (False, True):
        model = build_model(layers=16, activation_checkpointing=checkpointing)
        torch.cuda.reset_peak_memory_stats()
        with bf16_autocast():
            gradients.append(loss_and_gradients(model, batch)[1])
        peaks.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        del model
    assert peaks[1] < 0.6 * peaks[0]
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 1e-2 * gradient.norm(), name


def test_xl_takes_a_step_in_bf16_autocast_and_its_loss_falls():
    with DEVICE:
        model = Gpt2(
            Gpt2Config(kind="gpt2", preset="xl", activation_checkpointing=True),
            vocabulary_size=50_257,
            max_positions=1024,
        )
    packs = [random_sequences([700, 300], vocabulary_size=50_257), random_sequences([1024], vocabulary_size=50_257)]
    batch, _ = build_batch(packs, "packed", max_sequence_length=1024, pack_length=1024)
    batch = batch.to(DEVICE)
    means = []
    for _ in range(3):
        with bf16_autocast():
            sums = model(batch)
        mean = sums["next_token"].loss_sum / batch.local_counts.targets
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        means.append(mean.item())
    assert means[0] == pytest.approx(math.log(50_257), rel=0.05)
    assert means[2] < means[1] < means[0]
