"""Decoding from packets alone: no container is opened, and a decoder is made once for many chunks."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import av
    from av import VideoCodecContext

_MAX_CONTEXTS = 8
# For AV1, libav's own decoder needs hardware; dav1d is the one that PyAV ships.
_DECODERS = {"av1": "libdav1d"}


class PacketDecoder:
    """Decodes packets of closed GOPs. Each thread has one of its own.

    A context is kept for each codec and extradata that came last: what it decodes depends on the packets alone.
    """

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, bytes], VideoCodecContext] = OrderedDict()

    def decode(
        self, *, codec: str, extradata: bytes, packets: Iterable[tuple[int, bytes | memoryview]]
    ) -> "dict[int, av.VideoFrame]":
        """The frames in `packets`, by their presentation index.

        Args:
            codec: libav's name of it: h264, hevc, av1, vp9, mjpeg.
            extradata: of the stream.
            packets: (presentation index, bytes) in decode order; from a key packet on, with the references of each.

        Raises:
            av.FFmpegError: the decoder takes offence at a packet.
            ValueError: libav has no decoder of that name, or the frames are not shown in the order of their indices.
        """
        import av

        context = self._context(codec, extradata)
        frames: list[av.VideoFrame] = []
        try:
            for frame_number, content in packets:
                packet = av.Packet(content)  # type: ignore[arg-type]  # any buffer will do
                packet.pts = frame_number
                frames += context.decode(packet)
            frames += context.decode(None)
            context.flush_buffers()
        except BaseException:
            # What a broken packet has left in it must not reach the next chunk.
            del self._contexts[codec, extradata]
            raise
        # Decoders give frames in order of presentation, which they know from the packets themselves.
        numbers = [frame.pts or 0 for frame in frames]
        if any(after <= before for before, after in pairwise(numbers)):
            raise ValueError(f"the packet table numbers frames {numbers} that are shown in this order")
        return {number: frame for number, frame in zip(numbers, frames, strict=True) if not frame.is_corrupt}

    def _context(self, codec: str, extradata: bytes) -> "VideoCodecContext":
        import av

        context = self._contexts.pop((codec, extradata), None)
        if context is None:
            new = av.CodecContext.create(_DECODERS.get(codec, codec), "r")
            if not isinstance(new, av.VideoCodecContext):
                raise ValueError(f"{codec} is no video codec")
            context = new
            context.thread_count = 1  # the loader's threads are the parallel part
            context.options = {"err_detect": "explode"}  # an error, not a patched picture
            context.extradata = extradata or None
            if len(self._contexts) == _MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts[codec, extradata] = context
        return context
