"""`--where` on sample sets: which clips it keeps, and what the description says about them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.reader import Variant
from clipmill.shards.scores import CHUNKS_FILE, publish_score_table
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.interface import open_clips
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.captioned_clips import open_captioned_clips
from clipmill.train.data.producers.chunk_clips import open_chunk_clips
from clipmill.train.data.remote import RemoteTars
from clipmill.train.data.samples import Samples
from tests.shards.made_scores import VARIANT, phash, write_scores
from tests.train.data.http_folder import HttpFolder

SHAPE = ClipShape(sampling=Sampling(num_frames=1), size_px=32)
LOADING = LoaderSettings(batch=2, num_threads=1, num_ahead=2, seed=0)
# Videos a, b and c (train) and d (val) have chunks of 2, 2 and 1.5 s. Each video has a caption in the first chunk, one
# across the first two chunks, and one across the last two.
MOTION = {
    **{f"a_00000{start}000": motion for start, motion in ((0, 0.9), (2, 0.1), (4, 0.9))},
    **{f"b_00000{start}000": motion for start, motion in ((0, 0.9), (2, 0.9), (4, 0.9))},
    **{f"c_00000{start}000": motion for start, motion in ((0, 0.1), (2, None), (4, 0.9))},
    **{f"d_00000{start}000": motion for start, motion in ((0, 0.1), (2, 0.1), (4, 0.1))},
}


@pytest.fixture(scope="module")
def scored_data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the other tests, with scores."""
    copy = tmp_path_factory.mktemp("scored") / "data"
    shutil.copytree(data_dir, copy)
    hashes = {key: phash(number) for number, key in enumerate(MOTION)}
    hashes["b_000002000"] = hashes["a_000000000"]
    write_scores(copy, {key: {"motion": motion, "phash": hashes[key]} for key, motion in MOTION.items()})
    return copy


def captioned_clips(folder: Path, where: str | None, *, tars: RemoteTars | None = None, **how: Any) -> Samples[Any]:
    query = ClipQuery(folder, split="train", shape=SHAPE, loading=LOADING, where=where, tars=tars)
    return open_captioned_clips(query, tokenize=None, **how)


def keys_and_texts(samples: Samples[Any]) -> list[str]:
    return [f"{samples.key(n)[0]} {samples.text(n)}" for n in range(len(samples))]


def test_a_clip_is_kept_if_all_chunks_that_it_touches_are(scored_data: Path) -> None:
    samples = captioned_clips(scored_data, "motion > 0.5")
    begins = {samples.key(n) + f" {samples.span_s(n)[0]}" for n in range(len(samples))}
    # The second and third captions of a overlap a slow chunk. All chunks of c except the last are slow or have no
    # score.
    assert begins == {
        "a_000000000 0.0",
        "b_000000000 0.0",
        "b_000000000 1.2",
        "b_000002000 3.0",
    }
    described = samples.describe()
    assert "4 of 9 captions of split 'train'" in described
    assert "5 not selected" in described
    assert "where motion > 0.5: 6 of 9 chunks selected" in described


def test_captions_are_selected_by_their_own_fields(scored_data: Path) -> None:
    samples = captioned_clips(scored_data, "words >= 4 and 'middle' in text and source == 'test'")
    assert keys_and_texts(samples) == ["a the middle of a", "b the middle of b", "c the middle of c"]
    assert "9 of 9 chunks and 3 of 9 captions selected" in samples.describe()
    both = captioned_clips(scored_data, "motion > 0.5 and words >= 4")
    assert {both.text(n) for n in range(len(both))} == {"the middle of b", "the end of b"}
    # Without a likelihood column, all likelihoods are null.
    assert len(captioned_clips(scored_data, "likelihood is null or likelihood > -1")) == 9


def test_duplicates_and_fields_of_videos_and_chunks(scored_data: Path) -> None:
    assert keys_and_texts(captioned_clips(scored_data, "not duplicate and video == 'b'")) == ["b it begins"]
    assert len(captioned_clips(scored_data, "video in ('a', 'c') and num_captions == 3 and dataset == 'test'")) == 6
    assert len(captioned_clips(scored_data, "begin_s < 1 and width == 64 and height == 64 and duration_s == 2")) == 3


def test_whole_chunks_are_kept_by_their_own_scores(scored_data: Path) -> None:
    def chunks(where: str | None) -> Samples[Any]:
        return open_chunk_clips(ClipQuery(scored_data, split="train", shape=SHAPE, loading=LOADING, where=where))

    samples = chunks("motion > 0.5")
    kept = {key for key, motion in MOTION.items() if (motion or 0) > 0.5}
    assert {samples.key(n) for n in range(len(samples))} == kept
    assert samples.describe().startswith("6 chunks of 3 videos of split 'train'; where motion > 0.5: 6 of 9 chunks")
    assert len({chunks(where).fingerprint for where in (None, "motion > 0.5", "motion >= 0.5")}) == 3
    assert chunks(" motion > 0.5 ").fingerprint == samples.fingerprint
    with pytest.raises(UserError, match=r"--where uses words, but these samples have no captions"):
        chunks("motion > 0.5 and words > 3")


def test_the_expression_is_part_of_the_fingerprint(scored_data: Path, data_dir: Path) -> None:
    # Both expressions select the same clips.
    first, other = (captioned_clips(scored_data, where).fingerprint for where in ("motion > 0.5", "motion > 0.6"))
    assert first != other
    assert captioned_clips(scored_data, None).fingerprint == captioned_clips(data_dir, None).fingerprint


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("motion > 5", r"'motion > 5' selects none of the 9 chunks of split 'train'"),
        ("words > 50", r"'words > 50' selects none of the 9 captions of split 'train'"),
        ("begin_s > 3 and 'begins' in text", r"no clip of split 'train' is usable.* 9 not selected; where"),
        ("motoin > 5", "there is no name motoin"),
        ("motion > 0.2 or words > 3", "mixes fields of chunks"),
    ],
)
def test_what_selects_nothing_is_an_error(scored_data: Path, where: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        captioned_clips(scored_data, where)


def test_an_expression_without_scores_needs_no_scores(data_dir: Path) -> None:
    assert len(captioned_clips(data_dir, "begin_s < 1 and words >= 2")) == 3
    with pytest.raises(UserError, match="has no scores shards"):
        captioned_clips(data_dir, "motion > 0.5")


def test_chunks_without_scores_are_counted(scored_data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(scored_data, copy)
    some = {key: {"motion": 1.0} for key in MOTION if key[0] != "b"}
    write_scores(copy, some, failed=["b_000000000"])
    with pytest.raises(UserError, match="--where uses scores, which 2 chunks of 9 lack") as error:
        captioned_clips(copy, "motion > 0.5")
    assert f"run prep status --data {copy} for the command" in str(error.value.hint)
    assert len(captioned_clips(copy, "begin_s < 3")) > 0
    # The scores of a chunk that failed are null.
    directory = write_scores(copy, {**some, "b_000002000": {}, "b_000004000": {"motion": 1.0}}, failed=["b_000000000"])
    samples = captioned_clips(copy, "motion > 0.5")
    assert "7 of 9 chunks selected" in samples.describe()
    publish_score_table(Variant(directory))


def test_open_clips_selects(scored_data: Path) -> None:
    batches = open_clips(scored_data, where="motion > 0.5", shuffle=False, batch=4, num_frames=1, size_px=32)
    assert sorted(key for batch in batches for key in batch["key"]) == [
        *["a_000000000", "b_000000000", "b_000000000", "b_000002000"]
    ]
    with pytest.raises(UserError, match="names image tars or video tars, which have no scores"):
        open_clips("tars/{000..001}.tar", where="motion > 0.5")


def test_a_remote_folder_selects_as_a_local_one_and_copies_its_scores_once(scored_data: Path, tmp_path: Path) -> None:
    server = HttpFolder(scored_data)
    table = f"/scores/{VARIANT}/{CHUNKS_FILE}"

    def open_where(where: str) -> Samples[Any]:
        folder = open_data_folder(server.address, cache=tmp_path)
        return captioned_clips(folder.path, where, tars=folder.tars)

    try:
        open_where("begin_s < 3")
        assert table not in server.num_bytes
        assert keys_and_texts(open_where("motion > 0.5")) == keys_and_texts(
            captioned_clips(scored_data, "motion > 0.5")
        )
        copied = server.num_bytes[table]
        assert open_where("motion > 0.5").fingerprint == captioned_clips(scored_data, "motion > 0.5").fingerprint
        assert server.num_bytes[table] == copied > 0
    finally:
        server.close()
