"""Tests of reruns: a run makes what is new or changed, keeps the rest, and has the bytes of a run from scratch."""

import shutil

import pytest

from clipmill.prep.core.variants import stored_request
from clipmill.shards.commits import commit_path
from tests.prep.columns.cases import CASES, OF_CHUNKS, ROWS, Case, Folder, copy_folder, with_tiers, write_video
from tests.prep.running import identities

WITH_OTHER = [case for case in CASES if case.other]


def shards(folder: Folder, shard_id: int) -> dict[str, tuple[int, int]]:
    """Return the identities of the files of a shard."""
    return {name: who for name, who in identities(folder.column).items() if f"00000{shard_id}-" in name}


def test_a_rerun_touches_nothing(folder: Folder) -> None:
    before = identities(folder.data)
    made = folder.make()
    assert (made["num_shards_made"], made["num_encoded"], made["failures"]) == (0, 0, {})
    planned = folder.plan("--json").summary
    assert (planned["shards"], planned["work"], planned["variant"]) == ({"current": 2}, [], made["variant"])
    assert "nothing to do" in folder.plan().stdout
    assert identities(folder.data) == before and not folder.server.log


def test_a_plan_counts_what_the_run_makes(folder: Folder) -> None:
    before = folder.digests()
    folder.forget_column()
    planned, num_samples = folder.plan("--json").summary, folder.case.num_samples
    assert (planned["shards"], planned[f"{folder.case.spec.sample}s"]) == ({"new": 2}, {"new": num_samples})
    assert any(planned["estimate"].values()) and planned["next"].startswith(f"prep {folder.case.command} ")
    assert "estimate " in folder.plan().stdout
    made = folder.make()
    assert (made["num_shards"], made["num_shards_made"], made["variant"]) == (2, 2, planned["variant"])
    (variant,) = folder.status()["variants"]
    assert variant["num_samples"] == variant["num_wanted"] == num_samples
    assert folder.digests() == before


def test_only_the_samples_of_a_changed_video_are_made_again(folder: Folder) -> None:
    kept = shards(folder, 0)
    write_video(folder.root / "videos" / "short.mp4", num_frames=90, first_number=5000)
    folder.read_manifest(*ROWS[:2], "short,other words,0,3,val")
    made = folder.of("video").make()
    if folder.case.name != "video":
        made = folder.make()
    num_encoded = 1 if folder.case.name == "text" else 2
    assert (made["num_shards_made"], made["num_encoded"], made["failures"]) == (1, num_encoded, {})
    assert shards(folder, 0) == kept


def test_a_renamed_video_keeps_its_samples_with_the_bytes_of_a_new_run(folder: Folder) -> None:
    videos = folder.root / "videos"
    (videos / "moved").mkdir()
    (videos / "short.mp4").rename(videos / "moved" / "brief.mp4")
    (videos / "long.mp4").rename(videos / "aaa.mp4")
    rows = [row.replace("long", "aaa").replace("short", "moved/brief").replace("val", "train") for row in ROWS]
    folder.read_manifest(*rows)
    if folder.case.name != "video":
        assert folder.of("video").make()["num_encoded"] == 0
    new = Folder(copy_folder(folder.root, folder.root.with_name("new")), folder.case, folder.server)
    new.forget_column()
    assert folder.make()["num_encoded"] == 0 and not folder.server.log, "paid answers must not be requested again"
    assert new.make()["num_encoded"] > 0
    for member_folder in (folder, new):
        member_folder.prep("gc")
    names = (".tar", ".index.arrow", ".idx", ".json", ".txt")
    of_rename, of_new = (
        {name: digest for name, digest in data_folder.digests().items() if name.endswith(names)}
        for data_folder in (folder, new)
    )
    assert of_rename == of_new and "OK" in folder.prep("verify", "--column", folder.case.name).stdout
    if folder.case.name == "captions":  # as if no shard had ever been made
        variant = folder.variant.directory
        shutil.rmtree(variant / "commits")
        for name in ("contents.json", "commits.arrow"):
            (variant / name).unlink()
        folder.server.log.clear()
        assert folder.make()["num_chunks"] == 5 and not folder.server.log, "answers must be found by content"


@pytest.mark.parametrize("case", with_tiers(WITH_OTHER), ids=str)
def test_another_setting_makes_another_variant_and_gc_drops_the_old_one(folder: Folder, case: Case) -> None:
    old = folder.current_name
    before = identities(folder.column / old)
    planned = folder.plan(*case.other).stdout
    assert f"setting  {case.difference.partition('→')[0]}" in planned and case.difference in planned
    made = folder.make(*case.other)
    assert made["variant"] == folder.current_name != old
    assert (made["num_shards_made"], made["num_encoded"]) == (2, case.num_samples)
    assert identities(folder.column / old) == before
    assert [variant["is_current"] for variant in folder.status()["variants"]] == [True, False]
    assert folder.make()["num_shards_made"] == 0 and folder.current_name == old, "the old variant is not current"
    folder.make(*case.other)
    (foreign := folder.column / "notes.txt").write_text("mine")
    assert f"{case.name}/{old}" in folder.prep("gc", "--dry-run").stdout and (folder.column / old).is_dir()
    removed = folder.prep("gc", "--json").summary
    assert {item["variant"] for item in removed["items"]} == {f"{case.name}/{old}"}
    assert sorted(path.name for path in folder.column.iterdir()) == sorted([made["variant"], "notes.txt"])
    assert foreign.read_text() == "mine" and str(foreign.relative_to(folder.data)) in "".join(removed["unknown"])


def test_re_encoded_chunks_make_a_column_of_chunks_stale_until_it_is_made_again(folder: Folder) -> None:
    if folder.case.name == "video":
        pytest.skip("chunks of video are encoded, not derived")
    old_video, old = folder.of("video").current_name, folder.current_name
    folder.of("video").make("--crf", 40)
    if not folder.case.is_of_chunks:
        assert folder.status()["stale_because"] is None and folder.make()["num_shards_made"] == 0
        return
    assert folder.current_name == old and old_video in folder.status()["stale_because"]
    line = folder.case.spec.command_line(stored_request(folder.variant), data_dir=folder.data)
    stale = [text for text in folder.prep("status").stdout.splitlines() if f"stale: made from {old_video}" in text]
    assert any(text.endswith(f": {line}") for text in stale), "the printed command lacks the settings of the column"
    assert f"video: {old_video}" in folder.plan().stdout
    assert "stale" in folder.prep("gc", "--json").summary["kept_because"][folder.case.name]
    assert folder.make()["num_encoded"] == 5 and folder.current_name != old
    assert (folder.status()["stale_because"], folder.status()["to_make"]) == (None, {})
    folder.prep("gc")
    assert [path.name for path in folder.column.iterdir()] == [folder.current_name]


@pytest.mark.parametrize("case", with_tiers(OF_CHUNKS), ids=str)
def test_a_column_follows_the_chunks_while_they_are_made(folder: Folder, case: Case) -> None:
    before = folder.digests()
    folder.forget_column()
    late = commit_path(folder.of("video").variant.directory, 1)
    aside = late.rename(late.with_name("aside"))
    first = folder.make()
    assert (first["num_shards_made"], first["num_shards"]) == (1, 1)
    aside.rename(late)
    second = folder.make()
    assert (second["num_shards_made"], second["num_shards"]) == (1, 2)
    assert folder.digests() == before


def test_a_video_that_leaves_takes_its_samples_along(folder: Folder) -> None:
    (folder.root / "videos" / "short.mp4").unlink()
    folder.read_manifest(*ROWS[:2])
    folder.of("video").make()
    if folder.case.name != "video":
        assert folder.status()["num_orphaned"] == 1
    assert folder.make()["num_encoded"] == 0
    assert {shard.shard_id for shard in folder.variant.shards()} == {0}
    assert all(key.startswith("long") for shard in folder.variant.shards() for key in shard.index["key"].to_pylist())


@pytest.mark.parametrize("case", with_tiers(OF_CHUNKS), ids=str)
def test_captions_and_records_of_chunks_cost_no_samples(folder: Folder, case: Case) -> None:
    before = folder.digests()
    folder.read_manifest("long,other words,0,1,train", *ROWS[1:])
    assert folder.of("video").make()["num_shards_made"] == 1
    assert folder.make()["num_shards_made"] == 0 and folder.digests() == before
    record = commit_path(folder.of("video").variant.directory, 1)
    for damage in (b"{}", None):
        record.unlink()
        if damage is not None:
            record.write_bytes(damage)
        assert folder.make()["num_shards_made"] == 0 and folder.digests() == before


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_a_damaged_dataset_json_forgets_no_column(folder: Folder, case: Case) -> None:
    current = {other_case.name: folder.of(other_case.name).current_name for other_case in CASES}
    (folder.data / "dataset.json").write_text("{}")
    assert folder.make()["num_shards_made"] == 0
    assert {other_case.name: folder.of(other_case.name).current_name for other_case in CASES} == current
