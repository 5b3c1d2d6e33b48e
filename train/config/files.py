"""Settings in files: YAML of a run, of `--config` and of the presets.

Where a value comes from, the strongest first: a flag, a `--config` file (later files before earlier ones), the
`--preset`, with `--resume` the settings that the run saved, the default. A run saves what took effect as
RUN/settings.yaml, which loads back to an equal object; a comment on top says where the values came from. What a preset
sets beside another loss or optimizer than its own: `choices.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.settings import deferred_checks, mistakes, refuse
from clipmill.train.config.choices import chosen_parts
from clipmill.train.config.training import TrainingSettings, plain_values

PRESETS_FOLDER = Path(__file__).parents[1] / "presets"
Settings = TypeVar("Settings", bound=TrainingSettings)
# The presets of one loss became those of all: the loss is a flag, whose default is theirs.
RENAMED = {f"fastclip-v3-{size}": f"fastclip-{size}" for size in ("medium", "large", "xlarge")}
# Of a file of settings; what exceeds these was not written as one.
_MAX_VALUES, _MAX_DEPTH, _MAX_LETTERS = 10_000, 20, 10_000
_MOST_PARSED = 64
_PARSED: dict[tuple[type, bytes], Any] = {}  # settings, which are frozen, by their kind and file
_FLAGS_HINT = "one `key: value` a line, keys spelled as the flags"
_TOO_MUCH = "has too many or too deeply nested values for a settings file"


def settings_yaml(settings: TrainingSettings) -> str:
    """The settings as YAML, one key per field."""
    import yaml

    values = plain_values(asdict(settings))
    return str(yaml.dump(values, Dumper=_in_c("SafeDumper"), sort_keys=False, allow_unicode=True))


def save_settings(settings: TrainingSettings, path: Path, *, comment: str = "") -> None:
    """Publishes the settings as a YAML file, below `comment`."""
    publish_bytes(path, f"{comment}{settings_yaml(settings)}".encode())


def load_settings(path: Path, kind: type[Settings]) -> Settings:
    """Reads the settings that a run saved, through the parser that reads the command line.

    It takes a tenth of a second or more, so that a process parses the same content once.

    Raises:
        UserError: the file cannot be read, or has a key or value that `kind` does not know.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return _parse_file(path, kind)  # says why
    known: Settings | None = _PARSED.get((kind, content))
    if known is None:
        known = _parse_file(path, kind)
        if len(_PARSED) == _MOST_PARSED:
            _PARSED.clear()
        _PARSED[kind, content] = known
    return known


def _parse_file(path: Path, kind: type[Settings]) -> Settings:
    from cyclopts import CycloptsError

    app = _reader(kind)  # type: ignore[arg-type]  # classes are hashable, whatever their instances are
    place = ""  # errors about the file name it, errors about its values do not
    try:
        app.config, place = [yaml_source(path, kind)], f"{path}: "
        with deferred_checks():
            settings: Settings = app([])
        refuse(mistakes(settings))
        return settings
    except (CycloptsError, UserError) as error:
        from clipmill.manifests.usage_errors import usage_message

        wrong = f"{place}{error}" if isinstance(error, UserError) else usage_message(error)  # names the file
        hints = ["restore the run's files"]
        if isinstance(error, UserError) and error.hint:
            hints += error.hint.splitlines()
        if path.is_file() and not path.read_bytes().endswith(b"\n"):
            # What a run saves ends in a whole line.
            wrong = f"{path} is cut off in the middle of a line; {wrong}"
        raise UserError(wrong, hint="; ".join(hints)) from error


@cache
def _reader(kind: type[Settings]) -> Any:
    """A command line whose flags are the fields of the settings, which it returns."""
    from cyclopts import App

    app = App(exit_on_error=False, print_error=False, result_action="return_value")
    default = kind()

    @app.default
    def give(settings: kind = default) -> Settings:  # type: ignore[valid-type]
        return settings

    return app


def yaml_source(
    path: Path, kind: type[TrainingSettings], *, preset: str | None = None, remarks: list[str] | None = None
) -> Any:
    """A source of settings for cyclopts.

    Args:
        kind: of the settings.
        preset: its name, if the file is a preset.
        remarks: Takes remarks on rows that were taken, and on values that were not.

    Raises:
        UserError: there is no such file, or it is not a YAML mapping.
    """
    from cyclopts.config import Dict

    # Keys may be spelled as the field or as the flag.
    spelled = {str(key).replace("-", "_"): value for key, value in read_values(path).items()}
    name = str(path) if preset is None else f"preset {preset}"

    def fill(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
        given = {argument.name: str(argument.tokens[-1].value) for argument in arguments if argument.tokens}
        parts, said = chosen_parts(spelled, kind(), name=name, given=given, preset=preset)
        named = _by_name()(arguments)
        for part in parts:
            Dict(part.values, source=part.source, use_commands_as_keys=False)(app, commands, named)
        if remarks is not None:
            remarks.extend(said)

    return fill


@cache
def _by_name() -> type[Any]:
    """A collection of arguments that finds one by its whole name at once.

    cyclopts compares every key of a file with every argument, which is most of the time of a `train` command until it
    begins. The arguments are those of the command. Names that are not found here are left to cyclopts, which reports
    unknown ones.
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
    """The content of a YAML file of settings.

    Raises:
        UserError: there is no such file, or it is not a YAML mapping.
    """
    import yaml

    try:
        content = path.read_bytes()
        _require_shallow(content, path)
        values = yaml.load(content, Loader=_loader())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint="name a YAML file of settings") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise UserError(f"{path} is not YAML: {_fault(error)}", hint="one `key: value` a line") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings", hint=_FLAGS_HINT)
    _require_small(values, path)
    return values


def _fault(error: Exception) -> str:
    """What is wrong with a YAML file, with the number of the line if the parser knows it."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return str(error).splitlines()[0]
    return error.problem if error.problem_mark is None else f"{error.problem} (line {error.problem_mark.line + 1})"


def _in_c(name: str) -> Any:
    """A class of PyYAML, in the version that libyaml makes ten times as fast if it is there."""
    import yaml

    return getattr(yaml, f"C{name}", None) or getattr(yaml, name)


@cache
def _loader() -> type[Any]:
    """A safe loader that reports duplicate keys, of which it would otherwise take the last."""
    import yaml

    class UniqueKeys(_in_c("SafeLoader")):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (name := key.value.replace("-", "_")) in seen:
                        raise yaml.constructor.ConstructorError(
                            problem=f"it has the key {key.value} twice", problem_mark=key.start_mark
                        )
                    seen.add(name)
            return super().construct_mapping(node, deep)

    return UniqueKeys


def _require_shallow(content: bytes, path: Path) -> None:
    """Raise a UserError for YAML that is nested more deeply than settings are: libyaml would overflow the stack."""
    import yaml

    depth = 0
    for event in yaml.parse(content, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise UserError(f"{path} {_TOO_MUCH}", hint=_FLAGS_HINT)


def _require_small(values: dict[object, Any], path: Path) -> None:
    """Raises a UserError for values that no settings have: recursive ones, thousands of them, or long texts."""
    waiting: list[tuple[Any, int]] = [(values, 1)]
    num_seen = 0
    while waiting:
        value, depth = waiting.pop()
        num_seen += 1
        if isinstance(value, str) and len(value) > _MAX_LETTERS:
            raise UserError(f"{path} holds a value of {len(value):,} characters", hint="one `key: value` a line")
        if num_seen > _MAX_VALUES or depth > _MAX_DEPTH:
            raise UserError(f"{path} {_TOO_MUCH}", hint=_FLAGS_HINT)
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, list | tuple | set):
            waiting += [(inner, depth + 1) for inner in value]


def preset_path(name: str, command: str = "") -> Path:
    """File of the preset `name`: `tiny` is tiny-mae.yaml in `train mae`, and tiny.yaml where a command has none.

    Raises:
        UserError: there is no such preset; the hint lists those there are, or names the one that took its place.
    """
    known = sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))
    for stem in (f"{name}-{command}", name):
        if stem in known:
            return PRESETS_FOLDER / f"{stem}.yaml"
    if name in RENAMED:
        raise UserError(f"there is no preset {name!r} any more", hint=f"use --preset {RENAMED[name]}")
    raise UserError(f"there is no preset {name!r}", hint=f"presets: {', '.join(known)}")


def presets_of(kind: type[TrainingSettings]) -> dict[str, str]:
    """The presets of a command by name, and what each is for: the first line of its file.

    A preset belongs to the commands that have all of its settings.
    """
    found = {}
    for path, values in _presets().items():
        name = path.stem.removesuffix(f"-{kind.command}")
        if preset_path(name, kind.command) == path and _fits(values, kind):
            found[name] = path.read_text().partition("\n")[0].removeprefix("# ").rstrip(".")
    return found


@cache
def _presets() -> Mapping[Path, dict[str, Any]]:
    """The values of all presets by file."""
    return {
        path: {str(key): value for key, value in read_values(path).items()}
        for path in sorted(PRESETS_FOLDER.glob("*.yaml"))
    }


def _fits(values: Mapping[str, Any], kind: type) -> bool:
    types = get_type_hints(kind)
    return all(
        name in types and (not isinstance(value, dict) or _fits(value, types[name])) for name, value in values.items()
    )
