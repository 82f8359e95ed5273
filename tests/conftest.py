"""Shapes and types in the package's signatures are checked while the tests run."""

import os

from jaxtyping import install_import_hook

# Small tensors gain nothing from threads, and several test processes share the cores. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

install_import_hook("evenpack", "beartype.beartype")
