"""Frames of committed chunks, whichever way their bytes are to be decoded."""

import threading
from typing import TYPE_CHECKING

from train.data.decoding.packets import PacketDecoder
from train.data.decoding.plain import PlainVideo
from train.data.decoding.reading import ChunkBytes
from train.data.failures import SampleFailed

if TYPE_CHECKING:
    import av

ChunkFrames = dict[int, "av.VideoFrame"]  # frames of one chunk, by presentation index


class ChunkDecoder:
    """Decodes chunks; each thread has contexts of its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    def decode(self, content: ChunkBytes) -> ChunkFrames:
        """The frames that `content` was read for.

        Raises:
            SampleFailed: the chunk cannot be decoded, or a frame does not come out.
        """
        import av

        try:
            found = self._decode(content)
        except (av.FFmpegError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise SampleFailed(content.key, reason="undecodable", detail=detail) from error
        if missing := sorted(content.frames - found.keys()):
            detail = f"frames {missing} do not come out of the decoder"
            raise SampleFailed(content.key, reason="frame_missing", detail=detail)
        return {frame: found[frame] for frame in content.frames}

    def _decode(self, content: ChunkBytes) -> ChunkFrames:
        if content.packets is None:
            return PlainVideo(content.whole).decode(content.frames)
        if not hasattr(self._local, "decoder"):
            self._local.decoder = PacketDecoder()
        found: ChunkFrames = self._local.decoder.decode(
            codec=content.codec, extradata=content.extradata, packets=content.packets
        )
        return found
