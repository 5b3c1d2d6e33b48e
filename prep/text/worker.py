"""Making one shard of the `text` column from the manifest's captions and the bank."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.manifests.quoting import counted
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.shard_result import ShardResult, begin_shard, stopped, system_errors_as_results
from clipmill.prep.text.bank import Bank
from clipmill.prep.text.captions import CaptionReader
from clipmill.prep.text.digests import digests_of
from clipmill.prep.text.plan import TextPlan
from clipmill.prep.text.recipe import MEMBER, TEXT
from clipmill.prep.text.tokens import texts_with_all
from clipmill.shards.commits import Failure
from clipmill.shards.format import TEXT_FIELDS
from clipmill.shards.npy import npy_bytes
from clipmill.shards.writer import Sample

EXTENSIONS = (MEMBER, "json")
_MAX_TEXTS, _MAX_SEQUENCES = 1 << 16, 64  # read at a time: embeddings of a kilobyte, sequences of megabytes


@dataclass(frozen=True)
class TextShardTask:
    """The videos of one shard."""

    variant_dir: Path
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
        with begin_shard(
            task,
            column=TEXT,
            split=task.split,
            extensions=EXTENSIONS,
            fields=TEXT_FIELDS,
            num_planned=len(videos),
        ) as shard:
            for video, embedded, lengths in self._encoded(videos):
                if not len(video.digests) and self.plan.where is not None:
                    continue  # none of its captions is selected
                if not len(video.digests):
                    message = f"the caption table has no captions of video {video.video_id}"
                    return stopped(task, FailureCode.IO_ERROR, message)
                is_sound = (lengths > 0) & texts_with_all(np.isfinite(embedded).all(axis=1), lengths)
                if not is_sound.all():
                    lost = [video.digest(row) for row in np.flatnonzero(lengths == 0).tolist()]
                    if not self.not_finite.issuperset(lost):
                        lost_error = (FailureCode.IO_ERROR, "embeddings are missing from the bank")
                        return stopped(task, *(self.error or lost_error))
                    unsound = np.flatnonzero(~is_sound)
                    text = video.texts[int(unsound[0])]
                    message = f"non-finite embeddings of {counted(len(unsound), 'text')}, for example {text[:80]!r}"
                    failure = Failure(video.video_id, None, str(FailureCode.NOT_FINITE), message)
                    shard.fail(failure, content=f" {video.video_id} failed")
                    continue
                is_sequence = self.plan.recipe.max_tokens is not None
                row_tokens = lengths.tolist() if is_sequence else []
                shard.add(video.sample(embedded, split=task.split, row_tokens=row_tokens))
            return shard.commit()

    def _encoded(self, videos: list["_VideoTexts"]) -> Iterator[tuple["_VideoTexts", np.ndarray, np.ndarray]]:
        """Yield each video with the rows of its texts and their lengths, read for many videos at a time."""
        for group in _groups(videos, max_texts=_MAX_TEXTS if self.plan.recipe.max_tokens is None else _MAX_SEQUENCES):
            embedded, lengths = self.bank.rows(np.concatenate([video.digests for video in group]))
            text_ends = np.cumsum([len(video.digests) for video in group])
            row_ends = np.concatenate([[0], np.cumsum(lengths)])
            for video, end in zip(group, text_ends.tolist(), strict=True):
                begin = end - len(video.digests)
                yield video, embedded[row_ends[begin] : row_ends[end]], lengths[begin:end]

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

    def sample(self, embedded: np.ndarray, *, split: str, row_tokens: list[int]) -> Sample:
        """Return the sample for the tar; `embedded` is float16 [texts or tokens, width]."""
        description = {
            "video_id": self.video_id,
            "split": split,
            "texts": self.texts,
            "caption_id": self.caption_ids,
            "caption_row": self.caption_rows,
            **({"row_tokens": row_tokens} if row_tokens else {}),
        }
        return Sample(
            key=self.video_id,
            members={MEMBER: npy_bytes(embedded), "json": json.dumps(description, ensure_ascii=False).encode()},
            fields={
                "video_id": self.video_id,
                "num_rows": len(self.texts),
                "width": embedded.shape[1],
                "row_tokens": row_tokens,
                "text_digest": [self.digest(row) for row in range(len(self.texts))],
                "caption_id": self.caption_ids,
                "caption_row": self.caption_rows,
            },
        )


def _groups(videos: list[_VideoTexts], *, max_texts: int) -> Iterator[list[_VideoTexts]]:
    """Yield the videos in order, as many at a time as have `max_texts` texts, and one at least."""
    group: list[_VideoTexts] = []
    num_texts = 0
    for video in videos:
        if group and num_texts + len(video.texts) > max_texts:
            yield group
            group, num_texts = [], 0
        group.append(video)
        num_texts += len(video.texts)
    if group:
        yield group
