"""The chunked LM head agrees with PyTorch's own, without its logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenpack.kernels import cross_entropy
from evenpack.kernels.cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 53, 24, 101


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns hidden, weight, labels, weights; a quarter of the tokens is not a target, others have unequal weights."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[::3] = (hidden @ weight.T).argmax(dim=1)[::3]  # so that some predictions are right
    weights = torch.rand(TOKENS, generator=generator, dtype=torch.float64) + 0.5
    weights[::4] = 0
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, weights.to(dtype)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = F.linear(hidden, weight).to(weights.dtype)
    logits = logits if bias is None else logits + bias
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 53, 1000, None])
def test_loss_and_gradients_are_those_of_the_plain_loss(chunk_tokens: int | None, biased: bool) -> None:
    hidden, weight, labels, weights = problem()
    bias = torch.linspace(-2, 2, VOCABULARY, requires_grad=True) if biased else None
    loss, _ = linear_cross_entropy(hidden, weight, labels.int(), weights, bias=bias, chunk_tokens=chunk_tokens)
    expected = plain(hidden, weight, labels, weights, bias)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    actual_gradients = torch.autograd.grad(loss * 0.37, leaves)
    expected_gradients = torch.autograd.grad(expected * 0.37, leaves)
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_large_logits_neither_overflow_nor_lose_the_loss(scale: float) -> None:
    hidden, weight, labels, weights = problem()
    loss, _ = linear_cross_entropy(hidden * scale, weight, labels, weights, chunk_tokens=10)
    torch.testing.assert_close(loss, plain(hidden * scale, weight, labels, weights), rtol=1e-6, atol=0)


def test_tokens_of_weight_zero_contribute_nothing() -> None:
    hidden, weight, labels, weights = problem()
    loss, correct = linear_cross_entropy(hidden, weight, labels, weights, chunk_tokens=10)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    ignored = weights == 0
    assert ignored.any()
    assert gradients[0][ignored].count_nonzero() == 0

    other_hidden = torch.where(ignored[:, None], hidden + 3.0, hidden).detach().requires_grad_()
    other_labels = torch.where(ignored, 0, labels)
    other_loss, other_correct = linear_cross_entropy(other_hidden, weight, other_labels, weights, chunk_tokens=10)
    assert torch.equal(other_loss, loss)
    assert torch.equal(other_correct, correct)
    other_gradients = torch.autograd.grad(other_loss, (other_hidden, weight))
    assert torch.equal(other_gradients[0], gradients[0])
    assert torch.equal(other_gradients[1], gradients[1])


@pytest.mark.parametrize("biased", [False, True])
def test_right_predictions_are_counted_where_the_weight_is_above_zero(biased: bool) -> None:
    hidden, weight, labels, weights = problem()
    bias = torch.linspace(-2, 2, VOCABULARY) * biased
    _, correct = linear_cross_entropy(hidden, weight, labels, weights, bias=bias, chunk_tokens=10)
    right = (hidden @ weight.T + bias).argmax(dim=1) == labels
    assert correct.dtype == torch.int64
    assert not correct.requires_grad
    assert correct.item() == int((right & (weights > 0)).sum())
    assert 0 < correct.item() < int(right.sum())  # some right predictions have weight zero
    doubled = {"weight": torch.cat([weight, weight]), "bias": torch.cat([bias, bias])}
    for tied in (labels, labels + VOCABULARY):  # each entry shares its logit with another one
        found = linear_cross_entropy(hidden, labels=tied, weights=weights, chunk_tokens=10, **doubled)
        assert torch.equal(found[1], correct)


# Precision


def test_bfloat16_parameters_get_bfloat16_gradients_summed_in_float32() -> None:
    hidden, weight, labels, weights = problem()
    rounded_hidden, rounded_weight = (tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight))
    loss, _ = linear_cross_entropy(rounded_hidden, rounded_weight, labels, weights, chunk_tokens=10)
    loss.backward()
    for tensor, rounded in ((hidden, rounded_hidden), (weight, rounded_weight)):
        (wanted,) = torch.autograd.grad(plain(hidden, weight, labels, weights), tensor)
        assert rounded.grad is not None
        assert rounded.grad.dtype == torch.bfloat16
        assert (rounded.grad - wanted).norm() / wanted.norm() < 2e-2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_products_are_bfloat16_and_the_rest_is_float32(hidden_dtype: torch.dtype, biased: bool) -> None:
    hidden, weight, labels, weights = problem()
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    bias = None
    if biased:
        bias = torch.full((VOCABULARY,), 1000.0)
        bias[3] += 0.5  # in bfloat16 it would be 1000, too
        bias.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, labels, weights, bias=bias, chunk_tokens=10)
    expected = plain(hidden.bfloat16(), weight.bfloat16(), labels, weights, bias)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    gradients, expected_gradients = torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in leaves]
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert (actual - wanted).norm() / wanted.norm() < 1e-2
    torch.testing.assert_close(gradients[2:], expected_gradients[2:], rtol=1e-4, atol=1e-4)  # of the bias


class Operands(TorchDispatchMode):
    """Notes the sizes and strides of the matrices that products take and write."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            for one in (*arguments, result):
                if isinstance(one, Tensor):
                    self.numbers |= {*one.shape, *one.stride()}
        return result


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_products_and_losses_have_whole_tiles_of_entries_and_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, biased: bool
) -> None:
    """A vocabulary of 101 entries has rows of 202 bytes. No product is left to the compiler.

    The sums over 128 columns of which 27 are 0 may be taken in another order, so they differ by a rounding in FP32.
    """
    sums, layouts = cross_entropy._chunk_sums, []

    def noted(logits: Tensor, *others: Any, **constants: Any) -> Any:
        layouts.append((logits.shape[1], logits.is_contiguous()))
        return sums(logits, *others, **constants)

    monkeypatch.setattr(cross_entropy, "_chunk_sums", noted)
    monkeypatch.setattr(cross_entropy, "_compiler", lambda: noted)
    found = []
    for multiple in (cross_entropy.VOCABULARY_MULTIPLE, 1):
        monkeypatch.setattr(cross_entropy, "VOCABULARY_MULTIPLE", multiple)
        hidden, weight, labels, weights = problem()
        bias = torch.linspace(-2, 2, VOCABULARY, requires_grad=True) if biased else None
        layouts.clear()
        with Operands() as operands, torch.autocast("cpu", torch.bfloat16):
            loss, correct = linear_cross_entropy(
                hidden, weight, labels, weights, bias=bias, chunk_tokens=20, compiled=compiled
            )
        inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
        found.append([loss, correct, *torch.autograd.grad(loss, inputs)])
        entries = 128 if multiple > 1 else VOCABULARY
        assert ({128, VOCABULARY} & operands.numbers) == {entries}
        assert set(layouts) == {(entries, True)}  # a slice of the columns is not vectorised by Inductor
    for padded, plain_one in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain_one, rtol=1e-6, atol=1e-6)


def test_the_weight_gradient_of_many_bfloat16_chunks_is_summed_in_float32() -> None:
    """Summed in bfloat16, 4096 equal chunks would stop growing at 256 times one chunk."""
    hidden = torch.ones(4096, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(
            hidden, weight, torch.zeros(4096, dtype=torch.int64), torch.ones(4096), chunk_tokens=1
        )
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient, torch.tensor([[-2048.0], [2048.0]]))


# What is never computed or kept


class _Spy(TorchDispatchMode):
    """Notes the size of every tensor that is made, the matrix products and the operations that only gradients need."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0
        self.scatters = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        self.scatters += func.overloadpacket is torch.ops.aten.scatter_add_
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def test_the_logits_of_all_tokens_never_exist() -> None:
    hidden, weight, labels, weights = problem()
    with _Spy() as whole:
        plain(hidden, weight, labels, weights).backward()
    assert whole.largest >= TOKENS * VOCABULARY
    with _Spy() as chunked:
        linear_cross_entropy(hidden, weight, labels, weights, chunk_tokens=7)[0].backward()
    assert chunked.largest == VOCABULARY * HIDDEN
    assert chunked.products == 3 * 8
    assert chunked.scatters == 8


@pytest.mark.parametrize(
    ("wanted", "products"),
    [((True, False, False), 2), ((False, True, False), 2), ((False, False, True), 1), ((False,) * 3, 1)],
)
def test_only_the_gradients_that_are_wanted_are_computed(wanted: tuple[bool, bool, bool], products: int) -> None:
    hidden, weight, labels, weights = problem()
    bias = torch.linspace(-2, 2, VOCABULARY, requires_grad=True)
    every = torch.autograd.grad(plain(hidden, weight, labels, weights, bias), (hidden, weight, bias))
    leaves = [leaf.detach().requires_grad_(one) for leaf, one in zip((hidden, weight, bias), wanted, strict=True)]
    with _Spy() as spy:
        loss, _ = linear_cross_entropy(leaves[0], leaves[1], labels, weights, bias=leaves[2])
        if loss.requires_grad:
            loss.backward()
    assert spy.products == products
    for leaf, one, expected in zip(leaves, wanted, every, strict=True):
        assert (leaf.grad is not None) == one
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-5)


def test_evaluation_computes_the_same_loss_and_no_gradients() -> None:
    hidden, weight, labels, weights = problem()
    expected, expected_correct = linear_cross_entropy(hidden, weight, labels, weights, chunk_tokens=10)
    with torch.no_grad(), _Spy() as spy:
        loss, correct = linear_cross_entropy(hidden, weight, labels, weights, chunk_tokens=10)
    assert spy.products == 6  # one a chunk: the logits
    assert spy.scatters == 0
    assert not loss.requires_grad
    assert torch.equal(loss, expected)
    assert torch.equal(correct, expected_correct)


@pytest.mark.parametrize(("device_type", "tokens"), [("cpu", 125), ("cuda", 5341), ("mps", 1335)])
def test_a_gpu_takes_larger_chunks_than_a_cpu(device_type: str, tokens: int) -> None:
    assert cross_entropy.default_chunk_tokens(device_type, 50_257) == tokens
    assert cross_entropy.default_chunk_tokens(device_type, 1 << 40) == 1


def test_the_loss_takes_the_chunks_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(cross_entropy, "default_chunk_tokens", lambda *device: asked.append(device) or 20)
    hidden, weight, labels, weights = problem()
    with _Spy() as spy:
        linear_cross_entropy(hidden, weight, labels, weights)
    assert asked == [("cpu", VOCABULARY)]
    assert spy.products == 3 * 3, "three products for each chunk of 53 tokens"


def test_a_chunk_without_tokens_is_refused_and_no_tokens_are_no_loss() -> None:
    hidden, weight, labels, weights = problem()
    with pytest.raises(ValueError, match="at least 1, found 0"):
        linear_cross_entropy(hidden, weight, labels, weights, chunk_tokens=0)
    loss, correct = linear_cross_entropy(hidden[:0], weight, labels[:0], weights[:0])
    assert (loss.item(), correct.item()) == (0.0, 0)
