"""Making one shard of the `text` column from the manifest's captions and the bank."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from clipmill.manifests.quoting import counted
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.heartbeat import Heartbeat
from clipmill.prep.core.shard_result import ShardResult, stopped, system_errors_as_results
from clipmill.prep.text.bank import Bank
from clipmill.prep.text.captions import CaptionReader
from clipmill.prep.text.digests import digests_of
from clipmill.prep.text.plan import TextPlan
from clipmill.prep.text.recipe import MEMBER, TEXT
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.format import TEXT_FIELDS
from clipmill.shards.npy import npy_bytes
from clipmill.shards.writer import Sample, ShardWriter

EXTENSIONS = (MEMBER, "json")


@dataclass(frozen=True)
class TextShardTask:
    """The videos of one shard."""

    shard_id: int
    split: str
    plan_fingerprint: str
    video_ids: pa.Array


@dataclass(frozen=True)
class ShardMaker:
    """Makes shards in the driver, since the only remaining work is copying.

    Attributes:
        row_groups: for each shard, the row groups of the table of captions that contain captions of it.
        not_finite: digests of texts that the tower cannot encode.
        error: why the bank lacks texts, or None.
    """

    plan: TextPlan
    reader: CaptionReader
    bank: Bank
    row_groups: Mapping[int, Sequence[int]]
    not_finite: frozenset[bytes]
    error: tuple[FailureCode, str] | None

    def make(self, task: TextShardTask) -> ShardResult:
        """Make, publish and commit one shard. Idempotent: a second run writes the same bytes."""
        return system_errors_as_results(self._make, task)

    def _make(self, task: TextShardTask) -> ShardResult:
        videos = self._videos(task)
        embedded, has = self.bank.rows(np.concatenate([video.digests for video in videos]))
        is_sound = has & np.isfinite(embedded).all(axis=1)
        ends = np.cumsum([len(video.digests) for video in videos])
        content = hashlib.sha256(task.plan_fingerprint.encode())
        failures: list[Failure] = []
        files = None
        folder = self.plan.variant_dir
        writer = ShardWriter(folder, shard_id=task.shard_id, extensions=EXTENSIONS, fields=TEXT_FIELDS)
        with Heartbeat(folder, task.shard_id, num_chunks=len(videos)) as beat, writer:
            for video, end in zip(videos, ends.tolist(), strict=True):
                rows = slice(end - len(video.digests), end)
                if not len(video.digests) and self.plan.where is not None:
                    continue  # none of its captions is selected
                if not len(video.digests):
                    message = f"the caption table has no captions of video {video.video_id}"
                    return stopped(task, FailureCode.IO_ERROR, message)
                if not is_sound[rows].all():
                    lost = [video.digest(row) for row in np.flatnonzero(~has[rows]).tolist()]
                    if not self.not_finite.issuperset(lost):
                        lost_error = (FailureCode.IO_ERROR, "embeddings are missing from the bank")
                        return stopped(task, *(self.error or lost_error))
                    unsound = np.flatnonzero(~is_sound[rows])
                    text = video.texts[int(unsound[0])]
                    message = f"non-finite embeddings of {counted(len(unsound), 'text')}, for example {text[:80]!r}"
                    failures.append(Failure(video.video_id, None, str(FailureCode.NOT_FINITE), message))
                    content.update(f" {video.video_id} failed".encode())
                    continue
                writer.add(video.sample(embedded[rows], split=task.split))
                beat.show(writer.num_samples)
            num_samples = writer.num_samples
            if num_samples:
                files = writer.publish(content.hexdigest())
        commit = Commit(TEXT, task.shard_id, task.split, task.plan_fingerprint, files, tuple(failures))
        write_commit(folder, commit)
        return ShardResult(
            task.shard_id,
            num_chunks=num_samples,
            num_bytes=files.tar_bytes if files else 0,
            failures=commit.failures,
        )

    def _videos(self, task: TextShardTask) -> "list[_VideoTexts]":
        pieces = list(self.reader.pieces(task.video_ids, row_groups=self.row_groups.get(task.shard_id, ())))
        if not pieces:
            return [_VideoTexts.of(video_id, np.empty(0, np.int64), []) for video_id in task.video_ids.to_pylist()]
        videos = np.concatenate([piece.videos for piece in pieces])
        ids = np.concatenate([piece.ids for piece in pieces])
        order = np.lexsort((ids, videos))
        ids = ids[order]
        texts = pa.concat_arrays([piece.texts for piece in pieces]).take(pa.array(order))
        bounds = np.searchsorted(videos[order], np.arange(len(task.video_ids) + 1)).tolist()
        return [
            _VideoTexts.of(video_id.as_py(), ids[begin:end], texts[begin:end].to_pylist())
            for video_id, begin, end in zip(task.video_ids, bounds[:-1], bounds[1:], strict=True)
        ]


@dataclass(frozen=True)
class _VideoTexts:
    """The distinct texts of a video in the order of their first captions, and the row of each caption's text by id."""

    video_id: str
    texts: list[str]
    digests: np.ndarray
    caption_ids: list[int]
    caption_rows: list[int]

    @classmethod
    def of(cls, video_id: str, ids: np.ndarray, texts: list[str]) -> "_VideoTexts":
        row_of: dict[str, int] = {}
        rows = [row_of.setdefault(text, len(row_of)) for text in texts]
        return cls(video_id, list(row_of), digests_of(row_of), ids.tolist(), rows)

    def digest(self, row: int) -> bytes:
        """Return the digest of the text in a row."""
        return self.digests[row : row + 1].tobytes()

    def sample(self, embedded: np.ndarray, *, split: str) -> Sample:
        """Return the sample for the tar; `embedded` is float16 [texts, width]."""
        description = {
            "video_id": self.video_id,
            "split": split,
            "texts": self.texts,
            "caption_id": self.caption_ids,
            "caption_row": self.caption_rows,
        }
        return Sample(
            key=self.video_id,
            members={MEMBER: npy_bytes(embedded), "json": json.dumps(description, ensure_ascii=False).encode()},
            fields={
                "video_id": self.video_id,
                "num_rows": len(self.texts),
                "width": embedded.shape[1],
                "text_digest": [self.digest(row) for row in range(len(self.texts))],
                "caption_id": self.caption_ids,
                "caption_row": self.caption_rows,
            },
        )
