"""What the loops beside this file train: documents of random tokens, and a small decoder of transformers."""

import re
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PACK_LENGTH = 64
PACKS_PER_STEP = 16
VOCABULARY = 100


def documents() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(1, VOCABULARY, size=length).tolist() for length in random.integers(2, 65, size=400)]


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def newest(folder: Path, name: str = "step_*") -> Path | None:
    """Returns the newest whole checkpoint; None if there is none."""
    return max(folder.glob(name), key=lambda path: int(re.split("[-_]", path.stem)[-1]), default=None)
