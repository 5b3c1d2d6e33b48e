"""Objects by their import paths, for tables of what is loaded only when it is used."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def import_object(path: str) -> Any:
    """Import and return the object at `package.module:NAME`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_late(path: str) -> Callable[..., Any]:
    """Return a function that calls the one at `package.module:NAME`, which is imported by the first call."""

    def call(*arguments: Any, **named: Any) -> Any:
        return import_object(path)(*arguments, **named)

    return call
