"""Embeddings of every clip and caption of a split, for evaluations that compare them.

Ranks embed a part each; `gathered` gives every rank the whole, in the order of the samples.

Shape suffixes: B samples of a batch, L looks at them, C channels, F frames of all looks, H height, W width, E width of
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

from manifests.errors import FailedWork
from train.data.batch import Batch, to_device
from train.data.outcomes import FailedSample, LoadedBatch
from train.distributed.world import World, gather_uneven
from train.models.text import load_tokenizer

_KEY_BYTES = 8
_TEXTS_AT_ONCE = 256


class TakesBatches(Protocol):
    """A task whose model embeds clips and captions."""

    def inputs(self, batch: Batch, *, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips and captions of a batch, as the model takes them."""
        ...


@dataclass(frozen=True)
class Embeddings:
    """One row for each sample that could be had.

    Attributes:
        video: float32 [N, E], unit length.
        text: float32 [N, E], unit length.
        text_key: int64 [N], equal where the texts are equal to a text tower (or the stored embeddings are).
        caption_id: int64 [N], of the manifest.
        samples: int64 [N], numbers of the samples.
        num_failed: samples of all ranks that could not be had.
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


@torch.no_grad()  # not inference_mode: what a model keeps of a pass, as masks, must serve training too
def embed_all(
    task: TakesBatches, model: nn.Module, batches: Iterable[LoadedBatch], *, device: torch.device, num_clips: int = 1
) -> Embeddings:
    """Runs the model, which is in evaluation mode, over all batches of this rank.

    Args:
        num_clips: looks at each clip, one after another in the frames of a batch. A video embedding is then the mean
            of its looks' unit-length embeddings, of unit length again.

    Raises:
        FailedWork: an embedding is no number.
    """
    parts: list[tuple[NDArray[np.generic], ...]] = []
    failed: list[FailedSample] = []
    for loaded in batches:
        failed += loaded.failed
        if not loaded.batch:
            continue
        batch: Batch = to_device(loaded.batch, device)
        clips_BCFHW, captions = task.inputs(batch, is_training=False)
        looks = clips_BCFHW.unflatten(2, (num_clips, -1)).transpose(1, 2).flatten(0, 1)
        video_LE, text_BE = model(looks, captions)
        video_BE = video_LE.float()
        if num_clips > 1:
            video_BE = nn.functional.normalize(video_BE.unflatten(0, (-1, num_clips)).mean(dim=1), dim=-1)
        numbers = (batch["caption_id"], batch["position"])
        parts.append(
            (
                video_BE.cpu().numpy(),
                text_BE.float().cpu().numpy(),
                text_keys(captions.cpu().numpy()),
                # Copied: the buffers of a batch are used again for a later one.
                *(number.cpu().clone().numpy() for number in numbers),
            )
        )
    found = _joined(parts, failed)
    num_bad = int((~np.isfinite(found.video).all(axis=1) | ~np.isfinite(found.text).all(axis=1)).sum())
    if num_bad:
        raise FailedWork(f"{num_bad} of {len(found)} embeddings are not finite: the weights have diverged")
    return found


def _joined(parts: list[tuple[NDArray[np.generic], ...]], failed: list[FailedSample]) -> Embeddings:
    nothing, no_numbers = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else []
    video, text, text_key, caption_id, samples = columns or (nothing, nothing, no_numbers, no_numbers, no_numbers)
    return Embeddings(video, text, text_key, caption_id, samples, len(failed), tuple(failed))


@torch.no_grad()
def embed_texts(
    embed: Callable[[torch.Tensor], torch.Tensor], texts: Sequence[str], *, device: torch.device
) -> NDArray[np.float32]:
    """Unit-length embeddings of texts by a trained text tower, float32 [N, E].

    Args:
        embed: token ids [B, L] to unit-length embeddings [B, E].
    """
    tokenize = load_tokenizer()
    parts = []
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        tokens = np.stack([tokenize(text) for text in texts[begin : begin + _TEXTS_AT_ONCE]])
        parts.append(embed(torch.from_numpy(tokens).to(device)).float().cpu().numpy())
    return np.concatenate(parts)


def text_keys(text_NX: NDArray[np.generic]) -> NDArray[np.int64]:
    """A number for each text, int64 [N], from what a text tower is given for it, or from its stored embedding."""
    rows = np.ascontiguousarray(text_NX)
    digests = (hashlib.blake2b(row.tobytes(), digest_size=_KEY_BYTES).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)


def distinct_texts(text_key_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows of the first caption of each distinct text [M], text of each caption [N]), texts in order of appearance."""
    _, first, text_of = np.unique(text_key_N, return_index=True, return_inverse=True)
    order = np.argsort(first)
    new_number = np.empty_like(order)
    new_number[order] = np.arange(len(order))
    return first[order], new_number[text_of.reshape(-1)]


def gathered(found: Embeddings, world: World, *, device: torch.device) -> Embeddings:
    """The embeddings of all ranks in the order of the samples, on every rank.

    Ranks may have different numbers of them, or none.

    Raises:
        FailedWork: no rank has any.
    """

    def whole(rows: NDArray[Any]) -> NDArray[Any]:
        return gather_uneven(torch.from_numpy(rows).to(device), world).cpu().numpy()

    num_failed = int(world.gather(torch.tensor([found.num_failed], device=device)).sum())
    samples = whole(found.samples)
    if not len(samples):
        detail = f"; the first: {found.failed[0].detail}" if found.failed else ""
        raise FailedWork(f"none of the samples to evaluate could be decoded{detail}")
    order = np.argsort(samples, kind="stable")
    return replace(
        found,
        video=whole(found.video)[order],
        text=whole(found.text)[order],
        text_key=whole(found.text_key)[order],
        caption_id=whole(found.caption_id)[order],
        samples=samples[order],
        num_failed=num_failed,
    )
