"""OpenCV: VideoCapture seeks to each frame by number."""

import numpy as np

from benchmarks.decode_peers.clip_set import Clip, crop_rgb
from benchmarks.decode_peers.server import serve_files


def read_path(path: str, clip: Clip) -> np.ndarray:
    """See `Reader.read`."""
    import cv2

    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    pictures = []
    for frame_number in clip.frames:
        capture.set(cv2.CAP_PROP_POS_FRAMES, frame_number)
        is_read, picture = capture.read()
        if not is_read:
            raise RuntimeError(f"{path}: frame {frame_number} cannot be read")
        pictures.append(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB))
    capture.release()
    return crop_rgb(pictures, clip)


if __name__ == "__main__":
    serve_files(read_path)
