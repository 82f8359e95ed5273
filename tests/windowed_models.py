"""Defines models with local attention for tests: shipped families some of whose layers see a window."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.common.section import TransformerConfig
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

Windows = tuple[int | None, ...]


def with_windows(config: TransformerConfig, windows: Windows) -> TransformerConfig:
    """Returns a section whose layers have these windows, one after the other and again from the first."""

    class Windowed(type(config)):  # type: ignore[misc]
        @property
        def attention_windows(self) -> Windows:
            return tuple(windows[layer % len(windows)] for layer in range(self.shape["layers"]))

    return Windowed(**{name: getattr(config, name) for name in config.model_fields_set})


def windowed_gpt2(windows: Windows, **shape: Any) -> TransformerConfig:
    return with_windows(Gpt2Config(kind="gpt2", **shape), windows)


def windowed_bert(windows: Windows, **shape: Any) -> TransformerConfig:
    return with_windows(BertConfig(kind="bert", **shape), windows)


@contextmanager
def layers_with_windows() -> Iterator[None]:
    """Lets GPT-2 and BERT hand the windows of their section to their layers while it is open."""
    with pytest.MonkeyPatch.context() as patch:
        for family in (Gpt2, Bert):
            patch.setattr(family, "_build", _built_with_windows(family._build))
        yield


def _built_with_windows(build: Any) -> Any:
    def built(model: Any, attention_backend: str) -> None:
        build(model, attention_backend)
        for block, window in zip(model.blocks, model.config.attention_windows, strict=True):
            block.attention.window = window

    return built
