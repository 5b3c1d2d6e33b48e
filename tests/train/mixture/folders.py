"""Data folders to mix, of the same shape but for what the folders of a mixture may differ in."""

from pathlib import Path

from tests.train.tiny_data import Caption, encode_chunk, video_sample, write_captions, write_shard

CHUNK_FRAMES = 20


def write_folder(data_dir: Path, splits: dict[str, str], *, fps: int, size_px: int, moves: tuple[str, str]) -> Path:
    """Videos of two chunks, each with two captions and the labels `moves`."""
    for shard_id, split in enumerate(("train", "val")):
        samples = [
            video_sample(name, first * 1000 // fps, encode_chunk(first, CHUNK_FRAMES, fps=fps, size_px=size_px), fps=fps)
            for name, of in splits.items()
            if of == split
            for first in (0, CHUNK_FRAMES)
        ]
        write_shard(data_dir, shard_id, samples, split=split)
    captions = [
        Caption(name, begin_s, end_s, f"{data_dir.name}: {name} {what}", labels={"label_motion": move})
        for name in splits
        for begin_s, end_s, what, move in ((0.0, 1.0, "begins", moves[0]), (1.2, 3.0, "goes on", moves[1]))
    ]
    write_captions(data_dir, splits, captions)
    return data_dir
