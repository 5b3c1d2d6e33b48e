"""`ColumnSpec`: the declaration of a column that the command line loads.

`clipmill.prep.registry` lists the columns. Code that plans, makes, shows, verifies, retries or removes a column
receives the spec, and calls the functions of the column's `ColumnWork`, which is loaded on demand. Such code should not
refer to a column by name.

A column with one sample per chunk declares its settings in a `ColumnSpec`, and how to make a sample in a `ChunkWork`
(`prep/core/chunk_work.py`). Its commands, recipe, plan, runs, reports and retries are derived from these two.
docs/plugins.md contains a complete example.
"""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipmill.manifests.plugins import import_object
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.recipe import (
    KEPT,
    changed_flags,
    marked_fields,
    require_schema,
    setting_flags,
    settings_from,
)
from clipmill.shards.columns import VIDEO, command_for

DATA_VARIABLE = "CLIPMILL_DATA"
ENGINE_FLAGS = ("engine", "address")  # flags that a run records unless it uses the default engine
# Names that a setting must not have, because all recipes or the flags of all columns use them (`prep/core/request.py`).
RESERVED_NAMES = frozenset(
    {*("column", "schema", VIDEO, "weights"), *("data", "json", "engine", "address", "execution", "workers", "part")}
    | {"max_failures", "trial", "explain", "retry_codes", "only_variant", "part_run", "variant", "monitoring"}
)
WEIGHTS = "weights"  # key of the path of local model weights; a run records the path, and a recipe contains a hash
StoredRecipe = Mapping[str, Any]  # content of recipe.json; some callers merge it with the request of the last run


@dataclass(frozen=True)
class PendingWork:
    """Remaining work of a variant, derived only from stored records.

    Attributes:
        num_wanted: Number of samples that the variant should have; None if unknown.
        wanted_shards: IDs of the shards that the variant should have; None if unknown.
        to_make: Number of shards that need work, keyed by state.
        num_orphaned: Number of shards to remove because they are no longer in the plan.
        stale_because: Reason why a new run would not continue this variant; None if it would.
        left_out: Lines about what the settings omit, such as the tails of videos.
    """

    num_wanted: int | None = None
    wanted_shards: frozenset[int] | None = None
    to_make: dict[str, int] = field(default_factory=dict)
    num_orphaned: int = 0
    stale_because: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Addition:
    """Text lines and JSON values that a column adds to a report.

    Attributes:
        lines: Lines of text.
        values: JSON values.
        about: Lines that the report of a plan prints before the lines about settings and work.
    """

    lines: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    about: Sequence[str] = ()


class DeepCode(StrEnum):
    """Problem that `prep verify --deep` can find in a sample with a correct checksum."""

    UNREADABLE = "unreadable"
    PACKETS_DIFFER = "packets_differ"  # the packet table in the index does not match the demuxed packets
    DECODE_ERRORS = "decode_errors"
    FRAMES_DIFFER = "frames_differ"  # wrong number, order or resolution of decoded frames
    ARRAY_DIFFERS = "array_differs"  # an array does not match its index row, or holds invalid values
    CHECK_FAILED = "check_failed"  # the function that checks the samples of the column raised an exception
    JSON_DIFFERS = "json_differs"  # the .json or .txt member does not match the index


@dataclass(frozen=True)
class CheckedSample:
    """Result of `prep verify --deep` for one sample.

    Attributes:
        differences: (code, message) of each problem.
        num_checked: Number of checked frames, array rows or files.
    """

    differences: list[tuple[DeepCode, str]]
    num_checked: int


def _settings_text(stored: StoredRecipe) -> str:
    settings = {name: value for name, value in stored.items() if value is not None and name not in ("column", "schema")}
    return " ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """Declaration of a column for the command line and for maintenance commands, without the code of the column.

    Attributes:
        name: Name of the column's folder and value of `--column`: lower case, beginning with a letter. The command is
            `prep NAME`.
        package: Import name of the package with the column's code; workers must have the same version.
        work: Import path `package.module:NAME` of the column's `ChunkWork` (`prep/core/chunk_work.py`), or of its
            `ColumnWork` (`prep/core/work.py`) if the column does not have one sample per chunk.
        check_sample: Import path `package.module:function` of a function (index row, members, split) -> `CheckedSample`
            that compares a sample with its index row. The row also contains `tar`, the path of the tar. The function
            runs in workers that import only its module.
        settings: Frozen dataclass whose fields are flags of `prep NAME` and `prep plan NAME`. All fields except fields
            marked `NOT_STORED` are part of the recipe (`prep/core/recipe.py`). A field named `where` selects chunks. No
            field may have a name in `RESERVED_NAMES`.
        schema: Version of the recipe. Increment it when the same settings start to produce different bytes.
        help: Help of `prep NAME`: a first sentence that begins with a verb, further text, and an example.
        plan_help: Help of `prep plan NAME`; empty for a default text.
        request: Import path of the subclass of `Request` (`prep/core/request.py`) with the flags that are not settings.
            Fields marked `KEPT` are recorded, and used again by `prep retry`.
        plan_request: Import path of the subclass of `PlanRequest` with the additional flags of `prep plan NAME`.
        sample: Noun for a sample of the column, singular.
        verb: Regular verb for making a sample, such as "encode".
        checked_noun: Noun for the items that `verify --deep` counts, singular, such as "decoded frame".
        has_hours: True if `status` reports hours of video, computed from num_frames and the frame rate in the index.
        page: Content of the page that `prep inspect --html` writes, as a phrase without a period; empty for no page.
        read_settings: Function (stored recipe of this schema, path of local weights or None) -> settings that
            reproduce the variant. None if stored values and settings have the same names.
        write_flags: Function settings -> flags of `prep NAME` that reproduce them. None if each setting has a flag of
            the same name.
        settings_line: Function stored recipe -> line of text with the settings in the recipe.
    """

    name: str
    package: str
    work: str
    check_sample: str
    settings: type
    schema: int
    help: str
    plan_help: str = ""
    request: str = "clipmill.prep.core.request:PartRequest"
    plan_request: str = "clipmill.prep.core.request:PlanRequest"
    sample: str = "chunk"
    verb: str = "encode"
    checked_noun: str = "checked row"
    has_hours: bool = True
    page: str = ""
    read_settings: Callable[[StoredRecipe, str | None], Any] | None = None
    write_flags: Callable[[Any], list[str]] | None = None
    settings_line: Callable[[StoredRecipe], str] = _settings_text

    def __post_init__(self) -> None:
        if not isinstance(self.settings, type) or not is_dataclass(self.settings):
            raise TypeError(f"settings of column {self.name!r} are not a dataclass")
        if names := sorted({field.name for field in fields(self.settings)} & RESERVED_NAMES):
            raise ValueError(f"column {self.name!r} has a setting {names[0]!r}, which is a reserved name")
        if type(self.schema) is not int:
            raise TypeError(f"schema of column {self.name!r} is {self.schema!r}, which is not an integer")

    @property
    def is_first(self) -> bool:
        """True for `video`, which is made from the sources. All other columns are made from `video` or the manifest."""
        return self.name == VIDEO

    @property
    def activity(self) -> str:
        """Activity of a run, such as "encoding": the present participle of `verb`."""
        return f"{self.verb.removesuffix('e')}ing"

    @property
    def command(self) -> str:
        """Command that makes the column, without `prep`."""
        return getattr(self.settings, "command", None) or command_for(self.name)

    @property
    def request_type(self) -> type:
        """Subclass of `Request` with the flags that are not settings."""
        request: type = import_object(self.request)
        return request

    def stored_settings(self, stored: StoredRecipe, weights: str | None = None) -> Any:
        """Return the settings that reproduce a variant.

        Args:
            stored: Recipe, merged with the request of the last run (`variants.stored_request`).
            weights: Path of local weights; None for the weights in the recipe.

        Raises:
            UserError: The recipe has a different version of the schema, or is incomplete.
        """
        if self.read_settings is None:
            return settings_from(stored, self.settings, column=self.name, schema=self.schema)
        require_schema(stored, column=self.name, schema=self.schema)
        return self.read_settings(stored, weights)

    def kept_flags(self, stored: StoredRecipe) -> dict[str, Any]:
        """Return the flags of the last run that a retry uses again, keyed by name."""
        kinds = marked_fields(self.request_type, KEPT)
        return {name: kind(stored[name]) for name, kind in kinds.items() if name in stored}

    def flags(self, stored: StoredRecipe) -> list[str]:
        """Return the flags of `prep NAME` that reproduce a stored recipe.

        Raises:
            UserError: The recipe has a different version of the schema.
        """
        weights = short_path(Path(stored[WEIGHTS])) if WEIGHTS in stored else None
        settings, run_flags = self.stored_settings(stored, weights), self.kept_flags(stored)
        flags = setting_flags(settings) if self.write_flags is None else self.write_flags(settings)
        return [*flags, *changed_flags(run_flags, dict.fromkeys(run_flags))]

    def command_line(self, stored: StoredRecipe, *, data_dir: Path) -> str:
        """Return the command line that reproduces a stored recipe, with the engine of the last run.

        Raises:
            UserError: The recipe has a different version of the schema.
        """
        engine = [word for name in ENGINE_FLAGS if name in stored for word in (f"--{name}", stored[name])]
        arguments = [
            "prep",
            getattr(self.stored_settings(stored), "command", self.command),
            *self.flags(stored),
            *engine,
        ]
        return shlex.join([*arguments, *data_flags(data_dir)])


def data_flags(data: Path) -> list[str]:
    """Return the `--data` flag for a data folder; empty for the default folder."""
    default = Path(os.environ.get(DATA_VARIABLE, "data"))
    return [] if data.resolve() == default.resolve() else ["--data", short_path(data)]


def short_path(path: Path) -> str:
    """Return a path for messages, relative to the current folder if the path is inside it, otherwise unchanged.

    A path in the working copy of a bucket is not changed, because it is replaced with a URL when it is printed.
    """
    if mirror_of(path) is not None:
        return os.fspath(path)
    with suppress(ValueError, OSError):
        return os.fspath(path.relative_to(Path.cwd()))
    return os.fspath(path)


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two recipes as lines `name: old → new`, in the order of the new recipe.

    The recipes are compared as JSON, because a recipe from a file has lists where a new recipe has tuples.
    """
    old, new = json.loads(json.dumps(old)), json.loads(json.dumps(new))
    differences = []
    for name in [*new, *(name for name in old if name not in new)]:
        values = old.get(name), new.get(name)
        if values[0] != values[1]:
            old_text, new_text = ("not set" if value is None else value for value in values)
            differences.append(f"{name}: {old_text} → {new_text}")
    return differences
