"""The stand-in for flash-attn against the package, where that is installed."""

import inspect

import pytest
import torch

from evenpack.testing.fake_cuda import attention_operators


def test_the_stand_in_has_the_signatures_of_the_package():
    flash_attn = pytest.importorskip("flash_attn", reason="flash-attn is not installed", exc_type=ImportError)
    ours = inspect.signature(attention_operators.flash_attn_varlen_func).parameters.values()
    theirs = inspect.signature(flash_attn.flash_attn_varlen_func).parameters.values()
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]
    for text in (attention_operators.FORWARD, attention_operators.BACKWARD):
        expected = torch._C.parse_schema(f"flash_attn::{text}")
        found = getattr(torch.ops.flash_attn, expected.name.partition("::")[2]).default._schema
        names = [argument.name for argument in expected.arguments]
        assert [argument.name for argument in found.arguments][: len(names)] == names
