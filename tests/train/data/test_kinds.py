"""Kinds of data: one table recognizes a kind by its URL or path, and errors state what the data hold."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clipmill import open_clips, open_latents
from clipmill.manifests.errors import UserError
from clipmill.train.config import shards
from clipmill.train.config.clips import CaptionSettings, ClipSettings
from clipmill.train.config.shards import (
    CLIPS,
    IMAGES,
    KINDS,
    LATENTS,
    STREAM,
    DataSettings,
    Kind,
    is_local_folder,
    kind_of,
)
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.query import DataQuery, open_folder, open_samples, read_classes_of, require_no_streams
from clipmill.train.quickstart.choice import survey
from clipmill.train.tasks.mae.spec import MaeSettings
from tests.train.images.tars import sample, write_tar, write_tars


@pytest.mark.parametrize(
    ("address", "has_manifest", "is_local"),
    [
        ("data", True, True),
        ("/some where/data.v2/", True, True),
        ("s3://bucket/data", True, False),
        ("https://host/data", True, False),
        ("DIR/{000..099}.tar", False, False),
        ("one.tar", False, False),
        ("a.tar::b.tar", False, False),
        ("${WDS_DATA}/{0..9}.tar", False, False),
        ("s3://bucket/{0..9}.tar", False, False),
    ],
)
def test_the_spelling_of_an_address_tells_whether_it_has_a_manifest(
    address: str, has_manifest: bool, is_local: bool
) -> None:
    assert (kind_of(address).has_manifest, is_local_folder(address)) == (has_manifest, is_local)


def test_kinds_that_are_spelled_alike_have_the_same_kind_of_manifest() -> None:
    by_spelling: dict[str, set[bool]] = {}
    for kind in KINDS:
        by_spelling.setdefault(kind.spelling.pattern, set()).add(kind.has_manifest)
    assert all(len(values) == 1 for values in by_spelling.values())
    assert KINDS[-1] is CLIPS and CLIPS.spelling.search("anything")  # so every URL or path has a kind


def test_tars_are_looked_into_only_with_settings_and_latents_are_asked_for(tmp_path: Path) -> None:
    pictures = str(write_tar(tmp_path / "pictures.tar", [("a", sample(0))]))
    videos = str(write_tar(tmp_path / "videos.tar", [("a", {"mp4": b"video", "txt": b"a caption"})]))
    settings = DataSettings()
    assert [kind_of(address, settings) for address in (pictures, videos, "data")] == [IMAGES, STREAM, CLIPS]
    assert not kind_of("missing.tar").has_manifest
    with pytest.raises(UserError, match="cannot be found"):
        kind_of(str(tmp_path / "missing.tar"), settings)
    assert kind_of("data", replace(MaeSettings(), input="latents")) is LATENTS


def test_a_folder_of_tars_and_a_file_are_refused_with_what_to_name(tmp_path: Path) -> None:
    pattern = write_tars(tmp_path / "tars", num_tars=2, num_samples=1)
    with pytest.raises(UserError, match="is not a data folder") as caught:
        open_data_folder(str(tmp_path / "tars"), cache=None)
    assert f"'{pattern}'" in str(caught.value.hint) and kind_of(pattern, DataSettings()) is IMAGES
    (tmp_path / "v.mp4").write_bytes(b"video")
    with pytest.raises(UserError, match="is a file, not a data folder"):
        open_data_folder(str(tmp_path / "v.mp4"), cache=None)


GIFS = "a/*.gif"
SETTINGS = ClipSettings(shards=GIFS)
QUERY = DataQuery(settings=SETTINGS, content="captions", split="train", loading=LoaderSettings())


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: open_samples(replace(QUERY, content="labels")),
        lambda: open_samples(replace(QUERY, settings=replace(SETTINGS, where="motion > 1"))),
        lambda: open_samples(replace(QUERY, captions=CaptionSettings(sources="human=1"))),
        lambda: open_samples(replace(QUERY, has_stored_text=True)),
        lambda: open_folder(SETTINGS, reason="this needs a manifest"),
        lambda: read_classes_of(SETTINGS, label="class"),
        lambda: require_no_streams(DataSettings(shards=(GIFS, "data"))),
        lambda: survey(GIFS),
        lambda: open_clips(GIFS, where="motion > 1"),
        lambda: open_clips(GIFS, sources={"human": 1}),
        lambda: open_latents(GIFS),
    ],
)
def test_messages_call_data_by_the_noun_of_their_row(
    refuse: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(
        {"captions": "builtins:print"},
        noun="GIF files",
        missing_reasons={"labels": "their names are their captions"},
        spelling=re.compile(r"\.gif$"),
        has_manifest=False,
        can_be_mixed=False,
    )
    monkeypatch.setattr(shards, "KINDS", (kind, *KINDS))
    with pytest.raises(UserError) as refused:
        refuse()
    assert re.search(r"a/\*\.gif(:| names|, but) GIF files", str(refused.value)), refused.value
    assert not re.search(r"\btars?\b", str(refused.value))
