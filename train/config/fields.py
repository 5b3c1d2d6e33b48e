"""Building blocks of training settings: groups of the help, steps in epochs, named parts, and choices.

`clipmill.manifests.settings` has the annotations that both programs share.

    batch: Annotated[int, groups.TRAINING, FIRST_RUN, Range(1, 10**6)] = 64
    \"\"\"Batch size, over all processes.\"\"\"
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.help_text import FIRST_RUN as FIRST_RUN  # --help shows these flags, --help-all shows all flags
from clipmill.manifests.plugins import Parts
from clipmill.manifests.settings import Checked, Range, annotations_of, errors_of

_EPOCHS = re.compile(r"(\d+\.?\d*|\.\d+)ep")
# Groups of flags in the help, and options of flags for the command line. Groups with lower positions come first.


def help_group(title: str, position: int) -> Parameter:
    """Return a group of flags for the help. Groups of a single task have positions from 6 to 9."""
    return Parameter(group=Group(title, sort_key=position))


WHERE = help_group("Where", 1)
TRAINING = help_group("Training", 2)
CLIPS = help_group("Clips", 3)
MODEL = help_group("Model", 4)
TOWERS = help_group("Towers", 5)
TOWER_SIZES = help_group("Sizes of towers", 5)
TOWERS_BY_NAME = help_group("Towers of other libraries", 5)
ADAPTERS = help_group("Adapters (LoRA)", 13)
EVALUATION = help_group("Evaluation", 10)
CAPTIONS = help_group("Captions", 11)
OPTIMIZER = help_group("Optimizer", 12)
AUGMENTATION = help_group("Augmentation", 14)
CHECKPOINTS = help_group("Checkpoints", 15)
PARALLEL = help_group("Parallelism", 16)
TRACKING = help_group("Tracking", 17)
MACHINE = help_group("Machine", 18)
HIDDEN = Parameter(show=False)
SEVERAL = Parameter(negative_iterable=(), consume_multiple=True)  # allows --flag A B in addition to --flag A --flag B


@dataclass(frozen=True)
class Steps(Range):
    """Range of a number of steps, which may be given in epochs: `500`, or `0.1ep` for a tenth of an epoch.

    The number of steps per epoch is known only once the samples are open (`clipmill.train.data.loader.TrainingSet`).
    Settings keep the given value; the loop uses their `in_steps`.
    """

    def holds(self, value: Any) -> bool:
        """Return True if `value` is in the range, or a number of epochs."""
        return epochs_of(value) is not None if isinstance(value, str) else super().holds(value)

    def __str__(self) -> str:
        """Return the range in words: `1 or more, or a number of epochs such as 0.1ep`."""
        return f"{super().__str__()}, or a number of epochs such as 0.1ep"


def epochs_of(given: int | str) -> float | None:
    """Return the number of epochs in a value such as `0.1ep`, if it is above 0; None for any other value."""
    match = _EPOCHS.fullmatch(given) if isinstance(given, str) else None
    return float(match[1]) or None if match else None


def num_steps(given: int | str, *, epoch_steps: float | None = None, flag: str = "") -> int:
    """Return the number of steps for a setting, at least 1 if it is given in epochs.

    Args:
        epoch_steps: Steps per epoch; None if unknown, as in a stream of tars.
        flag: Flag of the setting, for the error.

    Raises:
        UserError: The number is in epochs, and `epoch_steps` is None.
    """
    if isinstance(given, int):
        return given
    epochs = epochs_of(given)
    if epoch_steps is None or epochs is None:
        raise UserError(
            f"{flag} is {given}, and the length of an epoch of these data is unknown",
            hint="give a number of steps",
            flags=(flag,),
        )
    return max(1, round(epochs * epoch_steps))


def in_steps(settings: Any, epoch_steps: float | None) -> Any:
    """Convert all numbers in epochs to steps; raises the errors of `num_steps`."""
    changed: dict[str, dict[str, int]] = {"": {}, "evaluate": {}}
    for group, name, flag, given in _numbers(settings):
        changed[group][name] = num_steps(given, epoch_steps=epoch_steps, flag=flag)
    return replace(settings, **changed[""], evaluate=replace(settings.evaluate, **changed["evaluate"]))


def given_in_epochs(settings: Any, epoch_steps: float | None) -> list[str]:
    """Return log lines about settings that are given in epochs; raises the errors of `num_steps`."""
    given = [(flag, value) for _, _, flag, value in _numbers(settings) if epochs_of(value)]
    steps = [num_steps(value, epoch_steps=epoch_steps, flag=flag) for flag, value in given]
    return [f"{flag} {value} = {count_noun(num, 'step')}" for (flag, value), num in zip(given, steps, strict=True)]


def _numbers(settings: Any) -> Iterator[tuple[str, str, str, int | str]]:
    """Yield group, field, flag and value of each setting that may be in epochs."""
    for group, name in (("", "warmup_steps"), ("", "checkpoint_every"), ("evaluate", "every")):
        of = getattr(settings, group) if group else settings
        yield group, name, of.flag(name), getattr(of, name)


class Published(NamedTuple):
    """Published settings of a choice, such as the hyperparameters of a loss.

    Attributes:
        source: Publication that has the values.
        values: Values, nested as in a settings file.
    """

    source: str
    values: dict[str, Any]


class Choice(Checked):
    """Base of settings in which the value of one field determines which other fields apply.

    Attributes:
        choice: Name of that field, such as the name of an optimizer.
        published: Published settings by preset and by the value of `choice`.
    """

    choice: ClassVar[str]
    published: ClassVar[Mapping[str, Mapping[str, Published]]] = {}

    @classmethod
    def hyperparameters(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return, for each value of `choice`, the fields that only some values take, with their defaults."""
        return {}

    def not_taken(self) -> Iterator[UserError]:
        """Yield the hyperparameters that were given but that the chosen value does not take."""
        of_choices, chosen = self.hyperparameters(), getattr(self, self.choice)
        for name in dict.fromkeys(name for names in of_choices.values() for name in names):
            value = getattr(self, name)
            if name not in of_choices[chosen] and value not in (None, False):
                users = ", ".join(sorted(other for other, names in of_choices.items() if name in names))
                yield UserError(
                    f"{self.flag(name)} is {value}, and {chosen} does not use it",
                    hint=f"omit {self.flag(name)}, or use {self.flag(self.choice)} with one of: {users}",
                    flags=(self.flag(name),),
                )


class NamedPart(NamedTuple):
    """A part that settings name: the flag, the known parts of this kind, and the name."""

    flag: str
    parts: Parts[Any]
    name: str


def named_parts(settings: Checked) -> Iterator[NamedPart]:
    """Yield the parts that settings and their groups name: the fields in the `parts` of their classes.

    The construction of settings does not check names of parts. Therefore a run's settings can be read, and its model
    used, even if some of its packages are missing.
    """
    of_class: Mapping[str, Parts[Any]] = getattr(type(settings), "parts", {})
    for field in annotations_of(type(settings)):
        value = getattr(settings, field.name)
        if isinstance(value, Checked):
            yield from named_parts(value)
        elif field.name in of_class and value is not None:
            yield NamedPart(settings.flag(field.name), of_class[field.name], value)


def unknown_parts(settings: Checked) -> Iterator[UserError]:
    """Yield errors for parts that do not exist or cannot be used."""
    for flag, parts, name in named_parts(settings):
        if name not in parts:
            yield parts.unknown_name_error(name, where=flag)
        else:
            yield from errors_of(parts.__getitem__, name)
