"""Shapes and types in the package's signatures are checked while the tests run."""

from jaxtyping import install_import_hook

install_import_hook("evenpack", "beartype.beartype")
