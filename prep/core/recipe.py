"""The recipe of a column: its settings, and everything else besides the input that determines the stored bytes.

The settings are a frozen dataclass whose fields are the flags of the command. A recipe is stored as `recipe.json`. Its
fingerprint is part of the variant's name, so different settings make a different variant.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import VIDEO, command_for

# Marks in the annotation of a field of the settings.
NOT_STORED = "a setting that does not change what is stored"
STORED_IF_CHANGED = "a setting that recipes omit while it has its default, as recipes from before the setting do"
# Mark in the annotation of a field of a request.
KEPT = "a flag that a retry uses again"

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Recipe(Generic[Settings]):
    """Everything besides its input that determines the stored bytes of a column.

    Attributes:
        settings: Settings of the command; for `video`, with all defaults resolved.
        values: Content of recipe.json.
        name: Readable part of the name of the variant.
    """

    settings: Settings
    values: Mapping[str, Any]
    name: str

    @property
    def video(self) -> str:
        """Name of the variant of `video` whose chunks are the input of the column."""
        return str(self.values["video"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the values as canonical JSON."""
        return recipe_fingerprint(self.values)

    @property
    def variant(self) -> str:
        """Name of the variant's folder: the readable part, and the first 8 digits of the fingerprint."""
        return f"{self.name}-{self.fingerprint[:8]}"


def recipe_fingerprint(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a recipe's values as canonical JSON; variant names end with its first 8 digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def stored_values(settings: Any) -> dict[str, Any]:
    """Return the settings that change what is stored, by name."""
    kind = type(settings)
    defaults = {field.name: field.default for field in fields(kind)}
    unchanged = {name for name in marked_fields(kind, STORED_IF_CHANGED) if getattr(settings, name) == defaults[name]}
    omitted = unchanged | marked_fields(kind, NOT_STORED).keys()
    return {name: value for name, value in asdict(settings).items() if name not in omitted}


def values_not_stored(settings: Any) -> dict[str, Any]:
    """Return the settings that do not change what is stored, by name."""
    return {name: getattr(settings, name) for name in marked_fields(type(settings), NOT_STORED)}


def marked_fields(kind: type, mark: str) -> dict[str, type]:
    """Return the fields of a dataclass that have a mark in their annotation, as name -> type without None."""
    hints = get_type_hints(kind, include_extras=True)
    types: dict[str, type] = {}
    for field in fields(kind):
        value_type, *marks = get_args(hints[field.name]) or (None,)
        if mark in marks:
            # The type of an optional field is a union with None.
            types[field.name] = next((part for part in get_args(value_type) if part is not type(None)), value_type)
    return types


def settings_from(stored: Mapping[str, Any], kind: type[Settings], *, column: str, schema: int) -> Settings:
    """Return the settings from a stored recipe and the request of its last run (`variants.stored_request`).

    Raises:
        UserError: The recipe was written with another version of the recipe schema, or lacks a setting.
    """
    require_schema(stored, column=column, schema=schema)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    optional = marked_fields(kind, NOT_STORED) | marked_fields(kind, STORED_IF_CHANGED)
    required = ["video", *(name for name in names if name not in optional)]
    if missing := [name for name in required if name not in stored]:
        raise UserError(
            f"the recipe lacks {', '.join(map(repr, missing))}", hint=f"run `prep {column}` again to rewrite it"
        )
    return kind(**{name: stored[name] for name in names if stored.get(name) is not None})


def require_schema(stored: Mapping[str, Any], *, column: str, schema: int) -> None:
    """Raise a UserError if a recipe belongs to a different column or a different version of the recipe schema."""
    if stored.get("schema") != schema or stored.get("column", VIDEO) != column:
        command = command_for(column, str(stored.get("codec")))
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r}, but this version supports {schema}",
            hint=f"run `prep {command}` with the desired settings to create a new variant",
        )


def setting_flags(settings: Any) -> list[str]:
    """Return the flags of settings: first the settings without a default, then all that differ from their default."""
    values = asdict(settings)
    defaults = {field.name: field.default for field in fields(settings)}
    required = {name: values.pop(name) for name, default in defaults.items() if default is MISSING}
    default = asdict(type(settings)(**required))
    return [*changed_flags(required, dict.fromkeys(required)), *changed_flags(values, default)]


def changed_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the flags for all settings that differ from their defaults."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None and value != defaults[name]:
            flag = name.replace("_", "-")
            flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
