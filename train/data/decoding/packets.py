"""Decoding from packets alone: no container is opened, and a decoder is made once for many chunks."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import av
    from av.codec.context import CodecContext

_MAX_CONTEXTS = 8
# For AV1, libav's own decoder needs hardware; dav1d is the one that PyAV ships.
_DECODERS = {"av1": "libdav1d"}


class PacketDecoder:
    """Decodes packets of closed GOPs. Each thread has one of its own.

    A context is kept for each codec and extradata that came last: what it decodes depends on the packets alone.
    """

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, bytes], CodecContext] = OrderedDict()

    def decode(
        self, *, codec: str, extradata: bytes, packets: Iterable[tuple[int, bytes]]
    ) -> "dict[int, av.VideoFrame]":
        """The frames in `packets`, by their presentation index.

        Args:
            codec: libav's name of it: h264, hevc, av1, vp9, mjpeg.
            extradata: of the stream.
            packets: (presentation index, bytes) in decode order; from a key packet on, with the references of each.

        Raises:
            av.FFmpegError: the decoder takes offence at a packet.
            ValueError: libav has no decoder of that name.
        """
        import av

        context = self._context(codec, extradata)
        found: dict[int, av.VideoFrame] = {}
        try:
            for frame_number, content in packets:
                packet = av.Packet(content)
                packet.pts = frame_number
                for frame in context.decode(packet):
                    found[frame.pts] = frame
            for frame in context.decode(None):
                found[frame.pts] = frame
            context.flush_buffers()
        except BaseException:
            # What a broken packet has left in it must not reach the next chunk.
            del self._contexts[codec, extradata]
            raise
        return {number: frame for number, frame in found.items() if not frame.is_corrupt}

    def _context(self, codec: str, extradata: bytes) -> "CodecContext":
        import av

        context = self._contexts.get((codec, extradata))
        if context is None:
            context = av.CodecContext.create(_DECODERS.get(codec, codec), "r")
            context.thread_count = 1  # the loader's threads are the parallel part
            context.options = {"err_detect": "explode"}  # an error, not a patched picture
            context.extradata = extradata or None
            self._contexts[codec, extradata] = context
            if len(self._contexts) > _MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        else:
            self._contexts.move_to_end((codec, extradata))
        return context
