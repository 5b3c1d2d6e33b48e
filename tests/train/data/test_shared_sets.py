"""Large sample sets: opened from merged tables and computed once per machine, with unchanged samples."""

import errno
import gc
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import OPEN_MAPS
from clipmill.manifests.store import read_captions
from clipmill.shards.chunk_table import update_chunk_table
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import Variant
from clipmill.train.data import caption_rows, chunks, data_folder, node_cache
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.classes import ClassList
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.latents import segment_table
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mixed_samples import MixedSamples
from clipmill.train.data.producers import chunk_clips
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.producers.chunk_clips import open_chunk_clips, open_labelled_clips
from clipmill.train.data.producers.latent_segments import open_latent_segments
from tests.train.latents.conftest import CAPTIONS, SHARDS, WITHOUT_EMBEDDING
from tests.train.latents.querying import segments
from tests.train.latents.written import Written, write_all
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

SHAPE = ClipShape(sampling=Sampling(num_frames=2), size_px=16)
LOADING = LoaderSettings(batch=3, num_threads=1, num_ahead=3, seed=5)
VIDEOS = {"a": "train", "b": "train", "c": "val", "d": "train"}
OPEN: dict[str, Callable[[Path], Any]] = {
    "captions": lambda data: open_captioned_clips(ClipQuery(data, split="train", shape=SHAPE, loading=LOADING)),
    "selected": lambda data: open_captioned_clips(
        ClipQuery(data, split="train", shape=SHAPE, loading=LOADING, where="words > 2 and video != 'd'")
    ),
    "chunks": lambda data: open_chunk_clips(
        ClipQuery(data, split="train", shape=SHAPE, loading=LOADING), segment_us=400_000
    ),
    "latents": lambda data: open_latent_segments(segments(data, split="train", captions="none", tails="pad", batch=3)),
    "words": lambda data: open_latent_segments(segments(data, split="train", captions="words", batch=3)),
    "stored": lambda data: open_latent_segments(segments(data, split="train", batch=3)),
}
OF_VIDEO = ("captions", "selected", "chunks")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four videos in three shards, whose order is not the order of the videos; two of the captions share a span."""
    data = tmp_path_factory.mktemp("videos")
    for shard_id, names in enumerate(("db", "c", "a")):
        samples = [sample for name in names for sample in chunks_of(name, 30)]
        write_shard(data, shard_id, samples, split=VIDEOS[names[0]])
    captions = [Caption(name, begin, begin + 1.0, f"{name} at {begin}") for name in "dbca" for begin in (0.0, 0.3)]
    write_captions(data, VIDEOS, [*captions, Caption("a", 0.0, 1.0, "a once more")])
    return data


@pytest.fixture(scope="module")
def written_data(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Latents and embeddings of five videos in three shards."""
    return write_all(tmp_path_factory.mktemp("latents"), SHARDS, CAPTIONS, without=WITHOUT_EMBEDDING)


@pytest.fixture
def shared_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache folder through which sets of any size are shared."""
    monkeypatch.setattr(node_cache, "MIN_ROWS", 0)
    monkeypatch.setattr(node_cache, "_chosen_folder", tmp_path / "cache")
    return tmp_path / "cache"


def with_tables(data: Path) -> None:
    for column in ("video", "latents", "text"):
        if (data / column).is_dir():
            assert update_chunk_table(Variant.open(data, column=column), column=column)


def without_tables(data: Path) -> None:
    for path in data.glob(f"*/*/{CHUNKS_FILE}"):
        path.unlink()


def first_batches(samples: Any) -> list[Any]:
    """Return the fingerprint, description and first batches of a set."""
    contents = [samples.fingerprint, samples.describe(), samples.num_samples]
    for loaded in islice(samples.batches(position=0, max_failures=0), 5):
        values = {name: list(value) if name == "key" else np.asarray(value) for name, value in loaded.batch.items()}
        values["time_s"] = np.nan_to_num(values["time_s"], nan=-1)  # padding is NaN, which is not equal to itself
        contents.append({name: np.asarray(value).tolist() for name, value in values.items() if name != "input"})
    return contents


@pytest.mark.parametrize("name", OPEN)
def test_a_set_is_the_same_from_tables_and_from_the_cache(
    name: str, videos: Path, written_data: Written, shared_by_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = videos if name in OF_VIDEO else written_data.data_dir
    monkeypatch.setattr(node_cache, "MIN_ROWS", 1 << 40)
    expected = first_batches(OPEN[name](data))
    assert not shared_by_all.exists()
    try:
        with_tables(data)
        assert first_batches(OPEN[name](data)) == expected
        monkeypatch.setattr(node_cache, "MIN_ROWS", 0)
        monkeypatch.setattr(node_cache, "SCRATCH_BYTES", 1)  # caption results are collected in files
        assert first_batches(OPEN[name](data)) == expected
        assert list(shared_by_all.rglob("*"))

        def fail(*_: object, **__: object) -> None:
            pytest.fail("another rank has already computed this")

        for module, function in (
            (chunks, "_open_chunks"),
            ("clipmill.train.data.producers.captioned_clips", "make_clip_table"),
            ("clipmill.train.data.producers.chunk_clips", "_make_chunk_table"),
            ("clipmill.train.data.latents.segment_table", "read_records"),
            ("clipmill.train.data.producers.latent_segments", "make_segment_table"),
        ):
            target = module if isinstance(module, str) else module.__name__
            monkeypatch.setattr(f"{target}.{function}", fail)
        assert first_batches(OPEN[name](data)) == expected
    finally:
        without_tables(data)


@pytest.mark.usefixtures("shared_by_all")
def test_labels_are_shared_and_other_classes_are_other_samples(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read_captions(videos)
    labelled = table.append_column("label_kind", pa.array([str(number % 3) for number in range(len(table))]))
    monkeypatch.setattr("clipmill.train.data.producers.chunk_clips.read_captions", lambda _: labelled)

    def facts_of_clips(names: str) -> list[Any]:
        classes = ClassList("kind", tuple(names))
        samples = open_labelled_clips(ClipQuery(videos, split="train", shape=SHAPE, loading=LOADING), classes=[classes])
        return [samples.fingerprint, samples.describe(), samples.labels.tolist(), samples.video.tolist()]

    monkeypatch.setattr(node_cache, "MIN_ROWS", 1 << 40)
    expected = facts_of_clips("012")
    monkeypatch.setattr(node_cache, "MIN_ROWS", 0)
    assert facts_of_clips("012") == facts_of_clips("012") == expected
    assert facts_of_clips("01") != expected


@pytest.mark.usefixtures("shared_by_all")
def test_data_that_changed_is_computed_again(videos: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(videos, tmp_path / "own"))
    before = OPEN["captions"](copy)
    write_captions(copy, VIDEOS, [Caption("a", 0.0, 1.0, "other words")])
    after = OPEN["captions"](copy)
    assert before.fingerprint != after.fingerprint and after.captions.texts(np.array([0])) == ["other words"]


@pytest.mark.usefixtures("shared_by_all")
def test_a_mixture_of_shared_sets_copies_the_bytes_of_each(
    written_data: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_mixture() -> list[Any]:
        sets = [OPEN["stored"](written_data.data_dir) for _ in range(2)]
        return first_batches(MixedSamples(sets, ["one", "two"], weights=None))

    monkeypatch.setattr(node_cache, "MIN_ROWS", 1 << 40)
    expected = open_mixture()
    monkeypatch.setattr(node_cache, "MIN_ROWS", 0)
    assert open_mixture() == expected and open_mixture() == expected


def open_held(compute: Callable[[], Any], of: object = 0) -> Any:
    return node_cache.open_shared(compute, depends_on=[of], num_rows=1, types=())


@pytest.mark.usefixtures("shared_by_all")
def test_of_two_ranks_one_computes() -> None:
    counts, arrays = [], []

    def compute() -> Any:
        counts.append(1)
        time.sleep(0.2)
        return np.arange(5)

    ranks = [threading.Thread(target=lambda: arrays.append(open_held(compute))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(counts) == 1 and [array.tolist() for array in arrays] == [[0, 1, 2, 3, 4]] * 4


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_of_the_cache_is_made_again(shared_by_all: Path, damage: bytes | None) -> None:
    open_held(lambda: np.arange(1000))
    (path,) = (path for path in shared_by_all.rglob("set-*"))
    path.write_bytes(path.read_bytes()[:-64] if damage is None else damage)
    assert open_held(lambda: np.arange(1000) + 1).tolist() == list(range(1, 1001))


def test_a_flipped_bit_is_noticed_and_the_table_made_again(
    videos: Path, shared_by_all: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flipped bits, one in each tenth of the file, hit numbers, texts and the structure."""
    expected = first_batches(OPEN["captions"](videos))
    (path,) = shared_by_all.rglob("captions-*")
    whole = path.read_bytes()
    for number in range(10):
        content = bytearray(whole)
        content[len(content) * number // 10 + 3] ^= 1 << number % 8
        path.write_bytes(content)
        assert first_batches(OPEN["captions"](videos)) == expected
        assert f"{path} is damaged and will be rebuilt" in capsys.readouterr().err
        assert path.read_bytes() == whole
    assert first_batches(OPEN["captions"](videos)) == expected and not capsys.readouterr().err


def test_a_table_is_an_arrow_file_whose_columns_have_names_and_types(videos: Path, shared_by_all: Path) -> None:
    samples = OPEN["captions"](videos)
    (path,) = shared_by_all.rglob("captions-*")
    batch = pa.ipc.open_file(pa.BufferReader(path.read_bytes()[:-4])).get_batch(0)
    columns = {name: batch.column(name).flatten() for name in batch.schema.names}
    assert columns["begin_us"].type == pa.int64() and columns["begin_us"].to_pylist() == [0, 300_000] * 3
    assert columns["captions.caption_id"].to_pylist() == samples.table.captions.caption_id.tolist()


@pytest.mark.parametrize("name", ["captions", "chunks", "words"])
def test_a_manifest_that_changes_while_a_table_is_made_is_refused(
    name: str, videos: Path, written_data: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(shutil.copytree(videos if name in OF_VIDEO else written_data.data_dir, tmp_path / "data"))
    module, function = {"captions": (caption_rows, "clips_of"), "chunks": (chunk_clips, "_spans")}.get(
        name, (segment_table, "divide")
    )
    compute = getattr(module, function)

    def change(*values: Any, **more: Any) -> Any:
        write_captions(data, {**VIDEOS, "e": "train"}, [Caption("a", 0.0, 1.0, "other words")])
        return compute(*values, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, change)
        with pytest.raises(UserError, match="was replaced while it was read"):
            OPEN[name](data)


def test_a_cache_that_cannot_be_written_costs_time_and_is_said(
    shared_by_all: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(node_cache, "_write", full)
        assert open_held(lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert "No space left" in capsys.readouterr().err
    assert not list(shared_by_all.rglob("set-*")) and not list(shared_by_all.rglob("*.tmp*"))
    monkeypatch.setattr(node_cache, "_chosen_folder", Path("/dev/null/cache"))
    assert open_held(lambda: np.arange(3)).tolist() == [0, 1, 2]
    assert "each rank computes its own copy" in capsys.readouterr().err

    def raise_missing() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "an index")

    with pytest.raises(FileNotFoundError, match="an index"):  # a data error, not a cache error
        open_held(raise_missing, of=1)


@pytest.mark.usefixtures("shared_by_all")
def test_the_cache_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "_MAX_BYTES", 20_000)
    kept = [open_held(partial(np.full, 1000, number), of=number) for number in range(2)]
    time.sleep(0.02)
    open_held(lambda: pytest.fail("the value is cached"), of=0)
    open_held(lambda: np.full(1000, 2), of=2)
    open_held(lambda: pytest.fail("the value is cached"), of=0)
    assert open_held(lambda: np.full(1000, 9), of=1)[0] == 9, "the least recently used value must be deleted"
    assert kept[1][0] == 1, "a process that maps a value keeps it"


def test_ids_are_looked_up_once_not_shard_by_shard(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    look_up = data_folder.index_in

    def count_lookup(values: pa.Array, among: pa.Array) -> Any:
        calls.append(len(among))
        return look_up(values, among)

    monkeypatch.setattr(data_folder, "index_in", count_lookup)
    OPEN["chunks"](videos)
    assert len(calls) == 1


def leave_alone_what_stays() -> None:
    """Free the maps that other tests left, and freeze the other objects.

    The garbage collector then does not visit them again, which takes a second each time.
    """
    gc.collect()
    gc.freeze()


def test_indexes_beyond_the_limit_are_unmapped(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_alone_what_stays()
    expected = first_batches(OPEN["captions"](videos))
    monkeypatch.setattr(OPEN_MAPS, "limit", 1)
    shards = Variant.open(videos).shards()
    keys = [shard.index["key"].to_pylist() for shard in shards]
    del shards
    samples = OPEN["captions"](videos)
    assert first_batches(samples) == expected
    assert len(OPEN_MAPS) == 1 and sum(map(len, keys)) == Variant.open(videos).num_samples
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped_splits = {line.split()[-1] for line in maps if str(videos) in line and line.endswith(".index.arrow")}
    assert len(mapped_splits) <= 2, "the index in use, and the previous one until its last user has finished"


def test_tars_beyond_the_limit_are_mapped_when_needed(written_data: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: first_batches(OPEN[name](written_data.data_dir)) for name in ("latents", "stored")}
    leave_alone_what_stays()
    monkeypatch.setattr(OPEN_MAPS, "limit", 2)

    def num_mapped() -> int:
        return len(re.findall(f"{written_data.data_dir}/.*[.]tar$", Path("/proc/self/maps").read_text(), re.MULTILINE))

    for name, expected_batches in expected.items():
        samples = OPEN[name](written_data.data_dir)
        assert not num_mapped(), "opening must not map a tar"
        assert [first_batches(samples) for _ in range(3)] == [expected_batches] * 3
        gc.collect()
        assert 0 < num_mapped() <= 2 and len(OPEN_MAPS) <= 2, "more tars are mapped only while a batch needs them"
        del samples
        gc.collect()


def test_a_tar_that_is_gone_after_opening_fails_its_samples(tmp_path: Path) -> None:
    data_written = write_all(tmp_path / "data", SHARDS, CAPTIONS)
    samples = open_latent_segments(
        segments(data_written.data_dir, split="train", captions="none", batch=2, can_keep=True)
    )
    gone = Variant.open(data_written.data_dir, column="latents").shards()[0].tar_path
    gone.unlink()
    batches = list(samples.evaluation_batches())
    failed = {failure.key[0] for loaded in batches for failure in loaded.failed}
    assert failed == {"a", "b"} and {failure.reason for batch in batches for failure in batch.failed} == {
        "shard_unreadable"
    }
    assert {key[0] for loaded in batches if loaded.batch for key in loaded.batch["key"]} == {"c", "e"}
    with pytest.raises(UserError, match="cannot be used"):
        open_latent_segments(segments(data_written.data_dir, split="train", captions="none"))
