"""Loader of pickles with plain containers. It rejects references to other classes and functions without a call."""

import pickle
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotations import open_annotations
from clipmill.manifests.errors import UserError

# Old pickle protocols encode an empty set as a call of the class `set`.
_PLAIN = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
}


def load_plain_pickle(path: Path) -> Any:
    """Load a pickle of lists, tuples, dicts, sets, strings, bytes, numbers, booleans and None.

    Raises:
        UserError: The file cannot be read, is not a pickle, or references a class or function.
    """
    try:
        with open_annotations(path, "rb") as file:
            return _PlainUnpickler(file).load()
    except _NotPlain as error:
        raise UserError(
            f"{path} is rejected, because it references {error}: loading it could execute code",
            hint="save it again with lists, tuples, strings and numbers only",
        ) from error
    except MemoryError as error:
        raise UserError(
            f"{path} requires more memory than is available",
            hint="it may be damaged: copy it again from its origin",
        ) from error
    # A damaged pickle may raise exceptions other than UnpicklingError (see Python's documentation of pickle.load).
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        why = str(error) or type(error).__name__
        raise UserError(
            f"{path} is not a complete pickle: {why}", hint="it may be damaged: copy it again from its origin"
        ) from error


class _NotPlain(Exception):
    """The pickle references something other than a plain container."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PLAIN[module, name]
        except KeyError:
            raise _NotPlain(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _NotPlain(f"the external object {pid!r:.40}")
