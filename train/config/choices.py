"""Values that a file of settings contributes beside flags and stronger files, and the source of each value.

A preset is a recipe of one loss and one optimizer. With another one, it does not set the hyperparameters of its own;
the published row of the other one takes their place (`Choice.published`), if the preset has such rows. A row is weaker
than flags and stronger files, and stronger than the rest of the preset.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from clipmill.manifests.formatting import on_one_line
from clipmill.manifests.settings import Checked, annotations_of
from clipmill.train.config.fields import Choice, Published
from clipmill.train.config.training import TrainingSettings, flatten

_OFF = (None, False)


@dataclass(frozen=True)
class Provenance:
    """Where the settings of a command come from.

    Attributes:
        sources: Preset, row or file of each value by its flag; "" for a flag that was typed.
        remarks: Rows that were taken, and values of a preset that another choice does not take.
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
    """Settings that are given together, nested as in a file, and where they come from."""

    source: str
    values: dict[str, Any]


def chosen_parts(
    values: Mapping[str, Any], defaults: TrainingSettings, *, name: str, given: Mapping[str, str], preset: str | None
) -> tuple[list[Part], list[str]]:
    """The parts of a file that apply, the strongest first, and remarks on what was chosen.

    Args:
        values: Values of the file.
        defaults: Settings without flags and files.
        name: Name of the file or preset, for messages.
        given: Values of flags and stronger files, by flag.
        preset: Name of the preset; None for another file.
    """
    common, parts, remarks = dict(values), list[Part](), list[str]()
    groups = sorted(field.name for field in fields(defaults)) if preset is not None else ()
    for group in groups:
        kind = getattr(defaults, group)
        if not isinstance(kind, Choice):
            continue
        of_group, flag = common.get(group, {}), kind.flag(kind.choice)
        own = str(of_group.get(kind.choice, getattr(kind, kind.choice)))
        chosen = given.get(flag, own)
        if rows := kind.published.get(preset or "", {}):
            if (row := rows.get(chosen)) is not None:
                where = f"{name}, {flag} {chosen} ({row.source})"
                parts.append(Part(where, row.values))
                remarks.append(f"{where}: {_words(flatten(row.values), given)}")
            else:
                words = _words(_defaults_beside(rows, group, chosen, defaults), given)
                others = ", ".join(rows)
                remarks.append(f"{name} has no values for {flag} {chosen}, only for {others}; defaults: {words}")
        elif chosen != own:
            names = {hyperparameter for taken in kind.hyperparameters().values() for hyperparameter in taken}
            left_out = {f"{group}.{key}": value for key, value in of_group.items() if key in names}
            common[group] = {key: value for key, value in of_group.items() if key not in names}
            if set(map(_flag, left_out)) - set(given):
                words = _words(left_out, given)
                remarks.append(f"{name}: values for {flag} {own} are not used with {chosen}: {words}")
    chosen_values = list[Part]()
    for part in (*parts, Part(name, common)):
        kept, idle = _drop_idle(part.values, defaults, given)
        chosen_values.append(Part(part.source, kept))
        remarks += [f"{part.source}: {flag} is not used with {beside}" for flag, beside in idle.items()]
    return chosen_values, remarks


def _defaults_beside(
    rows: Mapping[str, Published], group: str, chosen: str, defaults: TrainingSettings
) -> dict[str, Any]:
    """Defaults of the settings that rows have, and of all hyperparameters of a choice without a row."""
    taken = getattr(defaults, group).hyperparameters()
    of_choices = {f"{group}.{name}" for names in taken.values() for name in names}
    others = {name for row in rows.values() for name in flatten(row.values)} - of_choices
    own = {f"{group}.{name}": value for name, value in taken.get(chosen, {}).items()}
    return {name: reduce(getattr, name.split("."), defaults) for name in sorted(others)} | own


def _drop_idle(
    values: Mapping[str, Any], defaults: Checked, given: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Drop the values of a file that flags or stronger files leave without effect; return the rest, and the reasons.

    Args:
        values: Values of the file, nested as the settings.
        given: Values of flags and stronger files, by flag.

    Returns:
        The values that are left; and for the flag of each other one, the flag and value beside which it does nothing.
    """
    kept, idle = dict(values), dict[str, str]()
    annotations = {one.name: one for one in annotations_of(defaults)}
    for key, value in values.items():
        setting = annotations.get(str(key).replace("-", "_"))
        group = getattr(defaults, setting.name) if setting else None  # the parser reports unknown keys
        if isinstance(group, Checked) and isinstance(value, Mapping):
            kept[key], of_group = _drop_idle(value, group, given)
            idle |= of_group
        elif setting and setting.needs is not None and value != setting.default:
            other = defaults.flag(setting.needs.name)
            if other in given and given[other] not in map(str, setting.needs.values):
                del kept[key]
                idle[defaults.flag(setting.name)] = f"{other} {given[other]}"
    return kept, idle


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _words(values: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """Values as flags, without those that are given otherwise."""
    shown = {_flag(name): value for name, value in values.items() if value not in _OFF}
    words = " ".join(f"{flag} {value}" for flag, value in shown.items() if flag not in given)
    return words or ("all are given otherwise" if shown else "no value of its own")
