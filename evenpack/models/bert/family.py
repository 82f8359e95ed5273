"""BERT: a post-norm encoder of masked tokens and, on pairs, of next sentences (Devlin et al. 2019)."""

from typing import Any

from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.cost import BERT_COST
from evenpack.models.families import ModelFamily


def _load_model() -> type[Any]:
    from evenpack.models.bert.model import Bert

    return Bert


def _load_huggingface() -> Any:
    from evenpack.models.bert.huggingface import BERT_MAPPING

    return BERT_MAPPING


def _load_foreign() -> Any:
    from evenpack.models.bert.foreign import BERT_FOREIGN_NAMES

    return BERT_FOREIGN_NAMES


BERT = ModelFamily(
    name="bert",
    config=BertConfig,
    causal=False,
    objective="masked_tokens",
    recipes=("sentence_pairs", "masked_pairs", "documents", "concat"),
    cost=BERT_COST,
    load_model=_load_model,
    load_huggingface=_load_huggingface,
    load_foreign=_load_foreign,
)
