"""Sample set of captioned clips: captions from the manifest, frames from the `video` column."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_reader import open_stored_captions
from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.quoting import counted
from clipmill.manifests.store import num_captions_of, read_captions, read_videos
from clipmill.train.config.data import CaptionSettings
from clipmill.train.data.batch import Sample
from clipmill.train.data.caption_choice import CaptionChoice, Sources, all_the_same, describe_cut
from clipmill.train.data.clip_captions import ClipCaptions
from clipmill.train.data.clip_query import ClipQuery, query_clips
from clipmill.train.data.clip_samples import ClipSamples
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.node_cache import shared
from clipmill.train.data.opened_captions import OpenedCaptions, open_clip_captions
from clipmill.train.data.order import set_fingerprint
from clipmill.train.data.query import DataQuery
from clipmill.train.data.usable_captions import Spans
from clipmill.train.models.text import Tokenize

if TYPE_CHECKING:
    from clipmill.train.data.relevancy import RelevantCaptions
    from clipmill.train.data.stored_text import StoredText

ALL_CAPTIONS = CaptionSettings()
_BLOCK = 1 << 16


class VideoCaptions(ClipSamples):
    """Sample i is clip i of a split: a span of a video with all its captions. Thread-safe.

    Training shows one of the captions at a time (clipmill.train.data.caption_choice), an evaluation the first one of
    the first source. Batches have `tokens`, `text` with stored embeddings, or else `caption`.

    Args:
        query: its conditions on captions are those that a clip may be shown with.
        tokenize: makes captions tokens.
        captions: which of a clip's captions are shown.
        has_stored_text: use the embeddings that prep text made as captions; captions without one are excluded.
        each_caption: make a clip of each caption rather than of each span, for evaluations that score every caption.
        table: captions in place of the manifest's, with its columns.

    Attributes:
        captions: of each clip; a caption is referred to by its entry in them.

    Raises:
        UserError: there is no such data, or no clip that can be shown.
    """

    def __init__(
        self,
        query: ClipQuery,
        *,
        tokenize: Tokenize | None,
        captions: CaptionSettings = ALL_CAPTIONS,
        has_stored_text: bool = False,
        each_caption: bool = False,
        table: pa.Table | None = None,
    ) -> None:
        self._tokenize, self._settings = tokenize, captions
        data_dir, chunks = query.data_dir, query.open_chunks(has_captions=True)
        self.stored_text: StoredText | None = None
        if has_stored_text:
            from clipmill.train.data import stored_text

            self.stored_text = stored_text.StoredText(data_dir, chunks.video_ids, videos=chunks.videos, tars=query.tars)
        spans = (
            open_stored_captions(data_dir)
            if table is None
            else CaptionSpans.of_table(table, read_videos(data_dir, columns=["video_id"])["video_id"].combine_chunks())
        )

        def compute() -> OpenedCaptions:
            spans.verify()
            return open_clip_captions(
                spans,
                chunks,
                data_dir=data_dir,
                split=query.split,
                wanted_sources=captions.sources,
                stored_text=self.stored_text,
                each_caption=each_caption,
                table=table,
            )

        self._depends_on: tuple[object, ...] | None = None
        self._num_rows = chunks.num_rows + num_captions_of(data_dir)
        if table is not None:
            opened = compute()
        else:
            own_text = () if self.stored_text is None else self.stored_text.depends_on
            self._depends_on = (chunks.depends_on, chunks.selection.depends_on, own_text, captions, each_caption)
            opened = shared(
                compute,
                of=("captions", *self._depends_on, spans.mark),
                num_rows=self._num_rows,
                types=(OpenedCaptions, ClipCaptions, CaptionChoice, Spans, Sources),
                column="captions",
            )
        self._opened = opened
        self._texts: pa.ChunkedArray = spans.texts  # of files that are verified by now
        self.captions: ClipCaptions = opened.captions
        self.num_captions = opened.num_captions
        chunks.selection.restore(opened.num_seen, opened.num_selected)
        super().__init__(chunks, self.captions.spans, query.shape, split=query.split, loading=query.loading)
        self._labels_sha256 = ""
        self._relevant: RelevantCaptions | None = None
        if captions.min_relevancy is not None:
            labelled = read_captions(data_dir) if table is None else table
            self._relevant = self._relevant_captions(labelled, min_relevancy=captions.min_relevancy)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids)."""
        return self._opened.num_caption_ids

    @property
    def mixing_facts(self) -> dict[str, str]:
        """The encoder of stored embeddings."""
        return {} if self.stored_text is None else {"text embeddings": self.stored_text.encoder}

    @property
    def text_width(self) -> int | None:
        """Width of the stored embeddings; None if captions are tokens."""
        return None if self.stored_text is None else self.stored_text.width

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        video = self.chunks.variant_name
        return video if self.stored_text is None else f"{video} and {self.stored_text.variant_name}"

    def describe(self) -> str:
        """One line for the log: captions used and excluded, by reason, and deviations from the settings."""
        opened, num_used = self._opened, len(self.captions.rows)
        parts = [f"{num_used:,} of {counted(self.num_captions, 'caption')} of split {self.split!r}"]
        if num_used != len(self):
            parts[0] += f", one at a time for each of {len(self):,} clips"
        if len(opened.sources.names) > 1 or self._settings.sources is not None:
            parts.append(opened.sources.describe(self.captions.rank_counts))
        parts += filter(None, [opened.sources.describe_excluded(opened.num_other_sources)])
        if opened.num_not_embedded:
            parts.append(f"{opened.num_not_embedded:,} without embedding")
        cut = "" if self._tokenize is None else describe_cut(self._texts, self.captions.rows, self._tokenize)
        parts += filter(None, [cut])
        return "; ".join(parts + opened.remarks + self.chunks.selection.remarks() + self.deviations())

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        if self._depends_on is None:
            return set_fingerprint(self._order_sha256, self._content_sha256)
        return shared(
            lambda: set_fingerprint(self._order_sha256, self._content_sha256),
            of=("fingerprint", *self._depends_on, self._group),
            num_rows=self._num_rows,
            types=(),
            column="fingerprint",
        )

    @cached_property
    def _order_sha256(self) -> str:
        """Hash of the captions, their order, their spans and the variants."""
        opened = self._opened
        digest = hashlib.sha256(self.variant_name.encode())
        if self._group > 1:
            digest.update(f"groups of {self._group}".encode())
        sources = opened.sources
        digest.update(f"{sources.names} {sources.weights.tolist()} {self._settings.min_relevancy}".encode())
        digest.update(self.chunks.selection.text.encode())
        for array in (self.captions.caption_ids, self.spans.begin_us, self.spans.end_us):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @cached_property
    def _content_sha256(self) -> str:
        """Hash of the texts of the captions in use, and of how a clip's captions are divided into sources."""
        content = hashlib.sha256(self._opened.texts_sha256.encode())
        for array in (self.captions.choice.first_entry, self.captions.choice.first_run):
            content.update(b"" if array is None else np.ascontiguousarray(array).data)
        content.update(self._labels_sha256.encode())
        return content.hexdigest()

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        if self._opened.same_text is not None:
            raise all_the_same(self._opened.same_text, len(self.captions.rows), split=self.split)

    def all_texts(self) -> Iterator[str]:
        """The texts of all captions in use."""
        num_used = len(self.captions.rows)
        for begin in range(0, num_used, _BLOCK):
            yield from self.texts(np.arange(begin, min(begin + _BLOCK, num_used)))

    def texts(self, entries: NDArray[np.int64]) -> list[str]:
        """The texts of some captions."""
        # Arrow's own `take` concatenates all chunks first.
        return [str(self._texts[row].as_py()) for row in self.captions.rows[entries].tolist()]

    def text(self, sample: int) -> str:
        """The text of a clip's caption in an evaluation."""
        return self.text_at(self._first_entry(sample))

    def caption_id(self, entry: int) -> int:
        """Id of a caption in the manifest."""
        return int(self.captions.caption_ids[entry])

    def text_at(self, entry: int) -> str:
        """The text of a caption."""
        return str(self._texts[int(self.captions.rows[entry])].as_py())

    def complete(self, sample: Sample, request: SampleRequest) -> None:
        """Add a caption and its id."""
        entry, relevancy = self._draw_caption(request)
        caption_id = sample["caption_id"] = self.caption_id(entry)
        if self.stored_text is not None:
            sample["text"] = self.stored_text.embedding(caption_id, key=sample["key"])
        if self._tokenize is not None:
            sample["tokens"] = self._tokenize(self.text_at(entry))
        elif self.stored_text is None:
            sample["caption"] = self.text_at(entry)
        if self._relevant is not None:
            sample["relevancy"] = relevancy

    def _relevant_captions(self, table: pa.Table, *, min_relevancy: float) -> "RelevantCaptions":
        from clipmill.train.data.relevancy import LABELS, RelevantCaptions

        rows = self.captions.rows
        by_id = np.argsort(rows, kind="stable")
        self._entry_of_used = by_id
        used_of_entry = np.empty_like(by_id)
        used_of_entry[by_id] = np.arange(len(by_id))
        labels = [name for name in LABELS if name in table.column_names]
        used = table.select(["text", *labels]).take(pa.array(rows[by_id]))
        self._labels_sha256 = hashlib.sha256(repr(used.select(labels).to_pydict()).encode()).hexdigest()
        own = used_of_entry[self.captions.choice.first(np.arange(len(self)))]
        return RelevantCaptions(used, own, min_relevancy=min_relevancy)

    def _draw_caption(self, request: SampleRequest) -> tuple[int, float]:
        """Entry of the caption to show, and its relevancy."""
        if request.seed is None:
            return self._first_entry(request.sample), 1.0
        if self._relevant is not None:
            used, relevancy = self._relevant.draw(request.sample, position=request.position, seed=request.seed)
            return int(self._entry_of_used[used]), relevancy
        entry = self.captions.choice.draw_one(request.sample, position=request.position, seed=request.seed)
        return entry, 1.0

    def _first_entry(self, sample: int) -> int:
        return int(self.captions.choice.first(np.array([sample]))[0])


def open_captions(query: DataQuery) -> VideoCaptions:
    """Open the captioned clips that a task asks for; raises UserError like `VideoCaptions`."""
    return VideoCaptions(
        query_clips(query),
        tokenize=query.tokenize,
        captions=query.captions if query.table is None else ALL_CAPTIONS,
        table=query.table,
        has_stored_text=query.has_stored_text,
        each_caption=query.each_caption,
    )
