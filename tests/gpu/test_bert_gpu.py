"""BERT on a CUDA device agrees with itself on the CPU, over all available attention backends."""

from dataclasses import replace

import pytest
import torch
from masked_batches import build_masked_batch, random_pairs, roughen

from evenpack.kernels.capabilities import FUSED, AttentionRequest, able_backends
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCABULARY = 1000
LONGEST = 256
HEAD_DIM = 64


def build_model(*, device=DEVICE, backend="auto", dropout=0.0, attention_dropout=None):
    config = BertConfig(
        kind="bert",
        preset="tiny",
        layers=4,
        hidden_size=4 * HEAD_DIM,
        heads=4,
        dropout=dropout,
        attention_dropout=attention_dropout,
    )
    model = Bert(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=3)
    roughen(model, 0.02)
    return model.to(device)


def some_batch(device=DEVICE):
    packs = [random_pairs(lengths, vocabulary_size=VOCABULARY) for lengths in ([256], [130, 7, 2, 60], [20] * 11)]
    batch, spans = build_masked_batch(packs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    return batch.to(device), spans


def loss_of(model, batch):
    sums = model(batch)
    return (
        sums["masked_token"].loss_sum / batch.local_counts.targets
        + sums["next_sentence"].loss_sum / batch.local_counts.sequences
    )


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def serving_backends(*, dropout=False):
    """Returns every backend that supports bfloat16 here; none of torch's own may be missing."""
    request = AttentionRequest(
        device_type="cuda", dtype=torch.bfloat16, head_dim=HEAD_DIM, causal=False, alibi=False, dropout=dropout
    )
    able = set(able_backends(request))
    assert able >= ({"reference", "sdpa"} if dropout else {"reference", "sdpa", "varlen", "flex"})
    return sorted(able)


def dropping_models():
    """Returns models as they are trained, by backend: with dropout of attention where the backend has it."""
    with_it = {backend: build_model(backend=backend, dropout=0.1) for backend in serving_backends(dropout=True)}
    without = {
        backend: build_model(backend=backend, dropout=0.1, attention_dropout=0.0)
        for backend in set(serving_backends()) - with_it.keys()
    }
    assert "varlen" in with_it
    assert "flex" in without
    return with_it | without


def bf16_autocast():
    return torch.autocast("cuda", dtype=torch.bfloat16)


def test_fp32_gives_the_loss_and_gradients_of_the_cpu():
    cpu = torch.device("cpu")
    loss, gradients = loss_and_gradients(build_model(), some_batch()[0])
    expected_loss, expected = loss_and_gradients(build_model(device=cpu, backend="reference"), some_batch(cpu)[0])
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_bf16_autocast_stays_near_fp32_with_every_backend():
    batch, _ = some_batch()
    expected_loss, expected = loss_and_gradients(build_model(), batch)
    for backend in serving_backends():
        with bf16_autocast():
            loss, gradients = loss_and_gradients(build_model(backend=backend), batch)
        assert loss == pytest.approx(expected_loss, rel=1e-2), backend
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).norm() <= 0.1 * gradient.norm(), (backend, name)


def test_sequences_are_isolated_with_every_backend_and_the_control_leaks():
    batch, spans = some_batch()
    rows = torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32, device=DEVICE)
    changed = spans[1]
    tokens = batch.tokens.clone()
    tokens[changed] = (tokens[changed] + 1) % VOCABULARY
    others = torch.ones(batch.slots, dtype=torch.bool, device=DEVICE)
    others[changed] = False
    for backend in serving_backends():
        model, deviations = build_model(backend=backend), []
        for isolated in (batch, replace(batch, cu_seqlens=rows)):
            with bf16_autocast(), torch.no_grad():
                hidden = model.hidden_states(isolated)
                new_hidden = model.hidden_states(replace(isolated, tokens=tokens))
            deviations.append((hidden.float() - new_hidden.float())[others].abs().max().item())
        assert deviations[0] == 0.0, backend
        assert deviations[1] > 1e-4, backend


def test_dropout_is_drawn_by_the_seed_and_leaves_the_loss_near_that_without():
    batch, _ = some_batch()
    plain, _ = loss_and_gradients(build_model(), batch)
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype when it is switched on
def test_nothing_waits_for_the_device_with_a_fused_kernel_and_dropout():
    batch, _ = some_batch()
    models = {backend: model for backend, model in dropping_models().items() if backend in FUSED}
    for backend, model in models.items():
        with bf16_autocast():
            for _ in range(2):
                loss_of(
                    model, batch
                ).backward()  # kernels are loaded and compiled, and the allocator is warm after this
            torch.cuda.set_sync_debug_mode("error")
            try:
                loss_of(model, batch).backward()
            except RuntimeError as error:
                raise AssertionError(f"{backend} waits") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
