"""Settings in YAML files: the file of a run, `--config` files, and presets.

The value of a setting comes from the first of these sources that sets it: a flag; a `--config` file (later files
override earlier files); the `--preset`; with `--resume`, the saved settings of the run; the default. A run saves its
effective settings as RUN/settings.yaml, which loads as an equal object. A comment at the top of that file lists the
sources of the values.

If the user chooses a different loss or optimizer than the preset, `select_parts` uses the published values for that
choice, or the defaults, and adds a remark.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line
from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.settings import Checked, annotations_of, deferred_checks, mistakes, raise_mistakes
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.config.fields import Choice, Published
from clipmill.train.config.training import TrainingSettings, flatten, plain_values

PRESETS_FOLDER = Path(__file__).parents[1] / "presets"
Settings = TypeVar("Settings", bound=TrainingSettings)
# Former presets for one loss, and the presets for all losses that replaced them. By default, the loss is the same.
RENAMED_PRESETS = {f"fastclip-v3-{size}": f"fastclip-{size}" for size in ("medium", "large", "xlarge")}
# Limits for a settings file. A file that exceeds them contains something other than settings.
_MAX_VALUES, _MAX_DEPTH, _MAX_CHARACTERS = 10_000, 20, 10_000
_MAX_PARSED = 64  # maximum number of entries in the cache
_PARSED_SETTINGS: dict[tuple[type, bytes], Any] = {}  # cache of frozen settings, by class and file content
_FLAGS_HINT = "write one `key: value` per line, with keys spelled like the flags"
_TOO_LARGE = "has too many or too deeply nested values for a settings file"


def settings_yaml(settings: TrainingSettings) -> str:
    """Return the settings as YAML, with one key per field."""
    import yaml

    values = plain_values(asdict(settings))
    return str(yaml.dump(values, Dumper=_fast_class("SafeDumper"), sort_keys=False, allow_unicode=True))


def save_settings(settings: TrainingSettings, path: Path, *, comment: str = "") -> None:
    """Publish the settings as a YAML file that begins with `comment`."""
    publish_bytes(path, f"{comment}{settings_yaml(settings)}".encode())


def load_settings(path: Path, kind: type[Settings]) -> Settings:
    """Read the settings that a run saved, with the parser of the command line.

    Parsing takes a tenth of a second or more, so a process parses equal content only once.

    Raises:
        UserError: The file cannot be read, or contains a key or value that `kind` does not accept.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return _parse_file(path, kind)  # raises the error
    settings: Settings | None = _PARSED_SETTINGS.get((kind, content))
    if settings is None:
        settings = _parse_file(path, kind)
        if len(_PARSED_SETTINGS) == _MAX_PARSED:
            _PARSED_SETTINGS.clear()
        _PARSED_SETTINGS[kind, content] = settings
    return settings


def _parse_file(path: Path, kind: type[Settings]) -> Settings:
    from cyclopts import CycloptsError

    app = _reader(kind)  # type: ignore[arg-type]  # classes are hashable, even if their instances are not
    prefix = ""  # errors about the file contain its path; errors about its values need this prefix
    try:
        app.config, prefix = [yaml_source(path, kind)], f"{path}: "
        with deferred_checks():
            # Parsing the address of a run in a bucket would mount the bucket. Use the folder of the file instead.
            is_in_bucket = is_remote(str(read_values(path).get("out")))
            settings: Settings = app([f"--out={path.parent}"] if is_in_bucket else [])
        raise_mistakes(mistakes(settings))
        return settings
    except (CycloptsError, UserError) as error:
        from clipmill.manifests.usage_errors import usage_message

        message = f"{prefix}{error}" if isinstance(error, UserError) else usage_message(error)  # contains the path
        hints = ["restore the run's files"]
        if isinstance(error, UserError) and error.hint:
            hints += error.hint.splitlines()
        if path.is_file() and not path.read_bytes().endswith(b"\n"):
            # Files that a run writes end with a newline.
            message = f"{path} is cut off in the middle of a line; {message}"
        raise UserError(message, hint="; ".join(hints)) from error


@cache
def _reader(kind: type[Settings]) -> Any:
    """Return a command-line app whose flags are the fields of the settings. A call returns the settings."""
    from cyclopts import App

    app = App(exit_on_error=False, print_error=False, result_action="return_value")
    default = kind()

    @app.default
    def return_settings(settings: kind = default) -> Settings:  # type: ignore[valid-type]
        return settings

    return app


def yaml_source(
    path: Path, kind: type[TrainingSettings], *, preset: str | None = None, remarks: list[str] | None = None
) -> Any:
    """Return a configuration function for cyclopts that takes settings from a YAML file.

    Args:
        kind: Class of the settings.
        preset: Name of the preset, if the file is a preset.
        remarks: List that receives remarks about published settings and ignored values.

    Raises:
        UserError: The file cannot be read, or is not a YAML mapping.
    """
    from cyclopts.config import Dict

    # A key may be spelled like the field or like the flag.
    values = {str(key).replace("-", "_"): value for key, value in read_values(path).items()}
    name = str(path) if preset is None else f"preset {preset}"

    def fill(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
        overrides = {argument.name: str(argument.tokens[-1].value) for argument in arguments if argument.tokens}
        parts, new_remarks = select_parts(values, kind(), name=name, overrides=overrides, preset=preset)
        collection = _collection_by_name()(arguments)
        for part in parts:
            Dict(part.values, source=part.source, use_commands_as_keys=False)(app, commands, collection)
        if remarks is not None:
            remarks.extend(new_remarks)

    return fill


@cache
def _collection_by_name() -> type[Any]:
    """Return a subclass of cyclopts' `ArgumentCollection` that looks up complete names in a dict.

    cyclopts compares every key of a file with every argument, which would take most of the startup time of a `train`
    command. Names that are not in the dict are left to cyclopts, which reports unknown names.
    """
    from cyclopts.argument import Argument, ArgumentCollection

    class ByName(ArgumentCollection):
        def __init__(self, arguments: Any = ()) -> None:
            super().__init__(arguments)
            self._named: dict[str, Argument] = {}
            for argument in self:
                for name in argument.parameter.name or () if argument.parse else ():
                    self._named.setdefault(name.replace("_", "-"), argument)

        def match(self, term: Any, **spelling: Any) -> Any:
            if not spelling and (argument := self._named.get(str(term).replace("_", "-"))) is not None:
                return argument, *argument.match(term)
            return super().match(term, **spelling)

    return ByName


def read_values(path: Path) -> dict[object, Any]:
    """Return the content of a YAML settings file.

    Raises:
        UserError: The file cannot be read, is not a YAML mapping, or is too large for settings.
    """
    import yaml

    try:
        content = path.read_bytes()
        # Deeply nested YAML would overflow libyaml's stack.
        depth = 0
        for event in yaml.parse(content, Loader=_loader()):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise UserError(f"{path} {_TOO_LARGE}", hint=_FLAGS_HINT)
        values = yaml.load(content, Loader=_loader())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint="use a YAML file with settings") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise UserError(f"{path} is not YAML: {_fault(error)}", hint="write one `key: value` per line") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} contains no settings", hint=_FLAGS_HINT)
    _require_small(values, path)
    return values


def _fault(error: Exception) -> str:
    """Describe the syntax error in a YAML file, with the line number if the parser reports it."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return str(error).splitlines()[0]
    return error.problem if error.problem_mark is None else f"{error.problem} (line {error.problem_mark.line + 1})"


def _fast_class(name: str) -> Any:
    """Return a PyYAML class, if possible the libyaml variant, which is ten times as fast."""
    import yaml

    return getattr(yaml, f"C{name}", None) or getattr(yaml, name)


@cache
def _loader() -> type[Any]:
    """Return a safe YAML loader that rejects duplicate keys. PyYAML's own loader silently uses the last value."""
    import yaml

    class UniqueKeys(_fast_class("SafeLoader")):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (name := key.value.replace("-", "_")) in names:
                        raise yaml.constructor.ConstructorError(
                            problem=f"duplicate key {key.value}", problem_mark=key.start_mark
                        )
                    names.add(name)
            return super().construct_mapping(node, deep)

    return UniqueKeys


def _require_small(values: dict[object, Any], path: Path) -> None:
    """Raise a UserError for content that settings never contain: recursion, thousands of values, or huge strings."""
    stack: list[tuple[Any, int]] = [(values, 1)]
    num_values = 0
    while stack:
        value, depth = stack.pop()
        num_values += 1
        if isinstance(value, str) and len(value) > _MAX_CHARACTERS:
            raise UserError(
                f"{path} contains a value of {len(value):,} characters, which is too long for a setting",
                hint="write one `key: value` per line",
            )
        if num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise UserError(f"{path} {_TOO_LARGE}", hint=_FLAGS_HINT)
        if isinstance(value, dict):
            stack += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, list | tuple | set):
            stack += [(inner, depth + 1) for inner in value]


def preset_path(name: str, command: str = "") -> Path:
    """Return the path of a preset: for `tiny` in `train mae`, tiny-mae.yaml if it exists, otherwise tiny.yaml.

    Raises:
        UserError: The preset does not exist. The hint lists the presets, or names the successor of this preset.
    """
    preset_names = sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))
    for stem in (f"{name}-{command}", name):
        if stem in preset_names:
            return PRESETS_FOLDER / f"{stem}.yaml"
    if name in RENAMED_PRESETS:
        raise UserError(f"preset {name!r} no longer exists", hint=f"use --preset {RENAMED_PRESETS[name]}")
    raise UserError(f"there is no preset {name!r}", hint=f"use one of: {', '.join(preset_names)}")


def presets_of(kind: type[TrainingSettings]) -> dict[str, str]:
    """Return the purpose of each preset of a command, by name. The purpose is the first line of the preset's file.

    A preset is available in every command whose settings include all settings in the file.
    """
    purposes = {}
    for path, values in _presets().items():
        name = path.stem.removesuffix(f"-{kind.command}")
        if preset_path(name, kind.command) == path and _fits(values, kind):
            purposes[name] = path.read_text().partition("\n")[0].removeprefix("# ").rstrip(".")
    return purposes


@cache
def _presets() -> Mapping[Path, dict[str, Any]]:
    """Return the values of all presets by file."""
    return {
        path: {str(key): value for key, value in read_values(path).items()}
        for path in sorted(PRESETS_FOLDER.glob("*.yaml"))
    }


def _fits(values: Mapping[str, Any], kind: type) -> bool:
    types = get_type_hints(kind)
    return all(
        name in types and (not isinstance(value, dict) or _fits(value, types[name])) for name, value in values.items()
    )


_UNSET_VALUES = (None, False)


@dataclass(frozen=True)
class Provenance:
    """Sources of a command's settings.

    Attributes:
        sources: Source of the value of each flag: a preset, a published row or a file; "" for the command line.
        remarks: Remarks about the published settings that apply, and about ignored values of a preset.
    """

    sources: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def as_comment(self) -> str:
        """Return the flags, grouped by source, as YAML comment lines; empty if no sources are known."""
        if not self.sources:
            return ""
        by_source: dict[str, list[str]] = {"flags": []}
        for flag, source in self.sources.items():
            by_source.setdefault(on_one_line(source) or "flags", []).append(flag)
        lines = ["Sources of the values; all other values are defaults."]
        lines += [f"{source}: {' '.join(flags)}" for source, flags in by_source.items() if flags]
        wrapped_lines = [
            textwrap.wrap(line, 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        ]
        return "".join(f"# {line}\n" for lines in wrapped_lines for line in lines)


@dataclass(frozen=True)
class Part:
    """Settings from one source, nested as in a file, and the name of the source."""

    source: str
    values: dict[str, Any]


def select_parts(
    values: Mapping[str, Any],
    defaults: TrainingSettings,
    *,
    name: str,
    overrides: Mapping[str, str],
    preset: str | None,
) -> tuple[list[Part], list[str]]:
    """Select the values in a settings file that apply to the chosen loss and optimizer.

    Args:
        values: Values of the file.
        defaults: Default settings.
        name: Name of the file or preset, for messages.
        overrides: Values from flags and files with higher priority, by flag.
        preset: Name of the preset, if the file is a preset.

    Returns:
        Parts of settings by descending priority, and remarks for the user.
    """
    common_values, parts, remarks = dict(values), list[Part](), list[str]()
    groups = sorted(field.name for field in fields(defaults)) if preset is not None else ()
    for group in groups:
        kind = getattr(defaults, group)
        if not isinstance(kind, Choice):
            continue
        group_values, flag = common_values.get(group, {}), kind.flag(kind.choice)
        preset_choice = str(group_values.get(kind.choice, getattr(kind, kind.choice)))
        choice = overrides.get(flag, preset_choice)
        if rows := kind.published.get(preset or "", {}):
            if (row := rows.get(choice)) is not None:
                source = f"{name}, {flag} {choice} ({row.source})"
                parts.append(Part(source, row.values))
                remarks.append(f"{source}: {_format_flags(flatten(row.values), overrides)}")
            else:
                flags = _format_flags(_defaults_for_choice(rows, group, choice, defaults), overrides)
                choices = ", ".join(rows)
                remarks.append(f"{name} has no values for {flag} {choice}, only for {choices}; defaults: {flags}")
        elif choice != preset_choice:
            names = {name for hyperparameters in kind.hyperparameters().values() for name in hyperparameters}
            unused_values = {f"{group}.{key}": value for key, value in group_values.items() if key in names}
            common_values[group] = {key: value for key, value in group_values.items() if key not in names}
            if set(map(_flag, unused_values)) - set(overrides):
                flags = _format_flags(unused_values, overrides)
                remarks.append(f"{name}: values for {flag} {preset_choice} are not used with {choice}: {flags}")
    chosen_values = list[Part]()
    for part in (*parts, Part(name, common_values)):
        kept_values, reasons = _drop_idle_values(part.values, defaults, overrides)
        chosen_values.append(Part(part.source, kept_values))
        remarks += [f"{part.source}: {flag} is not used with {reason}" for flag, reason in reasons.items()]
    return chosen_values, remarks


def _defaults_for_choice(
    rows: Mapping[str, Published], group: str, choice: str, defaults: TrainingSettings
) -> dict[str, Any]:
    """Return the defaults that apply to a choice without a published row.

    The result contains the hyperparameters of the choice, and the other settings that the published rows set.
    """
    choices = getattr(defaults, group).hyperparameters()
    hyperparameters = {f"{group}.{name}" for names in choices.values() for name in names}
    common = {name for row in rows.values() for name in flatten(row.values)} - hyperparameters
    chosen_values = {f"{group}.{name}": value for name, value in choices.get(choice, {}).items()}
    return {name: reduce(getattr, name.split("."), defaults) for name in sorted(common)} | chosen_values


def _drop_idle_values(
    values: Mapping[str, Any], defaults: Checked, overrides: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Drop values of a file that have no effect because of flags or files with higher priority.

    Args:
        values: Values of the file, nested like the settings.
        overrides: Values from flags and files with higher priority, by flag.

    Returns:
        The remaining values, and the reasons for dropping the others, by flag. Each reason is a flag and its value.
    """
    kept_values, reasons = dict(values), dict[str, str]()
    annotations = {setting.name: setting for setting in annotations_of(type(defaults))}
    for key, value in values.items():
        setting = annotations.get(str(key).replace("-", "_"))
        group = getattr(defaults, setting.name) if setting else None  # the parser reports unknown keys
        if isinstance(group, Checked) and isinstance(value, Mapping):
            kept_values[key], group_reasons = _drop_idle_values(value, group, overrides)
            reasons |= group_reasons
        elif setting and setting.needs is not None and value != setting.default:
            flag = defaults.flag(setting.needs.name)
            if flag in overrides and overrides[flag] not in map(str, setting.needs.values):
                del kept_values[key]
                reasons[defaults.flag(setting.name)] = f"{flag} {overrides[flag]}"
    return kept_values, reasons


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _format_flags(values: Mapping[str, Any], overrides: Mapping[str, str]) -> str:
    """Format values as flags, without the flags in `overrides`."""
    flag_values = {_flag(name): value for name, value in values.items() if value not in _UNSET_VALUES}
    text = " ".join(f"{flag} {value}" for flag, value in flag_values.items() if flag not in overrides)
    return text or ("all are set elsewhere" if flag_values else "none")
