"""Matrices of tests: `make test` has some of the cases, `make nightly` the others."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def _itself(case: Any) -> object:
    return case


def nightly_beyond(
    kept: Collection[object], cases: Iterable[Any], *, key: Callable[[Any], object] = _itself
) -> list[Any]:
    """Return the cases for `parametrize`; the marker `nightly` is on those that are not in `kept`.

    Args:
        kept: Cases that `make test` runs, as `key` gives them. Each has to be among the cases.
        key: Name of a case; the case itself by default.
    """
    cases = list(cases)
    missing = [name for name in kept if name not in [key(case) for case in cases]]
    assert not missing, f"there are no such cases: {missing}"
    return [case if key(case) in kept else _mark_nightly(case) for case in cases]


def _mark_nightly(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
