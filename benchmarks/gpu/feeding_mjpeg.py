"""MJPEG chunks for the nvJPEG experiment: those of the data folder, or re-encoded frames of its chunks.

Re-encoded chunks have the packets, the index and the commit of a `video` column. Their payload is the packets without
an mp4 container, which is sufficient for decoding by packets.
"""

import io
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pyarrow as pa

from benchmarks.gpu.feeding_data import COLUMN, SPLIT, commit_shard
from manifests.keys import chunk_key
from manifests.publish import publish_json
from manifests.schema import CAPTIONS
from manifests.store import write_manifest
from shards.dataset import list_variants, set_current_variant, variant_dir
from shards.format import PACKET_KEY, PACKET_REFERENCE, RECIPE_FILE, VIDEO_FIELDS
from shards.reader import CommittedShard, Variant
from shards.writer import Sample, ShardWriter

CODEC = "mjpeg"
_VARIANT = "made-mjpeg-0d0d0d0d"
_FINGERPRINT = "0" * 64
_QUALITY = 8  # as in --recipe fast


def mjpeg_variant(data: Path) -> str | None:
    """Return a variant of the data folder whose chunks are MJPEG; None if there is none."""
    for name in list_variants(data, COLUMN):
        shards = Variant.open(data, variant=name).shards()
        if shards and shards[0].index["codec"][0].as_py() == CODEC:
            return name
    return None


def make_mjpeg(data: Path, target: Path, *, num_chunks: int, max_frames: int) -> Path:
    """Encode chunks of `data` as MJPEG, with the quality of `--recipe fast`, and return `target`."""
    places = [(shard, row) for shard in Variant.open(data).shards() for row in range(shard.num_samples)]
    with ThreadPoolExecutor() as pool:
        chunks = list(pool.map(lambda place: _encoded(*place, max_frames=max_frames), places[:num_chunks]))
    names = pa.array(chunk.video_id for chunk in chunks)
    splits = pa.array([SPLIT] * len(chunks))
    target.mkdir(parents=True)
    videos = pa.table({"video_id": names, "source_id": names, "path": names, "split": splits})
    write_manifest(target, "mjpeg", videos, CAPTIONS.empty_table().drop_columns("caption_id"))
    folder = variant_dir(target, COLUMN, _VARIANT)
    folder.mkdir(parents=True)
    publish_json(folder / RECIPE_FILE, {"codec": CODEC, "quality": _QUALITY})
    with ShardWriter(folder, shard_id=0, extensions=["mp4"], fields=VIDEO_FIELDS) as writer:
        for chunk in chunks:
            writer.add(chunk.sample())
        commit_shard(folder, 0, writer.publish(_FINGERPRINT))
    set_current_variant(target, COLUMN, _VARIANT)
    return target


@dataclass(frozen=True)
class _Chunk:
    video_id: str
    width: int
    height: int
    fps_num: int
    fps_den: int
    packets: list[bytes]

    def sample(self) -> Sample:
        offsets, begin = [], 0
        for packet in self.packets:
            offsets.append(begin)
            begin += len(packet)
        fields: dict[str, Any] = {
            "video_id": self.video_id,
            "start_ms": 0,
            "num_frames": len(self.packets),
            "fps_num": self.fps_num,
            "fps_den": self.fps_den,
            "width": self.width,
            "height": self.height,
            "codec": CODEC,
            "extradata": b"",
            "span_fingerprint": _FINGERPRINT,
            "packet_offset": offsets,
            "packet_size": [len(packet) for packet in self.packets],
            "packet_frame": list(range(len(self.packets))),
            "packet_flags": [PACKET_KEY | PACKET_REFERENCE] * len(self.packets),
            "packet_crc32": [zlib.crc32(packet) for packet in self.packets],
        }
        return Sample(key=chunk_key(self.video_id, 0), members={"mp4": b"".join(self.packets)}, fields=fields)


def _encoded(shard: CommittedShard, row: int, *, max_frames: int) -> _Chunk:
    index = shard.index.slice(row, 1).to_pylist()[0]
    context = av.CodecContext.create(CODEC, "w")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height, context.pix_fmt = index["width"], index["height"], "yuvj420p"
    context.framerate = Fraction(index["fps_num"], index["fps_den"])
    context.time_base = Fraction(index["fps_den"], index["fps_num"])
    context.options = {"qmin": str(_QUALITY), "qmax": str(_QUALITY)}
    packets: list[bytes] = []
    with av.open(io.BytesIO(shard.read(row, "mp4")), mode="r") as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number == max_frames:
                break
            picture = frame.reformat(format="yuvj420p", dst_color_range="JPEG")
            picture.pts, picture.time_base = number, context.time_base
            packets += [bytes(packet) for packet in context.encode(picture)]
    packets += [bytes(packet) for packet in context.encode(None)]
    return _Chunk(
        f"{index['video_id']}-{index['start_ms']}",
        index["width"],
        index["height"],
        index["fps_num"],
        index["fps_den"],
        packets,
    )
