"""Find parts of clipmill, such as losses or columns, by name: built-in parts and parts from other packages.

A package adds a part with an entry point in its `pyproject.toml`. The entry point has the name of the part
(docs/plugins.md):

    [project.entry-points."clipmill.losses"]
    decoupled = "clipmill_example.decoupled:DECOUPLED"

The names of all parts are known before any package is imported. A part is imported when it is looked up. If a part is
unusable, only the work that needs this part fails. Lists of parts omit it, and one warning is written to standard
error.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from clipmill.manifests.errors import UserError

_WORDS = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
Part = TypeVar("Part")


class UnusablePart(UserError):
    """A part that an installed package declares is unusable."""


class Parts(Mapping[str, Part], Generic[Part]):
    """Mapping from names to the parts of one kind, with built-in parts first.

    Args:
        noun: Noun for the kind in messages, such as "loss".
        group: Entry-point group, without the prefix "clipmill.".
        kind: Class of the parts. A part's `name` must equal the name of its entry point.
        builtin: Parts of clipmill by name, each as an object or an import path `package.module:NAME`.
        reserved_names: Further names that other packages must not use for parts, such as the names of other commands.
        pattern: Pattern that names must match. By default, words of lower-case letters and digits, joined by `-`.
        fault: Function that checks a part from another package, and returns a description of the problem or "".
    """

    def __init__(
        self,
        noun: str,
        *,
        group: str,
        kind: type[Part],
        builtin: Mapping[str, Part | str],
        reserved_names: Collection[str] = (),
        pattern: re.Pattern[str] = _WORDS,
        fault: Callable[[Part], str] = lambda _: "",
    ) -> None:
        self.noun, self._group, self._kind = noun, group, kind
        self._builtin, self._loaded = dict(builtin), dict[EntryPoint, Part]()
        self._reserved_names, self._pattern, self._fault = {*builtin, *reserved_names}, pattern, fault

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._builtin, *self._added_entries()]))

    def __len__(self) -> int:
        return len({*self._builtin, *self._added_entries()})

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._added_entries()

    def __getitem__(self, name: str) -> Part:
        """Import and return a part.

        Raises:
            KeyError: No part has that name.
            UnusablePart: The part is from another package, and cannot be imported or is invalid.
        """
        if name in self._builtin:
            builtin = self._builtin[name]
            part: Part = import_object(builtin) if isinstance(builtin, str) else builtin
            return part
        entry = self._added_entries()[name]
        if entry not in self._loaded:
            self._loaded[entry] = self._load(entry)
        return self._loaded[entry]

    def list_usable(self) -> list[Part]:
        """Return all usable parts, and write a warning to standard error for each unusable part."""
        parts, conflicts = [], [entry for entry in _entries(self._group) if entry.name in self._reserved_names]
        hint = "rename it in that package"
        errors = [self._unusable_error(entry, "has a name that is already in use", hint=hint) for entry in conflicts]
        for name in self:
            try:
                parts.append(self[name])
            except UnusablePart as unusable:
                errors.append(unusable)
        for error in errors:
            _warn_once(f"warning: {error}\nhint: {error.hint}\n")
        return parts

    def find_usable(self, name: str) -> Part | None:
        """Return the part with this name, or None if it does not exist or is unusable."""
        try:
            return self.get(name)
        except UnusablePart:
            return None

    def package_of(self, name: str) -> str | None:
        """Return the name and version of the package that declares a part, or None for a built-in part."""
        entry = self._added_entries().get(name)
        return None if entry is None else _package(entry)

    def unknown_name_error(self, name: str, *, flag: str) -> UserError:
        """Return the error for an unknown name in `flag`, which may also be a setting without a flag."""
        return UserError(f"{flag} is {name}, which is unknown", hint=f"use one of {', '.join(self)}", flags=(flag,))

    def _added_entries(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages by name. If several have the same name, only the first is
        included, and `_load` rejects it."""
        added_entries: dict[str, EntryPoint] = {}
        for entry in _entries(self._group):
            if entry.name not in self._reserved_names:
                added_entries.setdefault(entry.name, entry)
        return added_entries

    def _load(self, entry: EntryPoint) -> Part:
        packages = [_package(other) for other in _entries(self._group) if other.name == entry.name]
        if len(packages) > 1:
            raise self._unusable_error(
                entry, f"is declared by {' and by '.join(packages)}", hint="uninstall one of them"
            )
        if self._pattern.fullmatch(entry.name) is None:
            separator = "_" if self._pattern.fullmatch("a_a") else "-"
            allowed = f"a lower-case letter, then lower-case letters, digits and {separator}"
            raise self._unusable_error(entry, "has an invalid name", hint=f"rename it in that package: {allowed}")
        try:
            part = entry.load()
        except Exception as error:
            raise self._unusable_error(entry, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(part, self._kind):
            raise self._unusable_error(entry, f"has type {type(part).__name__}, not {self._kind.__name__}")
        if (part_name := getattr(part, "name", None)) != entry.name:
            hint = "use the same name for the part and its entry point in that package"
            raise self._unusable_error(entry, f"is called {part_name!r} in its own code", hint=hint)
        if fault := self._fault(part):
            raise self._unusable_error(entry, fault)
        return part

    def _unusable_error(self, entry: EntryPoint, problem: str, *, hint: str = "") -> UnusablePart:
        package = _package(entry)
        return UnusablePart(
            f"the {self.noun} {entry.name} of the package {package} {problem} "
            f'(entry point {entry.name} = "{entry.value}" of {entry.group})',
            hint=hint or f"update or uninstall {package.partition(' ')[0]}; everything else works without it",
        )


def _package(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


_all_entries = cache(entry_points)  # reads the metadata of all installed packages only once per process


@cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(_all_entries().select(group=f"clipmill.{group}"))


def is_declared(group: str, name: str) -> bool:
    """Return True if an installed package declares an entry point with this name in a group."""
    return any(entry.name == name for entry in _entries(group))


@cache  # keyed by the text of the warning, because each lookup of an unusable part raises a new error object
def _warn_once(warning: str) -> None:
    sys.stderr.write(warning)


def import_object(path: str) -> Any:
    """Import and return the object with the path `package.module:NAME`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_late(path: str) -> Callable[..., Any]:
    """Return a function that imports the function `package.module:NAME` when it is first called, and then calls it."""
    return lambda *arguments, **keywords: import_object(path)(*arguments, **keywords)
