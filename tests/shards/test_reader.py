import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_json
from clipmill.manifests.store import manifest_dir
from clipmill.shards import tars
from clipmill.shards.commits import Commit, Failure, commit_path, write_commit
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.opening import DamagedTar
from clipmill.shards.reader import Variant
from clipmill.shards.writer import Sample

MakeSamples = Callable[..., list[Sample]]
CommitShard = Callable[..., Commit]
NAME = "h264-0123abcd"


@pytest.fixture
def data_dir(tmp_path: Path, samples: MakeSamples, commit_shard: CommitShard) -> Path:
    directory = variant_dir(tmp_path, "video", NAME)
    commit_shard(directory, samples(5, video_id="zebra"), shard_id=0)
    commit_shard(directory, samples(3, video_id="apple", seed=1), shard_id=1, split="val")
    write_commit(directory, Commit("video", 2, "train", "00", None, (Failure("gone", None, "source_missing", "x"),)))
    commit_shard(directory, samples(4, video_id="mango", seed=2), shard_id=3)
    publish_json(directory / "recipe.json", {"codec": "h264"})
    set_current_variant(tmp_path, "video", NAME)
    return tmp_path


def test_a_variant_shows_its_shards_in_order(data_dir: Path) -> None:
    variant = Variant.open(data_dir)
    assert variant.directory == data_dir / "video" / NAME
    assert variant.recipe == {"codec": "h264"}
    assert [shard.shard_id for shard in variant.shards()] == [0, 1, 3]
    assert [shard.shard_id for shard in variant.shards("train")] == [0, 3]
    assert variant.shards("test") == []
    assert sorted(variant.commits) == [0, 1, 2, 3]
    assert variant.damaged == ()


def test_every_key_is_found_and_its_members_read(data_dir: Path, samples: MakeSamples) -> None:
    variant = Variant.open(data_dir, variant=NAME)
    for video_id, num_samples, seed in (("zebra", 5, 0), ("apple", 3, 1), ("mango", 4, 2)):
        for row_wanted, sample in enumerate(samples(num_samples, video_id=video_id, seed=seed)):
            shard, row = variant.find(sample.key)
            assert row == row_wanted
            assert {extension: shard.read(row, extension) for extension in shard.extensions} == sample.members
            offset, size = shard.member_range(row, "json")
            assert shard.tar_path.read_bytes()[offset : offset + size] == sample.members["json"]
    for key in ("", "aaaa", "mango_000000001", "zzzz", "mango"):
        with pytest.raises(KeyError):
            variant.find(key)


def test_samples_come_in_order(data_dir: Path, samples: MakeSamples) -> None:
    written = [*samples(5, video_id="zebra"), *samples(4, video_id="mango", seed=2)]
    rows = list(Variant.open(data_dir).iterate("train"))
    assert rows == [{"__key__": sample.key, **sample.members} for sample in written]


def test_a_tar_without_a_commit_does_not_exist(data_dir: Path) -> None:
    commit_path(data_dir / "video" / NAME, 1).unlink()
    variant = Variant.open(data_dir)
    assert [shard.shard_id for shard in variant.shards()] == [0, 3]
    with pytest.raises(KeyError):
        variant.find("apple_000000000")


def test_a_damaged_commit_is_shown_and_its_shard_is_not(data_dir: Path) -> None:
    commit_path(data_dir / "video" / NAME, 1).write_text("{}")
    variant = Variant.open(data_dir)
    assert [shard.shard_id for shard in variant.shards()] == [0, 3]
    assert [error.path.name for error in variant.damaged] == ["000001.json"]


def test_a_cut_tar_is_named_by_the_read_that_meets_it(data_dir: Path) -> None:
    shard = Variant.open(data_dir).shards()[0]
    with shard.tar_path.open("r+b") as file:
        file.truncate(2000)
    assert shard.read(0, "json") == b'{"number": 0}'
    with pytest.raises(DamagedTar, match=shard.tar_path.name):
        shard.read(4, "mp4")


def test_what_is_not_there_is_a_users_error_with_the_command_to_run(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no variant 'h265-1'") as raised:
        Variant.open(data_dir, variant="h265-1")
    assert NAME in (raised.value.hint or "")
    manifest_dir(tmp_path / "elsewhere").mkdir(parents=True)
    for column, command in (("video", "prep chunk"), ("latents", "prep latents")):
        with pytest.raises(UserError, match=f"no {column} shards") as raised:
            Variant.open(tmp_path / "elsewhere", column=column)
        assert command in (raised.value.hint or "")
    variant_dir(data_dir, "video", "empty").mkdir()
    with pytest.raises(UserError, match="committed"):
        Variant.open(data_dir, variant="empty").require_complete()
    (data_dir / "video" / NAME / "recipe.json").unlink()
    with pytest.raises(UserError, match="recipe"):
        _ = Variant.open(data_dir).recipe


def test_threads_read_more_shards_than_are_kept_open(
    tmp_path: Path, samples: MakeSamples, commit_shard: CommitShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tars, "_MAX_OPEN_TARS", 2)
    written = {}
    for shard_id in range(8):
        shard_samples = samples(3, video_id=f"v{shard_id}", seed=shard_id)
        commit_shard(tmp_path, shard_samples, shard_id=shard_id)
        written.update({sample.key: sample.members["mp4"] for sample in shard_samples})
    before = {path.name for path in Path("/proc/self/fd").iterdir()} if Path("/proc/self/fd").is_dir() else set()
    variant = Variant(tmp_path)

    def read_many(seed: int) -> bool:
        order = random.Random(seed)
        for _ in range(200):
            key = order.choice(sorted(written))
            shard, row = variant.find(key)
            if shard.read(row, "mp4") != written[key]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_many, range(8)))
    if before:
        opened = [path for path in Path("/proc/self/fd").iterdir() if path.name not in before and path.exists()]
        assert len([path for path in opened if path.resolve().suffix == ".tar"]) <= 2
