"""Opening the captions of a manifest by span: every rank maps the two files, the one that computes verifies them."""

import mmap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import report_lost_pages
from clipmill.manifests.store import manifest_dir, read_consistently, read_videos
from clipmill.manifests.table_files import MAPPED_FILES, DamagedManifest, table_path


class StoredCaptions(CaptionSpans):
    """The captions of a manifest as it was when they were opened; their files are verified by `verify` alone.

    Args:
        paths: of MAPPED_FILES.
        recorded: the entry of each in manifest.json.
    """

    def __init__(self, paths: Sequence[Path], recorded: Sequence[Mapping[str, Any]]) -> None:
        self._paths, self._recorded = paths, recorded
        stats = [path.stat() for path in paths]
        self.mark = tuple((one.st_size, one.st_mtime_ns, one.st_ino) for one in stats)
        self._buffers = [_map_file(path) for path in paths]
        super().__init__(*map(pa.py_buffer, self._buffers))

    def verify(self) -> None:
        for path, recorded, buffer in zip(self._paths, self._recorded, self._buffers, strict=True):
            if zlib.crc32(buffer) != recorded["crc32"]:
                raise DamagedManifest(path, "its checksum does not match manifest.json")
            buffer.madvise(mmap.MADV_DONTNEED)  # pages of the cache, which would count as memory of this process


def open_stored_captions(data_dir: Path) -> StoredCaptions:
    """Map the captions of the current manifest; they stay the same if another one is written meanwhile.

    Raises:
        UserError: there is no manifest, or a file is missing or of another length.
    """

    def read(manifest: dict[str, Any]) -> StoredCaptions:
        folder = manifest_dir(data_dir)
        paths = [table_path(folder, name, manifest=manifest, has_checksum=False) for name in MAPPED_FILES]
        return StoredCaptions(paths, [manifest["tables"][name] for name in MAPPED_FILES])

    return read_consistently(data_dir, read)


def rows_of_split(data_dir: Path, split: str, *, video_ids: pa.Array) -> NDArray[np.int32]:
    """For each video of the manifest its row in `video_ids`, those of a split; -1 for other videos.

    Raises:
        UserError: these are not the videos of the split: another manifest was written meanwhile.
    """
    videos = read_videos(data_dir, columns=["video_id", "split"])
    is_own = pc.equal(videos["split"], split)
    if not videos["video_id"].filter(is_own).equals(pa.chunked_array([video_ids])):
        raise UserError(f"the manifest of {data_dir} was replaced while it was read", hint="run the command again")
    is_own = is_own.to_numpy()
    return np.where(is_own, np.cumsum(is_own) - 1, -1).astype(np.int32)


def _map_file(path: Path) -> mmap.mmap:
    report_lost_pages()
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
