"""Tests of `prep chunk` with videos in a bucket or on a web server: shards equal local ones, and failures are named."""

import csv
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.sources import remote
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.plan_inputs import chunk_job, make_plan
from clipmill.prep.video.worker import make_shard
from clipmill.shards.commit_table import read_commits
from tests.object_storage.faults import Fault, Faults
from tests.prep.running import (
    Ran,
    chunk,
    contents,
    messages,
    prep,
    prep_here,
    processes,
    start,
    variant_folder,
    wait_until,
)
from tests.prep.scenes import write_scenes
from tests.train.data.http_folder import HttpFolder

QUICK = ("--preset", "ultrafast", "--short-side", "96")
LEN = ("--len", "500ms", *QUICK)
RECIPE = resolve(Recipe(len="500ms", preset="ultrafast", short_side=96), ffmpeg_version=find_ffmpeg().version)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    """Write a video whose spans are in several shards, a short one in a different container, and a text."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "long.mp4", seconds=22)
    write_scenes(folder / "val" / "short.mkv", [40, 30])
    (folder / "text.mp4").write_text("not a video")
    return folder


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = tmp_path_factory.mktemp("tables") / "captions.csv"
    table.write_text("video,text,begin_s,end_s\nlong.mp4,one,0,3\nval/short.mkv,two,0,1\nnowhere.mp4,lost,0,1\n")
    return table


@pytest.fixture(scope="module")
def local_shards(videos: Path, captions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the shards of the local files."""
    data = tmp_path_factory.mktemp("local")
    prep_here("manifest", "folder", videos, "--captions", captions, "--data", data)
    return shards(data, chunk(data, *LEN, status=1))


@pytest.fixture
def uploaded_videos(videos: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Upload the videos to a bucket and return its URL; copies go to a separate folder."""
    for path in videos.rglob("*.m*"):
        open_objects(bucket).write(f"videos/{path.relative_to(videos)}", path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    return f"{bucket}/videos"


@pytest.fixture
def web(videos: Path) -> Iterator[HttpFolder]:
    folder = HttpFolder(videos)
    yield folder
    folder.close()


def shards(data: Path, summary: dict[str, object]) -> dict[str, str]:
    """Return the checksums of tars and indexes; failures are not compared, because they contain paths of sources."""
    digests = contents(variant_folder(data, summary))
    return {name: checksum for name, checksum in digests.items() if name.endswith((".tar", ".arrow"))}


def failures(data: Path, summary: dict[str, object]) -> dict[str, str]:
    commits = read_commits(variant_folder(data, summary)).commits.values()
    return {failure.video_id: failure.code for commit in commits for failure in commit.failures}


def test_shards_of_a_bucket_are_those_of_the_local_files(
    tmp_path: Path, captions: Path, uploaded_videos: str, local_shards: dict[str, str], faults: Faults
) -> None:
    data = tmp_path / "data"
    open_objects(uploaded_videos).write("captions.csv", captions)
    prep_here("manifest", "folder", uploaded_videos, "--captions", f"{uploaded_videos}/captions.csv", "--data", data)
    prep("plan", *LEN, "--data", data)  # a separate process, which deletes the copy for its trial encodes
    wait_until(lambda: not list((tmp_path / "scratch").iterdir()))
    faults.set()
    summary = chunk(data, *LEN, status=1)
    assert shards(data, summary) == local_shards and summary["num_chunks"] > 40
    whole = [path for method, path in faults.seen().requests if method == "GET" and path.endswith("long.mp4")]
    assert len(whole) == 1, "all shards of this video must use one copy"
    wait_until(lambda: not list((tmp_path / "scratch").iterdir()))
    assert chunk(data, *LEN)["num_encoded"] == 0
    status = prep_here("status", "--data", data).stdout
    assert f"{uploaded_videos}/text.mp4" in status and "source_unreadable" in status
    assert f"folder: {uploaded_videos}/long.mp4" in prep_here("inspect", "long_000000000", "--data", data).stdout
    assert prep_here("retry", "--only", "source_unreadable", "--data", data, "--engine", "processes", status=1)


def test_videos_and_data_folder_in_one_bucket(
    tmp_path: Path, captions: Path, uploaded_videos: str, local_shards: dict[str, str]
) -> None:
    bucket = uploaded_videos.removesuffix("/videos")
    assert "is both the data folder" in prep_here("manifest", "folder", bucket, "--data", bucket, status=2).error
    data = f"{bucket}/data"
    prep_here("manifest", "folder", uploaded_videos, "--captions", captions, "--data", data)
    prep_here("chunk", *LEN, "--data", data, "--engine", "processes", "--workers", 2, status=1)
    open_objects(f"{data}/video").write("not-mine.mp4", b"x")
    keys = {
        info.key.partition("/")[2]: info.key
        for info in open_objects(f"{data}/video").list()
        if info.key.endswith((".tar", ".arrow"))
    }
    assert keys.keys() == local_shards.keys()
    for name, key in keys.items():
        assert hashlib.sha256(open_objects(f"{data}/video").read(key)).hexdigest() == local_shards[name]
    again = prep_here("manifest", "folder", bucket, "--captions", captions, "--data", data, "--yes", "--json")
    assert again.summary["num_videos"] == 3, "the data folder must be skipped"


def test_a_table_of_urls_on_a_web_server(tmp_path: Path, web: HttpFolder, local_shards: dict[str, str]) -> None:
    table, data = tmp_path / "videos.csv", tmp_path / "data"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["video", "text", "begin_s", "end_s"])
        rows.writerow([f"{web.address}/long.mp4", "one", "0", "3"])
        rows.writerow(["val/short.mkv", "two", "0", "1"])
        rows.writerow(["text.mp4", "", "", ""])
    web.num_failures["/long.mp4"] = 1
    prep_here("manifest", "folder", web.address, "--captions", table, "--data", data)
    assert shards(data, chunk(data, *LEN, status=1)) == local_shards


def test_faults_of_the_network_change_nothing(
    tmp_path: Path, captions: Path, uploaded_videos: str, local_shards: dict[str, str], faults: Faults
) -> None:
    data = tmp_path / "data"
    error = Fault("error", every=5, method="GET", path="/videos/")
    cut = Fault("cut", every=4, method="GET", path="/videos/")
    faults.set(error, cut, latency_s=0.01)
    prep_here("manifest", "folder", uploaded_videos, "--captions", captions, "--data", data)
    assert shards(data, chunk(data, *LEN, status=1)) == local_shards
    assert faults.seen().num_faults


def test_sources_that_vanish_or_change_after_the_plan_have_failed(tmp_path: Path, videos: Path, bucket: str) -> None:
    data, objects = tmp_path / "data", open_objects(bucket)
    for name in ("gone.mp4", "grown.mp4", "replaced.mp4"):
        objects.write(name, videos / "val" / "short.mkv")
    prep_here("manifest", "folder", bucket, "--data", data)
    planned = make_plan(data, RECIPE)
    objects.delete("gone.mp4")
    objects.write("grown.mp4", (videos / "val" / "short.mkv").read_bytes() + b"more")
    objects.write("replaced.mp4", (videos / "val" / "short.mkv").read_bytes()[::-1])
    planned.variant_dir.mkdir(parents=True)
    job = chunk_job(planned)
    copies = {}
    for shard in job.shards:
        for failure in make_shard(job.task(shard)).failures:
            copies[failure.video_id] = failure.code
            assert failure.message.startswith(f"{bucket}/{failure.video_id}.mp4: ")
    assert copies == {"gone": "source_missing", "grown": "source_changed", "replaced": "source_changed"}


def test_a_limit_that_a_source_exceeds_is_a_failure_until_it_is_raised(
    tmp_path: Path, videos: Path, bucket: str
) -> None:
    data = tmp_path / "data"
    open_objects(bucket).write("a.mkv", videos / "val" / "short.mkv")
    prep_here("manifest", "folder", bucket, "--data", data)
    summary = chunk(data, *LEN, "--scratch-size", "1kB", status=1)
    assert failures(data, summary) == {"a": "source_too_large"}
    assert chunk(data, *LEN)["num_encoded"] == 5, "failures must be tried again without prep retry"
    for size in ("60", "60XB", "x", "1e3GB"):
        ran = prep_here("chunk", *LEN, "--data", data, "--scratch-size", size, status=2)
        assert f'--scratch-size "{size}" is not a size' in ran.error


def test_sources_that_a_server_refuses_are_not_blamed_and_are_tried_again(
    tmp_path: Path, videos: Path, bucket: str, faults: Faults
) -> None:
    data = tmp_path / "data"
    for name in "ab":
        open_objects(bucket).write(f"videos/{name}.mkv", videos / "val" / "short.mkv")
    prep_here("manifest", "folder", f"{bucket}/videos", "--data", data)
    command = ("chunk", *LEN, "--data", data, "--workers", 1)
    remote._open_bucket.cache_clear()
    faults.set(Fault("error", status=403, code="AccessDenied"))
    error, hint = messages(prep_here(*command, status=3).stderr)
    assert error.startswith(f"error: {bucket}: access denied") and error.endswith("for all 2 sources")
    assert "credentials" in hint

    # The object can be listed but not read.
    faults.set(Fault("error", method="GET", path=r"a\.mkv", status=403, code="AccessDenied"))
    stdout = prep_here(*command, status=1).stdout
    assert "1 x access_refused: the server denies access" in stdout and "not a readable video" not in stdout
    faults.set()
    assert chunk(data, *LEN)["num_encoded"] == 5, "failures must be tried again without prep retry"


@pytest.mark.parametrize("code", ["ExpiredToken", "NoSuchBucket"])
def test_a_bucket_that_refuses_everything_ends_a_run_at_once(
    tmp_path: Path, videos: Path, bucket: str, faults: Faults, code: str
) -> None:
    data, names = tmp_path / "data", [f"{number}.mkv" for number in range(6)]
    for name in names:
        open_objects(bucket).write(name, (videos / "val" / "short.mkv").read_bytes() + name.encode())
    prep_here("manifest", "folder", bucket, "--data", data)
    command = ("chunk", *LEN, "--data", data, "--engine", "processes", "--workers", 1, "--max-failures", "100%")
    status = 404 if code == "NoSuchBucket" else 400
    refusal = Fault("error", method="GET", path=r"2\.mkv", status=status, code=code, spreads=True)
    faults.set(refusal)  # during the probes
    error, hint = messages(prep_here(*command, status=3).stderr)
    assert error.startswith(f"error: {bucket}/2.mkv: the ") and "run the same command again" in hint
    faults.set()
    prep_here("plan", *LEN, "--data", data)
    faults.set(refusal)  # after the probes
    (failed,) = messages(prep_here(*command, status=3).stderr)
    assert failed.startswith("failed: stopped: ")
    assert ("does not exist" if code == "NoSuchBucket" else f"the credentials are refused ({code})") in failed
    assert "finished work is kept; run the same command again" in failed
    faults.set()
    assert chunk(data, *LEN)["failures"] == {}


def test_a_kill_leaves_no_copy_for_long_and_loses_nothing(
    tmp_path: Path, captions: Path, uploaded_videos: str, local_shards: dict[str, str]
) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    prep_here("manifest", "folder", uploaded_videos, "--captions", captions, "--data", data)
    mark = f"remote-{os.getpid()}"
    running = start("chunk", *LEN, "--data", data, "--engine", "processes", "--workers", 2, CLIPMILL_TEST_MARK=mark)
    wait_until(lambda: any(process.is_ffmpeg for process in processes(mark)))
    assert list(scratch.glob("sources-*/*"))
    running.kill()
    running.communicate()
    wait_until(lambda: not list(processes(mark)) and not list(scratch.glob("sources-*")))
    assert shards(data, chunk(data, *LEN, status=1)) == local_shards
    wait_until(lambda: not list(scratch.iterdir()))


def run_invalid(*arguments: object) -> Ran:
    return prep_here("manifest", "folder", *arguments, status=None)


def test_urls_that_cannot_be_served_are_refused_before_anything_is_made(tmp_path: Path, s3: object) -> None:
    data = tmp_path / "data"
    for url, words in (
        ("ftp://host/videos", "ftp:// URLs are not supported"),
        ("s3://", "is incomplete"),
        ("s3://no-such-bucket/videos", "bucket of s3://no-such-bucket/videos does not exist"),
        ("https://host/videos", "cannot be listed: it is on a web server"),
        ("s3://me:secret@bucket/videos", "contains a user name or password"),
        ("https://host/videos?X-Amz-Signature=secret", "has a query string"),
    ):
        ran = run_invalid(url, "--data", data)
        assert words in ran.error and "secret" not in ran.stderr, ran.stderr
    assert not data.exists()
    ran = run_invalid(tmp_path, "--captions", "s3://no-such-bucket/t.csv", "--data", data)
    assert "bucket of s3://no-such-bucket does not exist" in ran.error
