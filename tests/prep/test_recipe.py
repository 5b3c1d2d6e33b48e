import json
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest

from manifests.errors import UserError
from prep.recipe import Recipe, recipe_differences, recipe_from_dict, resolve


@pytest.mark.parametrize(
    ("length", "seconds"),
    [("15s", 15), ("2.5s", Fraction(5, 2)), ("500ms", Fraction(1, 2)), ("0.1s", Fraction(1, 10)), ("3600s", 3600)],
)
def test_lengths_are_exact(length: str, seconds: Fraction) -> None:
    assert Recipe(len=length).len_s == seconds
    assert Recipe(len=length).chunk_frames == seconds * 30


@pytest.mark.parametrize(
    "length", ["15", "15sec", "-1s", "0s", "0ms", "s", "", "1e3s", "1.s", "15 s", "15S", "٣s", "1m"]
)
def test_a_length_without_a_right_unit_is_refused(length: str) -> None:
    with pytest.raises(UserError, match="is not a length"):
        Recipe(len=length)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"codec": "h264", "crf": 23, "preset": "veryfast", "gop": "star"}),
        ({"len": "15s"}, {"len": "15000ms"}),
        ({"len": "0.5s"}, {"len": "500ms"}),
        ({"fps": "30"}, {"fps": "60/2"}),
        ({"codec": "mjpeg"}, {"codec": "mjpeg", "gop": "intra", "crf": 10}),
    ],
)
def test_two_ways_to_say_the_same_are_one_variant(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (resolve(Recipe(**settings), ffmpeg_version="9.0") for settings in (one, other))
    assert first == second and first.fingerprint == second.fingerprint and first.variant == second.variant


OTHER_VALUES: dict[str, Any] = {
    "len": "10s",
    "codec": "hevc",
    "crf": 24,
    "bitrate": "800k",
    "preset": "fast",
    "gop": "closed",
    "keyint": 12,
    "fps": "25",
    "short_side": 224,
    "scaler": "area",
    "tail": "drop",
    "audio": "keep",
}


def test_each_setting_changes_the_fingerprint() -> None:
    assert OTHER_VALUES.keys() == {field.name for field in fields(Recipe)}
    variants = [resolve(Recipe(**{name: value}), ffmpeg_version="9.0") for name, value in OTHER_VALUES.items()]
    variants += [resolve(Recipe(), ffmpeg_version=version) for version in ("9.0", "9.1")]
    assert len({variant.fingerprint for variant in variants}) == len({variant.variant for variant in variants}) == 14
    for variant in variants:
        name = variant.variant
        assert name.endswith(variant.fingerprint[:8]) and "/" not in name and not name.startswith(".")


def test_a_stored_recipe_is_read_back_and_compared() -> None:
    old = resolve(Recipe(), ffmpeg_version="9.0")
    for name, value in OTHER_VALUES.items():
        new = resolve(Recipe(**{name: value}), ffmpeg_version="9.0")
        stored = json.loads(json.dumps(new.as_dict()))
        assert resolve(recipe_from_dict(stored), ffmpeg_version="9.0") == new
        assert any(line.startswith(f"{name}: ") for line in recipe_differences(old.as_dict(), new.as_dict()))
    assert recipe_differences(old.as_dict(), old.as_dict()) == []
    assert recipe_differences(old.as_dict(), resolve(Recipe(crf=30), ffmpeg_version="9.1").as_dict()) == [
        "ffmpeg: 9.0 → 9.1",
        "crf: 23 → 30",
    ]
    with pytest.raises(UserError, match="schema 99"):
        recipe_from_dict({**old.as_dict(), "schema": 99})
