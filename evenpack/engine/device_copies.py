"""Micro-batches on their way to the device: on CUDA each is copied while the one before it is computed.

The loader page-locks what is copied (`pin_memory`), so a copy needs no time of the host. On a stream of its own it also
needs none of the stream that computes, which waits for an event and not for the queue.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from evenpack.batch import PackedBatch


class DeviceCopies:
    """Copies micro-batches to one device, one ahead of the one that is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            new_stream: Any = torch.cuda.Stream  # has no annotations
            self._stream = new_stream(device)

    def of(self, micro_batches: Sequence[PackedBatch]) -> Iterator[PackedBatch]:
        """Yields each micro-batch on the device, in order; a caller queues its work before it asks for the next."""
        copies = map(self._copy, micro_batches)
        ahead = next(copies, None)
        while ahead is not None:
            batch, is_copied = ahead
            ahead = next(copies, None)
            self._wait_for(batch, is_copied)
            yield batch

    def _copy(self, batch: PackedBatch) -> tuple[PackedBatch, Any]:
        """Returns the batch on the device, and the event that its copy is finished; None on a CPU."""
        if self._stream is None:
            return batch.to(self._device), None
        with torch.cuda.stream(self._stream):
            return batch.to(self._device, non_blocking=True), self._stream.record_event()

    def _wait_for(self, batch: PackedBatch, is_copied: Any) -> None:
        """Lets the computing stream wait for the copy, and keeps the memory until that stream has used it."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(is_copied)
        for tensor in batch.moved_tensors:
            tensor.record_stream(computing)
