"""Data folder of latents and text embeddings that a run on two columns can learn within seconds."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.train.latents.written import Caption, Chunk, Written, write_latents, write_text
from tests.train.tiny_data import write_captions

FRAME, WIDTH = (4, 8, 8), 24
COLUMNS = ("--input", "latents", "--text-tower", "frozen", "--model", "tiny")
FLAGS = (*COLUMNS, "--segment", "2s", "--num-frames", "2")


def generator(text: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def pattern_and_noise(chunk: Chunk) -> NDArray[np.float16]:
    """Return frames that combine the pattern of a video with noise."""
    pattern = generator(chunk.video_id).standard_normal(chunk.frame)
    noise = generator(chunk.key).standard_normal((chunk.num_frames, *chunk.frame))
    values: NDArray[np.float16] = (pattern + 0.5 * noise).astype(np.float16)
    return values


def unit_vector(text: str) -> NDArray[np.float16]:
    vector = generator(text).standard_normal(WIDTH)
    unit: NDArray[np.float16] = (vector / np.linalg.norm(vector)).astype(np.float16)
    return unit


def write_columns(folder: Path) -> Path:
    """Write eight videos of two chunks, each with its own caption, in train and again in val."""
    written = Written(folder)
    videos = {f"{split}{number}": split for split in ("train", "val") for number in range(8)}
    chunks = [[Chunk(name, start, 24, frame=FRAME) for start in (0, 6000)] for name in videos]
    captions = [
        Caption(name, 0.0, float("inf"), f"<pattern> of {name[-1]}", labels={"label_pattern": name[-1]})
        for name in videos
    ]
    write_captions(written.data_dir, videos, captions)
    # A video of val has the pattern of the train video with the same number.
    write_latents(written, chunks, values=lambda chunk: pattern_and_noise(_as_train(chunk)))
    write_text(written, captions, width=WIDTH, embed=unit_vector)
    return written.data_dir


def _as_train(chunk: Chunk) -> Chunk:
    return Chunk(f"train{chunk.video_id[-1]}", chunk.start_ms, chunk.num_frames, frame=chunk.frame)
