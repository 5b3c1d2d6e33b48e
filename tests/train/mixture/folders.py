"""Data folders to mix, whose videos differ in every property that may differ within a mixture."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard

CHUNK_FRAMES = 20


@dataclass(frozen=True)
class Video:
    """A video of two chunks, with two captions that start with `words` and have the labels `moves`."""

    name: str
    split: str
    words: str
    fps: int
    size_px: int
    moves: tuple[str, str]


def videos(splits: dict[str, str], *, words: str, fps: int, size_px: int, moves: tuple[str, str]) -> list[Video]:
    """Return videos that differ in name and split."""
    return [Video(name, split, f"{words} {name}", fps, size_px, moves) for name, split in splits.items()]


NEAR = videos(
    {"a": "train", "b": "train", "c": "train", "d": "val", "e": "val"},
    words="near",
    fps=10,
    size_px=64,
    moves=("up", "down"),
)
FAR = videos({"a": "train", "q": "train", "r": "val", "s": "val"}, words="far", fps=5, size_px=48, moves=("up", "left"))


def write_folder(data_dir: Path, content: Iterable[Video]) -> Path:
    """Write a data folder of these videos."""
    content = list(content)
    for shard_id, split in enumerate(("train", "val")):
        samples = [
            video_sample(
                video.name,
                first * 1000 // video.fps,
                encode_chunk(first, CHUNK_FRAMES, fps=video.fps, size_px=video.size_px),
                fps=video.fps,
            )
            for video in content
            if video.split == split
            for first in (0, CHUNK_FRAMES)
        ]
        write_shard(data_dir, shard_id, samples, split=split)
    captions = [
        Caption(video.name, begin_s, end_s, f"{video.words} {what}", labels={"label_motion": move})
        for video in content
        for begin_s, end_s, what, move in ((0.0, 1.0, "begins", video.moves[0]), (1.2, 3.0, "goes on", video.moves[1]))
    ]
    write_captions(data_dir, {video.name: video.split for video in content}, captions)
    return data_dir
