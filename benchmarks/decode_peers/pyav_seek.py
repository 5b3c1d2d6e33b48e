"""PyAV without a packet table: open the file, seek to the previous keyframe, and decode up to the requested frame."""

from fractions import Fraction

import numpy as np

from benchmarks.decode_peers.clip_set import FPS, Clip, crop_rgb
from benchmarks.decode_peers.server import serve_files


def read_path(path: str, clip: Clip) -> np.ndarray:
    """See `Reader.read`. Decoding continues from the last frame if there is no keyframe in between."""
    import av

    pictures = []
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        ticks_per_frame = 1 / (stream.time_base or Fraction(1)) / FPS
        start = stream.start_time or 0
        keys = [entry.timestamp for entry in stream.index_entries if entry.is_keyframe]
        now, decoded = None, container.decode(stream)
        for frame_number in clip.frames:
            wanted = start + round(frame_number * ticks_per_frame)
            if now is None or any(now < key <= wanted for key in keys):
                container.seek(wanted, stream=stream)
                decoded = container.decode(stream)
            frame = next(frame for frame in decoded if frame.pts is not None and frame.pts >= wanted)
            now = frame.pts
            pictures.append(frame.to_ndarray(format="rgb24"))
    return crop_rgb(pictures, clip)


if __name__ == "__main__":
    serve_files(read_path)
