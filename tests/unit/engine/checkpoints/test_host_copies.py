"""A copy of a state dict makes the same file as the state did, whatever training does to the state."""

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from evenpack.engine.checkpoints import background
from evenpack.engine.checkpoints.background import HostCopies


class Tied(nn.Module):
    """A model with a weight that two layers share, a buffer, and an optimizer that has made a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


class Holder:
    """An object of a library in whose attribute a tensor is."""

    def __init__(self) -> None:
        self.scale = torch.ones(1)


def state() -> dict[str, Any]:
    """Returns a state with all that DeepSpeed's have: ties, views into a flat tensor, marked tensors, odd strides."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.head(model.embedding(torch.arange(7))).sum().backward()
    optimizer.step()
    flat = torch.randn(10, requires_grad=True)
    marked = flat.detach()[6:]
    marked.mark = {"beside": flat}
    return {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "groups": [flat[:6], marked],
        "transposed": torch.randn(3, 5, dtype=torch.float64).t(),
        "bf16": torch.randn(3).bfloat16(),
        "empty": torch.empty(0),
        "shapes": OrderedDict(a=torch.Size([7, 4])),
        "text": "text",
        "none": None,
        "holder": Holder(),
    }


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def change(value: Any) -> None:
    """Changes all tensors in place, as a step does."""
    with torch.no_grad():
        for tensor in [*background._tensors_in(value), value["holder"].scale]:
            tensor.add_(1)


def test_a_copy_makes_the_same_file_after_the_state_has_changed():
    original = state()
    expected = saved(original)
    copied = HostCopies().copy(original)
    change(original)
    assert saved(original) != expected
    assert saved(copied) == expected


def test_the_next_save_uses_the_memory_of_the_one_before():
    copies, original = HostCopies(), state()
    first = copies.copy(original)
    change(original)
    copies.begin()
    second = copies.copy(original)
    assert saved(second) == saved(original)
    places = [[tensor.data_ptr() for tensor in background._tensors_in(one)] for one in (first, second)]
    assert places[0] == places[1]


def test_states_of_one_save_have_memory_of_their_own():
    copies, original = HostCopies(), state()
    expected = saved(original)
    first = copies.copy(original)
    change(original)
    copies.copy(original)
    assert saved(first) == expected


def test_a_state_that_has_grown_is_copied_into_larger_memory():
    copies = HostCopies()
    for size in (3, 5, 2):
        copies.begin()
        assert torch.equal(copies.copy([torch.arange(size)])[0], torch.arange(size))


def test_too_little_memory_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch):
    real = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if size[0] > 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*size, **options)

    monkeypatch.setattr(background.torch, "empty", empty)
    with pytest.raises(OSError, match=r"can't allocate memory.*checkpoint_in_background=false"):
        HostCopies().copy([torch.ones(3)])
