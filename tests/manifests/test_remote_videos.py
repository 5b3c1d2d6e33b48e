"""Tests that datasets in a bucket are read like local ones, and that on a web server, a table lists the videos."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest

from clipmill.manifests.adapters.clips import read_kinetics, read_vatex
from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.further import read_caption_tables
from clipmill.manifests.adapters.reading import Reading, read_with_local_tables
from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import open_objects
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.server import S3Server
from tests.train.data.http_folder import HttpFolder

FILES = {
    "a.mp4": b"1",
    "a.en.srt": b"1\n00:00:01,000 --> 00:00:02,000\nhello\n",
    "val/b c.mkv": b"2",
    "val/b c.json": b'{"segments": [{"start": 0.5, "end": 1.5, "text": "spoken"}]}',
    "twice/x.mp4": b"3",
    "twice/x.avi": b"4",
    "empty.mp4": b"",
    ".hidden/h.mp4": b"5",
    "notes.txt": b"6",
    "\u00fc.MOV": b"7",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "videos" / name).write_bytes(content)
    return tmp_path / "videos"


@pytest.fixture
def videos_url(bucket: str) -> str:
    objects = open_objects(bucket)
    for name, content in FILES.items():
        objects.write(f"videos/{name}", content)
    objects.write("videos-of-others/z.mp4", b"8")
    return f"{bucket}/videos"


@pytest.fixture
def web(here: Path) -> Iterator[HttpFolder]:
    folder = HttpFolder(here)
    yield folder
    folder.close()


def rows(reading: Reading, place: Path | str) -> list[object]:
    """Return all values of a reading, with paths relative to the folder."""
    tables = (reading.videos, reading.captions, reading.rejected)
    text = json.dumps([table.to_pylist() for table in tables] + [reading.num_rows_used, reading.notes], default=str)
    return list(json.loads(text.replace(str(place), "HERE").replace("the object is", "the file is")))


@pytest.mark.parametrize("subtitles", [False, True])
def test_a_bucket_is_read_like_a_folder(here: Path, videos_url: str, tmp_path: Path, subtitles: bool) -> None:
    table = tmp_path / "captions.csv"
    table.write_text('video,text,end_s\na.mp4,one,2\n"val/b c",two,-3\nnowhere,three,1\ntwice/x,four,1\n')
    read = [read_folder(place, captions=table, subtitles=subtitles) for place in (here, videos_url)]
    local, remote = rows(read[0], here), rows(read[1], videos_url)
    if not subtitles:  # objects are not read for a note
        assert "1 subtitle file" in str(local[-1]) and "1 subtitle file" in str(remote[-1])
        local[-1] = remote[-1] = []
    assert remote == local
    assert read[1].videos["path"].to_pylist()[0] == f"{videos_url}/a.mp4"


def test_the_data_folder_in_the_bucket_is_skipped(videos_url: str) -> None:
    reading = read_folder(videos_url, skip=f"{videos_url}/twice")
    assert not any("twice" in path for path in reading.videos["path"].to_pylist())


def test_annotations_in_a_bucket_keep_their_names(here: Path, videos_url: str, bucket: str) -> None:
    objects = open_objects(bucket)
    entries = [{"videoID": "a", "enCap": ["one", ""]}, {"videoID": "gone", "enCap": ["two"]}]
    objects.write("lists/vatex_training.json", json.dumps(entries).encode())
    url = f"{bucket}/lists/vatex_training.json"
    reading = read_with_local_tables([url], lambda tables: read_vatex(videos_url, annotations=tables))
    assert reading.captions["text"].to_pylist() == ["one"] and reading.num_rows_used == {url: 1}
    assert {row["file"] for row in reading.rejected.to_pylist()} == {url}
    objects.write("lists/train.csv", b"a.mp4,jumping\n")
    reading = read_with_local_tables(
        [f"{bucket}/lists/train.csv"], lambda tables: read_kinetics(tables, videos=f"{bucket}/videos")
    )
    assert reading.captions["label_class"].to_pylist() == ["jumping"]
    objects.write("lists/broken.json", b"[")
    with pytest.raises(UserError, match=f"{bucket}/lists/broken.json"):
        read_with_local_tables(
            [f"{bucket}/lists/broken.json"], lambda tables: read_vatex(videos_url, annotations=tables)
        )
    with pytest.raises(UserError, match=f"cannot read {bucket}/lists/none.json: no such object"):
        read_with_local_tables([f"{bucket}/lists/none.json"], lambda tables: read_vatex(videos_url, annotations=tables))


def test_a_table_of_urls(tmp_path: Path, web: HttpFolder, videos_url: str, faults: Faults) -> None:
    host = web.address.removeprefix("http://")
    table = tmp_path / "videos.csv"
    names = [
        f"{web.address}/a.mp4",
        f"{web.address}/val/b%20c.mkv",
        f"{videos_url}/twice/x.mp4",
        f"{videos_url}/\u00fc.MOV",
        f"{web.address}/gone.mp4",
        f"{web.address}/empty.mp4",
        f"{web.address}/notes.txt",
        f"{web.address}/a.mp4?sig=hunter2",
        "relative.mp4",
        f"{web.address}/a.mp4",
    ]
    table.write_text("video,text\n" + "".join(f"{name},{'text' * (number % 2)}\n" for number, name in enumerate(names)))
    reading = read_folder(None, captions=table)
    bucket_name = videos_url.removeprefix("s3://")
    ids = {row["source_id"]: row["split"] for row in reading.videos.to_pylist()}
    assert ids == {
        f"{host}/a": "train",
        f"{host}/val/b c": "val",
        f"{bucket_name}/twice/x": "train",
        f"{bucket_name}/\u00fc": "train",
    }
    assert reading.captions.num_rows == 3 and reading.num_rows_used == {str(table): 5}
    rejected = [(row["reason"], row["source_id"]) for row in reading.rejected.to_pylist()]
    assert sorted(rejected) == sorted(
        [
            ("empty_file", f"{host}/empty"),
            ("malformed_row", "relative.mp4"),
            ("malformed_row", f"{web.address}/a.mp4?..."),
            ("missing_file", f"{web.address}/empty.mp4"),
            ("missing_file", f"{web.address}/gone.mp4"),
            ("missing_file", f"{web.address}/notes.txt"),
        ]
    )
    assert "hunter2" not in str(reading.rejected.to_pylist())
    faults.set(Fault("error", method="HEAD", path="twice", status=403))
    reasons = [row["reason"] for row in read_folder(None, captions=table).rejected.to_pylist()]
    assert "unreadable" in reasons


def test_a_row_that_cannot_be_served_does_not_refuse_its_table(tmp_path: Path, videos_url: str) -> None:
    table = tmp_path / "videos.csv"
    table.write_text(f"video,text\n{videos_url}/a.mp4,one\nftp://host/b.mp4,two\ns3://,three\ngopher://x/c.mp4,four\n")
    reading = read_folder(None, captions=table)
    assert reading.captions["text"].to_pylist() == ["one"]
    rejected = {row["source_id"]: row["detail"] for row in reading.rejected.to_pylist()}
    assert rejected.keys() == {"ftp://host/b.mp4", "s3://", "gopher://x/c.mp4"}
    assert "ftp:// URLs are not supported: ftp://host" in rejected["ftp://host/b.mp4"]


def test_a_table_leads_to_no_server_of_this_machine_that_the_user_does_not_allow(
    tmp_path: Path, web: HttpFolder, videos_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLIPMILL_ALLOWED_HOSTS")
    local = web.address.replace("127.0.0.1", "localhost")
    private = [
        web.address,
        local,
        "http://169.254.169.254/latest",
        "http://[::1]:1",
        "https://10.0.0.1",
        "http://0x7f000001",
    ]
    table = tmp_path / "videos.csv"
    rows = [f"{videos_url}/a.mp4", *(f"{address}/a.mp4" for address in private)]
    table.write_text("video,text\n" + "".join(f"{row},text\n" for row in rows))
    reading = read_folder(None, captions=table)
    assert reading.videos["path"].to_pylist() == [f"{videos_url}/a.mp4"] and not web.num_bytes
    rejected = {row["source_id"]: row["detail"] for row in reading.rejected.to_pylist()}
    assert rejected.keys() == set(rows[1:])
    advice = "in the network of this machine (127.0.0.1); set CLIPMILL_ALLOWED_HOSTS=127.0.0.1 to allow it"
    assert advice in rejected[rows[1]]
    # The user's own folder is always contacted, and so is an allowed host.
    table.write_text("video,text\na.mp4,one\n")
    assert read_folder(web.address, captions=table).videos.num_rows == 1
    monkeypatch.setenv("CLIPMILL_ALLOWED_HOSTS", "other, localhost")
    table.write_text(f"video,text\n{local}/a.mp4,one\n")
    assert read_folder(None, captions=table).videos.num_rows == 1


def test_redirects_lead_to_allowed_hosts_only(tmp_path: Path, web: HttpFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    away = web.address.replace("127.0.0.1", "localhost")
    web.redirects = {"/signed.mp4": "/a.mp4?Signature=x", "/away.mp4": f"{away}/a.mp4?Signature=y"}
    table = tmp_path / "videos.csv"
    table.write_text(f"video,text\n{web.address}/signed.mp4,one\n{web.address}/away.mp4,two\n")
    reading = read_folder(None, captions=table)
    assert reading.captions["text"].to_pylist() == ["one"]
    (why,) = (row["detail"] for row in reading.rejected.to_pylist() if row["reason"] == "unreadable")
    assert why.startswith("the server redirects to a different host: localhost is in the network of this machine")
    objects = open_objects(web.address)
    assert objects.read("signed.mp4") == b"1" and objects.read_range("signed.mp4", 0, 1) == b"1"
    for read in (objects.read, objects.info, lambda key: objects.fetch(key, tmp_path / "copy")):
        with pytest.raises(OSError, match="redirects to a different host"):
            read("away.mp4")
    monkeypatch.setenv("CLIPMILL_ALLOWED_HOSTS", "127.0.0.1,localhost")
    assert read_folder(None, captions=table).captions["text"].to_pylist() == ["one", "two"]


def test_names_below_the_url_of_a_folder(tmp_path: Path, web: HttpFolder) -> None:
    table = tmp_path / "captions.csv"
    table.write_text(f"video,text\n./a.mp4,one\nb c.mkv,two\n{web.address}/val/b%20c.mkv,three\n")
    reading = read_folder(f"{web.address}/", captions=table)
    assert reading.videos["source_id"].to_pylist() == ["a", "val/b c"]
    assert reading.captions["text"].to_pylist() == ["one", "three"]
    with pytest.raises(UserError, match="cannot be listed: it is on a web server"):
        read_folder(web.address)
    with pytest.raises(UserError, match="cannot be listed"):
        read_vatex(web.address, annotations=[table])
    with pytest.raises(UserError, match="VIDEOS is required"):
        read_folder(None)


def test_further_captions_name_videos_by_their_urls(tmp_path: Path, videos_url: str) -> None:
    table = tmp_path / "more.csv"
    table.write_text(
        f"video,text,begin_s,end_s\n{videos_url}/a.mp4,one,0,1\nval/b c.mkv,two,0,1\n{videos_url}/gone.mp4,no,0,1\n"
    )
    videos = read_folder(videos_url).videos
    read = read_caption_tables([table], videos=videos, dataset="further", source="model")
    assert read.reading.captions["text"].to_pylist() == ["one", "two"]


def test_a_video_whose_name_cannot_be_asked_for_is_rejected(videos_url: str, s3: S3Server) -> None:
    for name in ("odd//v.mp4", "odd/../v.mp4", "odd//notes.txt"):
        s3.put(videos_url, name, b"9")
    read = read_folder(videos_url)
    rejected = read.rejected.filter(pc.equal(read.rejected["reason"], "bad_name"))
    assert rejected["file"].to_pylist() == [f"{videos_url}/odd/../v.mp4", f"{videos_url}/odd//v.mp4"]
    assert read.videos.num_rows == 5
