"""Model size and training length: the rule of 20 tokens per parameter, and models of the same loss.

Training takes about 6 operations for each parameter and token, a forward pass 2 (Kaplan et al. 2020, section 2.1). By
the rule of Hoffmann et al. 2022 (Chinchilla, arXiv:2203.15556) a budget of C operations is used best by N parameters
and D = 20 N tokens, so C = 120 N².

A model that is used a lot should be smaller than that and trained longer. Measured losses, as a `ScalingLaw`, decide
which smaller model, trained on how many more tokens, is as good. Given a law, the least sum of training and serving is
that of Sardana et al. 2024 (Beyond Chinchilla-Optimal, arXiv:2401.00448).
"""

import math
from dataclasses import dataclass

from evenpack.config import nearest
from evenpack.engine.config import CHINCHILLA_RATIO
from evenpack.errors import ConfigError

TRAINING_FLOPS = 6
"""Operations per parameter and token of training: forward, and backward of twice that."""

SERVING_FLOPS = 2
"""Operations per parameter and token that is read or written."""

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Fractions of the compute-optimal model's parameters that are shown in addition to the best."""

_LARGEST = 10.0
"""Upper limit of the search for the best model: serving never favours a model above the compute-optimal size, but a
law whose optimum is not at 20 tokens per parameter may."""


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta: loss in nats/token by parameters and tokens, of causal models."""

    name: str
    source: str
    irreducible: float
    """E"""
    parameter_factor: float
    """A"""
    parameter_exponent: float
    """alpha"""
    token_factor: float
    """B"""
    token_exponent: float
    """beta"""

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the loss in nats/token, on text like the text of the law's models."""
        return float(self._of_parameters(parameters) + self.token_factor / tokens**self.token_exponent)

    def tokens_for(self, loss: float, parameters: float) -> float | None:
        """Returns the tokens with which a model of this size reaches a loss; None if it never does."""
        left = loss - self._of_parameters(parameters)
        return None if left <= 0.0 else float((self.token_factor / left) ** (1.0 / self.token_exponent))

    def min_parameters(self, loss: float) -> float:
        """Returns the parameters of the smallest model that reaches the loss after endless training."""
        return float((self.parameter_factor / (loss - self.irreducible)) ** (1.0 / self.parameter_exponent))

    def _of_parameters(self, parameters: float) -> float:
        return float(self.irreducible + self.parameter_factor / parameters**self.parameter_exponent)


SCALING_LAWS = {
    law.name: law
    for law in (
        ScalingLaw(
            name="besiroglu",
            source="Besiroglu et al. 2024 (arXiv:2404.10102): Hoffmann et al.'s runs, fitted again",
            irreducible=1.8172,
            parameter_factor=482.01,
            parameter_exponent=0.3478,
            token_factor=2085.43,
            token_exponent=0.3658,
        ),
        ScalingLaw(
            name="hoffmann",
            source="Hoffmann et al. 2022 (arXiv:2203.15556), approach 3, as printed",
            irreducible=1.69,
            parameter_factor=406.4,
            parameter_exponent=0.34,
            token_factor=410.7,
            token_exponent=0.28,
        ),
    )
}
"""The known laws; the first agrees with the rule of 20 tokens per parameter. The constants as first printed do not
(they give 50 and more as best), and fit the underlying runs less well."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A model and its training tokens."""

    parameters: float
    tokens: float

    @property
    def training_flops(self) -> float:
        return TRAINING_FLOPS * self.parameters * self.tokens


@dataclass(frozen=True, kw_only=True)
class EqualLoss:
    """A model that reaches the loss of another, and its operations in training and in use."""

    share: float
    """Fraction of the other's parameters."""
    parameters: float
    tokens: float
    tokens_per_parameter: float
    training_flops: float
    serving_flops: float
    total_flops: float
    is_least: bool
    """Whether no other size needs fewer operations in total."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Models of one loss, from the compute-optimal one downwards."""

    served_tokens: float
    law: ScalingLaw
    loss: float
    """Loss of the compute-optimal model, by the law."""
    models: tuple[EqualLoss, ...]


def compute_optimal(flops: float) -> Allocation:
    """Returns the model that uses a budget of operations best: N = sqrt(C / 120), D = 20 N."""
    return optimally_trained(math.sqrt(flops / (TRAINING_FLOPS * CHINCHILLA_RATIO)))


def optimally_trained(parameters: float) -> Allocation:
    """Returns the model with 20 tokens per parameter."""
    return Allocation(parameters=parameters, tokens=CHINCHILLA_RATIO * parameters)


def find_law(name: str) -> ScalingLaw:
    """Returns the law of this name. Raises: ConfigError for an unknown name."""
    if name not in SCALING_LAWS:
        raise ConfigError(f"there is no scaling law '{name}'; {nearest(name, tuple(SCALING_LAWS))}")
    return SCALING_LAWS[name]


def serve(start: Allocation, served_tokens: float, law: ScalingLaw) -> Serving:
    """Returns models with the loss of `start` and their operations of training and serving.

    One is marked as the least.
    """
    from scipy.optimize import minimize_scalar

    loss = law.loss(start.parameters, start.tokens)
    least = law.min_parameters(loss)

    def total(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        tokens = law.tokens_for(loss, parameters)
        return math.inf if tokens is None else parameters * (TRAINING_FLOPS * tokens + SERVING_FLOPS * served_tokens)

    bounds = (math.log(least), math.log(_LARGEST * start.parameters))
    best = math.exp(minimize_scalar(total, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)
    sizes = {share * start.parameters: False for share in SHARES if share * start.parameters > least} | {best: True}
    models = tuple(
        _equal_loss(size, start, loss, served_tokens, law, is_least=sizes[size]) for size in sorted(sizes, reverse=True)
    )
    return Serving(served_tokens=served_tokens, law=law, loss=loss, models=models)


def _equal_loss(
    parameters: float, start: Allocation, loss: float, served_tokens: float, law: ScalingLaw, *, is_least: bool
) -> EqualLoss:
    tokens = law.tokens_for(loss, parameters)
    assert tokens is not None, "the model is larger than the least that reaches the loss"
    training = TRAINING_FLOPS * parameters * tokens
    serving = SERVING_FLOPS * parameters * served_tokens
    return EqualLoss(
        share=parameters / start.parameters,
        parameters=parameters,
        tokens=tokens,
        tokens_per_parameter=tokens / parameters,
        training_flops=training,
        serving_flops=serving,
        total_flops=training + serving,
        is_least=is_least,
    )
