"""Tests of damage to each small record of a data folder:

`prep verify` reports it, and the next run restores the bytes.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import REJECTED_LIST
from clipmill.prep.core.tables import LAYOUT, DamagedLayout, read_layout, read_table_file
from clipmill.prep.sources.table import PROBES, PROBES_FILE
from clipmill.prep.video.column import COLUMN
from clipmill.shards.commit_table import read_commits, read_contents
from clipmill.shards.dataset import current_variant
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from tests.prep.running import Ran, contents
from tests.prep.sets import LEN, ShardSet, rerun

Prep = Callable[..., Ran]
RECORDS = {
    "layout": lambda shard_set: shard_set.data / "layout" / "2s-keep.parquet",
    "probes": lambda shard_set: shard_set.data / "probes.parquet",
    "dataset": lambda shard_set: shard_set.data / "dataset.json",
    "recipe": lambda shard_set: shard_set.variant / "recipe.json",
    "contents": lambda shard_set: shard_set.variant / "contents.json",
    "list": lambda shard_set: shard_set.variant / "shards.txt",
    "list of a split": lambda shard_set: shard_set.variant / "shards-val.txt",
    "commit": lambda shard_set: shard_set.variant / "commits" / "000000.json",
}
# Their loss does not change what is read, and looks the same as a set that never had them.
HARMLESS_LOSSES = {"probes", "contents"}


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", RECORDS)
def test_a_damaged_record_is_named_and_repaired_by_the_next_run(
    prep: Prep, shard_set: ShardSet, name: str, damage: str
) -> None:
    path, sound = RECORDS[name](shard_set), contents(shard_set.data)
    content = bytearray(path.read_bytes())
    content[len(content) // 4 :: 16] = bytes(255 - byte for byte in content[len(content) // 4 :: 16])
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    report = prep("verify", "--data", shard_set.data, status=0 if damage == "gone" and name in HARMLESS_LOSSES else 1)
    if damage != "gone" or name not in HARMLESS_LOSSES:
        assert str(path) in report.stdout
        assert "prep chunk" in report.stderr or "prep plan" in report.stderr
        assert name != "layout" or "prep chunk --len 2s" in report.stderr
    if name == "recipe":
        for command in (["status"], ["plan", *LEN]):
            assert str(path) in prep(*command, "--data", shard_set.data, status=2).error
    rerun(prep, shard_set, *LEN)
    assert contents(shard_set.data) == sound


def read_everything(shard_set: ShardSet) -> list[object]:
    """Return everything that the readers of all records return, as values that can be compared."""
    variant = Variant.open(shard_set.data).require_complete()
    return [
        current_variant(shard_set.data, "video"),
        variant.recipe,
        variant.commits,
        read_contents(variant.directory),
        COLUMN.stored_settings(variant.recipe),
        read_layout(RECORDS["layout"](shard_set)),
        read_table_file(shard_set.data / PROBES_FILE, schema=PROBES).to_pylist(),
    ]


@pytest.mark.parametrize(
    ("variants", "commands"),
    [
        (["source-1"], "prep index"),
        (["x264-1"], "prep chunk"),
        (["source-1", "x264-1"], "prep chunk or prep index"),
        ([], "prep chunk or prep index"),
    ],
)
def test_a_damaged_layout_names_the_commands_of_its_variants(
    variants: list[str], commands: str, tmp_path: Path
) -> None:
    for name in variants:
        (tmp_path / "video" / name).mkdir(parents=True)
    path = tmp_path / "layout" / "15s-keep.parquet"
    path.parent.mkdir()
    path.write_text("no table")
    with pytest.raises(DamagedLayout) as caught:
        read_layout(path)
    assert str(caught.value.hint).startswith(f"run {commands} again with the same settings")


def test_folders_in_place_of_files_are_all_named_with_what_to_do(prep: Prep, shard_set: ShardSet) -> None:
    paths = {name: record(shard_set) for name, record in RECORDS.items()}
    paths |= {"index": shard_set.index(1), "table": shard_set.variant / "chunks.arrow"}
    opened: list[Path] = []
    # `contents` lists the expected lists, and dataset.json the variant to verify, so they are damaged last.
    for names in (paths.keys() - {"contents", "dataset"}, {"contents"}, {"dataset"}):
        for path in map(paths.__getitem__, names):
            path.unlink()
            path.mkdir()
            opened.append(path)
        ran = prep("verify", "--data", shard_set.data, status=1)
        named = {path for path in opened for line in ran.stdout.splitlines() if f"{path}" in line and "move it" in line}
        assert named >= set(map(paths.__getitem__, names))
        assert "to repair, remove or move the folders that have the names of files, then run: " in ran.stderr


@pytest.mark.parametrize("name", sorted(RECORDS.keys() - {"list", "list of a split"}))
def test_no_flipped_bit_is_read_as_another_value(shard_set: ShardSet, name: str) -> None:
    path, rng = RECORDS[name](shard_set), random.Random(name)
    content, before = path.read_bytes(), read_everything(shard_set)
    num_refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.unlink()  # for a commit that is overwritten, readers use the table instead
        path.write_bytes(damaged)
        try:
            assert read_everything(shard_set) == before
        except (Damaged, UserError, ValueError):
            num_refused += 1
    assert num_refused > 20


def test_a_layout_with_a_history_is_found_again_in_the_commits(
    prep: Prep, shard_set: ShardSet, write_video: Callable[..., Path], tmp_path: Path
) -> None:
    """The orders of manifest and shards differ, because the first video of the manifest was added later."""
    videos = tmp_path / "videos"
    for name in ("b", "c"):
        write_video(videos / f"{name}.mp4", seconds=3)
    data = tmp_path / "grown"
    for name in ("", "a"):
        if name:
            write_video(videos / f"{name}.mp4", seconds=3)
        prep("manifest", "folder", videos, "--data", data)
        prep("chunk", "--data", data, "--engine", "processes", *LEN)
    (videos / "b.mp4").unlink()
    prep("manifest", "folder", videos, "--data", data)
    prep("chunk", "--data", data, "--engine", "processes", *LEN)
    path = data / "layout" / "2s-keep.parquet"
    before, sound = read_layout(path), contents(data)
    path.write_bytes(path.read_bytes()[:-20])
    told = prep("plan", "--data", data, "--json", *LEN)
    assert told.summary["work"] == [] and "file; using the layout recorded in the commits\n" in told.stderr
    prep("chunk", "--data", data, "--engine", "processes", *LEN)
    after = contents(data)
    assert {name for name in sound if after[name] != sound[name]} <= {"layout/2s-keep.parquet"}
    rows = read_layout(path).to_pylist()
    assert rows == [row for row in before.to_pylist() if row["video_id"] != "b"] and read_layout(path).schema == LAYOUT


def test_a_failed_span_keeps_its_place_in_a_layout_that_is_made_anew(
    prep: Prep, write_video: Callable[..., Path], tmp_path: Path
) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    for name in ("a", "b", "c"):
        write_video(videos / f"{name}.mp4", seconds=3)
    prep("manifest", "folder", videos, "--data", data)
    prep("plan", "--data", data, *LEN)  # all sources are probed, then one of them disappears
    (videos / "b.mp4").rename(tmp_path / "b.mp4")
    prep("chunk", "--data", data, "--engine", "processes", *LEN, status=1)
    path = data / "layout" / "2s-keep.parquet"
    before = path.read_bytes()
    path.unlink()
    prep("chunk", "--data", data, "--engine", "processes", *LEN)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_lost_probes_of_sources_that_are_gone_cost_no_chunks(
    prep: Prep, tmp_path: Path, made_set: Path, damage: str
) -> None:
    shard_set = ShardSet(tmp_path / "data")
    shutil.copytree(made_set, shard_set.data)
    moved = made_set.parent / "videos"
    sound = contents(shard_set.variant)
    path = shard_set.data / "probes.parquet"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    moved.rename(made_set.parent / "away")
    try:
        rerun(prep, shard_set, *LEN)
        assert len(shard_set.commits) == 2
        assert {name for name, digest in contents(shard_set.variant).items() if sound.get(name) != digest} == {
            "failures.jsonl"
        }
    finally:
        (made_set.parent / "away").rename(moved)


def test_old_variants_have_records_of_their_own(prep: Prep, shard_set: ShardSet) -> None:
    old = shard_set.variant
    rerun(prep, shard_set, *LEN, "--crf", "40")
    (old / "commits" / "000001.json").unlink()
    prep("verify", "--data", shard_set.data)
    named = prep("verify", "--data", shard_set.data, "--variant", old.name, status=1)
    assert "000001.json" in named.stdout and "prep chunk --len 2s" in named.stderr
    assert len(read_commits(old).damaged) == 1


def test_a_manifest_that_is_damaged_is_named(prep: Prep, shard_set: ShardSet) -> None:
    folder = shard_set.data / "manifest"
    # No program reads the list of rejections.
    for path in sorted(path for path in folder.iterdir() if path.name != REJECTED_LIST):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        ran = prep("verify", "--data", shard_set.data, "--json", status=1)
        assert any(str(path) in record["message"] for record in ran.summary["records"])
        assert "prep manifest" in ran.stderr
        if path.name != "rejected.parquet":  # this table is only for people
            # Plans do not read captions by span.
            for command in (["status"], ["plan", *LEN]) if path.suffix == ".parquet" else (["status"],):
                assert str(path) in prep(*command, "--data", shard_set.data, status=2).error
        path.write_bytes(content)
    kept = shutil.copy(folder / "manifest.json", shard_set.data / "kept")
    (folder / "manifest.json").unlink()
    assert "but other manifest files exist" in prep("verify", "--data", shard_set.data, status=1).stdout
    shutil.move(kept, folder / "manifest.json")
    prep("verify", "--data", shard_set.data)


def test_prep_manifest_writes_a_damaged_manifest_again(prep: Prep, tmp_path: Path) -> None:
    videos, data = tmp_path / "videos", tmp_path / "data"
    videos.mkdir()
    (videos / "v.mp4").write_bytes(b"x")
    command = ("manifest", "folder", videos, "--data", data)
    prep(*command)
    before = contents(data)
    for path in sorted((data / "manifest").iterdir()):
        path.write_bytes(path.read_bytes()[:-9])
        prep(*command)
        assert contents(data) == before
