"""Values of a settings file that depend on the value of another setting, and where values come from.

    by:
      loss.kind:
        sogclr: {source: 'FastCLIP, table 8', loss: {temperature: 0.03, gamma: 0.6}}
        fastclip-v1: {loss: {temperature: 0.03, gamma: 0.2}}

The key `by` of a preset or `--config` file has a table for a setting: each of its values has a row of settings, nested
as those of the file, and the `source` that publishes them. The setting is as given by a flag or a stronger file, or as
in the file itself, or its default. Its row is weaker than flags and stronger files, and stronger than the rest of the
file.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any, cast

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line
from clipmill.train.config.fields import Checked, without_idle
from clipmill.train.config.training import TrainingSettings, flat

BY, SOURCE = "by", "source"
_BY_HINT = "write a setting, its values and the settings of each: `by: {loss.kind: {sogclr: {loss: {gamma: 0.6}}}}`"
_OFF = (None, False)


@dataclass(frozen=True)
class Provenance:
    """Where the settings of a command come from.

    Attributes:
        sources: the preset, row or file of each value by its flag; "" of a flag that was typed.
        remarks: which rows were taken, and what a preset has and another choice does not take.
    """

    sources: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def as_comment(self) -> str:
        """The flags by their source, as comment lines of YAML; empty if no sources are known."""
        if not self.sources:
            return ""
        by_source: dict[str, list[str]] = {"flags": []}
        for flag, source in self.sources.items():
            by_source.setdefault(on_one_line(source) or "flags", []).append(flag)
        lines = ["Where the values come from; all others are defaults."]
        lines += [f"{source}: {' '.join(flags)}" for source, flags in by_source.items() if flags]
        wrapped = [
            textwrap.wrap(line, 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        ]
        return "".join(f"# {line}\n" for lines in wrapped for line in lines)


@dataclass(frozen=True)
class Part:
    """Settings of a file that are given together, nested as in the file, and where they come from."""

    source: str
    values: dict[str, Any]


def tables_of(values: Mapping[str, Any], name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The tables of a file called `name`: rows by the value of a setting, by this setting; UserError if malformed."""
    tables = values.get(BY, {})
    try:
        return {
            str(setting).replace("-", "_"): {str(value): dict(row) for value, row in table.items()}
            for setting, table in tables.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{name}: {BY} is not a table of settings by the value of a setting", hint=_BY_HINT) from error


def alternatives(values: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """What a file shares, each of its rows, and the settings that choose them."""
    yield {key: value for key, value in values.items() if key != BY}
    for setting, table in tables_of(values, name).items():
        yield reduce(lambda inner, key: {key: inner}, reversed(setting.split(".")), cast(Any, None))
        for row in table.values():
            yield {key: value for key, value in row.items() if key != SOURCE}


def chosen_parts(
    values: Mapping[str, Any], defaults: TrainingSettings, *, name: str, given: Mapping[str, str], is_preset: bool
) -> tuple[list[Part], list[str]]:
    """The parts of a file that apply, the strongest first, and remarks on what was chosen.

    A preset is a recipe of one choice of each group that has choices: of another one, it does not set the
    hyperparameters.

    Args:
        values: of the file.
        defaults: the settings without flags and files.
        name: of the file or preset, for messages.
        given: what flags and stronger files have set, by flag.

    Raises:
        UserError: the tables are malformed, or are of a setting that the command does not have.
    """
    common = {key: value for key, value in values.items() if key != BY}
    parts: list[Part] = []
    remarks: list[str] = []
    for setting, table in tables_of(values, name).items():
        chosen = given.get(_flag(setting), str(flat(common).get(setting, _value(defaults, setting, name))))
        if (row := table.get(chosen)) is None:
            others = ", ".join(table)
            said = _words(_defaults_of(setting, chosen, table, defaults, name), given)
            remarks.append(f"{name} has no values for {_flag(setting)} {chosen}, only for {others}; defaults: {said}")
            continue
        source = row.pop(SOURCE, "")
        where = f"{name}, {_flag(setting)} {chosen}" + (f" ({source})" if source else "")
        parts.append(Part(where, row))
        remarks.append(f"{where}: {_words(flat(row), given)}")
    for group in fields(defaults) if is_preset else ():
        kind = getattr(defaults, group.name)
        if not isinstance(kind, Checked) or not kind.choice:
            continue
        own_values = common.get(group.name, {})
        own = str(own_values.get(kind.choice, getattr(kind, kind.choice)))
        if (chosen := given.get(kind.flag(kind.choice), own)) == own:
            continue
        names = {one for taken in kind.hyperparameters().values() for one in taken}
        left_out = {f"{group.name}.{one}": value for one, value in own_values.items() if one in names}
        common[group.name] = {one: value for one, value in own_values.items() if one not in names}
        if set(map(_flag, left_out)) - set(given):
            choice = f"{kind.flag(kind.choice)} {own}"
            remarks.append(f"{name}: values for {choice} are not used with {chosen}: {_words(left_out, given)}")
    chosen_values = list[Part]()
    for part in (*parts, Part(name, common)):
        kept, idle = without_idle(part.values, defaults, given)
        chosen_values.append(Part(part.source, kept))
        remarks += [f"{part.source}: {flag} is not used with {beside}" for flag, beside in idle.items()]
    return chosen_values, remarks


def _defaults_of(
    setting: str, chosen: str, table: Mapping[str, dict[str, Any]], defaults: TrainingSettings, name: str
) -> dict[str, Any]:
    """Defaults of the settings that the rows of a table have, and of all hyperparameters of `chosen`."""
    group, _, choice = setting.rpartition(".")
    kind = _value(defaults, group, name) if group else defaults
    taken = kind.hyperparameters() if kind.choice == choice else {}
    of_choices = {f"{group}.{one}" for own in taken.values() for one in own}
    names = {one for row in table.values() for one in flat(row)} - of_choices - {SOURCE}
    own = {f"{group}.{one}": value for one, value in taken.get(chosen, {}).items()}
    return {one: _value(defaults, one, name) for one in sorted(names)} | own


def _value(defaults: TrainingSettings, setting: str, name: str) -> Any:
    """The default of a setting by the name of its flag."""
    try:
        return reduce(getattr, setting.replace("-", "_").split("."), defaults)
    except AttributeError as error:
        raise UserError(f"{name}: {BY} names {setting}, which is not a setting", hint=_BY_HINT) from error


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _words(values: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """Values as flags, without those that are given otherwise."""
    shown = {_flag(name): value for name, value in values.items() if value not in _OFF}
    words = " ".join(f"{flag} {value}" for flag, value in shown.items() if flag not in given)
    return words or ("all are given otherwise" if shown else "no value of its own")
