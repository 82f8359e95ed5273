"""The stand-in for flash-attn against the published signatures, and these against the package where it is installed."""

import ast
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from fake_gpu import attention_operators

VERSION = "2.8.3"
"""The version of flash-attn whose signatures these are (flash_attn/flash_attn_interface.py of its source package)."""

NO_DEFAULT = object()

FUNCTION = """
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None
"""
"""Of `flash_attn_varlen_func`."""

OPERATORS = {
    "_flash_attn_varlen_forward": (
        """
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Optional[Tensor] = None,
        return_softmax: bool = False, block_table: Optional[Tensor] = None, leftpad_k: Optional[Tensor] = None,
        seqused_k: Optional[Tensor] = None, zero_tensors: bool = False
        """,
        4,
        (),
    ),
    "_flash_attn_varlen_backward": (
        """
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Optional[Tensor],
        dk: Optional[Tensor], dv: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Optional[Tensor], deterministic: bool,
        rng_state: Optional[Tensor] = None, zero_tensors: bool = False
        """,
        1,
        ("dq", "dk", "dv"),
    ),
}
"""Of its operators: the parameters, the number of tensors that are returned, and the parameters that are written to."""

TYPES = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Optional[Tensor]",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "SymInt": "int",
}

Parameters = list[tuple[str, str, Any]]


def published(parameters: str) -> Parameters:
    """Returns name, type ("" without one) and default of each parameter."""
    statement = ast.parse(f"def function({' '.join(parameters.split())}): ...").body[0]
    assert isinstance(statement, ast.FunctionDef)
    arguments, given = statement.args.args, statement.args.defaults
    defaults = [NO_DEFAULT] * (len(arguments) - len(given)) + [ast.literal_eval(one) for one in given]
    return [
        (one.arg, "" if one.annotation is None else ast.unparse(one.annotation), default)
        for one, default in zip(arguments, defaults, strict=True)
    ]


def of_function(function: Any) -> Parameters:
    return [
        (one.name, "", NO_DEFAULT if one.default is one.empty else one.default)
        for one in inspect.signature(function).parameters.values()
    ]


def of_schema(schema: Any) -> Parameters:
    return [
        (one.name, TYPES[str(one.type)], one.default_value if one.has_default_value() else NO_DEFAULT)
        for one in schema.arguments
    ]


def written_to(schema: Any) -> Iterable[str]:
    return tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)


def test_the_stand_in_has_the_published_signatures() -> None:
    assert of_function(attention_operators.flash_attn_varlen_func) == published(FUNCTION)
    schemas = [
        torch._C.parse_schema(f"flash_attn::{text}")
        for text in (attention_operators.FORWARD, attention_operators.BACKWARD)
    ]
    assert {schema.name.partition("::")[2] for schema in schemas} == OPERATORS.keys()
    for schema in schemas:
        parameters, results, mutated = OPERATORS[schema.name.partition("::")[2]]
        assert of_schema(schema) == published(parameters)
        assert [str(one.type) for one in schema.returns] == ["Tensor"] * results
        assert written_to(schema) == mutated


def test_the_published_signatures_are_those_of_the_package() -> None:
    flash_attn = pytest.importorskip("flash_attn", reason="flash-attn is not installed", exc_type=ImportError)
    assert of_function(flash_attn.flash_attn_varlen_func) == published(FUNCTION), f"they are of version {VERSION}"
    for name, (parameters, _, mutated) in OPERATORS.items():
        schema = getattr(torch.ops.flash_attn, name).default._schema
        expected = published(parameters)
        assert of_schema(schema)[: len(expected)] == expected, f"they are of version {VERSION}"
        assert written_to(schema) == mutated
