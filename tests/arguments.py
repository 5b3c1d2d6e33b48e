"""Commands in the process of the tests read their words as in a process of their own, for a sixth of the time.

`train TASK` has 150 flags. cyclopts makes an object of each of them anew for each command line, and has pydantic look
at each value where that is imported, which it is in the tests and in none of the programs.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from cyclopts.argument import ArgumentCollection


@contextmanager
def made_once() -> Iterator[None]:
    """Meanwhile, keep the arguments of each command, and check values without pydantic."""
    known: WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[Any, ArgumentCollection]]] = WeakKeyDictionary()
    make = ArgumentCollection._from_callable

    def arguments_of(command: Callable[..., Any], *defaults: Any, reserved: Iterable[str] = (), **rest: Any) -> Any:
        of_command = known.setdefault(command, {})
        asked = (defaults, tuple(reserved), rest)
        kind = (rest.get("parse_docstring", True), rest.get("_resolve_groups", True))
        if kind not in of_command or of_command[kind][0] != asked:
            of_command[kind] = asked, make(command, *defaults, reserved=asked[1], **rest)
        return _without_words(of_command[kind][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentCollection, "_from_callable", staticmethod(arguments_of))
        patch.setattr("cyclopts.argument._argument.sys", SimpleNamespace(modules={}))
        yield


def _without_words(arguments: ArgumentCollection) -> ArgumentCollection:
    """A copy that takes words; all that it shares describes the command."""
    copies = {id(one): copy.copy(one) for one in arguments}
    for one in copies.values():
        one.tokens = []
        one.children = ArgumentCollection(copies[id(child)] for child in one.children)
    return ArgumentCollection(copies.values())
