"""Command-line support for `prep` and `train`: help in 80 columns, `--install-completion`, and checks of flag values.

`--help-all` shows all flags. `--help` shows the flags that are annotated with `FIRST_RUN`. If a command has few flags,
or none with this annotation, `--help` shows all flags except for those annotated with `RARE`.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import UnusablePart
from clipmill.manifests.storage.mirrors import is_remote

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection
    from cyclopts.help import HelpEntry


OPTIONS = Group("Options", sort_key=9)  # group of the flags without a group
HELP, HELP_ALL = frozenset({"--help", "-h"}), "--help-all"
FIRST_RUN = "a flag that a first run needs"  # annotation of a flag
RARE = "a flag that --help never shows"  # annotation of a flag
Metadata = tuple[Any, ...]  # annotations of a flag, without the type
Tables = Mapping[str, Sequence[tuple[str, str]]]  # mapping from the title of a table to rows of label and description

_WIDTH = 80
_MAX_LABEL_WIDTH, _MAX_SHORT_LABEL_WIDTH = 27, 22
_FEW_FLAGS = 12
_NO_BREAKS = str.maketrans(" ", "\N{NO-BREAK SPACE}")  # keeps text on one line
_ONE_OR_MORE = re.compile(r"\b(\w+)\|\1\.\.\.")  # STR|STR...
_FIRST_SENTENCE = re.compile(r"(.+?)(?:\.(?=\s)|\.?$)")


def wants_help(app: "App", arguments: Sequence[str]) -> bool:
    """Return True if the arguments of a program request help, or do not contain a command."""
    if not HELP.isdisjoint(arguments) or HELP_ALL in arguments:
        return True
    _, apps, rest = app.parse_commands(arguments)
    return apps[-1].default_command is None and not rest


def help_text(
    app: "App",
    arguments: Sequence[str],
    *,
    range_of: Callable[[Metadata], str] = lambda metadata: "",
    tables_of: Callable[["ArgumentCollection"], Tables] = lambda arguments: {},
) -> str:
    """Return the help text for the command in the arguments of a program.

    Args:
        range_of: Function that takes the annotations of a flag and returns the flag's range, such as `1 to 64`, or ""
            if there is none. The short help omits ranges.
        tables_of: Function that takes the flags of a command and returns tables to show after the flags.
    """
    commands, apps, _ = app.parse_commands([word for word in arguments if word not in HELP | {HELP_ALL}])
    command, name = apps[-1], " ".join([app.name[0], *commands])
    if command.default_command is None:
        summaries = _commands(command)
        lines = [f"Usage: {name} COMMAND", *_paragraph_lines(_paragraphs(command)), "", "Commands:"]
        lines += _table(summaries, width=_width([label for label, _ in summaries]))
        lines += ["", f"{name} COMMAND --help shows the flags of a command."]
        if " " not in name:
            lines.append(f"{name} --install-completion enables shell completion of commands and flags.")
        return "\n".join(lines)

    page = command_help(command, name, shows_all=HELP_ALL in arguments, range_of=range_of, tables_of=tables_of)
    lines = [page.usage, *_paragraph_lines(page.paragraphs)]
    width = _width([label for rows in page.tables.values() for label, _ in rows], is_short=page.is_short)
    for title, rows in page.tables.items():
        lines += ["", f"{title}:", *_table(rows, width=width)]
    if page.num_all is not None:
        lines += ["", f"{name} --help-all shows all {page.num_all} flags."]
    return "\n".join(lines)


@dataclass(frozen=True)
class CommandHelp:
    """Content of the help for one command.

    Attributes:
        usage: Usage line.
        paragraphs: Summary and further paragraphs of the description. Examples are indented.
        tables: Tables of flags and descriptions, by title.
        is_short: True if the tables contain only the flags for a first run.
        num_all: Total number of flags if some flags are omitted; otherwise, None.
    """

    usage: str
    paragraphs: list[str]
    tables: Tables
    is_short: bool
    num_all: int | None


def command_help(
    command: "App",
    name: str,
    *,
    shows_all: bool,
    range_of: Callable[[Metadata], str] = lambda metadata: "",
    tables_of: Callable[["ArgumentCollection"], Tables] = lambda arguments: {},
) -> CommandHelp:
    """Return the help for a command.

    Args:
        name: Name of the command, including the program.
        shows_all: True to include all flags, even rare ones.
        range_of, tables_of: See `help_text`.
    """
    collection = command.assemble_argument_collection(parse_docstring=True)
    arguments = collection.filter_by(show=True)
    first_flags = {argument.name for argument in arguments if FIRST_RUN in _metadata(argument)}
    usual_flags = {argument.name for argument in arguments if RARE not in _metadata(argument)}
    is_short = bool(first_flags) and len(usual_flags) > _FEW_FLAGS and not shows_all
    flags = first_flags if is_short else usual_flags
    rows: dict[str, Sequence[tuple[str, str]]] = {"Commands": commands} if (commands := _commands(command)) else {}
    groups = {_group(argument).name: _group(argument) for argument in arguments}

    def order(group: Group) -> tuple[float, str]:
        return (group.sort_key if isinstance(group.sort_key, int | float) else 0.5, group.name)

    for group in sorted(groups.values(), key=order):
        members = [argument for argument in arguments.filter_by(group=group) if shows_all or argument.name in flags]
        if members:
            rows[group.name] = [_row(argument, is_short=is_short, range_of=range_of) for argument in members]
    rows.update(tables_of(collection))

    # The usage line contains the required flags and the positional arguments.
    usage = ["Usage:", name]
    for argument in arguments:
        entry = _entry(argument)
        if argument.required:
            usage.append(entry.positional_label or f"{argument.name} {entry.metavar}")
        elif entry.positional_label:
            usage.append(f"[{entry.positional_label}]")
    num_all = len(arguments) if not shows_all and len(flags) < len(arguments) else None
    return CommandHelp(" ".join([*usage, "[OPTIONS]"]), _paragraphs(command), rows, is_short=is_short, num_all=num_all)


def _commands(group: "App") -> list[tuple[str, str]]:
    """Return the names and summaries of a group's commands. A command with a registered summary is not imported."""
    from cyclopts.group_extractors import groups_from_app

    rows = [row for _, rows in groups_from_app(group) for row in rows]
    summaries = {name: row.app.help for row in rows for name in row.names if not isinstance(row.app, type(group))}
    commands = []
    for name in group:
        if name.startswith("-"):
            continue
        try:
            commands.append((name, summaries.get(name) or _paragraphs(group[name])[0]))
        except UnusablePart:
            commands.append((name, "Cannot be used; the command reports why."))
    return commands


def _paragraph_lines(paragraphs: Sequence[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        if not paragraph.startswith(" "):
            yield ""
        yield from paragraph.splitlines() if "    " in paragraph else textwrap.wrap(paragraph, _WIDTH)


def _paragraphs(command: "App") -> list[str]:
    """Return the description of a command as paragraphs: the summary, further text, and indented examples."""
    doc = inspect.cleandoc(command.help if command.default_command is None else command.default_command.__doc__ or "")
    text = re.split(r"\n\nParameters\n-+\n", doc)[0]
    parts = text.split("\n\n")
    parts = [part if part.startswith(" ") else " ".join(part.replace("`", "").split()) for part in parts]
    return [re.sub(r"^Example: ", "Example:\n    ", part) for part in parts]


def _group(argument: "Argument") -> "Group":
    (group, *_) = cast("tuple[Group, ...]", argument.parameter.group)
    return group


def _metadata(argument: "Argument") -> Metadata:
    return get_args(argument.field_info.annotation)[1:]


def _row(argument: "Argument", *, is_short: bool, range_of: Callable[[Metadata], str]) -> tuple[str, str]:
    entry = _entry(argument)
    label = entry.positional_label or _flag_label(entry)
    description = " ".join((argument.parameter.help or "").replace("`", "").split())
    if is_short and (sentence := _FIRST_SENTENCE.match(description)):
        description = sentence[1]
    description = description.rstrip(".")
    is_switch = (entry.metavar or "BOOL").startswith("BOOL")  # with or without a value
    facts = [", ".join(entry.choices)] if entry.choices and not is_switch else []
    if not is_short and (bounds := range_of(_metadata(argument))):
        facts.append(bounds.translate(_NO_BREAKS))
    default = _default(argument.field_info.default)
    if argument.required:
        facts.append("required")
    elif default and not (is_switch and not entry.negative_names):
        facts.append(f"default: {default}".translate(_NO_BREAKS))
    facts += [f"environment variable: {name}" for name in argument.parameter.env_var or () if not is_short]
    return label, f"{description} [{'; '.join(facts)}]" if facts else description


def _entry(argument: "Argument") -> "HelpEntry":
    from cyclopts.argument import ArgumentCollection
    from cyclopts.help import create_parameter_help_panel

    return create_parameter_help_panel(_group(argument), ArgumentCollection([argument]), "plaintext").entries[0]


def _flag_label(entry: "HelpEntry") -> str:
    """Return the label of a flag, such as `--steps INT` or `--towers.[no-]packed-text`."""
    name = ", ".join(entry.positive_names)
    if entry.negative_names:
        head, _, last = name.rpartition(".")
        return f"{head}.[no-]{last}" if head else f"--[no-]{last.removeprefix('--')}"
    if entry.metavar == "BOOL|CHOICE":
        return f"{name} [{'|'.join(entry.choices or ())}]"
    metavar = _ONE_OR_MORE.sub(r"\1...", entry.metavar or "")
    return f"{name} {metavar}" if metavar else name


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return "" if value is None or value is inspect.Parameter.empty else str(value)


def _width(labels: Sequence[str], *, is_short: bool = False) -> int:
    """Return the width of the column of labels. Labels that exceed the maximum width are ignored."""
    max_width = _MAX_SHORT_LABEL_WIDTH if is_short else _MAX_LABEL_WIDTH
    return max((len(label) for label in labels if len(label) <= max_width), default=max_width)


def _table(rows: Sequence[tuple[str, str]], *, width: int) -> Iterator[str]:
    """Yield the lines of a two-column table. A label that is wider than its column gets a line of its own."""
    for label, description in rows:
        lines = textwrap.wrap(description, _WIDTH - width - 4, break_long_words=False, break_on_hyphens=False) or [""]
        lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
        yield f"  {label}" if len(label) > width else f"  {label:{width}}  {lines.pop(0)}".rstrip()
        yield from (" " * (width + 4) + line for line in lines)


Shell = Annotated[
    Literal["bash", "zsh", "fish"] | None, Parameter(help="Shell. Default: the shell that runs this command.")
]


def register_completion(app: "App") -> None:
    """Add `--install-completion` to a program."""

    def install_completion(*, shell: Shell = None) -> None:
        """Install shell completion for bash, zsh or fish.

        This command writes a file to the folder where the shell looks for completions. For bash and zsh, it also adds
        a line to ~/.bashrc or ~/.zshrc that loads the file. Run this command again after each update.
        """
        from cyclopts.completion.detect import ShellDetectionError

        try:
            path = app.install_completion(shell=shell)
        except ShellDetectionError as error:
            raise UserError(
                f"the shell is unknown: {error}", hint="specify the shell, as in --install-completion --shell bash"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot write {error.filename}: {error.strerror}", hint="check $HOME and its permissions"
            ) from error
        message = f"completion for {app.name[0]}: {path}"
        if path.suffix != ".fish":
            # The file for zsh has a name that begins with _. zsh reads it when ~/.zshrc calls compinit.
            is_zsh = path.name.startswith("_")
            message += f", loaded by a line in {'~/.zshrc, which must precede compinit' if is_zsh else '~/.bashrc'}"
        print(f"{message}; open a new shell to use it")

    app.command(install_completion, name="--install-completion")


def check_values(_app: Any, _names: tuple[str, ...], arguments: Iterable[Any]) -> None:
    """Reject values that cyclopts would silently change during conversion. cyclopts takes this function as `config`.

    Args:
        arguments: Argument collection of cyclopts, with the values from flags and settings files.

    Raises:
        UserError: An integer flag has a fractional value, which would be rounded; a flag for a local path has a URL,
            which `Path` would convert to a local folder such as `s3:`; or the name of a group has a value, which would
            be assigned to the first flag of the group.
    """
    for argument in arguments:
        values = [str(token.value) for token in argument.tokens]
        # An empty group in a settings file has an empty value.
        if argument.children and any(values):
            raise UserError(
                f"{argument.name} is {values[0]}, but it is a group of flags, which takes no value",
                hint=f"set one of its flags, such as {argument.children[0].name}",
                flags=(argument.name,),
            )
        # cyclopts itself rejects all other invalid integers.
        if argument.hint in (int, int | None) and (fractions := [value for value in values if "." in value]):
            raise UserError(
                f"{argument.name} is {fractions[0]}, which is not an integer",
                hint="use an integer, without a decimal point",
                flags=(argument.name,),
            )
        is_path = Path in (argument.hint, *get_args(argument.hint)) and argument.parameter.converter is None
        if is_path and (urls := [value for value in values if is_remote(value)]):
            raise UserError(
                f"{argument.name} is {urls[0]}, but it takes a local path",
                hint="use a local path, and copy the files from or to that URL",
                flags=(argument.name,),
            )
