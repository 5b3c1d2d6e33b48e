"""Images in tars as samples: order, captions, classes, ids, ranks, resumption, repeats, failures, remote tars."""

import gzip
import json
import shutil
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.shards import kind_of
from clipmill.train.data import node_cache
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.classes import ClassList
from clipmill.train.data.clip_frames import ClipShape, Views
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.image_tars import ImageQuery, class_names_of_images, names_images
from clipmill.train.data.loader import LoaderSettings, SampleRequest
from clipmill.train.data.mixed_samples import MixedSamples
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.producers.tar_images import open_tar_images
from clipmill.train.data.samples import Samples
from tests.train.data.http_folder import HttpFolder
from tests.train.images.tars import COLOURS, encode_image, picture, sample, write_tar, write_tars

SHAPE = ClipShape(sampling=Sampling(num_frames=1), size_px=16)
CLASSES = ClassList("class", ("0", "1", "2"))


def query(pattern: object, *, shape: ClipShape = SHAPE, cache: Path | None = None, **loading: Any) -> ImageQuery:
    settings = LoaderSettings(**{"batch": 4, "num_threads": 2, "num_ahead": 8, "seed": 1, **loading})
    return ImageQuery(str(pattern), shape, settings, cache=cache)


def open_images(
    pattern: object, *, cache: Path | None = None, shape: ClipShape = SHAPE, **loading: Any
) -> Samples[Any]:
    return open_tar_images(query(pattern, shape=shape, cache=cache, **loading), has_captions=True)


def take_batches(samples: Samples[Any] | MixedSamples, num_batches: int, **begin: Any) -> list[LoadedBatch]:
    batches = samples.batches(max_failures=0, **begin)
    copies = [
        LoadedBatch(
            {**loaded_batch.batch, "video": loaded_batch.batch["video"].clone()},
            loaded_batch.failed,
            loaded_batch.cursor,
        )
        for loaded_batch in islice(batches, num_batches)
    ]
    batches.close()
    return copies


def of_batches(batches: list[LoadedBatch], name: str) -> list[Any]:
    return [value for loaded_batch in batches for value in loaded_batch.batch[name]]  # type: ignore[literal-required]


def load_sample(samples: Samples[Any], number: int, *, seed: int | None = None) -> Any:
    [sample_read] = samples.reader.load([SampleRequest(number, number, seed)])
    return sample_read


def test_an_epoch_has_every_image_once_with_its_own_caption_and_id(tars: str) -> None:
    samples = open_images(tars, batch=6)
    epoch = take_batches(samples, 3)
    ids = [int(clip_id) for clip_id in of_batches(epoch, "clip_id")]
    assert sorted(ids) == list(range(18)) and ids != sorted(ids)
    assert samples.num_clips == samples.num_caption_ids == samples.num_samples == 18
    for number, caption, key in zip(ids, of_batches(epoch, "caption"), of_batches(epoch, "key"), strict=True):
        assert caption == f"a {COLOURS[number % 3]} picture {number}" == samples.text(number)
        assert key == f"{number // 6:05d}.tar/{number:09d}" == samples.key(number)
    assert [int(caption_id) for caption_id in of_batches(epoch, "caption_id")] == ids


def test_the_picture_shown_is_the_one_of_the_caption(tars: str) -> None:
    samples = open_images(tars)
    for number in range(18):
        [shown] = samples.shown_frames(number, num_frames=1)
        assert shown.shape == (16, 16, 3) and int(shown.mean((0, 1)).argmax()) == number % 3


def test_crops_depend_on_seed_and_position_alone(tars: str) -> None:
    samples, other = open_images(tars), open_images(tars, num_threads=1, batch=2)
    once, again = take_batches(samples, 4), take_batches(other, 8)
    assert of_batches(once, "key") == of_batches(again, "key")
    pairs = zip(of_batches(once, "video"), of_batches(again, "video"), strict=True)
    assert all(bool((first == two).all()) for first, two in pairs)
    [first], [two] = (samples.reader.load([SampleRequest(0, 0, seed)]) for seed in (1, 2))
    assert not isinstance(first, FailedSample) and not isinstance(two, FailedSample)
    assert not np.array_equal(first["video"], two["video"])


def test_a_loader_goes_on_after_its_state_on_another_number_of_ranks(tars: str, tmp_path: Path) -> None:
    whole = open_images(tars)
    expected_ids = of_batches(take_batches(whole, 9), "clip_id")
    begun = open_images(tars)
    take_batches(begun, 3)
    state = begun.state_dict()
    # Moved tars have the same samples.
    shutil.copytree(Path(tars).parent, tmp_path / "moved")
    ranks = [open_images(tmp_path / "moved" / Path(tars).name, batch=2, rank=rank, num_ranks=2) for rank in range(2)]
    rest = []
    for samples in ranks:
        samples.load_state_dict(state)
        rest.append(of_batches(take_batches(samples, 6), "clip_id"))
    assert [int(clip_id) for pair in zip(*rest, strict=True) for clip_id in pair] == [
        int(clip_id) for clip_id in expected_ids[12:]
    ]


def test_a_state_of_other_images_or_captions_is_refused(tars: str, tmp_path: Path) -> None:
    state = open_images(tars).state_dict()
    shutil.copytree(Path(tars).parent, tmp_path / "swapped")
    for source, other in (("00000", "first"), ("00001", "00000"), ("first", "00001")):
        (tmp_path / f"swapped/{source}.tar").rename(tmp_path / f"swapped/{other}.tar")
    with pytest.raises(UserError, match="other samples"):
        open_images(tmp_path / "swapped" / Path(tars).name).load_state_dict(state)
    words = [(f"{number:09d}", {**sample(number), "txt": b"said otherwise"}) for number in range(6)]
    shutil.copytree(Path(tars).parent, tmp_path / "changed")
    write_tar(tmp_path / "changed/00000.tar", words)
    with pytest.raises(UserError, match="caption texts or sources have changed"):
        open_images(tmp_path / "changed" / Path(tars).name).load_state_dict(state)


def test_classes_are_those_of_the_cls_members(tars: str) -> None:
    samples = open_tar_images(query(tars), classes=CLASSES)
    assert samples.labels.tolist() == [number % 3 for number in range(18)]
    batch = take_batches(samples, 1)[0].batch
    assert batch["label"].tolist() == [number % 3 for number in batch["clip_id"].tolist()]
    some = open_tar_images(query(tars), classes=ClassList("class", ("0", "2")))
    assert some.labels.tolist() == [0, 1] * 6 and len(some) == 12
    assert [load_sample(some, number)["label"] for number in range(12)] == [0, 1] * 6
    assert "6 with none of the classes (the first: 00000.tar/000000001)" in some.describe()


def test_other_labels_are_keys_of_json(tmp_path: Path) -> None:
    values: list[object] = ["dog", 7, None, ["dog"], True, " dog "]
    json_texts = [json.dumps({"noun": value}).encode() for value in values] + [b"{}", b"[", None]
    samples = [{**sample(1), **({} if label_json is None else {"json": label_json})} for label_json in json_texts]
    pattern = str(
        write_tar(tmp_path / "0.tar", ((str(number), tar_sample) for number, tar_sample in enumerate(samples)))
    )
    assert class_names_of_images(pattern, label="noun", cache=None, cache_size=None) == {"dog", "7"}
    tar_images = open_tar_images(query(pattern), classes=ClassList("noun", ("7", "dog")))
    assert tar_images.labels.tolist() == [1, 0, 1]
    assert [tar_images.key(number) for number in range(3)] == ["0.tar/0", "0.tar/1", "0.tar/5"]
    assert "1 with an unreadable txt or json (the first: 0.tar/7)" in tar_images.describe()


def test_an_image_fills_all_frames_of_its_clip_and_all_views(tars: str) -> None:
    views = Views(num_clips=2, num_crops=3)
    samples = open_images(tars, shape=ClipShape(sampling=Sampling(num_frames=4), size_px=16, views=views))
    video = load_sample(samples, 5)["video"].reshape(2, 3, 4, -1)
    assert (video == video[:1, :, :1]).all() and not np.array_equal(video[0, 0], video[0, 2])
    assert "each image repeated in 4 frames" in samples.describe()


def test_repeats_of_an_image_follow_one_another_with_crops_of_their_own(tars: str) -> None:
    samples = open_tar_images(query(tars, batch=6, group=3), repeats=3)
    batch = take_batches(samples, 1)[0].batch
    assert len(samples) == 54 and len(set(batch["clip_id"][:3].tolist())) == 1
    assert not bool((batch["video"][0] == batch["video"][1]).all())
    assert sorted(of_batches(take_batches(samples, 9, position=0), "clip_id")) == sorted(3 * list(range(18)))


def hostile() -> Iterator[tuple[str, dict[str, bytes]]]:
    good = encode_image(picture(0))
    yield "good", {"jpg": good, "txt": b"good"}
    yield "cut", {"jpg": good[: len(good) // 2], "txt": b"cut"}
    yield "png-as-jpg", {"jpg": encode_image(picture(1), "PNG"), "txt": b"png"}
    yield "gif", {"jpg": encode_image(picture(1), "GIF"), "txt": b"gif"}
    yield "surrogate", {"jpg": good, "json": b'{"caption": "\\ud83d broken"}'}
    yield "silent", {"jpg": good, "txt": b" "}
    yield "bad-json", {"jpg": good, "json": b"{"}
    yield "latin-1", {"jpg": good, "txt": "café".encode("latin-1")}
    yield "words", {"txt": b"no image"}
    yield "large", {"jpg": good, "txt": b"x" * (9 << 20)}
    yield "several", {"png": encode_image(picture(2), "PNG"), "jpg": good, "txt": b"jpg comes first"}


def test_what_cannot_be_shown_is_counted_and_what_fails_is_named(tmp_path: Path) -> None:
    samples = open_images(write_tar(tmp_path / "hostile.tar", hostile()))
    assert samples.describe().startswith(f"6 images of {tmp_path}/hostile.tar; ")
    for reason in (
        "2 with an unreadable txt or json (the first: hostile.tar/bad-json)",
        "1 without an image (the first: hostile.tar/words)",
        "1 without caption (the first: hostile.tar/silent)",
        "1 unreadable (the first: hostile.tar/large, large.txt has 9,437,184 bytes",
    ):
        assert reason in samples.describe()
    samples_read = [load_sample(samples, number) for number in range(6)]
    failed = [outcome for outcome in samples_read if isinstance(outcome, FailedSample)]
    assert [(failure.key, failure.reason) for failure in failed] == [
        ("hostile.tar/cut", "undecodable"),
        ("hostile.tar/gif", "undecodable"),
    ]
    assert "truncated" in failed[0].detail and "neither JPEG, PNG nor WebP" in failed[1].detail
    assert [outcome["caption"] for outcome in samples_read if not isinstance(outcome, FailedSample)] == [
        *("good", "png", "? broken", "jpg comes first")
    ]
    assert np.array_equal(samples_read[5]["video"], samples_read[0]["video"])


def test_a_tar_that_is_cut_says_so_and_shows_what_came_before(tmp_path: Path) -> None:
    write_tars(tmp_path, num_tars=2)
    content = (tmp_path / "00001.tar").read_bytes()
    (tmp_path / "00001.tar").write_bytes(content[: len(content) // 2])
    samples = open_images(tmp_path / "{00000..00001}.tar")
    assert 6 < len(samples) < 12
    assert f"1 tar not read to the end; the first is {tmp_path}/00001.tar: " in samples.describe()
    # The tar is truncated further after it was indexed.
    (tmp_path / "00001.tar").write_bytes(content[:2000])
    failed = load_sample(samples, len(samples) - 1)
    assert isinstance(failed, FailedSample) and failed.reason == "shard_unreadable"
    assert str(tmp_path / "00001.tar") in failed.detail


def test_videos_among_images_and_compressed_tars_are_errors(tmp_path: Path) -> None:
    video = ("v", {"mp4": b"", "txt": b"a video"})
    write_tars(tmp_path, num_tars=1)
    write_tar(tmp_path / "00001.tar", [("i", sample(0)), video])
    with pytest.raises(
        UserError, match=r"00001\.tar contains a video, v, but the first sample of .*00000.tar is an image"
    ):
        open_images(tmp_path / "{00000..00001}.tar")
    write_tar(tmp_path / "videos.tar", [("words", {"txt": b""}), video])
    assert not names_images(str(tmp_path / "videos.tar"), cache=None, cache_size=None)
    assert kind_of(str(tmp_path)).has_manifest, "a folder is not a pattern of tars"
    (tmp_path / "packed.tar").write_bytes(gzip.compress((tmp_path / "00000.tar").read_bytes()))
    with pytest.raises(UserError, match=r"packed\.tar is compressed"):
        open_images(tmp_path / "packed.tar")
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    (tmp_path / "cut.tar").write_bytes(b"")
    for first in ("empty", "cut"):
        pattern = f"{tmp_path}/{{{first},00000}}.tar"
        assert names_images(pattern, cache=None, cache_size=None), "the first tar that has samples decides"
    with pytest.raises(UserError, match="no image is usable"):
        open_images(tmp_path / "empty.tar")


def test_a_large_index_is_made_once_and_again_if_the_tar_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_cache, "MIN_ROWS", 0)
    monkeypatch.setattr(node_cache, "_chosen_folder", None)
    pattern, cache = write_tars(tmp_path / "tars", num_tars=2), tmp_path / "cache"
    first = open_images(pattern, cache=cache)
    made = {path: path.stat().st_ino for path in (cache / "opened").glob("images-*")}
    again = open_images(pattern, cache=cache)
    assert len(made) == 2 and {path: path.stat().st_ino for path in made} == made
    assert again.fingerprint == first.fingerprint and again.text(7) == first.text(7)
    assert np.array_equal(load_sample(again, 7)["video"], load_sample(first, 7)["video"])
    write_tar(tmp_path / "tars/00001.tar", [("new", sample(9))])
    assert len(open_images(pattern, cache=cache)) == 7


def test_remote_images_are_the_local_ones_from_the_cache_and_by_range(
    tars: str, tmp_path: Path, few_retries: None
) -> None:
    shutil.copytree(Path(tars).parent, tmp_path / "tars")
    server, cache, local = HttpFolder(tmp_path / "tars"), tmp_path / "cache", open_images(tars)
    try:
        remote = open_images(f"{server.address}/{Path(tars).name}", cache=cache)
        assert remote.fingerprint == local.fingerprint
        fetched = server.num_bytes.total()
        expected = take_batches(local, 5)
        assert of_batches(take_batches(remote, 5), "key") == of_batches(expected, "key")
        assert server.num_bytes.total() == fetched  # read from the cached copies
        for path in (cache / "objects").iterdir():
            path.unlink()
        remote_batches = take_batches(remote, 5, position=0)
        assert fetched < server.num_bytes.total() < 2 * fetched
        assert of_batches(remote_batches, "key") == of_batches(expected, "key")
        pairs = zip(of_batches(remote_batches, "video"), of_batches(expected, "video"), strict=True)
        assert all(bool((first == two).all()) for first, two in pairs)
    finally:
        server.close()
    failed = load_sample(remote, 0)
    assert isinstance(failed, FailedSample) and failed.reason == "shard_unreadable"


def test_images_are_mixed_with_the_clips_of_a_data_folder(tars: str, data_dir: Path) -> None:
    shape = ClipShape(sampling=Sampling(num_frames=2), size_px=16)
    loading = LoaderSettings(batch=6, num_threads=2, num_ahead=8, seed=1)

    def mixture() -> MixedSamples:
        clips = open_captioned_clips(ClipQuery(data_dir, split="train", shape=shape, loading=loading))
        images = open_tar_images(ImageQuery(tars, shape, loading), has_captions=True)
        return MixedSamples([clips, images], [str(data_dir), tars], weights=[Fraction(1), Fraction(2)])

    mixed = mixture()
    batches = take_batches(mixed, 6)
    num_clips = mixed.first.num_clips
    assert mixed.num_clips == num_clips + 18 and mixed.num_caption_ids == mixed.first.num_caption_ids + 18
    for loaded_batch in batches:
        is_image = loaded_batch.batch["clip_id"] >= num_clips
        assert int(is_image.sum()) == 4  # the weights give images four of the six places
        video = loaded_batch.batch["video"]
        assert bool((video[is_image][:, 0] == video[is_image][:, 1]).all())
        keys = np.array(loaded_batch.batch["key"])[is_image.numpy()]
        assert [int(key.partition("/")[2]) for key in keys] == (
            loaded_batch.batch["clip_id"][is_image] - num_clips
        ).tolist()
    again = mixture()
    again.load_state_dict(_after(mixture(), 3))
    assert of_batches(take_batches(again, 3), "key") == of_batches(batches[3:], "key")


def _after(samples: MixedSamples, num_batches: int) -> Any:
    take_batches(samples, num_batches)
    return samples.state_dict()
