"""The rule of 20 tokens per parameter, and models of the same loss."""

import math

import pytest

from evenpack.errors import ConfigError
from evenpack.studies.budget.scaling import SCALING_LAWS, compute_optimal, find_law, optimally_trained, serve


def test_the_rule_finds_chinchilla_in_its_budget() -> None:
    """Hoffmann et al. 2022: 70 B parameters and 1.4 T tokens for 5.76e23 operations."""
    found = compute_optimal(5.76e23)
    assert found.parameters == pytest.approx(70e9, rel=0.02)
    assert found.tokens == 20 * found.parameters
    assert found.training_flops == pytest.approx(5.76e23)


@pytest.mark.parametrize("law", SCALING_LAWS.values(), ids=SCALING_LAWS)
def test_every_model_shown_has_the_loss_and_the_marked_one_is_the_cheapest(law) -> None:
    start, served = compute_optimal(1e21), 1e12
    found = serve(start, served, law)
    assert [model.share for model in found.models] == sorted((model.share for model in found.models), reverse=True)
    for model in found.models:
        assert law.loss(model.parameters, model.tokens) == pytest.approx(found.loss)
        assert model.training_flops == pytest.approx(6 * model.parameters * model.tokens)
        assert model.serving_flops == pytest.approx(2 * model.parameters * served)
        assert model.total_flops == model.training_flops + model.serving_flops
    (best,) = (model for model in found.models if model.is_least)
    for percent in range(15, 300):
        parameters = percent / 100 * start.parameters
        tokens = law.tokens_for(found.loss, parameters)
        if tokens is not None:
            assert best.total_flops <= parameters * (6 * tokens + 2 * served) * (1 + 1e-9)


def test_the_more_a_model_is_used_the_smaller_it_should_be() -> None:
    law, start = find_law("besiroglu"), compute_optimal(1e21)
    best = [
        next(model for model in serve(start, served, law).models if model.is_least)
        for served in (1.0, 1e10, 1e12, 1e14)
    ]
    shares = [model.share for model in best]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.4 < shares[0]


def test_only_the_second_fit_of_the_law_agrees_with_the_rule() -> None:
    """Where nothing is served, the fewest operations are those of compute-optimal training."""

    def optimum(name: str) -> float:
        models = serve(compute_optimal(1e21), 1.0, find_law(name)).models
        return next(model.tokens_per_parameter for model in models if model.is_least)

    assert 15 < optimum("besiroglu") < 30
    assert optimum("hoffmann") > 45


def test_a_model_that_is_too_small_never_reaches_the_loss() -> None:
    law = find_law("besiroglu")
    start = optimally_trained(1e9)
    loss = law.loss(start.parameters, start.tokens)
    least = law.min_parameters(loss)
    assert law.tokens_for(loss, 0.999 * least) is None
    assert math.isfinite(law.tokens_for(loss, 1.001 * least) or math.inf)
    assert all(model.parameters > least for model in serve(start, 1e30, law).models)


def test_an_unknown_law_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no scaling law 'hofmann'; did you mean 'hoffmann'"):
        find_law("hofmann")
