"""Captions opened by span from the files: the clips match a plain reading of captions.parquet, or opening fails."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.open_data import video_ids, write_column
from clipmill.manifests import caption_spans
from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import manifest_dir, read_captions, read_videos
from clipmill.train.config.clips import CaptionSettings
from clipmill.train.data import data_folder
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.samples import Samples
from tests.train.latents.written import Written, write_text
from tests.train.tiny_data import Caption, write_captions

NUM_VIDEOS = 40
VIDEO_US = 150_000_000
SHAPE = ClipShape(sampling=Sampling(num_frames=1), size_px=16)
LOADING = LoaderSettings(batch=1, num_threads=1, num_ahead=1, seed=0)
SOURCES = ("writer", "reader", "captioner@0a1b2c3d")
WITHOUT_EMBEDDING = frozenset(range(0, 3000, 7))


def random_captions(seed: int, *, num_videos: int) -> list[Caption]:
    """Make captions within ten chunks of 15 s per video, and some beyond.

    Many captions share a span, either exactly or to the microsecond.
    """
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 40, 3000) * 4.0 + rng.choice([0, 1e-8], 3000)
    end = begin + rng.choice([2.0, 20.0, 0.0, np.inf, 1e-9], 3000)
    numbers = rng.integers(0, num_videos, 3000).tolist()
    names = [video_ids(number, 1)[0].as_py() for number in numbers]
    source = rng.choice(SOURCES, 3000)
    texts = [f"text {number}" for number in rng.integers(0, 2000, 3000)]
    rows = zip(names, begin.tolist(), end.tolist(), texts, source.tolist(), strict=True)
    return [Caption(*row) for row in rows]


def folder_of(path: Path, splits: tuple[str, ...], *, num_videos: int = NUM_VIDEOS) -> Path:
    """Write videos without pixels, each in a random split of `splits`, and captions.

    The last five videos have no chunks.
    """
    write_column(path, "video", num_chunks=(NUM_VIDEOS - 5) * 10)
    of_video = np.random.default_rng(1).choice(splits, num_videos).tolist()
    names = [video_ids(number, 1)[0].as_py() for number in range(num_videos)]
    captions = random_captions(2, num_videos=num_videos)
    write_captions(path, dict(zip(names, of_video, strict=True)), captions)
    write_text(Written(path), captions, width=4, videos_per_shard=20, without=WITHOUT_EMBEDDING)
    return path


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder with a manifest whose files have many batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caption_spans, "_CAPTIONS_PER_BATCH", 500)
        patch.setattr(caption_spans, "_TEXTS_PER_BATCH", 400)
        return folder_of(tmp_path_factory.mktemp("spans"), ("train", "val"))


def open_clips_of(data_dir: Path, *, split: str = "train", **settings: Any) -> Samples[Any]:
    stored = settings.pop("stored", False)
    where, each = settings.pop("where", None), settings.pop("each_caption", False)
    return open_captioned_clips(
        ClipQuery(data_dir, split=split, shape=SHAPE, loading=LOADING, where=where),
        tokenize=None,
        captions=CaptionSettings(**settings),
        has_stored_text=stored,
        each_caption=each,
    )


def _spans_read_plainly(
    data_dir: Path, ranks: dict[str, int], *, split: str, stored: bool, is_selected: Callable[[Any], bool]
) -> dict[tuple[str, int, int], list[tuple[int, int]]]:
    """Return the captions of each span that can be shown, as (rank of the source, row).

    The manifest is read row by row.
    """
    videos = read_videos(data_dir)
    of_split = {row["video_id"] for row in videos.to_pylist() if row["split"] == split}
    with_chunks = set(video_ids(0, NUM_VIDEOS - 5).to_pylist())
    rows_by_clip = defaultdict(list)
    for number, row in enumerate(read_captions(data_dir).to_pylist()):
        begin_us, end_us = round(row["begin_s"] * 1e6), round(min(row["end_s"], 1e6) * 1e6)
        if (
            row["video_id"] in of_split & with_chunks
            and row["end_s"] > row["begin_s"]
            and begin_us < VIDEO_US
            and row["source"] in ranks
            and not (stored and row["caption_id"] in WITHOUT_EMBEDDING)
            and is_selected(row)
        ):
            span = row["video_id"], begin_us, min(max(end_us, begin_us + 1), VIDEO_US)
            rows_by_clip[span].append((ranks[row["source"]], number))
    return rows_by_clip


IN_ORDER = {"reader": 0, "writer": 1}  # captions from models are used only if their source is listed


@pytest.mark.parametrize(
    ("settings", "ranks", "is_selected"),
    [
        ({}, IN_ORDER, None),
        ({"split": "val"}, IN_ORDER, None),
        ({"sources": "writer=2,c*=0.5"}, {"writer": 0, "captioner@0a1b2c3d": 1}, None),
        ({"sources": "writer=1,reader=3"}, {"writer": 0, "reader": 1}, None),
        ({"stored": True}, IN_ORDER, None),
        ({"where": "source != 'reader'", "sources": "writer=1,reader=2"}, {"writer": 0}, None),
        ({"where": "text != 'text 7'", "stored": True}, IN_ORDER, lambda row: row["text"] != "text 7"),
        ({"each_caption": True}, IN_ORDER, None),
        ({"each_caption": True, "sources": "writer=1,reader=3"}, {"writer": 0, "reader": 1}, None),
    ],
)
def test_clips_are_those_of_a_plain_reading(
    data_dir: Path, settings: dict[str, Any], ranks: dict[str, int], is_selected: Callable[[Any], bool] | None
) -> None:
    split, stored = settings.get("split", "train"), settings.get("stored", False)
    expected = _spans_read_plainly(
        data_dir, ranks, split=split, stored=stored, is_selected=is_selected or (lambda _: True)
    )
    clips = [(span, [row for _, row in sorted(captions)]) for span, captions in sorted(expected.items())]
    if settings.get("each_caption"):
        clips = [(span, [row]) for span, rows in clips for row in sorted(rows)]
    samples = open_clips_of(data_dir, **settings)
    rows_of, table = samples.table.captions, read_captions(data_dir)
    assert rows_of is not None and rows_of.text_row is not None
    names = [samples.key(clip).rpartition("_")[0] for clip in range(len(samples))]
    begin_us, end_us = (times.tolist() for times in samples.span_us(np.arange(len(samples))))
    assert list(zip(names, begin_us, end_us, strict=True)) == [span for span, _ in clips]
    entries = [rows_of.choice.entries(clip) for clip in range(len(clips))]
    assert [rows_of.text_row[block_slice.start : block_slice.stop].tolist() for block_slice in entries] == [
        rows for _, rows in clips
    ]
    rows = pa.array(rows_of.text_row)
    assert rows_of.caption_id.tolist() == table["caption_id"].take(rows).to_pylist()
    assert samples.captions.texts(np.arange(len(rows))) == table["text"].take(rows).to_pylist()
    assert len(rows) > 300


@pytest.mark.parametrize(("each_caption", "where"), [(False, None), (True, None), (False, "text != 'text 7'")])
def test_a_table_in_place_of_the_manifest_gives_the_same_samples(
    data_dir: Path, each_caption: bool, where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(table: pa.Table | None) -> list[Any]:
        samples = open_captioned_clips(
            ClipQuery(data_dir, split="train", shape=SHAPE, loading=LOADING, where=where),
            tokenize=None,
            each_caption=each_caption,
            table=table,
        )
        return [samples.fingerprint, samples.describe(), list(samples.captions.all_texts())]

    expected = of(None)
    monkeypatch.setattr(data_folder, "_BLOCK", 100)  # the table is filtered in parts, the file in one pass
    assert of(read_captions(data_dir)) == expected
    assert of(read_captions(data_dir).slice(100, 900)) != expected


def test_texts_of_a_manifest_that_is_used_whole_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_column(tmp_path, "video", num_chunks=20)
    videos = dict.fromkeys(video_ids(0, 2).to_pylist(), "train")
    write_captions(tmp_path, videos, [Caption(name, 0, at, f"{name} {at}") for name in videos for at in range(1, 90)])

    def fail(*_: object) -> None:
        pytest.fail("texts must not be read")

    monkeypatch.setattr("clipmill.train.data.caption_rows.digest_used_texts", fail)
    assert len(open_clips_of(tmp_path)) == 2 * 89


def _remove_texts(folder: Path) -> None:
    (folder / "caption_texts.arrow").unlink()


def _cut_spans(folder: Path) -> None:
    path = folder / "caption_spans.arrow"
    path.write_bytes(path.read_bytes()[:-100])


def _change_a_time(folder: Path) -> None:
    path = folder / "caption_spans.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _blank_texts(folder: Path) -> None:
    path = folder / "caption_texts.arrow"
    path.write_bytes(bytes(path.stat().st_size))


def _exchange(folder: Path) -> None:
    (folder / "caption_texts.arrow").write_bytes((folder / "caption_spans.arrow").read_bytes())


@pytest.mark.parametrize("spoil", [_remove_texts, _cut_spans, _change_a_time, _blank_texts, _exchange])
def test_files_that_cannot_be_used_are_refused_until_the_next_write(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    write_column(tmp_path, "video", num_chunks=20)
    names = video_ids(0, 2).to_pylist()
    captions = [Caption(name, 0, at, f"{name} {at}") for name in names for at in range(1, 90)]
    write_captions(tmp_path, dict.fromkeys(names, "train"), captions)
    expected = open_clips_of(tmp_path).fingerprint
    spoil(manifest_dir(tmp_path))
    with pytest.raises(UserError, match=r"caption_(spans|texts)\.arrow is damaged") as caught:
        open_clips_of(tmp_path)
    assert "prep manifest" in (caught.value.hint or "")
    write_captions(tmp_path, dict.fromkeys(names, "train"), captions)
    assert open_clips_of(tmp_path).fingerprint == expected


def test_captions_that_are_open_stay_those_of_their_manifest(tmp_path: Path) -> None:
    write_column(tmp_path, "video", num_chunks=20)
    names = video_ids(0, 2).to_pylist()
    write_captions(tmp_path, dict.fromkeys(names, "train"), [Caption(names[0], 0, 1, "before")])
    samples = open_clips_of(tmp_path)
    write_captions(
        tmp_path, dict.fromkeys(names, "train"), [Caption(names[0], 0, 1, "now"), Caption(names[1], 0, 1, "x")]
    )
    assert list(samples.captions.all_texts()) == ["before"] and list(open_clips_of(tmp_path).captions.all_texts()) == [
        "now",
        "x",
    ]


def test_spans_are_in_order_and_hold_every_caption(data_dir: Path) -> None:
    files, table = open_stored_captions(data_dir), read_captions(data_dir)
    assert files.sources == ("reader", "writer", "captioner@0a1b2c3d")
    blocks = list(files.blocks())
    assert len(blocks) > 3 and files.texts.num_chunks > 3
    keys: list[tuple[float, ...]] = []
    rows = np.concatenate([block.row for block in blocks])
    assert sorted(rows.tolist()) == list(range(len(table)))
    for block in blocks:
        assert np.array_equal(block.caption_id, table["caption_id"].to_numpy()[block.row])
        keys += list(zip(block.video.tolist(), block.begin_s.tolist(), block.end_s.tolist(), strict=True))
        ends = np.cumsum(block.counts).tolist()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            pairs = list(zip(block.source[begin:end].tolist(), block.row[begin:end].tolist(), strict=True))
            assert pairs == sorted(pairs) and pairs
        names = pa.array(files.sources).take(pa.array(block.source)).to_pylist()
        assert names == table["source"].take(pa.array(block.row)).to_pylist()
    assert keys == sorted(set(keys)), "each span must occur once"
    assert files.texts.to_pylist() == table["text"].to_pylist()
