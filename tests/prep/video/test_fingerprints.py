"""Tests of fingerprints of recipes: they cover all settings that affect bytes, and existing fingerprints stay valid."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.sources.access import SourceFacts
from clipmill.prep.video import codecs
from clipmill.prep.video.codecs import CODECS, arguments_hash
from clipmill.prep.video.column import COLUMN, Recipe, resolve
from clipmill.prep.video.encode import Span, span_arguments
from clipmill.prep.video.settings import ResolvedRecipe

SOURCE = SourceFacts(
    fingerprint="0" * 64, size_bytes=1, end_s=100.0, fps=25.0, width=640, height=480, codec="h264", key_gap_s=2.0
)


def recipe(**settings: Any) -> ResolvedRecipe:
    return resolve(Recipe(**settings), ffmpeg_version="9.0")


@pytest.mark.parametrize(
    ("settings", "begin"),
    [
        ({}, "f41dd0b19957e00b"),
        ({"recipe": "small"}, "47aa3d47239ea6c1"),
        ({"recipe": "fast"}, "ad54335e5b687fc7"),
        ({"codec": "hevc"}, "30820db69043ca72"),
        ({"codec": "hevc", "gop": "star"}, "648ed92a19ed90f1"),
        ({"codec": "vp9", "bitrate": "800k"}, "5078501d130c52be"),
        ({"codec": "h264_nvenc"}, "b1d9998d6c4255c8"),
        ({"gop": "star"}, "6d54108843ed88b5"),
        ({"gop": "closed", "audio": "keep", "tail": "merge"}, "ad88f90c6b27c3ea"),
        ({"gop": "intra"}, "7769c7cbc7350f90"),
    ],
    ids=str,
)
def test_a_recipe_has_the_fingerprint_of_its_schema(settings: dict[str, Any], begin: str) -> None:
    assert recipe(**settings).fingerprint.startswith(begin)


def test_every_codec_is_as_it_was_at_schema_1() -> None:
    assert [(name, gop) for name, codec in CODECS.items() for gop in codec.gops if arguments_hash(name, gop)] == []


def test_another_distance_of_references_is_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[dict[str, Any]] = [{}, {"codec": "hevc"}, {"keyint": 20}]
    untouched: list[dict[str, Any]] = [{"gop": "star"}, {"gop": "closed"}, {"gop": "intra"}, {"recipe": "small"}]
    before = [recipe(**settings) for settings in [*touched, *untouched]]
    fingerprints = [made.fingerprint for made in before]
    monkeypatch.setattr(codecs, "COMB_STEP", 8)
    after = [recipe(**settings).fingerprint for settings in [*touched, *untouched]]
    assert [new != old for new, old in zip(after, fingerprints, strict=True)] == [True] * 3 + [False] * 4
    stored = before[0].values
    assert COLUMN.stored_settings(stored).settings() == before[0].settings
    monkeypatch.undo()
    assert [made.fingerprint for made in before] == fingerprints


def test_the_arguments_of_a_pass_are_those_of_the_schema() -> None:
    """Increase RECIPE_SCHEMA after changing the arguments in `video/encode.py`, which no fingerprint covers."""
    digest = hashlib.sha256()
    for source in (SOURCE, SourceFacts(**{**vars(SOURCE), "fps": 60.0})):
        for span in (Span(0, 0, (450, 450, 450), False), Span(1, 9000, (450, 100), True)):
            for audio in ("drop", "keep"):
                kinds: list[dict[str, Any]] = [{}, {"recipe": "small"}, {"recipe": "fast"}, {"codec": "vp9"}]
                for settings in [*kinds, {"bitrate": "800k"}, {"scaler": "area", "short_side": 128}]:
                    arguments = span_arguments(
                        Path("/source.mp4"),
                        source=source,
                        span=span,
                        recipe=recipe(audio=audio, **settings),
                        program="ffmpeg",
                    )
                    digest.update("\0".join(arguments).encode())
    assert digest.hexdigest() == "41032d1d0366fcb72f222ea706ff96198277994694056ac6beab2ab168da6c46"
