"""Tests of flag values that a conversion would change.

A fraction is not rounded, a URL is not mistaken for a local folder, and the value of a group of flags is not the value
of its first flag.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.train.cli import main
from tests.prep.running import prep_here

Refused = Callable[..., list[str]]


@pytest.fixture
def error_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run an invalid command next to a settings file; return the lines of its error."""

    def run(command: str, words: list[str], *, settings: str) -> list[str]:
        (tmp_path / "settings.yaml").write_text(f"{settings}\n")
        monkeypatch.chdir(tmp_path)
        if command == "prep":
            return prep_here(*words, status=2).stderr.splitlines()
        monkeypatch.setattr("sys.argv", [command, *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        return capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize(
    ("command", "words", "named", "origin"),
    [
        ("prep", ["chunk", "--crf", "20.7"], "--crf is 20.7", ""),
        ("prep", ["chunk", "--workers", "1.5"], "--workers is 1.5", ""),
        ("train", ["dual-encoder", "--steps", "1.5"], "--steps is 1.5", ""),
        ("train", ["dual-encoder", "--config", "settings.yaml"], "--batch is 7.5", "; --batch is from settings.yaml"),
    ],
)
def test_a_fraction_is_refused_by_its_flag(
    error_lines: Refused, command: str, words: list[str], named: str, origin: str
) -> None:
    lines = error_lines(command, words, settings="batch: 7.5")
    assert lines == [
        f"error: {named}, which is not an integer",
        f"hint: use an integer, without a decimal point{origin}",
    ]


@pytest.mark.parametrize(
    ("command", "words", "name", "origin"),
    [
        ("prep", ["inspect", "--html", "s3://bucket/run"], "--html", ""),
        ("prep", ["export", "zarr", "s3://bucket/run"], "--destination", ""),
        ("train", ["mae", "--cache", "s3://bucket/run"], "--cache", ""),
        ("train", ["mae", "--config", "settings.yaml"], "--cache", "; --cache is from settings.yaml"),
    ],
)
def test_an_address_for_a_local_path_is_refused_and_makes_no_folder_of_its_name(
    error_lines: Refused, tmp_path: Path, command: str, words: list[str], name: str, origin: str
) -> None:
    lines = error_lines(command, words, settings="cache: s3://bucket/run")
    hint = "hint: use a local path, and copy the files from or to that URL"
    assert lines == [f"error: {name} is s3://bucket/run, but it takes a local path", f"{hint}{origin}"]
    assert [path.name for path in tmp_path.iterdir()] == ["settings.yaml"]


@pytest.mark.parametrize(
    ("words", "group", "value", "flag"),
    [
        (["caption", "--decoding", "beam"], "--decoding", "beam", "--decoding.method"),
        (["caption-video", "RUN", "a.mp4", "--decoding=greedy"], "--decoding", "greedy", "--decoding.method"),
        (["eval", "caption", "RUN", "--decoding", "beam"], "--decoding", "beam", "--decoding.method"),
        (["dual-encoder", "--evaluate", "3"], "--evaluate", "3", "--evaluate.every"),
        (["mae", "--config", "settings.yaml"], "--optimizer", "sgd", "--optimizer.name"),
    ],
)
def test_the_value_of_a_group_is_refused_with_the_flag_to_name(
    error_lines: Refused, words: list[str], group: str, value: str, flag: str
) -> None:
    lines = error_lines("train", words, settings="optimizer: sgd")
    origin = f"; {group} is from settings.yaml" if "--config" in words else ""
    assert lines == [
        f"error: {group} is {value}, but it is a group of flags, which takes no value",
        f"hint: set one of its flags, such as {flag}{origin}",
    ]
