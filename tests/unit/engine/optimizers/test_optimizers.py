"""Weight decay applies to the right parameters; AdamW is torch's and LAMB ours."""

import pytest
import torch
from torch import nn

from evenpack.engine.optimizers.build import build_optimizer, parameter_groups
from evenpack.engine.optimizers.config import AdamWSection, LambSection, OptimizerBase
from evenpack.engine.optimizers.lamb import Lamb
from evenpack.engine.optimizers.norms import clip_gradients
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2


def tiny_gpt2() -> Gpt2:
    return Gpt2(Gpt2Config(kind="gpt2", preset="tiny", hidden_size=16, heads=2), vocabulary_size=11, max_positions=8)


def tiny_bert() -> Bert:
    return Bert(BertConfig(kind="bert", preset="tiny", hidden_size=16, heads=2), vocabulary_size=11, max_positions=8)


def test_matrices_and_embeddings_decay_and_biases_and_norms_do_not():
    model = tiny_gpt2()
    decaying, others = parameter_groups(model, weight_decay=0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    found = {
        id(parameter): decays for group, decays in ((decaying, True), (others, False)) for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert found.pop(id(parameter)) == (name.endswith("weight") and "norm" not in name), name
    assert not found


def test_a_tied_weight_counts_once_and_a_frozen_one_not_at_all():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in parameter_groups(model, weight_decay=0.1)] == [1, 1]
    model[1].bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(model, weight_decay=0.1)] == [1, 0]


def test_the_optimizer_takes_every_number_of_its_section():
    section = AdamWSection(learning_rate=0.3, beta1=0.5, beta2=0.6, epsilon=1e-3, weight_decay=0.2)
    optimizer = build_optimizer(nn.Linear(3, 5), section, torch.device("cpu"))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults.items() >= {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3}.items()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


def lamb(**settings: float) -> LambSection:
    return LambSection.model_validate({"kind": "lamb", "learning_rate": 0.3, "epsilon": 1e-6} | settings)


@pytest.mark.parametrize("weight_decay", [0.2, 0.0])
def test_lamb_takes_every_number_of_its_section(weight_decay: float):
    section = lamb(weight_decay=weight_decay, beta1=0.5, beta2=0.6, epsilon=1e-3, bias_correction=False)
    optimizer = build_optimizer(nn.Linear(3, 5), section, torch.device("cpu"))
    assert type(optimizer) is Lamb
    for group, decay, adapts in zip(optimizer.param_groups, [weight_decay, 0.0], [True, False], strict=True):
        numbers = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-3, "bias_correction": False}
        assert group.items() >= (numbers | {"weight_decay": decay, "trust_ratio": adapts}).items()


@pytest.mark.parametrize("model", [tiny_gpt2(), tiny_bert()], ids=["gpt2", "bert"])
def test_lamb_takes_query_key_and_value_apart(model: nn.Module):
    names = {parameter: name for name, parameter in model.named_parameters()}
    single, merged, others = build_optimizer(model, lamb(weight_decay=0.01), torch.device("cpu")).param_groups
    assert [group["trust_ratio"] for group in (single, merged, others)] == [True, True, False]
    assert [group["parts"] for group in (single, merged, others)] == [(), (16, 16, 16), ()]
    assert merged["weight_decay"] == single["weight_decay"] == 0.01
    found = sorted(names[parameter] for parameter in merged["params"])
    assert found == sorted(name for name in names.values() if name.endswith("query_key_value.weight"))
    assert len(found) == 2
    grouped = [parameter for group in (single, merged, others) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(names)


@pytest.mark.parametrize("section", [AdamWSection(learning_rate=0.3), lamb()], ids=["adamw", "lamb"])
@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_fused_kernels_clip_as_they_read_and_leave_what_is_below_the_limit_to_the_bit(
    section: OptimizerBase, limit: float | None
):
    """Gradients are as they were when the update begins, and it is that of clipped ones."""
    updated = []
    for clips_in_the_update in (True, False):
        torch.manual_seed(3)
        model = tiny_gpt2()
        optimizer = build_optimizer(model, section, torch.device("cpu"), fused_on_cpu=True)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = (step + 1) * torch.randn_like(parameter)
            before = [parameter.grad.clone() for parameter in model.parameters()]
            clip_gradients(model, limit, optimizer=optimizer if clips_in_the_update else None)
            is_clipped = [not torch.equal(one, each.grad) for one, each in zip(before, model.parameters(), strict=True)]
            assert any(is_clipped) == (limit == 0.5 and not clips_in_the_update)
            optimizer.step()
        updated.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    in_update, before_it = updated
    torch.testing.assert_close(in_update, before_it, rtol=1e-4, atol=1e-6)
    assert limit == 0.5 or torch.equal(in_update, before_it)
