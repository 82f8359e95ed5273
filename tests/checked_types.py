"""Switches on checks of the shapes and types in the package's signatures, in any process that imports it.

A module with a name of its own: ranks import it by that, and several folders of tests have a `conftest`. jaxtyping's
hook puts its decorator on each function. The one that it finds here checks parameters once, not twice for the sake of
messages, asks jaxtyping alone about signatures with shapes, prepares a check when it is first needed, and checks the
first calls of a function in each test and few of those that follow.
"""

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype

FIRST_CALLS = 8
"""Calls of a function that are checked in each test, or in each rank."""

ONE_IN = 16
"""Of the calls after these, one in so many is checked."""

_calls: dict[tuple[str, str], int] = {}
"""Calls since the last `start_again`, by the module and name of a function."""

_lasting: list[Callable[[], object]] = []
"""What prepares the check of each function that is not made anew by each call of another."""

_scope = functools.partial(jaxtyping.jaxtyped, "context")
"""Of one call, within which axes of one name have one size."""


def start_again() -> None:
    """Counts the calls of each function from zero again, as each test does."""
    _calls.clear()


def prepare() -> None:
    """Prepares the checks of all functions that have been imported, for processes that are forked from this one."""
    for prepared in _lasting:
        prepared()


def checked(target: Any = None, **_: Any) -> Any:
    """Decorates functions, methods, properties and the `__init__` of dataclasses, as `jaxtyping.jaxtyped` does."""
    if target is None:
        return checked
    if inspect.isclass(target):
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = checked(target.__init__)
        return target
    if isinstance(target, classmethod | staticmethod):
        return type(target)(checked(target.__func__))
    if isinstance(target, property):
        return property(*(part and _checked_function(part) for part in (target.fget, target.fset, target.fdel)))
    return _checked_function(target)


def _checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    if not getattr(function, "__annotations__", {}) or hasattr(function, "__wrapped__"):
        return function
    name = (function.__module__, function.__qualname__)
    with_check = functools.cache(functools.partial(_with_check, function))
    if "<locals>" not in function.__qualname__:
        _lasting.append(with_check)

    @functools.wraps(function)
    def sometimes_checked(*arguments: Any, **named: Any) -> Any:
        if _is_compiling():  # masks and scores of flex attention are compiled and may change nothing outside themselves
            return function(*arguments, **named)
        call = _calls[name] = _calls.get(name, 0) + 1
        if call > FIRST_CALLS and call % ONE_IN:
            return function(*arguments, **named)
        return with_check()(*arguments, **named)

    return sometimes_checked


def _is_compiling() -> bool:
    """Returns whether torch.compile reads this call. Processes that need no PyTorch do not import it for this."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _with_check(function: Callable[..., Any]) -> Callable[..., Any]:
    written = function.__annotations__
    hints = {name: _resolved(hint, function) for name, hint in written.items()}
    function.__annotations__ = hints
    by_type: Callable[..., Any] = beartype(function)
    function.__annotations__ = written
    if not any(map(_has_shape, hints.values())):
        return by_type

    def by_type_and_shape(*arguments: Any, **named: Any) -> Any:
        with _scope():
            return by_type(*arguments, **named)

    return by_type_and_shape


def _resolved(hint: Any, function: Callable[..., Any]) -> Any:
    """Returns the type of a quoted hint; any type if it, or its bound, is imported for type checkers alone."""

    def holder(value: Any) -> None: ...

    holder.__annotations__ = {"value": hint}
    try:
        resolved = typing.get_type_hints(holder, function.__globals__, include_extras=True)["value"]
    except Exception:  # whatever the name's evaluation raises
        return Any
    return Any if isinstance(getattr(resolved, "__bound__", None), typing.ForwardRef) else resolved


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))


jaxtyping.jaxtyped = checked
jaxtyping.install_import_hook("evenpack", "beartype.beartype")
