"""The sample set of latents: the segments of a split, with the captions or labels they have."""

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.store import num_captions_of, read_videos
from shards.dataset import current_variant
from shards.format import BLOCK_BYTES
from shards.merged_table import merged_mark
from shards.npy import decompressed
from shards.reader import Variant
from train.data.caption_choice import CaptionChoice, Sources
from train.data.chunks import evenly_of_each, manifest_mark, videos_of_split
from train.data.classes import ClassList
from train.data.latents.captions import SegmentCaptions, pair_captions
from train.data.latents.labels import SegmentLabels, label_segments
from train.data.latents.requests import SegmentRequests
from train.data.latents.segments import (
    FrameShape,
    LatentRecords,
    Segments,
    Tails,
    cut,
    frames_of,
    read_records,
    seconds_of,
)
from train.data.node_cache import shared
from train.data.order import set_fingerprint
from train.data.remote import RemoteTars
from train.data.remote_maps import open_maps, remote_parts
from train.data.selection import Selection, selection_mark
from train.data.stored_text import TextMembers, TextRows, encoder_of, read_text_rows

# Segments alone, with embeddings that prep text has stored, or with the texts of captions.
Captions = Literal["none", "stored", "words"]


@dataclass(frozen=True)
class OpenedSegments:
    """What opening a set computes; addresses are relative to the mapped tars.

    Attributes:
        kept: rows of the samples among the segments that are shown; None for all of them.
        where: the expression of --where as a part of a fingerprint.
        remarks: how much it selects.
    """

    video_ids: pa.Array
    records: LatentRecords
    segments: Segments
    text: TextMembers | None
    captions: SegmentCaptions | None
    labels: SegmentLabels | None
    kept: NDArray[np.int64] | None
    where: str
    remarks: list[str]


_TYPES = (
    OpenedSegments,
    LatentRecords,
    FrameShape,
    Segments,
    TextMembers,
    SegmentCaptions,
    CaptionChoice,
    Sources,
    SegmentLabels,
)


class SegmentSet:
    """The samples of a split, ordered by (video, time).

    Memory: 40 bytes per chunk; with text also 8 per segment with captions, 12 per caption and 4 per (segment, caption)
    pair. A million chunks of three segments with four million captions take about 150 MB.

    Args:
        captions, tails, wanted_sources, classes, max_segments, where, tars: see `LatentLoader`.

    Raises:
        UserError: there is nothing to show, the columns do not belong together, or a file is damaged.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        segment: str,
        captions: Captions,
        tails: Tails,
        wanted_sources: str | None = None,
        classes: Sequence[ClassList] = (),
        max_segments: int | None = None,
        where: str | None = None,
        tars: RemoteTars | None = None,
    ) -> None:
        if not data_dir.is_dir():
            raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made")
        self.split = split
        if tars is not None:
            for column in ("latents", "text") if captions == "stored" else ("latents",):
                tars.files.copy_column(column)
        self._latents = Variant.open(data_dir, column="latents", tars=tars).whole()
        self._text_variant = Variant.open(data_dir, column="text", tars=tars).whole() if captions == "stored" else None
        self._stale = self._other_video_variant(data_dir)
        variants = [variant for variant in (self._latents, self._text_variant) if variant is not None]
        self.tars = open_maps(variants, tars, whole=self._text_variant)
        marks = [merged_mark(variant.directory, variant.commits) for variant in variants]
        self._classes = classes
        settings = (segment, captions, tails, wanted_sources, [its.as_json() for its in classes], max_segments)
        self._depends_on = (
            split,
            *manifest_mark(data_dir),
            *marks,
            *settings,
            *selection_mark(where, data_dir, tars=tars),
        )
        self._num_rows = self._latents.num_samples + (num_captions_of(data_dir) if captions != "none" or classes else 0)
        opened = shared(
            lambda: self._open(
                data_dir,
                segment=segment,
                captions=captions,
                tails=tails,
                wanted_sources=wanted_sources,
                max_segments=max_segments,
                where=where,
            ),
            of=("segments", *self._depends_on),
            num_rows=self._num_rows,
            types=_TYPES,
            column="segments",
        )
        base = self.tars.begin
        self.video_ids: pa.Array = opened.video_ids
        self.records: LatentRecords = replace(opened.records, base=base)
        for part in remote_parts(self.tars):
            part.want(base + opened.records.array_address)
        self.segments: Segments = opened.segments
        self.text: TextMembers | None = None if opened.text is None else replace(opened.text, base=base)
        self.captions: SegmentCaptions | None = opened.captions
        self.labels: SegmentLabels | None = opened.labels
        self._kept: NDArray[np.int64] | None = opened.kept
        self._opened: OpenedSegments | None = opened
        self._unpacked: tuple[int, NDArray[np.uint16]] | None = None
        # Arrow would keep the memory that reading indexes and captions took.
        pa.default_memory_pool().release_unused()
        if not len(self):
            raise UserError(
                f"no segment of split {split!r} can be shown: {self.describe()}",
                hint="labels of captions come from prep manifest"
                if classes and len(self.segments)
                else "use a shorter segment" + (", or data with captions" if captions != "none" else ""),
            )

    def _open(
        self,
        data_dir: Path,
        *,
        segment: str,
        captions: Captions,
        tails: Tails,
        wanted_sources: str | None,
        max_segments: int | None,
        where: str | None,
    ) -> "OpenedSegments":
        self.tars.require_files()
        video_ids = videos_of_split(data_dir, self.split)
        starts, num_latents = self.tars.starts - self.tars.begin, self._latents.num_shards
        records = read_records(
            self._latents,
            starts=starts[:num_latents],
            video_ids=video_ids,
            known_ids=read_videos(data_dir)["video_id"].combine_chunks(),
        )
        if records is None:
            raise self._nothing_of(self._latents, data_dir, video_ids)
        selection = Selection(
            where,
            data_dir,
            split=self.split,
            video_ids=video_ids,
            video_row=records.video_row,
            start_ms=records.start_ms,
            has_captions=captions != "none" or bool(self._classes),
            depends_on=self._depends_on,
        )
        records = records if selection.chunks is None else records.take(selection.rows)
        num_frames = frames_of(segment, records.shape)
        self._check_crops(segment)
        segments = cut(records, num_frames=num_frames, tails=tails)
        text: TextMembers | None = None
        its_captions: SegmentCaptions | None = None
        if captions != "none":
            rows: TextRows | None = None
            if self._text_variant is not None:
                if not self._text_variant.num_shards:
                    raise self._nothing_of(self._text_variant, data_dir, video_ids)
                text, rows = read_text_rows(self._text_variant, starts=starts[num_latents:], video_ids=video_ids)
                if not (text.video_row >= 0).any():
                    raise self._nothing_of(self._text_variant, data_dir, video_ids)
            its_captions = pair_captions(
                data_dir,
                records=records,
                segments=segments,
                text=rows,
                video_ids=video_ids,
                wanted_sources=wanted_sources,
                selection=selection,
            )
        labels: SegmentLabels | None = None
        if self._classes:
            labels = label_segments(
                data_dir,
                records=records,
                segments=segments,
                video_ids=video_ids,
                classes=self._classes,
                selection=selection,
            )
        shown = None if labels is None else labels.segment
        shown = its_captions.segment if its_captions is not None else shown
        kept: NDArray[np.int64] | None = None
        if max_segments is not None:
            numbers = np.arange(len(segments)) if shown is None else shown.astype(np.int64)
            videos = records.video_row[segments.chunk_of(numbers)].astype(np.int64)
            kept = evenly_of_each(videos, at_most=max_segments)
        return OpenedSegments(
            video_ids, records, segments, text, its_captions, labels, kept, selection.text, selection.remarks()
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

    @property
    def segment_bytes(self) -> int:
        """Size of a full segment."""
        return self.segments.num_frames * self.records.shape.frame_bytes

    def key(self, chunk: int) -> str:
        """Key of a chunk."""
        return self.records.key(chunk, self.video_ids)

    def frames(self, requests: SegmentRequests, number: int) -> NDArray[np.uint16]:
        """The frames of a request as bits: uint16 [T, C, h, w], T fewer than in a full segment for a tail."""
        shape, count = self.records.shape, int(requests.num_frames[number])
        size = (-1, shape.channels, shape.height, shape.width)
        address, chunk = int(requests.address[number]), int(requests.chunk[number])
        begin = self.records.base + int(self.records.array_address[chunk])
        if not shape.is_compressed:
            with self.tars.held(begin, 1):
                content = self.tars.bytes_at(address, count * shape.frame_bytes)
                found = np.frombuffer(content, np.uint16).reshape(size)
                return found if self.tars.is_whole else found.copy()
        first = (address - begin) // shape.frame_bytes
        return self._decompressed(chunk).reshape(size)[first : first + count]

    def _decompressed(self, chunk: int) -> NDArray[np.uint16]:
        kept = self._unpacked
        if kept is not None and kept[0] == chunk:
            return kept[1]  # segments of one chunk follow one another in evaluations
        packed = self.records.payload(chunk)
        size_bytes = BLOCK_BYTES + int(self.records.num_frames[chunk]) * self.records.shape.frame_bytes
        with self.tars.held(packed.address, packed.size_bytes):
            payload = decompressed(self.tars.bytes_at(packed.address, packed.size_bytes), size_bytes=size_bytes)
        bits = np.frombuffer(payload, np.uint16, offset=BLOCK_BYTES)
        self._unpacked = chunk, bits
        return bits

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""
        shape, segments, captions = self.records.shape, self.segments, self.captions
        parts = [
            f"{len(self):,} segments of {segments.num_frames} frames ({shape}) "
            f"in {len(self.records):,} chunks of split {self.split!r}"
        ]
        if self.records.num_unknown:
            parts.append(f"{self.records.num_unknown:,} chunks of videos that the manifest does not name left out")
        if segments.num_tails:
            what = "left out" if segments.tails == "drop" else "padded with zeros"
            parts.append(f"{segments.num_tails:,} shorter tails {what}")
        if captions is not None:
            counts = {
                f"{len(segments) - self._num_before:,} segments without captions left out": len(segments)
                - self._num_before,
                f"{captions.num_other_sources:,} captions of other sources left out": captions.num_other_sources,
                f"{captions.num_not_embedded:,} captions without embedding": captions.num_not_embedded,
                f"{captions.num_not_selected:,} captions not selected": captions.num_not_selected,
                f"{captions.num_not_shown:,} captions that overlap no segment": captions.num_not_shown,
            }
            parts += [text for text, count in counts.items() if count]
        if self.labels is not None:
            parts += self._describe_labels(self.labels)
        if num_more := self._num_before - len(self):
            parts.append(f"{num_more:,} further segments of long videos left out")
        parts += [] if self._opened is None else self._opened.remarks
        if self._stale:
            parts.append(self._stale)
        parts += [part.describe() for part in remote_parts(self.tars)]
        return "; ".join(parts)

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
        where = "" if self._opened is None else self._opened.where
        digest = hashlib.sha256(("\n".join(self._variant_names) + where).encode())
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
        caption_id = text_address = None
        if captions is not None:
            choice = captions.choice
            entry = choice.first(rows) if seed is None else choice.draw(rows, position=position, seed=seed)
            caption = captions.pair_caption[entry]
            caption_id = captions.caption_id[caption].astype(np.int64)
            if captions.address is not None:
                text_address = self.records.base + captions.address[caption]
        return SegmentRequests(
            sample=samples.astype(np.int64),
            position=position,
            chunk=chunk,
            address=self.records.base + self.records.array_address[chunk] + frame * self.records.shape.frame_bytes,
            num_frames=np.minimum(self.records.num_frames[chunk] - frame, self.segments.num_frames),
            caption_id=caption_id,
            text_address=text_address,
            label=None if self.labels is None else self.labels.label[rows, 0],
        )

    def _describe_labels(self, labels: SegmentLabels) -> list[str]:
        parts = [", ".join(its.describe(label) for its, label in zip(self._classes, labels.label.T, strict=True))]
        if num_without := len(self.segments) - len(labels.segment):
            parts.append(f"{num_without:,} segments without label left out")
        if labels.remarks:
            parts.append(f"captions: {', '.join(labels.remarks)}")
        return [*parts, f"the caption that gives the label covers {labels.mean_share:.0%} of a segment on average"]

    def _nothing_of(self, variant: Variant, data_dir: Path, video_ids: pa.Array) -> UserError:
        shards = variant.shards()
        there = pc.unique(shards[0].index["video_id"])[:3].to_pylist() if shards else []
        column = variant.directory.parent.name
        return UserError(
            f"{variant.directory} has no {column} of any video of split {self.split!r}: "
            f"the manifest names {', '.join(map(repr, video_ids[:3].to_pylist()))}, "
            f"the column {', '.join(map(repr, there)) or 'nothing'}",
            hint=f"run prep {column} --data {shlex.quote(str(data_dir))}, unless the column is of another data set",
        )

    def _check_crops(self, segment: str) -> None:
        recipe = self._latents.recipe
        if recipe.get("crop") != "random":
            return
        made = str(recipe.get("segment"))
        if (seconds_of(made) / seconds_of(segment)).denominator != 1:
            raise UserError(
                f"segments of {segment} would show two crops: {self._latents.directory} has a new one every {made}",
                hint=f"use segment={made!r} or a whole part of it, or latents with --crop centre",
            )

    def _other_video_variant(self, data_dir: Path) -> str:
        made_of, current = self._latents.recipe.get("video"), current_variant(data_dir, "video")
        if made_of is None or current is None or made_of == current:
            return ""
        return f"made of the chunks of {made_of}, and {current} is the current variant"
