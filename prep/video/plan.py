"""Plan the `video` column: the work for each shard, and the reason for it.

The plan is a function of the manifest, the probes, the shots, the layout, the recipe and the commits. Only the required
files are opened. With `--cut shots`, a video whose shots have not been detected yet has no chunks in the plan; its
existing chunks are kept. The code processes tables by column, and updates the hash of each shard only once, so that
planning ten million chunks takes seconds.

A span consists of consecutive chunks of a video that one encoder pass makes. If the pass is unchanged, a worker copies
the chunks of the span from a stored tar: from the tar of the same shard, or of a shard that contained the video before
the video was removed, renamed or moved to a different split. `find_changes` finds these chunks before the run, by
comparing the plan with the indexes.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.store import check_table_size
from clipmill.prep.core.plan import (
    NUM_CHECK_THREADS,
    HeldShards,
    ShardPlan,
    ShardState,
    StoredShards,
    WantedShard,
    plan_shards,
)
from clipmill.prep.core.tables import as_array
from clipmill.prep.sources.access import SourceFacts
from clipmill.prep.video.encode import Span, SpanPlan
from clipmill.prep.video.settings import SPAN_CHUNKS, ResolvedRecipe
from clipmill.prep.video.span_task import SPAN_COLUMN, StoredTar
from clipmill.prep.video.spans import (
    ShotCutting,
    VideoShots,
    cutting_of,
    extend_layout,
    frames_of,
    required_rows,
    shards_of_moved_videos,
)
from clipmill.shards.columns import is_indexed
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.index import extensions_of, open_index
from clipmill.shards.opening import Damaged
from clipmill.shards.verify import index_path, uncommitted_tars

if TYPE_CHECKING:
    from clipmill.prep.sources.shot_table import ShotTask

_ROWS_AT_ONCE = 1 << 16
_HELD_REASON = "kept, because a source cannot be read and its duration is unknown"
_HELD_SHOTS_REASON = "kept, because the duration or the shots of a source are unknown"
_COMPARED_STATES = (ShardState.CHANGED, ShardState.RETRY)
_RETURNED_VIDEOS = "videos that returned, were renamed, or were moved"
_Tars = Mapping[str, tuple[StoredTar, float]]  # by span fingerprint: tar with the chunks, and their mean size in bytes
_COLUMNS = ("video_id", SPAN_COLUMN)


@dataclass(frozen=True)
class Workload:
    """Spans to encode, as arrays with one entry per span.

    Attributes:
        seconds: Length of the span in seconds of video.
        width, height: Resolution of the source in pixels.
        fps: Frame rate of the source.
    """

    seconds: np.ndarray
    width: np.ndarray
    height: np.ndarray
    fps: np.ndarray


@dataclass(frozen=True)
class ShotsOfVideo:
    """Shots of one video in a plan with `--cut shots`.

    Attributes:
        is_detected: True if the shots are known.
        left_out_s: (begin, end), in seconds, of each part of the video that no chunk covers; empty if the shots are
            unknown.
    """

    is_detected: bool
    left_out_s: list[tuple[float, float]]


class Videos:
    """Table of the videos in a manifest (clipmill.manifests.schema.VIDEOS), open for reading.

    Attributes:
        ids: ID of each video.
        splits: Split of each video.
    """

    def __init__(self, file: pq.ParquetFile, *, path: Path) -> None:
        """Read the IDs and splits.

        Args:
            file: Open table, which must stay open while this object is in use.
            path: Path of the table, used in messages.
        """
        self._file, self._path, self._lock = file, path, Lock()
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._ends = np.cumsum(np.array(sizes, np.int64))
        self._read_group = lru_cache(1)(self._read)
        self.ids, self.splits = as_array(self.column("video_id")), as_array(self.column("split"))

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a column of all videos.

        Raises:
            UserError: The strings of the column are too large for one array.
        """
        table = self._file.read(columns=[name])
        check_table_size(self._path, num_rows=len(table), videos=table)
        return table[name]

    def take(self, rows: np.ndarray, *columns: str) -> pa.Table:
        """Read columns of the videos in `rows` (int64 [N]), in the order of `rows`."""
        groups = np.searchsorted(self._ends, rows, side="right")
        parts = [pa.schema([self._file.schema_arrow.field(name) for name in columns]).empty_table()]
        for group in np.unique(groups).tolist():
            begin = self._ends[group - 1] if group else 0
            with self._lock:
                table = self._read_group(group, columns)
            parts.append(table.take(pa.array(rows[groups == group] - begin)))
        table = pa.concat_tables(parts)
        is_ascending = bool((groups[1:] >= groups[:-1]).all())
        return table if is_ascending else table.take(pa.array(np.argsort(np.argsort(groups, kind="stable"))))

    def _read(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        return self._file.read_row_group(group, columns=list(columns)).select(columns).replace_schema_metadata()


class Plan:
    """All shards that the manifest requires under one recipe. Each row of the plan is a required span.

    Attributes:
        layout: Layout that assigns every span to a shard. The layout must be written before the work begins.
        shards: Shards, in the order of their IDs.
        num_unusable: Number of unusable videos by failure code, according to their probes or to the detection of their
            shots. A video whose source was readable earlier is not counted: its existing chunks are kept, and each of
            its missing chunks will be recorded as a failure.
        shots: Known shots of the videos, and the videos whose shots are unknown; None with `--cut even`.
        cutting: Division of all videos into chunks.
        probes: Probes of the videos, one row per video.
        num_frames: Number of output frames of each video, int64; 0 if it is unusable.
        video_rows: Manifest row of the video of each span in the plan, int64 [spans].
    """

    def __init__(
        self,
        *,
        recipe: ResolvedRecipe,
        videos: Videos,
        probes: pa.Table,
        layout: pa.Table,
        stored: StoredShards,
        shots: VideoShots | None = None,
        retry_codes: frozenset[str] = frozenset(),
    ) -> None:
        """Compute the plan.

        Args:
            videos: Videos of the manifest.
            probes: One row per video, in the order of `videos` (clipmill.prep.sources.table.PROBES, without paths).
            layout: Stored layout (clipmill.prep.core.tables.LAYOUT).
            stored: Shards of the variant.
            shots: Known shots of the videos; required by `--cut shots`.
            retry_codes: Codes of failures to retry even if nothing changed.
        """
        self.recipe, self._recipe_fingerprint = recipe, recipe.fingerprint
        self._videos, self.probes = videos, probes
        self._is_unusable = np.asarray(pc.is_null(probes["fingerprint"]))
        self.num_frames = frames_of(recipe, probes)
        self.shots = shots
        self.cutting = cutting_of(recipe.settings, self.num_frames, shots)
        self._num_chunks = self.cutting.num_chunks
        extended_layout = extend_layout(layout, video_ids=videos.ids, splits=videos.splits, num_chunks=self._num_chunks)
        self.layout, self._layout_videos, rows = (
            extended_layout.table,
            extended_layout.video_rows,
            extended_layout.required,
        )
        self.video_rows = self._layout_videos[rows]
        self._span_index = np.asarray(self.layout["span_index"])[rows]
        self.num_unusable = Counter(probes["code"].filter(pa.array(self._is_unusable)).to_pylist())
        if shots is not None:
            self.num_unusable.update(shots.failures[row][0] for row in shots.failures)
        self.has_captions = bool(pc.any(pc.greater(videos.column("num_captions"), 0)).as_py())
        self.shards = list(self._plan_shards(rows, stored, retry_codes))

    @property
    def num_chunks(self) -> int:
        """Number of chunks that the plan requires."""
        return int(self._num_chunks.sum())

    @property
    def num_videos(self) -> int:
        """Number of videos in the manifest."""
        return len(self._videos)

    def has_video(self, video_id: str) -> bool:
        """Return True if the manifest contains this video."""
        return bool(pc.any(pc.equal(self._videos.ids, video_id)).as_py())

    def spans(self, rows: Sequence[int]) -> Iterator[SpanPlan]:
        """Yield the spans in the given rows of the plan."""
        video_rows = self.video_rows[np.asarray(rows, np.int64)]
        videos = self._videos.take(video_rows, "video_id", "source_id", "dataset", "path").to_pylist()
        facts = self.probes.select(list(SourceFacts.__dataclass_fields__)).take(pa.array(video_rows)).to_pylist()
        for row, video_row, video, fact in zip(rows, video_rows.tolist(), videos, facts, strict=True):
            source, span = SourceFacts(**fact), self.cutting.span(video_row, int(self._span_index[row]))
            fingerprint = span_fingerprint(self._recipe_fingerprint, source.fingerprint, span)
            yield SpanPlan(**video, source=source, span=span, fingerprint=fingerprint)

    def span_keys(self, rows: range) -> list[tuple[str, str]]:
        """Return (video ID, fingerprint of the encoder pass) for each span in the given rows of the plan."""
        videos = pa.array(self.video_rows[rows.start : rows.stop])
        ids, sources = self._videos.ids.take(videos), self.probes.select(["fingerprint"]).take(videos)[0]
        keys = []
        for row, video_id, source in zip(rows, ids.to_pylist(), sources.to_pylist(), strict=True):
            span = self.cutting.span(int(self.video_rows[row]), int(self._span_index[row]))
            keys.append((video_id, span_fingerprint(self._recipe_fingerprint, source, span)))
        return keys

    def shards_of_moved_videos(self, stored: Collection[int]) -> dict[int, bool]:
        """Return the result of `clipmill.prep.video.spans.shards_of_moved_videos` for this plan."""
        splits = self._videos.splits
        return shards_of_moved_videos(self.layout, video_rows=self._layout_videos, splits=splits, stored=stored)

    def failed_sources(self) -> Iterator[Failure]:
        """Yield a failure for each unusable video."""
        yield from self._failures_of(self._is_unusable)
        if self.shots is not None:
            videos = self._videos.take(np.array(list(self.shots.failures), np.int64), "video_id", "path").to_pylist()
            for (code, message), video in zip(self.shots.failures.values(), videos, strict=True):
                yield Failure(video["video_id"], None, code, f"{video['path']}: {message}")

    def lost_sources(self) -> list[Failure]:
        """Return a failure for each video whose source was readable earlier and is now unreadable."""
        return list(self._failures_of(np.asarray(pc.is_valid(self.probes["code"])) & ~self._is_unusable))

    def _failures_of(self, is_failed: np.ndarray) -> Iterator[Failure]:
        """Yield the probe failures of the videos that `is_failed` (mask, bool [videos]) selects."""
        rows = np.flatnonzero(is_failed)
        reasons = self.probes.select(["code", "message"]).take(pa.array(rows)).to_pylist()
        for reason, video in zip(reasons, self._videos.take(rows, "video_id", "path").to_pylist(), strict=True):
            yield Failure(video["video_id"], None, reason["code"], f"{video['path']}: {reason['message']}")

    def notes(self, *, max_videos: int) -> tuple[int, dict[str, list[str]]]:
        """Return the number of videos with notes on unusual properties, and the notes of the first videos, by ID."""
        rows = np.flatnonzero(np.asarray(pc.fill_null(pc.not_equal(self.probes["notes"], ""), False)))
        first_rows = pa.array(rows[:max_videos])
        notes = (text.splitlines() for text in self.probes["notes"].take(first_rows).to_pylist())
        return len(rows), dict(zip(self.video_ids(first_rows.to_pylist()), notes, strict=True))

    def notes_of(self, video_id: str) -> list[str]:
        """Return the notes on unusual properties of one video of the manifest."""
        return (self.probes["notes"][pc.index(self._videos.ids, video_id).as_py()].as_py() or "").splitlines()

    @property
    def num_with_audio(self) -> int:
        """Number of videos with audio, including audio that `--audio drop` omits."""
        return pc.sum(pc.greater(self.probes["num_audio"], 0)).as_py() or 0

    def workload(self, rows: np.ndarray) -> Workload:
        """Return the workload of encoding the spans in the given rows."""
        videos = self.video_rows[rows]
        frames = self.cutting.span_frames(videos, self._span_index[rows])
        columns = (np.asarray(self.probes[name])[videos] for name in ("width", "height", "fps"))
        return Workload(frames / float(self.recipe.settings.fps_exact), *columns)

    @property
    def mean_chunk_s(self) -> float:
        """Mean length of a chunk in seconds; with `--cut even`, the length of a full chunk."""
        settings = self.recipe.settings
        if isinstance(self.cutting, ShotCutting) and self.num_chunks:
            return float(self.cutting.chunk_frames.mean() / float(settings.fps_exact))
        return float(settings.len_s)

    def video_ids(self, rows: Sequence[int]) -> list[str]:
        """Return the IDs of the videos in the given rows of the manifest."""
        return [str(self._videos.ids[row]) for row in rows]

    def shots_of_video(self, video_id: str) -> ShotsOfVideo | None:
        """Return the known shots of a video in the manifest; None with `--cut even`."""
        if self.shots is None or not isinstance(self.cutting, ShotCutting):
            return None
        row = int(pc.index(self._videos.ids, video_id).as_py())
        if not self.shots.is_known[row]:
            return ShotsOfVideo(False, [])
        fps = float(self.recipe.settings.fps_exact)
        left_out = self.cutting.left_out(row, num_frames=int(self.num_frames[row]))
        return ShotsOfVideo(True, [(begin / fps, end / fps) for begin, end in left_out])

    def detection_tasks(self) -> "Iterator[ShotTask]":
        """Yield a task for each source whose shots must be detected. Several videos may share a source."""
        from clipmill.prep.sources.shot_table import ShotTask

        assert self.shots is not None
        fingerprints = set()
        paths = self._videos.take(self.shots.undetected_rows, "path")["path"].to_pylist()
        for row, path in zip(self.shots.undetected_rows.tolist(), paths, strict=True):
            fingerprint = self.probes["fingerprint"][row].as_py()
            if fingerprint not in fingerprints:
                fingerprints.add(fingerprint)
                num_frames = int(self.num_frames[row])
                timeline = self.probes["timeline"][row].as_py() or ""
                yield ShotTask(path, fingerprint, num_frames, self.recipe.settings.shot_detector, timeline)

    def _plan_shards(
        self, layout_rows: np.ndarray, stored: StoredShards, retry_codes: frozenset[str]
    ) -> Iterator[ShardPlan]:
        shard_ids = np.asarray(self.layout["shard_id"])[layout_rows]
        # The layout grows in shard order, so the rows of a shard are contiguous.
        bounds = np.flatnonzero(np.diff(shard_ids, prepend=-1, append=-1)) if len(shard_ids) else np.zeros(1, int)
        rows_with_code = np.flatnonzero(pc.is_valid(self.probes["code"]))
        unreadable_videos = frozenset(self._videos.ids.take(pa.array(rows_with_code)).to_pylist())
        begins, ends = bounds[:-1], bounds[1:]
        splits = self.layout["split"].take(pa.array(layout_rows[begins])).to_pylist()
        chunks_of_spans = np.minimum(self._num_chunks[self.video_rows] - self._span_index * SPAN_CHUNKS, SPAN_CHUNKS)
        first_chunks = np.concatenate([[0], np.cumsum(chunks_of_spans)])
        num_chunks = first_chunks[ends] - first_chunks[begins]
        common_identity = f"{self._recipe_fingerprint} {self.has_captions}".encode()

        def required_shards() -> Iterator[WantedShard]:
            columns = (shard_ids[begins], num_chunks, begins, ends)
            values = zip(splits, self._descriptions(bounds), *(column.tolist() for column in columns), strict=True)
            for split, description, shard_id, count, begin, end in values:
                digest = hashlib.sha256(common_identity)
                digest.update(description)
                yield WantedShard(shard_id, split, digest.hexdigest(), count, range(begin, end))

        # Shards that contain a video whose length or shots are unknown are not changed. The length is unknown if the
        # source is unreadable and the probe that recorded the length is lost.
        held_shards: frozenset[int] = frozenset()
        is_unknown = self._is_unusable if self.shots is None else self._is_unusable | ~self.shots.is_known
        if is_unknown.any():
            max_chunks = np.where(is_unknown, np.iinfo(np.int64).max, 0)
            rows, _ = required_rows(
                self.layout, video_rows=self._layout_videos, splits=self._videos.splits, num_chunks=max_chunks
            )
            held_shards = frozenset(np.asarray(self.layout["shard_id"])[rows].tolist())
        return plan_shards(
            required_shards(),
            stored,
            what_changed="its videos, their files or their captions",
            orphaned_because="the videos are no longer in the manifest",
            retry_codes=retry_codes,
            unreadable=unreadable_videos,
            held=HeldShards(held_shards, _HELD_REASON if self.shots is None else _HELD_SHOTS_REASON),
        )

    def _descriptions(self, bounds: np.ndarray) -> Iterator[memoryview]:
        """Yield a description of each shard's spans for the shard's fingerprint: bytes with one line per span.

        Args:
            bounds: First row of each shard, followed by the total number of rows.
        """
        names, sources = ("source_id", "dataset", "captions_sha256"), self.probes.select(["fingerprint"])
        first = 0
        while first < len(bounds) - 1:
            # Process many shards at a time, because an Arrow call takes as long as processing hundreds of values.
            last = int(np.searchsorted(bounds, bounds[first] + _ROWS_AT_ONCE, side="right")) - 1
            last = max(last, first + 1)
            part = slice(bounds[first], bounds[last])
            video_rows = self.video_rows[part]
            rows, videos = pa.array(video_rows), self._videos.take(video_rows, *names)
            source_ids, datasets, captions = (as_array(column) for column in videos.columns)
            texts = [self._videos.ids.take(rows), source_ids, datasets, self._videos.splits.take(rows), captions]
            texts += [as_array(sources.take(rows)["fingerprint"])]
            line_ends = pc.binary_join_element_wise(self.cutting.identities(video_rows), "", "\n")
            texts += [pa.array(self._span_index[part]).cast(pa.string()), line_ends]
            lines = pc.binary_join_element_wise(*texts, "\0", null_handling="replace", null_replacement="None")
            _, offsets, content = lines.buffers()
            ends = np.frombuffer(offsets, np.int32)[bounds[first : last + 1] - bounds[first]].tolist()
            view = memoryview(content)
            yield from (view[begin:end] for begin, end in pairwise(ends))
            first = last


def span_fingerprint(recipe_fingerprint: str, source_fingerprint: str, span: Span) -> str:
    """Return the SHA-256 (hex) of everything that determines the bytes of a span's chunks."""
    frames = ",".join(map(str, span.chunk_frames))
    gaps = f" {','.join(map(str, span.gaps))}" if span.gaps else ""
    text = f"{recipe_fingerprint} {source_fingerprint} {span.first_frame} {frames}{gaps}"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ShardChange:
    """Difference between a planned shard and its stored version.

    Attributes:
        rows: Rows of the plan whose spans are encoded; all other spans are copied.
        num_copied: Number of chunks that are copied; None if it is unknown how much of a damaged shard is intact.
        copied_bytes: Estimated size of the copied chunks in the tar and the index.
        reason: Reason why the shard is written.
        other_tars: Tars of other shards, or of earlier commits, from which chunks are copied.
    """

    rows: tuple[int, ...]
    num_copied: int | None
    copied_bytes: float
    reason: str
    other_tars: tuple[StoredTar, ...] = ()


@dataclass(frozen=True)
class StoredSpans:
    """Spans in a tar, read from its index.

    Attributes:
        spans: Video ID and fingerprint of each span.
        has_captions: True if the samples have captions.
        chunk_bytes: Mean size of a chunk in bytes, including its part of the tar and index overhead.
    """

    spans: frozenset[tuple[str, str]] = frozenset()
    has_captions: bool = False
    chunk_bytes: float = 0.0


def find_changes(plan: Plan, commits: Mapping[int, Commit], variant_dir: Path) -> dict[int, ShardChange]:
    """Compare the shards of a plan with the stored shards, and return the differences by shard ID.

    This function also sets `num_copied` in `plan.shards`. The result omits shards without a stored chunk, and changed
    shards whose index cannot be read.
    """
    if not any(shard.has_work for shard in plan.shards):
        return {}
    shard_ids = [shard.shard_id for shard in plan.shards if shard.state in (*_COMPARED_STATES, ShardState.ORPHANED)]
    stored = stored_spans(variant_dir, commits, shard_ids=shard_ids)
    spans_of_shard = {tar.commit.shard_id: spans for tar, spans in stored.items() if tar.commit is not None}
    # If several tars contain a span, the last one is used. The order is reversed, so that tars with a commit come last.
    tars = {
        fingerprint: (tar, spans.chunk_bytes)
        for tar, spans in reversed(stored.items())
        for _, fingerprint in spans.spans
    }
    moved_shards = plan.shards_of_moved_videos(commits)
    changes: dict[int, ShardChange] = {}
    for shard in plan.shards:
        commit = commits.get(shard.shard_id)
        if shard.state in _COMPARED_STATES and commit is not None:
            if commit.files is None or shard.shard_id in spans_of_shard:
                spans, is_moved = spans_of_shard.get(shard.shard_id, StoredSpans()), shard.shard_id in moved_shards
                changes[shard.shard_id] = _compare_shard(plan, shard, commit, spans, tars, has_moved_videos=is_moved)
        elif shard.has_work and tars and (change := _compare_new_shard(plan, shard, tars)) is not None:
            changes[shard.shard_id] = change
    plan.shards = [
        replace(shard, num_copied=changes[shard.shard_id].num_copied) if shard.shard_id in changes else shard
        for shard in plan.shards
    ]
    return changes


def _compare_shard(
    plan: Plan,
    shard: ShardPlan,
    commit: Commit,
    stored: StoredSpans,
    tars: _Tars,
    *,
    has_moved_videos: bool,
) -> ShardChange:
    """Compare a shard with its commit and the spans in its tar.

    Args:
        stored: Spans in the tar of the shard.
        tars: All tars from which spans can be copied, by span fingerprint.
        has_moved_videos: True if the split of a video in the shard has changed.
    """
    # A span can be copied if any tar contains its fingerprint, even if its video had a different name.
    keys = plan.span_keys(shard.rows)
    stored_fingerprints = {fingerprint for _, fingerprint in stored.spans}
    missing_keys = {key for key in keys if key[1] not in stored_fingerprints}
    rows = tuple(row for row, key in zip(shard.rows, keys, strict=True) if key in missing_keys and key[1] not in tars)
    planned_videos = {video_id for video_id, _ in keys}
    failed_videos = {failure.video_id for failure in commit.failures}
    known_videos = {video_id for video_id, _ in stored.spans} | failed_videos
    # The reasons in the report count videos, because users know videos, not spans.
    new_videos, removed_videos = planned_videos - known_videos, known_videos - planned_videos
    encoded_videos = {video_id for video_id, fingerprint in missing_keys if fingerprint not in tars}
    changed_videos = {video_id for video_id, _ in missing_keys} & known_videos - failed_videos
    removal = "removed or moved to another split" if has_moved_videos else "removed"
    reasons = [
        *([count_noun(len(new_videos & encoded_videos), "new video")] if new_videos & encoded_videos else []),
        *([_RETURNED_VIDEOS] if new_videos - encoded_videos else []),
        *([f"{count_noun(len(changed_videos), 'video')} changed"] if changed_videos else []),
        *([f"{count_noun(len(removed_videos), 'video')} {removal}"] if removed_videos else []),
    ]
    if shard.state == ShardState.RETRY:
        reasons = [shard.reason]
    elif not reasons:
        has_captions = plan.has_captions or stored.has_captions
        reasons = ["captions changed" if has_captions else "names of videos or datasets changed"]
    copied_from = [tars[key[1]] for key in keys if key in missing_keys and key[1] in tars]
    other_tars = tuple(dict.fromkeys(tar for tar, _ in copied_from))
    chunk_bytes = [stored.chunk_bytes for key in keys if key not in missing_keys] + [size for _, size in copied_from]
    return ShardChange(rows, *_copied_size(plan, shard, rows, chunk_bytes), ", ".join(reasons), other_tars)


def _compare_new_shard(plan: Plan, shard: ShardPlan, tars: _Tars) -> ShardChange | None:
    """Return the change to a new, missing or damaged shard; None if no tar contains any of its chunks."""
    keys = plan.span_keys(shard.rows)
    copied_from = [tars[fingerprint] for _, fingerprint in keys if fingerprint in tars]
    other_tars = tuple(dict.fromkeys(tar for tar, _ in copied_from))
    if not other_tars:
        return None
    rows = tuple(row for row, key in zip(shard.rows, keys, strict=True) if key[1] not in tars)
    if shard.state != ShardState.NEW:
        return ShardChange(rows, None, 0.0, "", other_tars)
    encoded_videos = {video_id for video_id, fingerprint in keys if fingerprint not in tars}
    reason = f"new videos, and {_RETURNED_VIDEOS}" if encoded_videos else _RETURNED_VIDEOS
    return ShardChange(rows, *_copied_size(plan, shard, rows, [size for _, size in copied_from]), reason, other_tars)


def _copied_size(plan: Plan, shard: ShardPlan, rows: Sequence[int], chunk_bytes: Sequence[float]) -> tuple[int, float]:
    """Return the number of chunks that are copied into a shard, and their size in bytes.

    Args:
        rows: Rows of the plan whose spans are encoded.
        chunk_bytes: Mean chunk size, in bytes, in the tar of each copied span.
    """
    num_copied = shard.num_chunks - sum(len(span.span.chunk_frames) for span in plan.spans(rows))
    return num_copied, num_copied * sum(chunk_bytes) / max(1, len(chunk_bytes))


def stored_spans(
    variant_dir: Path, commits: Mapping[int, Commit], *, shard_ids: Collection[int]
) -> dict[StoredTar, StoredSpans]:
    """Return the spans in the tars of the given shards and in uncommitted tars; omit tars with an unreadable index.

    In a bucket, uncommitted tars are not used, because a search for them costs requests and time. For indexed
    variants, they are never used, because only a commit proves that the packet positions are correct.

    Args:
        commits: Commits of the variant, by shard ID.
        shard_ids: IDs of the shards whose tars are opened.
    """
    selection = [commits[shard_id] for shard_id in shard_ids if shard_id in commits]
    tars = [StoredTar(commit.files.tar, commit) for commit in selection if commit.files is not None]
    if mirror_of(variant_dir) is None and variant_dir.is_dir() and not is_indexed(variant_dir.name):
        uncommitted_paths = uncommitted_tars(variant_dir, commits.values())
        tars += [StoredTar(tar.relative_to(variant_dir).as_posix(), None) for tar in uncommitted_paths]
    if not tars:
        return {}
    title = f"comparing {count_noun(len(tars), 'stored shard')}"
    spans_of_tar: dict[StoredTar, StoredSpans] = {}
    with Activity(title) as activity, ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        show = activity.counter(title)
        for num_compared, (tar, spans) in enumerate(
            zip(tars, pool.map(lambda tar: _read_spans(variant_dir, tar), tars), strict=True), 1
        ):
            show(num_compared, len(tars))
            if spans is not None:
                spans_of_tar[tar] = spans
    return spans_of_tar


def _read_spans(variant_dir: Path, stored: StoredTar) -> StoredSpans | None:
    """Return the spans in a tar; None if its index cannot be read."""
    tar = variant_dir / stored.tar
    try:
        index = open_index(index_path(tar), columns=_COLUMNS)
        if stored.commit is not None and stored.commit.files is not None:
            size_bytes = stored.commit.files.size_bytes
        else:
            size_bytes = tar.stat().st_size + index_path(tar).stat().st_size
    except (Damaged, OSError):
        return None
    spans = frozenset(zip(*(index[name].to_pylist() for name in _COLUMNS), strict=True))
    return StoredSpans(spans, "txt" in extensions_of(index), size_bytes / index.num_rows)
