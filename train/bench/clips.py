"""What the loader's threads do to a sample, one link after the other: read, decode, crop, tokens.

The loader runs them one after the other in each thread; here all threads do one of them at a time. Samples come in
training order, so that what is read is as cold, or as warm, as training would find it.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import local

import numpy as np

from manifests.errors import FailedWork
from manifests.keys import chunk_key
from shards.damage import Damaged
from shards.reader import CommittedShard, Variant
from train.bench.timing import Rate, Rounds
from train.data.batch import Sample
from train.data.chunk_table import chunk_table
from train.data.clips import Sampling
from train.data.decoding.chunks import read_packets
from train.data.decoding.clip import ChunkFrames, Clip, ClipShape, frame_places, make_clip
from train.data.decoding.packets import PacketDecoder
from train.data.decoding.plain import PlainVideo
from train.data.failures import SampleFailed
from train.data.loader import Visit
from train.data.order import SampleOrder
from train.data.video_captions import VideoCaptions, videos_of_split
from train.models.text import Tokenize
from train.settings import DualEncoderSettings

CLIP_LINKS = ("read", "decode", "crop", "tokens")
_SAMPLES_A_ROUND = 64


@dataclass(frozen=True)
class _Content:
    """The bytes of one chunk that give `frames`: packets, or the whole file."""

    shard: CommittedShard
    row: int
    frames: frozenset[int]
    packets: list[tuple[int, memoryview]] | None
    whole: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.whole) + sum(len(packet) for _, packet in self.packets or ())


@dataclass(frozen=True)
class _Work:
    """Visits that are loaded together because they share a chunk, and what the links so far have made of them."""

    visits: tuple[Visit, ...]
    places: tuple[list[tuple[int, int]], ...] = ()  # (chunk, frame) of each picture, by visit
    contents: dict[int, _Content] = field(default_factory=dict)  # by chunk
    frames: dict[int, ChunkFrames] = field(default_factory=dict)  # by chunk
    clips: tuple[Clip, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class ClipRates:
    """What was measured, and samples to go on with.

    Attributes:
        rates: by link.
        read_bytes_an_item: bytes that were read for a sample.
        samples: those made last, at most a batch of them.
        failed: of each sample that could not be had, which and why.
    """

    rates: dict[str, Rate]
    read_bytes_an_item: float
    samples: list[Sample]
    failed: list[str]


class ClipLinks:
    """The links on the samples of a set."""

    def __init__(self, samples: VideoCaptions, settings: DualEncoderSettings, *, tokenize: Tokenize) -> None:
        self._samples, self._settings, self._tokenize = samples, settings, tokenize
        self._shape = ClipShape(
            sampling=Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride),
            size_px=settings.size_px,
            crop=settings.crop,
            min_crop_area=settings.min_crop_area,
        )
        self._shards = Variant.open(settings.shards).shards()
        self._video_ids = videos_of_split(settings.shards, settings.split)
        self._chunks = chunk_table(self._shards, self._video_ids)
        self._order = SampleOrder(len(samples), settings.seed, settings.samples_per_chunk)
        self._of_thread = local()
        self._failed: list[str] = []

    def measure(self, *, seconds: float) -> ClipRates:
        """Every link for about `seconds`.

        Raises:
            FailedWork: no sample came through.
        """
        links = dict(zip(CLIP_LINKS, (self._read, self._decode, self._crop, self._tokens), strict=True))
        rounds = {name: Rounds() for name in links}
        samples: list[Sample] = []
        num_read = size_bytes = num_rounds = 0
        with ThreadPoolExecutor(self._settings.workers) as pool:
            while sum(each.total_s for each in rounds.values()) < seconds * len(rounds):
                work = self._visits_of_round(num_rounds)
                is_warm = bool(samples)
                for name, link in links.items():
                    began = time.perf_counter()
                    work = [done for done in pool.map(partial(self._tried, link), work) if done is not None]
                    took_s, num_items = time.perf_counter() - began, sum(len(one.visits) for one in work)
                    if is_warm and num_items:
                        rounds[name].add(took_s, num_items=num_items)
                num_rounds += 1
                samples = [*samples, *(sample for one in work for sample in one.samples)][-self._settings.batch :]
                num_read += sum(len(one.visits) for one in work)
                size_bytes += sum(content.size_bytes for one in work for content in one.contents.values())
                if len(self._failed) > self._settings.max_failures:
                    raise FailedWork(f"{len(self._failed)} samples cannot be had; the first: {self._failed[0]}")
        rates = {name: each.median_rate for name, each in rounds.items()}
        return ClipRates(rates, size_bytes / num_read, samples, self._failed)

    def _visits_of_round(self, number: int) -> list[_Work]:
        group, seed = self._settings.samples_per_chunk, self._settings.seed
        num_groups = -(-min(self._settings.batch, _SAMPLES_A_ROUND) // group)
        positions = group * num_groups * number + np.arange(group * num_groups, dtype=np.int64)
        visits = [
            Visit(sample, position, seed)
            for sample, position in zip(self._order.at(positions).tolist(), positions.tolist(), strict=True)
        ]
        groups = [visits[begin : begin + group] for begin in range(0, len(visits), group)]
        # Where the order has an empty place, it has no sample.
        return [_Work(tuple(visit for visit in one if visit.sample >= 0)) for one in groups]

    def _tried(self, link: Callable[[_Work], _Work], work: _Work) -> _Work | None:
        import av

        try:
            return link(work)
        except (SampleFailed, Damaged, OSError, ValueError, av.FFmpegError) as error:
            self._failed += [f"{self._samples.key(visit.sample)}: {error}" for visit in work.visits]
            return None

    def _read(self, work: _Work) -> _Work:
        """Which frames are shown, where their bytes lie, and reading them."""
        places = tuple(self._places_of(visit) for visit in work.visits)
        wanted: dict[int, set[int]] = {}
        for chunk, frame in (place for of_visit in places for place in of_visit):
            wanted.setdefault(chunk, set()).add(frame)
        contents = {chunk: self._read_chunk(chunk, frozenset(frames)) for chunk, frames in wanted.items()}
        return replace(work, places=places, contents=contents)

    def _places_of(self, visit: Visit) -> list[tuple[int, int]]:
        usable = self._samples.usable
        first, last = int(usable.first_chunk[visit.sample]), int(usable.last_chunk[visit.sample])
        begin_us, end_us = int(usable.begin_us[visit.sample]), int(usable.end_us[visit.sample])
        times = [self._chunks.times(chunk) for chunk in range(first, last + 1)]
        places = frame_places(begin_us, end_us, self._shape.sampling, times, rng=visit.rng())
        return [(first + place.chunk, place.frame) for place in places]

    def _read_chunk(self, chunk: int, frames: frozenset[int]) -> _Content:
        shard, row = self._shards[int(self._chunks.shard[chunk])], int(self._chunks.row[chunk])
        key = chunk_key(self._video_ids[int(self._chunks.video_row[chunk])].as_py(), int(self._chunks.start_ms[chunk]))
        table = shard.packet_tables.of_row(row)
        if self._settings.decode == "packets" and table.has_closed_gops:
            packets = read_packets(shard, row, frames, table=table, key=key)
            return _Content(shard, row, frames, packets, b"")
        return _Content(shard, row, frames, None, shard.read(row, "mp4"))

    def _decode(self, work: _Work) -> _Work:
        return replace(work, frames={chunk: self._decode_chunk(content) for chunk, content in work.contents.items()})

    def _decode_chunk(self, content: _Content) -> ChunkFrames:
        if content.packets is None:
            return PlainVideo(content.whole).decode(content.frames)
        decoder = getattr(self._of_thread, "decoder", None)
        if decoder is None:
            decoder = self._of_thread.decoder = PacketDecoder()
        index = content.shard.index
        codec, extradata = index["codec"][content.row].as_py(), index["extradata"][content.row].as_py()
        found: ChunkFrames = decoder.decode(codec=codec, extradata=extradata, packets=content.packets)
        return found

    def _crop(self, work: _Work) -> _Work:
        clips = []
        for visit, places in zip(work.visits, work.places, strict=True):
            key = self._samples.key(visit.sample)
            if any(frame not in work.frames[chunk] for chunk, frame in places):
                raise SampleFailed(key, reason="frame_missing", detail="a frame does not come out of the decoder")
            pictures = [work.frames[chunk][frame] for chunk, frame in places]
            in_graph = self._settings.decode == "filter"
            clips.append(make_clip(pictures, self._shape, rng=visit.rng(), in_graph=in_graph, key=key))
        return replace(work, clips=tuple(clips))

    def _tokens(self, work: _Work) -> _Work:
        samples = (
            Sample(
                position=visit.position,
                key=self._samples.key(visit.sample),
                caption_id=visit.sample,
                video=clip.video,
                colour=clip.colour,
                tokens=self._tokenize(self._samples.text(visit.sample)),
            )
            for visit, clip in zip(work.visits, work.clips, strict=True)
        )
        return replace(work, samples=tuple(samples))
