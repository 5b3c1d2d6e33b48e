"""What a field of the settings says of itself beside its type and its meaning, and the one pass that checks them all.

    batch: Annotated[int, TRAINING, FIRST_RUN, Range(1, 10**6)] = 64
    \"\"\"Batch size: samples per step, over all processes.\"\"\"
    stride: Annotated[int, CLIPS, Range(1, 10**6), GoesWith("sampling", ("stride",))] = 4

A class of settings is a frozen dataclass with `Checked` as its base. Rules about several fields are in its generator
`rules`. Constructing invalid settings raises a UserError with all mistakes. The command line builds groups before the
settings that contain them, so it defers the checks and makes them once for the whole tree.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from manifests.errors import UserError, UserErrors

FLAG = re.compile(r"--[a-z][a-z0-9.-]*[a-z0-9]")
_checks_are_deferred: ContextVar[bool] = ContextVar("checks_are_deferred", default=False)


class FirstRun:
    """Marks a flag that a first run needs: `--help` shows those, `--help-all` every one."""


FIRST_RUN = FirstRun()


def help_group(title: str, position: int) -> Parameter:
    """A group of flags in the help; those with a lower position come first."""
    return Parameter(group=Group(title, sort_key=position))


WHERE = help_group("Where", 1)
TRAINING = help_group("Training", 2)
CLIPS = help_group("Clips", 3)
MODEL = help_group("Model", 4)
TOWERS = help_group("Towers", 5)
EVALUATION = help_group("Evaluation", 10)
CAPTIONS = help_group("Captions", 11)
OPTIMIZER = help_group("Optimizer", 12)
AUGMENTATION = help_group("Augmentation", 13)
CHECKPOINTS = help_group("Checkpoints", 14)
PARALLEL = help_group("Parallelism", 15)
TRACKING = help_group("Tracking", 16)
MACHINE = help_group("Machine", 17)
HIDDEN = Parameter(show=False)
SEVERAL = Parameter(negative_iterable=(), consume_multiple=True)  # values of one flag, one after another


@dataclass(frozen=True)
class Range:
    """The values that a number may have, or each number of a tuple; None is always one of them.

    Attributes:
        least, most: bounds that belong to the range.
        above, below: bounds that do not.
        hint: what to do about another value, where the bounds alone do not say it.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    hint: str = ""

    def holds(self, value: object) -> bool:
        """Whether `value` is in the range."""
        if isinstance(value, tuple):
            return all(map(self.holds, value))
        return value is None or (
            isinstance(value, int | float) and self.least <= value <= self.most and self.above < value < self.below
        )

    @property
    def least_of_all(self) -> float:
        """The lower bound, whether it belongs to the range or not."""
        return max(self.least, self.above)

    @property
    def most_of_all(self) -> float:
        """The upper bound, whether it belongs to the range or not."""
        return min(self.most, self.below)

    def __str__(self) -> str:
        """The range in words: `from 1 to 1,024`."""
        words = []
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {_number(self.least)} to {_number(self.most)}"
        if math.isfinite(self.least):
            words.append(f"{_number(self.least)} or more")
        if math.isfinite(self.above):
            words.append(f"more than {_number(self.above)}")
        if math.isfinite(self.most):
            words.append(f"at most {_number(self.most)}")
        if math.isfinite(self.below):
            words.append(f"less than {_number(self.below)}")
        return " and ".join(words) or "a finite number"


SHARE = Range(least=0, below=1)
PROBABILITY = Range(0, 1)


@dataclass(frozen=True)
class GoesWith:
    """The setting of the same group without which this one has no effect.

    Attributes:
        name: of its field.
        values: with which this one has an effect; any but 0 where there are none.
        use: what the hint offers in place of these values.
    """

    name: str
    values: tuple[object, ...] = ()
    use: str = ""

    def holds(self, value: object) -> bool:
        """Whether a setting that goes with `value` has an effect."""
        return value in self.values if self.values else bool(value)


class CheckedField(NamedTuple):
    """One field: what its annotation says."""

    default: Any
    range: Range | None
    goes_with: GoesWith | None


class Checked:
    """Base of frozen dataclasses of settings: `prefix` of its flags, checks of its fields, rules about several."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not _checks_are_deferred.get():
            refuse(mistakes(self))

    def rules(self) -> Iterator[UserError]:
        """Yields the mistakes that are about several fields. Each field by itself is in its range."""
        return iter(())

    def without_effect(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yields the flags that were typed and have no effect, beside those that `GoesWith` finds.

        Args:
            typed: flags of the command line with their values.
        """
        return iter(())

    @classmethod
    def flag(cls, name: str) -> str:
        """The flag of a field."""
        return "--" + f"{cls.prefix}.{name}".lstrip(".").replace("_", "-")


@cache
def checked_fields(kind: type[Any]) -> dict[str, CheckedField]:
    """The fields of a class of settings by name."""
    annotations = get_type_hints(kind, include_extras=True)
    found = {}
    for field in fields(kind):
        said = get_args(annotations[field.name])[1:] if get_origin(annotations[field.name]) is Annotated else ()
        found[field.name] = CheckedField(
            default=_default(field),
            # Of an annotation within an annotation, the outer one comes last.
            range=next((one for one in reversed(said) if isinstance(one, Range)), None),
            goes_with=next((one for one in reversed(said) if isinstance(one, GoesWith)), None),
        )
    return found


def _fields_of(settings: Checked) -> dict[str, CheckedField]:
    return checked_fields(type(settings))  # type: ignore[arg-type] # mypy looks for the hash of the instance


def mistakes(settings: Checked) -> list[UserError]:
    """Every mistake in the settings and their groups."""
    return _examined(settings)[0]


def _examined(settings: Checked) -> tuple[list[UserError], Any]:
    """The mistakes, and the settings with defaults in place of values out of range, which rules need not expect."""
    found: list[UserError] = []
    sound: dict[str, object] = {}
    for name, field in _fields_of(settings).items():
        value = getattr(settings, name)
        if isinstance(value, Checked):
            inner, sound_value = _examined(value)
            found += inner
            if sound_value is not value:
                sound[name] = sound_value
        elif field.range is not None and not field.range.holds(value):
            hint = field.range.hint or f"it must be {field.range}"
            found.append(UserError(f"{settings.flag(name)} is {value}", hint=hint))
            sound[name] = field.default
    with deferred_checks():
        checked = replace(settings, **sound) if sound else settings  # type: ignore[type-var]
    named = {flag for one in found for flag in FLAG.findall(str(one))}
    found += [one for one in checked.rules() if named.isdisjoint(FLAG.findall(str(one)))]
    return found, checked


def flags_without_effect(settings: Checked, typed: Mapping[str, str]) -> Iterator[UserError]:
    """Yields the flags that were typed and have no effect beside the other settings.

    Those of files are let pass: a preset or the settings of a run may well say more than what the flags beside them
    leave in effect. So are flags that say the default.
    """
    for name, field in _fields_of(settings).items():
        value, goes_with = getattr(settings, name), field.goes_with
        if isinstance(value, Checked):
            yield from flags_without_effect(value, typed)
        if goes_with is None or settings.flag(name) not in typed or value == field.default:
            continue
        other, beside = settings.flag(goes_with.name), getattr(settings, goes_with.name)
        if not goes_with.holds(beside):
            use = goes_with.use or " or ".join(map(str, goes_with.values))
            yield UserError(
                f"{settings.flag(name)} is {typed[settings.flag(name)]}, which has no effect: {other} is {beside}",
                hint=f"leave it out, or use {other} {use}",
            )
    yield from settings.without_effect(typed)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Settings that are constructed meanwhile are not checked; whoever defers checks makes them."""
    token = _checks_are_deferred.set(True)
    try:
        yield
    finally:
        _checks_are_deferred.reset(token)


def caught(check: Callable[..., object], *arguments: Any, **more: Any) -> Iterator[UserError]:
    """Yields the mistake that a check raises, for rules of settings."""
    try:
        check(*arguments, **more)
    except UserError as error:
        yield error


def refuse(found: Iterable[UserError]) -> None:
    """Raises all mistakes at once, if there are any; the first one about each flag, where several begin with it."""
    by_flag: dict[str, UserError] = {}
    for one in found:
        by_flag.setdefault(next(iter(FLAG.findall(str(one))), str(one)), one)
    if by_flag:
        raise UserErrors(by_flag.values()) if len(by_flag) > 1 else next(iter(by_flag.values()))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
