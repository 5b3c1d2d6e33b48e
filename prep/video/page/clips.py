"""The clips of a page: the MP4 files of its chunks, in the page or in a folder beside it.

Clips of up to EMBEDDED_BYTES in all are in the page, which is then a single file. Otherwise `chunks.html` has them in
`chunks.files/`. A clip is a copy of the chunk, byte for byte, if browsers play the codec and all copies together take
at most COPIED_BYTES; otherwise it is a preview, a small H.264 encode. MJPEG in MP4 plays in no browser, HEVC only
in some.

The name of a clip has the checksum of its chunk, so that a page that is written again keeps the clips that it has, and
a page that is open never plays another chunk. Clips are written first, then the pages that name them; clips that no
page names any more are removed last.
"""

import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import size_text
from clipmill.manifests.keys import safe_video_id
from clipmill.manifests.publish import make_folder, publish_bytes, remove_temporaries

EMBEDDED_BYTES = 8_000_000
COPIED_BYTES = 256_000_000
_PLAYED = ("h264", "vp9", "av1")
_OURS = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{8}(-preview)?\.mp4|page-\d+\.html|all\.html")


@dataclass(frozen=True)
class Clip:
    """A clip of a page. `address` is a data URI, or the name of a file in the folder of the page."""

    address: str
    size_bytes: int
    is_preview: bool

    @property
    def is_embedded(self) -> bool:
        """Whether the clip is in the page."""
        return self.address.startswith("data:")


@dataclass(frozen=True)
class ClipPlan:
    """How the clips of a page are made. `why` says it in words."""

    is_preview: bool
    is_embedded: bool
    why: str


def plan_clips(codec: str, *, total_bytes: int) -> ClipPlan:
    """Return how the clips of a page are made whose chunks take `total_bytes`; `codec` is libav's name."""
    if codec not in _PLAYED:
        names = {"mjpeg": "browsers do not play MJPEG in MP4", "hevc": "only some browsers play HEVC"}
        return ClipPlan(True, False, names.get(codec, f"browsers may not play {codec}"))
    if total_bytes > COPIED_BYTES:
        return ClipPlan(True, False, f"copies of these chunks would take {size_text(total_bytes)}")
    return ClipPlan(False, total_bytes <= EMBEDDED_BYTES, "copies of the chunks, byte for byte")


class ClipFolder:
    """The folder of a page, `chunks.files/` beside `chunks.html`. Thread-safe.

    Raises:
        UserError: something else has its name.
    """

    def __init__(self, page: Path) -> None:
        self.path = page.with_name(f"{page.stem}.files")
        self._is_made = False
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is not a folder, and --html needs one of this name", hint="rename it")

    @property
    def address(self) -> str:
        """Relative address for the page."""
        return f"{quote(self.path.name)}/"

    def make(self) -> None:
        """Create the folder.

        Raises:
            UserError: it cannot be created.
        """
        try:
            make_folder(self.path)
            remove_temporaries(self.path, of=_is_ours)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}", hint="give a file in another folder with --html"
            ) from None

    def has(self, name: str, *, size_bytes: int | None = None) -> int:
        """Return the size of a clip that an earlier page has left; 0 if there is none, or one of another size."""
        with suppress(OSError):
            found = (self.path / name).stat().st_size
            return found if size_bytes in (None, found) else 0
        return 0

    def write(self, name: str, content: bytes) -> None:
        """Publish a clip.

        Raises:
            UserError: it cannot be written; a full disk, most likely.
        """
        try:
            publish_bytes(self.path / name, content)
        except OSError as error:
            left = shutil.disk_usage(self.path).free
            raise UserError(
                f"{self.path / name} cannot be written: {error.strerror}",
                hint=f"{size_text(left)} are free; show fewer chunks with --chunks, or write to another disk",
            ) from None

    def sweep(self, kept: Collection[str]) -> None:
        """Remove clips and pages of earlier runs except `kept`, and the folder if it is empty; other files stay."""
        with suppress(OSError):
            for path in list(self.path.iterdir()):
                if path.name not in kept and _is_ours(path.name):
                    path.unlink()
            self.path.rmdir()


def clip_name(key: str, crc32: int, *, is_preview: bool) -> str:
    """Return the file name of a clip, safe in any file system and address."""
    return f"{safe_video_id(key)}-{crc32:08x}{'-preview' if is_preview else ''}.mp4"


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None
