"""The CUDA backends agree with the formula, in the shapes of training."""

import pytest
import torch
from torch import Tensor

from evenpack.kernels.attention import AttentionRequest, packed_attention
from evenpack.kernels.capabilities import capabilities
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.kernels.isolation import probe_isolation

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
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def serving(dtype: torch.dtype, causal: bool, alibi: bool) -> list[str]:
    """Returns the backends that are compared with the reference; flash only if flash-attn is installed."""
    request = AttentionRequest(
        device_type="cuda", dtype=dtype, head_dim=HEAD_DIM, causal=causal, alibi=alibi, dropout=False
    )
    able = [answer.backend for answer in capabilities(request) if answer.available and answer.backend != "reference"]
    assert "sdpa" in able
    assert ("varlen" in able) == (dtype != torch.float32 and not alibi)
    return able


def run(backend: str, dtype: torch.dtype, *, causal: bool, alibi: bool, key_value_heads: int = HEADS) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v, in FP32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(sum(STATIC_LENGTHS), HEADS, HEAD_DIM, generator=generator).to("cuda", dtype) for _ in range(4)
    )
    k, v = k[:, :key_value_heads].clone(), v[:, :key_value_heads].clone()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    output = packed_attention(
        *inputs,
        torch.tensor((0, *STATIC_LENGTHS), device="cuda").cumsum(0).to(torch.int32),
        1024,  # an upper bound, above the longest segment here
        causal=causal,
        alibi_slopes=torch.exp2(-2 * torch.arange(1.0, HEADS + 1, device="cuda")) if alibi else None,
        backend=backend,
    )
    return [tensor.detach().float() for tensor in (output, *torch.autograd.grad(output, inputs, upstream))]


@pytest.mark.parametrize("key_value_heads", [1, 2, HEADS])
@pytest.mark.parametrize(("dtype", "causal", "alibi"), CASES)
def test_outputs_and_gradients_are_those_of_the_reference(
    dtype: torch.dtype, causal: bool, alibi: bool, key_value_heads: int
) -> None:
    expected = run("reference", dtype, causal=causal, alibi=alibi, key_value_heads=key_value_heads)
    for backend in serving(dtype, causal, alibi):
        actual = run(backend, dtype, causal=causal, alibi=alibi, key_value_heads=key_value_heads)
        torch.testing.assert_close(
            actual,
            expected,
            rtol=ROUNDING[dtype],
            atol=ROUNDING[dtype],
            msg=lambda text, name=backend: f"{name}: {text}",
        )


@pytest.mark.parametrize(("dtype", "causal", "alibi"), CASES)
def test_segments_are_isolated_and_the_control_leaks(dtype: torch.dtype, causal: bool, alibi: bool) -> None:
    for backend in serving(dtype, causal, alibi):
        result = probe_isolation(backend, device="cuda", dtype=dtype, causal=causal, alibi=alibi)
        assert result.control_leaks, (backend, result)
        assert result.passed, (backend, result)


def test_with_deterministic_algorithms_the_fused_kernels_agree_in_every_bit_of_two_runs() -> None:
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
