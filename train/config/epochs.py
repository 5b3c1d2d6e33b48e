"""Numbers of steps that may be given in epochs: `500`, or `0.1ep` for a tenth of an epoch.

How many steps an epoch has is known once the samples are open (`clipmill.train.data.loader.TrainingSet`). Settings keep
what was given; the loop takes `in_steps` of them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted

_EPOCHS = re.compile(r"(\d+\.?\d*|\.\d+)ep")


def epochs_of(given: int | str) -> float | None:
    """The number of epochs in `0.1ep`, more than 0; None for anything else."""
    found = _EPOCHS.fullmatch(given) if isinstance(given, str) else None
    return float(found[1]) or None if found else None


def num_steps(given: int | str, *, epoch_steps: float | None = None, flag: str = "") -> int:
    """The number of steps that a setting gives, 1 or more if it is in epochs.

    Args:
        epoch_steps: steps in an epoch; None if unknown, as in a stream of tars.
        flag: of the setting.

    Raises:
        UserError: it is in epochs, and `epoch_steps` is None.
    """
    if isinstance(given, int):
        return given
    epochs = epochs_of(given)
    if epoch_steps is None or epochs is None:
        raise UserError(
            f"{flag} is {given}, and how long an epoch of these data is, is unknown",
            hint="give a number of steps",
            flags=(flag,),
        )
    return max(1, round(epochs * epoch_steps))


def in_steps(settings: Any, epoch_steps: float | None) -> Any:
    """Training settings whose numbers of steps are no longer in epochs; raises as `num_steps`."""
    changed: dict[str, dict[str, int]] = {"": {}, "evaluate": {}}
    for group, name, flag, given in _numbers(settings):
        changed[group][name] = num_steps(given, epoch_steps=epoch_steps, flag=flag)
    return replace(settings, **changed[""], evaluate=replace(settings.evaluate, **changed["evaluate"]))


def given_in_epochs(settings: Any, epoch_steps: float | None) -> list[str]:
    """What the log says of settings that are in epochs; raises as `num_steps`."""
    given = [(flag, value) for _, _, flag, value in _numbers(settings) if epochs_of(value)]
    steps = [num_steps(value, epoch_steps=epoch_steps, flag=flag) for flag, value in given]
    return [f"{flag} {value} = {counted(num, 'step')}" for (flag, value), num in zip(given, steps, strict=True)]


def _numbers(settings: Any) -> Iterator[tuple[str, str, str, int | str]]:
    """Group, field, flag and value of the settings that may be in epochs."""
    for group, name in (("", "warmup_steps"), ("", "checkpoint_every"), ("evaluate", "every")):
        of = getattr(settings, group) if group else settings
        yield group, name, of.flag(name), getattr(of, name)
