"""`Parts`: named parts of one kind, from clipmill and other installed packages. Import of objects by path.

A package adds a part with an entry point in its `pyproject.toml`. The name of the entry point is the name of the part
(docs/plugins.md):

    [project.entry-points."clipmill.losses"]
    decoupled = "clipmill_example.decoupled:DECOUPLED"

All names are known without importing a package; a part is imported when it is looked up. If a part is unusable, only
the work that needs it fails: lists of parts omit it, and a single warning is written to standard error.
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
    """The parts of one kind by name; clipmill's own parts come first.

    Args:
        noun: Name of the kind in messages.
        group: Entry-point group.
        kind: Class of the parts. A part's `name` must equal the name of its entry point.
        builtin: Parts of clipmill, or their import paths `package.module:NAME`.
        taken: Additional names that are reserved, such as other commands.
        form: Pattern of names; by default, words of lower-case letters and digits that are joined by `-`.
        fault: Function that describes the problem with a part of another package; empty if the part is valid.
    """

    def __init__(
        self,
        noun: str,
        *,
        group: str,
        kind: type[Part],
        builtin: Mapping[str, Part | str],
        taken: Collection[str] = (),
        form: re.Pattern[str] = _WORDS,
        fault: Callable[[Part], str] = lambda _: "",
    ) -> None:
        self.noun, self._group, self._kind = noun, group, kind
        self._builtin, self._loaded = dict(builtin), dict[EntryPoint, Part]()
        self._taken, self._form, self._fault = {*builtin, *taken}, form, fault

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._builtin, *self._added_entries()]))

    def __len__(self) -> int:
        return len({*self._builtin, *self._added_entries()})

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._added_entries()

    def __getitem__(self, name: str) -> Part:
        """Import a part.

        Raises:
            KeyError: There is no part with that name.
            UnusablePart: The package that declares the part cannot be imported, or the part is invalid.
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
        """Return all usable parts; report unusable parts on standard error."""
        parts, rivals = [], [entry for entry in _entries(self._group) if entry.name in self._taken]
        hint = "rename it in that package"
        errors = [self._unusable_error(entry, "has a name that is in use", hint=hint) for entry in rivals]
        for name in self:
            try:
                parts.append(self[name])
            except UnusablePart as unusable:
                errors.append(unusable)
        for error in errors:
            _warn_once(f"warning: {error}\nhint: {error.hint}\n")
        return parts

    def find_usable(self, name: str) -> Part | None:
        """Return the part with this name; None if it does not exist or is unusable."""
        try:
            return self.get(name)
        except UnusablePart:
            return None

    def package_of(self, name: str) -> str | None:
        """Return the name and version of the package that declares a part; None for a part of clipmill."""
        entry = self._added_entries().get(name)
        return None if entry is None else _package(entry)

    def unknown_name_error(self, name: str, *, where: str) -> UserError:
        """Return the error for an unknown name; `where` is the flag or setting that contains the name."""
        return UserError(
            f"{where} is {name}, which is unknown", hint=f"{where} must be one of: {', '.join(self)}", flags=(where,)
        )

    def _added_entries(self) -> dict[str, EntryPoint]:
        """Return the entry points of other packages by name. If two packages declare a name, the first wins."""
        added: dict[str, EntryPoint] = {}
        for entry in _entries(self._group):
            if entry.name not in self._taken:
                added.setdefault(entry.name, entry)
        return added

    def _load(self, entry: EntryPoint) -> Part:
        rivals = [_package(rival) for rival in _entries(self._group) if rival.name == entry.name]
        if len(rivals) > 1:
            raise self._unusable_error(entry, f"is declared by {' and by '.join(rivals)}", hint="uninstall one of them")
        if self._form.fullmatch(entry.name) is None:
            joint = "_" if self._form.fullmatch("a_a") else "-"
            allowed = f"a lower-case letter, then lower-case letters, digits and {joint}"
            raise self._unusable_error(entry, "has an invalid name", hint=f"rename it in that package: {allowed}")
        try:
            part = entry.load()
        except Exception as error:
            raise self._unusable_error(entry, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not isinstance(part, self._kind):
            raise self._unusable_error(entry, f"has type {type(part).__name__}, not {self._kind.__name__}")
        if (part_name := getattr(part, "name", None)) != entry.name:
            hint = "use the same name for the part and its entry point in that package"
            raise self._unusable_error(entry, f"has the name {part_name!r} itself", hint=hint)
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


_all_entries = cache(entry_points)  # function that reads the files of all installed packages only once per process


@cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(_all_entries().select(group=f"clipmill.{group}"))


def is_declared(group: str, name: str) -> bool:
    """Return True if an installed package has an entry point with this name."""
    return any(entry.name == name for entry in _entries(group))


@cache  # the key is the text, because each lookup raises a new error
def _warn_once(warning: str) -> None:
    sys.stderr.write(warning)


def import_object(path: str) -> Any:
    """Import the object at `package.module:NAME`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_late(path: str) -> Callable[..., Any]:
    """Return a function that calls the function at `package.module:NAME`; the first call imports it."""
    return lambda *arguments, **keywords: import_object(path)(*arguments, **keywords)
