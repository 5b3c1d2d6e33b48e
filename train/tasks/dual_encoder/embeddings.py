"""Embed all clips and captions of a split, for evaluations that compare them.

Each rank embeds a part; `gather_embeddings` gives every rank all of them, in the order of the samples.

Shape suffixes: B samples of a batch, L their views, C channels, F frames of all views, H height, W width, E width of
the embeddings, N all samples, M distinct texts.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.errors import FailedWork
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.outcomes import FailedSample, LoadedBatch
from clipmill.train.device.transfer import send
from clipmill.train.distributed.world import World, gather_uneven
from clipmill.train.models.text import Tokenize

_KEY_BYTES = 8
_TEXTS_AT_ONCE = 256

EmbedTexts = Callable[[Sequence[str]], NDArray[np.float32]]


class TakesBatches(Protocol):
    """A task whose model embeds clips and captions."""

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips and captions of a batch, as the model takes them."""
        ...


@dataclass(frozen=True)
class Embeddings:
    """One row for each sample that could be decoded.

    Attributes:
        video: float32 [N, E], unit length.
        text: float32 [N, E], unit length.
        text_key: int64 [N], equal for equal tokens, or equal stored embeddings.
        caption_id: int64 [N], as in the manifest.
        samples: int64 [N], indices of the samples.
        num_failed: number of samples that could not be decoded, after `gather_embeddings` of all ranks.
        failed: those of this rank.
    """

    video: NDArray[np.float32]
    text: NDArray[np.float32]
    text_key: NDArray[np.int64]
    caption_id: NDArray[np.int64]
    samples: NDArray[np.int64]
    num_failed: int = 0
    failed: tuple[FailedSample, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)


@torch.no_grad()  # not inference_mode: tensors that a model caches, such as masks, are used in training too
def embed_all(
    task: TakesBatches, model: nn.Module, batches: Iterable[LoadedBatch], *, device: torch.device, num_clips: int = 1
) -> Embeddings:
    """Run a model in evaluation mode on all batches of this rank.

    Args:
        num_clips: temporal views of each clip, one after another in the frames of a batch. The embedding of a clip is
            the normalised mean of the unit-length embeddings of its views.

    Raises:
        FailedWork: an embedding is not finite.
    """
    parts: list[tuple[NDArray[np.generic], ...]] = []
    failed: list[FailedSample] = []
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch: Batch = to_device(loaded.batch, device)
        clips_BCFHW, captions = task.inputs(batch, is_training=False)
        views_LCTHW = clips_BCFHW.unflatten(2, (num_clips, -1)).transpose(1, 2).flatten(0, 1)
        video_LE, text_BE = model(views_LCTHW, captions)
        video_BE = video_LE.float()
        if num_clips > 1:
            video_BE = nn.functional.normalize(video_BE.unflatten(0, (-1, num_clips)).mean(dim=1), dim=-1)
        ids = (batch["caption_id"], batch["position"])
        parts.append(
            (
                video_BE.cpu().numpy(),
                text_BE.float().cpu().numpy(),
                text_keys(captions.cpu().numpy()),
                # Copied: later batches reuse the buffers.
                *(one.cpu().clone().numpy() for one in ids),
            )
        )
    found = _join_embeddings(parts, failed)
    num_bad = int((~np.isfinite(found.video).all(axis=1) | ~np.isfinite(found.text).all(axis=1)).sum())
    if num_bad:
        raise FailedWork(f"{num_bad} of {len(found)} embeddings are not finite: the weights have diverged")
    return found


def _join_embeddings(parts: list[tuple[NDArray[np.generic], ...]], failed: list[FailedSample]) -> Embeddings:
    no_rows, no_ids = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else []
    video, text, text_key, caption_id, samples = columns or (no_rows, no_rows, no_ids, no_ids, no_ids)
    return Embeddings(video, text, text_key, caption_id, samples, len(failed), tuple(failed))


@torch.no_grad()
def embed_texts(
    embed: Callable[[torch.Tensor], torch.Tensor], texts: Sequence[str], *, tokenize: Tokenize, device: torch.device
) -> NDArray[np.float32]:
    """Unit-length embeddings of texts by a text tower, float32 [N, E].

    Args:
        embed: token ids [B, L] to unit-length embeddings [B, E].
    """
    parts = []
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        tokens = np.stack([tokenize(text) for text in texts[begin : begin + _TEXTS_AT_ONCE]])
        parts.append(embed(send(tokens, device)).float().cpu().numpy())
    return np.concatenate(parts)


def text_keys(text_NX: NDArray[np.generic]) -> NDArray[np.int64]:
    """A hash of each text, int64 [N], from its tokens or its stored embedding."""
    rows = np.ascontiguousarray(text_NX)
    digests = (hashlib.blake2b(row.tobytes(), digest_size=_KEY_BYTES).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def distinct_texts(text_key_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row of the first caption of each distinct text [M], text of each caption [N]), in order of appearance."""
    _, first, text_of = np.unique(text_key_N, return_index=True, return_inverse=True)
    order = np.argsort(first)
    new_number = np.empty_like(order)
    new_number[order] = np.arange(len(order))
    return first[order], new_number[text_of.reshape(-1)]


def gather_embeddings(found: Embeddings, world: World, *, device: torch.device) -> Embeddings:
    """The embeddings of all ranks in the order of the samples, on every rank; collective.

    Ranks may have different numbers of samples, or none.

    Raises:
        FailedWork: no rank has any.
    """

    def gather_rows(rows: NDArray[Any]) -> NDArray[Any]:
        return gather_uneven(send(rows, device), world).cpu().numpy()

    num_failed = int(world.gather(torch.tensor([found.num_failed], device=device)).sum())
    samples = gather_rows(found.samples)
    if not len(samples):
        detail = f"; the first: {found.failed[0].detail}" if found.failed else ""
        raise FailedWork(f"none of the samples to evaluate could be decoded{detail}")
    order = np.argsort(samples, kind="stable")
    return replace(
        found,
        video=gather_rows(found.video)[order],
        text=gather_rows(found.text)[order],
        text_key=gather_rows(found.text_key)[order],
        caption_id=gather_rows(found.caption_id)[order],
        samples=samples[order],
        num_failed=num_failed,
    )
