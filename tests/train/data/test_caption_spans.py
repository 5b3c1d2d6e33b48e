"""Captions opened from the files that `prep` keeps of large manifests: the same as from captions.parquet."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.open_data import video_ids, write_column
from clipmill.manifests import caption_spans
from clipmill.manifests.caption_spans import SPANS_RECORD, open_caption_spans, update_caption_spans
from clipmill.manifests.store import manifest_dir, read_captions
from clipmill.train.config.data import CaptionSettings
from clipmill.train.data import video_captions
from clipmill.train.data.decoding.clip import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.opened_captions import OpenedCaptions
from clipmill.train.data.video_captions import VideoCaptions
from tests.train.latents.written import Written, write_text
from tests.train.tiny_data import Caption, write_captions

NUM_VIDEOS = 40
SHAPE = ClipShape(sampling=Sampling(num_frames=1), size_px=16)
LOADING = LoaderSettings(batch=1, num_threads=1, num_ahead=1, seed=0)
SOURCES = ("writer", "reader", "captioner@0a1b2c3d")


def random_captions(seed: int, *, num_videos: int) -> list[Caption]:
    """Captions of ten chunks of 15 s per video, and some beyond; many share a span, exactly or to the microsecond."""
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
    """Videos without pixels, each in a random one of `splits`, and captions; the last five videos have no chunks."""
    write_column(path, "video", num_chunks=(NUM_VIDEOS - 5) * 10)
    of_video = np.random.default_rng(1).choice(splits, num_videos).tolist()
    names = [video_ids(number, 1)[0].as_py() for number in range(num_videos)]
    captions = random_captions(2, num_videos=num_videos)
    write_captions(path, dict(zip(names, of_video, strict=True)), captions)
    write_text(Written(path), captions, width=4, videos_per_shard=20, without=frozenset(range(0, 3000, 7)))
    return path


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("spans"), ("train", "val"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of any size have the files, in many batches."""
    monkeypatch.setattr(caption_spans, "MIN_CAPTIONS", 1)
    monkeypatch.setattr(caption_spans, "_BATCH", 500)
    monkeypatch.setattr(caption_spans, "_TEXTS", 400)


@pytest.fixture
def made(data_dir: Path, small: None) -> Any:
    assert update_caption_spans(data_dir)
    yield data_dir
    for path in manifest_dir(data_dir).glob("caption_*"):
        path.unlink()


def opened(data_dir: Path, *, split: str = "train", **settings: Any) -> VideoCaptions:
    stored = settings.pop("stored", False)
    where, each = settings.pop("where", None), settings.pop("each_caption", False)
    return VideoCaptions(
        data_dir,
        split=split,
        shape=SHAPE,
        tokenize=None,
        loading=LOADING,
        captions=CaptionSettings(**settings),
        has_stored_text=stored,
        where=where,
        each_caption=each,
    )


def content(samples: VideoCaptions) -> dict[str, Any]:
    """Everything that samples are made of, arrays with their types."""
    found: OpenedCaptions = samples._opened
    left_out = ("rows", "texts", "sources")  # which may refer to other texts, and codes of sources
    values = {one.name: getattr(found, one.name) for one in fields(found) if one.name not in left_out}
    texts = samples.texts(np.arange(len(found.rows)))
    own = {"texts": texts, "line": samples.describe(), "hash": samples.fingerprint}
    return own | _plain({**values, "sources": (found.sources.names, found.sources.weights.tolist())})


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    different = [name for name in expected if found[name] != expected[name]]  # a diff of all values would take minutes
    assert not different and found.keys() == expected.keys()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _plain({one.name: getattr(value, one.name) for one in fields(value)})
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split": "val"},
        {"sources": "writer=2,c*=0.5"},
        {"sources": "writer=1,reader=3"},
        {"stored": True},
        {"where": "begin_s >= 15 and begin_s < 120"},
        {"where": "video != 'video-00000020'", "sources": "reader=1", "stored": True},
        {"where": "words > 1"},
        {"each_caption": True},
    ],
)
def test_samples_are_the_same_with_and_without_the_files(
    data_dir: Path, settings: dict[str, Any], small: None, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    expected = content(opened(data_dir, **settings))
    request.getfixturevalue("made")
    if "words" not in settings.get("where", "") and "each_caption" not in settings:
        monkeypatch.setattr(video_captions, "open_clip_captions", _fail)
    assert_same(content(opened(data_dir, **settings)), expected)
    assert len(expected["texts"]) > 300


def _fail(*_: object, **__: object) -> None:
    pytest.fail("these captions are read from the manifest")


def test_texts_of_a_manifest_that_is_used_whole_are_not_read(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_column(tmp_path, "video", num_chunks=20)
    videos = dict.fromkeys(video_ids(0, 2).to_pylist(), "train")
    write_captions(tmp_path, videos, [Caption(name, 0, at, f"{name} {at}") for name in videos for at in range(1, 90)])
    expected = content(opened(tmp_path))
    assert update_caption_spans(tmp_path)
    monkeypatch.setattr("clipmill.train.data.caption_spans.TextDigest", _fail)
    assert_same(content(opened(tmp_path)), expected)


def _remove_texts(folder: Path) -> None:
    next(folder.glob("caption_texts-*")).unlink()


def _cut_spans(folder: Path) -> None:
    path = next(folder.glob("caption_spans-*"))
    path.write_bytes(path.read_bytes()[:-100])


def _change_a_time(folder: Path) -> None:
    path = next(folder.glob("caption_spans-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _of_another_format(folder: Path) -> None:
    path = folder / SPANS_RECORD
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


@pytest.mark.parametrize(
    ("spoil", "is_said"),
    [(_remove_texts, False), (_cut_spans, False), (_of_another_format, False), (_change_a_time, True)],
)
def test_files_that_cannot_be_used_are_not(
    made: Path, spoil: Callable[[Path], None], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = content(opened(made))
    spoil(manifest_dir(made))
    assert_same(content(opened(made)), expected)
    told = capsys.readouterr().err
    assert ("is damaged: its content differs" in told) == is_said and bool(told) == is_said
    if not is_said:
        assert update_caption_spans(made), "they are written again"
        assert open_caption_spans(made) is not None


def test_files_of_another_manifest_are_not_used(made: Path, tmp_path: Path) -> None:
    before = open_caption_spans(made)
    assert before is not None and not update_caption_spans(made), "they are up to date"
    table = read_captions(made)
    splits = dict.fromkeys(video_ids(0, NUM_VIDEOS).to_pylist(), "train")
    own = tmp_path / "own"
    write_column(own, "video", num_chunks=100)
    write_captions(own, splits, [Caption(row["video_id"], 0.0, 1.0, "one") for row in table.to_pylist()[:50]])
    for path in manifest_dir(made).glob("caption_*"):
        (manifest_dir(own) / path.name).write_bytes(path.read_bytes())
    assert open_caption_spans(own) is None
    assert update_caption_spans(own)
    after = open_caption_spans(own)
    assert after is not None and after.num_captions == 50
    assert len(list(manifest_dir(own).glob("caption_*"))) == 3, "files of other tables are removed"


def test_a_small_manifest_has_no_files(data_dir: Path) -> None:
    assert not update_caption_spans(data_dir)
    assert not list(manifest_dir(data_dir).glob("caption_*"))


def test_spans_are_in_order_and_hold_every_caption(made: Path) -> None:
    files, table = open_caption_spans(made), read_captions(made)
    assert files is not None and files.sources == ("reader", "writer", "captioner@0a1b2c3d")
    blocks = list(files.blocks())
    assert len(blocks) > 3
    keys: list[tuple[float, ...]] = []
    rows = np.concatenate([block.row for block in blocks])
    assert sorted(rows.tolist()) == list(range(len(table)))
    for block in blocks:
        assert np.array_equal(block.caption_id, table["caption_id"].to_numpy()[block.row])
        keys += list(zip(block.video.tolist(), block.begin_s.tolist(), block.end_s.tolist(), strict=True))
        for begin, end in zip(block.first[:-1].tolist(), block.first[1:].tolist(), strict=True):
            own = list(zip(block.source[begin:end].tolist(), block.row[begin:end].tolist(), strict=True))
            assert own == sorted(own) and own
        names = pa.array(files.sources).take(pa.array(block.source)).to_pylist()
        assert names == table["source"].take(pa.array(block.row)).to_pylist()
    assert keys == sorted(set(keys)), "each span once"
    assert files.texts().to_pylist() == table["text"].to_pylist()
