"""Recipe of a column: the settings and all other values that determine the stored bytes, except the input data.

The settings are a frozen dataclass whose fields are flags of the command. A recipe is stored as `recipe.json`. Its
fingerprint is part of the variant's name, so recipes that differ create different variants.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import VIDEO, command_for

# Marks in the annotation of a setting.
NOT_STORED = "a setting that does not affect the stored bytes and is not part of the recipe"
STORED_IF_CHANGED = "a setting that recipes omit if it has its default value, because it was added later"
# Mark in the annotation of a request's field.
KEPT = "a flag that is recorded with a run and used again by a retry"

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Recipe(Generic[Settings]):
    """Everything that determines the stored bytes of a column, except the input data.

    Attributes:
        settings: Settings of the command, in which model names, prompt files and, for `video`, defaults are resolved.
        values: Content of recipe.json.
        name: Readable part of the variant's name.
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
        """Name of the variant and of its folder: the readable part, and the first 8 digits of the fingerprint."""
        return f"{self.name}-{self.fingerprint[:8]}"


def recipe_fingerprint(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a recipe's values as canonical JSON. Variant names end with its first 8 digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def stored_values(settings: Any) -> dict[str, Any]:
    """Return the settings that are part of the recipe, keyed by name."""
    kind = type(settings)
    defaults = {field.name: field.default for field in fields(kind)}
    unchanged_names = {
        name for name in marked_fields(kind, STORED_IF_CHANGED) if getattr(settings, name) == defaults[name]
    }
    omitted_names = unchanged_names | marked_fields(kind, NOT_STORED).keys()
    return {name: value for name, value in asdict(settings).items() if name not in omitted_names}


def values_not_stored(settings: Any) -> dict[str, Any]:
    """Return the settings that are marked NOT_STORED, keyed by name."""
    return {name: getattr(settings, name) for name in marked_fields(type(settings), NOT_STORED)}


def marked_fields(kind: type, mark: str) -> dict[str, type]:
    """Return the fields of a dataclass that have a mark in their annotation, as {name: type without None}."""
    hints = get_type_hints(kind, include_extras=True)
    types: dict[str, type] = {}
    for field in fields(kind):
        value_type, *marks = get_args(hints[field.name]) or (None,)
        if mark in marks:
            # The type of an optional field is a union with None.
            types[field.name] = next((part for part in get_args(value_type) if part is not type(None)), value_type)
    return types


def settings_from(stored: Mapping[str, Any], kind: type[Settings], *, column: str, schema: int) -> Settings:
    """Return the settings that reproduce a variant.

    Args:
        stored: Recipe, merged with the request of the last run (`variants.stored_request`).
        kind: Dataclass of the settings.
        column: Name of the column.
        schema: Current version of the recipe schema.

    Raises:
        UserError: The recipe has a different version of the schema, or lacks a setting.
    """
    require_schema(stored, column=column, schema=schema)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    optional_names = marked_fields(kind, NOT_STORED) | marked_fields(kind, STORED_IF_CHANGED)
    required_names = ["video", *(name for name in names if name not in optional_names)]
    if missing_names := [name for name in required_names if name not in stored]:
        raise UserError(
            f"the recipe lacks {', '.join(map(repr, missing_names))}",
            hint=f"run `prep {column}` again to rewrite the recipe",
        )
    return kind(**{name: stored[name] for name in names if stored.get(name) is not None})


def require_schema(stored: Mapping[str, Any], *, column: str, schema: int) -> None:
    """Raise a UserError if a recipe belongs to a different column, or has a different version of the schema."""
    if stored.get("schema") != schema or stored.get("column", VIDEO) != column:
        command = command_for(column, str(stored.get("codec")))
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r}, but this version supports {schema}",
            hint=f"run `prep {command}` with the desired settings to create a new variant",
        )


def setting_flags(settings: Any) -> list[str]:
    """Return the flags for settings: first settings without a default, then settings that differ from the default."""
    values = asdict(settings)
    field_defaults = {field.name: field.default for field in fields(settings)}
    required_values = {name: values.pop(name) for name, default in field_defaults.items() if default is MISSING}
    defaults = asdict(type(settings)(**required_values))
    return [*changed_flags(required_values, dict.fromkeys(required_values)), *changed_flags(values, defaults)]


def changed_flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return flags for the values that differ from their defaults."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None and value != defaults[name]:
            flag = name.replace("_", "-")
            flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
