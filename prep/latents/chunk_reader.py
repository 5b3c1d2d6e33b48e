"""Reading a chunk: which of its frames are encoded, and the frame at its end in the next chunk."""

from fractions import Fraction

from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.latents.frames import Square, frames_on_screen, segment_squares, segments_of
from clipmill.prep.latents.pieces import ChunkVideo, WantedFrames
from clipmill.prep.latents.recipe import Encoding


def read_chunk_video(chunk: Chunk, encoding: Encoding) -> ChunkVideo:
    """Read a chunk, and determine which frames and crops of it are encoded.

    Raises:
        SourceFailure: chunk_damaged, if its bytes or those of the next chunk differ from those committed.
    """
    segments, fps = segments_of(chunk.length, encoding), encoding.settings.fps_exact
    sources = [_wanted_frames(chunk, segments.frames)]
    if segments.has_border and chunk.next is not None:
        # The moment after the last one that this chunk shows, in the time of the next.
        num_shown = len(frames_on_screen(chunk["num_frames"], chunk_fps=chunk.fps, fps=fps))
        later_s = num_shown / fps - Fraction(chunk.next["start_ms"] - chunk["start_ms"], 1000)
        sources.append(_wanted_frames(chunk.next, [int(max(Fraction(0), later_s) * chunk.next.fps)]))
    return ChunkVideo(
        sources=sources,
        num_repeated=segments.num_repeated,
        segment_frames=encoding.segment_frames,
        squares=chunk_squares(chunk, encoding),
        is_video=encoding.is_video,
    )


def chunk_squares(chunk: Chunk, encoding: Encoding) -> list[Square]:
    """Return the crop of each segment of a chunk.

    Raises:
        SourceFailure: frames_differ, if an exact crop is larger than the frames.
    """
    segments = segments_of(chunk.length, encoding)
    num_segments = len(segments.lengths) or -(-len(segments.frames) // encoding.segment_frames)
    size = {"width": chunk["width"], "height": chunk["height"]}
    return segment_squares(num_segments, content=chunk.content, settings=encoding.settings, **size)


def _wanted_frames(chunk: Chunk, wanted: list[int]) -> WantedFrames:
    return WantedFrames(
        content=chunk.read(),
        fps=chunk.fps,
        packet_frame=chunk["packet_frame"],
        packet_flags=chunk["packet_flags"],
        wanted=wanted,
    )
