"""The stand-in for flash-attn has the signatures of the package, where that is installed."""

import inspect
from typing import Any

import pytest
import torch
from fake_gpu import attention_operators

flash_attn = pytest.importorskip("flash_attn", reason="flash-attn is not installed", exc_type=ImportError)


def of_function(function: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in inspect.signature(function).parameters.values()]


def of_schema(schema: Any) -> list[tuple[Any, ...]]:
    """Returns name, type and default of each parameter, and whether it is written to."""
    return [
        (
            one.name,
            str(one.type).replace("SymInt", "int"),
            one.default_value if one.has_default_value() else inspect.Parameter.empty,
            one.alias_info is not None and one.alias_info.is_write,
        )
        for one in schema.arguments
    ]


def test_the_stand_in_has_the_signatures_of_the_package() -> None:
    ours = attention_operators.flash_attn_varlen_func
    assert of_function(ours) == of_function(flash_attn.flash_attn_varlen_func)
    for text in (attention_operators.FORWARD, attention_operators.BACKWARD):
        schema = torch._C.parse_schema(f"flash_attn::{text}")
        published = getattr(torch.ops.flash_attn, schema.name.partition("::")[2]).default._schema
        assert of_schema(schema) == of_schema(published)[: len(schema.arguments)]
        assert [str(one.type) for one in schema.returns] == [str(one.type) for one in published.returns]
