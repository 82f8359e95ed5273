"""The CUDA backends agree with the formula, in the shapes of training."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from evenpack.kernels.attention import packed_attention
from evenpack.kernels.capabilities import AttentionRequest, able_backends, unavailable_reason
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.kernels.isolation import probe_isolation
from evenpack.kernels.segments import Segments

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM = 4, 64
STATIC_LENGTHS = (100, 1, 300, 17, 0, 94, 512, 0, 0, 0, 0, 0)
"""1024 slots; empty segments fill the borders up to their fixed number."""

CASES = [
    (dtype, causal, alibi)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for causal in (False, True)
    for alibi in (False, True)
]
RATE = 0.1
"""Dropout of attention probabilities."""

ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def serving(dtype: torch.dtype, causal: bool, alibi: bool) -> list[str]:
    """Returns the backends that are compared with the reference; flash only if flash-attn is installed."""
    request = AttentionRequest(
        device_type="cuda", dtype=dtype, head_dim=HEAD_DIM, causal=causal, alibi=alibi, dropout=False
    )
    able = [backend for backend in able_backends(request) if backend != "reference"]
    assert {"sdpa", "flex"} <= set(able)  # flex alone computes FP32 in one kernel, and ALiBi without flash-attn
    assert ("varlen" in able) == (dtype != torch.float32 and not alibi)
    return able


def dropping(dtype: torch.dtype, causal: bool) -> list[str]:
    """Returns the backends with dropout; flex has none."""
    request = AttentionRequest(
        device_type="cuda", dtype=dtype, head_dim=HEAD_DIM, causal=causal, alibi=False, dropout=True
    )
    able = able_backends(request)
    assert {"reference", "sdpa", "varlen"} <= set(able)
    assert "flex" not in able
    return able


def boundaries() -> Tensor:
    return torch.tensor((0, *STATIC_LENGTHS), device="cuda").cumsum(0).to(torch.int32)


def segments(cu_seqlens: Tensor | None = None, *, causal: bool, slopes: Tensor | None = None) -> Segments:
    """Returns segments that are at most 1024 long, an upper bound above the longest one here."""
    borders = boundaries() if cu_seqlens is None else cu_seqlens
    return Segments(cu_seqlens=borders, max_sequence_length=1024, causal=causal, alibi_slopes=slopes)


def random_inputs(dtype: torch.dtype, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(STATIC_LENGTHS), HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for _ in range(count)]


def dropped(backend: str, inputs: list[Tensor], *, causal: bool, seed: int = 5) -> Tensor:
    """Returns attention with a tenth of the probabilities dropped, the same ones for the same seed."""
    torch.manual_seed(seed)
    return packed_attention(*inputs, segments(causal=causal), dropout=RATE, backend=backend)


def run(
    backend: str,
    dtype: torch.dtype,
    *,
    causal: bool,
    alibi: bool = False,
    key_value_heads: int = HEADS,
    window: int | None = None,
) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v, in FP32."""
    q, k, v, upstream = random_inputs(dtype, 4)
    k, v = k[:, :key_value_heads].clone(), v[:, :key_value_heads].clone()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    slopes = torch.exp2(-2 * torch.arange(1.0, HEADS + 1, device="cuda")) if alibi else None
    output = packed_attention(*inputs, segments(causal=causal, slopes=slopes), window=window, backend=backend)
    return [tensor.detach().float() for tensor in (output, *torch.autograd.grad(output, inputs, upstream))]


def assert_near(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype, backend: str) -> None:
    """Compares to the rounding of the type, and names the backend that differs."""
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding, msg=lambda text: f"{backend}: {text}")


@pytest.mark.parametrize("key_value_heads", [1, 2, HEADS])
@pytest.mark.parametrize(("dtype", "causal", "alibi"), CASES)
def test_outputs_and_gradients_are_those_of_the_reference(
    dtype: torch.dtype, causal: bool, alibi: bool, key_value_heads: int
) -> None:
    expected = run("reference", dtype, causal=causal, alibi=alibi, key_value_heads=key_value_heads)
    for backend in serving(dtype, causal, alibi):
        actual = run(backend, dtype, causal=causal, alibi=alibi, key_value_heads=key_value_heads)
        assert_near(actual, expected, dtype, backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_windows_are_those_of_the_reference(dtype: torch.dtype, causal: bool) -> None:
    request = AttentionRequest(
        device_type="cuda", dtype=dtype, head_dim=HEAD_DIM, causal=causal, alibi=False, dropout=False, window=True
    )
    able = set(able_backends(request)) - {"reference"}
    assert {"sdpa", "flex"} <= able
    expected, whole = (run("reference", dtype, causal=causal, window=window) for window in (32, None))
    assert (expected[0] - whole[0]).abs().max() > 0.1, "the window leaves something out"
    for backend in sorted(able):
        actual = run(backend, dtype, causal=causal, window=32)
        assert_near(actual, expected, dtype, backend)


@pytest.mark.parametrize("segments", [12, 400])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("causal", [False, True])
def test_flash4_computes_one_tensor_as_the_reference_does(causal: bool, window: int | None, segments: int) -> None:
    request = AttentionRequest(
        device_type="cuda", dtype=torch.bfloat16, head_dim=HEAD_DIM, causal=causal, alibi=False, dropout=False
    )
    reason = unavailable_reason("flash4", request)
    if reason is not None:
        pytest.skip(reason)
    borders = torch.cat([boundaries(), boundaries()[-1:].expand(segments - len(STATIC_LENGTHS))])
    merged = torch.cat(random_inputs(torch.bfloat16, 3), dim=1)
    upstream = random_inputs(torch.bfloat16, 4)[3]
    found = []
    for backend in ("flash4", "reference"):
        leaf = merged.detach().requires_grad_()
        q, k, v = leaf.split(HEADS, dim=1)
        within = segments(borders, causal=causal)
        output = packed_attention(q, k, v, within, window=window, backend=backend, merged=leaf)
        found.append([output.detach().float(), torch.autograd.grad(output, leaf, upstream)[0].float()])
    assert_near(*found, torch.bfloat16, "flash4")


@pytest.mark.parametrize(("dtype", "causal", "alibi"), CASES)
def test_segments_are_isolated_and_the_control_leaks(dtype: torch.dtype, causal: bool, alibi: bool) -> None:
    for backend in serving(dtype, causal, alibi):
        result = probe_isolation(backend, device="cuda", dtype=dtype, causal=causal, alibi=alibi)
        assert result.control_leaks, (backend, result)
        assert result.passed, (backend, result)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_keeps_the_mean_and_draws_by_the_seed(causal: bool) -> None:
    for backend in dropping(torch.bfloat16, causal):
        q, k, v = random_inputs(torch.bfloat16, 3)
        ones = [q, k, torch.ones_like(v)]
        outputs = [dropped(backend, ones, causal=causal, seed=seed).float() for seed in (5, 5, 6)]
        assert torch.equal(outputs[0], outputs[1]), backend
        assert not torch.equal(outputs[0], outputs[2]), backend
        assert outputs[0].mean().item() == pytest.approx(1.0, abs=0.02), backend  # probabilities add up to 1
        assert outputs[0].std().item() > 0.02, backend


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(causal: bool) -> None:
    """Output is linear in v where the same probabilities are dropped: v · its gradient is output · its gradient."""
    for backend in dropping(torch.bfloat16, causal):
        *inputs, upstream = random_inputs(torch.bfloat16, 4)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        output = dropped(backend, inputs, causal=causal)
        gradient = torch.autograd.grad(output, inputs[2], upstream)[0]
        through_output, through_v = (output * upstream).double(), (inputs[2] * gradient).double()
        scale = through_output.abs().sum().item()
        assert through_v.sum().item() == pytest.approx(through_output.sum().item(), abs=2e-4 * scale), backend
        others = [dropped(backend, inputs, causal=causal, seed=seed) for seed in range(90, 98)]
        sums = [(other * upstream).double().sum().item() for other in others]
        # The check sees where others are dropped; a single draw may be as near by chance, as one was.
        assert max(abs(one - through_v.sum().item()) for one in sums) > 4e-4 * scale, backend


@pytest.mark.parametrize("causal", [False, True])
def test_segments_are_isolated_with_dropout(causal: bool) -> None:
    first = STATIC_LENGTHS[0]
    for backend in dropping(torch.bfloat16, causal):
        inputs = random_inputs(torch.bfloat16, 3)
        changed = [torch.cat([tensor[:first] * 8, tensor[first:]]) for tensor in inputs]
        outputs = [dropped(backend, each, causal=causal) for each in (inputs, changed)]
        assert torch.equal(outputs[0][first:], outputs[1][first:]), backend
        assert not torch.equal(outputs[0][:first], outputs[1][:first]), backend


def test_flex_is_compiled_once_for_all_boundaries() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in random_inputs(torch.bfloat16, 3))
    graphs = []
    for shift in range(4):
        moved = boundaries().clone()
        moved[1:-1] = torch.clamp(moved[1:-1] - shift, min=0)
        output = packed_attention(q, k, v, segments(moved, causal=True), backend="flex")
        output.float().sum().backward()
        graphs.append(int(counters["stats"]["unique_graphs"]))
    assert graphs[1:] == graphs[:1] * 3


def test_deterministic_fused_kernels_agree_bit_for_bit_in_two_runs() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for backend in set(serving(torch.bfloat16, causal=True, alibi=False)) - {"sdpa"}:
            first, second = (run(backend, torch.bfloat16, causal=True, alibi=False) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), backend
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_lm_head_agrees_with_the_cpu_and_holds_one_chunk_of_logits() -> None:
    tokens, hidden_size, vocabulary, chunk_tokens = 4096, 64, 20_000, 256
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, generator=generator)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        inputs = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, correct = linear_cross_entropy(
            *inputs, labels.to(device), torch.ones(tokens, device=device), chunk_tokens=chunk_tokens
        )
        found.append([loss, correct, *torch.autograd.grad(loss, inputs)])
    assert torch.cuda.max_memory_allocated() - before < 4 * vocabulary * tokens / 4  # a quarter of all logits
    for on_cpu, on_cuda in zip(*found, strict=True):
        torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=1e-3, atol=1e-3)


def test_the_weight_gradient_of_bfloat16_chunks_is_not_rounded_before_it_is_summed() -> None:
    """The label's row is -257 * 127 / 128 = -254.992, which bfloat16 would round to -255."""
    tokens = 257
    hidden = torch.ones(tokens, 64, device="cuda")
    weight = torch.zeros(128, 64, device="cuda", requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, labels, torch.ones(tokens, device="cuda"))
    (gradient,) = torch.autograd.grad(loss, weight)
    expected = torch.full_like(gradient, tokens / 128)
    expected[0] -= tokens
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0.0)
