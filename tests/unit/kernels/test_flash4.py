"""The operator around FlashAttention 4, over a stand-in for the package; and the package's kernels, made for Hopper."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from evenpack.errors import BackendError
from evenpack.kernels import flash4, reference
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend, unavailable_reason
from evenpack.kernels.segments import Segments
from evenpack.models.families import find_family, known_families

LENGTHS = (7, 0, 30, 1, 19, 0, 0, 0)
SLOTS, HEADS, HEAD_DIM = sum(LENGTHS), 4, 8
REQUEST = AttentionRequest(
    device_type="cuda", dtype=torch.bfloat16, head_dim=64, causal=True, alibi=False, dropout=False
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    return_lse: bool,
) -> tuple[Tensor | None, ...]:
    """Computes what the package's function of this name says that it computes."""
    assert return_lse
    assert cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
    scores = _scores(q, k, cu_seqlens_q, causal, window_size_left, window_size_right)
    output = torch.einsum("hij,jhd->ihd", scores.softmax(-1), _for_each_head(v, q)).contiguous()
    return output, scores.logsumexp(-1), None, None, None


def backward(  # noqa: PLR0917 - as published
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
) -> None:
    assert cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    scores = _scores(q, k, cu_seqlens_q, causal, window_size_left, window_size_right)
    probabilities = (scores - lse[..., None]).exp()
    through_values = torch.einsum("ihd,jhd->hij", dout, _for_each_head(v, q))
    of_rows = (dout * out).sum(-1).T[..., None]
    of_scores = probabilities * (through_values - of_rows) / q.shape[2] ** 0.5
    dq.copy_(torch.einsum("hij,jhd->ihd", of_scores, _for_each_head(k, q)))
    for gradient, of_each_head in (
        (dk, torch.einsum("hij,ihd->jhd", of_scores, q)),
        (dv, torch.einsum("hij,ihd->jhd", probabilities, dout)),
    ):
        gradient.copy_(of_each_head.unflatten(1, (k.shape[1], -1)).sum(2))


def _scores(q: Tensor, k: Tensor, borders: Tensor, *span: Any) -> Tensor:
    causal, left, right = span
    slots = torch.arange(len(q))
    ahead = slots[None, :] - slots[:, None]
    segments = torch.bucketize(slots, borders[1:], right=True)
    visible = segments[None, :] == segments[:, None]
    assert not causal or right in (None, 0)
    right = 0 if causal else right
    visible &= True if right is None else ahead <= right
    visible &= True if left is None else ahead >= -left
    scores = torch.einsum("ihd,jhd->hij", q, _for_each_head(k, q)) / q.shape[2] ** 0.5
    return scores.masked_fill(~visible, -torch.inf)


def _for_each_head(keys_or_values: Tensor, q: Tensor) -> Tensor:
    return keys_or_values.repeat_interleave(q.shape[1] // keys_or_values.shape[1], dim=1)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    flash4.import_failure.cache_clear()
    yield
    flash4.import_failure.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    module = ModuleType(flash4.MODULE)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, flash4.MODULE, module)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, _flash_attn_fwd=forward, _flash_attn_bwd=backward)


def boundaries() -> Tensor:
    return torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)


def segments(cu_seqlens: Tensor, *, causal: bool) -> Segments:
    return Segments(cu_seqlens=cu_seqlens, max_sequence_length=max(LENGTHS), causal=causal)


def results(
    attend: Any, merged: Tensor, *, shared: int, as_one: bool, causal: bool, window: int | None
) -> list[Tensor]:
    """Returns the output, and the gradients of queries, keys and values, which are parts of `merged`."""
    leaf = merged.detach().requires_grad_()
    q, k, v = leaf.split_with_sizes([HEADS, shared, shared], dim=1)
    named = {"merged": leaf} if as_one else {}
    output = attend(q, k, v, segments(boundaries(), causal=causal), window=window, **named)
    incoming = torch.sin(torch.arange(output.numel())).view_as(output)
    (gradient,) = torch.autograd.grad(output, leaf, incoming)
    return [output.detach(), gradient]


def numbers(shared: int) -> Tensor:
    return torch.randn(SLOTS, HEADS + 2 * shared, HEAD_DIM, generator=torch.Generator().manual_seed(shared))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("as_one", [False, True], ids=["three tensors", "one tensor"])
@pytest.mark.parametrize("shared", [HEADS, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 4, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_asks_for_what_the_reference_computes(
    causal: bool, window: int | None, shared: int, as_one: bool
) -> None:
    settings: dict[str, Any] = {"causal": causal, "window": window, "shared": shared}
    found = results(flash4.attend, numbers(shared), as_one=as_one, **settings)
    expected = results(reference.attend, numbers(shared), as_one=False, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("as_one", [False, True], ids=["three tensors", "one tensor"])
def test_the_operator_keeps_torchs_rules_for_operators(as_one: bool) -> None:
    parts = [part.requires_grad_() for part in numbers(2).split_with_sizes([HEADS, 2, 2], dim=1)]
    inputs = [numbers(2).requires_grad_()] if as_one else parts
    named = {"heads": HEADS, "max_sequence_length": max(LENGTHS), "causal": True, "window": None}
    torch.library.opcheck(flash4.flash_attention_4, (inputs, boundaries()), named)


@pytest.mark.usefixtures("package")
def test_compiled_it_is_one_graph_for_any_number_of_segments_and_slots() -> None:
    counted: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        counted.append(sum("flash_attention_4" in str(node.target) for node in graph.graph.nodes))
        return graph

    def attend(merged: Tensor, within: Segments) -> Tensor:
        q, k, v = merged.split_with_sizes([HEADS, HEADS, HEADS], dim=1)
        return flash4.attend(q, k, v, within, merged=merged)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=count, fullgraph=True, dynamic=True)
    for cut in (0, 2, 4):  # segments at the end are left out
        borders = boundaries()[: len(LENGTHS) + 1 - cut].clone()
        merged = numbers(HEADS)[: int(borders[-1])].clone()
        within = segments(borders, causal=True)
        assert torch.equal(compiled(merged, within), attend(merged, within))
    assert counted == [1]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({}, (9, 0), None),
        ({}, (10, 0), None),
        ({"window": True, "causal": False, "dtype": torch.float16, "head_dim": 128}, (9, 0), None),
        ({"dropout": True}, (9, 0), "no dropout"),
        ({"alibi": True}, (9, 0), "no ALiBi"),
        ({"dtype": torch.float32}, (9, 0), "not float32"),
        ({"head_dim": 60}, (9, 0), "head_dim 60 is not"),
        ({"head_dim": 136}, (9, 0), "head_dim 136 is not"),
        ({}, (8, 0), "this device has 8.0"),
        ({}, (12, 0), "this device has 12.0"),
        ({"device_type": "cpu"}, (9, 0), "needs a CUDA device, not cpu"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    gpu: Callable[..., None], change: dict[str, Any], capability: tuple[int, int], reason: str | None
) -> None:
    gpu(*capability)
    request = replace(REQUEST, **change)
    found = unavailable_reason("flash4", request)
    if reason is None:
        assert found is None
        assert resolve_backend("flash4", request) == "flash4"
        return
    assert reason in str(found)
    with pytest.raises(BackendError, match=r"'flash4' cannot serve .*attention.backend=auto or .*: reference"):
        resolve_backend("flash4", request)


@pytest.mark.usefixtures("package", "gpu")
def test_auto_never_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_backend("auto", REQUEST) == "varlen"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    resolve_backend.cache_clear()
    assert resolve_backend("auto", REQUEST) != "flash4"


def test_a_package_that_is_missing_or_another_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, flash4.MODULE, None)
    assert flash4.import_failure() is not None
    flash4.import_failure.cache_clear()
    install(monkeypatch, _flash_attn_fwd=forward)
    assert "_flash_attn_bwd of this flash-attn-4 does not take causal, cu_seqlens_k" in str(flash4.import_failure())
    flash4.import_failure.cache_clear()
    install(monkeypatch, _flash_attn_fwd=lambda q, k, v: None, _flash_attn_bwd=backward)
    assert "_flash_attn_fwd of this flash-attn-4 does not take" in str(flash4.import_failure())


COMPILE = """
import json, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from evenpack.kernels import flash4

assert flash4.import_failure() is None, flash4.import_failure()
for heads, shared, head_dim, causal, window, segments in json.loads(sys.argv[1]):
    with FakeTensorMode(), torch.device("cuda"):
        merged = torch.empty(8192, heads + 2 * shared, head_dim, dtype=torch.bfloat16)
        borders = torch.empty(segments + 1, dtype=torch.int32)
        settings = {"heads": heads, "max_sequence_length": 512, "causal": causal, "window": window}
        output, logarithms = flash4.compute([merged], borders, **settings)
        (gradient,) = flash4.differentiate(output, [merged], output, logarithms, borders, **settings)
    assert (output.shape, logarithms.shape) == ((8192, heads, head_dim), (heads, 8192))
    assert gradient.shape == merged.shape and gradient.is_contiguous()
"""
"""Fake tensors of a GPU: the package then makes its kernels and starts none."""

Shape = tuple[int, int, int, bool, int | None, int]


def shipped_shapes() -> dict[tuple[int | bool, ...], Shape]:
    """Returns a shape for each kernel that a preset would take, by what kernels are made for."""
    found: dict[tuple[int | bool, ...], Shape] = {}
    for name in known_families():
        family = find_family(name)
        for preset in family.config.presets:
            model = family.config(kind=name, preset=preset)
            heads = model.shape["heads"]
            shared = model.shape.get("key_value_heads", heads)
            for window in model.attention_windows:
                kernel = (heads // shared, model.head_dim, family.causal, window is None)
                found.setdefault(kernel, (heads, shared, model.head_dim, family.causal, window, 97))
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("cutlass") is None, reason="flash-attn-4 is not installed: its kernels are not made")
def test_the_kernels_of_shipped_models_are_made_for_hopper(tmp_path: Path) -> None:
    shapes = shipped_shapes()
    assert {(1, 64, True, True), (1, 64, False, True), (1, 64, False, False), (4, 128, True, True)} <= shapes.keys()
    many_segments = (12, 12, 64, True, None, 400)  # a kernel of its own, above 256
    environment = {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "-c", COMPILE, json.dumps([*shapes.values(), many_segments])]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = Counter(path.parent.name for path in tmp_path.rglob("*.o"))
    assert (made["fwd"], made["bwd"]) == (len(shapes) + 1, len(shapes) + 1)
    assert made["bwd_pre"] > 0
    assert made["bwd_post"] > 0
