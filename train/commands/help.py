"""`--help` and `--help-all`: the flags that a first run needs, or all of them, in 80 columns."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from cyclopts import Group

from train.commands.training import HELP, HELP_ALL
from train.config.fields import FIRST_RUN, Range
from train.config.files import presets_of
from train.config.training import TrainingSettings

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection
    from cyclopts.help import HelpEntry

_WIDTH = 80
_WIDEST_LABEL, _WIDEST_SHORT_LABEL = 27, 22
_MOST_SHOWN = 100  # a longer range says what a number can hold rather than what one would choose
_TIED = str.maketrans(" ", "\N{NO-BREAK SPACE}")
_FIRST_SENTENCE = re.compile(r"(.+?)(?:\.(?=\s)|\.?$)")


def help_text(app: "App", words: Sequence[str]) -> str:
    """The help of the command that the words of a command line name."""
    commands, apps, _ = app.parse_commands([word for word in words if word not in HELP | {HELP_ALL}])
    command, name = apps[-1], " ".join([app.name[0], *commands])
    if command.default_command is None:
        return "\n".join(_group_help(command, name))
    return "\n".join(_command_help(command, name, everything=HELP_ALL in words))


def _group_help(group: "App", name: str) -> Iterator[str]:
    yield from (f"Usage: {name} COMMAND", "", *textwrap.wrap(group.help, _WIDTH), "", "Commands:")
    names = [one for one in group if not one.startswith("-")]
    summaries = {one: _paragraphs(group[one])[0] for one in names}
    yield from _table(list(summaries.items()), width=_width(names))
    yield from ("", f"{name} COMMAND --help shows the flags of a command.")


def _command_help(command: "App", name: str, *, everything: bool) -> Iterator[str]:
    arguments = command.assemble_argument_collection(parse_docstring=True).filter_by(show=True)
    is_first = {one.name for one in arguments if FIRST_RUN in _said(one)}
    is_short = bool(is_first) and not everything
    yield f"Usage: {name} {' '.join([*_required(arguments), '[OPTIONS]'])}"
    for paragraph in _paragraphs(command):
        if not paragraph.startswith(" "):
            yield ""
        yield from paragraph.splitlines() if paragraph.startswith(" ") else textwrap.wrap(paragraph, _WIDTH)
    rows: dict[str, list[tuple[str, str]]] = {}
    titles = {_group(one).name: _group(one) for one in arguments}
    for title, panel in sorted(titles.items(), key=lambda item: _position(item[1])):
        shown = [one for one in arguments.filter_by(group=panel) if not is_short or one.name in is_first]
        if shown:
            rows[title] = [_row(one, is_short=is_short) for one in shown]
    kind = next((one.hint for one in command.assemble_argument_collection() if _is_of_training(one)), None)
    if kind is not None:
        rows["Presets (--preset)"] = list(presets_of(kind).items())
    width = _width([label for group in rows.values() for label, _ in group], is_short=is_short)
    for title, group in rows.items():
        yield from ("", f"{title}:")
        yield from _table(group, width=width)
    if is_short:
        yield from ("", f"{name} --help-all shows all {len(arguments)} flags.")


def _is_of_training(argument: "Argument") -> bool:
    return isinstance(argument.hint, type) and issubclass(argument.hint, TrainingSettings)


def _paragraphs(command: "App") -> list[str]:
    """What a command does: a summary first, then text and, indented, examples."""
    doc = inspect.cleandoc(command.help if command.default_command is None else command.default_command.__doc__ or "")
    text = re.split(r"\n\nParameters\n-+\n", doc)[0]
    parts = text.split("\n\n")
    return [part if part.startswith(" ") else " ".join(part.split()) for part in parts]


def _group(argument: "Argument") -> Group:
    (group, *_) = cast(tuple[Group, ...], argument.parameter.group)
    return group


def _position(group: Group) -> tuple[float, str]:
    return (group.sort_key if isinstance(group.sort_key, int | float) else 0.5, group.name)


def _said(argument: "Argument") -> tuple[Any, ...]:
    """What the annotation of an argument says beside its type."""
    return get_args(argument.field_info.annotation)[1:]


def _required(arguments: "ArgumentCollection") -> Iterator[str]:
    for argument in arguments:
        if argument.required:
            entry = _entry(argument)
            yield entry.positional_label or f"{argument.name} {entry.metavar}"


def _row(argument: "Argument", *, is_short: bool) -> tuple[str, str]:
    entry = _entry(argument)
    label = entry.positional_label or _named(entry)
    words = " ".join((argument.parameter.help or "").replace("`", "").split())
    if is_short and (sentence := _FIRST_SENTENCE.match(words)):
        words = sentence[1]
    words = words.rstrip(".")
    is_switch = (entry.metavar or "BOOL").startswith("BOOL")  # with or without a value
    facts = [", ".join(entry.choices)] if entry.choices and not is_switch else []
    bounds = next((one for one in reversed(_said(argument)) if isinstance(one, Range)), None)
    if bounds is not None and not is_short and min(bounds.most, bounds.below) <= _MOST_SHOWN:
        least, most = max(bounds.least, bounds.above), min(bounds.most, bounds.below)
        open_least, open_most = ">" * (bounds.above == least), "<" * (bounds.below == most)
        facts.append(f"{open_least}{least:g} to {open_most}{most:g}".translate(_TIED))
    default = _default(argument.field_info.default)
    if argument.required:
        facts.append("required")
    elif default and not (is_switch and not entry.negative_names):
        facts.append(f"default: {default}".translate(_TIED))
    return label, f"{words} [{'; '.join(facts)}]" if facts else words


def _entry(argument: "Argument") -> "HelpEntry":
    from cyclopts.argument import ArgumentCollection
    from cyclopts.help import create_parameter_help_panel

    return create_parameter_help_panel(_group(argument), ArgumentCollection([argument]), "plaintext").entries[0]


def _named(entry: "HelpEntry") -> str:
    """`--steps INT`, or `--towers.[no-]packed-text`."""
    name = ", ".join(entry.positive_names)
    if entry.negative_names:
        head, _, last = name.rpartition(".")
        return f"{head}.[no-]{last}" if head else f"--[no-]{last.removeprefix('--')}"
    if entry.metavar == "BOOL|CHOICE":
        return f"{name} [{'|'.join(entry.choices or ())}]"
    return f"{name} {entry.metavar}" if entry.metavar else name


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return "" if value is None or value is inspect.Parameter.empty else str(value)


def _width(labels: Sequence[str], *, is_short: bool = False) -> int:
    widest = _WIDEST_SHORT_LABEL if is_short else _WIDEST_LABEL
    return max((len(label) for label in labels if len(label) <= widest), default=widest)


def _table(rows: Sequence[tuple[str, str]], *, width: int) -> Iterator[str]:
    """Lines of a table of two columns; a label that is wider than its column has a line of its own."""
    for label, words in rows:
        lines = textwrap.wrap(words, _WIDTH - width - 4, break_long_words=False, break_on_hyphens=False) or [""]
        lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
        yield f"  {label}" if len(label) > width else f"  {label:{width}}  {lines.pop(0)}".rstrip()
        yield from (" " * (width + 4) + line for line in lines)
