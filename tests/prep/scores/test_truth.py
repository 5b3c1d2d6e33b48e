"""Tests of scores on clips whose true values are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.shards.score_fields import SCORES_FIELDS
from clipmill.shards.scores import open_scores
from tests.prep.scores.conftest import CUTS, FPS, HEIGHT, SIDE, SPEED, WIDTH

Scored = dict[str, dict[str, Any]]
FIRST = "_000000000"


@pytest.fixture
def of(scores_by_key: Scored) -> Any:
    """Return a function that returns the scores of a clip's first chunk."""
    return lambda name: scores_by_key[f"{name}{FIRST}"]


def test_a_pan_is_motion_of_the_camera(of: Any) -> None:
    pan = of("pan")
    assert pan["motion"] == pytest.approx(SPEED, rel=0.05)
    assert pan["camera_motion"] == pytest.approx(SPEED, rel=0.05)
    assert pan["object_motion"] < 0.05 * SPEED


def test_what_moves_before_a_still_camera_is_an_object(of: Any) -> None:
    moved, truth = of("object"), SPEED * SIDE**2 / (WIDTH * HEIGHT)
    assert moved["camera_motion"] == 0
    assert moved["object_motion"] == pytest.approx(truth, rel=0.5), "the flow at its edge belongs to the object too"
    assert moved["motion"] == pytest.approx(moved["object_motion"], rel=0.1)


def test_a_still_grey_picture_has_no_motion_and_nothing_that_is_not_a_number(of: Any) -> None:
    grey = of("grey")
    still = {name: grey[name] for name in ("motion", "camera_motion", "object_motion", "black", "letterbox", "cuts")}
    assert set(still.values()) == {0} and grey["frozen"] == 1
    assert grey["sharpness"] < 1 and grey["brightness"] == pytest.approx(128 / 255, abs=0.01)


def test_cuts_are_found_at_their_frames(of: Any) -> None:
    shots = of("shots")
    assert shots["cuts"] == len(CUTS)
    assert shots["cut_times_s"] == pytest.approx([frame / FPS for frame in CUTS], abs=1e-5)
    assert shots["motion"] < 0.01, "flow must not be measured across a cut"
    assert of("pan")["cuts"] == 0 and of("pan")["cut_times_s"] == []


def test_black_and_frozen_shares_are_those_of_the_time(of: Any) -> None:
    assert of("dark")["black"] == pytest.approx(45 / 120, abs=1 / 120)
    assert of("dark")["letterbox"] == 0, "black frames have no bars"
    assert of("frozen")["frozen"] == pytest.approx(60 / 120, abs=0.5 * 16 / 120)
    assert (of("pan")["black"], of("pan")["frozen"]) == (0, 0)


def test_a_black_clip_has_no_bars_and_no_texture(of: Any) -> None:
    black = of("allblack")
    assert (black["black"], black["frozen"], black["letterbox"]) == (1, 1, None)
    assert black["sharpness"] < 1 and black["brightness"] < 0.01 and black["motion"] == 0


def test_bars_are_measured_and_left_out_of_sharpness(of: Any) -> None:
    boxed = of("letterbox")
    assert boxed["letterbox"] == pytest.approx(36 / HEIGHT, abs=2 / HEIGHT)
    assert boxed["camera_motion"] == pytest.approx(SPEED * (1 - 36 / HEIGHT), rel=0.05), "bars do not move"
    assert boxed["sharpness"] < 2 * of("pan")["sharpness"]


def test_blur_reduces_sharpness(of: Any) -> None:
    assert of("blurred")["sharpness"] < of("pan")["sharpness"] / 4


def test_speech_is_neither_silence_nor_tones_nor_noise(of: Any) -> None:
    assert [of(name)["speech"] for name in ("silence", "tone", "noise")] == [0, 0, 0]
    assert of("vowel")["speech"] > 0.8
    assert of("pan")["speech"] is None, "the clip has no audio"


def test_chunks_of_one_and_of_three_frames_have_the_scores_that_can_be_known(scores_by_key: Scored) -> None:
    pan_scores, three = scores_by_key["pan_000004000"], scores_by_key["shots_000004000"]
    assert {name for name, value in pan_scores.items() if value is None} == {
        *("motion", "camera_motion", "object_motion", "frozen", "speech")
    }
    assert (pan_scores["cuts"], pan_scores["black"], pan_scores["letterbox"]) == (0, 0, 0) and pan_scores["phash"]
    assert three["motion"] < 0.001 and (three["frozen"], three["cuts"]) == (1, 0)


def test_no_value_is_nan_and_shares_are_shares(scores_by_key: Scored, clips: Path) -> None:
    floats = [field.name for field in SCORES_FIELDS if str(field.type) == "float"]
    shares = ("brightness", "black", "frozen", "letterbox", "speech")
    for row in scores_by_key.values():
        known = {name: row[name] for name in floats if row[name] is not None}
        assert all(np.isfinite(value) and value >= 0 for value in known.values()), row
        assert all(known.get(name, 0) <= 1 for name in shares), row
    table = open_scores(clips).table
    assert table.num_rows == len(scores_by_key)
    assert sorted(table["phash"].to_pylist()) == sorted(row["phash"] for row in scores_by_key.values())
