"""What the loops beside this file train: text that every Python has, byte by byte, and a small decoder of transformers.

A loss of ln 256 = 5.55 nats/token knows nothing; after 40 steps it is below 4.
"""

import re
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PACK_LENGTH = 64
PACKS_PER_STEP = 16
VOCABULARY = 256  # bytes; a text of your own goes through its tokenizer here


def documents() -> list[list[int]]:
    """Returns the short paragraphs of Python's manual, token by token."""
    paragraphs = [list(part.encode()) for text in topics.values() for part in text.split("\n\n")]
    return [one for one in paragraphs if 2 <= len(one) <= PACK_LENGTH]


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def newest(folder: Path, name: str = "step_*") -> Path | None:
    """Returns the newest whole checkpoint; None if there is none."""
    return max(folder.glob(name), key=lambda path: int(re.split("[-_]", path.stem)[-1]), default=None)
