"""Decoding from packets alone: no container is opened, and a decoder is made once for many chunks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
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
        """The frames in `packets`, by their presentation index; as `decode_each`."""
        found: dict[int, av.VideoFrame] = {}
        self.decode_each(codec=codec, extradata=extradata, packets=packets, use=found.__setitem__)
        return found

    def decode_each(
        self,
        *,
        codec: str,
        extradata: bytes,
        packets: Iterable[tuple[int, bytes | memoryview]],
        use: "Callable[[int, av.VideoFrame], None]",
    ) -> None:
        """Hands each whole frame in `packets` to `use` as soon as it comes out.

        It still lies in the processor's cache then. Where `use` keeps no frame, the decoder has few buffers, which it
        writes again and again.

        Args:
            codec: libav's name of it: h264, hevc, av1, vp9, mjpeg.
            extradata: of the stream.
            packets: (presentation index, bytes) in decode order; from a key packet on, with the references of each.
            use: takes the presentation index and the frame.

        Raises:
            av.FFmpegError: the decoder takes offence at a packet.
            ValueError: libav has no decoder of that name, or the frames are not shown in the order of their indices.
        """
        import av

        context = self._context(codec, extradata)
        last = -1

        def hand_over(frames: "list[av.VideoFrame]") -> None:
            nonlocal last
            for frame in frames:
                number = frame.pts or 0
                # Decoders give frames in order of presentation, which they know from the packets themselves.
                if number <= last:
                    raise ValueError(f"the packet table numbers frames {last}, {number} that are shown in this order")
                last = number
                if not frame.is_corrupt:
                    use(number, frame)

        try:
            for frame_number, content in packets:
                packet = av.Packet(content)  # type: ignore[arg-type]  # any buffer will do
                packet.pts = frame_number
                hand_over(context.decode(packet))
            hand_over(context.decode(None))
            context.flush_buffers()
        except BaseException:
            # What a broken packet has left in it must not reach the next chunk.
            del self._contexts[codec, extradata]
            raise

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
