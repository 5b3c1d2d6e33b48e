"""Tests of a folder of videos with broken entries: each becomes one rejected row, and the others are used."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.clips import read_vatex
from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker


def rejected_rows(reading: Reading) -> dict[str, tuple[str, str]]:
    rows = reading.rejected.to_pylist()
    return {Path(row["file"]).name: (row["reason"], row["detail"]) for row in rows}


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere.mp4")


def loop_of_links(path: Path) -> None:
    path.symlink_to(path.name)


def link_with_too_long_a_name(path: Path) -> None:
    path.symlink_to("x" * 300)


def link_through_a_file(path: Path) -> None:
    (path.parent / "plain").write_text("no folder")
    path.symlink_to("plain/x.mp4")


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        # The path of a socket must be short.
        here = Path.cwd()
        os.chdir(path.parent)
        listening.bind(path.name)
        os.chdir(here)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "reason", "detail"),
    [
        (link_to_nothing, "unreadable", "broken link"),
        (loop_of_links, "unreadable", os.strerror(errno.ELOOP)),
        (link_with_too_long_a_name, "unreadable", os.strerror(errno.ENAMETOOLONG)),
        (link_through_a_file, "unreadable", os.strerror(errno.ENOTDIR)),
        (os.mkfifo, "not_a_file", "a pipe"),
        (socket_file, "not_a_file", "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "not_a_file", "a device"),
        (Path.mkdir, "not_a_file", "a folder"),
        (Path.touch, "empty_file", "the file is empty"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_entry_that_is_no_file_is_rejected_by_name(
    make_videos: VideoMaker, tmp_path: Path, make: Callable[[Path], Any], reason: str, detail: str
) -> None:
    folder = make_videos("a.mp4", "deep/z.mp4")
    make(folder / "deep" / "bad.mp4")
    reading = read_folder(folder)
    assert reading.videos["source_id"].to_pylist() == ["a", "deep/z"]
    assert list(rejected_rows(reading)) == ["bad.mp4"]
    assert rejected_rows(reading)["bad.mp4"][0] == reason
    assert detail in rejected_rows(reading)["bad.mp4"][1]
    # Captions of such a video are counted as lost; the captions of other videos are kept.
    annotations = tmp_path / "vatex.json"
    annotations.write_text('[{"videoID": "bad", "enCap": ["x", "y"]}, {"videoID": "a", "enCap": ["z"]}]')
    of_vatex = read_vatex(folder, annotations=[annotations])
    assert (of_vatex.videos["source_id"].to_pylist(), of_vatex.num_captions_lost) == (["a"], 2)


def test_a_link_that_may_have_led_to_a_folder_is_listed(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4")
    (folder / "season 2").symlink_to("/not/mounted")
    (folder / "loop").symlink_to("loop")
    assert {name: reason for name, (reason, _) in rejected_rows(read_folder(folder)).items()} == {
        "season 2": "unreadable",
        "loop": "unreadable",
    }


def test_a_folder_named_like_a_video_is_looked_into(make_videos: VideoMaker) -> None:
    reading = read_folder(make_videos("x.mp4/inner.mp4", "y.mp4/notes.txt"))
    assert reading.videos["source_id"].to_pylist() == ["x.mp4/inner"]
    assert list(rejected_rows(reading)) == ["y.mp4"]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_subfolder_that_cannot_be_listed_is_one_row(
    make_videos: VideoMaker, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    folder, listed = make_videos("a.mp4", "locked/b.mp4", "open/c.mp4"), os.scandir

    def scandir(path: Path) -> Any:
        if Path(path).name == "locked":
            raise OSError(error, os.strerror(error), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    reading = read_folder(folder)
    assert reading.videos["source_id"].to_pylist() == ["a", "open/c"]
    assert rejected_rows(reading)["locked"][0] == "unreadable"
    assert os.strerror(error) in rejected_rows(reading)["locked"][1]


def test_a_file_that_cannot_be_looked_at_is_one_row(make_videos: VideoMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, look = make_videos("a.mp4", "b.mp4"), Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == "b.mp4":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    reading = read_folder(folder)
    assert reading.videos["source_id"].to_pylist() == ["a"]
    assert rejected_rows(reading) == {"b.mp4": ("unreadable", os.strerror(errno.EIO))}


def test_a_folder_of_broken_entries_only_says_why(tmp_path: Path) -> None:
    (tmp_path / "old disk").symlink_to("/not/mounted")
    with pytest.raises(UserError, match=r"no video files in .*old disk: No such file"):
        read_folder(tmp_path)


def test_the_root_itself_may_be_broken(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for directory in (tmp_path / "loop", tmp_path / ("x" * 300), tmp_path / "gone"):
        with pytest.raises(UserError, match=r"no such folder|cannot access"):
            read_folder(directory)


def test_a_folder_that_is_linked_too_goes_by_its_own_name(make_videos: VideoMaker) -> None:
    folder = make_videos("m/a.mp4")
    for name in ("a", "z"):
        (folder / name).symlink_to("m")
    assert read_folder(folder).videos["source_id"].to_pylist() == ["m/a"]
