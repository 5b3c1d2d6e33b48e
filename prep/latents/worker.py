"""Encode the chunks of one shard in a worker, make their samples, and check samples for `prep verify --deep`.

Chunks are decoded ahead of the model, and batches span several chunks. Latents are stored as float16, or as the bits of
bfloat16 in uint16, because npy has no bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.prep.core.chunk_input import Chunk, Chunks
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.engines import worker_threads
from clipmill.prep.latents.batches import (
    BatchPart,
    chunk_squares,
    decode_blocks,
    encode_chunks,
    read_chunk_video,
)
from clipmill.prep.latents.frames import flatten_squares, generator, segments_of
from clipmill.prep.latents.recipe import COMPRESSED, EXTENSION, Encoding, LatentsSettings
from clipmill.prep.latents.vae import Device, open_encoder
from clipmill.prep.latents.weights import find_vae
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.npy import compress_frame, decompress_frame, load_npy, npy_bytes
from clipmill.shards.writer import Sample

_BFLOAT16_EXPONENT = 0x7F80
_ITEM_BYTES = 2  # size of a value in both data types
_STORED_DTYPES = {"float16": "<f2", "bfloat16": "<u2"}


@dataclass(frozen=True)
class EncoderOptions:
    """Options of workers that are not part of the recipe.

    Attributes:
        device: Device of the model.
        batch: Batch size of the model in frames; a video VAE encodes at least one segment.
        num_threads: Number of model threads, and number of chunks to decode in parallel; None for the number of threads
            that the engine has assigned to the worker.
    """

    device: Device
    batch: int
    num_threads: int | None


def make_latents(chunks: Chunks, recipe: Recipe[LatentsSettings]) -> Iterator[Sample | SourceFailure]:
    """Yield the sample of each chunk, or the reason why it has no sample.

    Raises:
        UserError: The VAE cannot be loaded, or its weights differ from the weights in the plan.
    """
    options: EncoderOptions = chunks.options
    settings, num_threads = recipe.settings, worker_threads() if options.num_threads is None else options.num_threads
    vae = find_vae(settings.vae)
    if vae.sha256 != recipe.values["vae_sha256"]:
        raise UserError(
            f"the weights of {vae.name} on this node differ from the weights in the plan",
            hint="copy the weights to this node again",
        )
    encoding = Encoding(settings, vae)
    encoder = open_encoder(encoding, device=options.device, num_threads=num_threads)

    def encode(parts: list[BatchPart[Chunk]]) -> NDArray[np.float32]:
        noise = None
        if settings.posterior == "sample":
            # Draw the noise for each frame or segment separately, so that it does not depend on the batch.
            unit = "segment" if encoding.is_video else "frame"
            draws = [
                generator(settings.seed, part.chunk.content, f"{unit} {index}")
                for part in parts
                for index in range(part.first, part.first + len(part.pictures))
            ]
            noise = np.stack([draw.standard_normal(encoding.unit_shape, dtype=np.float32) for draw in draws])
        return encoder.encode([part.pictures for part in parts], noise=noise)

    read = partial(read_chunk_video, encoding=encoding)
    for encoded_chunk in encode_chunks(
        decode_blocks(chunks, read=read, num_threads=num_threads),
        resize=partial(encoder.resize, size=settings.size),
        encode=encode,
        batch=encoding.units_per_batch(options.batch),
    ):
        if encoded_chunk.latents is None:
            yield encoded_chunk.failure or SourceFailure(FailureCode.FRAMES_DIFFER, "the chunk has no frames to encode")
            continue
        stored = round_to_dtype(encoded_chunk.latents, dtype=settings.dtype)
        if is_finite(stored):
            yield latents_sample(encoded_chunk.chunk, stored, encoding=encoding)
        else:
            message = f"the latents contain non-finite values in {settings.dtype}"
            yield SourceFailure(FailureCode.NOT_FINITE, message)


def latents_sample(chunk: Chunk, stored: NDArray[np.generic], *, encoding: Encoding) -> Sample:
    """Return the sample of a chunk; `stored` is the output of `round_to_dtype`."""
    num_units, channels, *frames, height, width = stored.shape
    fields = {
        "num_frames": num_units * prod(frames),
        "fps_num": encoding.latent_fps.numerator,
        "fps_den": encoding.latent_fps.denominator,
        "channels": channels,
        "height": height,
        "width": width,
        "dtype": encoding.settings.dtype,
        "crops": flatten_squares(chunk_squares(chunk, encoding)),
        "source_frames": segments_of(chunk.length, encoding).lengths,
    }
    payload = npy_bytes(stored)
    is_compressed = encoding.settings.compression != "none"
    return chunk.sample({COMPRESSED: compress_frame(payload)} if is_compressed else {EXTENSION: payload}, fields)


def round_to_dtype(latents: NDArray[np.float32], *, dtype: Literal["float16", "bfloat16"]) -> NDArray[np.generic]:
    """Round latents to the nearest value of the stored data type, with ties to even.

    Out-of-range values become infinite; `is_finite` detects them.
    """
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return latents.astype(np.float16)
    bits = np.ascontiguousarray(latents).view(np.uint32)
    rounded_bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Set NaN explicitly, because rounding its bits could overflow or produce infinity.
    return np.where(np.isnan(latents), np.uint16(0x7FC0), rounded_bits.astype(np.uint16))


def is_finite(stored: NDArray[np.generic]) -> bool:
    """Return True if no value is NaN or infinite."""
    if stored.dtype == np.uint16:
        bits = stored.view(np.uint16) & _BFLOAT16_EXPONENT
        return bool((bits != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(stored.astype(np.float32)).all())


def check_latents(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Load the array of a sample, compare it with its index row, and check that its values are finite."""
    num_frames, *picture_shape = (row[name] for name in ("num_frames", "channels", "height", "width"))
    shape = (num_frames, *picture_shape)
    if num_segments := len(row["source_frames"]):
        shape = (num_segments, picture_shape[0], num_frames // num_segments, *picture_shape[1:])
    ((extension, payload),) = members.items()
    if extension == COMPRESSED:
        try:
            # The npy header takes one block (clipmill.shards.npy).
            payload = decompress_frame(payload, size_bytes=BLOCK_BYTES + prod(shape) * _ITEM_BYTES)
        except ValueError as error:
            return CheckedSample([(DeepCode.ARRAY_DIFFERS, f"{extension} cannot be decompressed: {error}")], 0)
    array = load_npy(payload)
    if array is None:
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, f"{extension} cannot be loaded")], 0)
    if array.shape != shape or array.dtype.str != _STORED_DTYPES.get(row["dtype"]):
        message = f"{extension} is {array.dtype} {array.shape}, but {row['dtype']} {shape} in the index"
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, message)], 0)
    problem = (DeepCode.ARRAY_DIFFERS, f"{extension} contains non-finite values")
    return CheckedSample([] if is_finite(array) else [problem], len(array))
