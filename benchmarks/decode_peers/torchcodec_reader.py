"""torchcodec: a VideoDecoder per clip, or per file with --keep-open; `get_frames_at`, and OpenCV crops the frames.

torchcodec needs ffmpeg's shared libraries. PyAV's wheel contains them under different names. `links_to_libraries`
creates links with the names that torchcodec expects, for LD_LIBRARY_PATH, so that no system installation is needed.
"""

import argparse
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_peers.clip_set import Clip, crop_rgb
from benchmarks.decode_peers.server import serve_files

_BUNDLED = re.compile(r"(?P<name>lib(?:av|sw)[a-z]+)-[0-9a-f]+\.so\.(?P<major>\d+)\.")


def links_to_libraries(python: Path, folder: Path) -> Path:
    """Fill `folder` with links to the libraries of PyAV in the environment of `python`; without PyAV, none."""
    folder.mkdir()
    for library in python.parent.parent.glob("lib/python*/site-packages/av.libs/*"):
        (folder / library.name).symlink_to(library)  # the libraries search for each other in their folder
        bundled = _BUNDLED.match(library.name)
        if bundled:
            (folder / f"{bundled['name']}.so.{bundled['major']}").symlink_to(library)
    return folder


def main() -> None:
    """Respond to requests; the command line contains the seek mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seek-mode", choices=["exact", "approximate"], required=True)
    parser.add_argument("--keep-open", action="store_true")
    arguments = parser.parse_known_args()[0]

    def open_decoder(path: str) -> Any:
        import torch
        from torchcodec.decoders import VideoDecoder

        torch.set_num_threads(1)
        try:
            return VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode=arguments.seek_mode)
        except RuntimeError as error:
            if "Could not load libtorchcodec" not in str(error):
                raise
            raise ImportError("torchcodec finds no shared libraries of ffmpeg") from error

    open_once = cache(open_decoder) if arguments.keep_open else open_decoder

    def read_path(path: str, clip: Clip) -> np.ndarray:
        return crop_rgb(open_once(path).get_frames_at(list(clip.frames)).data.numpy(), clip)

    serve_files(read_path)


if __name__ == "__main__":
    main()
