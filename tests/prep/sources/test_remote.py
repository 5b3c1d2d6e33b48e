"""Tests of sources in a bucket or on a web server: their results equal the local results, and failures are named."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.objects import open_objects
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources import access, remote
from clipmill.prep.sources.access import SourceFacts, current_fingerprint, open_source, source_fingerprint
from clipmill.prep.sources.probe import probe
from clipmill.prep.sources.shots import detect_cuts
from clipmill.prep.sources.table import probe_sources, stat_files
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.timeline.model import Timeline
from tests.object_storage.faults import Fault, Faults, vanished_key
from tests.object_storage.server import S3Server
from tests.prep.scenes import RECIPE, write_scenes
from tests.train.data.http_folder import HttpFolder

COPY = ["-c", "copy"]
CONTAINERS = {
    "last.mp4": COPY,
    "first.mp4": [*COPY, "-movflags", "+faststart"],
    "fragments.mp4": [*COPY, "-movflags", "frag_keyframe+empty_moov"],
    "matroska.mkv": COPY,
    "avi.avi": ["-c:v", "mpeg4"],
    "stream.ts": COPY,
    "flash.flv": COPY,
    "raw.h264": [*COPY, "-f", "h264"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same video in several containers, complete and without its last bytes; a text, and an empty file."""
    folder = tmp_path_factory.mktemp("containers")
    scenes = write_scenes(folder / "scenes.mov", [40, 30, 50])
    for name, options in CONTAINERS.items():
        command = [find_ffmpeg().path, "-v", "error", "-i", str(scenes), *options, str(folder / name)]
        subprocess.run(command, check=True)
        content = (folder / name).read_bytes()
        (folder / f"cut-{name}").write_bytes(content[: len(content) * 3 // 4])
    (folder / "text.mp4").write_text("not a video" * 9000)
    (folder / "empty.mp4").touch()
    return folder


@pytest.fixture
def videos(files: Path, bucket: str) -> str:
    """Upload the files to a bucket."""
    objects = open_objects(bucket)
    for path in files.iterdir():
        objects.write(f"videos/{path.name}", path.read_bytes())
    return f"{bucket}/videos"


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read small files in as many requests as large ones."""
    monkeypatch.setattr(remote, "_SMALL_BYTES", 0)
    monkeypatch.setattr(remote, "_FIRST_BYTES", 700)
    monkeypatch.setattr(remote, "_MAX_BYTES", 3000)
    monkeypatch.setattr(remote, "_CACHE_BYTES", 8000)
    monkeypatch.setattr(access, "_FINGERPRINT_BYTES", 500)


@pytest.fixture
def web(files: Path) -> Iterator[HttpFolder]:
    folder = HttpFolder(files)
    yield folder
    folder.close()


def outcome(place: Path | str) -> SourceFacts | tuple[str, str, bool]:
    try:
        return probe(place)
    except SourceFailure as failure:
        return str(failure.code), failure.message, failure.is_lasting


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(SourceFailure) as caught:
        action()
    assert not caught.value.is_lasting
    return str(caught.value.code)


@pytest.mark.usefixtures("small_ranges")
def test_probes_and_fingerprints_are_those_of_the_local_files(files: Path, videos: str, web: HttpFolder) -> None:
    usable = set()
    for path in sorted(files.iterdir()):
        here = outcome(path)
        assert outcome(f"{videos}/{path.name}") == here, path.name
        assert outcome(f"{web.address}/{path.name}") == here, path.name
        assert source_fingerprint(f"{videos}/{path.name}") == source_fingerprint(path)
        usable |= {path.name} if isinstance(here, SourceFacts) else set()
    assert usable == {*CONTAINERS, "scenes.mov", "cut-stream.ts"} - {"raw.h264"}


@pytest.mark.usefixtures("small_ranges")
def test_shots_are_those_of_the_local_file(files: Path, videos: str) -> None:
    detector = RECIPE.settings.shot_detector
    for name in ("last.mp4", "matroska.mkv"):
        timeline = Timeline.from_json(probe(files / name).timeline)
        for place in (files / name, f"{videos}/{name}"):
            cuts = detect_cuts(place, timeline=timeline, num_frames=120, detector=detector)
            assert cuts == [40, 70]


def test_a_long_mp4_is_probed_by_its_ends(tmp_path: Path, bucket: str, faults: Faults) -> None:
    """The frames of a video may take any space: most of this file is a box that no probe reads."""
    for name, options in (("first.mp4", ["-movflags", "+faststart"]), ("last.mp4", [])):
        video, long = write_scenes(tmp_path / "short.mov", [30]), tmp_path / name
        subprocess.run([find_ffmpeg().path, "-v", "error", "-y", "-i", video, *COPY, *options, long], check=True)
        content = long.read_bytes()
        free = (8 << 20).to_bytes(4, "big") + b"free" + bytes((8 << 20) - 8)
        at = content.index(b"moov") - 4 if name == "last.mp4" else len(content)
        long.write_bytes(content[:at] + free + content[at:])
        open_objects(bucket).write(name, long)
        faults.set()
        assert probe(f"{bucket}/{name}") == probe(long)
        seen = faults.seen()
        assert seen.num_bytes <= 3 << 20 and sum(seen.methods().values()) <= 5, seen


def test_planning_reads_a_bucket_by_listing_and_unchanged_sources_not_at_all(
    tmp_path: Path, files: Path, videos: str, faults: Faults
) -> None:
    names = ["first.mp4", "last.mp4", "matroska.mkv", "gone.mp4"]
    paths = pa.chunked_array([[f"{videos}/{name}" for name in names]])
    faults.set()
    first = probe_sources(tmp_path, paths, num_workers=1)
    assert first["code"].to_pylist() == [None, None, None, "source_missing"]
    assert first["fingerprint"].to_pylist()[:3] == [source_fingerprint(files / name) for name in names[:3]]
    faults.set()
    assert probe_sources(tmp_path, paths, num_workers=1).equals(first)
    assert faults.seen().methods() == {"GET": 1, "HEAD": 1}, "one listing, and one request for the missing object"
    bucket, _, folder = videos.rpartition("/")
    open_objects(bucket).write(f"{folder}/first.mp4", (files / "last.mp4").read_bytes())
    again = probe_sources(tmp_path, paths, num_workers=1)["fingerprint"].to_pylist()
    assert again[:3] == [source_fingerprint(files / name) for name in ("last.mp4", *names[1:3])]


def test_an_object_replaced_within_a_second_has_changed(bucket: str) -> None:
    objects, path = open_objects(bucket), pa.chunked_array([[f"{bucket}/a.mp4"]])
    states = set()
    for content in (b"one", b"two"):
        objects.write("a.mp4", content)
        state = stat_files(path, num_threads=1)
        states.add((state.size_bytes[0], state.mtime_ns[0]))
    assert len(states) == 2


@pytest.mark.usefixtures("small_ranges", "few_retries")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (vanished_key("matroska", skip=3), "source_missing"),
        (Fault("error", method="GET", path="matroska", skip=3, status=403, code="AccessDenied"), "access_refused"),
        (Fault("error", method="HEAD", path="matroska", status=403), "access_refused"),
        (Fault("error", method="GET", path="matroska", skip=2), "io_error"),
        (Fault("cut", method="GET", path="matroska", skip=2), "io_error"),
        (Fault("hang", method="GET", path="matroska", skip=2), "io_error"),
    ],
)
def test_faults_that_stay_are_failures_of_the_source(videos: str, faults: Faults, fault: Fault, code: str) -> None:
    remote._open_bucket.cache_clear()
    faults.set(fault)
    assert code_of(lambda: probe(f"{videos}/matroska.mkv")) == code
    faults.set()
    assert isinstance(probe(f"{videos}/matroska.mkv"), SourceFacts), "the other sources are not affected"


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_failed_read_that_libav_takes_for_the_end_of_the_file_is_not_lost(
    bucket: str, faults: Faults, is_followed: bool
) -> None:
    open_objects(bucket).write("a.mp4", b"x")

    def read() -> None:
        with open_source(f"{bucket}/a.mp4") as source:
            with suppress(SourceFailure):
                source.file.read(1)
            if is_followed:
                raise SourceFailure(FailureCode.SOURCE_TRUNCATED, "truncated")

    faults.set(vanished_key("a.mp4"))
    assert code_of(read) == "source_missing"


@pytest.mark.usefixtures("small_ranges", "few_retries")
@pytest.mark.parametrize("kind", ["error", "cut", "delay"])
def test_faults_that_pass_are_not_noticed(files: Path, videos: str, faults: Faults, kind: str) -> None:
    remote._open_bucket.cache_clear()
    faults.set(Fault(kind, method="GET", path="matroska", every=3, delay_s=0.05))  # type: ignore[arg-type]
    assert probe(f"{videos}/matroska.mkv") == probe(files / "matroska.mkv")
    assert faults.seen().num_faults > 3


def test_a_bucket_that_cannot_be_used_is_an_error_and_no_list_of_failures(s3: S3Server, videos: str) -> None:
    paths = pa.chunked_array([[f"{videos}/first.mp4", f"{videos}/last.mp4"]])
    s3.require_known_users()
    try:
        with pytest.raises(UserError, match="credentials are refused"):
            stat_files(paths, num_threads=1)
    finally:
        s3.require_known_users(required=False)
    with pytest.raises(UserError, match="bucket of s3://no-such-bucket does not exist"):
        stat_files(pa.chunked_array([["s3://no-such-bucket/a.mp4", "s3://no-such-bucket/b.mp4"]]), num_threads=1)


@pytest.mark.usefixtures("few_retries")
def test_a_server_that_does_not_answer_is_not_asked_for_every_object(
    monkeypatch: pytest.MonkeyPatch, web: HttpFolder
) -> None:
    remote._open_bucket.cache_clear()
    web.close()
    asked: list[str] = []
    info = remote.Objects.info

    def count_request(objects: remote.Objects, key: str) -> object:
        asked.append(key)
        return info(objects, key)

    monkeypatch.setattr(remote.Objects, "info", count_request)
    paths = [f"{web.address}/{number}.mp4" for number in range(1000)]
    states = stat_files(pa.chunked_array([paths]), num_threads=1)
    assert {failure.code for failure in states.failures.values()} == {FailureCode.IO_ERROR}
    assert len(states.failures) == 1000 and len(asked) < 200


def test_a_web_server_without_ranges_is_named(web: HttpFolder) -> None:
    web.without_ranges.add("/first.mp4")
    with pytest.raises(SourceFailure, match="does not support range requests"):
        current_fingerprint(f"{web.address}/first.mp4")
