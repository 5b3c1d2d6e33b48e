"""What exports for trainers of video models share: segments with a caption each, and folders of one file per part.

A trainer's cache has files of its own for latents and texts. They are written into a new folder, which then takes the
place of the old one; files whose content has not changed are linked from it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import parse_json
from clipmill.manifests.store import read_captions, read_videos
from clipmill.prep.core.column_arrays import ColumnArrays
from clipmill.prep.exports.kinds import Exported, Progress
from clipmill.prep.exports.replacing import replaced_folder
from clipmill.shards.columns import LATENTS, TEXT, command_for, how_to_make

if TYPE_CHECKING:
    import torch

RECORD_FILE = "clipmill.json"
_SCHEMA = 1
_MAKE_TEXTS = f"make sequences: prep {command_for(TEXT)} --encoder t5:NAME"


@dataclass(frozen=True)
class Segment:
    """A segment of latents with the first caption that overlaps it.

    Attributes:
        name: key of its chunk, and its number in it.
        sample, number: row of the chunk in the table of latents, and the segment in its array.
        text_sample, text: row of the video in the table of texts, and the text in its array.
    """

    name: str
    sample: int
    number: int
    text_sample: int
    text: int
    caption: str


class Segments:
    """The segments of a split that have a caption, with a stored sequence where texts are exported.

    Args:
        with_texts: the classes of VAEs whose models take the sequences of a T5.

    Attributes:
        kind: class of the VAE.
        has_texts: whether captions have sequences.
        left_out: segments that have no such caption.

    Raises:
        UserError: a column is missing, or is not one of segments or sequences.
    """

    def __init__(self, data_dir: Path, *, split: str, with_texts: Collection[str]) -> None:
        self._data_dir, self._split = data_dir, split
        self.latents = ColumnArrays.open(data_dir, LATENTS)
        self.recipe = self.latents.variant.recipe
        if not self.recipe.get("latent_frames"):
            raise UserError(
                f"{self.latents.variant.directory} has latents of single frames",
                hint=f"make latents with the VAE of a video model: {how_to_make(LATENTS, data_dir)}",
            )
        self.kind, self.left_out = str(self.recipe["kind"]), 0
        self.has_texts = self.kind in with_texts
        if self.has_texts and not self.text_recipe.get("max_tokens"):
            raise UserError(
                f"{self.text.variant.directory} has embeddings of CLIP, and trainers take sequences", hint=_MAKE_TEXTS
            )
        self._stored = lru_cache(maxsize=1)(self.latents.array)
        self._stored_text = lru_cache(maxsize=1)(lambda sample: self.text.array(sample))

    def __iter__(self) -> Iterator[Segment]:
        """Yield the segments, ordered by video and time."""
        videos = read_videos(self._data_dir)
        video_ids, split = videos["video_id"].combine_chunks(), np.array(videos["split"].to_pylist())
        video_row, start_ms = self.latents.video_rows(video_ids), self.latents.numbers("start_ms")
        own = np.flatnonzero((video_row >= 0) & (split[video_row] == self._split))
        if not len(own):
            splits = ", ".join(sorted(set(split.tolist())))
            raise UserError(f"no latents of split {self._split!r}", hint=f"splits of the manifest: {splits}")
        frames, seconds = int(self.recipe["latent_frames"]), self._segment_s
        self.left_out = 0
        for sample in own[np.lexsort((start_ms[own], video_row[own]))].tolist():
            video_id = video_ids[int(video_row[sample])].as_py()
            for number in range(int(self.latents.numbers("num_frames")[sample]) // frames):
                begin_s = int(start_ms[sample]) / 1000 + number * seconds
                found = self._caption(video_id, begin_s, begin_s + seconds)
                if found is None:
                    self.left_out += 1
                else:
                    name = f"{chunk_key(video_id, int(start_ms[sample]))}-{number:02d}"
                    yield Segment(name, sample, number, *found)

    @cached_property
    def text(self) -> ColumnArrays:
        """The column of texts."""
        try:
            return ColumnArrays.open(self._data_dir, TEXT)
        except UserError as error:
            raise UserError(str(error), hint=_MAKE_TEXTS) from None

    @property
    def text_recipe(self) -> dict[str, Any]:
        """The recipe of the texts."""
        return self.text.variant.recipe

    @property
    def num_frames(self) -> int:
        """Number of frames in a segment."""
        return int(str(self.recipe["segment"])[:-1])

    def stored(self, segment: Segment) -> "torch.Tensor":
        """Return the latents as they are stored, [C, T', h, w]."""
        import torch

        array = torch.from_numpy(self._stored(segment.sample)[segment.number])
        return array.view(torch.bfloat16) if self.recipe["dtype"] == "bfloat16" else array

    def raw(self, segment: Segment) -> "torch.Tensor":
        """Return the latents as the VAE gives them, neither shifted nor scaled, float32 [C, T', h, w]."""
        import torch

        latents = self.stored(segment).float() / float(self.recipe["scaling_factor"])
        if None in self.statistics:
            return latents + float(self.recipe["shift_factor"] or 0)
        shape = (len(latents), -1, 1, 1)
        mean, std = (torch.tensor(one).view(shape)[:, : latents.shape[1]] for one in self.statistics)
        return latents * std + mean

    @property
    def statistics(self) -> tuple[list[float] | None, list[float] | None]:
        """Mean and standard deviation by which latents are normalised."""
        return self.recipe["latents_mean"], self.recipe["latents_std"]

    def sequence(self, segment: Segment) -> "torch.Tensor":
        """Return the vectors of the caption's tokens, float16 [L, D]."""
        import torch

        lengths = self.text.rows.table["row_tokens"][segment.text_sample].as_py()
        begin = sum(lengths[: segment.text])
        return torch.from_numpy(self._stored_text(segment.text_sample)[begin : begin + lengths[segment.text]].copy())

    def latents_mark(self, segment: Segment) -> str:
        """Return what the latents of a segment depend on."""
        return f"{self.latents.variant.directory.name} {self.latents.numbers('crc32')[segment.sample]} {segment.number}"

    def text_mark(self, segment: Segment) -> str:
        """Return what the text of a segment depends on."""
        crc32 = self.text.numbers("crc32")[segment.text_sample]
        return f"{self.text.variant.directory.name} {crc32} {segment.text} {segment.caption}"

    @property
    def _segment_s(self) -> float:
        table = self.latents.rows.table
        fps = table["fps_num"][0].as_py() / table["fps_den"][0].as_py()
        return float(self.recipe["latent_frames"] / fps)

    def _caption(self, video_id: str, begin_s: float, end_s: float) -> tuple[int, int, str] | None:
        """The first caption that overlaps a time and has a sequence: row of its video's texts, text, and words."""
        sample, row_of = self._texts.get(video_id, (0, {})) if self.has_texts else (0, None)
        for caption_id, its_begin_s, its_end_s, words in self._captions.get(video_id, ()):
            if its_begin_s < end_s and its_end_s > begin_s and (row_of is None or caption_id in row_of):
                return sample, row_of[caption_id] if row_of else 0, words
        return None

    @cached_property
    def _captions(self) -> dict[str, list[tuple[int, float, float, str]]]:
        table = read_captions(self._data_dir)
        names = ("video_id", "caption_id", "begin_s", "end_s", "text")
        found: dict[str, list[tuple[int, float, float, str]]] = {}
        for video_id, *caption in zip(*(table[name].to_pylist() for name in names), strict=True):
            found.setdefault(video_id, []).append(tuple(caption))
        return {video_id: sorted(captions) for video_id, captions in found.items()}

    @cached_property
    def _texts(self) -> dict[str, tuple[int, dict[int, int]]]:
        entries, codes = self.text.rows.dictionary_codes("video_id")
        ids: pa.Array = pc.take(entries, pa.array(codes))
        table = self.text.rows.table
        rows = (table[name].to_pylist() for name in ("caption_id", "caption_row"))
        return {
            video_id: (sample, dict(zip(*lists, strict=True)))
            for sample, (video_id, *lists) in enumerate(zip(ids.to_pylist(), *rows, strict=True))
        }


@dataclass(frozen=True)
class Part:
    """A file of a cache.

    Attributes:
        path: in the cache.
        mark: what its content depends on, besides the format.
        content: makes its bytes, piece by piece.
        segments: numbers of the segments that it holds.
        is_kept: whether it is linked while its mark is the same; otherwise the trainer may have written into it.
    """

    path: str
    mark: str
    content: Callable[[], Iterable[bytes]]
    segments: Sequence[int] = ()
    is_kept: bool = True


def write_cache(
    destination: Path,
    segments: Segments,
    parts: Callable[[list[Segment]], Iterable[Part]],
    *,
    form: str,
    show: Progress,
    trainers_own: str | None = None,
) -> Exported:
    """Write the files of all segments, unless those at `destination` are up to date; keep what others have put there.

    Args:
        parts: the files of the segments.
        form: name and version of the format.
        trainers_own: folder in which the trainer stores what it derives from these files, which is not kept.

    Raises:
        UserError: there is no segment with a caption, or something else is at `destination`.
    """
    old = _record_at(destination)
    found = list(segments)
    lacking = "a caption that has a sequence" if segments.has_texts else "a caption"
    left_out = {f"segments without {lacking}": segments.left_out}
    if not found:
        make = _MAKE_TEXTS if segments.has_texts else "give the videos captions"
        raise UserError(f"no segment has {lacking}", hint=f"{make}, or give another --split")
    wanted = list(parts(found))
    record = {part.path: hashlib.sha256(f"{_SCHEMA} {form} {part.mark}".encode()).hexdigest() for part in wanted}
    if old == record and all((destination / path).is_file() for path in record):
        return Exported("segment", len(found), 0, left_out)
    there = {digest: path for path, digest in old.items()}
    seen: set[int] = set()
    written: set[int] = set()
    with replaced_folder(destination) as folder:
        for part in wanted:
            path, source = folder / part.path, there.get(record[part.path]) if part.is_kept else None
            path.parent.mkdir(parents=True, exist_ok=True)
            if source is None or not _linked(destination / source, path):
                with path.open("wb") as file:
                    file.writelines(part.content())
                written.update(part.segments)
            seen.update(part.segments)
            show(len(seen), len(found))
        for path in destination.rglob("*"):
            name = path.relative_to(destination)
            is_own = str(name) in (*old, *record, RECORD_FILE) or name.parts[0] == trainers_own
            if not is_own and (path.is_file() or path.is_symlink()):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _linked(path, folder / name)
        (folder / RECORD_FILE).write_text(json.dumps({"format": form, "files": record}))
    return Exported("segment", len(found), len(written), left_out)


def torch_saved(values: dict[str, Any]) -> bytes:
    """Return what torch.save writes."""
    import torch

    content = BytesIO()
    torch.save(values, content)
    return content.getvalue()


def _linked(source: Path, path: Path) -> bool:
    """Link a file, or copy it where links are not possible; False if it is not there any more."""
    with suppress(FileNotFoundError):
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)
        return True
    return False


def _record_at(destination: Path) -> dict[str, str]:
    """The digests of the files of the cache at `destination`, by path; empty if nothing is there."""
    if not destination.exists():
        return {}
    try:
        files = parse_json((destination / RECORD_FILE).read_bytes())["files"]
        return {path: bytes.fromhex(digest).hex() for path, digest in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{destination} exists and was not written by prep export", hint="remove it, or give another name"
        ) from None
