"""Samples of `latents`: their member and index row, and checks.

Numbers are stored as float16, or as the bits of bfloat16 in uint16, since npy has no bfloat16.
"""

from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.latents.chunk_reader import chunk_squares
from clipmill.prep.latents.frames import as_numbers, segments_of
from clipmill.prep.latents.recipe import COMPRESSED, EXTENSION, Encoding
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.npy import compress_frame, decompress_frame, load_npy, npy_bytes
from clipmill.shards.writer import Sample

_BFLOAT16_EXPONENT = 0x7F80
_ITEM_BYTES = 2  # of both types; the header of so small an array is one block (clipmill.shards.npy)
_STORED = {"float16": "<f2", "bfloat16": "<u2"}


def latents_sample(chunk: Chunk, stored: NDArray[np.generic], *, encoding: Encoding) -> Sample:
    """Return the sample of a chunk; `stored` is the output of `as_stored`."""
    num_units, channels, *frames, height, width = stored.shape
    fields = {
        "num_frames": num_units * prod(frames),
        "fps_num": encoding.latent_fps.numerator,
        "fps_den": encoding.latent_fps.denominator,
        "channels": channels,
        "height": height,
        "width": width,
        "dtype": encoding.settings.dtype,
        "crops": as_numbers(chunk_squares(chunk, encoding)),
        "source_frames": segments_of(chunk.length, encoding).lengths,
    }
    payload = npy_bytes(stored)
    is_compressed = encoding.settings.compression != "none"
    return chunk.sample({COMPRESSED: compress_frame(payload)} if is_compressed else {EXTENSION: payload}, fields)


def as_stored(latents: NDArray[np.float32], *, dtype: Literal["float16", "bfloat16"]) -> NDArray[np.generic]:
    """Round to nearest, ties to even. Values out of range become infinite, which `is_finite` detects."""
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return latents.astype(np.float16)
    bits = np.ascontiguousarray(latents).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding the payload of a NaN could turn it into infinity, or overflow.
    return np.where(np.isnan(latents), np.uint16(0x7FC0), rounded.astype(np.uint16))


def is_finite(stored: NDArray[np.generic]) -> bool:
    """Return True if no value is NaN or infinite."""
    if stored.dtype == np.uint16:
        bits = stored.view(np.uint16) & _BFLOAT16_EXPONENT
        return bool((bits != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(stored.astype(np.float32)).all())


def check_latents(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Load the array of a sample and compare it with its index row."""
    num_frames, *picture = (row[name] for name in ("num_frames", "channels", "height", "width"))
    wanted = (num_frames, *picture)
    if num_segments := len(row["source_frames"]):
        wanted = (num_segments, picture[0], num_frames // num_segments, *picture[1:])
    ((extension, payload),) = members.items()
    if extension == COMPRESSED:
        try:
            payload = decompress_frame(payload, size_bytes=BLOCK_BYTES + prod(wanted) * _ITEM_BYTES)
        except ValueError as error:
            return CheckedSample([(DeepCode.ARRAY_DIFFERS, f"{extension} cannot be decompressed: {error}")], 0)
    array = load_npy(payload)
    if array is None:
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, f"{extension} cannot be loaded")], 0)
    if array.shape != wanted or array.dtype.str != _STORED.get(row["dtype"]):
        found = f"{extension} is {array.dtype} {array.shape}, but {row['dtype']} {wanted} in the index"
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, found)], 0)
    not_finite = (DeepCode.ARRAY_DIFFERS, f"{extension} contains non-finite values")
    return CheckedSample([] if is_finite(array) else [not_finite], len(array))
