"""What an installation without all of evenpack's extras lacks, and which extra brings it."""

import importlib.metadata
import importlib.util
import re

from evenpack.errors import MissingExtraError

_OTHER_NAMES = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Distributions that are not named as their modules."""

_MODULES_OF = {
    "torch": ("torch",),
    "train": ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "deepspeed", "typer", "rich", "psutil"),
}


def require(extra: str, needed_by: str) -> None:
    """Raises: MissingExtraError with the command that installs the extra, if one of its modules is missing."""
    missing = [name for name in _MODULES_OF[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(_message(needed_by, ", ".join(missing), extra))


def explained(error: ModuleNotFoundError, needed_by: str) -> MissingExtraError | None:
    """Returns the error that names the extra of a missing module; None if no extra of evenpack brings it.

    None, too, where evenpack is imported from a checkout that is not installed: there pip knows none of its extras.
    """
    module = (error.name or "").partition(".")[0]
    extra = _extra_of(module)
    return None if extra is None else MissingExtraError(_message(needed_by, module, extra))


def missing_host(error: ModuleNotFoundError, adapter: str) -> MissingExtraError:
    """Returns the error that says how to install the trainer for which an adapter is; no extra brings trainers."""
    module = (error.name or "").partition(".")[0]
    return MissingExtraError(
        f"{adapter} needs {module}, which this installation lacks: pip install 'evenpack[adapters]' {module}"
    )


def _extra_of(module: str) -> str | None:
    distribution = _OTHER_NAMES.get(module, module.replace("_", "-"))
    try:
        requirements = importlib.metadata.requires("evenpack") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    pattern = re.compile(rf"{distribution}(?![\w-]).*extra == ['\"](?!dev)(\w+)")
    return next((found[1] for found in map(pattern.match, requirements) if found), None)


def _message(needed_by: str, modules: str, extra: str) -> str:
    return f"{needed_by} needs {modules}, which this installation lacks: pip install 'evenpack[{extra}]'"
