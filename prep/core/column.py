"""`ColumnSpec`: everything that the commands need to know about a column.

`clipmill.prep.registry` lists the columns. Code that plans, makes, shows, verifies, retries or removes a column
receives its spec and calls the functions in it; no code outside a column's own folder refers to the column by name.
Specs are loaded whenever `prep` starts, so their functions import slow modules inside their bodies.
"""

import hashlib
import importlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from clipmill.prep.core.make import Request
    from clipmill.prep.core.pages import PageRequest
    from clipmill.prep.core.plan import ShardPlan
    from clipmill.prep.core.report import Report
    from clipmill.shards.commits import Failure
    from clipmill.shards.reader import CommittedShard, Variant

DATA_VARIABLE = "CLIPMILL_DATA"
VIDEO = "video"  # made from the source videos; all other columns are made from it or from the manifest
Stored = Mapping[str, Any]  # content of a variant's recipe.json


class ColumnPlan(Protocol):
    """Interface of a column's plan."""

    @property
    def variant_dir(self) -> Path: ...
    @property
    def shards(self) -> "Sequence[ShardPlan]": ...
    @property
    def num_videos(self) -> int:
        """Number of videos in the plan; a percentage in `--max-failures` refers to it."""
        ...


class RunSummary(Protocol):
    """Interface of the result of a run. `gave_up` is the reason why it ended before all shards were tried, or None."""

    @property
    def gave_up(self) -> str | None: ...
    @property
    def failures(self) -> "Sequence[Failure]": ...
    @property
    def num_failed_videos(self) -> int: ...


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


@dataclass(frozen=True)
class ExtraFolder:
    """A folder for intermediate results inside a variant's folder.

    Attributes:
        file_names: pattern that must match a file's full name; no other file is ever removed.
        is_whole: return True if a file is complete and undamaged.
    """

    name: str
    file_names: re.Pattern[str]
    is_whole: Callable[[Path], bool]


@dataclass(frozen=True)
class ExtraFile:
    """A file in a variant's folder that is derived from its shards, and that a run writes again.

    Attributes:
        problem: return why the file of a variant cannot be used (missing, stale or damaged), or None.
    """

    name: str
    problem: "Callable[[Variant], str | None]"


def _merged_table_problem(variant: "Variant") -> str | None:
    from clipmill.shards.chunk_table import chunk_table_problem

    return chunk_table_problem(variant)


# Of columns that training reads; clipmill.shards.merged_table.CHUNKS_FILE, whose import would make `prep --help` slow.
MERGED_TABLE = ExtraFile("chunks.arrow", _merged_table_problem)


def _any_settings(settings: Any) -> None:
    return None


def _all_settings(stored: Stored) -> str:
    settings = {name: value for name, value in stored.items() if value is not None and name not in ("column", "schema")}
    return " ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """Description of one column.

    Attributes:
        name: name of the column's folder and value of `--column`: lower case, beginning with a letter. The command is
            `prep NAME`.
        package: import name of the package with the column's code; workers must have the same version.
        sample: noun for a sample of the column, singular.
        verb: what the command does to a sample; it ends in e.
        checked_noun: noun for what `verify --deep` counts, singular: "decoded frame".
        has_hours: whether `status` reports hours of video, computed from num_frames and the frame rate in the index.
        make_command: function behind `prep NAME`, with its flags.
        plan_command: function behind `prep plan NAME`.
        require: raise UserError if this machine lacks something that the settings need; called before any lock is
            taken.
        plan: (data folder, settings, request) -> plan: which shards have to be made, and why.
        run: (plan, settings, request) -> summary; called while the column's lock is held.
        plan_report: plan -> report.
        summary_report: (summary, settings, path of the list of failures) -> report.
        flags: stored recipe -> flags of `prep NAME` that reproduce it; raises UserError if another version wrote the
            recipe.
        settings_line: stored recipe -> its settings on one line.
        retry: (stored recipe, --weights, request); make again what failed.
        pending: (data folder, variant) -> work that remains for the variant.
        check_sample: import path `package.module:function` of a function (index row, members, split) -> `CheckedSample`
            that compares a sample with its index row. It runs in workers, which load nothing else.
        layout_file: stored recipe -> name of the layout file that the variant uses, or None; named after the column.
        extra_folders: folders for intermediate results in each variant.
        extra_files: files derived from the shards in each variant.
        sample_report: (shard, row, data folder) -> report printed by `prep inspect KEY`; the index row by default.
        write_page: (variant, request) -> report; writes the page of `prep inspect --html`. None if the column has none.
        next_step: data folder as the user gave it -> words of the command that comes after `prep NAME`.
    """

    name: str
    package: str
    sample: str = "chunk"
    verb: str = "encode"
    checked_noun: str = "checked row"
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
    extra_files: tuple[ExtraFile, ...] = ()
    sample_report: "Callable[[CommittedShard, int, Path], Report] | None" = None
    write_page: "Callable[[Variant, PageRequest], Report] | None" = None
    next_step: Callable[[Path], list[str]] | None = None

    @property
    def is_first(self) -> bool:
        """True if the column is made directly from the source videos."""
        return self.name == VIDEO

    def file_problems(self, variant: "Variant") -> list[str]:
        """Return why files of a variant that are derived from its shards cannot be used; the next run writes them."""
        from clipmill.manifests.storage.mirrors import is_away

        # A merged table that is only in a bucket would have to be fetched; `prep verify` does.
        files = (
            file for file in self.extra_files if file is not MERGED_TABLE or not is_away(variant.directory / file.name)
        )
        return [why for file in files if (why := file.problem(variant)) is not None]

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

    def next_command(self, data: Path) -> list[str]:
        """Return the words of what a user does after the column is complete; empty if nothing in particular."""
        return [] if self.next_step is None else self.next_step(data)


def data_flags(data: Path) -> list[str]:
    """Return the flag that names a data folder; none if commands take that folder without it."""
    default = Path(os.environ.get(DATA_VARIABLE, "data"))
    return [] if data.resolve() == default.resolve() else ["--data", short_path(data)]


def short_path(path: Path) -> str:
    """Return a path relative to the current folder if it is in it."""
    with suppress(ValueError, OSError):
        return os.fspath(path.relative_to(Path.cwd()))
    return os.fspath(path)


def command_for(column: str) -> str:
    """Return the name of the command that makes `column`."""
    return "chunk" if column == VIDEO else column


def imported(path: str) -> Any:
    """Import and return the object at `package.module:NAME`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def changed_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the flags for all settings that differ from their defaults."""
    given = {name: value for name, value in values.items() if value is not None and value != defaults[name]}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def recipe_fingerprint(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a recipe's values as canonical JSON; variant names end in its first 8 digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two recipes as `name: old → new`, in the order of the new recipe."""
    names = [*new, *(name for name in old if name not in new)]
    pairs = ((name, old.get(name), new.get(name)) for name in names)
    return [f"{name}: {_setting(before)} → {_setting(after)}" for name, before, after in pairs if before != after]


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)
