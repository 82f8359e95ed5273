"""Buckets of gradients on CUDA's streams, which are written down here while the tensors stay on the CPU."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evenpack.engine.sharding.buckets import BucketedReduction


class Streams:
    """What is asked of two streams, `computing` and `reducing`, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.active = "computing"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("reducing"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream("computing"))
        monkeypatch.setattr(torch.cuda, "stream", self.within)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.notes.append(f"{name} waits for {other.name}"))

    @contextmanager
    def within(self, stream: SimpleNamespace):
        self.active = stream.name
        yield
        self.active = "computing"

    def reduce(self, *, grads: list[torch.Tensor], elements_per_buffer: int) -> None:
        assert elements_per_buffer == sum(gradient.numel() for gradient in grads)
        self.notes.append(f"{self.active}: {[gradient.numel() for gradient in grads]}")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def reduction_of(model: nn.Module, streams: Streams, *, ranks: int = 2) -> BucketedReduction:
    deepspeed: Any = SimpleNamespace(dp_world_size=ranks, buffered_allreduce_fallback=streams.reduce)
    return BucketedReduction(deepspeed, model, bucket_size=6, device=torch.device("cuda"), overlaps=True)


def test_each_bucket_waits_for_its_gradients_and_what_follows_for_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, model = Streams(monkeypatch), two_layers()
    reduction = reduction_of(model, streams)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert streams.notes == []
    reduction.begin()
    model(torch.ones(1, 3)).sum().backward()
    streams.notes.append("stopwatch")
    norm = reduction.finish()
    reduced = ["reducing waits for computing", "reducing: [2]", "reducing waits for computing", "reducing: [10]"]
    reduced += ["reducing waits for computing", "reducing: [5]", "reducing waits for computing", "reducing: [15]"]
    assert streams.notes == [*reduced, "stopwatch", "computing waits for reducing"]
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert float(norm) == pytest.approx(float(gradients.norm()))


def test_what_a_backward_pass_did_not_reach_is_reduced_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, model = Streams(monkeypatch), two_layers()
    reduction = reduction_of(model, streams)
    reduction.begin()
    model[1](model[0](torch.ones(1, 3)).detach()).sum().backward()
    streams.notes.append("stopwatch")
    reduction.finish()
    assert streams.notes.index("stopwatch") == streams.notes.index("reducing: [10]") + 1
    assert streams.notes[-3:] == ["reducing waits for computing", "reducing: [15]", "computing waits for reducing"]
    assert torch.equal(model.get_parameter("0.weight").grad, torch.zeros(5, 3))


def test_one_rank_has_the_mean_already(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, model = Streams(monkeypatch), two_layers()
    reduction = reduction_of(model, streams, ranks=1)
    reduction.begin()
    model(torch.ones(1, 3)).sum().backward()
    assert float(reduction.finish()) > 0.0
    assert not any("[" in note for note in streams.notes)
