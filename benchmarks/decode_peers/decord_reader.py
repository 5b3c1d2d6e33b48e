"""decord: a VideoReader per clip; `get_batch` returns the frames, and OpenCV crops them."""

import numpy as np

from benchmarks.decode_peers.clip_set import Clip, crop_rgb
from benchmarks.decode_peers.server import serve_files


def read_path(path: str, clip: Clip) -> np.ndarray:
    """See `Reader.read`."""
    import decord

    reader = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
    return crop_rgb(reader.get_batch(list(clip.frames)).asnumpy(), clip)


if __name__ == "__main__":
    serve_files(read_path)
