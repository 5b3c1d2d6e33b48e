"""Encoding the chunks of one shard in a worker: chunks are decoded ahead, and batches span chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.prep.core.chunk_input import Chunk, Chunks
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.engines import worker_threads
from clipmill.prep.latents.batches import PicturesOfChunk, encoded_chunks
from clipmill.prep.latents.chunk_reader import read_chunk_video
from clipmill.prep.latents.frames import generator
from clipmill.prep.latents.pieces import pieces_in_order
from clipmill.prep.latents.recipe import Encoding, LatentsSettings
from clipmill.prep.latents.sample import as_stored, is_finite, latents_sample
from clipmill.prep.latents.vae import Device, open_encoder
from clipmill.prep.latents.weights import find_vae
from clipmill.shards.writer import Sample


@dataclass(frozen=True)
class EncoderUse:
    """How workers encode, without effect on what is stored.

    Attributes:
        batch: Batch size of the model in frames; a VAE of videos encodes one segment at least.
        num_threads: Number of the model's threads, and of chunks decoded in parallel; None for what the engine has
            assigned to the worker.
    """

    device: Device
    batch: int
    num_threads: int | None


def make_latents(chunks: Chunks, recipe: Recipe[LatentsSettings]) -> Iterator[Sample | SourceFailure]:
    """Yield the sample of each chunk, or why there is none."""
    use: EncoderUse = chunks.use
    settings, num_threads = recipe.settings, worker_threads() if use.num_threads is None else use.num_threads
    vae = find_vae(settings.vae)
    if vae.sha256 != recipe.values["vae_sha256"]:
        raise UserError(f"the weights of {vae.name} on this node differ from those of the plan", hint="copy them again")
    encoding = Encoding(settings, vae)
    encoder = open_encoder(encoding, device=use.device, num_threads=num_threads)

    def encode(parts: list[PicturesOfChunk[Chunk, Any]]) -> NDArray[np.float32]:
        noise = None
        if settings.posterior == "sample":
            # The noise is drawn frame by frame or segment by segment, so that it does not depend on the batch.
            unit = "segment" if encoding.is_video else "frame"
            draws = [
                generator(settings.seed, part.chunk.content, f"{unit} {number}")
                for part in parts
                for number in range(part.first, part.first + len(part.pictures))
            ]
            noise = np.stack([draw.standard_normal(encoding.unit_shape, dtype=np.float32) for draw in draws])
        return encoder.encode([part.pictures for part in parts], noise=noise)

    read = partial(read_chunk_video, encoding=encoding)
    for done in encoded_chunks(
        pieces_in_order(chunks, read=read, num_threads=num_threads),
        resized=partial(encoder.resized, size=settings.size),
        encode=encode,
        batch=encoding.units_per_batch(use.batch),
    ):
        if done.latents is None:
            yield done.failure or SourceFailure(FailureCode.FRAMES_DIFFER, "no frames")
            continue
        stored = as_stored(done.latents, dtype=settings.dtype)
        if is_finite(stored):
            yield latents_sample(done.chunk, stored, encoding=encoding)
        else:
            message = f"the latents contain non-finite values in {settings.dtype}"
            yield SourceFailure(FailureCode.NOT_FINITE, message)
