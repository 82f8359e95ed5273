"""Copies of training state in host memory, which are written to disk while training changes the state itself."""

import copy
import errno
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class HostCopies:
    """Copies states, each save into the memory of the one before, which must be on disk.

    That memory is as large as the files that this rank writes. For tensors of a GPU it is pinned, and torch rounds each
    part up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def begin(self) -> None:
        """Begins a save: the memory of the previous one may be overwritten."""
        self._used = 0

    def copy(self, state: Any) -> Any:
        """Returns a copy of a state dict that shares nothing with it and makes the same file.

        Tensors that share memory (tied weights, views into a flat buffer) share it in the copy. The host waits for a
        device.

        Raises: OSError if there is not enough memory.
        """
        storages: dict[int, UntypedStorage] = {}
        devices = set()
        copies: dict[int, Any] = {}
        tensors = _tensors_in(state)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = self._copied(storage)
                devices.add(storage.device)
            copies[id(tensor)] = _view_like(tensor, storages[storage._cdata])
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        for tensor in tensors:  # DeepSpeed marks tensors by attributes, which are saved as well
            vars(copies[id(tensor)]).update(copy.deepcopy(vars(tensor), copies))
        return copy.deepcopy(state, copies)  # of the tensors it takes these copies

    def _copied(self, storage: UntypedStorage) -> UntypedStorage:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        buffer = self._next_buffer(storage.nbytes(), is_pinned=storage.device.type == "cuda")
        buffer.copy_(source, non_blocking=True)
        return buffer.untyped_storage()

    def _next_buffer(self, size: int, *, is_pinned: bool) -> Tensor:
        """Returns the buffer of the same place in the previous save; a new one if that had another size, in bytes."""
        index, self._used = self._used, self._used + 1
        if index == len(self._buffers) or self._buffers[index].numel() != size:
            del self._buffers[index:]  # before the next allocation
            try:
                self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
            except RuntimeError as error:
                raise OSError(
                    errno.ENOMEM,
                    f"no host memory for a copy of what this rank saves ({error}); "
                    "training.checkpoint_in_background=false saves without a copy",
                ) from error
        return self._buffers[index]


def _tensors_in(value: Any) -> list[Tensor]:
    """Returns the plain tensors in nested containers and in attributes of tensors, each once.

    Those in other objects are left to `copy.deepcopy`.
    """
    found: dict[int, Tensor] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) is Tensor and id(one) not in found:
            found[id(one)] = one
            waiting += reversed(vars(one).values())
        elif isinstance(one, dict):
            waiting += reversed(one.values())
        elif isinstance(one, list | tuple):
            waiting += reversed(one)
    return list(found.values())


def _view_like(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Returns a tensor that views `storage` as `tensor` does its own."""
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return view.requires_grad_(tensor.requires_grad)
