"""A data folder of small videos whose pixels encode the frame number, written with the real writers."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from av.video.stream import VideoStream

from clipmill.manifests.keys import chunk_key
from clipmill.manifests.write import write_manifest
from clipmill.prep.synthetic import draw_frame_number
from clipmill.prep.video.span_task import read_chunk
from clipmill.shards.commits import Commit, write_commit
from clipmill.shards.dataset import set_current_variant
from clipmill.shards.format import VIDEO_FIELDS
from clipmill.shards.writer import Sample, ShardWriter

FPS = 10
CHUNK_FRAMES = 20
SIZE_PX = 64
VARIANT = "h264-test-01234567"


@dataclass(frozen=True)
class Caption:
    video_id: str
    begin_s: float
    end_s: float
    text: str
    source: str = "test"
    labels: Mapping[str, Any] = field(default_factory=dict)  # values of label columns by name


@cache  # many folders have the same chunks
def encode_chunk(
    first_number: int,
    num_frames: int,
    *,
    fps: int | Fraction = FPS,
    size_px: int = SIZE_PX,
    codec: str = "libx264",
    open_gop: bool = False,
) -> bytes:
    """Return an mp4 of frames that show first_number, first_number + 1, ...

    It has groups of 8 frames, with B-frames in H.264.
    """
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        options = {"threads": "1", "g": "8"}
        if codec == "libx264":
            options |= {"bf": "2", "sc_threshold": "0", "crf": "20", "preset": "ultrafast"}
            options["x264-params"] = f"bframes=2:open-gop={int(open_gop)}"
        else:
            options |= {"qmin": "1", "qmax": "3"}
        stream = container.add_stream(codec, rate=fps, options=options)
        assert isinstance(stream, VideoStream)
        stream.width = stream.height = size_px
        stream.pix_fmt = "yuv420p"
        for number in range(first_number, first_number + num_frames):
            grey = draw_frame_number(number, width=size_px, height=size_px)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.stack([grey] * 3, -1), format="rgb24")))
        container.mux(stream.encode(None))
    return content.getvalue()


def video_sample(video_id: str, start_ms: int, payload: bytes, *, fps: int | Fraction = FPS) -> Sample:
    """Return a chunk as the video column stores it."""
    facts = read_chunk(payload, fps=Fraction(fps))
    fields = {
        "video_id": video_id,
        "start_ms": start_ms,
        "num_frames": facts.num_frames,
        "fps_num": Fraction(fps).numerator,
        "fps_den": Fraction(fps).denominator,
        "width": facts.width,
        "height": facts.height,
        "codec": facts.codec,
        "extradata": facts.extradata,
        "span_fingerprint": "00",
        "packet_offset": facts.packet_offset,
        "packet_size": facts.packet_size,
        "packet_frame": facts.packet_frame,
        "packet_flags": facts.packet_flags,
        "packet_crc32": facts.packet_crc32,
    }
    return Sample(key=chunk_key(video_id, start_ms), members={"mp4": payload}, fields=fields)


def chunks_of(video_id: str, num_frames: int) -> list[Sample]:
    """Return the chunks of a video of `num_frames` frames; the last chunk may be shorter."""
    return [
        video_sample(video_id, first * 1000 // FPS, encode_chunk(first, min(CHUNK_FRAMES, num_frames - first)))
        for first in range(0, num_frames, CHUNK_FRAMES)
    ]


def write_shard(data_dir: Path, shard_id: int, samples: list[Sample], *, split: str) -> None:
    """Write and commit one shard."""
    directory = data_dir / "video" / VARIANT
    directory.mkdir(parents=True, exist_ok=True)
    with ShardWriter(directory, shard_id=shard_id, extensions=("mp4",), fields=VIDEO_FIELDS) as writer:
        for sample in samples:
            writer.add(sample)
        files = writer.publish("ab" * 32)
    write_commit(directory, Commit("video", shard_id, split, "ab" * 32, files, ()))
    set_current_variant(data_dir, "video", VARIANT)


def write_captions(data_dir: Path, splits: dict[str, str], captions: list[Caption]) -> None:
    """Write the manifest: the split of each video, and the captions."""
    videos = pa.table(
        {
            "video_id": list(splits),
            "source_id": list(splits),
            "path": [f"/videos/{video_id}.mp4" for video_id in splits],
            "split": list(splits.values()),
        }
    )
    rows = pa.table(
        {
            "video_id": pa.array([caption.video_id for caption in captions], pa.string()).dictionary_encode(),
            "begin_s": pa.array([caption.begin_s for caption in captions], pa.float64()),
            "end_s": pa.array([caption.end_s for caption in captions], pa.float64()),
            "text": pa.array([caption.text for caption in captions], pa.string()),
            "source": pa.array([caption.source for caption in captions], pa.string()).dictionary_encode(),
        }
    )
    for name in sorted({name for caption in captions for name in caption.labels}):
        rows = rows.append_column(name, pa.array([caption.labels.get(name) for caption in captions]))
    write_manifest(data_dir, "test", videos, rows)
