"""Reads a numpy array from a pickle without running any code of the pickle.

Relevancy files are published as pickles, and a pickle is a program. The few calls that rebuild an array are replaced
by stand-ins that only record their arguments; any other name is refused. The array is built from the recorded
arguments after they were checked.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError

_NUMBER_TYPES = re.compile(r"[fiu][1248]|b1")
_BYTE_ORDERS = ("<", ">", "|", "=")


def load_array_pickle(path: Path) -> NDArray[Any]:
    """The array of numbers in a pickle, of any protocol and of Python 2 or 3.

    Raises:
        UserError: the file cannot be read, is not a pickle, or contains anything but one array of numbers.
    """
    try:
        with path.open("rb") as file:
            value = _ArrayUnpickler(file, encoding="latin1").load()
        if not isinstance(value, _Array):
            raise UserError(f"{path} holds a {type(value).__name__}, and a numpy array is needed", hint=_HINT)
        return value.array()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except _Refused as error:
        raise UserError(
            f"{path} refers to {error}, which is refused: loading it could run code, and an array of numbers does not "
            "need it",
            hint=_HINT,
        ) from error
    # What a damaged pickle raises is not limited to UnpicklingError (Python's documentation of pickle.load).
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError,
        MemoryError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} is not a complete pickle of an array: {error or type(error).__name__}", hint=_HINT
        ) from error


_HINT = "save it as .npy: numpy.save(FILE, array)"


class _Refused(Exception):
    """The pickle refers to something that an array of numbers does not need."""


class _Dtype:
    """Stand-in for numpy.dtype: its code, then its byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMBER_TYPES.fullmatch(code):
            raise _Refused(f"an array of type {code!r:.20}")
        self.code, self.byte_order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, byte_order, inner, names, fields, *_ = state
        if byte_order not in _BYTE_ORDERS or inner is not None or names or fields:
            raise _Refused("an array of records")
        self.byte_order = byte_order


class _Array:
    """Stand-in for numpy.ndarray."""

    def __init__(self, *_: Any) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def array(self) -> NDArray[Any]:
        """The array, which shares the pickle's bytes.

        Raises:
            ValueError: the parts are inconsistent.
        """
        _, shape, dtype, is_fortran, content = self._state
        if not isinstance(dtype, _Dtype):
            raise ValueError("it has no type")
        # Python 2 pickles store bytes as text.
        raw = content.encode("latin1") if isinstance(content, str) else bytes(content)
        flat = np.frombuffer(raw, np.dtype(dtype.byte_order + dtype.code))
        return flat.reshape(shape, order="F" if is_fortran else "C")


def _from_buffer(content: bytes, dtype: Any, shape: Any, order: str, *_: Any) -> _Array:
    """How protocol 5 stores an array."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocols before 3 store bytes."""
    if encoding != "latin1":
        raise _Refused(f"the encoding {encoding!r:.20}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How protocols before 3 store empty bytes."""
    return b""


_STAND_INS: dict[tuple[str, str], Any] = {
    ("__builtin__", "bytes"): _no_bytes,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"the outside object {pid!r:.40}")
