"""Importing this lets shapes and types in the package's signatures be checked, in whichever process imports it.

A module with a name of its own: ranks import it by that, and several folders of tests have a `conftest`.
"""

from jaxtyping import install_import_hook

install_import_hook("evenpack", "beartype.beartype")
