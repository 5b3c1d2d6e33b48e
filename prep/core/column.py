"""A column as every command knows it: one `ColumnSpec`.

`prep.registry` lists the columns. Whatever plans, makes, shows, verifies, retries or removes a column takes its spec
and asks it; nothing outside of a column's folder names the column. A spec is loaded whenever `prep` starts, so its
functions import what takes long in their bodies.
"""

import hashlib
import importlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prep.core.make import Request
    from prep.core.plan import ShardPlan
    from prep.core.report import Report
    from shards.commits import Failure
    from shards.reader import CommittedShard, Variant

VIDEO = "video"  # the column that is made from the sources; the others are made from it, or from the manifest
Stored = Mapping[str, Any]  # what a variant's recipe.json holds


class ColumnPlan(Protocol):
    """What every plan of a column tells."""

    @property
    def variant_dir(self) -> Path: ...
    @property
    def shards(self) -> "Sequence[ShardPlan]": ...
    @property
    def num_videos(self) -> int:
        """Videos that the plan is about: what a share in `--max-failures` is a share of."""
        ...


class RunSummary(Protocol):
    """What every run tells. `gave_up` says why it ended before all shards were tried, or is None."""

    @property
    def gave_up(self) -> str | None: ...
    @property
    def failures(self) -> "Sequence[Failure]": ...
    @property
    def num_failed_videos(self) -> int: ...


@dataclass(frozen=True)
class Pending:
    """What a plan by the recipe of a variant would find, from stored records alone.

    Attributes:
        num_wanted: samples; None when that cannot be told.
        wanted_shards: of the plan; None when that cannot be told.
        to_make: state -> shards that have work.
        stale_because: why the variant is not what would be made now, or None.
    """

    num_wanted: int | None = None
    wanted_shards: frozenset[int] | None = None
    to_make: dict[str, int] = field(default_factory=dict)
    stale_because: str | None = None


class DeepCode(StrEnum):
    """What can be wrong with a sample whose bytes are those that were committed."""

    UNREADABLE = "unreadable"
    PACKETS_DIFFER = "packets_differ"  # the index's packet table is not what demuxing shows
    DECODE_ERRORS = "decode_errors"
    FRAMES_DIFFER = "frames_differ"  # number, order or size of the decoded frames
    ARRAY_DIFFERS = "array_differs"  # an array is not as its row of the index says, or its numbers are not sound
    JSON_DIFFERS = "json_differs"  # the json, or the txt, and the index disagree


@dataclass(frozen=True)
class CheckedSample:
    """What `prep verify --deep` found in a sample, and how many frames, or rows of an array, it looked at."""

    differences: list[tuple[DeepCode, str]]
    num_looked_at: int


@dataclass(frozen=True)
class ExtraFolder:
    """A folder of intermediate results in a variant's folder.

    Attributes:
        file_names: full match of the names of its files; only those are ever removed.
        is_whole: whether a file holds what was written.
    """

    name: str
    file_names: re.Pattern[str]
    is_whole: Callable[[Path], bool]


def _any_settings(settings: Any) -> None:
    return None


def _all_settings(stored: Stored) -> str:
    settings = {name: value for name, value in stored.items() if value is not None and name not in ("column", "schema")}
    return " ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """One column.

    Attributes:
        name: of its folder and of `--column`: lower case, beginning with a letter. Its command is `prep NAME`.
        package: with its code, as Python imports it; workers have to have the same.
        samples: what its samples are called, in the plural.
        looked_at: what `verify --deep` counts, and what it does with it.
        has_hours: whether `status` tells hours of video, from num_frames and the rate in the index.
        make_command: function of `prep NAME`, with its flags.
        plan_command: function of `prep plan NAME`.
        require: raises UserError where this machine lacks what settings need, before anything is locked.
        plan: (data folder, settings, request) -> what has to be made, and why.
        run: (plan, settings, request) -> what became of it; called while the column is held.
        plan_report: of a plan.
        summary_report: (summary, settings, path of the list of failures).
        flags: the flags of `prep NAME` that ask for a stored recipe; UserError where another version wrote it.
        settings_line: the settings in a stored recipe on one line.
        retry: (stored recipe, --weights, request): makes again what failed.
        pending: (data folder, variant) -> what is wanted of it now.
        check_sample: import path, `package.module:function`, of a function of (row of the index, members, split) that
            compares a sample with its row, a `CheckedSample`. It runs in workers, which load nothing else.
        layout_file: the file of the layout that a variant with this recipe follows, or None; named after the column.
        extra_folders: of a variant.
        sample_report: (shard, row, data folder): what `prep inspect KEY` says; by default the row of the index.
        write_page: (path, variant, on_sample): the page of `prep inspect --html`, and how many samples are on it.
    """

    name: str
    package: str
    samples: str = "chunks"
    looked_at: str = "rows looked at"
    has_hours: bool = True
    make_command: Callable[..., None]
    plan_command: Callable[..., None]
    require: Callable[[Any], None] = _any_settings
    plan: "Callable[[Path, Any, Request], ColumnPlan]"
    run: "Callable[[Any, Any, Request], RunSummary]"
    plan_report: "Callable[[Any], Report]"
    summary_report: "Callable[[Any, Any, Path], Report]"
    flags: Callable[[Stored], list[str]]
    settings_line: Callable[[Stored], str] = _all_settings
    retry: "Callable[[Stored, str | None, Request], None]"
    pending: "Callable[[Path, Variant], Pending]"
    check_sample: str
    layout_file: Callable[[Stored], str] | None = None
    extra_folders: tuple[ExtraFolder, ...] = ()
    sample_report: "Callable[[CommittedShard, int, Path], Report] | None" = None
    write_page: "Callable[[Path, Variant, Callable[[int, int], None]], int] | None" = None

    @property
    def is_first(self) -> bool:
        """Whether it is made from the sources themselves."""
        return self.name == VIDEO

    @property
    def command(self) -> str:
        """The command that makes it."""
        return command_for(self.name)

    def command_line(self, stored: Stored, *, data_dir: Path) -> str:
        """The command line that asks for the recipe in a recipe.json.

        Raises:
            UserError: it was written by another version of the recipe's schema.
        """
        arguments = ["prep", self.command, *self.flags(stored)]
        if data_dir.resolve() != Path("data").resolve():
            arguments += ["--data", str(data_dir)]
        return shlex.join(arguments)


def command_for(column: str) -> str:
    """The command that makes `column`."""
    return "chunk" if column == VIDEO else column


def imported(path: str) -> Any:
    """What stands at `package.module:NAME`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def changed_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The flags of the settings that are not their defaults."""
    given = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def recipe_fingerprint(values: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the canonical JSON of a recipe's plain values; a variant's name ends in its first 8 digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two recipes, as `name: old → new`, in the order of the new one."""
    names = [*new, *(name for name in old if name not in new)]
    return [f"{name}: {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name)]
