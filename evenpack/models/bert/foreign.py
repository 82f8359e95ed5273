"""The names that Google's code for TensorFlow and NVIDIA's for PyTorch give to the parts of a BERT.

The MLPerf reference has Google's names. NVIDIA's are transformers' names, except for layers with an activation
(`dense_act`).

Source: mlcommons/training, language_model/tensorflow/bert/modeling.py; NVIDIA/DeepLearningExamples,
PyTorch/LanguageModeling/BERT/modeling.py and run_pretraining.py.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from evenpack.errors import CheckpointError
from evenpack.models.bert.huggingface import DECODER_BIAS, WORD_EMBEDDINGS, without_duplicates
from evenpack.models.common.tensors import ForeignNames

_NORM = {"weight": "gamma", "bias": "beta"}
_MATRIX = {"weight": "kernel", "bias": "bias"}
_OUTPUT = {"weight": "output_weights", "bias": "output_bias"}


def tensorflow_name(name: str) -> str:
    """Returns Google's name of the variable that transformers calls `name`."""
    layer, _, kind = name.rpartition(".")
    path = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", layer).replace(".", "/")
    if path.endswith("_embeddings"):
        return path
    is_output = path in ("cls/predictions", "cls/seq_relationship")
    kinds = _NORM if path.endswith("LayerNorm") else _OUTPUT if is_output else _MATRIX
    return f"{path}/{kinds[kind]}"


def from_nvidia(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns each trained tensor once, under the names of today's transformers.

    Raises: CheckpointError if one is there under two names, or the decoder is not the token embedding.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        plain = name.replace(".dense_act.", ".dense.")
        if plain in renamed:
            raise CheckpointError(f"{plain} occurs twice, with `dense` and with `dense_act` in its name: remove one")
        renamed[plain] = tensor
    return without_duplicates(renamed)


BERT_FOREIGN_NAMES = ForeignNames(
    vocabulary=(WORD_EMBEDDINGS, DECODER_BIAS),
    config_file="bert_config.json",
    tensorflow_name=tensorflow_name,
    from_nvidia=from_nvidia,
    nvidia_vocabulary_multiple=8,
)
