"""Building blocks of training settings: help groups, step counts in epochs, choices, and named parts.

`clipmill.manifests.settings` contains the annotations that `prep` and `train` share. An example of a setting:

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
from clipmill.manifests.help_text import FIRST_RUN as FIRST_RUN  # --help shows only these flags
from clipmill.manifests.plugins import Parts
from clipmill.manifests.settings import Checked, Range, annotations_of, errors_of

_EPOCHS = re.compile(r"(\d+\.?\d*|\.\d+)ep")


def help_group(title: str, position: int) -> Parameter:
    """Return a help group for flags. The help sorts groups by position. Positions 6 to 9 are for the task's groups."""
    return Parameter(group=Group(title, sort_key=position))


WHERE = help_group("Where", 1)
TRAINING = help_group("Training", 2)
CLIPS = help_group("Clips", 3)
MODEL = help_group("Model", 4)
TOWERS = help_group("Towers", 5)
TOWER_SIZES = help_group("Sizes of towers", 5)
TOWERS_BY_NAME = help_group("Towers from other libraries", 5)
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
    """Range of a number of steps that can also be given in epochs: `500`, or `0.1ep` for a tenth of an epoch.

    The number of steps per epoch is known only once the samples are open (`clipmill.train.data.loader.TrainingSet`).
    Settings store the value as specified; the training loop converts it with `convert_epochs`.
    """

    def holds(self, value: Any) -> bool:
        """Return True if `value` is a number of steps in the range, or a number of epochs."""
        return epochs_of(value) is not None if isinstance(value, str) else super().holds(value)

    def __str__(self) -> str:
        """Return the range as text: `1 or more, or a number of epochs such as 0.1ep`."""
        return f"{super().__str__()}, or a number of epochs such as 0.1ep"


def epochs_of(value: int | str) -> float | None:
    """Return the number of epochs in a value such as `0.1ep`; None if the value has another form or is 0."""
    match = _EPOCHS.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) or None if match else None


def num_steps(value: int | str, *, epoch_steps: float | None = None, flag: str = "") -> int:
    """Convert the value of a setting to a number of steps. A value in epochs corresponds to at least 1 step.

    Args:
        epoch_steps: Number of steps per epoch; None if it is unknown, as for a stream of tars.
        flag: Flag of the setting, for the error message.

    Raises:
        UserError: The value is in epochs, but `epoch_steps` is None.
    """
    if isinstance(value, int):
        return value
    epochs = epochs_of(value)
    if epoch_steps is None or epochs is None:
        raise UserError(
            f"{flag} is {value}, but the length of an epoch is unknown for these data",
            hint="use a number of steps",
            flags=(flag,),
        )
    return max(1, round(epochs * epoch_steps))


def convert_epochs(settings: Any, epoch_steps: float | None) -> Any:
    """Return the settings with every number of epochs converted to steps. Raise a UserError as `num_steps` does."""
    changes: dict[str, dict[str, int]] = {"": {}, "evaluate": {}}
    for group, name, flag, value in _step_fields(settings):
        changes[group][name] = num_steps(value, epoch_steps=epoch_steps, flag=flag)
    return replace(settings, **changes[""], evaluate=replace(settings.evaluate, **changes["evaluate"]))


def epoch_remarks(settings: Any, epoch_steps: float | None) -> list[str]:
    """Return a remark for the log about each setting in epochs. Raise a UserError as `num_steps` does."""
    values = [(flag, value) for _, _, flag, value in _step_fields(settings) if epochs_of(value)]
    steps = [num_steps(value, epoch_steps=epoch_steps, flag=flag) for flag, value in values]
    return [f"{flag} {value} = {count_noun(num, 'step')}" for (flag, value), num in zip(values, steps, strict=True)]


def _step_fields(settings: Any) -> Iterator[tuple[str, str, str, int | str]]:
    """Yield the group, field, flag and value of each setting that may be in epochs."""
    for group, name in (("", "warmup_steps"), ("", "checkpoint_every"), ("evaluate", "every")):
        owner = getattr(settings, group) if group else settings
        yield group, name, owner.flag(name), getattr(owner, name)


class Published(NamedTuple):
    """Published settings for a value of a choice, such as the hyperparameters of a loss.

    Attributes:
        source: Publication that reports the values.
        values: Values, nested as in a settings file.
    """

    source: str
    values: dict[str, Any]


class Choice(Checked):
    """Base class of settings in which one field, the choice, determines which of the other fields apply.

    Attributes:
        choice: Name of the field that holds the choice, such as the name of the optimizer.
        published: Published settings by preset and by the value of the choice.
    """

    choice: ClassVar[str]
    published: ClassVar[Mapping[str, Mapping[str, Published]]] = {}

    @classmethod
    def hyperparameters(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return the hyperparameters that each value of the choice uses, with their defaults.

        Fields that apply to every value are not listed.
        """
        return {}

    def unused_hyperparameters(self) -> Iterator[UserError]:
        """Yield an error for each hyperparameter that is set although the chosen value does not use it."""
        names_by_choice, chosen_value = self.hyperparameters(), getattr(self, self.choice)
        for name in dict.fromkeys(name for names in names_by_choice.values() for name in names):
            value = getattr(self, name)
            if name not in names_by_choice[chosen_value] and value not in (None, False):
                users = ", ".join(sorted(choice for choice, names in names_by_choice.items() if name in names))
                yield UserError(
                    f"{self.flag(name)} is {value}, but {chosen_value} does not use it",
                    hint=f"omit {self.flag(name)}, or use {self.flag(self.choice)} with one of: {users}",
                    flags=(self.flag(name),),
                )


class NamedPart(NamedTuple):
    """Reference from settings to a part, such as a loss: the flag, the registered parts of this kind, and the name."""

    flag: str
    parts: Parts[Any]
    name: str


def named_parts(settings: Checked) -> Iterator[NamedPart]:
    """Yield the references to parts in the settings and their groups, from the fields that a class lists in `parts`.

    Names of parts are not checked when settings are constructed, so that the settings of a run can be read, and its
    model can be used, even if a package that the run used is missing.
    """
    parts_by_field: Mapping[str, Parts[Any]] = getattr(type(settings), "parts", {})
    for field in annotations_of(type(settings)):
        value = getattr(settings, field.name)
        if isinstance(value, Checked):
            yield from named_parts(value)
        elif field.name in parts_by_field and value is not None:
            yield NamedPart(settings.flag(field.name), parts_by_field[field.name], value)


def unknown_parts(settings: Checked) -> Iterator[UserError]:
    """Yield an error for each part in the settings that does not exist or cannot be used."""
    for flag, parts, name in named_parts(settings):
        if name not in parts:
            yield parts.unknown_name_error(name, flag=flag)
        else:
            yield from errors_of(parts.__getitem__, name)
