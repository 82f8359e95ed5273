"""Writes that fail, as on a full disk, on one rank of several that write together."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from evenpack.engine.activity import own_work


@contextmanager
def writing_to_the_end(engine: Any) -> Iterator[None]:
    """Lets DeepSpeed's save go through its barriers on a rank that cannot write; its error is raised afterwards.

    Otherwise the other ranks would wait for it in the next barrier.
    """
    problems: list[str] = []  # an exception would keep the open file, whose space would not be free

    def guarded(write: Callable[..., Any]) -> Callable[..., Any]:
        def try_to_write(*arguments: Any, **named: Any) -> Any:
            try:
                with own_work("writing its part of the checkpoint"):
                    return write(*arguments, **named)
            except (OSError, RuntimeError) as error:
                problems.append(str(error))
                return None

        return try_to_write

    with ExitStack() as patched:
        for holder, name in ((getattr(engine, "checkpoint_engine", None), "save"), (engine, "_copy_recovery_script")):
            if hasattr(holder, name):
                patched.enter_context(mock.patch.object(holder, name, guarded(getattr(holder, name))))
        yield
    if problems:
        raise OSError(problems[0])


def free_space(directory: Path) -> str:
    """Describes the free space of a disk, for messages."""
    try:
        return f"{shutil.disk_usage(directory).free / 1e9:.1f} GB free there"
    except OSError:
        return "free space unknown"
