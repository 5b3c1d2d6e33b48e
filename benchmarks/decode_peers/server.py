"""Server loop of all variants: a persistent process that responds to requests (benchmarks.peer_process).

    {"do": "check", "set": "own", "kind": "...", "num_chunks": 2}
        read all clips once without timing, and check the clips of a few chunks: {"num_frames": 64, "num_wrong": 0}
    {"do": "time", "set": "own", "kind": "...", "at_least_s": 0.5}
        repeat complete passes over the clips for at least this time: {"num_clips": ..., "cpu_s": ..., "wall_s": ...}

CPU time is the time of the complete process, including the threads of libraries.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.decode_peers.clip_set import Clip, chunk_path, read_clips
from benchmarks.decode_peers.frame_check import ChunkFrames, num_wrong_rgb
from benchmarks.peer_process import answer_requests


class Reader(Protocol):
    """Reader of the clips in a set of chunks, with one decoder."""

    def read(self, clip: Clip) -> Any:
        """Read the frames of a clip, cropped and resized."""
        ...

    def num_wrong(self, clip: Clip, found: Any, frames: ChunkFrames) -> int:
        """Count the frames in `found`, from `read`, that are not the requested frames of the chunk's `frames`."""
        ...


class RgbReader:
    """Reader that opens the file of the chunk for each clip, and returns RGB."""

    def __init__(self, folder: Path, name: str, read_path: Callable[[str, Clip], np.ndarray]) -> None:
        self._folder, self._name, self._read_path = folder, name, read_path

    def read(self, clip: Clip) -> np.ndarray:
        """See `Reader.read`: uint8 [T, SIZE_PX, SIZE_PX, 3]."""
        return self._read_path(str(chunk_path(self._folder, self._name, clip.chunk)), clip)

    def num_wrong(self, clip: Clip, found: np.ndarray, frames: ChunkFrames) -> int:
        """See `Reader.num_wrong`."""
        return num_wrong_rgb(clip, found, frames)


def serve(open_reader: Callable[[Path, str], Reader]) -> None:
    """Respond to requests about the folder in the command line.

    Args:
        open_reader: Function that takes the folder and the name of a set, and returns a reader.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    answer_requests(_Server(parser.parse_known_args()[0].folder, open_reader).answer)


def serve_files(read_path: Callable[[str, Clip], np.ndarray]) -> None:
    """Call `serve` for a decoder that needs only a file and a clip."""

    def open_reader(folder: Path, name: str) -> Reader:
        return RgbReader(folder, name, read_path)

    serve(open_reader)


class _Server:
    def __init__(self, folder: Path, open_reader: Callable[[Path, str], Reader]) -> None:
        self._folder, self._open_reader = folder, open_reader
        self._clips = read_clips(folder)
        self._readers: dict[str, Reader] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        import cv2

        cv2.setNumThreads(1)
        name, clips = request["set"], self._clips[request["kind"]]
        if name not in self._readers:
            self._readers[name] = self._open_reader(self._folder, name)
        if request["do"] == "check":
            return self._check(name, clips, num_chunks=request["num_chunks"])
        return _time(self._readers[name], clips, at_least_s=request["at_least_s"])

    def _check(self, name: str, clips: list[Clip], *, num_chunks: int) -> dict[str, Any]:
        reader, num_frames, num_wrong = self._readers[name], 0, 0
        found = [reader.read(clip) for clip in clips]
        chunks = sorted({clip.chunk for clip in clips})
        for chunk in chunks[:: -(-len(chunks) // num_chunks)]:
            frames = ChunkFrames(chunk_path(self._folder, name, chunk))
            for clip, pictures in zip(clips, found, strict=True):
                if clip.chunk == chunk:
                    num_frames += len(clip.frames)
                    num_wrong += reader.num_wrong(clip, pictures, frames)
        return {"num_frames": num_frames, "num_wrong": num_wrong}


def _time(reader: Reader, clips: list[Clip], *, at_least_s: float) -> dict[str, Any]:
    num_clips = 0
    cpu_begin_s, begin_s = time.process_time(), time.perf_counter()
    while not num_clips or time.perf_counter() - begin_s < at_least_s:
        for clip in clips:
            reader.read(clip)
        num_clips += len(clips)
    return {
        "num_clips": num_clips,
        "cpu_s": time.process_time() - cpu_begin_s,
        "wall_s": time.perf_counter() - begin_s,
    }
