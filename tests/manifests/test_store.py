"""Tests of writes of the manifest: what stays, what changes, and what a reader sees after an interrupted write."""

import hashlib
import random
from math import inf
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_checked_json
from clipmill.manifests.schema import CAPTIONS, REJECTED, VIDEOS
from clipmill.manifests.store import read_captions, read_manifest, read_rejected_rows, read_videos
from clipmill.manifests.write import WriteResult, write_manifest

Caption = tuple[str, float, float, str]


def reading_of(
    folder: Path,
    videos: list[str],
    captions: list[Caption],
    *,
    dataset: str = "a",
    labels: dict[str, object] | None = None,
) -> Reading:
    kinds = {name: pa.string() if isinstance(value, str) else pa.int32() for name, value in (labels or {}).items()}
    builder = ReadingBuilder(dataset, labels=kinds)
    numbers = {}
    for name in videos:
        path = folder / f"{dataset}-{name}.mp4"
        path.write_bytes(b"x")
        numbers[name] = builder.add_video(name, path=path, split="train")
    for row, (name, begin_s, end_s, text) in enumerate(captions):
        number = numbers[name]
        assert number is not None
        origin = Origin(folder, "human", row)
        builder.add_caption(number, text, origin, begin_s=begin_s, end_s=end_s, labels=labels)
    return builder.build()


def write(data: Path, reading: Reading, *, dataset: str = "a") -> WriteResult:
    return write_manifest(data, dataset, reading.videos, reading.captions, reading.rejected)


def ids_by_text(data: Path) -> dict[str, int]:
    return {row["text"]: row["caption_id"] for row in read_captions(data).to_pylist()}


def digests(data: Path) -> dict[str, str]:
    return {row["video_id"]: row["captions_sha256"] for row in read_videos(data).to_pylist()}


def file_hashes(data: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (data / "manifest").iterdir()}


def test_no_manifest_is_a_users_error_with_the_command_to_run(tmp_path: Path) -> None:
    for read in (read_videos, read_captions, read_rejected_rows):
        with pytest.raises(UserError, match="no manifest") as caught:
            read(tmp_path)
        assert "prep manifest" in str(caught.value.hint)


def test_tables_have_the_columns_of_the_schema(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["v", "w"], [("w", 0.0, inf, "whole"), ("v", 1.5, 2.0, "part")]))
    assert read_videos(tmp_path).schema.equals(VIDEOS)
    assert read_captions(tmp_path).schema.equals(CAPTIONS)
    assert read_rejected_rows(tmp_path).schema.equals(REJECTED)
    assert read_captions(tmp_path).to_pylist() == [
        {"caption_id": 0, "video_id": "w", "begin_s": 0.0, "end_s": inf, "text": "whole", "source": "human"},
        {"caption_id": 1, "video_id": "v", "begin_s": 1.5, "end_s": 2.0, "text": "part", "source": "human"},
    ]
    assert read_videos(tmp_path)["num_captions"].to_pylist() == [1, 1]


def test_a_caption_keeps_its_id_whatever_comes_and_goes(tmp_path: Path) -> None:
    first = [("v", 0.0, 1.0, "one"), ("v", 1.0, 2.0, "two"), ("w", 0.0, 1.0, "three")]
    write(tmp_path, reading_of(tmp_path, ["v", "w"], first))
    assert ids_by_text(tmp_path) == {"one": 0, "two": 1, "three": 2}
    second = [("w", 0.0, 1.0, "three"), ("v", 0.0, 1.0, "new"), ("v", 0.0, 1.0, "one")]
    written = write(tmp_path, reading_of(tmp_path, ["w", "v"], second))
    assert ids_by_text(tmp_path) == {"one": 0, "three": 2, "new": 3}
    assert written.num_captions_added == 1
    assert read_captions(tmp_path)["caption_id"].to_pylist() == [0, 2, 3]


def test_the_id_of_a_caption_that_is_gone_is_never_given_again(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one"), ("v", 1.0, 2.0, "two")]))
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one")]))
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one"), ("v", 0.0, 1.0, "other")]))
    assert ids_by_text(tmp_path) == {"one": 0, "other": 2}


@pytest.mark.parametrize("change", ["begin", "end", "text", "video"])
def test_a_change_of_what_identifies_a_caption_makes_it_new(tmp_path: Path, change: str) -> None:
    write(tmp_path, reading_of(tmp_path, ["v", "w"], [("v", 0.0, 1.0, "one")]))
    changed = {
        "begin": ("v", 0.5, 1.0, "one"),
        "end": ("v", 0.0, 1.5, "one"),
        "text": ("v", 0.0, 1.0, "One"),
        "video": ("w", 0.0, 1.0, "one"),
    }[change]
    write(tmp_path, reading_of(tmp_path, ["v", "w"], [changed]))
    assert read_captions(tmp_path)["caption_id"].to_pylist() == [1]


def test_equal_captions_are_matched_one_to_one(tmp_path: Path) -> None:
    twice = [("v", 0.0, 1.0, "same"), ("v", 0.0, 1.0, "same")]
    write(tmp_path, reading_of(tmp_path, ["v"], twice))
    written = write(tmp_path, reading_of(tmp_path, ["v"], [*twice, ("v", 0.0, 1.0, "same")]))
    assert written.num_captions_added == 1
    assert read_captions(tmp_path)["caption_id"].to_pylist() == [0, 1, 2]


def test_thousands_of_captions_in_another_order_keep_their_ids(tmp_path: Path) -> None:
    videos = [f"v{number}" for number in range(40)]
    rng = random.Random(1)
    captions = [(rng.choice(videos), float(n % 50), n % 50 + 1.5, f"caption {n} é🎬") for n in range(5000)]
    write(tmp_path, reading_of(tmp_path, videos, captions))
    before = ids_by_text(tmp_path)
    rng.shuffle(captions)
    written = write(tmp_path, reading_of(tmp_path, videos, captions))
    assert written.num_captions_added == 0
    assert ids_by_text(tmp_path) == before


def test_videos_keep_their_rows_and_new_ones_come_last(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["m", "z"], []))
    write(tmp_path, reading_of(tmp_path, ["q"], [], dataset="b"), dataset="b")
    write(tmp_path, reading_of(tmp_path, ["a", "z", "m"], []))
    assert read_videos(tmp_path)["video_id"].to_pylist() == ["m", "z", "q", "a"]
    written = write(tmp_path, reading_of(tmp_path, ["a", "z"], []))
    assert read_videos(tmp_path)["video_id"].to_pylist() == ["z", "q", "a"]
    assert (written.num_videos_added, written.num_videos_removed) == (0, 1)


def test_a_data_set_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one")], labels={"label_class": "cat"}))
    write(
        tmp_path,
        reading_of(tmp_path, ["w"], [("w", 0.0, 1.0, "two")], dataset="b", labels={"label_verb": 7}),
        dataset="b",
    )
    write(
        tmp_path,
        reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one"), ("v", 0.0, 2.0, "three")], labels={"label_class": "cat"}),
    )
    rows = [(row["text"], row["label_class"], row["label_verb"]) for row in read_captions(tmp_path).to_pylist()]
    assert rows == [("one", "cat", None), ("two", None, 7), ("three", "cat", None)]
    assert set(read_manifest(tmp_path)["datasets"]) == {"a", "b"}


def test_a_label_of_two_types_is_refused_and_the_manifest_stays(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one")], labels={"label_class": "cat"}))
    before = file_hashes(tmp_path)
    with pytest.raises(UserError, match="label_class"):
        write(
            tmp_path,
            reading_of(tmp_path, ["w"], [("w", 0.0, 1.0, "x")], dataset="b", labels={"label_class": 1}),
            dataset="b",
        )
    assert file_hashes(tmp_path) == before


def test_an_id_of_another_data_set_is_rejected_with_its_captions_counted(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one")]))
    captions = [("v", 0.0, 1.0, "mine"), ("w", 0.0, 1.0, "two")]
    written = write(tmp_path, reading_of(tmp_path, ["v", "w"], captions, dataset="b"), dataset="b")
    assert (written.num_videos, written.num_captions, written.num_captions_lost) == (1, 1, 1)
    assert written.num_rejected == {"duplicate_id": 1}
    assert ids_by_text(tmp_path) == {"one": 0, "two": 1}
    assert [row["source_id"] for row in read_rejected_rows(tmp_path).to_pylist()] == ["v"]


def test_the_digest_of_a_video_changes_with_its_captions_only(tmp_path: Path) -> None:
    captions = [("v", 0.0, 1.0, "one"), ("w", 0.0, 1.0, "two")]
    write(tmp_path, reading_of(tmp_path, ["v", "w", "u"], captions))
    before = digests(tmp_path)
    assert before["u"] == hashlib.sha256(b"").hexdigest()
    write(tmp_path, reading_of(tmp_path, ["v", "w", "u"], [*captions, ("w", 2.0, 3.0, "three")]))
    after = digests(tmp_path)
    assert after["w"] != before["w"]
    assert (after["v"], after["u"]) == (before["v"], before["u"])


def test_the_digest_sees_labels_and_where_texts_are_cut(tmp_path: Path) -> None:
    seen = set()
    for number, (texts, label) in enumerate([(("ab", "c"), 1), (("a", "bc"), 1), (("a", "bc"), 2)]):
        captions = [("v", 0.0, 1.0, text) for text in texts]
        data = tmp_path / str(number)
        write(data, reading_of(tmp_path, ["v"], captions, labels={"label_verb": label}))
        seen.add(digests(data)["v"])
    assert len(seen) == 3


def test_the_same_write_again_gives_the_same_bytes(tmp_path: Path) -> None:
    captions = [("v", 1.0, 2.0, "one"), ("w", 0.0, 1.0, "two")]
    write(tmp_path, reading_of(tmp_path, ["v", "w"], captions))
    write(tmp_path, reading_of(tmp_path, ["x"], [("x", 0.0, 1.0, "three")], dataset="b"), dataset="b")
    before = file_hashes(tmp_path)
    write(tmp_path, reading_of(tmp_path, ["w", "v"], captions[::-1]))
    assert file_hashes(tmp_path) == before


def test_row_groups_do_not_depend_on_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipmill.manifests.caption_table.ROWS_PER_GROUP", 4)
    for dataset in ("a", "b", "a"):
        videos = [f"{dataset}{n}" for n in range(3)]
        captions = [(video, 0.0, 1.0 + n, f"{video} {n}") for video in videos for n in range(5)]
        write(tmp_path, reading_of(tmp_path, videos, captions, dataset=dataset), dataset=dataset)
    captions = [("a2", 9.0, 10.0, "late"), ("a0", 0.0, 1.0, "a0 0"), *captions[1:]]
    write(tmp_path, reading_of(tmp_path, videos, captions))
    with pq.ParquetFile(tmp_path / "manifest" / "captions.parquet") as file:
        sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert sizes == [4] * 7 + [3]
    table = read_captions(tmp_path)
    assert table["caption_id"].to_pylist() == list(range(31))
    assert table["text"].to_pylist()[-1] == "late"


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest").mkdir()
    publish_checked_json(tmp_path / "manifest" / "manifest.json", {"format": 99})
    with pytest.raises(UserError, match="format 99"):
        read_videos(tmp_path)


def test_a_data_set_may_become_empty_of_captions(tmp_path: Path) -> None:
    write(tmp_path, reading_of(tmp_path, ["v"], [("v", 0.0, 1.0, "one")]))
    write(tmp_path, reading_of(tmp_path, ["v"], []))
    assert read_captions(tmp_path).num_rows == 0
    assert read_captions(tmp_path).schema.equals(CAPTIONS)
