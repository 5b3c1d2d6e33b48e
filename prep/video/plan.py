"""The plan of `video`: for each shard, what has to be done and why. A function of manifest, probes, layout, recipe and
commits.

Planning touches nothing but the files that it is about: tables are columns, and a span costs one hash update, so that a
million chunks take seconds.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prep.core.plan import Problems, ShardPlan, WantedShard, plan_shards
from prep.core.table_file import as_array
from prep.sources.probe import SourceFacts
from prep.video.layout import extend_layout, wanted_rows
from prep.video.recipe import SPAN_CHUNKS, ResolvedRecipe
from prep.video.spans import Span, chunks_of, num_chunks_of, num_output_frames, span_of
from shards.commits import Commit, Failure


@dataclass(frozen=True)
class SpanPlan:
    """One span of the plan: whose it is, what it holds, and the fingerprint of its encoder pass."""

    video_id: str
    source_id: str
    dataset: str
    path: str
    source: SourceFacts
    span: Span
    fingerprint: str


@dataclass(frozen=True)
class Workload:
    """Spans to be encoded, as arrays of one length: seconds of video, and the sources' pixels and frames per second."""

    seconds: np.ndarray
    width: np.ndarray
    height: np.ndarray
    fps: np.ndarray


class Plan:
    """All shards that the manifest wants under one recipe.

    Attributes:
        layout: with every span assigned; to be written before the work begins.
        shards: in shard order.
        unusable: code -> number of videos that cannot be used, from their probes. A video whose source was read once
            and cannot be now is not among them: what was made of it stays, and what is not made yet will fail by name.
    """

    def __init__(
        self,
        *,
        recipe: ResolvedRecipe,
        videos: pa.Table,
        probes: pa.Table,
        layout: pa.Table,
        commits: Mapping[int, Commit],
        problems: Problems,
        retry_codes: frozenset[str] = frozenset(),
    ) -> None:
        """Plans.

        Args:
            videos: the manifest's table (manifests.schema.VIDEOS).
            probes: one row a video, same order (prep.sources.table.PROBES).
            layout: as stored (prep.core.layout.LAYOUT).
            commits: of the variant, by shard id.
            problems: from a look at the committed files.
            retry_codes: failures with these codes are tried again even if nothing changed.
        """
        self.recipe = recipe
        self._videos, self._probes = videos, probes
        settings = recipe.settings
        self._is_unusable = np.asarray(pc.is_null(probes["fingerprint"]))
        ends_s = np.asarray(pc.fill_null(probes["end_s"], 0.0))
        self._num_frames = np.where(self._is_unusable, 0, num_output_frames(ends_s, fps=settings.fps_exact))
        self._num_chunks = num_chunks_of(self._num_frames, chunk_frames=settings.chunk_frames, tail=settings.tail)
        ids, splits = as_array(videos["video_id"]), as_array(videos["split"])
        self.layout = extend_layout(layout, video_ids=ids, splits=splits, num_chunks=self._num_chunks)
        rows, self._video_rows = wanted_rows(self.layout, video_ids=ids, splits=splits, num_chunks=self._num_chunks)
        self._span_index = np.asarray(self.layout["span_index"])[rows]
        self.unusable = Counter(probes["code"].filter(pa.array(self._is_unusable)).to_pylist())
        self.has_captions = bool(len(videos)) and pc.sum(videos["num_captions"]).as_py() > 0
        self.shards = list(self._plan_shards(rows, commits, problems, retry_codes))

    @property
    def num_chunks(self) -> int:
        """Chunks that the manifest wants."""
        return int(self._num_chunks.sum())

    @property
    def num_videos(self) -> int:
        """Videos in the manifest."""
        return len(self._videos)

    def has_video(self, video_id: str) -> bool:
        """Whether the manifest has this video."""
        return bool(pc.any(pc.equal(self._videos["video_id"], video_id)).as_py())

    def spans(self, rows: Sequence[int]) -> Iterator[SpanPlan]:
        """The spans in the given rows of the plan."""
        settings = self.recipe.settings
        for row in rows:
            video_row = int(self._video_rows[row])
            video, probe = self._row(self._videos, video_row), self._row(self._probes, video_row)
            source = SourceFacts(**{name: probe[name] for name in SourceFacts.__dataclass_fields__})
            chunks = chunks_of(int(self._num_frames[video_row]), chunk_frames=settings.chunk_frames, tail=settings.tail)
            span = span_of(chunks, index=int(self._span_index[row]), span_chunks=SPAN_CHUNKS)
            yield SpanPlan(
                video_id=video["video_id"],
                source_id=video["source_id"],
                dataset=video["dataset"],
                path=video["path"],
                source=source,
                span=span,
                fingerprint=span_fingerprint(self.recipe.fingerprint, source.fingerprint, span),
            )

    def failed_sources(self) -> Iterator[Failure]:
        """The videos that cannot be used."""
        for row in np.flatnonzero(self._is_unusable).tolist():
            probe = self._row(self._probes, row)
            message = f"{probe['path']}: {probe['message']}"
            yield Failure(self._videos["video_id"][row].as_py(), None, str(probe["code"]), message)

    def workload(self, rows: np.ndarray) -> Workload:
        """What encoding the spans in the given rows amounts to."""
        videos = self._video_rows[rows]
        first_frame = self._span_index[rows] * SPAN_CHUNKS * self.recipe.settings.chunk_frames
        frames = np.minimum(self._num_frames[videos] - first_frame, SPAN_CHUNKS * self.recipe.settings.chunk_frames)
        columns = (np.asarray(self._probes[name])[videos] for name in ("width", "height", "fps"))
        return Workload(frames / float(self.recipe.settings.fps_exact), *columns)

    @staticmethod
    def _row(table: pa.Table, row: int) -> dict[str, Any]:
        return {name: table[name][row].as_py() for name in table.column_names}

    def _plan_shards(
        self,
        layout_rows: np.ndarray,
        commits: Mapping[int, Commit],
        problems: Problems,
        retry_codes: frozenset[str],
    ) -> Iterator[ShardPlan]:
        shard_ids = np.asarray(self.layout["shard_id"])[layout_rows]
        # The layout grows in shard order, so the rows of a shard lie together.
        bounds = np.flatnonzero(np.diff(shard_ids, prepend=-1, append=-1)) if len(shard_ids) else np.zeros(1, int)
        describe = self._description()
        unreadable = frozenset(self._videos["video_id"].filter(pc.is_valid(self._probes["code"])).to_pylist())
        splits = as_array(self.layout["split"])

        def wanted() -> Iterator[WantedShard]:
            for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                rows = range(begin, end)
                digest = hashlib.sha256(f"{self.recipe.fingerprint} {self.has_captions}".encode())
                digest.update(describe(rows))
                yield WantedShard(
                    shard_id=int(shard_ids[begin]),
                    split=splits[int(layout_rows[begin])].as_py(),
                    fingerprint=digest.hexdigest(),
                    num_chunks=int(self._span_chunk_counts(rows).sum()),
                    rows=rows,
                )

        return plan_shards(
            wanted(),
            commits,
            problems=problems,
            what_changed="its videos, their files or their captions",
            orphaned_because="none of its videos is in the manifest any more",
            retry_codes=retry_codes,
            unreadable=unreadable,
            held=self._held_shards(),
        )

    def _held_shards(self) -> frozenset[int]:
        """Shards with a video that is wanted and whose length is not known: its source cannot be read, and the probe
        that knew it is lost. What was made of it stays."""
        if not self._is_unusable.any():
            return frozenset()
        ids, splits = as_array(self._videos["video_id"]), as_array(self._videos["split"])
        unknown = np.where(self._is_unusable, np.iinfo(np.int64).max, 0)
        rows, _ = wanted_rows(self.layout, video_ids=ids, splits=splits, num_chunks=unknown)
        return frozenset(np.asarray(self.layout["shard_id"])[rows].tolist())

    def _span_chunk_counts(self, rows: range) -> np.ndarray:
        part = slice(rows.start, rows.stop)
        left = self._num_chunks[self._video_rows[part]] - self._span_index[part] * SPAN_CHUNKS
        return np.minimum(left, SPAN_CHUNKS)

    def _description(self) -> Callable[[range], bytes]:
        """A function from rows to the bytes that stand for their spans in the shard's fingerprint."""
        columns = [as_array(self._videos[name]) for name in ("video_id", "source_id", "dataset", "split")]
        columns += [as_array(self._videos["captions_sha256"]), as_array(self._probes["fingerprint"])]

        def describe(rows: range) -> bytes:
            part = slice(rows.start, rows.stop)
            video_rows = self._video_rows[part]
            # A shard at a time: value by value, a million chunks would take seconds more.
            texts = [column.take(pa.array(video_rows)).to_pylist() for column in columns]
            numbers = self._span_index[part].tolist(), self._num_frames[video_rows].tolist()
            lines = ("\0".join(map(str, line)) for line in zip(*texts, *numbers, strict=True))
            return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")

        return describe


def span_fingerprint(recipe_fingerprint: str, source_fingerprint: str, span: Span) -> str:
    """SHA-256 (hex) of everything that the bytes of a span's chunks depend on."""
    frames = ",".join(map(str, span.chunk_frames))
    text = f"{recipe_fingerprint} {source_fingerprint} {span.first_frame} {frames}"
    return hashlib.sha256(text.encode()).hexdigest()
