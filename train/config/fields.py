"""Annotations of a field of the settings beside its type and its text, and the one pass that checks all fields.

    batch: Annotated[int, groups.TRAINING, FIRST_RUN, Range(1, 10**6)] = 64
    \"\"\"Batch size, over all processes.\"\"\"
    stride: Annotated[int, groups.CLIPS, Range(1, 10**6), GoesWith("sampling", ("stride",))] = 4

A class of settings is a frozen dataclass with `Checked` as its base. Rules about several fields are in its generator
`rules`. Constructing invalid settings raises a UserError with all mistakes. The command line builds groups before the
settings that contain them, so it defers the checks and makes them once for the whole tree.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple, get_type_hints

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError, UserErrors
from clipmill.manifests.help_text import FIRST_RUN as FIRST_RUN  # --help shows these flags, --help-all shows all
from clipmill.manifests.plugins import Parts
from clipmill.train.config.epochs import epochs_of

# Groups of flags in the help, and what else a flag says to the command line. Lower positions come first.


def help_group(title: str, position: int) -> Parameter:
    """A group of flags; those of a task alone take positions from 6 to 9."""
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
SEVERAL = Parameter(negative_iterable=(), consume_multiple=True)  # --flag A B, besides --flag A --flag B


_checks_are_deferred: ContextVar[bool] = ContextVar("checks_are_deferred", default=False)


@dataclass(frozen=True)
class Range:
    """The values that a number may have, or each number of a tuple; None is always one of them.

    Attributes:
        least, most: bounds that belong to the range.
        above, below: bounds that do not.
        epochs: whether a number of epochs is one too, such as 0.1ep (clipmill.train.config.epochs).
        hint: what to do about another value, where the bounds alone do not say it.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    epochs: bool = False
    hint: str = ""

    def holds(self, value: Any) -> bool:
        """Whether `value` is in the range; NaN and infinity never are."""
        if value is None or isinstance(value, tuple):
            return all(map(self.holds, value or ()))
        if isinstance(value, str):
            return self.epochs and epochs_of(value) is not None
        return bool(self.least <= value <= self.most and self.above < value < self.below)

    def __str__(self) -> str:
        """The range in words: `from 1 to 1,024`."""
        return self._bounds() + (", or a number of epochs such as 0.1ep" if self.epochs else "")

    def _bounds(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {_number(self.least)} to {_number(self.most)}"
        bounds = {
            "{} or more": self.least,
            "more than {}": self.above,
            "at most {}": self.most,
            "less than {}": self.below,
        }
        words = [text.format(_number(bound)) for text, bound in bounds.items() if math.isfinite(bound)]
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


class Needs(GoesWith):
    """The setting of the same group without which this one is a mistake, wherever it was given."""


class Checked:
    """Base of frozen dataclasses of settings: `prefix` of its flags, checks of its fields, rules about several.

    `parts` are the fields that name a part, which another package may have. Their names are not checked when settings
    are constructed: what a run was trained with is read, and its model used, without all of its packages.
    """

    prefix: ClassVar[str] = ""
    parts: ClassVar[Mapping[str, Parts[Any]]] = {}
    choice: ClassVar[str] = ""
    """Field that decides which of the others apply, such as the name of an optimizer. None: all apply."""

    def __post_init__(self) -> None:
        if not _checks_are_deferred.get():
            refuse(mistakes(self))

    def rules(self) -> Iterator[UserError]:
        """Yields the mistakes that are about several fields. Each field by itself is in its range."""
        return iter(())

    def without_effect(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yields the flags that were typed and have no effect, besides those that `GoesWith` finds."""
        return iter(())

    @classmethod
    def hyperparameters(cls) -> Mapping[str, Mapping[str, Any]]:
        """By the value of `choice`: the fields that not every value takes, and their defaults."""
        return {}

    def not_taken(self) -> Iterator[UserError]:
        """Yields the hyperparameters that were given and that the choice does not take."""
        taken, chosen = self.hyperparameters(), getattr(self, self.choice)
        for name in dict.fromkeys(one for own in taken.values() for one in own):
            value = getattr(self, name)
            if name not in taken[chosen] and value not in (None, False):
                users = ", ".join(sorted(other for other, own in taken.items() if name in own))
                yield UserError(
                    f"{self.flag(name)} is {value}, and {chosen} does not use it",
                    hint=f"leave out {self.flag(name)}, or use {self.flag(self.choice)} with one of: {users}",
                    flags=(self.flag(name),),
                )

    @classmethod
    def flag(cls, name: str) -> str:
        """The flag of a field."""
        return "--" + f"{cls.prefix}.{name}".lstrip(".").replace("_", "-")


class _Said(NamedTuple):
    name: str
    default: Any
    range: Range | None
    goes_with: GoesWith | None
    needs: Needs | None


def _said_by(settings: Checked) -> tuple[_Said, ...]:
    kind: Any = type(settings)
    return _said_of(kind)


@cache
def _said_of(kind: Any) -> tuple[_Said, ...]:
    """The annotations of the fields of a class of settings; of nested annotations, the outer one counts."""
    hints, found = get_type_hints(kind, include_extras=True), []
    for field in fields(kind):
        said = {type(one): one for one in getattr(hints[field.name], "__metadata__", ())}
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found.append(_Said(field.name, default, said.get(Range), said.get(GoesWith), said.get(Needs)))
    return tuple(found)


def mistakes(settings: Checked) -> list[UserError]:
    """Every mistake in the settings and their groups."""
    return _examined(settings)[0]


def _examined(settings: Checked) -> tuple[list[UserError], Any]:
    """The mistakes, and the settings with defaults in place of values out of range, so that rules get valid values."""
    found: list[UserError] = []
    sound: dict[str, object] = {}
    for said in _said_by(settings):
        name, value = said.name, getattr(settings, said.name)
        if isinstance(value, Checked):
            inner, sound[name] = _examined(value)
            found += inner
        elif said.range is not None and not said.range.holds(value):
            hint = said.range.hint or f"{settings.flag(name)} must be {said.range}"
            found.append(UserError(f"{settings.flag(name)} is {value}", hint=hint, flags=(settings.flag(name),)))
            sound[name] = said.default
        elif said.needs is not None and value != said.default:
            found += _unmet(settings, name, said.needs)
    if found:
        with deferred_checks():
            settings = replace(settings, **sound)  # type: ignore[type-var]
    wrong = {flag for mistake in found for flag in mistake.flags}
    return found + [mistake for mistake in settings.rules() if wrong.isdisjoint(mistake.flags)], settings


def without_idle(
    values: Mapping[str, Any], defaults: Checked, given: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a file without those that do nothing beside flags or stronger files, and why these do nothing.

    Args:
        values: Values of the file, nested as the settings.
        given: Values of flags and stronger files, by flag.

    Returns:
        The values that are left; and for the flag of each other one, the flag and value beside which it does nothing.
    """
    kept, idle = dict(values), dict[str, str]()
    fields_said = {said.name: said for said in _said_by(defaults)}
    for key, value in values.items():
        said = fields_said.get(str(key).replace("-", "_"))
        group = getattr(defaults, said.name) if said else None  # the parser reports unknown keys
        if isinstance(group, Checked) and isinstance(value, Mapping):
            kept[key], inner = without_idle(value, group, given)
            idle |= inner
        elif said and said.needs is not None and value != said.default:
            other = defaults.flag(said.needs.name)
            if other in given and given[other] not in map(str, said.needs.values):
                del kept[key]
                idle[defaults.flag(said.name)] = f"{other} {given[other]}"
    return kept, idle


def _unmet(settings: Checked, name: str, needs: Needs) -> Iterator[UserError]:
    other, beside = settings.flag(needs.name), getattr(settings, needs.name)
    if not needs.holds(beside):
        use = " or ".join(map(str, needs.values))
        yield UserError(
            f"{settings.flag(name)} {getattr(settings, name)} does nothing with {other} {beside}",
            hint=f"use {other} {use}, or leave it out",
            flags=(settings.flag(name), other),
        )


class NamedPart(NamedTuple):
    """A part that settings name: by which flag, of which kind, and its name."""

    flag: str
    parts: Parts[Any]
    name: str


def named_parts(settings: Checked) -> Iterator[NamedPart]:
    """Yields the parts that settings and their groups name."""
    for said in _said_by(settings):
        value = getattr(settings, said.name)
        if isinstance(value, Checked):
            yield from named_parts(value)
        elif said.name in settings.parts and value is not None:
            yield NamedPart(settings.flag(said.name), settings.parts[said.name], value)


def unknown_parts(settings: Checked) -> Iterator[UserError]:
    """Yields the mistakes of naming parts that there are not, or that cannot be used."""
    for flag, parts, name in named_parts(settings):
        if name not in parts:
            yield parts.unknown(name, where=flag)
        else:
            yield from caught(parts.__getitem__, name)


def flags_without_effect(settings: Checked, typed: Mapping[str, str]) -> Iterator[UserError]:
    """Yields the flags that were typed and have no effect beside the other settings.

    Settings from files are accepted: flags may leave some values of a preset or of a run without effect. Flags that
    give the default are accepted too.

    Args:
        typed: flags of the command line with their values.
    """
    for said in _said_by(settings):
        value, flag, goes_with = getattr(settings, said.name), settings.flag(said.name), said.goes_with
        if isinstance(value, Checked):
            yield from flags_without_effect(value, typed)
        if goes_with is None or flag not in typed or value == said.default:
            continue
        other, beside = settings.flag(goes_with.name), getattr(settings, goes_with.name)
        if not goes_with.holds(beside):
            use = goes_with.use or " or ".join(map(str, goes_with.values))
            state = "not given" if beside is None else beside
            yield without_effect(flag, typed, f"{other} is {state}", use=f"{other} {use}".strip())
    yield from settings.without_effect(typed)


def without_effect(flag: str, typed: Mapping[str, str], why: str, *, use: str) -> UserError:
    """The error for a flag that was typed and has no effect."""
    return UserError(
        f"{flag} is {typed[flag]}, which has no effect: {why}", hint=f"leave it out, or use {use}", flags=(flag,)
    )


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Settings that are constructed meanwhile are not checked; the caller checks them later."""
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
    """Raise all mistakes at once, if there are any: the first one of each flag."""
    by_flag: dict[str, UserError] = {}
    for mistake in found:
        by_flag.setdefault(next(iter(mistake.flags), str(mistake)), mistake)
    if by_flag:
        raise UserErrors(by_flag.values()) if len(by_flag) > 1 else next(iter(by_flag.values()))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
