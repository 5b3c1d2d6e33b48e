import json
import shlex
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.cli import app
from clipmill.prep.core.column import recipe_differences
from clipmill.prep.video.column import COLUMN, NAMED_RECIPES, Recipe, resolve
from clipmill.prep.video.page.write import describe_settings
from clipmill.prep.video.settings import ChunkSettings


@pytest.mark.parametrize(
    ("length", "seconds"),
    [("15s", 15), ("2.5s", Fraction(5, 2)), ("500ms", Fraction(1, 2)), ("0.1s", Fraction(1, 10)), ("3600s", 3600)],
)
def test_lengths_are_exact(length: str, seconds: Fraction) -> None:
    assert Recipe(len=length).settings().len_s == seconds
    assert Recipe(len=length).settings().chunk_frames == seconds * 30


@pytest.mark.parametrize(
    "length", ["15", "15sec", "-1s", "0s", "0ms", "s", "", "1e3s", "1.s", "15 s", "15S", "٣s", "1m"]
)
def test_a_length_without_a_right_unit_is_refused(length: str) -> None:
    with pytest.raises(UserError, match="is not a length"):
        Recipe(len=length)


def test_the_name_of_the_layout_is_explained_where_it_is_shown() -> None:
    words = describe_settings(Recipe().settings().__dict__)
    assert "comb90: a key frame every 90 frames with a P frame every 16 frames" in words
    assert "CRF 24" in words and "key frames only" in describe_settings(Recipe(recipe="fast").settings().__dict__)
    assert "800kbit/s" in describe_settings(Recipe(bitrate="0.8M").settings().__dict__)


@pytest.mark.parametrize(
    ("one_way", "other"),
    [
        ({"bitrate": "800k"}, {"bitrate": "0.8M"}),
        ({"bitrate": "2M"}, {"bitrate": "2000k"}),
        ({}, {"codec": "h264", "crf": 24, "preset": "faster", "gop": "comb", "keyint": 90}),
        ({"recipe": "balanced"}, {}),
        ({"recipe": "small"}, {"codec": "av1", "crf": 45, "preset": "9", "gop": "closed", "keyint": 90}),
        ({"recipe": "fast"}, {"codec": "mjpeg", "crf": 8}),
        ({"recipe": "small", "codec": "h264", "keyint": 90}, {"preset": "faster"}),
        ({"recipe": "fast", "bitrate": "2M"}, {"codec": "mjpeg", "bitrate": "2M", "gop": "intra", "keyint": 1}),
        ({"gop": "star"}, {"gop": "star", "keyint": 16, "crf": 24}),
        ({"len": "15s"}, {"len": "15000ms"}),
        ({"len": "0.5s"}, {"len": "500ms"}),
        ({"fps": "30"}, {"fps": "60/2"}),
        ({"codec": "vp9"}, {"recipe": "small", "codec": "vp9", "gop": "closed", "crf": 33, "keyint": 30}),
    ],
)
def test_two_ways_to_say_the_same_are_one_variant(one_way: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (resolve(Recipe(**settings), ffmpeg_version="9.0") for settings in (one_way, other))
    assert first == second and first.fingerprint == second.fingerprint and first.variant == second.variant


def test_a_bitrate_without_a_unit_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (["plan"], ["chunk"], ["advise", "--batch", "3", "--step-time", "1"]):
        with pytest.raises(UserError, match='--bitrate "800000" has no unit') as caught:
            app([*command, "--bitrate", "800000"], exit_on_error=False)
        assert caught.value.hint == "use --bitrate 800k (bits per second)"


OTHER_VALUES: dict[str, Any] = {
    "len": "10s",
    "codec": "hevc",
    "crf": 25,
    "bitrate": "800k",
    "preset": "fast",
    "gop": "closed",
    "keyint": 12,
    "fps": "25",
    "short_side": 224,
    "scaler": "area",
    "tail": "drop",
    "audio": "keep",
    "cut": "shots",
}
OTHER_SHOTS: dict[str, Any] = {"detector": "content", "threshold": 4.0, "min_scene_len": "1s", "min_len": "3s"}


def test_each_setting_changes_the_fingerprint() -> None:
    assert OTHER_VALUES.keys() | OTHER_SHOTS.keys() == {field.name for field in fields(ChunkSettings)}
    variants = [resolve(Recipe(**{name: value}), ffmpeg_version="9.0") for name, value in OTHER_VALUES.items()]
    variants += [resolve(Recipe(), ffmpeg_version=version) for version in ("9.0", "9.1")]
    shots = [Recipe(cut="shots", **{name: value}) for name, value in OTHER_SHOTS.items()]
    variants += [resolve(recipe, ffmpeg_version="9.0") for recipe in shots]
    variants.append(replace(variants[-1], values={**variants[-1].values, "scenedetect": "0.7.1"}))
    assert len({variant.fingerprint for variant in variants}) == len({variant.variant for variant in variants}) == 20
    for variant in variants:
        name = variant.variant
        assert name.endswith(variant.fingerprint[:8]) and "/" not in name and not name.startswith(".")


def test_a_stored_recipe_is_read_back_and_compared() -> None:
    old = resolve(Recipe(), ffmpeg_version="9.0")
    for name, value in OTHER_VALUES.items():
        new = resolve(Recipe(**{name: value}), ffmpeg_version="9.0")
        stored = json.loads(json.dumps(new.values))
        assert resolve(COLUMN.stored_settings(stored), ffmpeg_version="9.0") == new
        assert any(line.startswith(f"{name}: ") for line in recipe_differences(old.values, new.values))
    assert recipe_differences(old.values, old.values) == []
    assert recipe_differences(old.values, resolve(Recipe(crf=30), ffmpeg_version="9.1").values) == [
        "ffmpeg: 9.0 → 9.1",
        "crf: 24 → 30",
    ]
    with pytest.raises(UserError, match="schema 99"):
        COLUMN.stored_settings({**old.values, "schema": 99})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recipe": "small"},
        {"recipe": "fast", "crf": 5},
        {"recipe": "small", "bitrate": "200k", "scaler": "area"},
        {"codec": "hevc"},
        {"codec": "hevc", "gop": "star"},
        {"codec": "vp9", "keyint": 50, "preset": "8"},
        {"gop": "star", "keyint": 12, "len": "2.5s", "tail": "drop"},
        {"gop": "intra", "fps": "30000/1001", "len": "1001ms"},
        {"codec": "av1", "gop": "intra", "audio": "keep"},
        {"bitrate": "800k", "keyint": 30},
    ],
    ids=str,
)
def test_the_command_of_a_stored_recipe_asks_for_the_same(settings: dict[str, Any]) -> None:
    made = resolve(Recipe(**settings), ffmpeg_version="9.0")
    stored = json.loads(json.dumps(made.values))
    words = shlex.split(COLUMN.command_line(stored, data_dir=Path("elsewhere")))
    assert words[:2] == ["prep", "chunk"] and words[-2:] == ["--data", "elsewhere"]
    _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    asked = bound.arguments.get("settings", Recipe())
    assert resolve(asked, ffmpeg_version="9.0") == made


def test_the_name_of_a_recipe_is_not_stored_and_its_command_is_short() -> None:
    made = resolve(Recipe(recipe="small"), ffmpeg_version="9.0")
    assert "recipe" not in made.values
    assert "small" not in made.variant
    assert COLUMN.command_line(made.values, data_dir=Path("data")) == "prep chunk --len 15s --recipe small"
    assert COLUMN.command_line(resolve(Recipe(), ffmpeg_version="9.0").values, data_dir=Path("data")) == (
        "prep chunk --len 15s"
    )


def test_a_flag_that_is_given_wins_over_the_recipe() -> None:
    for name in NAMED_RECIPES:
        settings = Recipe(recipe=name, codec="hevc", crf=30, preset="slow", gop="closed", keyint=45).settings()
        assert (settings.codec, settings.crf, settings.preset, settings.gop, settings.keyint) == (
            *("hevc", 30, "slow", "closed", 45),
        )
    for name, values in NAMED_RECIPES.items():
        kept = {key: value for key, value in values.items() if key != "crf"}
        settings = Recipe(recipe=name, crf=11).settings()
        assert settings.crf == 11
        assert {key: getattr(settings, key) for key in kept} == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 3.0}, "--threshold 3.0 has no effect with --cut even"),
        ({"min_len": "1s"}, "--min-len 1s has no effect with --cut even"),
        ({"cut": "shots", "tail": "drop"}, "--tail drop has no effect with --cut shots"),
        ({"cut": "shots", "min_len": "8s"}, "--min-len 8s is longer than half of --len 15s"),
        ({"cut": "shots", "min_len": "much"}, '--min-len "much" is not a length'),
        ({"cut": "shots", "min_scene_len": "0s"}, '--min-scene-len "0s" is not a length'),
        ({"cut": "shots", "threshold": float("nan")}, "--threshold is nan"),
        ({"cut": "shots", "threshold": 0.0}, "--threshold is 0"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Recipe(**settings)


def test_the_settings_have_one_description_and_only_shots_have_them() -> None:
    plain = resolve(Recipe(), ffmpeg_version="9.0")
    assert not {"cut", "detector", "threshold", "min_scene_len", "min_len", "scenedetect"} & plain.values.keys()
    given = Recipe(cut="shots", detector="adaptive", threshold=3, min_scene_len="0.5s", min_len="2000ms", len="15000ms")
    recipes = [resolve(recipe, ffmpeg_version="9.0") for recipe in (given, Recipe(cut="shots"))]
    assert recipes[0] == recipes[1] and recipes[0].fingerprint != plain.fingerprint
    assert COLUMN.stored_settings(json.loads(json.dumps(recipes[0].values))).settings() == recipes[0].settings
    assert Recipe(cut="shots", len="3s").settings().min_len == "1500ms"
    assert Recipe(cut="shots", detector="content").settings().threshold == 27.0
