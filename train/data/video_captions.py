"""Sample set of captioned clips: captions from the manifest, frames from the `video` column."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.caption_digest import TextDigest
from manifests.errors import UserError
from manifests.store import read_captions
from train.config.data import CaptionSettings
from train.data.batch import Sample
from train.data.caption_choice import Sources, choose_sources, require_different, smallest
from train.data.chunks import ChunkSet, rows_of
from train.data.clip_samples import ClipSamples
from train.data.decoding.clip import ClipShape
from train.data.decoding.reading import DecodeRule
from train.data.loader import LoaderSettings, SampleRequest
from train.data.order import set_fingerprint
from train.data.relevancy import LABELS, RelevantCaptions
from train.data.remote import RemoteTars
from train.data.stored_text import StoredText
from train.data.usable_captions import ClipCaptions, group_captions, ungrouped_captions, usable_captions
from train.models.text import Tokenize

ALL_CAPTIONS = CaptionSettings()
_BLOCK = 1 << 16


class VideoCaptions(ClipSamples):
    """Sample i is clip i of a split: a span of a video with all its captions. Thread-safe.

    Training shows one of the captions at a time (train.data.caption_choice), an evaluation the first one of the first
    source. Batches have `tokens`, `text` with stored embeddings, or else `caption`.

    Args:
        tokenize: makes captions tokens.
        captions: which of a clip's captions are shown.
        has_stored_text: use the embeddings that prep text made as captions; captions without one are excluded.
        each_caption: make a clip of each caption rather than of each span, for evaluations that score every caption.
        table: captions in place of the manifest's, with its columns.
        decode, tars, where: see `ChunkSet`; conditions on captions are those that a clip may be shown with.

    Attributes:
        captions: of each clip; a caption is referred to by its entry in `captions.choice`.

    Raises:
        UserError: there is no such data, or no clip that can be shown.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        shape: ClipShape,
        tokenize: Tokenize | None,
        loading: LoaderSettings,
        decode: DecodeRule = "packets",
        captions: CaptionSettings = ALL_CAPTIONS,
        has_stored_text: bool = False,
        each_caption: bool = False,
        table: pa.Table | None = None,
        tars: RemoteTars | None = None,
        where: str | None = None,
    ) -> None:
        self._tokenize, self._settings = tokenize, captions
        chunks = ChunkSet(data_dir, split=split, rule=decode, tars=tars, where=where, has_captions=True)
        self.stored_text = StoredText(data_dir, chunks.video_ids, tars=tars) if has_stored_text else None
        table = read_captions(data_dir) if table is None else table
        video_row = rows_of(table["video_id"], chunks.video_ids)
        of_split = np.flatnonzero(video_row >= 0)
        self.num_captions = len(of_split)
        if not self.num_captions:
            raise UserError(
                f"the manifest of {data_dir} has no captions of split {split!r}",
                hint="give prep manifest annotations that have some",
            )
        sources, rank = self._choose_sources(table["source"], of_split)
        caption_id = table["caption_id"].to_numpy()
        self._num_other_sources, self._num_not_embedded = int((rank < 0).sum()), 0
        if self.stored_text is not None:
            has_text = self.stored_text.has(caption_id[of_split], video_row=video_row[of_split])
            self._num_not_embedded = int((~has_text & (rank >= 0)).sum())
            rank = np.where(has_text, rank, np.int16(-1))
        self._sources: Sources = sources
        usable = usable_captions(
            video_row=video_row[of_split],
            begin_s=table["begin_s"].to_numpy()[of_split],
            end_s=table["end_s"].to_numpy()[of_split],
            chunks=chunks.table,
            **chunks.selection.of_captions(table, rows=of_split, video_row=video_row[of_split]),
        )
        group = ungrouped_captions if each_caption else group_captions
        self.captions: ClipCaptions = group(usable, rank=rank, sources=sources)
        self._rows = of_split[self.captions.caption].astype(np.int32)
        self._caption_ids: NDArray[Any] = smallest(caption_id[self._rows])
        # Only the counts are kept: with ten million captions the arrays would take as much memory as all others.
        self._remarks = usable.remarks()
        self._rank_counts = np.bincount(rank[self.captions.caption], minlength=len(sources.names))
        self._texts: pa.ChunkedArray = table["text"]
        super().__init__(chunks, self.captions.spans, shape, split=split, loading=loading)
        self._labels_sha256 = ""
        self._relevant: RelevantCaptions | None = None
        if captions.min_relevancy is not None:
            self._relevant = self._relevant_captions(table, min_relevancy=captions.min_relevancy)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids)."""
        return int(self._caption_ids.max()) + 1

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
        num_used = len(self._rows)
        parts = [f"{num_used:,} of {self.num_captions:,} captions of split {self.split!r}"]
        if num_used != len(self):
            parts[0] += f", one at a time for each of {len(self):,} clips"
        if len(self._sources.names) > 1 or self._settings.sources is not None:
            parts.append(self._sources.describe(self._rank_counts))
        if self._num_other_sources:
            parts.append(f"{self._num_other_sources:,} of other sources left out")
        if self._num_not_embedded:
            parts.append(f"{self._num_not_embedded:,} without embedding")
        return "; ".join(parts + self._remarks + self.chunks.selection.remarks() + self.deviations())

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, and of the texts of their captions."""
        return set_fingerprint(self._order_sha256, self._content_sha256)

    @cached_property
    def _order_sha256(self) -> str:
        """Of the captions, their order, their spans and the variants."""
        digest = hashlib.sha256(self.variant_name.encode())
        if self._group > 1:
            digest.update(f"groups of {self._group}".encode())
        digest.update(f"{self._sources.names} {self._sources.weights.tolist()} {self._settings.min_relevancy}".encode())
        digest.update(self.chunks.selection.text.encode())
        for array in (self._caption_ids, self.spans.begin_us, self.spans.end_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    @cached_property
    def _content_sha256(self) -> str:
        """Of the texts of the captions in use, and of how a clip's captions are divided into sources."""
        digest, begin = TextDigest(), 0
        used = np.unique(self._rows)
        for chunk in self._texts.chunks:
            first, last = np.searchsorted(used, (begin, begin + len(chunk)))
            digest.add(chunk.take(pa.array(used[first:last] - begin)))
            begin += len(chunk)
        content = hashlib.sha256(digest.hexdigest().encode())
        for array in (self.captions.choice.first_entry, self.captions.choice.first_run):
            content.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        content.update(self._labels_sha256.encode())
        return content.hexdigest()

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        require_different(self._texts, self._rows, split=self.split)

    def all_texts(self) -> Iterator[str]:
        """The texts of all captions in use."""
        for begin in range(0, len(self._rows), _BLOCK):
            yield from self.texts(np.arange(begin, min(begin + _BLOCK, len(self._rows))))

    def texts(self, entries: NDArray[np.int64]) -> list[str]:
        """The texts of some captions."""
        texts: list[str] = self._texts.take(pa.array(self._rows[entries])).to_pylist()
        return texts

    def text(self, sample: int) -> str:
        """The text of a clip's caption in an evaluation."""
        return self.text_at(self._first_entry(sample))

    def caption_id(self, entry: int) -> int:
        """Id of a caption in the manifest."""
        return int(self._caption_ids[entry])

    def text_at(self, entry: int) -> str:
        """The text of a caption."""
        return str(self._texts[int(self._rows[entry])].as_py())

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

    def _choose_sources(
        self, source: pa.ChunkedArray, of_split: NDArray[np.int64]
    ) -> tuple[Sources, NDArray[np.int16]]:
        """The sources, and the rank of each of the split's captions."""
        # The dictionary may have sources that do not occur; of those that do, some are of other splits alone.
        every = pc.unique(source).dictionary_decode() if pa.types.is_dictionary(source.type) else pc.unique(source)
        code = rows_of(source, every)[of_split]
        codes = np.unique(code)
        names = [every[int(one)].as_py() for one in codes]
        sources = choose_sources(names, wanted=self._settings.sources, elsewhere=every.to_pylist())
        return sources, sources.rank[np.searchsorted(codes, code)]

    def _relevant_captions(self, table: pa.Table, *, min_relevancy: float) -> RelevantCaptions:
        by_id = np.argsort(self._rows, kind="stable")
        self._entry_of_used = by_id
        used_of_entry = np.empty_like(by_id)
        used_of_entry[by_id] = np.arange(len(by_id))
        labels = [name for name in LABELS if name in table.column_names]
        used = table.select(["text", *labels]).take(pa.array(self._rows[by_id]))
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
