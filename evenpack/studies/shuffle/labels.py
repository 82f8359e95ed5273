"""The part of the corpus from which each of its sequences comes: the file, where there are several."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.config import DataConfig
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences.documents import DocumentsView
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.data.sources.kinds import open_corpus, source_inputs

_TENTHS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Labels of the N training sequences of a source, in the order of the corpus."""

    names: tuple[str, ...]
    of_sequence: Int64[np.ndarray, " N"]


def file_labels(config: DataConfig, source: str, prepared: PreparedData) -> Labels:
    """Returns the file of each sequence; tenths of the corpus if it is one file, or no view of documents."""
    view = prepared.view(source, "train")
    view = view.source_view if isinstance(view, ShuffledView) else view
    files = [Path(file.path) for file in source_inputs(source, config.sources[source])]
    if len(files) < 2 or not isinstance(view, DocumentsView):
        tenths = np.arange(view.count) * _TENTHS // view.count
        return Labels(names=tuple(f"tenth {tenth + 1}" for tenth in range(_TENTHS)), of_sequence=tenths)
    section = config.sources[source]
    of_files = [section.model_copy(update={"path": file, "validation_path": None}) for file in files]
    counts = [sum(1 for _ in open_corpus(source, of_file).documents()) for of_file in of_files]
    documents = np.repeat(view.documents, np.diff(view.first_sequences))
    of_sequence = np.searchsorted(np.cumsum(counts), documents, side="right")
    return Labels(names=tuple(file.name for file in files), of_sequence=of_sequence)
