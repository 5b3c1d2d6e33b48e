"""Cards of the HTML page that `prep inspect --html` writes: frames, captions, source, scores and clip of each chunk.

A clip is an exact copy of the chunk if browsers play the codec and all copies together take at most COPIED_BYTES.
Otherwise it is a preview: a short H.264 video at a low resolution. No browser plays MJPEG in MP4, and only some
browsers play HEVC. Copies that together take at most EMBEDDED_BYTES are embedded in the pages. All other clips are in
`chunks.files/`, beside `chunks.html`.

The file name of a clip contains the checksum of its chunk. Therefore clips are reused when a page is rewritten, and an
open page never plays a different chunk. Clips are written before the pages that link to them; clips without a link are
removed last.
"""

import json
import math
import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import av
import av.error
from av.video.frame import VideoFrame

from clipmill.manifests.caption_spans import is_model_source
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import clock, size_text
from clipmill.manifests.keys import safe_video_id
from clipmill.manifests.publish import make_folder, publish_bytes, remove_temporaries
from clipmill.prep.core.chunk_content import ChunkContent, read_chunk
from clipmill.prep.core.failures import SourceFailure
from clipmill.shards.columns import INDEXED, SOURCE_MEMBER
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.opening import Damaged
from clipmill.shards.pages.figures import CLIP_FPS, data_uri, middle_items, small_clip
from clipmill.shards.reader import CommittedShard
from clipmill.shards.score_fields import SCORES

_JPEG_QUANTISER = 5  # range: 2 (best) to 31
_DECODERS = {"av1": "libdav1d"}  # libav's own av1 decoder requires hardware acceleration
PREVIEW_S = 20.0  # maximum length of a preview
EMBEDDED_BYTES = 8_000_000  # maximum total size of copies that are embedded in the pages
COPIED_BYTES = 256_000_000  # maximum total size of clips that are copies of chunks
_BROWSER_CODECS = ("h264", "vp9", "av1")
_OUTPUT_NAME = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{8}(-preview)?\.mp4|page-\d+\.html|all\.html")
_MAX_CAPTIONS = 3  # maximum number of captions shown; the other captions are folded
_MAX_FOLDED, _MAX_FOLDED_CHARS = 100, 20_000  # maximum number and total length of folded captions
_MAX_CAPTION_CHARS = 1000
_NUM_PICTURES = 4
_PICTURE_HEIGHT_PX = 108


class NoPicture(Exception):
    """Exception raised if the decoder does not return a requested frame."""


def decode_frames(content: bytes, row: dict[str, Any], *, frames: Sequence[int]) -> list[VideoFrame]:
    """Decode selected frames of a chunk.

    Args:
        content: Bytes of the MP4 file.
        row: Row of the index (clipmill.shards.format.VIDEO_FIELDS).
        frames: Presentation indices of the frames to decode.

    Raises:
        NoPicture: A frame could not be decoded.
        av.error.FFmpegError: The packets are damaged.
    """
    context = av.CodecContext.create(_DECODERS.get(row["codec"], row["codec"]), "r")
    context.extradata = row["extradata"]
    context.thread_count = 1
    position_of = {frame: position for position, frame in enumerate(row["packet_frame"])}
    flags = row["packet_flags"]
    pictures = []
    for frame in frames:
        # Decoding a frame requires only the reference frames between its key frame and itself.
        target = position_of[frame]
        begin = max(position for position in range(target + 1) if flags[position] & PACKET_KEY)
        packets: list[av.Packet | None] = []
        for position in range(begin, target + 1):
            if position == target or flags[position] & PACKET_REFERENCE:
                offset = row["packet_offset"][position]
                packet = av.Packet(content[offset : offset + row["packet_size"][position]])
                packet.pts, packet.time_base = row["packet_frame"][position], Fraction(1)
                packets.append(packet)
        decoded_pictures = [picture for packet in [*packets, None] for picture in context.decode(packet)]
        context.flush_buffers()
        picture = next((picture for picture in decoded_pictures if picture.pts == frame), None)
        if picture is None:
            raise NoPicture(f"frame {frame} cannot be decoded")
        pictures.append(picture)
    return pictures


def jpeg(frame: VideoFrame, *, height: int) -> bytes:
    """Encode `frame` as a JPEG, scaled to a height of `height` pixels."""
    width = max(2, round(frame.width * height / frame.height / 2) * 2)
    scaled_frame = frame.reformat(width=width, height=height, format="yuvj420p")
    context = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt, context.time_base = width, height, "yuvj420p", Fraction(1, 25)
    context.qmin = context.qmax = _JPEG_QUANTISER
    scaled_frame.pts, scaled_frame.time_base = 0, Fraction(1, 25)
    return b"".join(bytes(packet) for packet in [*context.encode(scaled_frame), *context.encode(None)])


def preview(chunk: ChunkContent) -> bytes:
    """Encode the first PREVIEW_S seconds of a chunk as H.264, with a short side of 240 pixels, at about 12 fps.

    Raises:
        SourceFailure: The chunk cannot be decoded.
    """
    step = max(1, round(chunk.fps / CLIP_FPS))
    frames = range(0, min(chunk.num_frames, math.ceil(PREVIEW_S * chunk.fps)), step)
    return small_clip(chunk.frames(frames), fps=chunk.fps / step)


@dataclass(frozen=True)
class Clip:
    """A clip on a page. `url` is a data URI, or a file name in the folder of the page."""

    url: str
    size_bytes: int
    is_preview: bool

    @property
    def is_embedded(self) -> bool:
        """True if the clip is embedded in the page."""
        return self.url.startswith("data:")


@dataclass(frozen=True)
class ClipPlan:
    """Form of all clips: previews or copies, embedded in pages or in files; and the reason for this form, as text."""

    is_preview: bool
    is_embedded: bool
    reason: str


def plan_clips(codec: str, *, total_bytes: int) -> ClipPlan:
    """Choose the form of the clips on all pages.

    Args:
        codec: Name of the codec in libav.
        total_bytes: Total size of the chunks on all pages.
    """
    if codec not in _BROWSER_CODECS:
        reasons = {
            "mjpeg": "browsers do not play MJPEG in MP4",
            "hevc": "only some browsers play HEVC",
            INDEXED: "the packets of the chunks are in the source files",
        }
        return ClipPlan(True, False, reasons.get(codec, f"some browsers do not play {codec}"))
    if total_bytes > COPIED_BYTES:
        return ClipPlan(True, False, f"copies of these chunks would take {size_text(total_bytes)}")
    return ClipPlan(False, total_bytes <= EMBEDDED_BYTES, "copies of the chunks, byte for byte")


class ClipFolder:
    """Folder with the clips of a page: `chunks.files/` beside `chunks.html`. This class is thread-safe.

    Raises:
        UserError: The path exists, but is not a folder.
    """

    def __init__(self, page: Path) -> None:
        self.path = page.with_name(f"{page.stem}.files")
        self._is_made = False
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--html needs the folder {self.path}, but a file has this name", hint="rename the file")

    @property
    def url(self) -> str:
        """URL of the folder, relative to the page."""
        return f"{quote(self.path.name)}/"

    def make(self) -> None:
        """Create the folder.

        Raises:
            UserError: The folder cannot be created.
        """
        try:
            make_folder(self.path)
            remove_temporaries(self.path, matches=lambda name: _OUTPUT_NAME.fullmatch(name) is not None)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}", hint="use --html with a path in a different folder"
            ) from None

    def stored_size(self, name: str, *, size_bytes: int | None = None) -> int:
        """Return the size of a stored clip in bytes; 0 if it is missing, or if its size is not `size_bytes`."""
        with suppress(OSError):
            stored_bytes = (self.path / name).stat().st_size
            return stored_bytes if size_bytes in (None, stored_bytes) else 0
        return 0

    def write(self, name: str, content: bytes) -> None:
        """Publish a clip.

        Raises:
            UserError: The clip cannot be written, most likely because the disk is full.
        """
        try:
            publish_bytes(self.path / name, content)
        except OSError as error:
            free_bytes = shutil.disk_usage(self.path).free
            raise UserError(
                f"{self.path / name} cannot be written: {error.strerror}",
                hint=f"use a lower --chunks, or write to another disk; this disk has {size_text(free_bytes)} free",
            ) from None

    def sweep(self, kept_names: Collection[str]) -> None:
        """Remove earlier clips and pages that are not in `kept_names`; remove the folder if it is then empty."""
        with suppress(OSError):
            for path in list(self.path.iterdir()):
                if path.name not in kept_names and _OUTPUT_NAME.fullmatch(path.name):
                    path.unlink()
            self.path.rmdir()


@dataclass(frozen=True)
class CaptionLine:
    """Caption on a card, with times in the video; `end_s` is None if the caption lasts to the end of the video."""

    text: str
    begin_s: float
    end_s: float | None
    is_from_model: bool = False

    @property
    def short_text(self) -> str:
        """Text, truncated if it is very long."""
        if len(self.text) <= _MAX_CAPTION_CHARS:
            return self.text
        return f"{self.text[:_MAX_CAPTION_CHARS]}… ({len(self.text):,} characters)"

    @property
    def times(self) -> str:
        """Start and end, in the format of a video player."""
        end = "the end" if self.end_s is None else clock(self.end_s, decimals=1)
        return f"{clock(self.begin_s, decimals=1)} to {end}"


@dataclass(frozen=True)
class Picture:
    """Frame on a card: a JPEG image as a data URI, and its time in the chunk in seconds."""

    source: str
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Card:
    """One chunk on the page.

    Attributes:
        location: Shard and row of the chunk, as text.
        facts: Codec, resolution and frame rate, as text.
        scores: Scores by name.
        model_caption: Generated caption from the column `captions`; empty if there is none.
        labels: Names and values of the labels on captions that overlap the chunk.
        problem: Reason why the card has neither pictures nor a clip; None if the chunk can be shown.
    """

    key: str
    video_id: str
    split: str
    begin_s: float
    end_s: float
    size_bytes: int
    location: str = ""
    dataset: str = ""
    source_id: str = ""
    path: str = ""
    facts: str = ""
    captions: tuple[CaptionLine, ...] = ()
    pictures: tuple[Picture, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    model_caption: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    clip: Clip | None = None
    problem: str | None = None

    @property
    def label_values(self) -> str:
        """Labels for the filters of the page: a JSON list of strings such as "success=true"."""
        return json.dumps([f"{name}={value}" for name, value in self.labels])

    @property
    def sort_values(self) -> list[tuple[str, float]]:
        """Names and values of the scores that a page can be sorted by."""
        return [
            (score.name, self.scores[score.name]) for score in SCORES if score.sort_label and score.name in self.scores
        ]

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.begin_s

    @property
    def kbit_s(self) -> float:
        """Bitrate in kbit/s."""
        return self.size_bytes * 8 / max(self.seconds, 1e-3) / 1000

    @property
    def times(self) -> str:
        """Start and end in the video, in the format of a video player."""
        return f"{clock(self.begin_s, decimals=3)} to {clock(self.end_s, decimals=3)}"

    @property
    def clip_label(self) -> str:
        """Label of the button that plays the clip."""
        is_part = self.clip is not None and self.clip.is_preview and self.seconds > PREVIEW_S
        return f"Play {self.key}, {'first seconds, ' if is_part else ''}{self.times} of {self.video_id}"

    @property
    def caption_groups(self) -> tuple[Sequence[CaptionLine], Sequence[CaptionLine], int]:
        """Captions to show, captions to fold, and number of captions that are not listed."""
        remaining_captions = self.captions[_MAX_CAPTIONS:]
        folded_captions = remaining_captions[:_MAX_FOLDED]
        chars = accumulate(len(caption.short_text) for caption in folded_captions)
        num_listed = next(
            (number for number, sum_ in enumerate(chars, 1) if sum_ >= _MAX_FOLDED_CHARS), len(folded_captions)
        )
        return self.captions[:_MAX_CAPTIONS], folded_captions[:num_listed], len(remaining_captions) - num_listed


def read_details(shard: CommittedShard, row: int, *, plan: ClipPlan, folder: ClipFolder) -> dict[str, Any]:
    """Return the fields of a card that are read from the shard; for a damaged chunk, the readable fields and `problem`.

    Raises:
        UserError: The clip cannot be written.
    """
    details: dict[str, Any] = {}
    try:
        entry = {name: shard.index[name][row].as_py() for name in shard.index.column_names}
        fps = Fraction(entry["fps_num"], entry["fps_den"])
        details["facts"] = f"{entry['codec']} {entry['width']}x{entry['height']}, {float(fps):.4g} fps"
        description = json.loads(shard.read(row, "json"))
        details |= {name: str(description.get(name, "")) for name in ("dataset", "source_id")}
        details["captions"] = tuple(
            CaptionLine(
                text=str(caption["text"]),
                begin_s=float(caption["begin_s"]),
                end_s=None if caption["end_s"] is None else float(caption["end_s"]),
                is_from_model=is_model_source(str(caption.get("source"))),
            )
            for caption in description["captions"]
        )
        chunk = read_chunk(shard, row)
        frames = middle_items(range(entry["num_frames"]), at_most=_NUM_PICTURES)
        # In an encoded chunk, only the required packets are decoded. An indexed chunk is decoded from its source.
        pictures = decode_frames(chunk.mp4, entry, frames=frames) if chunk.mp4 else chunk.frames(frames)
        details["pictures"] = tuple(
            Picture(data_uri(jpeg(picture, height=_PICTURE_HEIGHT_PX), "image/jpeg"), float(number / fps))
            for number, picture in zip(frames, pictures, strict=True)
        )
        details["clip"] = _make_clip(chunk, entry, plan=plan, folder=folder)
    except SourceFailure as failure:
        details["problem"] = f"cannot be shown: {failure.message}"
        details.pop("pictures", None)
    except (Damaged, OSError, ValueError, KeyError, TypeError, NoPicture, av.error.FFmpegError) as error:
        details["problem"] = f"cannot be shown: {error}"
        details.pop("pictures", None)
    return details


def _make_clip(chunk: ChunkContent, entry: dict[str, Any], *, plan: ClipPlan, folder: ClipFolder) -> Clip:
    """Return the clip of a chunk, and write its file unless an earlier run has written the same clip."""
    content, is_preview = chunk.mp4, plan.is_preview or not chunk.mp4
    if plan.is_embedded and content:
        return Clip(data_uri(content, "video/mp4"), len(content), is_preview=False)
    # The name is valid in any file system and URL. It contains the checksum of the tar member with the frames, or with
    # their location.
    crc32 = entry["mp4_crc32" if "mp4_crc32" in entry else f"{SOURCE_MEMBER}_crc32"]
    name = f"{safe_video_id(entry['key'])}-{crc32:08x}{'-preview' if is_preview else ''}.mp4"
    size_bytes = folder.stored_size(name, size_bytes=None if is_preview else len(content))
    if not size_bytes:
        clip = preview(chunk) if is_preview else content
        folder.write(name, clip)
        size_bytes = len(clip)
    return Clip(name, size_bytes, is_preview=is_preview)
