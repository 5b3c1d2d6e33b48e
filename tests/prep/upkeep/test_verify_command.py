"""Tests of `prep verify`: it detects and reports damage, and ensures that the next run repairs it."""

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.core.column import CheckedSample
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.variants import make_variant
from clipmill.prep.upkeep.verify import DeepTask, check_deep
from clipmill.shards.commits import commit_path, write_commit
from clipmill.shards.dataset import begin_variant
from clipmill.shards.format import VIDEO_FIELDS
from clipmill.shards.reader import Variant
from clipmill.shards.verify import quick_check
from clipmill.shards.writer import Sample, ShardWriter
from tests.prep.numbered import frame_numbers
from tests.prep.running import Ran, contents
from tests.prep.sets import LEN, ShardSet, flip, rerun

Prep = Callable[..., Ran]


def test_a_set_without_chunks_is_an_error(prep: Prep, tmp_path: Path) -> None:
    assert "no video shards" in prep("verify", "--data", tmp_path, status=2).error


def test_a_column_without_shards_keeps_no_other_from_being_verified(prep: Prep, shard_set: ShardSet) -> None:
    """A run that is killed before its first commit leaves such a column."""
    recipe = {"column": "text", "clip": "tiny"}
    name = f"tiny-{recipe_fingerprint(recipe)[:8]}"
    make_variant(shard_set.data / "text" / name, recipe)
    begin_variant(shard_set.data, "text", name)
    ran = prep("verify", "--data", shard_set.data).stdout
    assert f"text {name}: 0 videos in 0 shards, 0 bytes read: OK; no shards yet" in ran
    assert "0 videos in 0 shards" in prep("inspect", "--column", "text", "--data", shard_set.data).stdout
    flip(Variant(shard_set.variant).shards()[0].tar_path, 1000)
    assert "shard 000000  member_checksum" in prep("verify", "--data", shard_set.data, status=1).stdout


@pytest.mark.parametrize("where", ["payload", "tar header", "index", "energon index"])
def test_a_flipped_byte_is_found_named_and_mended_by_the_next_run(prep: Prep, shard_set: ShardSet, where: str) -> None:
    sound = contents(shard_set.variant)
    index = Variant(shard_set.variant).shards()[0].index
    key, offset = index["key"][1].as_py(), index["mp4_offset"][1].as_py()
    code, path, place = {
        "payload": ("member_checksum", shard_set.tar(), offset + 2000),
        "tar header": ("tar_entries_differ", shard_set.tar(), offset - 512),
        "index": ("index_checksum", shard_set.index(), 2000),
        "energon index": ("energon_index", shard_set.tar().with_name(f"{shard_set.tar().name}.idx"), 9),
    }[where]
    flip(path, place)
    assert quick_check(shard_set.variant, shard_set.commits[0]) == []
    ran = prep("verify", "--data", shard_set.data, "--json", status=1)
    (finding,) = ran.summary["video"]["findings"]
    assert (finding["shard_id"], finding["code"]) == (0, code)
    assert finding["key"] == (key if path.suffix == ".tar" else None)
    assert ran.summary["video"]["unseen"] == []
    assert "to repair, run: prep chunk --len 2s" in ran.stderr
    (planned,) = prep("plan", "--data", shard_set.data, "--json", *LEN).summary["work"]
    assert (planned["shard_id"], planned["state"]) == (0, "corrupt")
    if where == "payload":
        assert rerun(prep, shard_set, *LEN)["num_shards_made"] == 1
        assert contents(shard_set.variant) == sound
        prep("verify", "--deep", "--data", shard_set.data)


def test_every_damaged_shard_and_record_is_told(prep: Prep, shard_set: ShardSet) -> None:
    shard_set.tar(0).unlink()
    commit_path(shard_set.variant, 1).write_text("{}")
    ran = prep("verify", "--data", shard_set.data, status=1)
    assert [line.split()[1:3] for line in ran.stdout.splitlines()[:2]] == [
        ["000000", "tar_missing"],
        ["000001", "commit_damaged"],
    ]
    assert "2 problems in 2 shards" in ran.stderr


def test_a_named_variant_is_verified_instead_of_the_current_one(prep: Prep, shard_set: ShardSet) -> None:
    old = shard_set.variant
    rerun(prep, shard_set, *LEN, "--crf", "40")
    assert shard_set.variant != old
    flip(next(old.glob("*.tar")), 3000)
    prep("verify", "--data", shard_set.data)
    prep("verify", "--data", shard_set.data, "--variant", old.name, status=1)
    assert "no variant 'other'" in prep("verify", "--data", shard_set.data, "--variant", "other", status=2).error


def rewrite(shard_set: ShardSet, change: Callable[[Sample], Sample]) -> None:
    """Publish shard 0 again with every sample changed, as a faulty program would: all checksums match."""
    (shard, _) = Variant(shard_set.variant).shards()
    names = [field.name for field in VIDEO_FIELDS]
    commit = shard_set.commits[0]
    with ShardWriter(shard_set.variant, shard_id=0, extensions=shard.extensions, fields=VIDEO_FIELDS) as writer:
        for number in range(shard.num_samples):
            members = {extension: shard.read(number, extension) for extension in shard.extensions}
            fields = {name: shard.index[name][number].as_py() for name in names}
            writer.add(change(Sample(shard.index["key"][number].as_py(), members, fields)))
        files = writer.publish(hashlib.sha256(b"changed").hexdigest())
    write_commit(shard_set.variant, replace(commit, files=files))


def with_member(sample: Sample, extension: str, payload: bytes) -> Sample:
    return replace(sample, members={**sample.members, extension: payload})


def with_json(sample: Sample, **changes: Any) -> Sample:
    description = {**json.loads(sample.members["json"]), **changes}
    return with_member(sample, "json", json.dumps(description).encode())


def damaged_picture(sample: Sample) -> Sample:
    """Overwrite the end of the first frame's encoded bytes as if it had been encoded so; its checksum matches."""
    content = bytearray(sample.members["mp4"])
    begin, size = sample.fields["packet_offset"][0], sample.fields["packet_size"][0]
    content[begin + size - 60 : begin + size] = bytes([255] * 60)
    checksums = [zlib.crc32(content[begin : begin + size]), *sample.fields["packet_crc32"][1:]]
    return with_member(replace(sample, fields={**sample.fields, "packet_crc32": checksums}), "mp4", bytes(content))


CHANGES: list[tuple[str, str, Callable[[Sample], Sample]]] = [
    ("a damaged picture", "decode_errors", damaged_picture),
    ("a cut video", "packets_differ", lambda sample: with_member(sample, "mp4", sample.members["mp4"][:-700])),
    (
        "a flag",
        "packets_differ",
        lambda sample: replace(sample, fields={**sample.fields, "packet_flags": [3] * sample.fields["num_frames"]}),
    ),
    ("the times", "json_differs", lambda sample: with_json(sample, end_s=[99, 1])),
    ("the split", "json_differs", lambda sample: with_json(sample, split="val")),
    ("no object", "json_differs", lambda sample: with_member(sample, "json", b"[]")),
    ("the captions", "json_differs", lambda sample: with_member(sample, "txt", b"another caption")),
]


@pytest.mark.parametrize(("name", "code", "change"), CHANGES, ids=[name for name, _, _ in CHANGES])
def test_deep_sees_what_checksums_cannot(
    prep: Prep, shard_set: ShardSet, name: str, code: str, change: Callable[[Sample], Sample]
) -> None:
    rewrite(shard_set, change)
    prep("verify", "--data", shard_set.data)
    ran = prep("verify", "--deep", "--data", shard_set.data, "--json", status=1)
    findings = ran.summary["video"]["deep_findings"]
    assert {(finding["shard_id"], finding["code"]) for finding in findings} == {(0, code)}
    assert {finding["key"] for finding in findings} == {"long_000000000", "long_000002000", "long_000004000"}
    assert str(commit_path(shard_set.variant, 0)) in ran.stderr


def test_what_deep_finds_is_made_again_once_its_commit_is_gone(prep: Prep, shard_set: ShardSet) -> None:
    rewrite(shard_set, damaged_picture)
    ran = prep("verify", "--deep", "--data", shard_set.data, status=1)
    Path(ran.stderr.rpartition(": ")[2].strip()).unlink()
    rerun(prep, shard_set, *LEN)
    prep("verify", "--deep", "--data", shard_set.data)
    first = next(Variant(shard_set.variant).iterate())
    assert frame_numbers(first["mp4"]) == list(range(60))


def broken_check(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    raise KeyError(row["key"])


@pytest.mark.parametrize(
    ("name", "message"), [("broken_check", "KeyError: 'long_000000000'"), ("no_check", "AttributeError")]
)
def test_a_check_that_fails_is_a_finding(shard_set: ShardSet, name: str, message: str) -> None:
    shard = Variant(shard_set.variant).shards()[0]
    result = check_deep(DeepTask(shard_set.variant, shard.commit, f"{__name__}:{name}"))
    [(key, code, text)] = result.findings
    assert code == "check_failed" and message in text
    assert key == ("long_000000000" if name == "broken_check" else None)
