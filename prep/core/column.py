"""`ColumnSpec`: what is known of a column whenever `prep` starts.

`clipmill.prep.registry` lists the columns. Code that plans, makes, shows, verifies, retries or removes a column
receives its spec and calls the functions of its `ColumnWork`, which is loaded when it is needed; no code outside a
column's own folder refers to the column by name.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.shards.columns import VIDEO, command_for

DATA_VARIABLE = "CLIPMILL_DATA"
Stored = Mapping[str, Any]  # content of a variant's recipe.json


@dataclass(frozen=True)
class Pending:
    """What remains to be done for a variant, derived from stored records alone.

    Attributes:
        num_wanted: number of samples that the variant should hold; None if unknown.
        wanted_shards: ids of the shards that the variant should have; None if unknown.
        to_make: number of shards that need work, by state.
        stale_because: why the variant differs from what would be made now, or None.
    """

    num_wanted: int | None = None
    wanted_shards: frozenset[int] | None = None
    to_make: dict[str, int] = field(default_factory=dict)
    stale_because: str | None = None


class DeepCode(StrEnum):
    """Problems that `prep verify --deep` can find in a sample whose checksum is correct."""

    UNREADABLE = "unreadable"
    PACKETS_DIFFER = "packets_differ"  # the packet table in the index does not match the demuxed packets
    DECODE_ERRORS = "decode_errors"
    FRAMES_DIFFER = "frames_differ"  # wrong number, order or size of decoded frames
    ARRAY_DIFFERS = "array_differs"  # an array does not match its index row, or holds invalid values
    JSON_DIFFERS = "json_differs"  # the .json or .txt member does not match the index


@dataclass(frozen=True)
class CheckedSample:
    """Result of `prep verify --deep` for one sample: differences, and the number of frames or array rows checked."""

    differences: list[tuple[DeepCode, str]]
    num_checked: int


def _all_settings(stored: Stored) -> str:
    settings = {name: value for name, value in stored.items() if value is not None and name not in ("column", "schema")}
    return " ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """What the command line and the upkeep of a data folder need to know of a column, without loading its code.

    Attributes:
        name: name of the column's folder and value of `--column`: lower case, beginning with a letter. The command is
            `prep NAME`.
        package: import name of the package with the column's code; workers must have the same version.
        work: import path `package.module:NAME` of the column's `clipmill.prep.core.work.ColumnWork`.
        check_sample: import path `package.module:function` of a function (index row, members, split) -> `CheckedSample`
            that compares a sample with its index row. It runs in workers, which load nothing else.
        sample: noun for a sample of the column, singular.
        verb: what the command does to a sample; it ends in e.
        checked_noun: noun for what `verify --deep` counts, singular: "decoded frame".
        has_hours: whether `status` reports hours of video, computed from num_frames and the frame rate in the index.
        page: what the page of `prep inspect --html` shows, as a clause; empty without such a page.
        make_command: function behind `prep NAME`, with its flags.
        plan_command: function behind `prep plan NAME`.
        flags: stored recipe -> flags of `prep NAME` that reproduce it; raises UserError if another version wrote the
            recipe.
        settings_line: stored recipe -> its settings on one line.
        retry: (stored recipe, --weights, request); make again what failed.
    """

    name: str
    package: str
    work: str
    check_sample: str
    sample: str = "chunk"
    verb: str = "encode"
    checked_noun: str = "checked row"
    has_hours: bool = True
    page: str = ""
    make_command: Callable[..., None]
    plan_command: Callable[..., None]
    flags: Callable[[Stored], list[str]]
    settings_line: Callable[[Stored], str] = _all_settings
    retry: Callable[[Stored, str | None, Any], None]

    @property
    def is_first(self) -> bool:
        """True if the column is made from the source videos; others are made from it or from the manifest."""
        return self.name == VIDEO

    @property
    def doing(self) -> str:
        """What the command does, as a participle: "encoding"."""
        return f"{self.verb.removesuffix('e')}ing"

    @property
    def command(self) -> str:
        """Name of the command that makes the column."""
        return command_for(self.name)

    def command_line(self, stored: Stored, *, data_dir: Path) -> str:
        """Return the command line that reproduces the recipe in a recipe.json.

        Raises:
            UserError: the recipe was written with another version of the recipe schema.
        """
        arguments = ["prep", self.command, *self.flags(stored)]
        return shlex.join([*arguments, *data_flags(data_dir)])


def data_flags(data: Path) -> list[str]:
    """Return the flag that names a data folder; none if commands take that folder without it."""
    default = Path(os.environ.get(DATA_VARIABLE, "data"))
    return [] if data.resolve() == default.resolve() else ["--data", short_path(data)]


def short_path(path: Path) -> str:
    """Return a path relative to the current folder if it is in it; that of a bucket's copy is shown as its address."""
    if mirror_of(path) is not None:
        return os.fspath(path)
    with suppress(ValueError, OSError):
        return os.fspath(path.relative_to(Path.cwd()))
    return os.fspath(path)


def changed_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the flags for all settings that differ from their defaults."""
    given = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return [word for flag, value in flags.items() for word in ((flag,) if value is True else (flag, str(value)))]


def recipe_fingerprint(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a recipe's values as canonical JSON; variant names end in its first 8 digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two recipes as `name: old → new`, in the order of the new recipe.

    A recipe that was stored has lists where another has tuples; both are compared in the form that is stored.
    """
    old, new = json.loads(json.dumps(old)), json.loads(json.dumps(new))
    names = [*new, *(name for name in old if name not in new)]
    pairs = ((name, old.get(name), new.get(name)) for name in names)
    return [f"{name}: {_setting(before)} → {_setting(after)}" for name, before, after in pairs if before != after]


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)
