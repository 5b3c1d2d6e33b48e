"""Compute the advice of `prep advise` for an index: how often clips must be read before re-encoding saves CPU time.

    N = E / (C x (a - r))      number of visits to each clip after which re-encoding pays off

`E` is the CPU time for encoding all videos with a recipe, and `C` is the number of clips. `a` and `r` are the CPU times
for reading and decoding a clip: `a` from the original source, measured on clips from random chunks, and `r` from a
chunk made with the recipe. `E` and `r` come from the trial encodes of a plan (`clipmill.prep.video.plan_report`): short
sections of videos are encoded, and then decoded like chunks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import process_time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from clipmill.manifests.errors import Inaccessible, UserError
from clipmill.manifests.formatting import count_noun, duration_text, short_number, size_text
from clipmill.manifests.progress import Activity
from clipmill.manifests.store import captions_path
from clipmill.prep.core.chunk_content import source_location
from clipmill.prep.video.column import NAMED_RECIPES, Recipe, RecipeName
from clipmill.prep.video.plan_inputs import make_plan
from clipmill.prep.video.plan_report import Estimate, estimate, run_trials
from clipmill.prep.video.span_task import read_chunk
from clipmill.shards.decoding import DamagedPacket, PacketDecoder, SourceFile, read_packets, read_source_packets
from clipmill.shards.opening import Damaged
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.shards.timeline.model import US_PER_S, Timeline
from clipmill.shards.timeline.pictures import UprightFilter

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_NUM_FRAMES, _CLIP_S = 4, (1.0, 4.0)  # frames per clip, and the minimum and maximum length of a clip
_SIZE_PX = 224  # side length of the resized frames
_NUM_CHUNKS, _CLIPS_PER_CHUNK = 48, 4
_CLIPS_PER_SECTION = 16
_MAX_CPU_S = 15.0  # CPU time after which a measurement ends


@dataclass(frozen=True)
class ClipCost:
    """Total cost of clips that were read, decoded and resized.

    Attributes:
        num_clips: Number of clips.
        num_videos: Number of videos that contain the clips.
        cpu_s: CPU time of the process for all clips, in seconds.
        read_bytes: Total size of the packets that were read for all clips.
    """

    num_clips: int = 0
    num_videos: int = 0
    cpu_s: float = 0.0
    read_bytes: int = 0

    def __add__(self, other: "ClipCost") -> "ClipCost":
        """Return the total cost of the clips from two disjoint sets of videos."""
        return ClipCost(*(a + b for a, b in zip(self.values().values(), other.values().values(), strict=True)))

    def values(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dict(vars(self))

    @property
    def clip_s(self) -> float:
        """CPU time per clip in seconds."""
        return self.cpu_s / self.num_clips

    @property
    def clip_bytes(self) -> float:
        """Number of bytes read per clip."""
        return self.read_bytes / self.num_clips


@dataclass(frozen=True)
class _Chunk:
    """A chunk whose clips are measured.

    Attributes:
        length_s: Length in seconds.
        frame_at: Function that takes a time in seconds from the start of the chunk, and returns the index of the frame
            shown at this time.
        read: Function that takes frame indices, and reads the packets that these frames require.
        is_strict: True to raise errors that the decoder could otherwise conceal.
        upright_filter: Filter that rotates the decoded frames upright.
    """

    video_id: str
    length_s: float
    frame_at: Callable[[float], int]
    read: Callable[[set[int]], Sequence[tuple[int, bytes | memoryview]]]
    codec: str
    extradata: bytes
    is_strict: bool
    upright_filter: UprightFilter


def measure_sources(variant: Variant) -> ClipCost:
    """Measure the cost of reading, decoding and resizing clips from random chunks of an index.

    Raises:
        UserError: A source has changed or cannot be read.
        Damaged, OSError: An index cannot be read.
    """
    rows = [(shard, row) for shard in variant.shards() for row in range(shard.num_samples)]
    selection = Random(0).sample(rows, min(_NUM_CHUNKS, len(rows)))
    try:
        chunks = [_source_chunk(shard, row) for shard, row in selection]
    except KeyError as error:
        raise UserError(str(error.args[0]), hint="run `prep index` again") from None
    with Activity("decoding clips from the sources"):
        return _measure(chunks, clips_per_chunk=_CLIPS_PER_CHUNK)


def _source_chunk(shard: CommittedShard, row: int) -> _Chunk:
    tables, index = shard.packet_tables, shard.index
    table, is_closed, source = tables.packet_table(row), tables.has_closed_gops(row), tables.source(row)
    assert source is not None, "the index is not from prep index"
    start_us, fps = index["start_ms"][row].as_py() * 1000, index["fps_num"][row].as_py() / index["fps_den"][row].as_py()
    timeline, video_id = Timeline.from_json(source.timeline), index["video_id"][row].as_py()
    source_file = SourceFile(source_location(shard.index_path, video_id))
    codec, extradata = tables.stream(row)
    return _Chunk(
        video_id,
        index["num_frames"][row].as_py() / fps,
        lambda seconds: source.frame_at(start_us + round(seconds * US_PER_S), 1),
        lambda frames: read_source_packets(source_file, source, table, frames, is_closed=is_closed),
        codec,
        extradata,
        not table.has_recovery_points,
        UprightFilter(timeline.shape, aspect=timeline.aspects[0][1]),
    )


def _section_chunk(path: Path, video_id: str, *, recipe: Recipe) -> _Chunk:
    """Return an encoded section as a chunk."""
    content, fps = path.read_bytes(), recipe.settings().fps_exact
    facts, file = read_chunk(content, fps=fps), SourceFile(str(path))
    table = PacketTable(
        np.array(facts.packet_offset, np.uint32),
        np.array(facts.packet_size, np.uint32),
        np.array(facts.packet_frame, np.int32),
        np.array(facts.packet_flags, np.uint8),
        np.array(facts.packet_crc32, np.uint32),
    )
    return _Chunk(
        video_id,
        float(facts.num_frames / fps),
        lambda seconds: min(int(seconds * fps), facts.num_frames - 1),
        lambda frames: read_packets(file, (0, len(content)), table, table.packets_for(frames)),
        facts.codec,
        facts.extradata,
        True,
        UprightFilter(Timeline().shape),
    )


def _measure(chunks: Sequence[_Chunk], *, clips_per_chunk: int) -> ClipCost:
    """Measure the cost of clips, one clip per chunk in each round. The first clip is a warm-up, and is not counted."""
    import av.error

    random, decoder, videos = Random(0), PacketDecoder(), set[str]()
    num_clips, cpu_s, read_bytes = -1, 0.0, 0
    for chunk in (chunk for _ in range(clips_per_chunk) for chunk in (*chunks[: num_clips < 0], *chunks)):
        length_s = min(random.uniform(*_CLIP_S), chunk.length_s)
        begin_s = random.uniform(0, chunk.length_s - length_s)
        frames = {chunk.frame_at(begin_s + (part + 0.5) * length_s / _NUM_FRAMES) for part in range(_NUM_FRAMES)}
        started_s = process_time()
        try:
            packets = chunk.read(frames)
            for index, frame in decoder.decode(
                codec=chunk.codec, extradata=chunk.extradata, packets=packets, is_strict=chunk.is_strict
            ):
                if index in frames:
                    _resize(chunk.upright_filter.apply(frame))
        except (DamagedPacket, Damaged, OSError, Inaccessible, ValueError, av.error.FFmpegError) as error:
            raise UserError(
                f"a clip of video {chunk.video_id} cannot be read: {error}", hint="run `prep index` again"
            ) from None
        num_clips += 1
        if num_clips:
            videos.add(chunk.video_id)
            cpu_s += process_time() - started_s
            read_bytes += sum(len(content) for _, content in packets)
        if cpu_s > _MAX_CPU_S:
            break
    return ClipCost(num_clips, len(videos), cpu_s, read_bytes)


def _resize(frame: "VideoFrame") -> None:
    """Resize the planes of a frame, as training resizes a crop of the frame."""
    import cv2

    for plane in (frame if "420p" in frame.format.name else frame.reformat(format="yuv420p")).planes:
        picture = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[: plane.height, : plane.width]
        side = _SIZE_PX if plane.width == frame.width else _SIZE_PX // 2
        interpolation = cv2.INTER_AREA if max(picture.shape) >= 2 * side else cv2.INTER_LINEAR
        cv2.resize(picture, (side, side), interpolation=interpolation)


@dataclass(frozen=True)
class RecipeCost:
    """Cost of clips from chunks made with a recipe, and cost of encoding all indexed videos with this recipe."""

    clips: ClipCost
    encoding: Estimate

    @property
    def encoding_s(self) -> float:
        """CPU time for encoding all videos, in seconds."""
        return 3600 * self.encoding.core_hours


def measure_recipe(data_dir: Path, name: RecipeName, *, video_ids: set[str]) -> RecipeCost | None:
    """Encode sections of some videos, decode clips from them, and estimate the cost of encoding all videos of an index.

    Returns:
        The costs; None if no section could be encoded.
    """
    recipe, clips = Recipe(recipe=name), ClipCost()
    plan = make_plan(data_dir, recipe.resolve()).plan
    rows = np.arange(len(plan.video_rows))
    rows = rows[[video_id in video_ids for video_id in plan.video_ids(plan.video_rows.tolist())]]

    def measure_section(video_id: str, segments: Sequence[Path]) -> None:
        nonlocal clips
        chunks = [_section_chunk(path, video_id, recipe=recipe) for path in segments]
        clips += _measure(chunks, clips_per_chunk=_CLIPS_PER_SECTION)

    with Activity(f"encoding sections with recipe {name}"):
        work = plan.workload(rows)
        trials = run_trials(plan, rows, work, on_section=measure_section).trials
    return RecipeCost(clips, estimate(work, trials, settings=plan.recipe.settings)) if trials else None


@dataclass(frozen=True)
class Advice:
    """Costs of training on the original sources, and on chunks made with each recipe.

    Attributes:
        sources: Cost of clips from the sources.
        size_bytes: Total size of the sources in bytes.
        num_clips: Number of clips in an epoch.
        clip_source: Item that each clip covers: "caption" or "chunk".
        recipes: Costs of each recipe, by name. A recipe is missing if no section could be encoded with it.
        clips_per_s: Number of clips that training requires per second; None if unknown.
    """

    sources: ClipCost
    size_bytes: int
    num_clips: int
    clip_source: str
    recipes: Mapping[str, RecipeCost]
    clips_per_s: float | None = None

    def visits(self, name: str) -> float | None:
        """Return the number of visits per clip after which re-encoding saves CPU time; None if no number suffices."""
        recipe = self.recipes[name]
        saved_s = self.sources.clip_s - recipe.clips.clip_s
        return recipe.encoding_s / (self.num_clips * saved_s) if saved_s > 0 else None

    def values(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        ways: dict[str, dict[str, Any]] = {"as_they_are": {"size_bytes": self.size_bytes}}
        for name, recipe in self.recipes.items():
            size_bytes = round(recipe.encoding.size_bytes)
            costs = {"size_bytes": size_bytes, "encoding_cpu_s": recipe.encoding_s, "pays_after": self.visits(name)}
            ways[name] = costs | {"num_trials": recipe.encoding.num_trials}
        for way, clips in self._clips():
            ways[way.replace(" ", "_")] |= clips.values() | {"clips_per_cpu_s": 1 / clips.clip_s}
        return {
            "num_clips": self.num_clips,
            "clips_of": self.clip_source,
            "clips_per_s": self.clips_per_s,
            "ways": ways,
        }

    def lines(self) -> Iterator[str]:
        """Yield a table, a description of the measurement, and the number of visits that make re-encoding pay off."""
        needs = "" if self.clips_per_s is None else f"  cores for {self.clips_per_s:.3g} clips/s"
        yield f"{'':<13}{'clips/CPU s':>12}{'bytes/clip':>12}{'total':>10}{'encoding':>12}{'pays after':>14}{needs}"
        for way, clips in self._clips():
            size, encoding, pays = size_text(self.size_bytes), "", ""
            if way in self.recipes:
                recipe, visits = self.recipes[way], self.visits(way)
                size, encoding = size_text(round(recipe.encoding.size_bytes)), duration_text(recipe.encoding_s)
                pays = "never" if visits is None else f"{short_number(visits)} visits"
            rate, cores = f"{1 / clips.clip_s:.1f}", ""
            if self.clips_per_s is not None:
                cores = f"{short_number(self.clips_per_s * clips.clip_s):>{len(needs)}}"
            yield f"{way:<13}{rate:>12}{size_text(clips.clip_bytes):>12}{size:>10}{encoding:>12}{pays:>14}{cores}"
        measured_clips = (
            f"{count_noun(self.sources.num_clips, 'clip')} of {count_noun(self.sources.num_videos, 'video')}"
        )
        yield ""
        yield (
            f"measured  as they are: {measured_clips} in {self.sources.cpu_s:.1f} s of CPU time; a clip lasts 1 to 4 s,"
            " and 4 of its frames are read, decoded and resized to 224 pixels"
        )
        for name, recipe in self.recipes.items():
            trials, section = recipe.encoding.num_trials, recipe.clips
            yield (
                f"          {name}: 5 s of {count_noun(trials, 'video')} encoded, "
                f"{count_noun(section.num_clips, 'clip')} in {section.cpu_s:.1f} s; the encoding time is an estimate"
            )
        visit_text = (
            f"one visit to each clip reads {count_noun(self.num_clips, 'clip')}, one for each {self.clip_source}"
        )
        num_visits = {name: visits for name in self.recipes if (visits := self.visits(name)) is not None}
        if not self.recipes:
            yield "no section of a video could be encoded; `prep plan` shows the reason"
        elif not num_visits:
            yield "re-encoding never pays in CPU time: clips from the sources cost less than clips made with any recipe"
        else:
            best = min(num_visits, key=num_visits.__getitem__)
            ratio = short_number(self.recipes[best].encoding.size_bytes / self.size_bytes)
            yield (
                f"re-encoding pays after {short_number(num_visits[best])} visits to each clip, with --recipe {best} and"
                f" {ratio} times the bytes of the sources; {visit_text}"
            )
            yield f"next      for more visits: prep chunk --recipe {best}; for fewer, train on the index"

    def _clips(self) -> list[tuple[str, ClipCost]]:
        return [("as they are", self.sources), *((name, recipe.clips) for name, recipe in self.recipes.items())]


def advise_on_sources(variant: Variant, data_dir: Path, *, clips_per_s: float | None) -> Advice:
    """Measure clips from the sources of an index, and clips from chunks made with each named recipe.

    Raises:
        UserError: A source has changed or cannot be read, or the manifest is damaged.
        Damaged, OSError: An index cannot be read.
    """
    video_ids, size_bytes, num_chunks = set[str](), 0, 0
    for shard in variant.shards():
        ids = shard.index["video_id"].to_pylist()
        sizes = dict(zip(ids, shard.index["source_bytes"].to_pylist(), strict=True))
        size_bytes += sum(size for video_id, size in sizes.items() if video_id not in video_ids)
        video_ids |= sizes.keys()
        num_chunks += shard.num_samples
    num_captions = pq.read_metadata(captions_path(data_dir)).num_rows
    sources = measure_sources(variant)
    recipes = {name: measure_recipe(data_dir, name, video_ids=video_ids) for name in NAMED_RECIPES}
    return Advice(
        sources,
        size_bytes,
        num_captions or num_chunks,
        "caption" if num_captions else "chunk",
        {name: cost for name, cost in recipes.items() if cost is not None},
        clips_per_s,
    )
