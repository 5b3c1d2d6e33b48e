"""Tests of `prep inspect`: the set, one chunk, and a page of images."""

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import av
import pytest

from clipmill.prep.core.work import PageRequest
from clipmill.prep.synthetic import read_frame_number
from clipmill.prep.video.inspection import gop_line
from clipmill.prep.video.page.cards import decode_frames, jpeg
from clipmill.prep.video.page.write import PAGE_CHUNKS, write_chunk_page
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.pages.figures import middle_items
from clipmill.shards.reader import Variant
from tests.prep.running import Ran
from tests.prep.sets import NASTY, ShardSet, rerun

Prep = Callable[..., Ran]
KEY, REFERENCE = PACKET_KEY | PACKET_REFERENCE, PACKET_REFERENCE


def test_the_set_is_a_table_of_shards(prep: Prep, shard_set: ShardSet) -> None:
    values = prep("inspect", "--data", shard_set.data, "--json").summary
    assert [(row["shard_id"], row["split"], row["num_chunks"], row["state"]) for row in values["shards"]] == [
        (0, "train", 3, "committed"),
        (1, "val", 2, "committed"),
    ]
    assert values["recipe"]["len"] == "2s"
    shard_set.tar(1).unlink()
    text = prep("inspect", "--data", shard_set.data).stdout
    assert re.search(r"000000 +train +3 +[0-9.]+ kB +0  committed", text)
    assert re.search(r"000001 +val +2 .* missing", text)


def test_a_chunk_is_told_with_its_bytes(prep: Prep, shard_set: ShardSet) -> None:
    values = prep("inspect", "long_000002000", "--data", shard_set.data, "--json").summary
    content = Path(values["tar"]).read_bytes()
    place = values["members"]["json"]
    assert json.loads(content[place["offset"] : place["offset"] + place["size"]])["key"] == "long_000002000"
    assert values["gop"] == "(I 15b P 15b P 15b P 10b P)"
    text = prep("inspect", "long_000000000", "--data", shard_set.data).stdout
    for part in ("0:00 to 0:02 of video long", "60 at 30 fps", "h264 128x96", "long.mp4", NASTY, "train"):
        assert part in text


def test_a_file_name_or_the_beginning_of_a_key_is_enough_if_it_is_unique(prep: Prep, shard_set: ShardSet) -> None:
    for name in ("long_000004", "LONG_000004000"):
        assert prep("inspect", name, "--data", shard_set.data, "--json").summary["key"] == "long_000004000"
    for name in ("short.mp4", "Short.MP4", "videos/short"):
        ran = prep("inspect", name, "--data", shard_set.data, status=2)
        assert "matching keys: short_000000000, short_000002000" in ran.stderr
    shard_set.index(1).write_bytes(b"no index")
    assert "1 shard cannot be read" in prep("inspect", "long_000004", "--data", shard_set.data, status=2).stderr


def test_an_unknown_key_names_its_neighbours(prep: Prep, shard_set: ShardSet) -> None:
    for key in ("long_000003000", "long"):
        ran = prep("inspect", key, "--data", shard_set.data, status=2)
        assert f'no chunk with the key "{key}"' in ran.error
        assert "long_000000000, long_000002000, long_000004000" in ran.stderr
    ran = prep("inspect", "nobody_000000000", "--data", shard_set.data, status=2)
    assert "use a key such as long_000000000" in ran.stderr


def test_what_a_damaged_index_hides_is_said(prep: Prep, shard_set: ShardSet) -> None:
    shard_set.index(0).write_bytes(b"no index")
    ran = prep("inspect", "long_000000000", "--data", shard_set.data, status=2)
    assert "1 shard cannot be read" in ran.stderr
    prep("inspect", "short_000000000", "--data", shard_set.data)


@pytest.mark.parametrize(
    ("frames", "flags", "line"),
    [
        ([0, 2, 1], [KEY, REFERENCE, 0], "IbP"),
        ([0, 1, 2], [KEY, KEY, KEY], "I x 3"),
        ([0], [KEY], "I"),
        (list(range(40)), [KEY, *[REFERENCE] * 39], "(I 39P)"),
        (
            list(range(15)),
            [KEY if n in (0, 1, 3, 6, 10) else REFERENCE for n in range(15)],
            "I + IP + IPP + IPPP + 1 other pattern",
        ),
    ],
)
def test_a_gop_is_one_line(frames: list[int], flags: list[int], line: str) -> None:
    assert gop_line(frames, flags) == line


class _Page(HTMLParser):
    """Images, texts and URLs of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[bytes] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if tag == "img" and name == "src" and value is not None:
                self.images.append(base64.b64decode(value.removeprefix("data:image/jpeg;base64,")))
            elif name in ("src", "href", "srcset"):
                self.addresses.append(f"{value}")


def test_the_page_shows_frames_of_every_chunk_and_needs_nothing_else(
    prep: Prep, shard_set: ShardSet, tmp_path: Path
) -> None:
    path = tmp_path / "sheet.html"
    assert "5 chunks" in prep("inspect", "--html", path, "--data", shard_set.data).stdout
    text = path.read_text()
    page = _Page(text)
    assert page.tags.isdisjoint({"link", "iframe"}) and "url(" not in text and not re.search("https?://", text)
    clips = [base64.b64decode(address.removeprefix("data:video/mp4;base64,")) for address in page.addresses]
    assert clips == [sample["mp4"] for sample in Variant(shard_set.variant).iterate()]
    assert len(page.images) == 5 * 4
    numbers = []
    for image in page.images:
        with av.open(BytesIO(image), "r", format="jpeg_pipe") as container:
            numbers.append(read_frame_number(next(container.decode(video=0)).to_ndarray(format="gray")))
    long, short = middle_items(range(60), at_most=4), middle_items(range(30), at_most=4)
    expected = [*long, *(60 + n for n in long), *(120 + n for n in short), *long, *(60 + n for n in short)]
    assert numbers == expected
    assert "&lt;script&gt;" in text and "5 chunks of 2 videos" in text and "showing" not in text
    assert "<title>Chunks · clipmill</title>" in text and text.count(shard_set.variant.name) == 1
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_damaged_chunk_is_a_card_with_the_reason_and_damaged_shards_are_told(
    prep: Prep, shard_set: ShardSet, tmp_path: Path
) -> None:
    content = shard_set.tar(0).read_bytes()
    shard_set.tar(0).write_bytes(content[: len(content) // 3])
    (shard_set.variant / "commits/000001.json").write_text("{}")
    stdout = prep("inspect", "--html", tmp_path / "sheet.html", "--data", shard_set.data).stdout
    assert "2 shards missing or damaged, " in stdout
    assert "cannot be shown" in (tmp_path / "sheet.html").read_text()


def test_a_large_set_is_shown_in_part(shard_set: ShardSet, tmp_path: Path) -> None:
    request = PageRequest(tmp_path / "sheet.html", num_samples=3)
    assert write_chunk_page(Variant(shard_set.variant), request).values["num_chunks"] == 3
    text = (tmp_path / "sheet.html").read_text()
    assert "5 chunks of 2 videos" in text and "showing 3 evenly spaced chunks" in text
    assert re.findall(r'<article id="([^"]+)"', text) == ["long_000000000", "long_000004000", "short_000002000"]
    assert PAGE_CHUNKS == 150


@pytest.mark.parametrize("name", ["folder", "missing/sheet.html"])
def test_a_page_that_cannot_be_written_is_an_error(prep: Prep, shard_set: ShardSet, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert "--html" in prep("inspect", "--html", tmp_path / name, "--data", shard_set.data, status=2).error


def test_a_key_and_a_page_exclude_each_other(prep: Prep, shard_set: ShardSet, tmp_path: Path) -> None:
    arguments = ("inspect", "long_000000000", "--html", tmp_path / "x.html", "--data", shard_set.data)
    assert "cannot be used with the key long_000000000" in prep(*arguments, status=2).error
    refused = prep("inspect", "scores", "--html", tmp_path / "x.html", "--data", shard_set.data, status=2)
    assert "hint: use --column scores" in refused.stderr


@pytest.mark.parametrize(
    "settings",
    [
        ("--codec", "hevc", "--preset", "veryfast"),
        ("--codec", "av1", "--preset", "13", "--crf", "20"),
        ("--codec", "vp9", "--preset", "8", "--crf", "20"),
        ("--codec", "mjpeg"),
        ("--codec", "h264", "--gop", "closed", "--keyint", "250", "--preset", "ultrafast"),
    ],
    ids=lambda settings: settings[1] if settings[1] != "h264" else "h264-closed",
)
def test_single_frames_and_deep_checks_work_with_every_codec(
    prep: Prep, shard_set: ShardSet, settings: tuple[str, ...]
) -> None:
    rerun(prep, shard_set, "--len", "2s", "--short-side", "96", *settings)
    deep = prep("verify", "--deep", "--data", shard_set.data, "--json").summary["video"]
    assert (deep["num_deep"], deep["num_samples"]) == (240, 5)
    shard = Variant(shard_set.variant).shards()[0]
    row = {name: shard.index[name][1].as_py() for name in shard.index.column_names}
    asked = [59, 0, 17, 30]
    pictures = decode_frames(shard.read(1, "mp4"), row, frames=asked)
    assert [read_frame_number(picture.to_ndarray(format="gray")) for picture in pictures] == [60 + n for n in asked]
    with av.open(BytesIO(jpeg(pictures[0], height=48)), "r", format="jpeg_pipe") as container:
        small = next(container.decode(video=0)).to_ndarray(format="gray")
    assert small.shape == (48, 64) and int(small.max()) - int(small.min()) > 200
