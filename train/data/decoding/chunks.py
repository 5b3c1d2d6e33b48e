"""Frames of committed chunks, whichever way their bytes are to be decoded."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from train.data.decoding.packets import PacketDecoder
from train.data.decoding.plain import PlainVideo
from train.data.decoding.reading import ChunkBytes
from train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av

ChunkFrames = dict[int, "av.VideoFrame"]  # frames of one chunk, by presentation index


class ChunkDecoder:
    """Decodes chunks; each thread has contexts of its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    def decode(self, content: ChunkBytes) -> ChunkFrames:
        """The frames that `content` was read for; as `decode_each`."""
        found: ChunkFrames = {}
        self.decode_each(content, found.__setitem__)
        return found

    def decode_each(self, content: ChunkBytes, use: "Callable[[int, av.VideoFrame], None]") -> None:
        """Hands each frame that `content` was read for to `use`, with its index, when it comes out of the decoder.

        Raises:
            SampleFailed: the chunk cannot be decoded, or a frame does not come out.
        """
        import av

        missing = set(content.frames)

        def use_wanted(number: int, frame: av.VideoFrame) -> None:
            if number in missing:
                use(number, frame)
                missing.discard(number)

        try:
            self._decode(content, use_wanted)
        except (av.FFmpegError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise SampleFailed(content.key, reason="undecodable", detail=detail) from error
        if missing:
            detail = f"frames {sorted(missing)} do not come out of the decoder"
            raise SampleFailed(content.key, reason="frame_missing", detail=detail)

    def _decode(self, content: ChunkBytes, use: "Callable[[int, av.VideoFrame], None]") -> None:
        if content.packets is None:
            for number, frame in PlainVideo(content.whole).decode(content.frames).items():
                use(number, frame)
            return
        if not hasattr(self._local, "decoder"):
            self._local.decoder = PacketDecoder()
        decoder: PacketDecoder = self._local.decoder
        decoder.decode_each(codec=content.codec, extradata=content.extradata, packets=content.packets, use=use)
