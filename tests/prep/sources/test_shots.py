"""Tests of the shots of a source: PySceneDetect's cuts on the frames that chunks show."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pytest
import scenedetect

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.tables import read_table_file, write_table_file
from clipmill.prep.sources.detector import DEFAULT_THRESHOLD, Detector, DetectorName
from clipmill.prep.sources.probe import probe
from clipmill.prep.sources.shot_table import SHOTS, read_shots, shot_rows
from clipmill.prep.sources.shots import _output_pictures, detect_cuts, output_index
from clipmill.prep.synthetic import FrameNumberVideo, read_frame_number
from clipmill.prep.video.encode import num_output_frames
from clipmill.shards.timeline.model import Timeline
from tests.prep.numbered import due_frames
from tests.prep.scenes import scene_number, scene_pictures, write_scenes

FPS = Fraction(30)
SCENES = [40, 33, 8, 51, 70]


def detector(name: DetectorName = "content", *, threshold: float | None = None, min_scene: int = 15) -> Detector:
    return Detector(
        name=name,
        threshold=DEFAULT_THRESHOLD[name] if threshold is None else threshold,
        min_scene_frames=min_scene,
        fps=FPS,
    )


NUM_FRAMES = 240


def cuts_of(path: Path, *, num_frames: int, detector: Detector) -> list[int]:
    return detect_cuts(
        path, timeline=Timeline.from_json(probe(path).timeline), num_frames=num_frames, detector=detector
    )


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create a film, and a lossless file of the frames that the detector should see.

    The film has 24 frames per second, so that some frames are compared with themselves, and is wide enough to be
    scaled.
    """
    folder = tmp_path_factory.mktemp("film")
    film, plain = folder / "film.mkv", folder / "plain.avi"
    rng = np.random.default_rng(3)
    noise = rng.integers(0, 24, (240, 320), np.uint8)
    with av.open(str(film), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for picture in scene_pictures(SCENES)[: NUM_FRAMES * 24 // 30]:
            grain = np.roll(noise, int(rng.integers(90)), axis=1)[:, :, None]
            noisy = picture.repeat(2, axis=0).repeat(2, axis=1) // 8 * 7 + grain
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noisy, format="rgb24")))
        container.mux(stream.encode(None))
    with av.open(str(plain), "w") as container:
        stream = container.add_stream("ffv1", rate=int(FPS))
        stream.width, stream.height, stream.pix_fmt = 256, 192, "bgr0"
        for picture, times in _output_pictures(film, Timeline(), num_frames=NUM_FRAMES, fps=FPS):
            for _ in range(times):
                frame = av.VideoFrame.from_ndarray(picture, format="bgr24")
                container.mux(stream.encode(frame.reformat(format="bgr0")))
        container.mux(stream.encode(None))
    return film, plain


@pytest.mark.parametrize(
    "shot_detector",
    [
        detector(),
        pytest.param(detector(min_scene=1), marks=pytest.mark.nightly),
        pytest.param(detector("adaptive"), marks=pytest.mark.nightly),
        pytest.param(detector("adaptive", threshold=1.2, min_scene=5), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_cuts_are_those_of_scenedetect_run_plainly_on_the_same_frames(
    shot_detector: Detector, film: tuple[Path, Path]
) -> None:
    cuts = cuts_of(film[0], num_frames=NUM_FRAMES, detector=shot_detector)
    scenes = scenedetect.detect(str(film[1]), shot_detector.open())
    assert scenes[-1][1].frame_num == NUM_FRAMES
    assert len(cuts) >= 3 and cuts == [begin.frame_num for begin, _ in scenes[1:]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fps": Fraction(30000, 1001), "start_offset_s": 1.5},
        {"fps": Fraction(24)},
        {"fps": Fraction(60)},
        {"variable_rate": True},
        {"rotation_degrees": 90},
    ],
    ids=str,
)
def test_the_detector_sees_the_frame_on_show_at_each_time(options: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    FrameNumberVideo(num_frames=120, width=160, height=120, **{"fps": FPS, **options}).write(path)  # type: ignore[arg-type]
    with av.open(str(path)) as container:
        pts = [int(frame.pts or 0) for frame in container.decode(video=0)]
        times_s = np.array([float((at - pts[0]) * (container.streams.video[0].time_base or 0)) for at in pts])
    num_frames = int(num_output_frames(np.array([times_s[-1] + 1 / 30]), fps=FPS)[0])
    numbers = []
    for picture, times in _output_pictures(
        path, Timeline.from_json(probe(path).timeline), num_frames=num_frames, fps=FPS
    ):
        numbers += [read_frame_number(picture)] * times
    assert len(numbers) == num_frames
    for frame, number in enumerate(numbers):
        assert number in due_frames(times_s, output_frame=frame, fps=FPS, tick_s=1e-6)


@pytest.mark.parametrize(
    ("pts", "number"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (-1, 0), (-2, -1), (-6, -2)], ids=str
)
def test_times_are_rounded_to_the_nearest_output_frame_as_ffmpeg_does(pts: int, number: int) -> None:
    assert output_index(Fraction(pts, 120), fps=FPS) == number


def test_every_frame_a_cut_never_a_cut_and_a_single_frame(tmp_path: Path) -> None:
    noise = tmp_path / "noise.mp4"
    FrameNumberVideo(num_frames=60, fps=FPS, width=160, height=120).write(noise)
    assert len(cuts_of(noise, num_frames=60, detector=detector(threshold=5, min_scene=1))) > 50
    still = write_scenes(tmp_path / "still.mp4", [60])
    assert cuts_of(still, num_frames=60, detector=detector()) == []
    scene_path = write_scenes(tmp_path / "one.mp4", [1])
    assert cuts_of(scene_path, num_frames=1, detector=detector("adaptive")) == []
    assert cuts_of(scene_path, num_frames=5, detector=detector("adaptive")) == []


def test_damaged_frames_are_left_to_the_encoder_and_what_has_none_fails(tmp_path: Path) -> None:
    path = write_scenes(tmp_path / "video.mp4", SCENES)
    with av.open(str(path)) as container:
        packets = [(int(packet.pos or 0), packet.size) for packet in container.demux(video=0) if packet.size]
    cuts = cuts_of(path, num_frames=sum(SCENES), detector=detector())
    content = bytearray(path.read_bytes())
    for pos, size in packets[10:14]:
        content[pos : pos + size] = bytes(size)
    path.write_bytes(content)
    assert cuts_of(path, num_frames=sum(SCENES), detector=detector()) == cuts
    for pos, size in packets:
        content[pos : pos + size] = bytes(size)
    path.write_bytes(content)
    with pytest.raises(SourceFailure) as failure:
        cuts_of(path, num_frames=sum(SCENES), detector=detector())
    assert failure.value.code == FailureCode.DECODE_ERRORS
    path.write_text("not a video")
    with pytest.raises(SourceFailure) as failure:
        cuts_of(path, num_frames=sum(SCENES), detector=detector())
    assert failure.value.code == FailureCode.SOURCE_UNREADABLE


def test_a_table_of_shots_is_read_back_and_what_is_damaged_or_of_other_videos_is_unknown(tmp_path: Path) -> None:
    key = detector().key("0.7")
    rows = [
        {"detector": key, "fingerprint": "a", "num_frames": 100, "cuts": [30, 60]},
        {"detector": key, "fingerprint": "b", "num_frames": 50, "cuts": []},
        {"detector": key, "fingerprint": "c", "num_frames": 50, "code": "decode_errors", "message": "why"},
        {"detector": detector("adaptive").key("0.7"), "fingerprint": "d", "num_frames": 50, "cuts": []},
    ]
    table, path = pa.Table.from_pylist(rows, schema=SHOTS), tmp_path / "shots.parquet"
    write_table_file(path, table)
    assert read_shots(tmp_path).equals(table) and read_table_file(path, schema=SHOTS).equals(table)
    sources = pa.array(["c", "b", "a", "d", "e", None, "a"])
    lengths = np.array([50, 50, 100, 50, 50, 50, 101])
    assert shot_rows(table, key=key, fingerprints=sources, num_frames=lengths).tolist() == [2, 1, 0, -1, -1, -1, -1]
    moved = pa.Table.from_pylist([{**rows[0], "cuts": [30, 61]}, *rows[1:]], schema=SHOTS)
    metadata = pa.parquet.read_schema(path).metadata
    pa.parquet.write_table(moved.replace_schema_metadata(metadata), path)
    assert len(read_shots(tmp_path)) == 0


def test_the_code_in_the_corner_is_read(tmp_path: Path) -> None:
    """Check a helper of these tests."""
    with av.open(str(write_scenes(tmp_path / "video.mp4", [5, 5]))) as container:
        numbers = [scene_number(frame.to_ndarray(format="gray")) for frame in container.decode(video=0)]
    assert numbers == list(range(10))
