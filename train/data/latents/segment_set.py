"""The sample set of latents: the segments of a split, with the captions or labels they have."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.data_location import resolved_folder
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.manifests.store import num_captions_of
from clipmill.shards.columns import LATENTS, TEXT, VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.merged_table import merged_mark
from clipmill.shards.reader import Variant
from clipmill.train.data.chunks import manifest_mark
from clipmill.train.data.latents.captions import SegmentCaptions
from clipmill.train.data.latents.labels import SegmentLabels
from clipmill.train.data.latents.opened_segments import OPENED_TYPES, OpenedSegments, open_segment_set
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.latents.segments import (
    LatentRecords,
    Segments,
)
from clipmill.train.data.node_cache import shared
from clipmill.train.data.order import set_fingerprint
from clipmill.train.data.remote_maps import open_maps
from clipmill.train.data.selection import selection_mark
from clipmill.train.data.stored_text import TextMembers, encoder_of, require_embeddings

Columns = dict[str, NDArray[np.int64]]  # entries of batches, by name


@dataclass(frozen=True)
class SegmentRequests:
    """Samples to read; one entry of each array per request.

    Attributes:
        columns: what a batch has beside latents and embeddings, perhaps of further requests too.
        rows: of the requests in `columns`, ascending.
        chunk: index in the records.
        frame: the first frame, in its chunk.
        num_frames: number of frames; fewer than in a full segment for a tail.
        text_place: where the embedding or sequence of the caption begins; None without stored text. The lengths of
            sequences are the column `num_tokens`.
    """

    columns: Columns
    rows: Sequence[int]
    chunk: NDArray[np.int64]
    frame: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    text_place: NDArray[np.int64] | None

    def own(self, name: str, *, default: int) -> NDArray[np.int64]:
        """A column for the requests alone; `default` for each where there is none."""
        column = self.columns.get(name)
        return np.full(len(self.rows), default) if column is None else column[np.asarray(self.rows)]


class SegmentSet:
    """The samples of a split, ordered by (video, time).

    Memory: 40 bytes per chunk; with text also 8 per segment with captions, 12 per caption and 4 per (segment, caption)
    pair. A million chunks of three segments with four million captions take about 150 MB.

    Raises:
        UserError: there is nothing to show, the columns do not belong together, or a file is damaged.
    """

    def __init__(self, query: SegmentQuery) -> None:
        data_dir, split, captions = query.data_dir, query.split, query.captions
        classes, tars = query.classes, query.tars
        if not resolved_folder(data_dir).is_dir():
            raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made")
        self.split, self._data_dir = split, data_dir
        if tars is not None:
            for column in (LATENTS, TEXT) if captions == "stored" else (LATENTS,):
                tars.files.copy_column(column)
        self._latents = Variant.open(data_dir, column=LATENTS, tars=tars).whole()
        self._text_variant = Variant.open(data_dir, column=TEXT, tars=tars).whole() if captions == "stored" else None
        self._stale = self._other_video_variant(data_dir)
        variants = [variant for variant in (self._latents, self._text_variant) if variant is not None]
        self.tars = open_maps(variants, tars, whole=self._text_variant)
        marks = [merged_mark(variant.directory, variant.commits) for variant in variants]
        self._classes = classes
        settings = (
            *(query.segment, captions, query.tails, query.sources),
            *([its.as_json() for its in classes], query.max_segments),
        )
        self._depends_on = (
            split,
            *manifest_mark(data_dir),
            *marks,
            *settings,
            *selection_mark(query.where, data_dir, tars=tars),
        )
        self._num_rows = self._latents.num_samples + (num_captions_of(data_dir) if captions != "none" or classes else 0)
        opened = shared(
            lambda: open_segment_set(
                query,
                latents=self._latents,
                text_variant=self._text_variant,
                tars=self.tars,
                depends_on=self._depends_on,
            ),
            of=("segments", *self._depends_on),
            num_rows=self._num_rows,
            types=OPENED_TYPES,
            column="segments",
        )
        self.video_ids: pa.Array = opened.video_ids
        self.records: LatentRecords = opened.records
        self.tars.want(opened.records.array_place)
        self.segments: Segments = opened.segments
        self.text: TextMembers | None = opened.text
        self.captions: SegmentCaptions | None = opened.captions
        self.labels: SegmentLabels | None = opened.labels
        self._kept: NDArray[np.int64] | None = opened.kept
        self._opened: OpenedSegments = opened
        # Arrow would keep the memory that reading indexes and captions took.
        pa.default_memory_pool().release_unused()
        if not len(self):
            raise UserError(
                f"no segment of split {split!r} can be shown: {self.describe()}",
                hint="labels of captions come from prep manifest"
                if classes and len(self.segments)
                else "use a shorter segment" + (", or data with captions" if captions != "none" else ""),
            )

    def __len__(self) -> int:
        return self._num_before if self._kept is None else len(self._kept)

    @property
    def _num_before(self) -> int:
        """Number of samples without a limit per video."""
        return len(self.segments) if self._shown is None else len(self._shown)

    def rows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of samples in the captions or labels, which have one for each segment without a limit per video."""
        return samples if self._kept is None else self._kept[samples]

    @property
    def _shown(self) -> NDArray[np.int64] | None:
        """Numbers of the segments that are samples; None for all."""
        if self.captions is not None:
            return self.captions.segment
        return None if self.labels is None else self.labels.segment

    def segment_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The segments of samples."""
        rows = self.rows_of(samples)
        return rows if self._shown is None else self._shown[rows].astype(np.int64)

    def video_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The videos of samples."""
        return self.records.video_row[self.segments.chunk_of(self.segment_of(samples))].astype(np.int64)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in a set without captions."""
        return 0 if self.captions is None else int(self.captions.caption_id.max()) + 1

    def require_embeddings(self) -> None:
        """Raise UserError if stored texts are sequences, and a model takes one embedding each."""
        if self._text_variant is not None:
            require_embeddings(self._text_variant, self._data_dir)

    @property
    def mixing_facts(self) -> dict[str, str]:
        """Shape and VAE of the latents, and the encoder of stored embeddings."""
        recipe = self._latents.recipe
        name, weights = recipe.get("vae"), str(recipe.get("vae_sha256"))[:8]
        scaled = f"(x - {recipe.get('shift_factor') or 0}) * {recipe.get('scaling_factor')}"
        found = {"latents": str(self.records.shape), "VAE": f"{name} {weights}, scaled as {scaled}"}
        return found if self._text_variant is None else {**found, "text embeddings": encoder_of(self._text_variant)}

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return " and ".join(self._variant_names)

    @property
    def _variant_names(self) -> list[str]:
        return [variant.directory.name for variant in (self._latents, self._text_variant) if variant]

    def key(self, chunk: int) -> str:
        """Key of a chunk."""
        return self.records.key(chunk, self.video_ids)

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""
        shape, segments, captions = self.records.shape, self.segments, self.captions
        parts = [
            f"{counted(len(self), 'segment')} of {counted(segments.num_frames, 'frame')} ({shape}) "
            f"in {counted(len(self.records), 'chunk')} of split {self.split!r}"
        ]
        if self.records.num_unknown:
            parts.append(
                f"{counted(self.records.num_unknown, 'chunk')} of videos that the manifest does not name left out"
            )
        if segments.num_tails:
            what = "left out" if segments.tails == "drop" else "padded with zeros"
            parts.append(f"{counted(segments.num_tails, 'shorter tail')} {what}")
        if captions is not None:
            counts = {
                f"{counted(len(segments) - self._num_before, 'segment')} without captions left out": len(segments)
                - self._num_before,
                captions.sources.describe_excluded(captions.num_other_sources): captions.num_other_sources,
                f"{counted(captions.num_not_embedded, 'caption')} without embedding": captions.num_not_embedded,
                f"{counted(captions.num_not_selected, 'caption')} not selected": captions.num_not_selected,
                f"{counted(captions.num_not_shown, 'caption')} outside of all segments": captions.num_not_shown,
            }
            parts += [text for text, count in counts.items() if count]
        if self.labels is not None:
            parts += self._describe_labels(self.labels)
        if num_more := self._num_before - len(self):
            parts.append(f"{counted(num_more, 'further segment')} of long videos left out")
        parts += self._opened.remarks
        if self._stale:
            parts.append(self._stale)
        parts.append(self.tars.describe())
        return "; ".join(filter(None, parts))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the samples and their order, whatever shards they lie in, and of the captions' texts."""
        order = shared(
            self._order_sha256,
            of=("fingerprint", *self._depends_on),
            num_rows=self._num_rows,
            types=(),
            column="fingerprint",
        )
        return order if self.captions is None else set_fingerprint(order, self.captions.words_sha256)

    def _order_sha256(self) -> str:
        digest = hashlib.sha256(("\n".join(self._variant_names) + self._opened.where).encode())
        digest.update(pa.record_batch([self.video_ids], names=["video_id"]).serialize())
        arrays: list[NDArray[Any]] = [self.records.video_row, self.records.start_ms, self.segments.first]
        if self.captions is not None:
            captions = self.captions
            digest.update(f"{captions.sources.names} {captions.sources.weights.tolist()}".encode())
            arrays += [captions.segment, captions.choice.first_entry, captions.pair_caption, captions.caption_id]
        if self.labels is not None:
            digest.update(" ".join(str(its.as_json()) for its in self._classes).encode())
            arrays += [self.labels.segment, self.labels.label]
        if self._kept is not None:
            arrays.append(self._kept)
        for array in arrays:
            digest.update(f"{self.segments.num_frames} {array.dtype} {len(array)}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def request(self, samples: NDArray[np.int64], *, position: NDArray[np.int64], seed: int | None) -> SegmentRequests:
        """Requests for `samples` at `position`, each with one caption: drawn with `seed`, or the first one without."""
        captions, rows = self.captions, self.rows_of(samples)
        segment = self.segment_of(samples)
        chunk = self.segments.chunk_of(segment)
        frame = (segment - self.segments.first[chunk]) * self.segments.num_frames
        num_frames = np.minimum(self.records.num_frames[chunk] - frame, self.segments.num_frames)
        columns = {"position": position, "clip_id": samples.astype(np.int64)}
        text_place = None
        if captions is not None:
            choice = captions.choice
            entry = choice.first(rows) if seed is None else choice.draw(rows, position=position, seed=seed)
            caption = captions.pair_caption[entry]
            columns["caption_id"] = captions.caption_id[caption].astype(np.int64)
            text_place = None if captions.place is None else captions.place[caption]
            if captions.num_tokens is not None:
                columns["num_tokens"] = captions.num_tokens[caption].astype(np.int64)
        if self.labels is not None:
            columns["label"] = self.labels.label[rows, 0]
        if self.segments.tails == "pad":
            columns["num_frames"] = num_frames
        return SegmentRequests(columns, range(len(samples)), chunk, frame, num_frames, text_place)

    def _describe_labels(self, labels: SegmentLabels) -> list[str]:
        parts = [", ".join(its.describe(label) for its, label in zip(self._classes, labels.label.T, strict=True))]
        if num_without := len(self.segments) - len(labels.segment):
            parts.append(f"{counted(num_without, 'segment')} without label left out")
        if labels.remarks:
            parts.append(f"captions: {', '.join(labels.remarks)}")
        return [*parts, f"the caption that gives the label covers {labels.mean_share:.0%} of a segment on average"]

    def _other_video_variant(self, data_dir: Path) -> str:
        made_of, current = self._latents.recipe.get(VIDEO), current_variant(data_dir, VIDEO)
        if made_of is None or current is None or made_of == current:
            return ""
        return f"made of the chunks of {made_of}, and {current} is the current variant"
