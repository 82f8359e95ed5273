"""Micro-batches come to the device in order, each copied before the work of the one before it is queued."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from batches import build_batch, random_sequences

from evenpack.batch import PackedBatch
from evenpack.engine.engine import DeviceCopies


def micro_batches(count: int) -> list[PackedBatch]:
    return [
        build_batch([random_sequences([5, 3 + index], vocabulary_size=50)], "packed", max_sequence_length=8)[0]
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_on_a_cpu_every_micro_batch_comes_as_it_is(count: int) -> None:
    batches = micro_batches(count)
    found = list(DeviceCopies(torch.device("cpu")).of(batches))
    assert [one.tokens.data_ptr() for one in found] == [one.tokens.data_ptr() for one in batches]


class Recorded:
    """CUDA's streams, which write down what is asked of them; tensors stay on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.active = "computing"
        self.copies = 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("copying"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream("computing"))
        monkeypatch.setattr(torch.cuda, "stream", self.within)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.notes.append(f"keep for {stream.name}")
        )

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, record_event=lambda: self.copies, wait_event=lambda event: self.notes.append(f"wait {event}")
        )

    @contextmanager
    def within(self, stream: SimpleNamespace):
        self.active = stream.name
        yield
        self.active = "computing"


def test_on_cuda_each_batch_is_copied_on_its_own_stream_during_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)

    def copy(batch: PackedBatch, device: torch.device, *, non_blocking: bool = False) -> PackedBatch:
        recorded.copies += 1
        recorded.notes.append(f"copy {recorded.copies} on {recorded.active}, {non_blocking}")
        return batch

    monkeypatch.setattr(PackedBatch, "to", copy)
    for number, batch in enumerate(DeviceCopies(torch.device("cuda:0")).of(micro_batches(3)), start=1):
        kept = [note for note in recorded.notes if note.startswith("keep")]
        assert len(kept) == number * len(batch.moved_tensors)
        recorded.notes.append(f"compute {number}")
    assert [note for note in recorded.notes if note != "keep for computing"] == [
        "copy 1 on copying, True",
        "copy 2 on copying, True",
        "wait 1",
        "compute 1",
        "copy 3 on copying, True",
        "wait 2",
        "compute 2",
        "wait 3",
        "compute 3",
    ]
