"""Reads checkpoints that TensorFlow wrote (`fixtures/tensorflow/`), and the values of its own reader."""

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures" / "tensorflow"
BERT = FOLDER / "bert" / "model.ckpt-28252"
SHARDS = FOLDER / "shards" / "sharded.ckpt"
SNAPPY = FOLDER / "snappy" / "sharded.ckpt"

SHAPE = {"kind": "bert", "preset": "tiny", "layers": 2, "hidden_size": 8, "heads": 2}
VOCABULARY, POSITIONS = 203, 24
"""Of the BERT."""


def values_of(prefix: Path) -> dict[str, np.ndarray]:
    """Returns the values of TensorFlow's reader; bfloat16 as its bits."""
    with np.load(prefix.parent / "values.npz") as values:
        return {name: values[name] for name in values.files}


def copy_of(prefix: Path, folder: Path) -> Path:
    """Copies the checkpoint's files to another folder, where they can be damaged."""
    folder.mkdir(exist_ok=True)
    for file in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copyfile(file, folder / file.name)
    return folder / prefix.name


def transformers_weights() -> dict[str, Tensor]:
    """Returns the BERT's weights in transformers' layout, written out by hand: its names, and kernels transposed."""
    values = values_of(BERT)

    def layer(theirs: str, ours: str) -> dict[str, Tensor]:
        kernel, bias = values[f"{ours}/kernel"], values[f"{ours}/bias"]
        return {f"{theirs}.weight": torch.tensor(kernel.T.copy()), f"{theirs}.bias": torch.tensor(bias)}

    def norm(theirs: str, ours: str) -> dict[str, Tensor]:
        gamma, beta = values[f"{ours}/LayerNorm/gamma"], values[f"{ours}/LayerNorm/beta"]
        return {f"{theirs}.LayerNorm.weight": torch.tensor(gamma), f"{theirs}.LayerNorm.bias": torch.tensor(beta)}

    weights = {
        f"bert.embeddings.{table}.weight": torch.tensor(values[f"bert/embeddings/{table}"])
        for table in ("word_embeddings", "token_type_embeddings", "position_embeddings")
    } | norm("bert.embeddings", "bert/embeddings")
    for number in range(SHAPE["layers"]):
        theirs, ours = f"bert.encoder.layer.{number}", f"bert/encoder/layer_{number}"
        for part in ("query", "key", "value"):
            weights |= layer(f"{theirs}.attention.self.{part}", f"{ours}/attention/self/{part}")
        weights |= layer(f"{theirs}.attention.output.dense", f"{ours}/attention/output/dense")
        weights |= norm(f"{theirs}.attention.output", f"{ours}/attention/output")
        weights |= layer(f"{theirs}.intermediate.dense", f"{ours}/intermediate/dense")
        weights |= layer(f"{theirs}.output.dense", f"{ours}/output/dense") | norm(f"{theirs}.output", f"{ours}/output")
    weights |= layer("bert.pooler.dense", "bert/pooler/dense")
    weights |= layer("cls.predictions.transform.dense", "cls/predictions/transform/dense")
    weights |= norm("cls.predictions.transform", "cls/predictions/transform")
    return weights | {
        "cls.predictions.bias": torch.tensor(values["cls/predictions/output_bias"]),
        "cls.seq_relationship.weight": torch.tensor(values["cls/seq_relationship/output_weights"]),
        "cls.seq_relationship.bias": torch.tensor(values["cls/seq_relationship/output_bias"]),
    }
