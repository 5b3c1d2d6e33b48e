"""Tests of a folder of videos and its table of captions."""

import json
import os
from math import inf
from pathlib import Path

import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key, split_key
from tests.manifests.conftest import VideoMaker

STRANGE = [
    "a.b.mp4",
    "with space.MP4",
    "🎬 film.mkv",
    "deep/er/x.webm",
    "x" * 200 + ".avi",
    "deep/" + "y" * 140 + "/" + "z" * 150 + ".mov",
]


def reasons(reading: Reading) -> list[tuple[str, str | None]]:
    return [(row["reason"], row["source_id"]) for row in reading.rejected.to_pylist()]


def captions(reading: Reading) -> list[tuple[str, float, float, str, str]]:
    return [tuple(row.values()) for row in reading.captions.to_pylist()]


def test_every_kind_of_name_becomes_an_id_that_can_stand_in_a_key(make_videos: VideoMaker) -> None:
    folder = make_videos(*STRANGE)
    reading = read_folder(folder)
    rows = reading.videos.to_pylist()
    assert {row["path"] for row in rows} == {str(folder / name) for name in STRANGE}
    assert {row["source_id"] for row in rows} == {name.rsplit(".", 1)[0] for name in STRANGE}
    assert len({row["video_id"] for row in rows}) == len(STRANGE)
    for row in rows:
        key = chunk_key(row["video_id"], 15_000)
        assert split_key(key) == (row["video_id"], 15_000)
        assert len(f"{key}.latents.npy".encode()) <= 100


def test_hidden_files_other_files_and_the_data_folder_are_passed_over(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4", ".b.mp4", ".hidden/c.mp4", "notes.txt", "list.m3u8", "data/video/d.mp4")
    reading = read_folder(folder, skip=folder / "data")
    assert reading.videos["source_id"].to_pylist() == ["a"]
    assert reading.notes == (
        "ignored 1 hidden video (names that begin with a dot)",
        "2 files without a video extension: 1 .m3u8, 1 .txt",
    )


def test_links_to_folders_are_followed_once(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4", "sub/b.mp4")
    (folder / "sub" / "loop").symlink_to(folder)
    assert read_folder(folder).videos["source_id"].to_pylist() == ["a", "sub/b"]


def test_links_that_lead_out_of_the_folder_are_counted(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder = make_videos("a.mp4", "sub/b.mp4")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "c.mp4").write_bytes(b"video")
    (folder / "same").symlink_to("sub")
    (folder / "disk").symlink_to(elsewhere)
    reading = read_folder(folder)
    assert reading.videos["source_id"].to_pylist() == ["a", "disk/c", "sub/b"]
    assert reading.notes == (f"followed 1 symbolic link that leads out of the folder: disk to {elsewhere}",)
    (folder / "sub" / "e.mp4").symlink_to("../../elsewhere/c.mp4")
    (folder / "broken.mp4").symlink_to(elsewhere / "gone.mp4")  # a broken link, which is rejected
    assert read_folder(folder).notes == (
        f"followed 2 symbolic links that lead out of the folder: disk to {elsewhere}, and 1 more",
    )


def test_captions_that_are_names_of_classes_are_noted(make_videos: VideoMaker, tmp_path: Path) -> None:
    (table := tmp_path / "t.csv").write_text("video,text,label\na,,cat\nb,a dog runs,dog\n")
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=table)
    assert [(row[3], row[4]) for row in captions(reading)] == [("cat", "class"), ("a dog runs", "human")]
    note = (
        "t.csv: 1 row with labels and without a text: the captions are the names of the classes, with the source class"
    )
    assert note in reading.notes


def test_files_that_differ_in_their_ending_only_are_different_videos(make_videos: VideoMaker) -> None:
    reading = read_folder(make_videos("a.avi", "a.mp4", "a.mp4.avi", "sub/a.mp4"))
    assert reading.videos["source_id"].to_pylist() == ["a.avi", "a.mp4", "a.mp4.avi", "sub/a"]
    assert len(set(reading.videos["video_id"].to_pylist())) == 4
    assert reasons(reading) == []


def known_files(reading: Reading) -> dict[str, str]:
    rows = reading.videos.to_pylist()
    return {row["source_id"]: Path(row["path"]).name for row in rows}


def test_a_file_keeps_its_id_when_one_with_another_ending_comes_or_goes(
    make_videos: VideoMaker, tmp_path: Path
) -> None:
    folder = make_videos("a.mp4", "b.mp4")
    table = tmp_path / "captions.csv"
    table.write_text("video,text\na,one\na.mp4,two\n")
    before = read_folder(folder, captions=table)
    make_videos("a.mkv")
    after = read_folder(folder, captions=table, known_files=known_files(before))
    assert known_files(after) == {"a": "a.mp4", "a.mkv": "a.mkv", "b": "b.mp4"}
    # Captions stay with the video whose ID is their name.
    assert captions(after) == captions(before)
    assert known_files(read_folder(folder, known_files=known_files(after))) == known_files(after)
    (folder / "a.mp4").unlink()
    assert known_files(read_folder(folder, known_files=known_files(after))) == {"a.mkv": "a.mkv", "b": "b.mp4"}


def test_a_name_that_fits_two_new_files_is_ambiguous_on_the_rerun_too(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder = make_videos("a.mp4", "a.mkv")
    table = tmp_path / "captions.csv"
    table.write_text("video,text\na,one\na.mp4,two\n")
    first = read_folder(folder, captions=table)
    again = read_folder(folder, captions=table, known_files=known_files(first))
    for reading in (first, again):
        assert [row[3] for row in captions(reading)] == ["two"]
        assert reasons(reading) == [("ambiguous_video", "a")]
    assert again.videos.equals(first.videos)


def test_a_file_without_bytes_is_rejected(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4")
    (folder / "empty.mp4").touch()
    assert reasons(read_folder(folder)) == [("empty_file", "empty")]


def test_a_file_name_that_is_not_unicode_is_rejected(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4")
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff.mp4")).write_bytes(b"video")
    except OSError:
        pytest.skip("this file system accepts only Unicode names")
    reading = read_folder(folder)
    assert [reason for reason, _ in reasons(reading)] == ["bad_name"]
    assert reading.videos["source_id"].to_pylist() == ["a"]


def test_splits_come_from_folders(make_videos: VideoMaker) -> None:
    reading = read_folder(make_videos("val/a.mp4", "test/x/b.mp4", "c.mp4", "Validation/d.mp4"))
    assert dict(zip(reading.videos["source_id"].to_pylist(), reading.videos["split"].to_pylist(), strict=True)) == {
        "val/a": "val",
        "test/x/b": "test",
        "c": "train",
        "Validation/d": "val",
    }


def test_captions_name_videos_by_path_or_name_with_or_without_ending(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder = make_videos("a.b.mp4", "sub/c.mp4")
    table = tmp_path / "captions.csv"
    names = ["a.b.mp4", "a.b", "sub/c.mp4", "sub/c", "c.mp4", "c"]
    table.write_text("video,text\n" + "".join(f"{name},caption {n}\n" for n, name in enumerate(names)))
    reading = read_folder(folder, captions=table)
    videos = reading.videos["video_id"].to_pylist()
    assert [row[0] for row in captions(reading)] == [videos[0]] * 2 + [videos[1]] * 4
    assert reading.rejected.num_rows == 0


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_table_gives_times_sources_and_splits(make_videos: VideoMaker, tmp_path: Path, ending: str) -> None:
    folder = make_videos("a.mp4", "b.mp4")
    rows = [
        {"video": "a", "text": "  A, with comma ", "begin_s": 1.5, "end_s": 2, "source": "asr", "split": "val"},
        {"video": "b", "text": "whole"},
        {"video": "b", "text": "from here", "begin_s": 3},
    ]
    table = tmp_path / f"captions.{ending}"
    if ending == "jsonl":
        table.write_text("\n".join(map(json.dumps, rows)))
    else:
        table.write_text(
            '\ufeffvideo,text,begin_s,end_s,source,split\r\na,"  A, with comma ",1.5,2,asr,val\r\n'
            "b,whole,,,,\r\nb,from here,3,,,\r\n"
        )
    reading = read_folder(folder, captions=table)
    assert captions(reading) == [
        ("a", 1.5, 2.0, "A, with comma", "asr"),
        ("b", 0.0, inf, "whole", "human"),
        ("b", 3.0, inf, "from here", "human"),
    ]
    assert reading.videos["split"].to_pylist() == ["val", "train"]


def test_sources_have_the_names_that_further_ones_may_have(make_videos: VideoMaker, tmp_path: Path) -> None:
    names = ["two words", "x@y", "a\n", "été_2.en-GB", "captioner@1f2e3d4c", ""]
    table = tmp_path / "captions.jsonl"
    table.write_text("\n".join(json.dumps({"video": "a", "text": name or "x", "source": name}) for name in names))
    reading = read_folder(make_videos("a.mp4"), captions=table)
    assert reading.rejected["reason"].to_pylist() == ["bad_source"] * 3
    assert "source is 'two words', expected letters, digits," in reading.rejected["detail"][0].as_py()
    assert [source for *_, source in captions(reading)] == ["été_2.en-GB", "captioner@1f2e3d4c", "human"]


def test_names_in_another_case_or_with_other_separators_are_taken_if_they_are_unique(
    make_videos: VideoMaker, tmp_path: Path
) -> None:
    folder = make_videos("Küche 2024/Häschen & Baum.mp4", "Trailer.MP4", "x/Same.mp4", "y/same.mp4", "x/Dog.mp4")
    table = tmp_path / "captions.csv"
    names = [
        "Küche 2024\\Häschen & Baum.mp4",
        "TRAILER",
        "trailer.mp4",
        ".\\X\\same.mp4",
        "SAME.mp4",
        "dog.mov",
        "x/Dog",
    ]
    table.write_text("video,text\n" + "".join(f"{name},{number}\n" for number, name in enumerate(names)))
    reading = read_folder(folder, captions=table)
    assert sorted(row[3] for row in captions(reading)) == ["0", "1", "2", "3", "6"]
    assert reading.notes == (
        "captions.csv: matched 4 names of videos although separators or case differ, such as "
        '"Küche 2024\\Häschen & Baum.mp4" for "Küche 2024/Häschen & Baum.mp4"',
    )
    ambiguous, missing = reading.rejected.to_pylist()
    assert ambiguous["reason"] == "ambiguous_video" and "x/Same.mp4, y/same.mp4" in ambiguous["detail"]
    assert (missing["reason"], missing["row"]) == ("missing_file", 5) and "similar name: x/Dog.mp4" in missing["detail"]


def test_unusable_rows_are_listed_with_their_reason(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder = make_videos("a.mp4", "x/same.mp4", "y/same.mp4")
    (folder / "empty.mp4").touch()
    table = tmp_path / "captions.csv"
    bad = [
        ("gone,lost,0,1,", "missing_file"),
        ("gone,lost too,0,1,", None),
        ("empty,lost,0,1,", "missing_file"),
        (",no video,0,1,", "empty_id"),
        ("a,  ,0,1,", "empty_caption"),
        ("a,x,nan,1,", "bad_time"),
        ("a,x,-1,1,", "bad_time"),
        ("a,x,2,2,", "bad_time"),
        ("a,x,inf,,", "bad_time"),
        ("a.mp4,x,0,inf,", "bad_time"),
        ("a,x,0,1e8,", "bad_time"),
        ("a,x,1e300,1e301,", "bad_time"),
        ("a,x,0,nan,", "bad_time"),
        ("a,x,soon,1,", "bad_time"),
        ("same,x,0,1,", "ambiguous_video"),
        ("a,x,0,1,dev", "bad_split"),
        ("a,too few", "malformed_row"),
    ]
    table.write_text("video,text,begin_s,end_s,split\na,good,0,1,\n" + "".join(f"{line}\n" for line, _ in bad))
    reading = read_folder(folder, captions=table)
    assert [row[3] for row in captions(reading)] == ["good"]
    listed = reading.rejected.to_pylist()
    expected = {(row, reason) for row, (_, reason) in enumerate(bad, start=1) if reason is not None}
    assert {
        (row["row"], row["reason"]) for row in listed if row["file"] == str(table) and row["row"] is not None
    } == expected
    assert {row["source_id"] for row in listed if row["reason"] == "bad_time"} == {"a"}, (
        "the ID must not depend on the spelling"
    )
    lost = {row["source_id"]: row["detail"] for row in listed if row["reason"] == "missing_file"}
    assert lost["gone"].endswith("captions lost: 2")
    assert lost["empty"].endswith("captions lost: 1")
    assert reading.num_captions_lost == 3


def test_rows_of_a_video_keep_their_splits(make_videos: VideoMaker, tmp_path: Path) -> None:
    table = tmp_path / "captions.csv"
    table.write_text(
        "video,text,split\na,zero,\na,one,validation\na,two,test\na,three,\na,four,neither\nb,five,train\n"
    )
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=table)
    assert reading.videos["split"].to_pylist() == ["val", "train"]
    assert reading.captions.select(["text", "split"]).to_pylist() == [
        {"text": "zero", "split": None},
        {"text": "one", "split": None},
        {"text": "two", "split": "test"},
        {"text": "three", "split": None},
        {"text": "five", "split": None},
    ]
    assert reasons(reading) == [("bad_split", "a")]


def test_bad_lines_of_json_are_listed_and_the_others_read(make_videos: VideoMaker, tmp_path: Path) -> None:
    table = tmp_path / "captions.jsonl"
    table.write_text(
        '{"video": "a", "text": "one"}\n{"video": \n[1]\n{"video": "a", "text": 5}\n{"video": "a", "text": "\\ud800"}\n'
    )
    reading = read_folder(make_videos("a.mp4"), captions=table)
    assert reading.captions.num_rows == 1
    assert [row["reason"] for row in reading.rejected.to_pylist()] == ["malformed_row"] * 4
    assert [row["row"] for row in reading.rejected.to_pylist()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.csv", b"film,text\na,b\n", "no column for video; its first line is: film,text"),
        ("c.csv", b"", "no column for video and text; the file is empty"),
        ("c.csv", b"video,text\na,\xc3\xa9\nb,\xff\n", "line 3: not UTF-8"),
        ("c.csv", b"video,text\na,one\0\n", "line 2"),
        (".", b"", "it is a folder, not a file"),
        ("c.xlsx", b"", "is not a .csv, .tsv, .txt, .jsonl, .json or .parquet file"),
    ],
)
def test_a_table_that_cannot_be_read_is_a_users_error(
    make_videos: VideoMaker, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    if name != ".":
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_folder(make_videos("a.mp4", "b.mp4"), captions=tmp_path / name)


def test_a_folder_that_is_missing_a_file_or_empty_is_a_users_error(make_videos: VideoMaker, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a file"):
        read_folder(make_videos("a.mp4") / "a.mp4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no video files"):
        read_folder(tmp_path / "empty")
    with pytest.raises(UserError, match="cannot read"):
        read_folder(make_videos("a.mp4"), captions=tmp_path / "nothing.csv")


def test_files_are_taken_by_the_extensions_of_containers_and_the_others_counted(make_videos: VideoMaker) -> None:
    videos = (
        "vob",
        "ogv",
        "gif",
        "mxf",
        "asf",
        "wtv",
        "ivf",
        "dv",
        "mod",
        "divx",
        "m2v",
        "rm",
        "insv",
        "MP4",
        "qt",
        "tod",
    )
    others = ("jpg", "JPG", "mp3", "part", "m3u8")
    names = [f"{name}.{name}" for name in (*videos, *others)]
    reading = read_folder(make_videos(*names, "README", *(f"{number}.x{number}" for number in range(12))))
    assert sorted(reading.videos["source_id"].to_pylist()) == sorted(videos)
    [note] = reading.notes
    assert note.startswith("18 files without a video extension: 2 .jpg, 1 without an extension, 1 .m3u8")
    assert note.endswith(", 5 others")


def test_a_folder_without_videos_says_what_it_has(make_videos: VideoMaker) -> None:
    with pytest.raises(UserError, match=r"but 2 files without a video extension: 1 \.m3u8, 1 \.zip"):
        read_folder(make_videos("a.zip", "b.m3u8"))
