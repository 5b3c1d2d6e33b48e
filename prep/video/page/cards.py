"""What a page shows of one chunk: pictures, captions, source, scores, and its clip."""

import json
import zlib
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import av.error

from clipmill.manifests.caption_spans import is_of_model
from clipmill.manifests.formatting import clock, short_number
from clipmill.prep.video.page.clips import Clip, ClipFolder, ClipPlan, clip_name
from clipmill.prep.video.page.pictures import PREVIEW_S, NoPicture, decode_frames, jpeg, preview
from clipmill.shards.opening import Damaged
from clipmill.shards.pages.figures import data_uri, evenly_within
from clipmill.shards.reader import CommittedShard
from clipmill.shards.score_fields import SCORES

_MAX_CAPTIONS = 3  # before the others are folded
_MAX_FOLDED, _MAX_FOLDED_CHARS = 100, 20_000
_MAX_CAPTION_CHARS = 1000
_MAX_LABELS = 20
_PICTURES = 4
_PICTURE_HEIGHT_PX = 108


@dataclass(frozen=True)
class CaptionLine:
    """A caption. Times are seconds in the video; `end_s` is None for its end."""

    text: str
    begin_s: float
    end_s: float | None
    of_model: bool = False

    @property
    def shown(self) -> str:
        """The text, truncated if it is very long."""
        if len(self.text) <= _MAX_CAPTION_CHARS:
            return self.text
        return f"{self.text[:_MAX_CAPTION_CHARS]}… ({len(self.text):,} characters)"

    @property
    def times(self) -> str:
        """Begin and end as a player shows them."""
        end = "the end" if self.end_s is None else clock(self.end_s, decimals=1)
        return f"{clock(self.begin_s, decimals=1)} to {end}"


@dataclass(frozen=True)
class Picture:
    """A frame: `source` is a JPEG file as a data URI, `time_s` its position in the chunk."""

    source: str
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Card:
    """One chunk on the page.

    Attributes:
        place: where it is in the data folder: shard and row.
        facts: codec, size, frame rate, in words.
        scores: name of a score -> value.
        written: the caption that the column `captions` has; empty without one.
        labels: labels of the captions that overlap it, such as "success true".
        problem: why it cannot be shown; it then has neither pictures nor a clip.
    """

    key: str
    video_id: str
    split: str
    begin_s: float
    end_s: float
    size_bytes: int
    place: str = ""
    dataset: str = ""
    source_id: str = ""
    path: str = ""
    facts: str = ""
    captions: tuple[CaptionLine, ...] = ()
    pictures: tuple[Picture, ...] = ()
    scores: dict[str, float] = field(default_factory=dict)
    written: str = ""
    labels: tuple[str, ...] = ()
    clip: Clip | None = None
    problem: str | None = None

    @property
    def sorting(self) -> list[tuple[str, float]]:
        """The scores by which a page can be sorted, and their values."""
        return [(score.name, self.scores[score.name]) for score in SCORES if score.order and score.name in self.scores]

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.begin_s

    @property
    def kbit_s(self) -> float:
        """Bit rate in kbit/s."""
        return self.size_bytes * 8 / max(self.seconds, 1e-3) / 1000

    @property
    def times(self) -> str:
        """Begin and end in the video as a player shows them."""
        return f"{clock(self.begin_s, decimals=3)} to {clock(self.end_s, decimals=3)}"

    @property
    def clip_label(self) -> str:
        """What the clip plays."""
        is_part = self.clip is not None and self.clip.is_preview and self.seconds > PREVIEW_S
        return f"Play {self.key}, {'first seconds, ' if is_part else ''}{self.times} of {self.video_id}"

    @property
    def names(self) -> str:
        """The name of the video in its dataset, and the dataset; the key has the video's ID."""
        return " · ".join(filter(None, (self.source_id or self.video_id, self.dataset)))

    @property
    def properties(self) -> str:
        """Codec and frame size, duration, bit rate, and place in the data folder."""
        numbers = (f"{self.seconds:.4g} s", f"{short_number(self.kbit_s)} kbit/s")
        return " · ".join(filter(None, (self.facts, *numbers, self.place)))

    @property
    def labels_line(self) -> str:
        """The labels, shortened if they are many."""
        more = len(self.labels) - _MAX_LABELS
        return ", ".join(self.labels[:_MAX_LABELS]) + (f" and {more} more" if more > 0 else "")

    @property
    def first_captions(self) -> tuple[CaptionLine, ...]:
        """The first three captions."""
        return self.captions[:_MAX_CAPTIONS]

    @property
    def num_folded(self) -> int:
        """Number of captions after the first three."""
        return max(0, len(self.captions) - _MAX_CAPTIONS)

    @property
    def folded_captions(self) -> tuple[CaptionLine, ...]:
        """The captions after the first three, as far as they are listed."""
        folded = self.captions[_MAX_CAPTIONS:][:_MAX_FOLDED]
        chars = accumulate(len(caption.shown) for caption in folded)
        num_listed = next((number for number, sum_ in enumerate(chars, 1) if sum_ >= _MAX_FOLDED_CHARS), len(folded))
        return folded[:num_listed]


def read_details(shard: CommittedShard, row: int, *, plan: ClipPlan, folder: ClipFolder) -> dict[str, Any]:
    """Return the fields of a card that are read from the shard: of a damaged chunk, those up to the `problem`.

    Raises:
        UserError: the clip cannot be written.
    """
    found: dict[str, Any] = {}
    try:
        entry = {name: shard.index[name][row].as_py() for name in shard.index.column_names}
        fps = Fraction(entry["fps_num"], entry["fps_den"])
        found["facts"] = f"{entry['codec']} {entry['width']}x{entry['height']}, {float(fps):.4g} fps"
        described = json.loads(shard.read(row, "json"))
        found |= {name: str(described.get(name, "")) for name in ("dataset", "source_id")}
        found["captions"] = tuple(map(_caption, described["captions"]))
        content = shard.read(row, "mp4")
        if zlib.crc32(content) != entry["mp4_crc32"]:
            raise NoPicture(f"its content in {shard.tar_path.name} differs from the commit; run prep verify")
        frames = evenly_within(range(entry["num_frames"]), at_most=_PICTURES)
        found["pictures"] = tuple(
            Picture(data_uri(jpeg(picture, height=_PICTURE_HEIGHT_PX), "image/jpeg"), float(number / fps))
            for number, picture in zip(frames, decode_frames(content, entry, frames=frames), strict=True)
        )
        found["clip"] = _clip(content, entry, fps=fps, plan=plan, folder=folder)
    except (Damaged, OSError, ValueError, KeyError, TypeError, NoPicture, av.error.FFmpegError) as error:
        found["problem"] = f"cannot be shown: {error}"
        found.pop("pictures", None)
    return found


def _caption(caption: dict[str, Any]) -> CaptionLine:
    end_s, of_model = caption["end_s"], is_of_model(str(caption.get("source")))
    begin_s, end_s = float(caption["begin_s"]), None if end_s is None else float(end_s)
    return CaptionLine(str(caption["text"]), begin_s, end_s, of_model)


def _clip(content: bytes, entry: dict[str, Any], *, fps: Fraction, plan: ClipPlan, folder: ClipFolder) -> Clip:
    if plan.is_embedded:
        return Clip(data_uri(content, "video/mp4"), len(content), is_preview=False)
    name = clip_name(entry["key"], entry["mp4_crc32"], is_preview=plan.is_preview)
    size_bytes = folder.has(name, size_bytes=None if plan.is_preview else len(content))
    if not size_bytes:
        made = preview(content, fps=fps) if plan.is_preview else content
        folder.write(name, made)
        size_bytes = len(made)
    return Clip(name, size_bytes, is_preview=plan.is_preview)
