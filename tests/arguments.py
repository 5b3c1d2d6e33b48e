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
from cyclopts import Parameter
from cyclopts.argument import Argument, ArgumentCollection


@contextmanager
def made_once() -> Iterator[None]:
    """Meanwhile, keep the arguments of each command, and check values without pydantic."""
    known: WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[Any, ArgumentCollection]]] = WeakKeyDictionary()
    make, negatives_of = ArgumentCollection._from_callable, Parameter.get_negatives
    hint_of = vars(Argument)["_negatives_hint"].fget
    # cyclopts asks for these of all flags, for each word. Keys contain the objects, which describe the commands.
    hints: dict[int, tuple[Any, Any]] = {}
    negatives: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def arguments_of(command: Callable[..., Any], *defaults: Any, reserved: Iterable[str] = (), **rest: Any) -> Any:
        of_command = known.setdefault(command, {})
        asked = (defaults, tuple(reserved), rest)
        kind = (rest.get("parse_docstring", True), rest.get("_resolve_groups", True))
        if kind not in of_command or of_command[kind][0] != asked:
            of_command[kind] = asked, make(command, *defaults, reserved=asked[1], **rest)
        return _without_words(of_command[kind][1])

    def negatives_hint(argument: Argument) -> Any:
        kept = hints.get(id(argument.field_info))
        if kept is None:
            kept = hints[id(argument.field_info)] = argument.field_info, hint_of(argument)
        return kept[1]

    def get_negatives(parameter: Parameter, hint: Any) -> Any:
        kept = negatives.get((id(parameter), hint))
        if kept is None:
            kept = negatives[id(parameter), hint] = parameter, negatives_of(parameter, hint)
        return kept[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Argument, "_negatives_hint", property(negatives_hint))
        patch.setattr(Parameter, "get_negatives", get_negatives)
        patch.setattr(ArgumentCollection, "_from_callable", staticmethod(arguments_of))
        patch.setattr("cyclopts.argument._argument.sys", SimpleNamespace(modules={}))
        yield


def _without_words(arguments: ArgumentCollection) -> ArgumentCollection:
    """A copy that takes words; all that it shares describes the command."""
    copies = {id(argument): copy.copy(argument) for argument in arguments}
    for token_copy in copies.values():
        token_copy.tokens = []
        token_copy.children = ArgumentCollection(copies[id(child)] for child in token_copy.children)
    return ArgumentCollection(copies.values())
