"""Tests that settings report all of their errors at once, by the flags that the errors carry."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import Checked, Needs, Range, deferred_checks


@dataclass(frozen=True, kw_only=True)
class Cropping(Checked):
    prefix = "crop"

    side: Annotated[int, Range(2, 4096)] = 224
    share: Annotated[float | None, Range(above=0, most=1), Needs("rule", ("random",))] = None
    rule: Literal["centre", "random"] = "centre"

    def rules(self) -> Iterator[UserError]:
        if self.side % 2:
            yield UserError("an odd side", flags=("--crop.side",))


@dataclass(frozen=True, kw_only=True)
class Loading(Checked):
    batch: Annotated[int, Range(least=1)] = 8
    group: int = 1
    cropping: Cropping = Cropping()

    def rules(self) -> Iterator[UserError]:
        if self.batch % self.group:
            yield UserError("the groups do not fill a batch", flags=("--group", "--batch"))


def test_all_mistakes_of_settings_and_their_groups_are_said_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Loading(batch=0, cropping=raw(Cropping, side=1, share=0.5, rule="centre"))
    assert [str(error) for error in caught.value.errors] == [
        "--batch is 0, which is out of range",
        "--crop.side is 1, which is out of range",
        "--crop.share 0.5 has no effect with --crop.rule centre",
    ]
    assert caught.value.flags == ("--batch", "--crop.side", "--crop.share", "--crop.rule")
    assert caught.value.hint and "--crop.side must be from 2 to 4,096" in caught.value.hint


def test_a_rule_repeats_no_mistake_whatever_its_words() -> None:
    with pytest.raises(UserError) as caught:
        Loading(batch=0, group=3)  # the rule's message contains no flag
    assert [str(error) for error in caught.value.errors] == ["--batch is 0, which is out of range"]
    with pytest.raises(UserError, match="the groups do not fill a batch"):
        Loading(batch=8, group=3)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        (Range(1, 1024), (1, 1024, (2, 3), None), (0, 1025, (1, 0)), "from 1 to 1,024"),
        (Range(above=0, most=1), (1, 0.5), (0, 1.5, float("nan")), "more than 0 and at most 1"),
        (Range(least=1), (1, 10**12), (0, float("inf")), "1 or more"),
    ],
)
def test_a_range_holds_its_bounds_and_is_said_in_words(
    bounds: Range, inside: tuple[Any, ...], outside: tuple[Any, ...], words: str
) -> None:
    assert all(not list(bounds.mistakes("--n", value)) for value in inside)
    for value in outside:
        (mistake,) = bounds.mistakes("--n", value)
        assert (str(mistake), mistake.flags) == (f"--n is {value}, which is out of range", ("--n",))
        assert mistake.hint == f"--n must be {words}"


def test_flags_are_called_by_other_names_whole_and_only_where_the_error_is_about_them() -> None:
    error = UserError(
        "--text is longer than --text-tower and --text.size allow",
        hint="leave out --text",
        flags=("--text", "--text.size"),
    )
    error.rename_flags({"--text": "text", "--text.size": "size"}.__getitem__)
    assert (str(error), error.hint) == ("text is longer than --text-tower and size allow", "leave out text")
    assert error.flags == ("text", "size") and error.__notes__ == ["hint: leave out text"]
    error.add_hint("or shorten it")
    assert error.__notes__ == ["hint: leave out text; or shorten it"]


def raw(kind: type[Cropping], **values: Any) -> Cropping:
    """Return settings that are not checked individually, as a command line creates groups."""
    with deferred_checks():
        return kind(**values)
