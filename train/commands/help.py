"""The help of the training commands: ranges of settings, and the presets of a task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clipmill.manifests import help_text as shared
from clipmill.manifests.settings import Range
from clipmill.train.config.files import presets_of
from clipmill.train.config.training import TrainingSettings

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection

_MOST_SHOWN = 100  # a longer range says what a number can hold rather than what one would choose


def help_text(app: "App", words: Sequence[str]) -> str:
    """The help of the command that the words of a command line name."""
    return shared.help_text(app, words, range_of=_range, tables_of=_presets)


def command_help(command: "App", name: str) -> shared.CommandHelp:
    """All flags of a command, for the documentation."""
    return shared.command_help(command, name, everything=True, range_of=_range, tables_of=_presets)


def _range(metadata: shared.Metadata) -> str:
    bounds = next((one for one in reversed(metadata) if isinstance(one, Range)), None)
    if bounds is None or min(bounds.most, bounds.below) > _MOST_SHOWN:
        return ""
    least, most = max(bounds.least, bounds.above), min(bounds.most, bounds.below)
    open_least, open_most = ">" * (bounds.above == least), "<" * (bounds.below == most)
    return f"{open_least}{least:g} to {open_most}{most:g}"


def _presets(arguments: "ArgumentCollection") -> shared.Tables:
    hints = (one.hint for one in arguments)
    kind = next((one for one in hints if isinstance(one, type) and issubclass(one, TrainingSettings)), None)
    return {} if kind is None else {"Presets (--preset)": list(presets_of(kind).items())}
