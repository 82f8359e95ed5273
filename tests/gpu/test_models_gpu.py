"""Models on a CUDA device agree with themselves on the CPU, over all available attention backends."""

import math
from dataclasses import replace

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs, roughen

from evenpack.kernels.capabilities import FUSED, AttentionRequest, able_backends
from evenpack.models.bert.config import BertConfig
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
MODELS = {
    "learned": Gpt2Config(kind="gpt2", positions="learned", **SHAPE),
    "alibi": Gpt2Config(kind="gpt2", positions="alibi", **SHAPE),
    "rotary": Gpt2Config(kind="gpt2", positions="rotary", **SHAPE),
    "llama": LlamaConfig(kind="llama", key_value_heads=2, feed_forward_size=512, **SHAPE),
    "bert": BertConfig(kind="bert", dropout=0.0, **SHAPE),
}
of_each_model = pytest.mark.parametrize("name", MODELS)


def build_model(name, *, device=DEVICE, backend="auto", layers=4, **settings):
    config = MODELS[name].model_copy(update={"layers": layers, **settings})
    model = new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=3)
    if name == "bert":
        roughen(model, 0.02)
    return model.to(device)


def some_batch(name, device=DEVICE):
    """Returns packs of one, four and eleven sequences, and the slots of each."""
    make, build = (random_pairs, build_masked_batch) if name == "bert" else (random_sequences, build_batch)
    packs = [make(lengths, vocabulary_size=VOCABULARY) for lengths in ([256], [130, 7, 2, 60], [20] * 11)]
    batch, spans = build(packs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    return batch.to(device), spans


def loss_of(model, batch):
    counts = batch.local_counts
    divisors = {"next_token": counts.targets, "masked_token": counts.targets, "next_sentence": counts.sequences}
    return sum(output.loss_sum / divisors[name] for name, output in model(batch).items())


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def serving_backends(name, *, dropout=False):
    """Returns every backend that supports bfloat16 here; none of torch's own may be missing."""
    request = AttentionRequest(
        device_type="cuda",
        dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        causal=name != "bert",
        alibi=name == "alibi",
        dropout=dropout,
    )
    able = set(able_backends(request))
    assert able >= {"reference", "sdpa"}
    assert dropout or "flex" in able
    assert name == "alibi" or "varlen" in able
    return sorted(able)


def dropping_models():
    """Returns models as they are trained, by backend: with dropout of attention where the backend has it."""
    with_it = {
        backend: build_model("bert", backend=backend, dropout=0.1) for backend in serving_backends("bert", dropout=True)
    }
    without = {
        backend: build_model("bert", backend=backend, dropout=0.1, attention_dropout=0.0)
        for backend in set(serving_backends("bert")) - with_it.keys()
    }
    assert "varlen" in with_it
    assert "flex" in without
    return with_it | without


def bf16_autocast():
    return torch.autocast("cuda", dtype=torch.bfloat16)


def test_initial_weights_are_those_of_the_cpu():
    config = Gpt2Config(kind="gpt2", preset="tiny")
    with DEVICE:
        on_device = Gpt2(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=5)
    on_cpu = Gpt2(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=5).state_dict()
    assert all(parameter.device.type == "cuda" for parameter in on_device.parameters())
    assert all(torch.equal(tensor.cpu(), on_cpu[name]) for name, tensor in on_device.state_dict().items())


@of_each_model
def test_fp32_gives_the_loss_and_gradients_of_the_cpu(name):
    cpu = torch.device("cpu")
    loss, gradients = loss_and_gradients(build_model(name), some_batch(name)[0])
    expected_loss, expected = loss_and_gradients(
        build_model(name, device=cpu, backend="reference"), some_batch(name, cpu)[0]
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for parameter, gradient in expected.items():
        assert (gradients[parameter] - gradient).norm() <= 1e-4 * gradient.norm(), parameter


@of_each_model
def test_bf16_autocast_stays_near_fp32_with_every_backend(name):
    of_loss, of_gradient = (1e-2, 0.1) if name == "bert" else (1e-3, 0.05)
    batch, _ = some_batch(name)
    expected_loss, expected = loss_and_gradients(build_model(name), batch)
    for backend in serving_backends(name):
        with bf16_autocast():
            loss, gradients = loss_and_gradients(build_model(name, backend=backend), batch)
        assert loss == pytest.approx(expected_loss, rel=of_loss), backend
        for parameter, gradient in expected.items():
            assert (gradients[parameter] - gradient).norm() <= of_gradient * gradient.norm(), (backend, parameter)


def states_and_gradient(model, batch, slots):
    """Returns the last hidden states, and the gradient of their sum at `slots` with respect to the embedded tokens."""
    embedded = []
    hook = model.token_embedding.register_forward_hook(lambda *call: embedded.append(call[2]))
    with bf16_autocast():
        hidden = model.hidden_states(batch).float()
    hook.remove()
    weights = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (gradient,) = torch.autograd.grad((hidden[slots] @ weights).sum(), embedded)
    return hidden.detach(), gradient


@of_each_model
def test_sequences_are_isolated_with_every_backend_and_the_control_leaks(name):
    batch, spans = some_batch(name)
    rows = torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32, device=DEVICE)
    changed = spans[1]
    tokens = batch.tokens.clone()
    tokens[changed] = (tokens[changed] + 1) % VOCABULARY
    others = torch.ones(batch.slots, dtype=torch.bool, device=DEVICE)
    others[changed] = False
    for backend in serving_backends(name):
        model = build_model(name, backend=backend)
        deviations = []
        for isolated in (batch, replace(batch, cu_seqlens=rows)):
            hidden, gradient = states_and_gradient(model, isolated, others)
            moved, _ = states_and_gradient(model, replace(isolated, tokens=tokens), others)
            deviations.append(((hidden - moved)[others].abs().max().item(), gradient[changed].abs().max().item()))
        assert deviations[0] == (0.0, 0.0), backend
        assert min(deviations[1]) > 1e-4, backend


def test_dropout_is_drawn_by_the_seed_and_leaves_the_loss_near_that_without():
    batch, _ = some_batch("bert")
    plain, _ = loss_and_gradients(build_model("bert"), batch)
    for backend, model in dropping_models().items():
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            with bf16_autocast():
                found.append(loss_and_gradients(model, batch))
        assert found[0][0] == found[1][0], backend
        assert found[0][0] != found[2][0], backend
        assert found[0][0] == pytest.approx(plain, rel=0.1), backend
        for name, gradient in found[0][1].items():
            assert gradient.isfinite().all(), (backend, name)


@of_each_model
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype when it is switched on
def test_nothing_waits_for_the_device_with_a_fused_kernel(name):
    batch, _ = some_batch(name)
    if name == "bert":
        models = dropping_models()
    else:
        models = {backend: build_model(name, backend=backend) for backend in serving_backends(name)}
    for backend in models.keys() & FUSED:
        with bf16_autocast():
            for _ in range(2):  # kernels are loaded and compiled, and the allocator is warm after this
                loss_of(models[backend], batch).backward()
            torch.cuda.set_sync_debug_mode("error")
            try:
                loss_of(models[backend], batch).backward()
            except RuntimeError as error:
                raise AssertionError(f"{backend} waits") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_activation_checkpointing_needs_less_memory_and_gives_the_same_gradients():
    batch, _ = some_batch("learned")
    peaks, gradients = [], []
    for checkpointing in (False, True):
        model = build_model("learned", layers=16, activation_checkpointing=checkpointing)
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
