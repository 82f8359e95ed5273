"""Imports one module of an installed package without the package's own start-up code.

Frameworks import all their models together with their packing module. If that module is independent of the rest, it is
loaded under its own name with empty parent packages, so that their dependencies and memory are not needed.
"""

import importlib
import sys
from importlib.machinery import PathFinder
from types import ModuleType


def import_alone(module: str, *, empty: tuple[str, ...] = ()) -> ModuleType:
    """Imports the module. `empty` names further packages that are left empty. Raises: ImportError."""
    for package in (*empty, module.rpartition(".")[0]):
        _put_empty(package)
    return importlib.import_module(module)


def _put_empty(package: str) -> None:
    parent = package.rpartition(".")[0]
    if parent:
        _put_empty(parent)
    if package in sys.modules:
        return
    spec = PathFinder.find_spec(package, sys.modules[parent].__path__ if parent else None)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No package named '{package}' is installed")
    stand_in = ModuleType(package)
    stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = stand_in
