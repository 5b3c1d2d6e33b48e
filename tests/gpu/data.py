"""Columns of latents and text embeddings for the tests of this folder, written through the real writers."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.train.latents.written import Caption, Chunk, Written, write_latents, write_text
from tests.train.tiny_data import write_captions

FRAME, WIDTH, CHUNK_FRAMES = (4, 8, 8), 24, 24


def write_latents_folder(folder: Path) -> Path:
    """Sixteen videos of two chunks; each video has a pattern that its caption names, and every frame noise."""
    written = Written(folder)
    videos = {f"video{number:02d}": "train" for number in range(16)}
    captions = [Caption(name, 0.0, float("inf"), f"the pattern of {name}") for name in videos]
    write_captions(written.data_dir, videos, captions)
    chunks = [[Chunk(name, start_ms, CHUNK_FRAMES, frame=FRAME) for start_ms in (0, 6000)] for name in videos]
    write_latents(written, chunks, values=_pattern_and_noise)
    write_text(written, captions, width=WIDTH, embed=_unit_vector)
    return written.data_dir


def _pattern_and_noise(chunk: Chunk) -> NDArray[np.float16]:
    pattern = _generator(chunk.video_id).standard_normal(chunk.frame)
    noise = _generator(chunk.key).standard_normal((chunk.num_frames, *chunk.frame))
    values: NDArray[np.float16] = (pattern + 0.5 * noise).astype(np.float16)
    return values


def _unit_vector(text: str) -> NDArray[np.float16]:
    vector = _generator(text).standard_normal(WIDTH)
    unit: NDArray[np.float16] = (vector / np.linalg.norm(vector)).astype(np.float16)
    return unit


def _generator(text: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
