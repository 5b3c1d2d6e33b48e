"""Declare and check the settings of a command: frozen dataclasses with annotations that declare the valid values.

    batch: Annotated[int, Range(1, 10**6)] = 64
    \"\"\"Batch size over all processes.\"\"\"
    stride: Annotated[int, Range(1, 10**6), GoesWith("sampling", ("stride",))] = 4

A settings class is derived from `Checked`. Its method `rules` yields the mistakes that involve several fields. A field
may contain another settings class, a group. Constructing invalid settings raises a UserError with all mistakes. The
command-line parser constructs a group before the settings that contain it. Therefore, the parser defers the checks, and
runs them once for the complete tree.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, get_type_hints

from clipmill.manifests.errors import UserError, UserErrors

_checks_are_deferred: ContextVar[bool] = ContextVar("checks_are_deferred", default=False)


@dataclass(frozen=True)
class Range:
    """Annotation with the allowed range of a number, or of each number in a tuple. None is always allowed.

    Attributes:
        least, most: Inclusive bounds.
        above, below: Exclusive bounds.
        hint: Hint for a value outside the range. By default, the hint states the range.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    hint: str = ""

    def holds(self, value: Any) -> bool:
        """Return True if `value` is in the range. NaN and infinity are never in the range."""
        if value is None or isinstance(value, tuple):
            return all(map(self.holds, value or ()))
        return bool(self.least <= value <= self.most and self.above < value < self.below)

    def mistakes(self, flag: str, value: Any) -> Iterator[UserError]:
        """Yield an error if the value of `flag` is not in the range."""
        if not self.holds(value):
            yield UserError(
                f"{flag} is {value}, which is out of range", hint=self.hint or f"{flag} must be {self}", flags=(flag,)
            )

    def __str__(self) -> str:
        """Format the range for a message, as in `from 1 to 1,024`."""
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {_format_number(self.least)} to {_format_number(self.most)}"
        bounds = {
            "{} or more": self.least,
            "more than {}": self.above,
            "at most {}": self.most,
            "less than {}": self.below,
        }
        conditions = [form.format(_format_number(bound)) for form, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(conditions) or "a finite number"


FRACTION = Range(least=0, below=1)
PROBABILITY = Range(0, 1)


@dataclass(frozen=True)
class GoesWith:
    """Annotation of a setting that takes effect only for certain values of another setting in the same group.

    Attributes:
        name: Field of the other setting.
        values: Values of the other setting for which the annotated setting has an effect. If empty, any true value
            counts.
        use: Text for the hint in place of these values.
    """

    name: str
    values: tuple[object, ...] = ()
    use: str = ""

    def holds(self, value: object) -> bool:
        """Return True if the annotated setting has an effect when `value` is the value of the other setting."""
        return value in self.values if self.values else bool(value)


class Needs(GoesWith):
    """Annotation of a setting that must keep its default unless another setting of the group has certain values."""


class Checked:
    """Base class of settings: frozen dataclasses that are checked on construction. All flags begin with `prefix`."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not _checks_are_deferred.get():
            raise_mistakes(mistakes(self))

    def rules(self) -> Iterator[UserError]:
        """Yield the mistakes that involve several fields. The value of each field is already in its range."""
        return iter(())

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield errors for typed flags that have no effect, except for flags that are annotated with `GoesWith`."""
        return iter(())

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the flag of a field."""
        return "--" + f"{cls.prefix}.{name}".lstrip(".").replace("_", "-")


class Annotations(NamedTuple):
    """Name, default and annotations of a field. If annotations of one kind are nested, the outermost one applies."""

    name: str
    default: Any
    range: Range | None
    goes_with: GoesWith | None
    needs: Needs | None


_annotations: dict[type, tuple[Annotations, ...]] = {}  # cache by settings class, because resolving type hints is slow


def annotations_of(kind: type) -> tuple[Annotations, ...]:
    """Return the annotations of all fields of a settings class, in the order of the fields."""
    if kind in _annotations:
        return _annotations[kind]
    hints, annotations = get_type_hints(kind, include_extras=True), []
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        annotation_of_kind: dict[str, Any] = {}
        for annotation in getattr(hints[field.name], "__metadata__", ()):
            is_range, is_need = isinstance(annotation, Range), isinstance(annotation, Needs)
            if isinstance(annotation, Range | GoesWith):
                annotation_of_kind["range" if is_range else "needs" if is_need else "goes_with"] = annotation
        annotations.append(
            Annotations(
                field.name,
                default,
                annotation_of_kind.get("range"),
                annotation_of_kind.get("goes_with"),
                annotation_of_kind.get("needs"),
            )
        )
    return _annotations.setdefault(kind, tuple(annotations))


def mistakes(settings: Checked) -> list[UserError]:
    """Return all mistakes in the settings and in their groups."""
    return _examine(settings)[0]


def _examine(settings: Checked) -> tuple[list[UserError], Any]:
    """Return the mistakes in settings, and valid settings for `rules`, in which defaults replace invalid values."""
    errors: list[UserError] = []
    replacements: dict[str, object] = {}
    for field in annotations_of(type(settings)):
        value, flag = getattr(settings, field.name), settings.flag(field.name)
        if isinstance(value, Checked):
            group_errors, group = _examine(value)
            errors += group_errors
            replacements |= {field.name: group} if group_errors else {}
        elif field.range is not None and not field.range.holds(value):
            errors += field.range.mistakes(flag, value)
            replacements[field.name] = field.default
        elif field.needs is not None and value != field.default:
            other_value = getattr(settings, field.needs.name)
            if not field.needs.holds(other_value):
                other = settings.flag(field.needs.name)
                use = field.needs.use or " or ".join(map(str, field.needs.values))
                errors.append(
                    UserError(
                        f"{flag} {value} has no effect with {other} {other_value}",
                        hint=f"use {other} {use}, or omit {flag}",
                        flags=(flag, other),
                    )
                )
    if replacements:
        with deferred_checks():
            settings = replace(settings, **replacements)  # type: ignore[type-var]
    wrong_flags = {flag for error in errors for flag in error.flags}
    return errors + [error for error in settings.rules() if wrong_flags.isdisjoint(error.flags)], settings


def flags_without_effect(settings: Checked, typed: Mapping[str, str]) -> Iterator[UserError]:
    """Yield an error for each flag on the command line that has no effect together with the other settings.

    Settings from a preset or run are not checked, because flags may override other settings that they depend on. A flag
    with its default value is also accepted.

    Args:
        typed: Flags on the command line, with their values as text.
    """
    for field in annotations_of(type(settings)):
        value, flag, goes_with = getattr(settings, field.name), settings.flag(field.name), field.goes_with
        if isinstance(value, Checked):
            yield from flags_without_effect(value, typed)
        if goes_with is None or flag not in typed or value == field.default:
            continue
        other, other_value = settings.flag(goes_with.name), getattr(settings, goes_with.name)
        if not goes_with.holds(other_value):
            use = goes_with.use or " or ".join(map(str, goes_with.values))
            state = "not set" if other_value is None else other_value
            yield no_effect_error(flag, typed, f"{other} is {state}", use=f"{other} {use}".strip())
    yield from settings.check_effects(typed)


def no_effect_error(flag: str, typed: Mapping[str, str], reason: str, *, use: str) -> UserError:
    """Return the error for a flag on the command line that has no effect."""
    return UserError(
        f"{flag} is {typed[flag]}, which has no effect: {reason}", hint=f"omit it, or use {use}", flags=(flag,)
    )


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Context manager in which settings are constructed without checks. The caller must check them later."""
    token = _checks_are_deferred.set(True)
    try:
        yield
    finally:
        _checks_are_deferred.reset(token)


def errors_of(check: Callable[..., object], *arguments: Any, **keywords: Any) -> Iterator[UserError]:
    """Call `check`, and yield each mistake if it raises a UserError. Used in `Checked.rules`."""
    try:
        check(*arguments, **keywords)
    except UserError as error:
        yield from error.errors


def raise_mistakes(errors: Iterable[UserError]) -> None:
    """Raise the first mistake about each flag, all in one error. Do nothing if there are no mistakes."""
    error_of_flag: dict[str, UserError] = {}
    for error in errors:
        error_of_flag.setdefault(next(iter(error.flags), str(error)), error)
    if error_of_flag:
        raise UserErrors(error_of_flag.values()) if len(error_of_flag) > 1 else next(iter(error_of_flag.values()))


def _format_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
