"""The captions that a chunk's json and txt members carry."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

_COLUMNS = ["caption_id", "video_id", "begin_s", "end_s", "text", "source"]


@dataclass(frozen=True)
class Caption:
    """One caption; `end_s` is None when it lasts to the end of the video."""

    caption_id: int
    begin_s: float
    end_s: float | None
    text: str
    source: str

    def overlaps(self, begin_s: Fraction, end_s: Fraction) -> bool:
        """Whether any moment of [begin_s, end_s) belongs to the caption."""
        return self.begin_s < end_s and (self.end_s is None or self.end_s > begin_s)


def captions_of(captions_file: Path, video_ids: Sequence[str]) -> dict[str, list[Caption]]:
    """Captions of some videos, each list in the order of time; reads the table in pieces and keeps only theirs."""
    wanted = pa.array(sorted(set(video_ids)), pa.string())
    found: dict[str, list[Caption]] = {}
    scanner = ds.dataset(captions_file, format="parquet").scanner(columns=_COLUMNS, use_threads=False)
    for batch in scanner.to_batches():
        ids = batch["video_id"].cast(pa.string())
        kept = pc.is_in(ids, value_set=wanted)
        if not pc.any(kept).as_py():
            continue
        for row in batch.filter(kept).to_pylist():
            end_s = row["end_s"] if row["end_s"] != float("inf") else None
            caption = Caption(row["caption_id"], row["begin_s"], end_s, row["text"], row["source"])
            found.setdefault(row["video_id"], []).append(caption)
    for captions in found.values():
        captions.sort(key=lambda caption: (caption.begin_s, caption.caption_id))
    return found
