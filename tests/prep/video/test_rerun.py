"""Tests of reruns: they make what is new, changed, missing or damaged, and copy existing bytes where possible.

The set has chunks of 500 ms and spans of 20 chunks. Its shards are 0 (video a), 1 (the end of a), 2 (b), and 3 (the end
of b, and c).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipmill.prep.video.plan_report import run_trials
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from clipmill.shards.verify import verify_shard
from tests.prep.running import chunk, contents, identities, manifest, messages, prep_here

SETTINGS = ("--len", "500ms", "--preset", "ultrafast")
CAPTIONS = "video,text,begin_s,end_s\na,words of a,11,12\nc,first words,0,3\nc,last words,3,9\n"


class Set:
    """Prepared data folder next to its videos."""

    def __init__(self, root: Path) -> None:
        self.videos, self.data, self.captions = root / "videos", root / "data", root / "captions.csv"

    @property
    def variant(self) -> Variant:
        return Variant.open(self.data)

    @property
    def folder(self) -> Path:
        return self.variant.directory

    def manifest(self) -> None:
        manifest(self.data, self.videos, "--captions", self.captions)

    def chunk(self, *settings: object) -> tuple[int, int]:
        """Run `prep chunk`; return the numbers of chunks that were encoded and taken over."""
        summary = chunk(self.data, *SETTINGS, *settings)
        return summary["num_encoded"], summary["num_reused"]

    def tar(self, shard_id: int) -> Path:
        files = self.variant.commits[shard_id].files
        assert files is not None
        return self.folder / files.tar

    def payloads(self) -> dict[str, bytes]:
        return {sample["__key__"]: sample["mp4"] for sample in self.variant.iterate()}

    def of_shards(self, *shard_ids: int) -> dict[str, tuple[int, int]]:
        """Return the identities of the files of some shards."""
        prefixes = tuple(f"{shard_id:06d}" for shard_id in shard_ids)
        return {name: who for name, who in identities(self.folder).items() if Path(name).name.startswith(prefixes)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("rerun") / "set"
    made = Set(root)
    for number, (name, seconds) in enumerate((("a", 12), ("b", 12), ("c", 5))):
        write_video(made.videos / f"{name}.mp4", seconds=seconds, first_number=1000 * number)
    made.captions.write_text(CAPTIONS)
    made.manifest()
    assert made.chunk() == (58, 0)
    shards = [sorted({key[0] for key in shard.index["key"].to_pylist()}) for shard in made.variant.shards()]
    assert shards == [["a"], ["a"], ["b"], ["b", "c"]]
    shutil.copytree(root, root.with_name("pristine"))
    return root


@pytest.fixture
def finished_set(root: Path) -> Iterator[Set]:
    """Return the set in its original state, under its original path."""
    shutil.rmtree(root)
    shutil.copytree(root.with_name("pristine"), root)
    yield Set(root)


@pytest.mark.nightly
def test_only_an_added_video_is_made(finished_set: Set, write_video: Callable[..., Path]) -> None:
    before, old = finished_set.of_shards(0, 1, 2, 3), finished_set.payloads()
    write_video(finished_set.videos / "_first.mp4", seconds=3)
    finished_set.manifest()
    status = prep_here("status", "--data", finished_set.data).stdout
    assert "1 not probed yet" in status and status.splitlines()[-1].startswith("next      prep chunk --len 500ms ")
    plan = json.loads(prep_here("plan", "--data", finished_set.data, *SETTINGS, "--json").stdout)
    assert plan["shards"] == {"current": 4, "new": 1}
    assert finished_set.chunk() == (6, 0)
    assert (
        prep_here("status", "--data", finished_set.data)
        .stdout.splitlines()[-1]
        .startswith("next      train quickstart ")
    )
    assert finished_set.of_shards(0, 1, 2, 3) == before
    assert {key: payload for key, payload in finished_set.payloads().items() if key in old} == old
    assert len(finished_set.payloads()) == 64


def test_other_settings_make_another_variant_and_plan_names_them(finished_set: Set) -> None:
    old = finished_set.folder
    before = identities(old)
    for flag, value, difference in (
        ("--crf", "30", "crf: 24 → 30"),
        ("--codec", "hevc", "codec: h264 → hevc"),
        ("--gop", "intra", "gop: comb → intra"),
        ("--bitrate", "300k", "bitrate: not set → 300k"),
    ):
        told = prep_here("plan", "--data", finished_set.data, *SETTINGS, flag, value, "--explain", "b_000003500").stdout
        assert f"setting  {difference}" in told.splitlines(), told
        assert told.count("new: not committed yet") == 2
    flags = ("--data", finished_set.data, "--engine", "processes", "--workers", 2, *SETTINGS)
    ran = prep_here("chunk", *flags, "--gop", "intra")
    assert "58 chunks encoded, 0 copied" in ran.stdout
    lines = [line for line in messages(ran.stderr) if line]
    assert lines[0] == "setting  gop: comb → intra" and lines[-3].endswith(
        ": 58 chunks of 3 videos to encode, 29 s of video"
    )
    assert (
        "prep plan --len 500ms" in lines[-2] and "--gop intra" in lines[-2] and " estimates time and disk" in lines[-2]
    )
    assert f"{old.name} is kept until you run `prep gc`; to use its settings: prep chunk --len 500ms" in lines[-1]
    assert current_variant(finished_set.data, "video") != old.name
    assert finished_set.variant.recipe["gop"] == "intra"
    assert identities(old) == before
    # With the old settings, the old variant becomes current again, and nothing is encoded.
    ran = prep_here("chunk", *flags)
    assert (
        "nothing to encode" in ran.stdout and f"variant  {old.name} is complete, and becomes the current" in ran.stderr
    )
    assert current_variant(finished_set.data, "video") == old.name
    assert "setting" not in prep_here("chunk", *flags).stderr


def test_new_captions_are_written_without_encoding(finished_set: Set) -> None:
    others, old = finished_set.of_shards(0, 1, 2), finished_set.payloads()
    finished_set.captions.write_text(CAPTIONS.replace("first words", "other words"))
    finished_set.manifest()
    assert finished_set.chunk() == (0, 14)
    texts = {sample["__key__"]: sample["txt"].decode() for sample in finished_set.variant.iterate()}
    assert texts["c_000000000"] == "other words" and texts["c_000004500"] == "last words" and texts["a_000000000"] == ""
    assert finished_set.payloads() == old
    assert finished_set.of_shards(0, 1, 2) == others


def test_a_plan_says_in_words_what_happens_to_the_chunks(
    finished_set: Set, write_video: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> list[str]:
        stdout = prep_here("plan", "--data", finished_set.data, *SETTINGS).stdout
        assert "None" not in stdout
        lines = stdout.splitlines()
        if lines[-1] != "nothing to do":
            assert (
                lines[-1].startswith("next     prep chunk --len 500ms ") and f"--data {finished_set.data}" in lines[-1]
            )
        return lines

    assert plan()[1:] == ["kept     58 chunks in 4 shards", "nothing to do"]
    table = finished_set.variant.directory / "chunks.arrow"
    content = table.read_bytes()
    table.write_bytes(content[:-9])
    kept, derived, again = plan()[1:]
    assert kept == "kept     58 chunks in 4 shards" and f"{table} is damaged" in derived
    assert again.replace("next     ", "next      ") in prep_here("status", "--data", finished_set.data).stdout
    table.write_bytes(content)
    finished_set.captions.write_text(CAPTIONS.replace("first words", "other words"))
    finished_set.manifest()
    assert plan()[1:3] == ["kept     44 chunks in 3 shards", "to do    14 chunks copied into 1 shard: captions changed"]
    finished_set.captions.write_text(CAPTIONS)
    (finished_set.videos / "c.mp4").rename(finished_set.videos.parent / "c.mp4")
    finished_set.manifest()
    assert plan()[2] == "to do    4 chunks copied into 1 shard: 1 video removed"
    (finished_set.videos.parent / "c.mp4").rename(finished_set.videos / "c.mp4")
    finished_set.manifest()
    finished_set.tar(2).unlink()
    lines = plan()
    assert "to do    at most 20 chunks encoded into 1 shard: files are missing" in lines
    assert "to do    14 chunks copied into 1 shard: captions changed" in lines, "a video that returns has new captions"
    assert {line[:8] for line in lines} >= {"shard 00", "estimate", "disk    "}
    finished_set.chunk()
    write_video(finished_set.videos / "b.mp4", seconds=12, first_number=5000)
    assert plan()[2] == "to do    24 chunks encoded and 10 copied into 2 shards: 1 video changed"
    with monkeypatch.context() as patch:  # with trials, which give the range of sizes
        patch.setattr("clipmill.prep.video.plan_report.run_trials", run_trials)
        values = json.loads(prep_here("plan", "--data", finished_set.data, *SETTINGS, "--json").stdout)
    assert [work["num_copied"] for work in values["work"]] == [0, 10]
    assert values["estimate"]["video_hours"] * 3600 == pytest.approx(12)
    replaced = [commit.size_bytes for shard_id, commit in finished_set.variant.commits.items() if shard_id in (2, 3)]
    disk = values["disk"]
    assert disk["fits"] and disk["freed_by_gc_bytes"] == sum(replaced)
    assert prep_here("plan", "--data", finished_set.data, *SETTINGS, "--crf", 30, "--json").summary["disk"][
        "freed_by_gc_bytes"
    ]
    before = identities(finished_set.folder)
    finished_set.chunk()
    files = [path for path in finished_set.folder.glob("00*") if path.name not in before]
    low, high = disk["added_bytes_range"]
    assert len(files) == 6 and low < sum(path.stat().st_size for path in files) < high, "copies must count as written"


@pytest.mark.parametrize(
    ("lose", "shard_id", "made_again"),
    [
        (lambda s: flip_payload(s, "b_000011000"), 3, (4, 10)),
        (lambda s: flip_payload(s, "c_000000000"), 3, (10, 4)),
    ],
    ids=["byte of b", "byte of c"],
)
def test_the_span_of_a_damaged_chunk_is_encoded_and_the_other_spans_of_its_shard_are_copied(
    lose: Callable[[Set], object], shard_id: int, made_again: tuple[int, int], finished_set: Set
) -> None:
    others = [other for other in range(4) if other != shard_id]
    before, untouched = contents(finished_set.data), finished_set.of_shards(*others)
    lose(finished_set)
    assert contents(finished_set.data) != before
    assert finished_set.chunk() == made_again
    assert contents(finished_set.data) == before
    assert finished_set.of_shards(*others) == untouched
    assert [
        problem
        for commit in finished_set.variant.commits.values()
        for problem in verify_shard(finished_set.folder, commit)
    ] == []


def flip_payload(made: Set, key: str) -> None:
    shard, row = made.variant.find(key)
    offset, size = shard.member_range(row, "mp4")
    with shard.tar_path.open("r+b") as file:
        file.seek(offset + size // 2)
        byte = file.read(1)[0]
        file.seek(offset + size // 2)
        file.write(bytes([byte ^ 1]))


def test_committed_chunks_outlive_their_source(finished_set: Set) -> None:
    before = contents(finished_set.folder)
    source, kept = finished_set.videos / "b.mp4", finished_set.videos.parent / "kept.mp4"
    source.rename(kept)
    assert finished_set.chunk() == (0, 0)
    assert contents(finished_set.folder) == before
    # A lost shard cannot be made without its source. The run reports this and keeps every intact chunk, including the
    # three in the damaged span.
    finished_set.tar(2).unlink()
    flip_payload(finished_set, "b_000011000")
    summary = chunk(finished_set.data, *SETTINGS, status=1)
    assert summary["failures"] == {"source_missing": 2} and summary["num_reused"] == 13
    listed = [json.loads(line) for line in (finished_set.folder / "failures.jsonl").read_text().splitlines()]
    assert [(row["video_id"], row["key"]) for row in listed] == [("b", "b_000000000"), ("b", "b_000010000")]
    assert sorted(key for key in finished_set.payloads() if key[0] == "b") == [
        "b_000010000",
        "b_000010500",
        "b_000011500",
    ]
    plan = prep_here("plan", "--data", finished_set.data, *SETTINGS).stdout
    assert "kept     37 chunks in 4 shards; 21 failed, see prep status\n" in plan
    # While the source is missing, nothing is tried. Once it is back, the same command makes the failed chunks.
    assert chunk(finished_set.data, *SETTINGS)["num_shards_made"] == 0
    kept.rename(source)
    again = chunk(finished_set.data, *SETTINGS)
    assert (again["num_encoded"], again["num_reused"]) == (24, 10)
    assert contents(finished_set.folder).items() >= before.items()  # the shard without b stays until `prep gc`
    assert finished_set.payloads().keys() >= {"b_000000000", "b_000011500"}


def test_videos_that_return_find_their_chunks_until_gc(finished_set: Set, write_video: Callable[..., Path]) -> None:
    old, wrong = finished_set.payloads(), finished_set.videos.parent / "wrong"
    write_video(wrong / "z.mp4", seconds=2, first_number=9000)
    manifest(finished_set.data, wrong)
    assert finished_set.chunk() == (4, 0)
    finished_set.manifest()
    plan = prep_here("plan", "--data", finished_set.data, *SETTINGS).stdout
    assert "to do    58 chunks copied into 4 shards: videos that returned, were renamed, or were moved" in plan, plan
    # Damage single bytes of a tar and an index without a commit: the affected chunks are encoded, never copied.
    (tar,), (index,) = finished_set.folder.glob("000003-*.tar"), finished_set.folder.glob("000000-*.index.arrow")
    for path, content in ((tar, old["c_000002000"][1000:1100]), (index, b"a_000001500")):  # payload; key, unprotected
        data = bytearray(path.read_bytes())
        data[data.index(content)] ^= 1
        path.write_bytes(data)
    assert finished_set.chunk() == (10, 48)
    assert finished_set.payloads() == old and prep_here("verify", "--data", finished_set.data, "--deep").status == 0
    (finished_set.videos / "c.mp4").rename(finished_set.videos.parent / "c.mp4")
    finished_set.manifest()
    finished_set.chunk()
    prep_here("gc", "--data", finished_set.data)
    (finished_set.videos.parent / "c.mp4").rename(finished_set.videos / "c.mp4")
    finished_set.manifest()
    assert finished_set.chunk() == (10, 4) and finished_set.payloads() == old


def test_a_video_that_changes_its_split_is_in_one_shard_only(finished_set: Set) -> None:
    finished_set.captions.write_text("video,text,split\na,words,train\nc,words,val\n")
    finished_set.manifest()
    plan = prep_here("plan", "--data", finished_set.data, *SETTINGS).stdout
    assert "video removed or moved to another split" in plan
    assert ": the split of the videos has changed" in plan
    assert finished_set.chunk() == (0, 38), (
        "nothing is encoded: a has new captions, c a new split, and b shares a shard with c"
    )
    shards = {shard.shard_id: shard for shard in finished_set.variant.shards()}
    assert {shard_id: shard.split for shard_id, shard in shards.items()} == dict.fromkeys(range(4), "train") | {
        4: "val"
    }
    keys = [key for shard in shards.values() for key in shard.index["key"].to_pylist()]
    assert len(keys) == len(set(keys)) == 58
    for shard_id, shard in shards.items():
        assert all(key.startswith("c") == (shard_id == 4) for key in shard.index["key"].to_pylist())
